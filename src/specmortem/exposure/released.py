"""Defaults of released vLLM as its own configuration code gave them: `defaults.csv`, of released_defaults.py.

A launch of which not all is known agrees with several rows. Their common value is its default; where they differ, or
its release lies outside the table or between two that differ, it has none.
"""

from __future__ import annotations

import csv
from bisect import bisect_left
from collections.abc import Iterator, Mapping
from functools import cache
from importlib import resources

from packaging.version import InvalidVersion, Version

from specmortem.exposure.config import NO_SPECULATION, Config, drafter_family, model_kinds

DefaultRow = Mapping[str, str]
METHODS = (NO_SPECULATION, "mtp", "eagle", "eagle3", "dflash", "ngram", "suffix")


def default(config: Config, name: str) -> str:
    """The value of a column for a launch; an empty text where it cannot be told."""
    kinds, methods = model_kinds(config), _methods(config.speculation.lower())
    pipelines = {None: ("1", "2"), 1: ("1",)}.get(config.pipeline, ("2",))
    values = _values(name, config.version, kinds, methods, pipelines)
    return next(iter(values)) if len(values) == 1 else ""


@cache
def _values(
    name: str, version: str, kinds: tuple[str, ...], methods: tuple[str, ...], pipelines: tuple[str, ...]
) -> frozenset[str]:
    return frozenset(row[name] for row in _matching(version, kinds, methods, pipelines))


def _matching(
    version: str, kinds: tuple[str, ...], methods: tuple[str, ...], pipelines: tuple[str, ...]
) -> Iterator[DefaultRow]:
    for row in _of(version):
        if row["model"] in kinds and row["method"] in methods and row["pipeline"] in pipelines:
            yield row


def _methods(speculation: str) -> tuple[str, ...]:
    """Methods of the table that a drafter can be; all where none is known, those that draft for any other one."""
    if not speculation:
        return METHODS
    if speculation in METHODS:
        return (speculation,)
    family = drafter_family(speculation)
    return ("eagle", "eagle3") if family == "eagle" else (family,) if family in METHODS else METHODS[1:]


@cache
def _of(version: str) -> tuple[DefaultRow, ...]:
    """Rows of a release, or of both neighbours of one between them; none outside of the table."""
    try:
        wanted = Version(version)
    except InvalidVersion:
        return ()
    table = _table()
    releases = sorted(table)
    at = bisect_left(releases, wanted)
    if wanted in table:
        return table[wanted]
    return (*table[releases[at - 1]], *table[releases[at]]) if 0 < at < len(releases) else ()


@cache
def _table() -> Mapping[Version, tuple[DefaultRow, ...]]:
    text = resources.files("specmortem.exposure").joinpath("defaults.csv").read_text(encoding="utf-8")
    found: dict[Version, list[DefaultRow]] = {}
    for row in csv.DictReader(text.splitlines()):
        found.setdefault(Version(row["release"]), []).append(row)
    return {release: tuple(rows) for release, rows in found.items()}
