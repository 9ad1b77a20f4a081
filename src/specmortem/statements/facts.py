"""Facts that a log or a report states, each with the file and the line that states it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

KEPT = 12  # facts kept of one name and value; the rest is counted

SEVERAL = frozenset(
    {
        "symptom", "trigger", "fault", "mechanism", "kernel", "kernel_dump", "other_kernel", "outcome", "phase",
        "frame", "messenger", "access", "xid", "concurrency", "gpu", "hybrid",
    }
)  # fmt: skip
PROSE, STATED = 0, 1  # a mention in a sentence; a flag, a log line or a dump


@dataclass(frozen=True)
class Fact:
    """One statement. `rank` says how firm it is: a mention in prose, or a flag, log line or dump.

    `text` is the whole message, since only a whole one can be redacted, and `match` the part of it that states this.
    """

    name: str
    value: str
    file: str
    line: int
    text: str
    rank: int = PROSE
    time: str = ""
    match: str = ""

    def __str__(self) -> str:
        return f"{self.name}={self.value}"


class FactBook:
    """The facts of one case, in the order in which they were read."""

    def __init__(self, facts: Iterable[Fact] = ()) -> None:
        self.facts: list[Fact] = []
        self.counts: Counter[tuple[str, str]] = Counter()
        self._named: dict[str, list[Fact]] = {}
        self.extend(facts)

    def add(self, fact: Fact) -> None:
        """Keep the fact, or only count it where there are enough like it."""
        key = (fact.name, fact.value)
        self.counts[key] += 1
        if self.counts[key] <= KEPT:
            self.facts.append(fact)
            self._named.setdefault(fact.name, []).append(fact)

    def extend(self, facts: Iterable[Fact]) -> None:
        """Add each."""
        for fact in facts:
            self.add(fact)

    def named(self, name: str) -> list[Fact]:
        """The firmest statements of that name; of a setting, what flags and logs say outweighs mentions."""
        found = self._named.get(name, [])
        if name in SEVERAL:
            return list(found)
        firmest = max((fact.rank for fact in found), default=PROSE)
        return [fact for fact in found if fact.rank == firmest]

    def values(self, name: str) -> list[str]:
        """Their values, each once, in order."""
        return list(dict.fromkeys(fact.value for fact in self.named(name)))

    def value(self, name: str) -> str:
        """The first value, empty where nothing is stated."""
        return next(iter(self.values(name)), "")

    def numbers(self, name: str) -> list[float]:
        """The values that are numbers."""
        return [number for value in self.values(name) if (number := as_number(value)) is not None]

    def __contains__(self, name: str) -> bool:
        return name in self._named

    def __iter__(self) -> Iterator[Fact]:
        return iter(self.facts)


def as_number(text: str) -> float | None:
    """`text` as a number, or None."""
    try:
        return float(text.replace(",", ""))
    except ValueError:
        return None
