"""The near side of `child`: start the process of one engine, follow what it tells, and say how it ended."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from specmortem import isolation
from specmortem.errors import BadInputError, UnavailableError
from specmortem.isolation import SupervisorHandle, SupervisorLostError
from specmortem.tools.engine import child, places
from specmortem.tools.engine.result import EndKind, Phase, Start

CHILD = Path(child.__file__)
LOG_TAIL = 4000  # characters
GRACE_S = 10.0  # for a process that has told its end to leave
ANSWER_S = 30.0  # for the supervisor to say how a process ended that it had to kill
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
FROM_THE_PROCESS = ("message", "log_tail", "device", "versions", "chosen", "inherited")  # kept without places
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
class StartLimits:
    """Seconds: from the start of the process until the engine is up, of a run, and when all must have ended.

    `until` is of `time.monotonic`.
    """

    start_s: float
    run_s: float
    until: float = float("inf")


def run(
    request: Mapping[str, Any],
    environment: Environment,
    variables: Mapping[str, str],
    limits: StartLimits,
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
    with isolation.open_supervisor("cuda") as supervisor:
        begun = time.monotonic()
        asked, events = supervisor.folder / "engine.json", supervisor.folder / "events"
        asked.write_text(json.dumps(dict(request)), encoding="utf-8")
        events.touch()
        command = [environment.python, "-P", str(CHILD), str(asked), str(events)]
        log = supervisor.start_program(command, environment.variables(variables), limits.start_s)
        following = _Following(supervisor, events, limits, on_event)
        lost = following.to_the_end()
        if (report := following.report) is not None and report["code"] is None:
            raise UnavailableError(f"cannot start {environment.python}: {report['message']}")
        ended = following.ended(lost, isolation.end_of(log), time.monotonic() - begun)
    ended = ended.replace(inherited=environment.inherited(variables))
    clean = {name: places.cleaned_all(getattr(ended, name), hide) for name in FROM_THE_PROCESS}
    return ended.replace(**clean)


@dataclass
class _Following:
    """Takes what a process tells, and has its supervisor kill it when the time for what it does now is up."""

    supervisor: SupervisorHandle
    events: Path
    limits: StartLimits
    on_event: Callable[[Event], None]
    phase: Phase = "import"
    run: int | None = None
    fault: Event | None = None
    facts: dict[str, Any] = field(default_factory=dict)
    report: Mapping[str, Any] | None = None
    interrupted: bool = False
    read: int = 0  # bytes of the events

    def __post_init__(self) -> None:
        self._begin(self.limits.start_s)

    def to_the_end(self) -> str:
        """Until the process has ended and nothing of it is left; how the supervisor was lost, should it be."""
        while True:
            try:
                self.report = self.supervisor.next_report(POLL_S)
                self._take()
                if self.report is not None:
                    return ""
                if time.monotonic() > self.due:
                    return "the supervisor process did not answer"
            except KeyboardInterrupt:
                self.interrupted = True
                self._begin(0.0)
            except SupervisorLostError as error:
                return str(error)

    def _begin(self, seconds: float) -> None:
        """Give the process so long from now on, within the time for all."""
        self.limit_s = seconds
        seconds = max(0.0, min(seconds, self.limits.until - time.monotonic()))
        self.due = time.monotonic() + seconds + ANSWER_S
        self.supervisor.allow(0, seconds)

    def _take(self) -> None:
        """The events that are there and were not read yet."""
        with self.events.open("rb") as file:
            file.seek(self.read)
            for line in file:
                if not line.endswith(b"\n"):
                    return
                self.read += len(line)
                event: Event = json.loads(line)
                if (seconds := self._note(event)) is not None and not self.interrupted:
                    self._begin(seconds)
                self.on_event(event)

    def _note(self, event: Event) -> float | None:
        """Keep what an event tells; the seconds for what begins with it, None where nothing does."""
        kind = event["event"]
        if kind == "imported":
            self.facts |= {"import_s": event["seconds"], "versions": event["versions"]}
            self.phase = "start"
        elif kind == "up":
            self.facts |= {"up_s": event["seconds"], "device": event["device"], "chosen": event["chosen"]}
        elif kind == "begin":
            self.phase, self.run = "run", event["run"]
        elif kind == "run":
            self.run = None
        elif kind == "done":
            self.phase, self.run = "done", None
        elif kind == "fault":
            self.fault = event
        if kind in ("begin", "run"):
            return self.limits.run_s
        return GRACE_S if kind in ("done", "fault") else None

    def ended(self, lost: str, log: str, seconds: float) -> Start:
        """The end of the process; `lost` says how its supervisor went, where it did."""
        kind, message = self._kind(lost, log)
        report = self.report
        by_itself = report is not None and not (self.interrupted or report["timed_out"])
        code = report["code"] if report is not None and by_itself else None
        return Start(
            kind=kind,
            phase=self.phase,
            run=self.fault["run"] if self.fault else self.run,
            message=message,
            exit_code=code if code is not None and code >= 0 else None,
            signal=isolation.signal_name(-code) if code is not None and code < 0 else "",
            log_tail=log[-LOG_TAIL:] if kind != "value" else "",
            seconds=round(seconds, 3),
            **self.facts,
        )

    def _kind(self, lost: str, log: str) -> tuple[EndKind, str]:
        """(kind, message) of the ended process."""
        if self.interrupted:
            return "interrupted", "interrupted"
        if self.report is None:
            return "exit", lost
        if self.fault is not None:
            types, message = self.fault["types"], str(self.fault["message"])
            return isolation.exception_kind(types, message, self.fault["code"]), f"{types[0]}: {message}"
        if self.report["timed_out"]:
            return self._timeout()
        code = self.report["code"]
        if code < 0:
            kind = isolation.death_kind(-code, log, oom_killed=self.report["oom_killed"])
            return kind, f"died by {isolation.signal_name(-code)}"
        if code == child.WRONG_RELEASE:
            return "wrong-release", log.strip().splitlines()[-1] if log.strip() else "another release"
        if code == 0 and self.phase == "done":
            return "value", ""
        return "exit", f"left with exit code {code} in phase {self.phase}"

    def _timeout(self) -> tuple[EndKind, str]:
        """(kind, message) of a process that was killed because its time was up."""
        if time.monotonic() >= self.limits.until:
            return "interrupted", "the time given for all arms was up"
        if self.phase == "done":
            return "timeout", f"did not leave {GRACE_S:g} s after its end"
        where = f"run {self.run}" if self.run is not None else f"phase {self.phase}"
        return "timeout", f"killed after {self.limit_s:g} s in {where}"
