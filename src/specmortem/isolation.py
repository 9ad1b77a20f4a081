"""Run experiments that may fault, each in a process of its own, and always get a typed outcome.

An illegal address poisons a CUDA context for good, an interpreter overrun can end Python, and lifted code can
hang. A supervisor process for each device starts the experiments: as forks that have torch and triton imported
already, those with environment variables of their own in fresh interpreters. It never touches CUDA and has one
thread, so that a fork of it may; else it forks nothing and every experiment gets a fresh interpreter. If the caller
dies, the supervisor kills the experiments; if the supervisor dies, the caller kills them.

A time limit and the end of an arm kill its whole process group and, on Linux, what of it is in other sessions.
A supervisor that does not answer is killed too. It can also run another program in place of an arm (`start_program`).
"""

from __future__ import annotations

import atexit
import json
import math
import os
import re
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, cast, get_args

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from specmortem import _forkserver
from specmortem.errors import BadInputError, UnavailableError

Device = Literal["sim", "cuda"]
Kind = Literal[
    "value",
    "illegal-address",
    "device-assert",
    "cuda-error",
    "signal",
    "timeout",
    "out-of-memory",
    "python-error",
]
STDERR_TAIL = 4000  # characters of an `ArmResult`
LINE_SHOWN = 200  # characters of the stderr line in the message of a death
STDERR_READ = 1 << 16  # bytes that the kind of an abort is judged on
MOST_PARALLEL = 8
PARALLEL = "SPECMORTEM_PARALLEL"  # the variable that says how many simulated arms run at a time by default
GRACE_S = 10.0  # for the supervisor to kill its children and leave
SILENCE_S = 180.0  # of a supervisor after the limit of an arm; it may import torch first, on a busy machine

# Every message of a CUDA error advertises "device-side assertions", so only the triggered assert counts.
CUDA_TEXTS: tuple[tuple[Kind, str], ...] = (
    ("illegal-address", r"illegal memory access|cudaErrorIllegalAddress|CUDA_ERROR_ILLEGAL_ADDRESS"),
    ("device-assert", r"device-side assert\b|cudaErrorAssert\b|CUDA_ERROR_ASSERT\b"),
    ("out-of-memory", r"CUDA\b.*\bout of memory|cudaErrorMemoryAllocation|CUDA_ERROR_OUT_OF_MEMORY"),
    (
        "cuda-error",
        r"CUDA (driver )?error\b|Triton Error \[CUDA\]|cudaError[A-Z]|CUDA_ERROR_[A-Z]"
        r"|misaligned address|unspecified launch failure",
    ),
)
CUDA_CODES: Mapping[int, Kind] = {2: "out-of-memory", 700: "illegal-address", 710: "device-assert"}
HOST_MEMORY = r"std::bad_alloc|can't allocate memory"


@dataclass(frozen=True)
class Arm:
    """One experiment: `target` called with `kwargs` in a process of its own.

    The target is a function of a module, or its name, "package.module:function"; the arm keeps the name, so that
    both give equal arms. It returns what JSON can hold. `timeout_s` counts from the start of the process. On `sim`
    the process has TRITON_INTERPRET=1. An arm with its own `env` takes seconds to start, not milliseconds. What the
    target imports beside its own module is told in `modules`: imported once, it is there for all arms.
    Raises BadInputError for a field that cannot be used.
    """

    target: Callable[..., Any] | str
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    name: str = ""
    timeout_s: float = 60.0
    device: Device = "sim"
    env: Mapping[str, str] = field(default_factory=dict)
    modules: Sequence[str] = ()

    def __post_init__(self) -> None:
        """Refuse what would fail only in the child."""
        object.__setattr__(self, "target", target_of(self.target))
        if self.device not in get_args(Device):
            raise BadInputError(f"arm {self.label}: device {self.device!r} is not 'sim' or 'cuda'")
        if not (math.isfinite(self.timeout_s) and self.timeout_s > 0):
            raise BadInputError(
                f"arm {self.label}: timeout_s is {self.timeout_s}; give a number of seconds above 0"
            )
        _check_env(self)
        self.request(None)

    @property
    def label(self) -> str:
        """How messages and progress call the arm."""
        return self.name or target_of(self.target)

    def request(self, memory_bytes: int | None) -> str:
        """What the child is told, as JSON."""
        try:
            return json.dumps(
                {
                    "target": self.target,
                    "kwargs": dict(self.kwargs),
                    "device": self.device,
                    "command": [],
                    "env": dict(self.env),
                    "modules": list(self.modules),
                    "memory_bytes": memory_bytes if self.device == "sim" else None,
                }
            )
        except (TypeError, ValueError, RecursionError) as error:
            way_out = "pass plain lists, dicts, numbers and text"
            raise BadInputError(
                f"arm {self.label}: JSON cannot hold its kwargs ({error}); {way_out}"
            ) from error


