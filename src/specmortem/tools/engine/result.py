"""What runs of engines say, as values and as a file."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, ClassVar, Literal, get_args

from specmortem import isolation
from specmortem.convert import Amount, Count, Value
from specmortem.errors import BadInputError
from specmortem.verdict import read_json, write_atomically

FILE_NAME = "engine.json"  # not results.json, which holds rows of another schema in folders beside this one
EndKind = Literal[isolation.Kind, "exit", "wrong-release", "interrupted"]
Phase = Literal["import", "start", "run", "done"]
RunOutcome = Literal["whole", "fault", "timeout"]
# Ends that a race on the GPU can have. Others tell of this package, of the release or of the machine.
Fault = Literal["illegal-address", "device-assert", "cuda-error", "signal", "timeout"]
FAULTS: tuple[str, ...] = get_args(Fault)
RunKind = Literal["value", Fault]
Likeness = Literal["same", "differs", "not-compared"]
Status = Literal["complete", "partial", "interrupted"]


class EngineRequest(Value, frozen=True, array_like=True):
    """One request: counts of tokens, and what is wrong with those that came.

    `tokens` came of at most `max_tokens`. `judged` says whether it is held against the right answer: one must be known,
    and the temperature 0. `wrong_at` is the first token that is not the answer's, `plain_at` the first unlike the same
    engine's without speculation. `got` holds the tokens where they are not those of the answer; an empty `got` beside
    `judged` means the answer's first `tokens`.
    """

    id: str
    prompt_tokens: Count
    max_tokens: Count
    tokens: Count
    finish: str
    judged: bool
    wrong_at: Count | None = None
    early: bool = False
    ends_in_loop: bool = False
    plain: Likeness = "not-compared"
    plain_at: Count | None = None
    got: tuple[int, ...] = ()

    @property
    def damaged(self) -> bool:
        """Whether anything is wrong by the answer."""
        return self.wrong_at is not None or self.early or self.ends_in_loop


class Counts(Value, frozen=True):
    """Requests of a run: those that ended, those judged by their answer and what was wrong, those compared."""

    ended: Count = 0
    judged: Count = 0
    wrong: Count = 0
    early: Count = 0
    ends_in_loop: Count = 0
    compared: Count = 0
    differs: Count = 0


class RunAcceptance(Value, frozen=True):
    """The engine's own counters over a run: drafts, tokens in them, those accepted, and accepted by position."""

    drafts: Count
    draft_tokens: Count
    accepted: Count
    per_position: tuple[Count, ...] = ()

    @property
    def rate(self) -> float | None:
        """Accepted of drafted tokens; None for no draft."""
        return self.accepted / self.draft_tokens if self.draft_tokens else None


class Run(Value, frozen=True):
    """One repetition of the workload. `start` is the engine start it belongs to, `first` whether it was its first.

    `counts` are of all its requests. `kept` holds those alone that are damaged or unlike the ones without speculation
    (and, where no answer is known but arms are compared, all). `short` gives the tokens of requests that are not kept
    and ended before their `max_tokens`, as aborted ones do; the others have all of their answer. `lost` were sent or
    planned and never ended. Step times are of `LLMEngine.step`, in milliseconds; `delay_us` is the median of the idle
    GPU work that was put in front of a step, in microseconds, None for none, and `draft_delay_us` that in front of
    each of `draft_passes` draft passes; `patched_calls` went through the arm's patch. Results that are older than these
    three lack them.
    """

    run: Count
    start: Count
    first: bool
    outcome: RunOutcome
    kind: RunKind
    counts: Counts
    kept: tuple[EngineRequest, ...] = ()
    short: Mapping[str, Count] = {}
    lost: tuple[str, ...] = ()
    acceptance: RunAcceptance | None = None
    steps: Count = 0
    median_ms: Amount | None = None
    p99_ms: Amount | None = None
    delay_us: Amount | None = None
    seconds: Amount = 0.0
    emitted: Mapping[str, Count] = {}
    draft_delay_us: Amount | None = None
    draft_passes: Count = 0
    patched_calls: Count = 0

    younger: ClassVar = frozenset({"draft_delay_us", "draft_passes", "patched_calls"})


class Start(Value, frozen=True):
    """One process of an engine and how it ended, typed.

    `chosen` is what the engine settled on by itself, `host` the system and the GPU driver it ran on, `inherited` the
    variables of the caller that may change what an engine does and that the arm did not set.
    """

    kind: EndKind
    phase: Phase
    run: Count | None
    message: str
    exit_code: int | None
    signal: str
    log_tail: str
    seconds: Amount
    import_s: Amount | None = None
    up_s: Amount | None = None
    device: str = ""
    versions: Mapping[str, str] = {}
    chosen: Mapping[str, Any] = {}
    host: Mapping[str, str] = {}
    inherited: Mapping[str, str] = {}

    @property
    def judges(self) -> bool:
        """Whether this end leaves its arm judged: a fault does, an exception in Python does not."""
        return self.kind in ("value", "interrupted", *FAULTS)

    @property
    def told(self) -> str:
        """The end in one line."""
        return ": ".join(part for part in (self.kind, " ".join(self.message.split())) if part)


class ArmRuns(Value, frozen=True):
    """All that was seen of an arm; `planned` runs were asked for."""

    name: str
    config: Mapping[str, Any]
    reference: str
    says: str
    planned: Count
    starts: tuple[Start, ...] = ()
    runs: tuple[Run, ...] = ()

    def __post_init__(self) -> None:
        """Raises BadInputError for a config without one of its parts."""
        _check_keys(self.config, ("vllm", "engine", "env", "workload"), "config")

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


class EngineResults(Value, frozen=True, tag_field="schema", tag=1):
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

    def __post_init__(self) -> None:
        """Raises BadInputError for a pair without one of its parts."""
        for pair in self.pairs:
            _check_keys(pair, ("left", "right", "variable", "question"), "pairs")

    def arm(self, name: str) -> ArmRuns | None:
        """The arm of that name, if it was run."""
        return next((arm for arm in self.arms if arm.name == name), None)

    def save(self, path: Path) -> Path:
        """Write the file whole or not at all. Raises UnavailableError when the folder or the disk refuses."""
        return write_atomically(path, json.dumps(self.as_dict(), separators=(",", ":")) + "\n")

    @classmethod
    def load(cls, path: Path) -> EngineResults:
        """Read and check a result file. Raises BadInputError naming the file when it is not one."""
        return cls.from_dict(read_json(path, "specmortem engine"), str(path))


def _check_keys(table: Mapping[str, Any], names: Iterable[str], where: str) -> None:
    if lacking := [name for name in names if name not in table]:
        raise BadInputError(f"{where}: {lacking[0]} is missing")
