"""The far side of `specmortem.isolation`: the supervisor, and the process of one experiment.

Requests, records and what the children print are files in one folder a run, `FOLDER/INDEX/`; only short lines cross
pipes, so neither side can block the other. The supervisor reads `INDEX SECONDS` a line on stdin, which starts an
experiment or gives a running one another limit from now on, and writes one JSON line an outcome; at the end of stdin
it kills what still runs, removes the folder and leaves. It adopts what experiments leave behind
(PR_SET_CHILD_SUBREAPER, Linux), so that all of it stays below the supervisor, in whatever session.
"""

from __future__ import annotations

import ctypes
import faulthandler
import gc
import importlib
import json
import os
import re
import select
import shutil
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
SIM_ENVIRONMENT = {"TRITON_INTERPRET": "1", **ONE_THREAD}
RECORD_LIMIT = 64 << 20  # bytes of a record
FILE_LIMIT = 1 << 30  # bytes of any file that an experiment writes
MESSAGE_LIMIT = 4000  # characters of an exception's text
BROKEN_EXIT = 70
SWEEP_S = 8.0  # a killed process that holds a GPU's memory takes seconds to go
POLL_S = 0.005
REQUEST, OUTPUT = "request.json", "stderr"  # of an experiment, in its folder
WAKING = (signal.SIGCHLD, signal.SIGINT, signal.SIGTERM, signal.SIGHUP)  # none of them ends the supervisor
PR_SET_CHILD_SUBREAPER = 36
FIRST_LAUNCH = (
    "triton.experimental.gluon",
    "numpy.ma",
)  # what the first interpreted launch of a process imports
BOOT = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from specmortem import _forkserver; _forkserver.main(sys.argv[2:])"
)


def command(*arguments: str) -> list[str]:
    """Command line of a fresh interpreter that sees this one's `sys.path` and calls `main(arguments)`."""
    path = [str(Path(entry).absolute()) for entry in sys.path]
    return [sys.executable, "-P", "-c", BOOT, json.dumps(path), *arguments]


def main(arguments: Sequence[str]) -> None:
    """Entry of both processes: `supervise REPORTS_FD FOLDER DEVICE` and `experiment FOLDER SUPERVISOR_PID`."""
    role, first, second, *device = arguments
    if role == "supervise":
        Supervisor(int(first), Path(second), *device).serve()
    else:
        experiment(Path(first), int(second))


def kill_group(pid: int) -> None:
    """SIGKILL a child and all of its process group; the child may not lead a group yet, or be gone."""
    for kill in (os.kill, os.killpg):
        with suppress(ProcessLookupError, PermissionError):
            kill(pid, signal.SIGKILL)


# The supervisor


@dataclass
class Child:
    """A running experiment; times are of `time.monotonic`."""

    index: int
    began: float
    deadline: float
    oom_kills: int
    timed_out: bool = False

    def killed_for_memory(self, code: int) -> bool:
        """Whether an exit code is the work of the kernel's OOM killer, for certain."""
        return code == -signal.SIGKILL and not self.timed_out and oom_kills() > self.oom_kills