@dataclass(frozen=True)
class ArmResult:
    """How an arm ended: `value` for kind "value", else `message`: an exception's text or a signal's name."""

    arm: Arm
    kind: Kind
    value: Any = None
    message: str = ""
    stderr_tail: str = ""
    seconds: float = 0.0


def run_arm(arm: Arm, *, memory_bytes: int | None = None) -> ArmResult:
    """Run one arm; see `run_arms`."""
    return run_arms([arm], memory_bytes=memory_bytes)[0]


def run_arms(
    arms: Iterable[Arm],
    *,
    parallel: int | None = None,
    cuda_parallel: int = 1,
    progress: bool = False,
    memory_bytes: int | None = None,
    on_end: Callable[[ArmResult], None] | None = None,
) -> list[ArmResult]:
    """Run each arm in a process of its own; the outcomes are in the order of `arms`.

    `parallel` simulated arms run at a time (by default as many as SPECMORTEM_PARALLEL says, else one a CPU, at most 8),
    and `cuda_parallel` CUDA arms: more than one only where neither timing nor memory is the subject.
    `memory_bytes` is what a simulated arm may map on top of what importing torch and triton maps.
    `on_end` is called in this thread, as each arm ends; `progress` shows a bar where stderr is a terminal.
    Raises BadInputError for arguments that cannot be used, UnavailableError when no process or no temporary
    folder can be had.
    """
    arms = list(arms)
    limits: dict[Device, int] = {"sim": _parallel(parallel), "cuda": _parallel(cuda_parallel)}
    if memory_bytes is not None and memory_bytes < 1:
        raise BadInputError(
            f"memory_bytes is {memory_bytes}; give a positive number of bytes, or None for no limit"
        )
    requests = [arm.request(memory_bytes) for arm in arms]
    if not arms:
        return []
    ended: dict[int, ArmResult] = {}
    with _bar(len(arms), progress) as advance, closing(_outcomes(arms, requests, limits)) as outcomes:
        for index, end in outcomes:
            ended[index] = end
            advance()
            if on_end is not None:
                on_end(end)
    return [ended[index] for index in range(len(arms))]


def _outcomes(
    arms: Sequence[Arm], requests: Sequence[str], limits: Mapping[Device, int]
) -> Generator[tuple[int, ArmResult], None, None]:
    """(index, outcome) of each arm as it ends; one device after the other, each under a supervisor of its own."""
    for device, limit in limits.items():
        indices = [index for index, arm in enumerate(arms) if arm.device == device]
        if indices:
            with _idle.lent(device) as supervisor:
                yield from _supervised(supervisor, arms, requests, indices, limit)


def _supervised(
    supervisor: SupervisorHandle,
    arms: Sequence[Arm],
    requests: Sequence[str],
    indices: Sequence[int],
    limit: int,
) -> Iterator[tuple[int, ArmResult]]:
    """Keep `limit` arms running until all have ended."""
    waiting, first = deque(indices), supervisor.started
    due: dict[int, float] = {}  # when the report of a running arm must be there, by the monotonic clock
    supervisor.started += len(arms)

    def fill() -> None:
        while waiting and len(due) < limit:
            index = waiting.popleft()
            due[index] = time.monotonic() + arms[index].timeout_s + SILENCE_S
            supervisor.start(first + index, requests[index], arms[index].timeout_s)

    try:
        fill()
        while due:
            report = supervisor.expect_report(min(due.values()))
            index = report["index"] - first
            del due[index]
            fill()
            yield index, supervisor.collect(arms[index], report)
    except SupervisorLostError as error:
        for index in sorted((*due, *waiting)):
            message = f"{error} before this arm ended; run the arm again"
            tail = supervisor.log_tail()
            yield index, ArmResult(arms[index], "python-error", message=message, stderr_tail=tail)


