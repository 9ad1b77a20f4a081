"""The near side of `child`: start the process of one engine, follow what it tells, and say how it ended."""

from __future__ import annotations

import json
import os
import re
import selectors
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

from specmortem import isolation
from specmortem.errors import BadInputError, UnavailableError
from specmortem.tools.engine import child, guard, places
from specmortem.tools.engine.places import Places
from specmortem.tools.engine.result import EndKind, Phase, Start

CHILD, GUARD = Path(child.__file__), Path(guard.__file__)
LOG_TAIL = 4000  # characters
LOG_READ = 1 << 16  # bytes that the kind of an abort is judged on
GRACE_S = 10.0  # for a process that has told its end to leave
POLL_S = 0.2
# Of the caller's variables, these and VLLM_* never reach an engine. Others do; of them a result records those that may
# change what it does, by prefix.
RECORDED = (
    "CUDA_",
    "CUBLAS_",
    "FLASHINFER_",
    "NCCL_",
    "NVIDIA_",
    "OMP_",
    "PYTORCH_",
    "TORCH",
    "TRITON_",
    "VLLM_",
)
NOT_INHERITED = ("PYTHONPATH", "PYTHONHOME", "TRITON_INTERPRET", "CUDA_LAUNCH_BLOCKING")
CACHE = "VLLM_CACHE_ROOT"
Event = Mapping[str, Any]


@dataclass(frozen=True)
class Environment:
    """Where a vLLM release is: an interpreter, and folders put in front of its packages."""

    python: str = sys.executable
    path: tuple[str, ...] = ()

    @classmethod
    def here(cls) -> Environment:
        """This interpreter, with the PYTHONPATH that it was given."""
        return cls(path=tuple(part for part in os.environ.get("PYTHONPATH", "").split(os.pathsep) if part))

    @classmethod
    def parse(cls, text: str) -> Environment:
        """From PYTHON, or from DIR[:DIR...] for this interpreter with a PYTHONPATH.

        Raises BadInputError for a place that is neither.
        """
        place = Path(text).expanduser()
        if place.is_file() and os.access(place, os.X_OK):
            return cls(str(place.absolute()))
        folders = [Path(part).expanduser() for part in text.split(":") if part]
        if missing := [str(folder) for folder in folders if not folder.is_dir()]:
            raise BadInputError(
                f"{missing[0]} is no folder and no interpreter; give PYTHON, or DIR:DIR as in PYTHONPATH"
            )
        if not folders:
            raise BadInputError("an environment is empty; give PYTHON, or DIR:DIR as in PYTHONPATH")
        return cls(path=tuple(str(folder.absolute()) for folder in folders))

    def variables(self, own: Mapping[str, str]) -> dict[str, str]:
        """The environment of a process in it."""
        inherited = {
            name: value
            for name, value in os.environ.items()
            if name not in NOT_INHERITED and (not name.startswith("VLLM_") or name == CACHE)
        }
        folders = {"PYTHONPATH": os.pathsep.join(self.path)} if self.path else {}
        return {**inherited, **folders, "PYTHONUNBUFFERED": "1", **own}

    def inherited(self, own: Mapping[str, str]) -> dict[str, str]:
        """The caller's variables by `RECORDED` that reach a process in it, without its `own`."""
        return {
            name: value
            for name, value in sorted(self.variables(own).items())
            if name.startswith(RECORDED) and name not in own
        }

    def places(self) -> dict[str | Path, str]:
        """Its folders and interpreter, and the word for them."""
        python = Path(self.python)
        roots = (python.parent.parent, python.resolve().parent.parent)
        return dict.fromkeys((*self.path, *roots), "ENVIRONMENT")


@dataclass(frozen=True)
class Limits:
    """Seconds: from the start of the process until the engine is up, of a run, and when all must have ended.

    `until` is of `time.monotonic`.
    """

    start_s: float
    run_s: float
    until: float = float("inf")


