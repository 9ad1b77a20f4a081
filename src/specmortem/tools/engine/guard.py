"""Start a program, and leave nothing of it behind: neither processes nor folders, also when the caller is killed.

Run by path, `python -I -S guard.py CONTROL [FOLDER...] [-- PROGRAM ARGUMENT...]`, between the caller and the program.
It adopts what the program's processes leave (PR_SET_CHILD_SUBREAPER), so that all of them stay below it, in whatever
session. When the program ends, or the caller says so on the pipe CONTROL, it kills them and ends as the program did, by
the same exit code or signal. When the pipe is closed without a word the caller is dead: it removes the folders too.
Without a program it waits for that alone. It needs the standard library and Linux.
"""

from __future__ import annotations

import ctypes
import os
import resource
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

PR_SET_CHILD_SUBREAPER = 36
STOP = b"s"
POLL_S = 0.05
SWEEP_S = 8.0  # a killed process that holds a GPU's memory takes seconds to go
NOT_STARTED = 127
PROC = Path("/proc")


class Guard:
    """The program and what descends from it."""

    def __init__(self, control: int, program: Sequence[str]) -> None:
        """Starts the program, if there is one, in a session of its own."""
        self.control = control
        self.engine = start(program) if program else None
        self.status: int | None = None

    def wait(self) -> bytes:
        """Until the program has ended or the caller says something; gives what it said, b"" when it is dead."""
        while True:
            if select.select([self.control], [], [], POLL_S)[0]:
                return os.read(self.control, 1)
            self.reap()
            if self.status is not None:
                return STOP

    def reap(self) -> bool:
        """Collect the dead; whether children are left."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return False
            if pid == 0:
                return True
            if pid == self.engine:
                self.status = status

    def sweep(self) -> None:
        """Kill all that is below this process, and what they start meanwhile."""
        end = time.monotonic() + SWEEP_S
        while self.reap() and time.monotonic() < end:
            for pid in below(os.getpid()):
                with suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(POLL_S / 10)


def start(program: Sequence[str]) -> int:
    """The id of the program's process, which alone keeps what is open for it."""
    kept = [fd for fd in map(int, os.listdir("/proc/self/fd")) if fd > 2 and inheritable(fd)]  # noqa: PTH208
    try:
        process = subprocess.Popen(program, stdin=subprocess.DEVNULL, pass_fds=kept, start_new_session=True)
    except OSError as error:
        print(f"cannot start {program[0]}: {error.strerror or error}", file=sys.stderr, flush=True)
        os._exit(NOT_STARTED)
    for fd in kept:
        os.close(fd)
    process.returncode = 0  # it is collected here, not there
    return process.pid


def inheritable(fd: int) -> bool:
    """Whether a descriptor is open and meant for the program."""
    try:
        return os.get_inheritable(fd)
    except OSError:  # the listing's own
        return False


def below(root: int) -> set[int]:
    """Ids of all processes that descend from `root`."""
    children: dict[int, list[int]] = {}
    for folder in PROC.glob("[0-9]*"):
        with suppress(OSError):
            parent = (folder / "stat").read_text(errors="replace").rpartition(")")[2].split()[1]
            children.setdefault(int(parent), []).append(int(folder.name))
    found: set[int] = set()
    left = [root]
    while left:
        new = set(children.get(left.pop(), ())) - found
        found |= new
        left += new
    return found


def end_like(status: int) -> None:
    """Leave as a process with that wait status did."""
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        with suppress(OSError, ValueError):  # SIGKILL has no handler
            signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
    os._exit(os.waitstatus_to_exitcode(status) if os.WIFEXITED(status) else 1)


def main() -> None:
    """Never returns."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda number, frame: None)  # not SIG_IGN, which the program would inherit
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
    control, *rest = sys.argv[1:]
    at = rest.index("--") if "--" in rest else len(rest)
    os.set_inheritable(int(control), False)
    guard = Guard(int(control), rest[at + 1 :])
    said = guard.wait()
    guard.sweep()
    if not said:
        for folder in rest[:at]:
            shutil.rmtree(folder, ignore_errors=True)
    end_like(guard.status or 0)


if __name__ == "__main__":
    main()
