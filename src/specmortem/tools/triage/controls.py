"""What reporters changed, one thing at a time, and what happened then."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

from specmortem.statements.engine_re import PatternSet, compile_text
from specmortem.statements.signs import data

LONGEST, SHORTEST = 2_000, 8  # characters of a line, and of a clause in it, that can tell of a control


@dataclass(frozen=True)
class Control:
    """A configuration that was tried, and whether the defect showed: `clean` or `faults`; `start` is its clause's."""

    subject: str
    result: str
    start: int = 0


def controls(text: str) -> Iterator[Control]:
    """The controls that a line of prose tells of, clause by clause; a suggestion is none."""
    if len(text) > LONGEST:
        return
    for start, clause in _clauses(text):
        if len(clause) < SHORTEST or not (found := _subjects().indices(clause.encode("utf-8", "replace"))):
            continue
        if result := _result(clause):
            yield from (Control(data().controls[index].subject, result, start) for index in found)


def _clauses(text: str) -> Iterator[tuple[int, str]]:
    """Each clause, and where it begins."""
    start = 0
    for match in _outcome("clause_ends").finditer(text):
        yield start, text[start : match.start()]
        start = match.end()
    yield start, text[start:]


def _result(clause: str) -> str:
    if _outcome("supposed").search(clause):
        return ""
    if _outcome("faults_still").search(clause):
        return "faults"
    if _outcome("clean").search(clause):
        return "clean"
    return "faults" if _outcome("faults").search(clause) else ""


@cache
def _subjects() -> PatternSet:
    return PatternSet([sign.pattern for sign in data().controls])


@cache
def _outcome(name: str) -> Any:
    return compile_text(data().outcomes[name])