@dataclass
class _State:
    """What has been told so far."""

    phase: Phase = "import"
    run: int | None = None
    step: int | None = None
    since: float = field(default_factory=time.monotonic)
    fault: Event | None = None
    facts: dict[str, Any] = field(default_factory=dict)

    def take(self, event: Event) -> None:
        kind = event["event"]
        if kind == "imported":
            self.facts |= {"import_s": event["seconds"], "versions": event["versions"]}
            self.phase = "start"
        elif kind == "up":
            self.facts |= {"up_s": event["seconds"], "device": event["device"], "chosen": event["chosen"]}
        elif kind == "begin":
            self.phase, self.run, self.since = "run", event["run"], time.monotonic()
        elif kind == "step":
            self.step = event["step"]
        elif kind == "run":
            self.run, self.since = None, time.monotonic()
        elif kind == "done":
            self.phase, self.run = "done", None
        elif kind == "fault":
            self.fault, self.step = event, event.get("step")


class _Stopped(Exception):  # noqa: N818
    """The process has to be killed: kind and message of its end."""

    def __init__(self, kind: EndKind, message: str) -> None:
        super().__init__(message)
        self.kind: EndKind = kind
        self.message = message


def run(
    request: Mapping[str, Any],
    environment: Environment,
    variables: Mapping[str, str],
    limits: Limits,
    on_event: Callable[[Event], None],
    named: Mapping[str | Path, str] | None = None,
) -> Start:
    """Run one engine process to its end, whatever that is; what it started does not outlive the call or the caller.

    `on_event` is called with each event that the process tells, in this thread. `named` gives words for places that
    must not be in the result, beside those of the environment, home and temporary folders. A KeyboardInterrupt ends
    the process and becomes the kind `interrupted`. Raises UnavailableError when no process or temporary folder can be
    had.
    """
    hide = places.known({**environment.places(), **(named or {})})
    with _folder() as name:
        folder = Path(name)
        (folder / "request.json").write_text(json.dumps(dict(request)), encoding="utf-8")
        begun, state = time.monotonic(), _State()
        program = _launched(folder, environment.python, environment.variables(variables))
        stopped = _followed(program, state, limits, on_event)
        ended = _ended(program.process, state, stopped, _end_of(folder / "log"), time.monotonic() - begun)
    return _clean(replace(ended, inherited=environment.inherited(variables)), hide)


def _clean(start: Start, hide: Places) -> Start:
    """Without places and terminal controls in what came from the process."""
    names = ("message", "log_tail", "device", "versions", "chosen", "inherited")
    return replace(start, **{name: places.cleaned_all(getattr(start, name), hide) for name in names})


@dataclass(frozen=True)
class _Program:
    """The process of an engine, by its guard; where it tells its events; and where the guard is told to end it."""

    process: subprocess.Popen[bytes]
    events: int
    control: int

    def end(self) -> None:
        """Nothing of it is left afterwards."""
        _stop(self.process, self.control)
        os.close(self.events)


