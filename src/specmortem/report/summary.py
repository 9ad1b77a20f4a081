"""What the first screen of a postmortem says, computed from the incident and its results."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import groupby

from packaging.version import Version

from specmortem.affected.released import released
from specmortem.affected.screen import Exposure, exposure
from specmortem.errors import BadInputError
from specmortem.facts import GRADE_MEANING, Cause, Claim, Facts
from specmortem.report.terminal import MARKS
from specmortem.verdict import Outcome, Results, Row

RELEASE = re.compile(r"(?P<package>vllm|flashinfer)==(?P<release>.+)")


@dataclass(frozen=True)
class Count:
    """Faults among what was counted in one unit, such as runs, steps or requests."""

    faults: int
    runs: int
    unit: str

    @property
    def text(self) -> str:
        """In words."""
        return (
            f"{self.faults:,} of {self.runs:,} {self.unit if self.runs != 1 else self.unit.removesuffix('s')}"
        )


@dataclass(frozen=True)
class SummaryCell:
    """The joint outcome of some rows; `not-run` where there are none, `controls-only` where only controls ran."""

    outcome: str
    counts: tuple[Count, ...] = ()
    reason: str = ""


@dataclass(frozen=True)
class Span:
    """Neighbouring judged releases of one package with the same outcome."""

    package: str
    cell: SummaryCell
    first: str
    last: str
    count: int

    @property
    def text(self) -> str:
        """The releases in words."""
        if self.count == 1:
            return f"{self.package} {self.first}"
        return f"{self.package} {self.first} to {self.last} ({self.count} releases tried)"


@dataclass(frozen=True)
class CauseLine:
    """One line of the verdict table."""

    cause: Cause
    before: SummaryCell
    after: SummaryCell
    releases: tuple[Span, ...]
    others: tuple[tuple[str, SummaryCell], ...]


@dataclass(frozen=True)
class Summary:
    """The content of the summary box; `results` is None where the run left none."""

    incident: Facts
    results: Results | None
    lines: tuple[CauseLine, ...]
    date: str

    @property
    def exposure(self) -> Exposure:
        """Who is affected, as it is computed for every page, the index, the README and the commands."""
        return exposure(self.incident.slug)

    @property
    def grade_meaning(self) -> str:
        """What the grade of the main claim means."""
        return GRADE_MEANING[self.incident.grade]

    @property
    def main_claim(self) -> Claim | None:
        """The first claim that carries the incident's grade."""
        return next((c for c in self.incident.claims if c.grade == self.incident.grade), None)

    @property
    def releases(self) -> tuple[Span, ...]:
        """Outcomes over releases: of the main claim's cause, or of all causes where it names none."""
        cause = self.main_claim.cause if self.main_claim else ""
        return spans(row for row in self.rows if cause in ("", row.cause))

    @property
    def seeds(self) -> str:
        """The seeds that the rows used."""
        seeds = sorted({row.seed for row in self.rows if row.seed is not None})
        if len(seeds) > 3 and seeds == list(range(seeds[0], seeds[-1] + 1)):
            return f"{seeds[0]} to {seeds[-1]}"
        return ", ".join(map(str, seeds)) or "none"

    @property
    def rows(self) -> tuple[Row, ...]:
        """All rows of the run."""
        return self.results.rows if self.results else ()

    def count(self, outcome: Outcome) -> int:
        """How many rows have this outcome."""
        return sum(row.outcome == outcome for row in self.rows)


def summarize(incident: Facts, results: Results | None, date: str = "") -> Summary:
    """The summary of an incident after a run.

    Raises BadInputError when a row names a cause that the incident does not have, or contradicts what is on record of
    a release.
    """
    rows = results.rows if results else ()
    released().check((row for row in rows if row.subject.startswith("vllm==")), "this run")
    for row in rows:
        if row.cause not in (known := [c.id for c in incident.causes]):
            raise BadInputError(
                f"results of {incident.slug}: cause {row.cause!r} is not in its incident.toml; "
                f"known: {', '.join(known)}"
            )
    lines = tuple(_line(cause, [r for r in rows if r.cause == cause.id]) for cause in incident.causes)
    return Summary(incident, results, lines, date)


