"""Run one notebook in a kernel of this very interpreter, within one time limit."""

from __future__ import annotations

import json
import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from subprocess import Popen
from types import FrameType
from typing import Any

import papermill
from papermill.clientwrap import PapermillNotebookClient
from papermill.engines import Engine, papermill_engines
from papermill.log import logger

ENGINE = KERNEL = "specmortem"


def execute(
    notebook: Path, executed: Path, parameters: Mapping[str, Any], cwd: Path, timeout_s: float | None = None
) -> None:
    """Run `notebook` with `cwd` as its working directory, writing `executed` after each cell.

    Raises papermill's and nbclient's errors; CellTimeoutError once the whole notebook took `timeout_s`;
    KeyboardInterrupt after Ctrl-C, at whatever moment it came, with the kernel gone.
    """
    logger.setLevel("CRITICAL")
    papermill_engines.register(ENGINE, _Engine)
    with _Interruption() as interruption, _current_interpreter_kernel():
        papermill.execute_notebook(
            str(notebook),
            str(executed),
            parameters=dict(parameters),
            engine_name=ENGINE,
            kernel_name=KERNEL,
            language="python",
            progress_bar=sys.stderr.isatty(),
            cwd=str(cwd),
            deadline=None if timeout_s is None else time.monotonic() + timeout_s,
            interruption=interruption,
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


@contextmanager
def _current_interpreter_kernel() -> Iterator[None]:
    """A kernel of this interpreter, whatever others are installed, without the user's IPython profile."""
    before = os.environ.get("JUPYTER_PATH")
    with tempfile.TemporaryDirectory(prefix="specmortem-kernel-") as folder:
        spec = Path(folder) / "kernels" / KERNEL / "kernel.json"
        spec.parent.mkdir(parents=True)
        spec.write_text(json.dumps(_kernel_spec(folder)), encoding="utf-8")
        os.environ["JUPYTER_PATH"] = os.pathsep.join(filter(None, (folder, before)))
        try:
            yield
        finally:
            os.environ.pop("JUPYTER_PATH")
            if before is not None:
                os.environ["JUPYTER_PATH"] = before


def _kernel_spec(folder: str) -> dict[str, Any]:
    """The kernel works in another folder, so relative entries of PYTHONPATH are resolved here."""
    python_path = [str(Path(p).absolute()) for p in os.environ.get("PYTHONPATH", "").split(os.pathsep) if p]
    return {
        "argv": [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}", "--log-level=50"],
        "display_name": "Python 3",
        "language": "python",
        "env": {"IPYTHONDIR": folder, "PYTHONPATH": os.pathsep.join(python_path)},
    }


class _Engine(Engine):  # type: ignore[misc]
    """Papermill's engine with one time limit for the whole notebook.

    However the notebook ends, the client kills the kernel's process group.
    """

    @classmethod
    def execute_managed_notebook(
        cls,
        nb_man: Any,
        kernel_name: str,
        interruption: _Interruption,
        deadline: float | None = None,
        start_timeout: int = 60,
        **_: Any,
    ) -> None:
        def remaining(cell: Any) -> float | None:
            return None if deadline is None else max(deadline - time.monotonic(), 0.01)

        interruption.check()
        client = PapermillNotebookClient(
            nb_man, kernel_name=kernel_name, startup_timeout=start_timeout, timeout_func=remaining, log=logger
        )
        manager = client.create_kernel_manager()
        client.start_new_kernel()
        interruption.watch(manager.provisioner.process)
        client.execute()