class Supervisor:
    """Starts, times and reaps experiments; never creates a thread or a CUDA context, so that it may fork."""

    def __init__(self, reports: int, folder: Path, device: str) -> None:
        """`reports` is the file descriptor that outcomes are written to, `device` that of all the experiments."""
        self.folder, self.device = folder, device
        self.inherited = dict(os.environ)
        self.reports = reports
        self.asked: set[int] = set()
        self.children: dict[int, Child] = {}
        self.unread = b""
        self.woken, self.waker = os.pipe()
        os.environ.update(SIM_ENVIRONMENT if device == "sim" else ONE_THREAD)
        if device == "cuda":
            os.environ.pop("TRITON_INTERPRET", None)

    def serve(self) -> None:
        """Work until stdin ends or nobody reads the reports."""
        os.set_inheritable(self.reports, False)
        os.set_blocking(self.waker, False)
        for number in WAKING:
            signal.signal(number, lambda *_: None)
        signal.set_wakeup_fd(self.waker, warn_on_full_buffer=False)
        adopt_orphans()
        try:
            with suppress(BrokenPipeError):
                while self.attend():
                    pass
        finally:
            self.abandon()

    def attend(self) -> bool:
        """Wait for the next request, death or deadline and deal with it; False at the end of stdin."""
        ready, _, _ = select.select([0, self.woken], [], [], self.patience())
        if self.woken in ready:
            os.read(self.woken, 4096)
        if 0 in ready and not self.accept():
            return False
        self.reap()
        self.expire()
        return True

    def patience(self) -> float | None:
        """Seconds until the next deadline; None when there is none."""
        deadlines = [child.deadline for child in self.children.values() if not child.timed_out]
        return max(0.0, min(deadlines) - time.monotonic()) if deadlines else None

    def accept(self) -> bool:
        """Do what stdin asks for; False at its end."""
        data = os.read(0, 65536)
        *lines, self.unread = (self.unread + data).split(b"\n")
        for line in lines:
            index, seconds = line.split()
            self.allow(int(index), float(seconds))
        return bool(data)

    def allow(self, index: int, seconds: float) -> None:
        """Give an experiment so long from now on; start it where it was never asked for."""
        if index not in self.asked:
            self.asked.add(index)
            self.start(index, seconds)
        for child in self.children.values():
            if child.index == index:
                child.deadline = time.monotonic() + seconds

    def start(self, index: int, seconds: float) -> None:
        """Start one experiment, or report why it cannot be started."""
        folder = self.folder / str(index)
        request = json.loads((folder / REQUEST).read_text(encoding="utf-8"))
        in_this_environment = not (request["env"] or request["command"])
        forking = in_this_environment and may_fork(request["target"], request["modules"])
        began, oom_kills_before = time.monotonic(), oom_kills()
        try:
            pid = self.fork(folder) if forking else self.spawn(folder, request)
        except OSError as error:
            self.report(index=index, code=None, message=f"the process could not be started: {error}")
        else:
            self.children[pid] = Child(index, began, began + seconds, oom_kills_before)

    def fork(self, folder: Path) -> int:
        """A child that has torch and triton imported already."""
        supervisor = os.getpid()
        pid = os.fork()
        if pid == 0:
            gc.freeze()  # what is inherited lives on: collecting would walk, and so copy, all of it
            signal.set_wakeup_fd(-1)
            for number in WAKING:
                signal.signal(number, signal.SIG_DFL)
            for private in (self.reports, self.woken, self.waker):
                os.close(private)
            detach(folder)
            experiment(folder, supervisor)
        return pid

    def spawn(self, folder: Path, request: Mapping[str, Any]) -> int:
        """A child in a fresh interpreter, or another program, which has its whole environment from the request."""
        program, variables = request["command"], request["env"]
        if not program:
            program = command("experiment", str(folder), str(os.getpid()))
            variables = environment(self.inherited, request)
        with (folder / OUTPUT).open("ab") as output:
            process = subprocess.Popen(
                program,
                env=variables,
                cwd=folder / "cwd",
                stdin=subprocess.DEVNULL,
                stdout=output if request["command"] else subprocess.DEVNULL,
                stderr=output,
                start_new_session=True,
            )
        process.returncode = 0  # it is reaped here, not there
        (folder / "pid").write_text(str(process.pid))
        return process.pid

    def expire(self) -> None:
        """Kill what is past its deadline."""
        for pid, child in self.children.items():
            if not child.timed_out and time.monotonic() >= child.deadline:
                child.timed_out = True
                kill_group(pid)

    def reap(self) -> None:
        """Collect the dead, kill what they left, then report them."""
        ends = []
        for pid in list(self.children):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                kill_group(pid)
                ends.append((self.children.pop(pid), os.waitstatus_to_exitcode(status)))
        if ends:
            self.sweep()
        for child, code in ends:
            self.report_end(child, code)

    def report_end(self, child: Child, code: int) -> None:
        """Report a dead child; `code` is minus the signal number where a signal killed it."""
        self.report(
            index=child.index,
            code=code,
            timed_out=child.timed_out,
            oom_killed=child.killed_for_memory(code),
            seconds=time.monotonic() - child.began,
        )

    def report(self, **facts: Any) -> None:
        """Write one outcome; short enough for the pipe to take it whole."""
        os.write(self.reports, json.dumps(facts).encode() + b"\n")

    def sweep(self) -> None:
        """Kill and reap all children that are no running experiment, and what becomes a child of this process then."""
        end = time.monotonic() + SWEEP_S
        while (left := own_children() - set(self.children)) and time.monotonic() < end:
            for pid in left:
                with suppress(ProcessLookupError, ChildProcessError):
                    os.kill(pid, signal.SIGKILL)
                    os.waitpid(pid, os.WNOHANG)
            time.sleep(POLL_S)

    def abandon(self) -> None:
        """Kill and reap everything below this process and remove the run's folder."""
        for pid in self.children:
            kill_group(pid)
        self.children.clear()
        self.sweep()
        shutil.rmtree(self.folder, ignore_errors=True)


