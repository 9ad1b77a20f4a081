"""Which segments belong together: one case for each incident that a thread or a set of files tells of."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from specmortem.statements.facts import FactBook
from specmortem.tools.triage.reader import Segment

BROKE = ("fault", "symptom", "phase")
MOST_CASES = 32
DIFFERENCES = 2  # of version, GPU, drafter and kind of fault: another incident


@dataclass
class TriageCase:
    """What segments state that can be of one incident; `where` is file and first line."""

    where: str
    book: FactBook = field(default_factory=FactBook)


def split(segments: Iterable[Segment]) -> list[TriageCase]:
    """Cases in the order in which they begin; there is always one."""
    cases: list[TriageCase] = []
    current: TriageCase | None = None
    for segment in segments:
        if not segment.facts and current is not None:
            continue
        if current is None or not _joins(current, segment):
            current = next((case for case in reversed(cases) if _joins(case, segment)), None)
        if current is None:
            current = TriageCase(f"{segment.file}:{segment.line}")
            if len(cases) < MOST_CASES:
                cases.append(current)
        current.book.extend(segment.facts)
    return cases or [TriageCase(":0")]


def _joins(case: TriageCase, segment: Segment) -> bool:
    """Whether nothing says that the segment is of another incident."""
    old, new = _identity(case.book), _identity(FactBook(segment.facts))
    if _differ(old, new, "engine"):
        return False
    if not (old["broke"] and new["broke"]):
        return True
    differences = sum(_differ(old, new, name) for name in ("version", "gpu", "method", "fault", "spec"))
    return differences < DIFFERENCES


def _identity(book: FactBook) -> Mapping[str, set[str]]:
    engines = {value.removesuffix("-ascend") for value in book.values("engine")[:1]}
    off = {"off"} if book.value("speculation") == "off" and "method" not in book else set()
    return {
        "engine": engines,
        "version": {_base(value) for value in book.values("version")},
        "gpu": {re.sub(r"\D", "", value) or value for value in book.values("gpu")},
        "method": set(book.values("method")),
        "fault": set(book.values("fault")),
        "spec": off or ({"on"} if "method" in book else set()),
        "broke": {name for name in BROKE if name in book},
    }


def _base(version: str) -> str:
    match = re.match(r"\d+\.\d+(?:\.\d+)?", version)
    return match.group() if match else version


def _differ(old: Mapping[str, set[str]], new: Mapping[str, set[str]], name: str) -> bool:
    return bool(old[name] and new[name] and not old[name] & new[name])
