"""What a first screen says of releases and flags, for one incident and over all of them; nothing of it is prose."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache

from specmortem.affected import matrix
from specmortem.affected.matrix import ExposureLine, Stretch
from specmortem.affected.released import released
from specmortem.affected.targets import Target
from specmortem.incident import all_incidents


@dataclass(frozen=True)
class ScreenLine:
    """A launch for one incident: where it is affected, and where it is safe from all of them; `alike` has more launches
    of which the same is true.
    """

    line: ExposureLine
    target: Target | None
    alike: tuple[str, ...]

    def releases(self, answer: str) -> str:
        """The releases with an answer, in words."""
        return told(each for each in self.line.stretches if each.answer == answer)

    @property
    def example(self) -> str:
        """A release to show it at: the newest that is affected."""
        return [cell.release for cell in self.line.cells if cell.answer == "affected"][-1]

    @property
    def way_out(self) -> str:
        """Release and flags that are safe over all incidents."""
        if self.target is None:
            return "none on record"
        flags = f" with {' '.join(self.target.flags)}" if self.target.flags else ""
        return f"{self.target.release}{flags}"


@dataclass(frozen=True)
class Safest:
    """The release at which most launches of the table are safe from every incident, and those that are not."""

    release: str
    safe: int
    launches: int
    others: tuple[tuple[str, str], ...]

    @property
    def text(self) -> str:
        """In a sentence."""
        told = f"At vLLM {self.release}, {self.safe} of {self.launches} common launches reach no incident as they are"
        counts = Counter(reached for _, reached in self.others)
        rest = ", ".join(f"{count} {reached}" for reached, count in counts.items())
        return f"{told}; {rest}." if rest else f"{told}."


@dataclass(frozen=True)
class Exposure:
    """The whole of it; `date` is that of the verdicts."""

    lines: tuple[ScreenLine, ...]
    affected: str
    safest: Safest
    shown: str
    date: str


def told(stretches: Iterable[Stretch]) -> str:
    """Stretches of releases in words."""
    return ", ".join(each.text for each in stretches)


@cache
def exposure(slug: str) -> Exposure:
    """What is on record for an incident; without lines for one that no launch of the table reaches."""
    one = all_incidents().get(slug)
    known = slug in {cell.incident for cell in matrix.cells()}
    lines = tuple(_distinct(matrix.lines(slug))) if known else ()
    affected = told(matrix.affected_releases(slug)) if known else ""
    return Exposure(lines, affected, safest(), one.shown if one else "", released().date)


def _distinct(lines: Iterable[ExposureLine]) -> Iterable[ScreenLine]:
    """One line for all launches that have the same answers and the same way out."""
    found: dict[tuple[object, ...], list[ExposureLine]] = {}
    for line in lines:
        target = matrix.target(line.configuration.name)
        found.setdefault(
            (line.stretches, target.release if target else "", target.flags if target else ()), []
        ).append(line)
    for first, *rest in found.values():
        alike = tuple(each.configuration.name for each in rest)
        yield ScreenLine(first, matrix.target(first.configuration.name), alike)


@cache
def safest() -> Safest:
    """Over all incidents: the newest of the releases with most safe launches."""
    names = [each.name for each in matrix.configurations()]
    counts = {
        release: sum(matrix.judged(name, release).safe for name in names) for release in released().releases
    }
    best = max(reversed(counts), key=lambda release: counts[release])
    others = tuple(
        _reaches(each, best) for each in matrix.configurations() if not matrix.judged(each.name, best).safe
    )
    return Safest(best, counts[best], len(names), others)


def _reaches(each: matrix.Configuration, release: str) -> tuple[str, str]:
    judged = matrix.judged(each.name, release)
    told = {"affected": "reach", "unknown": "may reach"}[judged.answer]
    return each.shown, f"{told} {' and '.join(one.incident for one in judged.named(judged.answer))}"