def _stop(process: subprocess.Popen[bytes], control: int) -> None:
    """Have a guard end what is below it; it may have done so already."""
    with suppress(BrokenPipeError):
        os.write(control, guard.STOP)
    os.close(control)
    try:
        process.wait(GRACE_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


@contextmanager
def removed(folder: str) -> Iterator[None]:
    """Within the block, another process waits for this one's death, to remove the folder then."""
    read, write = os.pipe()
    try:
        waiting = _guard(read, [folder], (), {})
    except OSError as error:
        os.close(write)
        raise UnavailableError(f"cannot start a process: {error.strerror or error}") from error
    finally:
        os.close(read)
    try:
        yield
    finally:
        _stop(waiting, write)


def _guard(
    control: int, more: list[str], fds: tuple[int, ...], options: dict[str, Any]
) -> subprocess.Popen[bytes]:
    """In a session of its own, so that Ctrl-C reaches only the caller."""
    null = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    return subprocess.Popen(
        [sys.executable, "-I", "-S", str(GUARD), str(control), *more],
        pass_fds=(control, *fds),
        start_new_session=True,
        **{**null, **options},
    )


def _folder() -> tempfile.TemporaryDirectory[str]:
    try:
        return tempfile.TemporaryDirectory(prefix="specmortem-engine-", ignore_cleanup_errors=True)
    except OSError as error:
        raise UnavailableError(
            f"cannot make a temporary folder ({error}); set TMPDIR to one with space"
        ) from error


def _launched(folder: Path, python: str, variables: Mapping[str, str]) -> _Program:
    """Start the process of an engine. Raises UnavailableError when the interpreter is none."""
    if shutil.which(python) is None:
        raise UnavailableError(f"cannot start {python}: it is no program")
    (events, events_end), (control_end, control) = os.pipe(), os.pipe()
    command = [str(folder), "--", python, "-P", str(CHILD), str(folder / "request.json"), str(events_end)]
    try:
        with (folder / "log").open("wb") as log:
            options = {"cwd": folder, "env": dict(variables), "stdout": log, "stderr": subprocess.STDOUT}
            process = _guard(control_end, command, (events_end,), options)
    except OSError as error:
        os.close(events)
        os.close(control)
        raise UnavailableError(f"cannot start a process: {error.strerror or error}") from error
    finally:
        os.close(events_end)
        os.close(control_end)
    return _Program(process, events, control)


def _followed(
    program: _Program, state: _State, limits: Limits, on_event: Callable[[Event], None]
) -> _Stopped | None:
    """Take events until the process ends or has to be stopped; then nothing of it is left."""
    stopped = None
    try:
        _follow(program.process, program.events, state, limits, on_event)
        program.process.wait(GRACE_S)
    except _Stopped as why:
        stopped = why
    except subprocess.TimeoutExpired:
        told = "its end" if state.fault or state.phase == "done" else "nothing more"
        stopped = None if state.fault else _Stopped("timeout", f"did not leave {GRACE_S:g} s after {told}")
    except KeyboardInterrupt:
        stopped = _Stopped("interrupted", "interrupted")
    finally:
        program.end()
    return stopped


def _follow(
    process: subprocess.Popen[bytes],
    read: int,
    state: _State,
    limits: Limits,
    on_event: Callable[[Event], None],
) -> None:
    """Until the pipe ends, or the process has left it to a descendant that keeps it open."""
    rest = b""
    with selectors.DefaultSelector() as selector:
        selector.register(read, selectors.EVENT_READ)
        while True:
            _check(state, limits)
            left = process.poll() is not None
            if not selector.select(POLL_S):
                if left:
                    return
                continue
            if not (data := os.read(read, 1 << 16)):
                return
            *lines, rest = (rest + data).split(b"\n")
            for line in lines:
                event = cast("Event", json.loads(line))
                state.take(event)
                on_event(event)


def _check(state: _State, limits: Limits) -> None:
    """Raises _Stopped when a limit is passed."""
    now = time.monotonic()
    if now > limits.until:
        raise _Stopped("interrupted", "the time given for all arms was up")
    limit = limits.run_s if state.phase in ("run", "done") else limits.start_s
    if now - state.since > limit:
        where = f"run {state.run}" if state.run is not None else f"phase {state.phase}"
        raise _Stopped("timeout", f"killed after {limit:g} s in {where}")


def _ended(
    process: subprocess.Popen[bytes], state: _State, stopped: _Stopped | None, log: str, seconds: float
) -> Start:
    kind, message = _kind(process.returncode, state, stopped, log)
    code = process.returncode
    killed = stopped is not None
    return Start(
        kind=kind,
        phase=state.phase,
        run=state.fault["run"] if state.fault else state.run,
        message=message,
        exit_code=code if code >= 0 and not killed else None,
        signal=isolation.signal_name(-code) if code < 0 and not killed else "",
        log_tail=_relevant(log) if kind != "value" else "",
        seconds=round(seconds, 3),
        **state.facts,
    )


def _kind(code: int, state: _State, stopped: _Stopped | None, log: str) -> tuple[EndKind, str]:
    """(kind, message) of an ended process."""
    if stopped is not None:
        return stopped.kind, stopped.message
    if state.fault is not None:
        message = str(state.fault["message"])
        kind = isolation.exception_kind(state.fault["types"], message, state.fault["code"])
        return kind, f"{state.fault['types'][0]}: {message}"
    if code < 0:
        return isolation.death_kind(-code, log), f"died by {isolation.signal_name(-code)}"
    if code == child.WRONG_RELEASE:
        return "wrong-release", log.strip().splitlines()[-1] if log.strip() else "another release"
    if code == 0 and state.phase == "done":
        return "value", ""
    return "exit", f"left with exit code {code} in phase {state.phase}"


def _relevant(log: str) -> str:
    return re.sub(r"^Extension modules: .*\n?", "", log, flags=re.MULTILINE)[-LOG_TAIL:]


def _end_of(path: Path) -> str:
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - LOG_READ))
        return file.read(LOG_READ).decode(errors="replace")
