"""The cache of verdicts, below `$SPECMORTEM_CACHE/audit`: one small file a verdict and set of files.

A verdict is kept under all that it depends on beside the tree (`records.judge_version`). Those judged on published
releases serve every subject; those judged on a folder, an installation or an archive serve that one alone, so that
code which forges its verdict harms nobody else.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from pathlib import Path

from specmortem.errors import SpecmortemError
from specmortem.incident import get, of_cause
from specmortem.judge.records import Known, judge_version
from specmortem.judge.subjects import Place
from specmortem.upstream.cache import default_cache
from specmortem.verdict import write_atomically

RELEASES = "releases"


class Verdicts:
    """What is known so far, read once a cause and place; with `keep=False` only in this object's memory."""

    def __init__(self, device: str, cache: Path | None = None, *, keep: bool = True) -> None:
        """`device` is the kind that the verdicts are of."""
        self.root, self.device = (cache or default_cache()) / "audit" / "verdicts", device
        self.keep = keep
        self._versions: dict[str, str] = {}
        self._known: dict[tuple[str, str], list[Known]] = {}

    def of(self, cause: str, place: Place) -> list[Known]:
        """Verdicts that may hold for this place: of releases, and its own."""
        scopes = dict.fromkeys((RELEASES, scope_of(place)))
        return [known for scope in scopes for known in self._load(scope, cause)]

    def add(self, known: Known, place: Place) -> None:
        """Remember one; a disk that refuses is no reason to lose a verdict."""
        scope = scope_of(place)
        self._load(scope, known.cause).append(known)
        if self.keep:
            text = json.dumps(known.as_dict())
            name = hashlib.sha256(json.dumps(known.record.as_dict(), sort_keys=True).encode()).hexdigest()[
                :20
            ]
            with contextlib.suppress(SpecmortemError):
                write_atomically(self._folder(scope, known.cause) / f"{name}.json", text)

    def _folder(self, scope: str, cause: str) -> Path:
        slug = of_cause(cause).slug
        if slug not in self._versions:
            self._versions[slug] = judge_version(get(slug), self.device)
        return self.root / self._versions[slug] / scope / cause

    def _load(self, scope: str, cause: str) -> list[Known]:
        if (scope, cause) not in self._known:
            files = sorted(self._folder(scope, cause).glob("*.json")) if self.keep else []
            self._known[scope, cause] = [known for known in map(_read, files) if known is not None]
        return self._known[scope, cause]


def scope_of(place: Place) -> str:
    """Where the verdicts of a place are kept."""
    if place.kind == "own":
        return place.subject
    if place.kind == "stored" and place.subject.startswith("vllm=="):
        return RELEASES
    return hashlib.sha256(place.root.encode("utf-8", "surrogateescape")).hexdigest()[:16]


def _read(path: Path) -> Known | None:
    """A verdict from the cache; None for a file that is damaged."""
    try:
        return Known.from_dict(json.loads(path.read_bytes()))
    except (OSError, ValueError, TypeError, LookupError, SpecmortemError):
        return None
