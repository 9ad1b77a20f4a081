"""Exposure over releases: each configuration of `configurations.toml` on each release that was judged.

Nothing in it is written by hand but the launches. `data/exposure.csv` holds it with the date of the verdicts; first
screens, the index and the README's table are made from it, and a test compares it with what is computed.
"""

from __future__ import annotations

import csv
import io
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from importlib import resources
from itertools import groupby

from specmortem.affected.answers import Answer, Answers, answer, on_release
from specmortem.affected.released import released
from specmortem.affected.targets import Target, advise
from specmortem.exposure import Config
from specmortem.statements.gpus import gpu_of
from specmortem.statements.launch import parse

COLUMNS = ("date", "release", "configuration", "incident", "answer", "causes")
FILE = "data/exposure.csv"


@dataclass(frozen=True)
class Configuration:
    """A launch that operators run, and how tables name it."""

    name: str
    shown: str
    launch: str
    gpu: str

    @cached_property
    def config(self) -> Config:
        """What the command says, on its GPU."""
        found = parse(self.launch)
        return replace(found, gpu=gpu_of(self.gpu), sources={**found.sources, "gpu": self.gpu})


@dataclass(frozen=True)
class ExposureCell:
    """The answer of an incident for a configuration on a release, and the causes that decide it."""

    release: str
    configuration: str
    incident: str
    answer: Answer
    causes: tuple[str, ...]


@dataclass(frozen=True)
class Stretch:
    """Neighbouring releases with one answer."""

    answer: Answer
    releases: tuple[str, ...]

    @property
    def text(self) -> str:
        """In words."""
        first, last = self.releases[0], self.releases[-1]
        return first if first == last else f"{first} to {last}"


@dataclass(frozen=True)
class ExposureLine:
    """A configuration over all releases, for one incident."""

    configuration: Configuration
    cells: tuple[ExposureCell, ...]

    @property
    def stretches(self) -> tuple[Stretch, ...]:
        """Equal neighbours joined."""
        groups = groupby(self.cells, key=lambda cell: cell.answer)
        return tuple(Stretch(key, tuple(cell.release for cell in cells)) for key, cells in groups)

    @property
    def affected(self) -> bool:
        """On some release."""
        return any(cell.answer == "affected" for cell in self.cells)


@cache
def configurations() -> tuple[Configuration, ...]:
    """The launches, in the order of the file."""
    text = resources.files("specmortem.affected").joinpath("configurations.toml").read_text(encoding="utf-8")
    return tuple(Configuration(**entry) for entry in tomllib.loads(text)["configuration"])


@cache
def judged(name: str, release: str) -> Answers:
    """A configuration on a release, for the incidents that were judged."""
    config = next(each.config for each in configurations() if each.name == name)
    return answer(on_release(config, release), incidents=released().incidents)


def cells(incident: str = "") -> Iterator[ExposureCell]:
    """Every cell, by configuration and release; only those of one incident where it is named."""
    for each in configurations():
        for release in released().releases:
            for one in judged(each.name, release).incidents:
                if incident in ("", one.incident):
                    causes = tuple(cause.cause for cause in one.deciding)
                    yield ExposureCell(release, each.name, one.incident, one.answer, causes)


def lines(incident: str) -> list[ExposureLine]:
    """The configurations of an incident that are affected on some release, over all releases."""
    known = {each.name: each for each in configurations()}
    groups = groupby(cells(incident), key=lambda cell: cell.configuration)
    made = [ExposureLine(known[name], tuple(group)) for name, group in groups]
    return [line for line in made if line.affected]


@cache
def target(name: str) -> Target | None:
    """Where a configuration is safe over all incidents, looked for from the newest release that is affected."""
    config = next(each.config for each in configurations() if each.name == name)
    hit = [release for release in released().releases if judged(name, release).answer == "affected"]
    return advise(on_release(config, hit[-1])).move if hit else None


def affected_releases(incident: str) -> Sequence[Stretch]:
    """Releases at which some configuration of the table is affected, joined where they are neighbours."""
    hit = {cell.release for cell in cells(incident) if cell.answer == "affected"}
    groups = groupby(released().releases, key=lambda release: release in hit)
    return [Stretch("affected", tuple(group)) for key, group in groups if key]


def as_csv() -> str:
    """The table of data/exposure.csv."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(COLUMNS)
    date = released().date
    for cell in sorted(cells(), key=lambda cell: (cell.incident, cell.configuration)):
        row = (date, cell.release, cell.configuration, cell.incident, cell.answer, " ".join(cell.causes))
        writer.writerow(row)
    return out.getvalue()
