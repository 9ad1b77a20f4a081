"""Run one notebook in a kernel of this very interpreter, within one time limit."""

from __future__ import annotations

import os
import re
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from subprocess import Popen
from types import FrameType
from typing import Any

import papermill
from jupyter_client.kernelspec import NATIVE_KERNEL_NAME, KernelSpecManager
from jupyter_client.manager import AsyncKernelManager
from papermill.clientwrap import PapermillNotebookClient
from papermill.engines import Engine, papermill_engines
from papermill.log import logger

ENGINE = "specmortem"
SAVE_S = 1.0  # between two times that a running notebook is written


def execute(
    notebook: Path,
    executed: Path,
    parameters: Mapping[str, Any],
    cwd: Path,
    timeout_s: float | None = None,
    on_section: Callable[[str], None] = lambda title: None,
) -> None:
    """Run `notebook` with `cwd` as its working directory, writing `executed` every second or so and at the end.

    `on_section` is called with each heading of the second level when the run comes to it.

    Raises papermill's and nbclient's errors; CellTimeoutError once the whole notebook took `timeout_s`;
    KeyboardInterrupt after Ctrl-C, at whatever moment it came, with the kernel gone.
    """
    logger.setLevel("CRITICAL")
    papermill_engines.register(ENGINE, _Engine)
    kernel = AsyncKernelManager(
        kernel_name=NATIVE_KERNEL_NAME,
        kernel_spec_manager=KernelSpecManager(kernel_dirs=[]),  # of this interpreter, whatever is installed
    )
    with (
        _Interruption(kernel) as interruption,
        tempfile.TemporaryDirectory(prefix="specmortem-kernel-") as home,
    ):
        papermill.execute_notebook(
            str(notebook),
            str(executed),
            parameters=dict(parameters),
            engine_name=ENGINE,
            kernel_name=NATIVE_KERNEL_NAME,
            language="python",
            progress_bar=False,
            cwd=str(cwd),
            kernel=kernel,
            env=_environment(home),
            deadline=None if timeout_s is None else time.monotonic() + timeout_s,
            interruption=interruption,
            on_section=on_section,
        )


def _environment(home: str) -> dict[str, str]:
    """Without the user's IPython profile; the kernel works in another folder, so PYTHONPATH is resolved here."""
    python_path = [str(Path(p).absolute()) for p in os.environ.get("PYTHONPATH", "").split(os.pathsep) if p]
    return {**os.environ, "IPYTHONDIR": home, "PYTHONPATH": os.pathsep.join(python_path)}


class _Interruption:
    """Ctrl-C ends the kernel, whose end ends the run, instead of raising somewhere inside nbclient.

    A KeyboardInterrupt raised there leaves tasks behind that complain later, skips the clean-up of a kernel
    that is starting, and is lost where the code it meets drops it. Once the context ends, it is raised in any case.
    A second Ctrl-C raises at once. Nothing changes where SIGINT is ignored or handled already, as in a job
    that a shell put into the background, and outside the main thread.
    """

    def __init__(self, kernel: AsyncKernelManager) -> None:
        self._kernel = kernel
        self._asked = self._catches = False

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

    def _ask(self, number: int, frame: FrameType | None) -> None:
        if self._asked:
            signal.default_int_handler(number, frame)
        self._asked = True
        self.end_kernel()

    def end_kernel(self) -> None:
        """End the kernel, which leads a process group, if there was a Ctrl-C and it runs."""
        process: Popen[bytes] | None = getattr(self._kernel.provisioner, "process", None)
        if self._asked and process is not None and process.returncode is None:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


class _Engine(Engine):  # type: ignore[misc]
    """Papermill's engine with one time limit for the whole notebook.

    However the notebook ends, the client kills the kernel's process group.
    """

    @classmethod
    def execute_managed_notebook(
        cls,
        nb_man: Any,
        kernel_name: str,
        kernel: AsyncKernelManager,
        env: Mapping[str, str],
        interruption: _Interruption,
        on_section: Callable[[str], None],
        deadline: float | None = None,
        **_: Any,
    ) -> None:
        def remaining(cell: Any) -> float | None:
            return None if deadline is None else max(deadline - time.monotonic(), 0.01)

        def begin(cell: Any, cell_index: int) -> None:
            title = re.search(r"^## +(.+)$", cell.source, re.MULTILINE)
            if cell.cell_type == "markdown" and title:
                on_section(title[1])

        interruption.check()
        client = PapermillNotebookClient(
            nb_man,
            timeout_func=remaining,
            on_cell_start=begin,
            extra_arguments=["--log-level=50"],
            log=logger,
        )
        client.km = kernel  # given to its constructor it would not be the client's to end
        client.start_new_kernel(env=env)
        interruption.end_kernel()
        with _saved_sparingly(nb_man):
            client.execute()


@contextmanager
def _saved_sparingly(nb_man: Any) -> Iterator[None]:
    """Papermill writes the whole notebook at both ends of each cell; here it does so no oftener than SAVE_S."""

    def save(**_: Any) -> None:
        if (nb_man.now() - nb_man.last_save_time).total_seconds() >= SAVE_S:
            type(nb_man).save(nb_man)

    nb_man.save = save
    try:
        yield
    finally:
        del nb_man.save