def broken_expectations(incident: Facts, results: Results) -> list[str]:
    """Why these results contradict the postmortem: before must fault, after must not.

    A cause that needs a GPU may stay unjudged on the simulated device.
    """
    if not results.rows:
        return ["results.json has no rows"]
    return [reason for row in results.rows if (reason := _broken(row, incident, results))]


def joint(rows: Iterable[Row]) -> SummaryCell:
    """Rows taken together: one fault is a fault, else one clean is clean."""
    rows = list(rows)
    for outcome in ("fault", "clean", "not-judged"):
        if some := [row for row in rows if row.outcome == outcome]:
            return SummaryCell(
                outcome, counted(rows), some[0].evidence.reason if outcome == "not-judged" else ""
            )
    return SummaryCell("not-run")


def counted(rows: Iterable[Row]) -> tuple[Count, ...]:
    """What the rows counted, unit by unit, what counts most first; rows that counted nothing are left out."""
    faults, runs = Counter[str](), Counter[str]()
    for row in rows:
        unit = row.evidence.detail.get("unit", "runs").replace("_", " ")
        faults[unit] += row.faults
        runs[unit] += row.runs
    ordered = sorted(filter(runs.get, runs), key=lambda unit: (-runs[unit], unit))
    return tuple(Count(faults[unit], runs[unit], unit) for unit in ordered)


def spans(rows: Iterable[Row]) -> tuple[Span, ...]:
    """Outcomes over releases, each package in the order of its versions, equal neighbours joined."""
    by_release: dict[tuple[str, Version], list[Row]] = {}
    for row in rows:
        if match := RELEASE.fullmatch(row.subject):
            by_release.setdefault((match["package"], Version(match["release"])), []).append(row)
    judged = [
        (package, str(version), joint(by_release[package, version]))
        for package, version in sorted(by_release)
    ]
    groups = groupby(judged, key=lambda entry: (entry[0], entry[2].outcome))
    return tuple(_span(list(group)) for _, group in groups)


def _span(entries: list[tuple[str, str, SummaryCell]]) -> Span:
    package, first, cell = entries[0]
    return Span(package, SummaryCell(cell.outcome, (), cell.reason), first, entries[-1][1], len(entries))


def _line(cause: Cause, rows: list[Row]) -> CauseLine:
    others = sorted({r.subject for r in rows if r.subject == "installed" or r.subject.startswith("tree:")})
    return CauseLine(
        cause,
        before=_before(rows),
        after=joint(r for r in rows if r.subject == "after"),
        releases=spans(rows),
        others=tuple((subject, joint(r for r in rows if r.subject == subject)) for subject in others),
    )


def _before(rows: list[Row]) -> SummaryCell:
    """The before-arm; a cause that only the controls ran has none, and its rows are told in the page."""
    arm = joint(r for r in rows if (r.subject, r.arm) == ("before", "before"))
    if arm.outcome == "not-run" and any(r.subject == "before" for r in rows):
        return SummaryCell("controls-only")
    return arm


def _broken(row: Row, incident: Facts, results: Results) -> str:
    """Why this row breaks an expectation; empty when it does not."""
    excused = (
        row.outcome == "not-judged"
        and incident.cause(row.cause).needs == "gpu"
        and results.device.kind == "sim"
    )
    if (row.subject, row.arm) == ("before", "before") and row.outcome != "fault" and not excused:
        return f"{row.cause}: before is {MARKS[row.outcome].word}, expected a fault"
    if row.subject == "after" and row.outcome == "fault":
        return f"{row.cause}: after, arm {row.arm}, faults in {row.faults} of {row.runs} runs, expected clean"
    return ""
