"""Run one notebook in a kernel of this very interpreter, within one time limit."""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
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

    Raises papermill's and nbclient's errors; CellTimeoutError once the whole notebook took `timeout_s`.
    """
    logger.setLevel("CRITICAL")
    papermill_engines.register(ENGINE, _Engine)
    with _current_interpreter_kernel():
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
        )


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
        cls, nb_man: Any, kernel_name: str, deadline: float | None = None, start_timeout: int = 60, **_: Any
    ) -> None:
        def remaining(cell: Any) -> float | None:
            return None if deadline is None else max(deadline - time.monotonic(), 0.01)

        PapermillNotebookClient(
            nb_man, kernel_name=kernel_name, startup_timeout=start_timeout, timeout_func=remaining, log=logger
        ).execute()