def adopt_orphans() -> None:
    """Make this process the parent of descendants whose parent dies; nothing happens where the system has no such."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def own_children() -> set[int]:
    """Processes whose parent is this one; empty where /proc does not tell."""
    lists = Path("/proc/self/task").glob("*/children")
    return {int(pid) for listed in lists for pid in listed.read_text().split()}


def environment(inherited: Mapping[str, str], request: Mapping[str, Any]) -> dict[str, str]:
    """Environment of a fresh interpreter: the caller's, fit for the device, then the arm's own variables."""
    if request["device"] == "sim":
        return {**inherited, **SIM_ENVIRONMENT, **request["env"]}
    native = {name: value for name, value in inherited.items() if name != "TRITON_INTERPRET"}
    return {**native, **request["env"]}


def may_fork(target: str, modules: Sequence[str] = ()) -> bool:
    """Whether this process, with torch, triton, this package's targets and `modules` imported, can be forked.

    It can with one thread and no CUDA context. Targets of others are imported in the experiment only.
    """
    tasks = Path("/proc/self/task")
    if not hasattr(os, "fork") or not tasks.is_dir():
        return False
    preload()
    if target.startswith(f"{__package__}."):
        preload(target.partition(":")[0], *modules)
    cuda = sys.modules.get("torch.cuda")
    return len(list(tasks.iterdir())) == 1 and not (cuda and cuda.is_initialized())


def preload(*modules: str) -> None:
    """Import torch, triton and these; a failed import fails again, and is told, in the experiment that needs it."""
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    for name in ("torch", "triton", "triton.language", *(FIRST_LAUNCH if interpreted else ()), *modules):
        with suppress(Exception):
            importlib.import_module(name)


def oom_kills() -> int:
    """How many processes of this cgroup the kernel's OOM killer has taken so far; 0 where it is not told."""
    with suppress(OSError):
        for line in Path("/proc/self/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if "memory" in controllers.split(","):
                return oom_count(Path(f"/sys/fs/cgroup/memory{path}/memory.oom_control"))
            if not controllers and Path(f"/sys/fs/cgroup{path}/memory.events").exists():
                return oom_count(Path(f"/sys/fs/cgroup{path}/memory.events"))
    return 0


def oom_count(events: Path) -> int:
    """The `oom_kill` counter of a cgroup's event file."""
    found = re.search(r"^oom_kill (\d+)$", events.read_text(), re.MULTILINE)
    return int(found[1]) if found else 0


# The experiment's own process


def detach(folder: Path) -> None:
    """Own session; no stdin, stdout dropped, stderr in a file.

    The pid is written before `experiment` looks for the supervisor: so either the caller finds the pid, or the
    experiment finds that it has been orphaned.
    """
    os.setsid()
    (folder / "pid").write_text(str(os.getpid()))
    redirect(os.devnull, os.O_RDONLY, 0)
    redirect(os.devnull, os.O_WRONLY, 1)
    redirect(str(folder / OUTPUT), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 2)


def experiment(folder: Path, supervisor: int) -> NoReturn:
    """Run the request in `folder`, leave its record there, and end this process without any clean-up.

    Destructors are skipped because they can abort on a poisoned CUDA context. No core file is left.
    """
    try:
        if os.getppid() != supervisor:
            os._exit(BROKEN_EXIT)
        os.chdir(folder / "cwd")
        limit("RLIMIT_CORE", 0)
        limit("RLIMIT_FSIZE", FILE_LIMIT)
        faulthandler.enable()
        record = run(json.loads((folder / REQUEST).read_text(encoding="utf-8")))
        (folder / "record.part").write_text(record, encoding="utf-8")
        (folder / "record.part").rename(folder / "record.json")
        with suppress(Exception):
            sys.stderr.flush()
        os._exit(0)
    except BaseException:
        complain()
    finally:
        os._exit(BROKEN_EXIT)


def redirect(path: str, flags: int, target: int) -> None:
    """Make file descriptor `target` an open `path`."""
    opened = os.open(path, flags, 0o600)
    os.dup2(opened, target)
    os.close(opened)


def limit(name: str, soft: int) -> int:
    """Set a soft resource limit, within the hard one; returns the old soft limit."""
    import resource

    which = getattr(resource, name)
    old, hard = resource.getrlimit(which)
    allowed = soft if hard == resource.RLIM_INFINITY else min(soft, hard)
    resource.setrlimit(which, (allowed, hard))
    return old


@contextmanager
def address_space(memory_bytes: int | None) -> Iterator[None]:
    """Let this process map at most `memory_bytes` more than it has mapped now; None for no limit."""
    if memory_bytes is None:
        yield
        return
    old = limit("RLIMIT_AS", mapped_bytes() + memory_bytes)
    try:
        yield
    finally:
        limit("RLIMIT_AS", old)


def mapped_bytes() -> int:
    """Address space of this process; 0 without /proc."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0


def run(request: Mapping[str, Any]) -> str:
    """The record, as JSON: `{"value": ...}`, or what `describe` tells of an exception."""
    try:
        if request["device"] == "sim":
            preload()
        with address_space(request["memory_bytes"]):
            value = call(request)
        return encode(request["target"], value)
    except BaseException as error:
        complain()
        return json.dumps(describe(error))


def call(request: Mapping[str, Any]) -> Any:
    """The target's value; on CUDA, a fault that arrives late replaces it, or the exception it led to."""
    module, _, function = request["target"].partition(":")
    target = getattr(importlib.import_module(module), function)
    if request["device"] == "sim":
        return target(**request["kwargs"])
    try:
        return target(**request["kwargs"])
    finally:
        synchronize()


def synchronize() -> None:
    """Wait for the current CUDA device, where there is one; raises what its work ended in."""
    from torch import cuda

    if cuda.is_available():
        cuda.synchronize()


def encode(target: str, value: Any) -> str:
    """The record of a value.

    Raises TypeError for a value that JSON cannot hold, ValueError for one beyond RECORD_LIMIT.
    """
    try:
        text = json.dumps({"value": value})
    except (TypeError, ValueError, RecursionError) as error:
        way_out = "return plain lists, dicts, numbers and text"
        raise TypeError(f"{target} returned a value that JSON cannot hold ({error}); {way_out}") from error
    if len(text) > RECORD_LIMIT:
        raise ValueError(
            f"{target} returned {len(text)} bytes of JSON, more than {RECORD_LIMIT}; return a summary"
        )
    return text


def describe(error: BaseException) -> dict[str, Any]:
    """The record of an exception: its types, most derived first, its text, and a CUDA error's number."""
    code = getattr(error, "error_code", None)
    return {
        "types": [f"{kind.__module__}.{kind.__qualname__}" for kind in type(error).__mro__],
        "message": "".join(traceback.format_exception_only(error)).strip()[:MESSAGE_LIMIT],
        "code": code if isinstance(code, int) else None,
    }


def complain() -> None:
    """Write the current exception to stderr, whatever became of `sys.stderr`."""
    with suppress(OSError):
        os.write(2, traceback.format_exc().encode(errors="replace"))
