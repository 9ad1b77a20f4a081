"""What runs of engines say, as values and as a file."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any, Literal, get_args

from specmortem import isolation
from specmortem.errors import BadInputError
from specmortem.verdict import check_schema, read_json, write_atomically

SCHEMA_VERSION = 1
FILE_NAME = "engine.json"  # not results.json, which holds rows of another schema in folders beside this one
EndKind = Literal[isolation.Kind, "exit", "wrong-release", "interrupted"]
Phase = Literal["import", "start", "run", "done"]
RunOutcome = Literal["whole", "fault", "timeout"]
# Ends that a race on the GPU can have. Others tell of this package, of the release or of the machine.
FAULTS = ("illegal-address", "device-assert", "cuda-error", "signal", "timeout")
Likeness = Literal["same", "differs", "not-compared"]
Status = Literal["complete", "partial", "interrupted"]


@dataclass(frozen=True)
class EngineRequest:
    """One request: counts of tokens, and what is wrong with those that came.

    `tokens` came of at most `max_tokens`. `judged` says whether it is held against the right answer: one must be known,
    and the temperature 0. `wrong_at` is the first token that is not the answer's, `plain_at` the first unlike the same
    engine's without speculation. `got` holds the tokens where they are not those of the answer; an empty `got` beside
    `judged` means the answer's first `tokens`.
    """

    id: str
    prompt_tokens: int
    max_tokens: int
    tokens: int
    finish: str
    judged: bool
    wrong_at: int | None = None
    early: bool = False
    ends_in_loop: bool = False
    plain: Likeness = "not-compared"
    plain_at: int | None = None
    got: tuple[int, ...] = ()

    @property
    def damaged(self) -> bool:
        """Whether anything is wrong by the answer."""
        return self.wrong_at is not None or self.early or self.ends_in_loop


@dataclass(frozen=True)
class Counts:
    """Requests of a run: those that ended, those judged by their answer and what was wrong, those compared."""

    ended: int = 0
    judged: int = 0
    wrong: int = 0
    early: int = 0
    ends_in_loop: int = 0
    compared: int = 0
    differs: int = 0


@dataclass(frozen=True)
class RunAcceptance:
    """The engine's own counters over a run: drafts, tokens in them, those accepted, and accepted by position."""

    drafts: int
    draft_tokens: int
    accepted: int
    per_position: tuple[int, ...] = ()

    @property
    def rate(self) -> float | None:
        """Accepted of drafted tokens; None for no draft."""
        return self.accepted / self.draft_tokens if self.draft_tokens else None


@dataclass(frozen=True)
class Run:
    """One repetition of the workload. `start` is the engine start it belongs to, `first` whether it was its first.

    `counts` are of all its requests. `kept` holds those alone that are damaged or unlike the ones without speculation
    (and, where no answer is known but arms are compared, all). `short` gives the tokens of requests that are not kept
    and ended before their `max_tokens`, as aborted ones do; the others have all of their answer. `lost` were sent or
    planned and never ended. Step times are of `LLMEngine.step`, in milliseconds; `delay_us` is the median of the idle
    GPU work that was put in front of a step, in microseconds, None for none, and `draft_delay_us` that in front of
    each of `draft_passes` draft passes; `patched_calls` went through the arm's patch. Results that are older than these
    three lack them.
    """

    run: int
    start: int
    first: bool
    outcome: RunOutcome
    kind: str
    counts: Counts
    kept: tuple[EngineRequest, ...] = ()
    short: Mapping[str, int] = field(default_factory=dict)
    lost: tuple[str, ...] = ()
    acceptance: RunAcceptance | None = None
    steps: int = 0
    median_ms: float | None = None
    p99_ms: float | None = None
    delay_us: float | None = None
    seconds: float = 0.0
    emitted: Mapping[str, int] = field(default_factory=dict)
    draft_delay_us: float | None = None
    draft_passes: int = 0
    patched_calls: int = 0


@dataclass(frozen=True)
class Start:
    """One process of an engine and how it ended, typed.

    `chosen` is what the engine settled on by itself, `host` the system and the GPU driver it ran on, `inherited` the
    variables of the caller that may change what an engine does and that the arm did not set.
    """

    kind: EndKind
    phase: Phase
    run: int | None
    message: str
    exit_code: int | None
    signal: str
    log_tail: str
    seconds: float
    import_s: float | None = None
    up_s: float | None = None
    device: str = ""
    versions: Mapping[str, str] = field(default_factory=dict)
    chosen: Mapping[str, Any] = field(default_factory=dict)
    host: Mapping[str, str] = field(default_factory=dict)
    inherited: Mapping[str, str] = field(default_factory=dict)

    @property
    def judges(self) -> bool:
        """Whether this end leaves its arm judged: a fault does, an exception in Python does not."""
        return self.kind in ("value", "interrupted", *FAULTS)

    @property
    def told(self) -> str:
        """The end in one line."""
        return ": ".join(part for part in (self.kind, " ".join(self.message.split())) if part)


