"""Call a function for several notebooks at a time, each in a process of its own that may die alone."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import sys
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from specmortem import isolation

NOTEBOOK_BYTES = 1180 << 20  # a kernel, its supervisor and its arms, summed PSS
GRACE_S = 20.0  # for a worker that was interrupted to end its kernel
PR_SET_PDEATHSIG = 1
Say = Callable[[str], None]


def count(notebooks: int, asked: int | None, device: str) -> tuple[int, str]:
    """How many notebooks run at a time, and why fewer than there are, where cores and wishes do not say so."""
    if asked is not None or notebooks <= 1:
        return min(notebooks, asked or 1), ""
    if device == "cuda" or (device == "auto" and _has_gpu()):
        return 1, "they share a GPU"
    wanted, free = min(notebooks, os.cpu_count() or 1), available_bytes()
    if free is None or wanted * NOTEBOOK_BYTES <= free:
        return wanted, ""
    return max(1, free // NOTEBOOK_BYTES), f"{free / 2**30:.1f} GiB of memory are available"


def _has_gpu() -> bool:
    from torch import cuda

    return cuda.is_available()


def available_bytes() -> int | None:
    """Memory that new processes can have, by the kernel and by the cgroup; None where neither tells."""
    found = []
    with suppress(OSError, LookupError, ValueError):
        lines = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
        found.append(int(lines["MemAvailable"].split()[0]) << 10)
    with suppress(OSError, ValueError):
        group = Path("/sys/fs/cgroup")
        limit, used = (int((group / name).read_text()) for name in ("memory.max", "memory.current"))
        found.append(max(0, limit - used))
    return min(found, default=None)


@dataclass(frozen=True)
class Death:
    """How a worker ended that gave no result."""

    reason: str
    seconds: float


@dataclass(frozen=True)
class _Worker:
    """A process, and the near end of the pipe on which it says lines and at last gives its result."""

    job: Any
    process: BaseProcess
    pipe: Connection
    began: float

    def death(self) -> Death:
        self.process.join(GRACE_S)
        code = self.process.exitcode
        how = (
            f"died by {isolation.signal_name(-code)}" if code and code < 0 else f"left with exit code {code}"
        )
        return Death(f"the process of this notebook {how}", time.monotonic() - self.began)


def side_by_side(
    function: Callable[[Any, Say], Any], jobs: Iterable[Any], at_a_time: int, say: Say
) -> Generator[tuple[Any, Any], None, None]:
    """(job, result or Death) of `function(job, say)` for each job, as they end.

    Cores are shared out among them. Ctrl-C, or a caller that stops, interrupts all that run; so does its death, on
    Linux.
    """
    waiting, running = deque(jobs), list[_Worker]()
    share = max(1, (os.cpu_count() or 1) // at_a_time)
    try:
        while waiting or running:
            while waiting and len(running) < at_a_time:
                running.append(_started(function, waiting.popleft(), share))
            ready = wait([worker.pipe for worker in running])
            for worker in [each for each in running if each.pipe in ready]:
                try:
                    kind, value = worker.pipe.recv()
                except EOFError:
                    kind, value = "result", worker.death()
                if kind == "say":
                    say(value)
                    continue
                running.remove(worker)
                worker.process.join(GRACE_S)
                yield worker.job, value
    finally:
        _interrupt(running)


def _started(function: Callable[[Any, Say], Any], job: Any, share: int) -> _Worker:
    context = multiprocessing.get_context("spawn")
    near, far = context.Pipe(duplex=False)
    process = context.Process(target=_work, args=(far, os.getpid(), share, function, job))
    process.start()
    far.close()
    return _Worker(job, process, near, time.monotonic())


def _work(pipe: Connection, parent: int, share: int, function: Callable[[Any, Say], Any], job: Any) -> None:
    """In the worker: in a session of its own, so that Ctrl-C comes from the caller alone."""
    os.setsid()
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGINT, 0, 0, 0)
    os.environ[isolation.PARALLEL] = str(share)
    with suppress(KeyboardInterrupt):
        if os.getppid() == parent:
            pipe.send(("result", function(job, lambda line: pipe.send(("say", line)))))


def _interrupt(workers: Sequence[_Worker]) -> None:
    """As by Ctrl-C; those that do not end then are killed."""
    for worker in workers:
        with suppress(ProcessLookupError):
            os.kill(worker.process.pid or 0, signal.SIGINT)
    end = time.monotonic() + GRACE_S
    for worker in workers:
        worker.process.join(max(0.0, end - time.monotonic()))
        worker.process.kill()
        worker.process.join(GRACE_S)
