"""Where to go: the nearest release at which nothing that a launch reaches faults, and the cheapest change on this one.

Over all incidents at once, so that the way out of one never leads into another.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
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
    """The cheapest safe changes on the launch's release, and the nearest release with the cheapest.

    Only incidents with a verdict on record have a say: one of somebody's own is unknown wherever one goes.
    """
    book = book or released()
    stay = _cheapest(config, config.version, book) if config.version else None
    return Advice(stay, _move(config, book))


def _move(config: Config, book: Released) -> Target | None:
    """Cheapest changes first, then newer before older, then the nearest; of a release not known, the newest."""
    found = [
        target
        for release in book.releases
        if release != config.version and (target := _cheapest(config, release, book))
    ]
    here = _place(config.version, book.releases)
    return min(found, key=lambda target: _order(target, here, book.releases), default=None)


def _place(release: str, releases: Sequence[str]) -> int:
    """Where a release stands among those on record; one that is not known stands at their end."""
    try:
        return sum(Version(each) < Version(release) for each in releases)
    except InvalidVersion:
        return len(releases)


def _order(target: Target, here: int, releases: Sequence[str]) -> tuple[int, bool, int]:
    place = releases.index(target.release)
    return sum(change.weight for change in target.changes), place < here, abs(place - here)


def _cheapest(config: Config, release: str, book: Released) -> Target | None:
    """The launch on a release with the least that makes it safe; None where nothing does."""
    on = on_release(config, release)
    verdicts, incidents = of_release(release, book), book.incidents
    for changes in _choices(on):
        changed = on
        for change in changes:
            changed = change.applied(changed)
        judged = answer(changed, verdicts, incidents)
        if judged.safe:
            return Target(release, changes, judged)
    return None


def _choices(config: Config) -> Iterator[tuple[LaunchChange, ...]]:
    """Nothing, then one change, then two, by what they take away."""
    fitting = [change for change in CHANGES if change.fits(config)]
    sets = [some for number in range(MOST_CHANGES + 1) for some in combinations(fitting, number)]
    yield from sorted(sets, key=lambda some: sum(change.weight for change in some))