class SupervisorLostError(Exception):
    """The supervisor process died or did not answer; the text says which, for the start of a sentence."""


class SupervisorHandle:
    """The caller's hold on the supervisor process, and on the folder through which they exchange files.

    The folder is removed at the end, also when the caller is killed.
    """

    def __init__(self, folder: Path, device: Device) -> None:
        self.folder, self.device = folder, device
        self.started = 0
        self.log = folder / "supervisor-stderr"
        self.reports, write = os.pipe()
        self._unread: deque[bytes] = deque()
        try:
            self.process = self._launch(write)
        except OSError as error:
            os.close(self.reports)
            raise UnavailableError(f"cannot start a process for experiments: {error}") from error
        finally:
            os.close(write)

    @property
    def is_alive(self) -> bool:
        """Whether the process still runs."""
        return self.process.poll() is None

    def _launch(self, reports: int) -> subprocess.Popen[bytes]:
        """In a session of its own, so that Ctrl-C reaches only the caller."""
        with self.log.open("wb") as log:
            return subprocess.Popen(
                _forkserver.command("supervise", str(reports), str(self.folder), self.device),
                bufsize=0,
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=log,
                pass_fds=(reports,),
                start_new_session=True,
            )

    def start(self, index: int, request: str, seconds: float) -> Path:
        """Ask for one experiment that may take so long; gives its folder."""
        folder = self.folder / str(index)
        (folder / "cwd").mkdir(parents=True)
        (folder / _forkserver.REQUEST).write_text(request, encoding="utf-8")
        self.allow(index, seconds)
        return folder

    def start_program(self, command: Sequence[str], variables: Mapping[str, str], seconds: float) -> Path:
        """Ask for a program, as experiment 0, with `variables` as its whole environment.

        Gives the file that gets what it prints.
        """
        request = {"command": list(command), "env": dict(variables)}
        return self.start(0, json.dumps(request), seconds) / _forkserver.OUTPUT

    def allow(self, index: int, seconds: float) -> None:
        """Give an experiment so long from now on; a dead supervisor is noticed at the next report."""
        assert self.process.stdin is not None
        with suppress(BrokenPipeError):
            self.process.stdin.write(f"{index} {seconds}\n".encode())

    def next_report(self, patience_s: float) -> dict[str, Any] | None:
        """The next outcome, None where none comes in time. Raises SupervisorLostError where none will."""
        if not self._unread and select.select([self.reports], [], [], max(0.0, patience_s))[0]:
            self._unread = deque(os.read(self.reports, 1 << 16).splitlines())  # written as whole lines
            if not self._unread:
                raise SupervisorLostError(f"the supervisor process {_exit_text(self._end())}")
        return cast("dict[str, Any]", json.loads(self._unread.popleft())) if self._unread else None

    def expect_report(self, until: float) -> dict[str, Any]:
        """The next outcome. Raises SupervisorLostError where there is none `until` then, by the monotonic clock."""
        report = self.next_report(until - time.monotonic())
        if report is None:
            self.process.kill()
            self.process.wait(GRACE_S)
            raise SupervisorLostError("the supervisor process did not answer")
        return report

    def collect(self, arm: Arm, report: Mapping[str, Any]) -> ArmResult:
        """The outcome that a report and the files of its arm amount to; removes the files."""
        folder = self.folder / str(report["index"])
        stderr = end_of(folder / _forkserver.OUTPUT)
        kind, value, message = _judge(arm, report, folder / "record.json", stderr)
        shutil.rmtree(folder, ignore_errors=True)
        return ArmResult(arm, kind, value, message, stderr[-STDERR_TAIL:], report.get("seconds", 0.0))

    def log_tail(self) -> str:
        """What the supervisor itself complained of last."""
        return end_of(self.log)[-STDERR_TAIL:]

    def close(self) -> None:
        """End the supervisor and, should it not have done so itself, whatever it started."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        self._end()
        os.close(self.reports)
        for pid in self.folder.glob("*/pid"):
            with suppress(OSError, ValueError):
                _forkserver.kill_group(int(pid.read_text()))

    def _end(self) -> int:
        """The exit code of a supervisor that is about to leave; one that does not is killed."""
        try:
            return self.process.wait(GRACE_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            return self.process.wait(GRACE_S)


@contextmanager
def open_supervisor(device: Device) -> Iterator[SupervisorHandle]:
    """A supervisor process for the length of a block.

    Raises UnavailableError when no process or no temporary folder can be had.
    """
    try:
        folder = tempfile.TemporaryDirectory(prefix="specmortem-", ignore_cleanup_errors=True)
    except OSError as error:
        raise UnavailableError(
            f"cannot make a temporary folder ({error}); set TMPDIR to one with space"
        ) from error
    with folder as path, closing(SupervisorHandle(Path(path), device)) as supervisor:
        yield supervisor


class _Idle:
    """Supervisors kept from one call to the next, at most one a device, for the same process and surroundings."""

    def __init__(self) -> None:
        self.wanted = False
        self._kept: dict[Device, tuple[object, SupervisorHandle, ExitStack]] = {}

    @contextmanager
    def lent(self, device: Device) -> Iterator[SupervisorHandle]:
        """A supervisor with nothing running: the one kept for this device where it still fits, else a new one.

        It is kept afterwards where that is wanted and possible; one left in the middle of something is ended.
        """
        surroundings, supervisor, stack = self._kept.pop(device, (None, None, ExitStack()))
        with stack:
            if supervisor is None or surroundings != self._surroundings() or not supervisor.is_alive:
                stack.close()
                supervisor = stack.enter_context(open_supervisor(device))
            yield supervisor
            if self.wanted and device not in self._kept and supervisor.is_alive:
                self._kept[device] = self._surroundings(), supervisor, stack.pop_all()

    def close(self) -> None:
        """End what is kept."""
        while self._kept:
            self._kept.popitem()[1][2].close()

    @staticmethod
    def _surroundings() -> object:
        return os.getpid(), tuple(sys.path), dict(os.environ)


_idle = _Idle()
atexit.register(_idle.close)


def keep_supervisors(*, wanted: bool = True) -> None:
    """Spare later calls the start of a supervisor, about two seconds each, as a notebook with many of them wants.

    What an idle supervisor has imported stays imported: start anew after editing a module that arms use.
    """
    _idle.wanted = wanted
    if not wanted:
        _idle.close()


@contextmanager
def _bar(total: int, wanted: bool) -> Iterator[Callable[[], None]]:
    """A progress bar on stderr if wanted and stderr is a terminal; yields what to call as each arm ends."""
    console = Console(stderr=True)
    columns = (TextColumn("arms"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, disable=not (wanted and console.is_terminal)) as progress:
        task = progress.add_task("arms", total=total)
        yield lambda: progress.advance(task)


def _judge(arm: Arm, report: Mapping[str, Any], record: Path, stderr: str) -> tuple[Kind, Any, str]:
    """(kind, value, message) of an ended arm."""
    code = report["code"]
    if code is None:
        return "python-error", None, report["message"]
    if report["timed_out"]:
        return "timeout", None, f"killed after {arm.timeout_s:g} s"
    if code < 0:
        kind = death_kind(-code, stderr, oom_killed=report["oom_killed"])
        return kind, None, _death_message(signal_name(-code), kind, stderr)
    if code > 0 or not record.exists():
        message = f"the process {_exit_text(code)} without an outcome; its target ended Python itself"
        return "python-error", None, message
    return _read_record(record)


def _read_record(path: Path) -> tuple[Kind, Any, str]:
    """(kind, value, message) that the child wrote down."""
    try:
        if path.stat().st_size > _forkserver.RECORD_LIMIT:
            raise ValueError(f"it has more than {_forkserver.RECORD_LIMIT} bytes")
        record = json.loads(path.read_bytes())
        if set(record) == {"value"}:
            return "value", record["value"], ""
        kind = exception_kind(record["types"], record["message"], record["code"])
        return kind, None, str(record["message"])
    except (OSError, ValueError, TypeError, LookupError, RecursionError) as error:
        return "python-error", None, f"the outcome that the process left cannot be read: {error}"


def exception_kind(types: Sequence[str], message: str, code: int | None = None) -> Kind:
    """Kind of an exception in the child.

    `types` are the qualified names of its class and bases, `code` the number of a CUDA runtime error.
    """
    if "builtins.MemoryError" in types or "torch.OutOfMemoryError" in types:
        return "out-of-memory"
    if "builtins.RuntimeError" not in types:
        return "python-error"
    if re.search(HOST_MEMORY, message):
        return "out-of-memory"
    return CUDA_CODES.get(code or 0) or cuda_text_kind(message) or "python-error"


def death_kind(number: int, stderr: str, *, oom_killed: bool = False) -> Kind:
    """Kind of a death by a signal; an abort is as good as the error that stderr names."""
    if oom_killed:
        return "out-of-memory"
    if number != signal.SIGABRT:
        return "signal"
    return "out-of-memory" if re.search(HOST_MEMORY, stderr) else cuda_text_kind(stderr) or "signal"


def cuda_text_kind(text: str) -> Kind | None:
    """Kind of the CUDA error that a text tells of; None when it tells of none."""
    return next((kind for kind, pattern in CUDA_TEXTS if re.search(pattern, text)), None)


def _death_message(name: str, kind: Kind, stderr: str) -> str:
    """The signal, and the line of stderr that gave the death its kind."""
    patterns = [pattern for known, pattern in CUDA_TEXTS if known == kind]
    if kind == "out-of-memory":
        patterns.append(HOST_MEMORY)
    lines = (line.strip() for line in stderr.splitlines())
    found = next((line for line in lines if any(re.search(pattern, line) for pattern in patterns)), "")
    return f"{name}: {found[:LINE_SHOWN]}" if found else name


def signal_name(number: int) -> str:
    """For example SIGSEGV."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _exit_text(code: int) -> str:
    """What happened to a process, for the middle of a sentence."""
    return f"died by {signal_name(-code)}" if code < 0 else f"left with exit code {code}"


