"""Where to go: the nearest release at which nothing that a launch reaches faults, and the cheapest change on this one.

Over all incidents at once, so that the way out of one never leads into another.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import combinations

from packaging.version import InvalidVersion, Version

from specmortem.affected.answers import Answers, answer, of_release, on_release
from specmortem.affected.changes import CHANGES, LaunchChange
from specmortem.affected.released import Released, released
from specmortem.exposure import Config

MOST_CHANGES = 2


@dataclass(frozen=True)
class Target:
    """A release and the changes of the launch with which nothing on record faults there, and nothing is unknown."""

    release: str
    changes: tuple[LaunchChange, ...]
    answers: Answers

    @property
    def flags(self) -> tuple[str, ...]:
        """The flags to add or change."""
        config = self.answers.config
        return tuple(flag for change in self.changes for flag in change.flags(config))

    @property
    def cost(self) -> str:
        """What the changes cost."""
        return "; ".join(change.cost for change in self.changes)


@dataclass(frozen=True)
class Advice:
    """The way out of a launch: `stay` on its own release, `move` to another; None where none was found."""

    stay: Target | None
    move: Target | None

    @property
    def best(self) -> Target | None:
        """What to name first: the launch as it is, else another release, else flags."""
        if self.stay and not self.stay.changes:
            return self.stay
        return self.move or self.stay


def advise(config: Config, book: Released | None = None) -> Advice:
    """The cheapest safe changes on the launch's release, and the nearest release with the fewest."""
    book = book or released()
    stay = _cheapest(config, config.version, book) if config.version else None
    return Advice(stay, _move(config, book))


def _move(config: Config, book: Released) -> Target | None:
    """Fewest changes first, then newer before older, then the nearest."""
    found = [
        target
        for release in book.releases
        if release != config.version and (target := _cheapest(config, release, book))
    ]
    return min(found, key=lambda target: _order(target, config.version), default=None)


def _order(target: Target, present: str) -> tuple[int, bool, int]:
    releases = [Version(release) for release in released().releases]
    place = releases.index(Version(target.release))
    try:
        here = sum(release < Version(present) for release in releases) if present else 0
    except InvalidVersion:
        here = 0
    return sum(change.weight for change in target.changes), place < here, abs(place - here)


def _cheapest(config: Config, release: str, book: Released) -> Target | None:
    """The launch on a release with the least that makes it safe; None where nothing does."""
    on = on_release(config, release)
    verdicts = of_release(release, book)
    for changes in _choices(on):
        changed = on
        for change in changes:
            changed = change.applied(changed)
        judged = answer(changed, verdicts)
        if judged.safe:
            return Target(release, changes, judged)
    return None


def _choices(config: Config) -> Iterator[tuple[LaunchChange, ...]]:
    """Nothing, then one change, then two, by what they take away."""
    fitting = [change for change in CHANGES if change.fits(config)]
    sets = [some for number in range(MOST_CHANGES + 1) for some in combinations(fitting, number)]
    yield from sorted(sets, key=lambda some: sum(change.weight for change in some))
