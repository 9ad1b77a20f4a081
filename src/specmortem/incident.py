"""Incidents as objects, and the registry through which every tool reaches them.

An incident is a package that exports `INCIDENT`. Three kinds are found: those of `specmortem.incidents`, those that
another distribution announces under the entry point group `specmortem.incidents`, and folders below each directory in
`$SPECMORTEM_INCIDENTS` (separated like PATH). Finding one imports its `__init__` alone, which needs neither torch nor
Triton.
"""

from __future__ import annotations

import importlib
import pkgutil
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib import metadata
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

from specmortem import facts as fact_files
from specmortem.errors import BadInputError
from specmortem.exposure import Config, Reach, Rule
from specmortem.facts import Facts, find_root

__all__ = ["Campaign", "Incident", "Probe", "find_root"]
Needs = Literal["any", "interpreter", "cuda"]


@dataclass(frozen=True)
class Probe:
    """What a probe of one cause needs.

    `files` are groups of candidate paths, of which the first that exists in a tree is used; `functions` stand in them,
    one a group, empty where a file is read and nothing of it is lifted. `also` is judged beside them where a tree has
    it: (path, function). `needs` says what runs the kernels: any device, the interpreter, for its bounds or because
    the defect is the host's alone, or a GPU, and then `why` it does. `packages` are the distributions whose releases
    can be subjects.
    """

    cause: str
    title: str
    files: tuple[tuple[str, ...], ...]
    functions: tuple[str, ...]
    also: tuple[tuple[str, str], ...] = ()
    needs: Needs = "any"
    why: str = ""
    version: int = 1
    packages: tuple[str, ...] = ("vllm",)


@dataclass(frozen=True)
class Campaign:
    """An experiment that takes a seed: its target, what it counts, and the name of the argument for the arm."""

    target: str
    unit: str
    arm: str = "arm"
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    takes_device: bool = True


@dataclass(frozen=True)
class Incident:
    """One incident: what judges its causes, what a configuration needs to reach them, and its random campaigns.

    `package` is the Python package that exports it; its module `probe` has `judge(cause, subject, device)`. `exposure`
    has a rule a cause, `campaigns` an experiment a cause. `shown` is what has been shown of it, and on what. `folder`
    holds incident.toml, rules.toml and the notebook of an incident that lies outside the repository; None for
    `investigations/<slug>`.
    """

    slug: str
    package: str
    probes: tuple[Probe, ...]
    exposure: Mapping[str, Rule] = field(default_factory=dict)
    campaigns: Mapping[str, Campaign] = field(default_factory=dict)
    folder: Path | None = None
    shown: str = ""

    @property
    def judge(self) -> str:
        """The function that judges its causes, as a target for a process of its own."""
        return f"{self.package}.probe:judge"

    @property
    def home(self) -> Path:
        """The folder of its facts and reference runs. Raises UnavailableError where there is none."""
        return self.folder or fact_files.homes().get(self.slug) or find_root() / self.slug

    @property
    def facts(self) -> Facts:
        """What incident.toml says. Raises BadInputError for the first thing wrong in it."""
        return fact_files.load(self.slug)


def all_incidents() -> Mapping[str, Incident]:
    """Incidents by slug, sorted. Raises BadInputError for two with one slug, or a folder that exports none."""
    return _all(tuple(fact_files.folders()))


def get(slug: str) -> Incident:
    """The incident of a slug. Raises BadInputError that lists the known ones."""
    known = all_incidents()
    if slug not in known:
        raise BadInputError(f"no incident {slug!r}; known: {', '.join(known) or 'none'}")
    return known[slug]


def facts(slug: str) -> Facts:
    """The facts of an incident. Raises BadInputError for an unknown slug or a faulty file."""
    return get(slug).facts


def all_slugs() -> list[str]:
    """Slugs of all incidents, sorted."""
    return list(all_incidents())


def causes() -> dict[str, Incident]:
    """The incident of each cause that a probe judges."""
    return {probe.cause: one for one in all_incidents().values() for probe in one.probes}


def of_cause(cause: str) -> Incident:
    """The incident of a cause. Raises BadInputError that lists the known causes."""
    if (known := causes()).keys().isdisjoint([cause]):
        raise BadInputError(f"unknown cause {cause!r}; known causes: {', '.join(sorted(known))}")
    return known[cause]


def probe_of(cause: str) -> Probe:
    """The probe of a cause. Raises BadInputError that lists the known causes."""
    return next(probe for probe in of_cause(cause).probes if probe.cause == cause)


def rules() -> dict[str, Rule]:
    """The exposure rule of each cause that has one."""
    return {cause: rule for one in all_incidents().values() for cause, rule in one.exposure.items()}


def reaches(cause: str, config: Config) -> Reach:
    """Whether this configuration, with what follows from it, reaches a cause; `unknown` for one without a rule."""
    rule = rules().get(cause)
    return rule.reaches(config) if rule else Reach("unknown", f"there is no rule for the cause {cause}")


def reached(config: Config) -> dict[str, Reach]:
    """The answer for every cause that has a rule."""
    return {cause: rule.reaches(config) for cause, rule in rules().items()}


@cache
def _all(folders: tuple[Path, ...]) -> Mapping[str, Incident]:
    found: dict[str, Incident] = {}
    for one in (*_own(), *_announced(), *_in_folders(folders)):
        if found.setdefault(one.slug, one) is not one:
            places = " and ".join(str(each.folder or each.package) for each in (found[one.slug], one))
            raise BadInputError(f"two incidents are called {one.slug!r}: {places}")
    return MappingProxyType(dict(sorted(found.items())))


def _own() -> Iterator[Incident]:
    for module in pkgutil.iter_modules([str(Path(__file__).with_name("incidents"))]):
        yield _exported(f"specmortem.incidents.{module.name}")


def _announced() -> Iterator[Incident]:
    for point in metadata.entry_points(group=fact_files.GROUP):
        yield _exported(point.module)


def _in_folders(folders: Iterable[Path]) -> Iterator[Incident]:
    """Each directory goes onto the import path, and into that of the processes that this one starts."""
    for folder in folders:
        if str(folder) not in sys.path:
            sys.path.append(str(folder))
        for entry in sorted(folder.glob(f"*/{fact_files.FILE_NAME}")):
            yield _exported(entry.parent.name, entry.parent)


def _exported(package: str, folder: Path | None = None) -> Incident:
    """The incident of a package, which has to lie in `folder`. Raises BadInputError, whatever its import raises."""
    place = folder or package
    try:
        module = importlib.import_module(package)
    except Exception as error:
        raise BadInputError(f"{place} exports no INCIDENT: {type(error).__name__}: {error}") from error
    other = getattr(module, "__file__", None) or "built in"
    if folder and Path(other).resolve().parent != folder:
        raise BadInputError(f"{folder}: a package {package} is there already ({other}); rename the folder")
    one = getattr(module, "INCIDENT", None)
    if not isinstance(one, Incident):
        raise BadInputError(f"{place} exports no INCIDENT: it is {one!r}")
    return one
