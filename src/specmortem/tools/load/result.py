"""The result of a load run, as a value and as a file."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from enum import StrEnum
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

from specmortem.errors import BadInputError
from specmortem.tools.load.metrics import Window
from specmortem.tools.load.outcome import UNREMARKABLE, Outcome, RequestRecord
from specmortem.verdict import check_schema, read_json, write_atomically

SCHEMA_VERSION = 1


class Status(StrEnum):
    """How a run ended."""

    RUNNING = "running"
    FINISHED = "finished"
    COUNT_LIMIT = "count-limit"
    TIME_LIMIT = "time-limit"
    SERVER_DEAD = "server-dead"
    WARM_UP_FAILED = "warm-up-failed"
    INTERRUPTED = "interrupted"


class Sign(StrEnum):
    """What the run as a whole showed, beyond its single requests."""

    SERVER_DEAD = "server-dead"
    SERVER_RESTARTED = "server-restarted"
    ACCEPTANCE_COLLAPSE = "acceptance-collapse"


COMPLETE = frozenset({Status.FINISHED, Status.COUNT_LIMIT})


@dataclass(frozen=True)
class Finding:
    """Something detected: an outcome with its requests, or a sign of the whole run without any."""

    kind: str
    said: str
    requests: tuple[str, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        """JSON form."""
        return asdict(self) | {"requests": list(self.requests)}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Finding:
        """Inverse of `as_dict`."""
        return cls(data["kind"], data["said"], tuple(data["requests"]))


@dataclass(frozen=True)
class Result:
    """A run, whole or partial. `planned` leaves the limit on the count out; `windows` are those of acceptance.

    Raises BadInputError when a request appears twice.
    """

    status: Status
    said: str
    command: str
    started: str
    seconds: float
    model: str
    settings: Mapping[str, Any]
    versions: Mapping[str, str]
    planned: int
    requests: tuple[RequestRecord, ...]
    signs: tuple[Finding, ...] = ()
    notes: tuple[str, ...] = ()
    not_judged: tuple[str, ...] = ()
    metrics_offered: bool = False
    overall: Window | None = None
    windows: tuple[Window, ...] = ()

    def __post_init__(self) -> None:
        """Check that each request is there once."""
        if twice := [id for id, count in Counter(r.id for r in self.requests).items() if count > 1]:
            raise BadInputError(f"request {twice[0]} appears twice in the result")

    @property
    def counts(self) -> dict[Outcome, int]:
        """Requests by outcome, in the order of the outcomes."""
        counted = Counter(record.outcome for record in self.requests)
        return {outcome: counted[outcome] for outcome in Outcome if counted[outcome]}

    @property
    def findings(self) -> tuple[Finding, ...]:
        """All that was detected; every request is in at most one of them."""
        found = []
        for outcome in self.counts:
            if outcome not in UNREMARKABLE:
                some = [r for r in self.requests if r.outcome is outcome]
                found.append(Finding(outcome.value, some[0].reason, tuple(r.id for r in some)))
        return (*found, *self.signs)

    @property
    def clean(self) -> bool:
        """Whether the run went to its end, all that was asked was judged, and nothing was detected."""
        return self.status in COMPLETE and not self.findings and not self.not_judged

    def as_dict(self) -> dict[str, Any]:
        """JSON form, in the order of the schema."""
        return {
            "schema": SCHEMA_VERSION,
            "status": self.status.value,
            "said": self.said,
            "command": self.command,
            "started": self.started,
            "seconds": round(self.seconds, 3),
            "model": self.model,
            "settings": dict(self.settings),
            "versions": dict(self.versions),
            "planned": self.planned,
            "sent": len(self.requests),
            "counts": {outcome.value: count for outcome, count in self.counts.items()},
            "findings": [finding.as_dict() for finding in self.findings],
            "notes": list(self.notes),
            "not_judged": list(self.not_judged),
            "acceptance": {
                "offered": self.metrics_offered,
                "overall": self.overall.as_dict() if self.overall else None,
                "windows": [window.as_dict() for window in self.windows],
            },
            "requests": [record.as_dict() for record in self.requests],
        }

    def as_json(self) -> str:
        """The file's text, in ASCII so that nothing in it moves a terminal."""
        return json.dumps(self.as_dict(), indent=1) + "\n"

    def save(self, path: Path) -> Path:
        """Write the file whole or not at all. Raises UnavailableError when the folder or the disk refuses."""
        return write_atomically(path, self.as_json())

    @classmethod
    def from_dict(cls, data: Mapping[str, Any], source: str = "result") -> Result:
        """Check against the schema and build. Raises BadInputError naming `source` and what is wrong."""
        check_schema(data, schema(), source)
        acceptance, names = data["acceptance"], {sign.value for sign in Sign}
        made = cls(
            **{
                key: data[key]
                for key in ("said", "command", "started", "seconds", "model", "settings", "versions")
            },
            status=Status(data["status"]),
            planned=data["planned"],
            requests=tuple(map(RequestRecord.from_dict, data["requests"])),
            signs=tuple(Finding.from_dict(f) for f in data["findings"] if f["kind"] in names),
            notes=tuple(data["notes"]),
            not_judged=tuple(data["not_judged"]),
            metrics_offered=acceptance["offered"],
            overall=Window.from_dict(acceptance["overall"]) if acceptance["overall"] else None,
            windows=tuple(map(Window.from_dict, acceptance["windows"])),
        )
        _check_sums(made, data, source)
        return made

    @classmethod
    def load(cls, path: Path) -> Result:
        """Read and check a result file. Raises BadInputError naming the file when it is not one."""
        return cls.from_dict(read_json(path, "specmortem load"), str(path))


def _check_sums(made: Result, data: Mapping[str, Any], source: str) -> None:
    told = made.as_dict()
    for name in ("sent", "counts", "findings"):
        if told[name] != data[name]:
            raise BadInputError(f"{source}: {name} does not fit the requests in it")


@cache
def schema() -> dict[str, Any]:
    """The JSON Schema of the result file."""
    text = resources.files("specmortem.tools.load").joinpath("load.schema.json").read_text(encoding="utf-8")
    loaded: dict[str, Any] = json.loads(text)
    return loaded