@dataclass(frozen=True)
class ArmRuns:
    """All that was seen of an arm; `planned` runs were asked for."""

    name: str
    config: Mapping[str, Any]
    reference: str
    says: str
    planned: int
    starts: tuple[Start, ...] = ()
    runs: tuple[Run, ...] = ()

    @property
    def whole(self) -> bool:
        """Whether all runs are there, be they faulty."""
        return len(self.runs) >= self.planned

    @property
    def not_judged(self) -> str:
        """Why nothing is said of this arm: how its last engine ended, where that is no fault; empty where it is."""
        ended = [start for start in self.starts if start.kind != "interrupted"]
        if not ended or ended[-1].judges:
            return ""
        return ended[-1].told


@dataclass(frozen=True)
class EngineResults:
    """The content of a result file. `pairs` are compared arms with the variable in which they differ."""

    incident: str
    question: str
    status: Status
    command: str
    started: str
    seed: int
    model: Mapping[str, Any]
    arms: tuple[ArmRuns, ...]
    pairs: tuple[Mapping[str, str], ...]
    notes: tuple[str, ...] = ()

    def arm(self, name: str) -> ArmRuns | None:
        """The arm of that name, if it was run."""
        return next((arm for arm in self.arms if arm.name == name), None)

    def as_dict(self) -> dict[str, Any]:
        """JSON form, in the order of the schema; requests as rows of their fields."""
        made = {"schema": SCHEMA_VERSION, **asdict(self)}
        for run in (run for arm in made["arms"] for run in arm["runs"]):
            run["kept"] = [list(request.values()) for request in run["kept"]]
        return made

    def save(self, path: Path) -> Path:
        """Write the file whole or not at all. Raises UnavailableError when the folder or the disk refuses."""
        return write_atomically(path, json.dumps(self.as_dict(), separators=(",", ":")) + "\n")

    @classmethod
    def from_dict(cls, data: Mapping[str, Any], source: str = "result") -> EngineResults:
        """Check and build. Raises BadInputError naming `source` and the first wrong field."""
        _check(data, source)
        try:
            rest = {name: data[name] for name in data if name != "schema"}
            lists = {"arms": tuple(map(_arm, data["arms"])), "pairs": tuple(data["pairs"])}
            return cls(**{**rest, **lists, "notes": tuple(data["notes"])})
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise BadInputError(f"{source}: not a result of this version of specmortem: {error}") from error

    @classmethod
    def load(cls, path: Path) -> EngineResults:
        """Read and check a result file. Raises BadInputError naming the file when it is not one."""
        return cls.from_dict(read_json(path, "specmortem engine"), str(path))


def _check(data: Any, source: str) -> None:
    """By the schema; only its number where jsonschema is not installed, as beside an engine. Raises BadInputError."""
    try:
        check_schema(data, schema(), source)
    except ImportError:
        if not isinstance(data, dict) or data.get("schema") != SCHEMA_VERSION:
            raise BadInputError(
                f"{source}: not a result of this version of specmortem: schema is not {SCHEMA_VERSION}"
            ) from None


def _arm(data: Mapping[str, Any]) -> ArmRuns:
    starts, runs = tuple(Start(**start) for start in data["starts"]), tuple(map(_run, data["runs"]))
    return ArmRuns(**{**data, "starts": starts, "runs": runs})


def _run(data: Mapping[str, Any]) -> Run:
    counted = data["acceptance"]
    acceptance = counted and RunAcceptance(**{**counted, "per_position": tuple(counted["per_position"])})
    made = {
        "counts": Counts(**data["counts"]),
        "kept": tuple(map(_request, data["kept"])),
        "lost": tuple(data["lost"]),
        "acceptance": acceptance or None,
    }
    return Run(**{**data, **made})


def _request(row: Sequence[Any]) -> EngineRequest:
    made = dict(zip((each.name for each in fields(EngineRequest)), row, strict=True))
    return EngineRequest(**{**made, "got": tuple(made["got"])})


@cache
def schema() -> dict[str, Any]:
    """The JSON Schema of the result file."""
    text = (
        resources.files("specmortem.tools.engine").joinpath("engine.schema.json").read_text(encoding="utf-8")
    )
    loaded: dict[str, Any] = json.loads(text)
    kinds = [*get_args(isolation.Kind), "exit", "wrong-release", "interrupted"]
    loaded["$defs"]["start"]["properties"]["kind"]["enum"] = kinds
    loaded["$defs"]["run"]["properties"]["kind"]["enum"] = ["value", *FAULTS]
    return loaded