def end_of(path: Path) -> str:
    """The end of a stderr file, if any, less the long list of modules that faulthandler closes with."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - STDERR_READ))
            text = file.read(STDERR_READ).decode(errors="replace")
    except OSError:
        return ""
    return re.sub(r"^Extension modules: .*\n?", "", text, flags=re.MULTILINE)


def target_of(function: Callable[..., Any] | str) -> str:
    """A function as the target of an arm, `package.module:function`; such text is taken as it is.

    Raises BadInputError for one that another process cannot import, such as a lambda or a function of a notebook.
    """
    target = function if isinstance(function, str) else f"{function.__module__}:{function.__qualname__}"
    if not re.fullmatch(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*", target):
        raise BadInputError(f"target {target!r} is not of the form 'package.module:function'")
    if target.startswith("__main__:"):
        raise BadInputError(
            f"target {target!r} cannot be imported by another process; move the function to a module"
        )
    return target


def _check_env(arm: Arm) -> None:
    """Raises BadInputError unless the arm's variables are text that an environment can hold."""
    for name, value in arm.env.items():
        if not (isinstance(name, str) and isinstance(value, str)):
            raise BadInputError(f"arm {arm.label}: env {name!r}: names and values must be text")
        if not name or "=" in name or "\0" in name + value:
            raise BadInputError(
                f"arm {arm.label}: env {name!r} is not a variable that an environment can hold"
            )


def _parallel(parallel: int | None) -> int:
    """How many simulated arms run at a time."""
    if parallel is None:
        share = os.environ.get(PARALLEL, "")
        if share and not share.isdecimal():
            raise BadInputError(f"{PARALLEL} is {share!r}; give a number of at least 1")
        return min(MOST_PARALLEL, max(1, int(share or os.cpu_count() or 1)))
    if parallel < 1:
        raise BadInputError(f"parallel is {parallel}; give at least 1")
    return parallel
