"""Run one notebook in a kernel of this very interpreter, within one time limit."""

from __future__ import annotations

import os
import re
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from subprocess import Popen
from types import FrameType
from typing import Any, cast

import papermill
from jupyter_client.kernelspec import KernelSpec
from jupyter_client.manager import AsyncKernelManager
from jupyter_client.provisioning.local_provisioner import LocalProvisioner
from papermill.clientwrap import PapermillNotebookClient
from papermill.engines import Engine, papermill_engines
from papermill.log import logger
from traitlets import Instance

ENGINE = KERNEL = "specmortem"


def execute(
    notebook: Path,
    executed: Path,
    parameters: Mapping[str, Any],
    cwd: Path,
    timeout_s: float | None = None,
    on_section: Callable[[str], None] = lambda title: None,
) -> None:
    """Run `notebook` with `cwd` as its working directory, writing `executed` after each cell.

    `on_section` is called with each heading of the second level when the run comes to it.

    Raises papermill's and nbclient's errors; CellTimeoutError once the whole notebook took `timeout_s`;
    KeyboardInterrupt after Ctrl-C, at whatever moment it came, with the kernel gone.
    """
    logger.setLevel("CRITICAL")
    papermill_engines.register(ENGINE, _Engine)
    with _Interruption() as interruption, tempfile.TemporaryDirectory(prefix="specmortem-kernel-") as folder:
        papermill.execute_notebook(
            str(notebook),
            str(executed),
            parameters=dict(parameters),
            engine_name=ENGINE,
            kernel_name=KERNEL,
            language="python",
            progress_bar=False,
            cwd=str(cwd),
            kernel=_Kernel(spec=_kernel_spec(folder)),
            deadline=None if timeout_s is None else time.monotonic() + timeout_s,
            interruption=interruption,
            on_section=on_section,
        )


class _Interruption:
    """Ctrl-C ends the kernel, whose end ends the run, instead of raising somewhere inside nbclient.

    A KeyboardInterrupt raised there leaves tasks behind that complain later, skips the clean-up of a kernel
    that is starting, and is lost where the code it meets drops it. Once the context ends, it is raised in any case.
    A second Ctrl-C raises at once. Nothing changes where SIGINT is ignored or handled already, as in a job
    that a shell put into the background, and outside the main thread.
    """

    def __init__(self) -> None:
        self._asked = False
        self._kernel: Popen[bytes] | None = None
        self._catches = False

    def __enter__(self) -> _Interruption:
        main_thread = threading.current_thread() is threading.main_thread()
        self._catches = main_thread and signal.getsignal(signal.SIGINT) is signal.default_int_handler
        if self._catches:
            signal.signal(signal.SIGINT, self._ask)
        return self

    def __exit__(self, *_: object) -> None:
        if self._catches:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        self.check()

    def check(self) -> None:
        """Raise KeyboardInterrupt if there was a Ctrl-C."""
        if self._asked:
            raise KeyboardInterrupt

    def watch(self, kernel: Popen[bytes]) -> None:
        """End `kernel`, which leads a process group, at Ctrl-C or now if that came before."""
        self._kernel = kernel
        if self._asked:
            self._end_kernel()

    def _ask(self, number: int, frame: FrameType | None) -> None:
        if self._asked:
            signal.default_int_handler(number, frame)
        self._asked = True
        self._end_kernel()

    def _end_kernel(self) -> None:
        if self._kernel is not None and self._kernel.returncode is None:
            with suppress(ProcessLookupError):
                os.killpg(self._kernel.pid, signal.SIGKILL)


class _Kernel(AsyncKernelManager):
    """A kernel of this interpreter, whatever others are installed, without the user's IPython profile."""

    spec = Instance(KernelSpec)

    @property
    def kernel_spec(self) -> KernelSpec:
        """Its own, not one that is looked up by name."""
        return self.spec


def _kernel_spec(folder: str) -> KernelSpec:
    """The kernel works in another folder, so relative entries of PYTHONPATH are resolved here."""
    python_path = [str(Path(p).absolute()) for p in os.environ.get("PYTHONPATH", "").split(os.pathsep) if p]
    return KernelSpec(
        argv=[sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}", "--log-level=50"],
        display_name="Python 3",
        language="python",
        env={"IPYTHONDIR": folder, "PYTHONPATH": os.pathsep.join(python_path)},
    )


class _Engine(Engine):  # type: ignore[misc]
    """Papermill's engine with one time limit for the whole notebook.

    However the notebook ends, the client kills the kernel's process group.
    """

    @classmethod
    def nb_kernel_name(cls, nb: Any, name: str | None = None) -> str:
        """The kernel is given, not looked up."""
        return KERNEL

    @classmethod
    def execute_managed_notebook(
        cls,
        nb_man: Any,
        kernel_name: str,
        kernel: _Kernel,
        interruption: _Interruption,
        on_section: Callable[[str], None],
        deadline: float | None = None,
        start_timeout: int = 60,
        **_: Any,
    ) -> None:
        def remaining(cell: Any) -> float | None:
            return None if deadline is None else max(deadline - time.monotonic(), 0.01)

        def begin(cell: Any, cell_index: int) -> None:
            if cell.cell_type == "markdown" and (
                title := re.search(r"^## +(.+)$", cell.source, re.MULTILINE)
            ):
                on_section(title[1])

        interruption.check()
        client = PapermillNotebookClient(
            nb_man,
            kernel_name=kernel_name,
            startup_timeout=start_timeout,
            timeout_func=remaining,
            on_cell_start=begin,
            log=logger,
        )
        client.km = kernel  # given to its constructor it would not be the client's to end
        client.start_new_kernel()
        if (process := cast("LocalProvisioner", kernel.provisioner).process) is not None:
            interruption.watch(process)
        client.execute()
