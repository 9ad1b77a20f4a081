"""The result of a load run, as a value and as a file."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from enum import StrEnum
from pathlib import Path
from typing import Any

from msgspec.structs import force_setattr

from specmortem.convert import Amount, Count, Value
from specmortem.errors import BadInputError
from specmortem.tools.load.metrics import Window
from specmortem.tools.load.outcome import UNREMARKABLE, DescribedEnum, Outcome, RequestRecord, tally
from specmortem.verdict import read_json, write_atomically


class Status(DescribedEnum):
    """How a run ended."""

    RUNNING = "running", "still running"
    FINISHED = "finished", "all requests were sent"
    COUNT_LIMIT = "count-limit", "ended by the limit on requests"
    TIME_LIMIT = "time-limit", "ended by the limit on time"
    SERVER_DEAD = "server-dead", "ended because the server died"
    WARM_UP_FAILED = "warm-up-failed", "ended because the warm-up failed"
    INTERRUPTED = "interrupted", "interrupted"


class Sign(StrEnum):
    """What the run as a whole showed, beyond its single requests."""

    SERVER_DEAD = "server-dead"
    SERVER_RESTARTED = "server-restarted"
    ACCEPTANCE_COLLAPSE = "acceptance-collapse"


COMPLETE = frozenset({Status.FINISHED, Status.COUNT_LIMIT})


KINDS = frozenset({*Outcome, *Sign})


class Finding(Value, frozen=True):
    """Something detected: an outcome with its requests, or a sign of the whole run without any.

    Raises BadInputError for a kind that is neither, and for a request that is there twice.
    """

    kind: str
    said: str
    requests: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        """Check the kind and the requests."""
        if self.kind not in KINDS:
            raise BadInputError(f"kind {self.kind!r} is neither an outcome nor a sign")
        if len(set(self.requests)) < len(self.requests):
            raise BadInputError(f"a request appears twice in the finding {self.kind}")


class AcceptedDrafts(Value, frozen=True):
    """Whether the server offers counters of drafts, and what they said: overall, and by windows."""

    offered: bool = False
    overall: Window | None = None
    windows: tuple[Window, ...] = ()


class Result(Value, frozen=True, kw_only=True, tag_field="schema", tag=1):
    """A run, whole or partial. `planned` leaves the limit on the count out.

    `sent`, `counts` by outcome, and what `findings` say of requests follow from the requests: give signs alone, or
    all of it as in a file. Raises BadInputError when a request appears twice, or where the requests say otherwise.
    """

    status: Status
    said: str
    command: str
    started: str
    seconds: Amount
    model: str
    settings: Mapping[str, Any]
    versions: Mapping[str, str]
    planned: Count
    sent: Count | None = None
    counts: Mapping[Outcome, Count] = {}
    findings: tuple[Finding, ...] = ()
    notes: tuple[str, ...] = ()
    not_judged: tuple[str, ...] = ()
    acceptance: AcceptedDrafts = AcceptedDrafts()
    requests: tuple[RequestRecord, ...]

    def __post_init__(self) -> None:
        """Check that each request is there once, and fill in or compare what follows from them."""
        if twice := [id for id, count in Counter(r.id for r in self.requests).items() if count > 1]:
            raise BadInputError(f"request {twice[0]} appears twice in the result")
        if lacking := [name for name in ("url", "shape", "seed", "limits") if name not in self.settings]:
            raise BadInputError(f"settings: {lacking[0]} is missing")
        given = self.sent is not None
        for name, found in self._sums().items():
            if given and found != getattr(self, name):
                raise BadInputError(f"{name} does not fit the requests in it")
            force_setattr(self, name, found)

    @property
    def signs(self) -> tuple[Finding, ...]:
        """What the run as a whole showed."""
        return tuple(finding for finding in self.findings if finding.kind in set(Sign))

    def _sums(self) -> dict[str, Any]:
        counts = tally(self.requests)
        found = []
        for outcome in (each for each in counts if each not in UNREMARKABLE):
            some = [r for r in self.requests if r.outcome is outcome]
            found.append(Finding(outcome.value, some[0].reason, tuple(r.id for r in some)))
        return {"sent": len(self.requests), "counts": counts, "findings": (*found, *self.signs)}

    @property
    def clean(self) -> bool:
        """Whether the run went to its end, all that was asked was judged, and nothing was detected."""
        return self.status in COMPLETE and not self.findings and not self.not_judged

    def as_json(self) -> str:
        """The file's text, in ASCII so that nothing in it moves a terminal."""
        return json.dumps(self.as_dict(), indent=1) + "\n"

    def save(self, path: Path) -> Path:
        """Write the file whole or not at all. Raises UnavailableError when the folder or the disk refuses."""
        return write_atomically(path, self.as_json())

    @classmethod
    def load(cls, path: Path) -> Result:
        """Read and check a result file. Raises BadInputError naming the file when it is not one."""
        return cls.from_dict(read_json(path, "specmortem load"), str(path))
