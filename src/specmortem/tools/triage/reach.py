"""What the release and the settings say about a cause.

Affected releases come from `investigations/<slug>/incident.toml`; on settings `specmortem.exposure` decides, so
that `audit --config` and `triage` cannot disagree.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cache

from packaging.specifiers import SpecifierSet
from packaging.version import Version

from specmortem import incident
from specmortem.errors import SpecmortemError
from specmortem.exposure import Config
from specmortem.statements.config import version_fact, version_of
from specmortem.statements.facts import Fact, FactBook
from specmortem.tools.triage.rules import Argument

FIXED_WEIGHT, EARLIER_WEIGHT, AFFECTED_WEIGHT, UNREACHED_WEIGHT = -3.0, -0.5, 0.5, -2.0
DEVELOPMENT_SHARE = 0.5  # a development build or a fork may hold a fix, or lack it


def arguments(slug: str, cause: str, book: FactBook, settings: Config) -> Iterator[Argument]:
    """Release first, then settings."""
    if (fact := version_fact(book)) and (argument := _release(slug, cause, fact, "fork" in book)):
        yield argument
    reach = incident.reaches(cause, settings)
    if reach.reachable == "no":
        told = f"this configuration does not reach it: {reach.reason}"
        yield Argument("reach:settings", UNREACHED_WEIGHT, told, "specmortem.exposure")


def _release(slug: str, cause: str, fact: Fact, forked: bool) -> Argument | None:
    version, affected = version_of(fact.value), affected_releases(slug).get(cause, "")
    if version is None or not affected:
        return None
    own = version.is_prerelease or version.local is not None or forked
    share = DEVELOPMENT_SHARE if own else 1.0
    base, specifier = Version(version.base_version), SpecifierSet(affected)
    lowest = [Version(s.version) for s in specifier if s.operator in (">=", ">", "==")]
    if specifier.contains(base, prereleases=True):
        weight, told = AFFECTED_WEIGHT * share, "among the affected releases"
    elif lowest and base < max(lowest):
        weight, told = EARLIER_WEIGHT, "older than the releases examined"
    else:
        weight, told = FIXED_WEIGHT * share, "not among the affected releases"
    source = f"investigations/{slug}/incident.toml, cause {cause}"
    return Argument("reach:release", weight, f"{fact.value} is {told} ({affected})", source, (fact,))


@cache
def affected_releases(slug: str) -> Mapping[str, str]:
    """Specifiers by cause, as the incident file has them; none where there is no file."""
    try:
        return {cause.id: cause.affected for cause in incident.facts(slug).causes if cause.affected}
    except SpecmortemError:
        return {}
