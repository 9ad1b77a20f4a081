"""A vLLM source tree under test: a release, a folder, or what is installed. vLLM itself is never imported."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict
from functools import cached_property
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from packaging.version import InvalidVersion, Version

from specmortem.errors import BadInputError, UnavailableError
from specmortem.upstream import index
from specmortem.upstream.archive import MAX_MEMBER_BYTES, Archive, is_plain
from specmortem.upstream.cache import Store, default_cache
from specmortem.upstream.errors import MissingFileError, NotStoredError


class Tree(ABC):
    """Files of one subject. Paths are relative and begin with `vllm/`."""

    def __init__(self, subject: str, version: str, root: Path) -> None:
        """`root` is the local folder that the paths are relative to."""
        self.subject, self.version, self.root = subject, version, root

    @property
    def bytes_moved(self) -> int:
        """Bytes that this object has read from a remote wheel; the index page is not counted."""
        return 0

    @abstractmethod
    def has(self, path: str) -> bool:
        """Whether the subject has this file."""

    @abstractmethod
    def fetch(self, paths: Iterable[str]) -> dict[str, Path]:
        """Make files local and say where they are.

        Raises MissingFileError for a file that the subject lacks, UnavailableError when one cannot be had.
        """

    def first(self, paths: Iterable[str]) -> str | None:
        """The first of several candidate paths that exists."""
        return next((path for path in paths if self.has(path)), None)

    def missing(self, path: str) -> MissingFileError:
        """The error for a file that is not there."""
        return MissingFileError(f"{self.subject} has no file {path}")

    def asked(
        self, kind: str, path: str, name: str, provided: Collection[str] = ()
    ) -> AbstractContextManager[Callable[[Any], None]]:
        """Around each look-up of a definition (`closure` or `body`); the block reports what it found.

        A tree that keeps a record of what was asked of it overrides this.
        """
        return nullcontext(lambda found: None)


class FolderTree(Tree):
    """A source checkout or a site-packages folder; read, never written."""

    def has(self, path: str) -> bool:
        """Whether the folder holds this file; for a link that leads out of it, `fetch` will refuse."""
        return is_plain(path) and (self.root / path).is_file()

    def fetch(self, paths: Iterable[str]) -> dict[str, Path]:
        """Where the files are."""
        return {path: self._checked(path) for path in paths}

    def _checked(self, path: str) -> Path:
        if not self.has(_plain(path)):
            raise self.missing(path)
        place = (self.root / path).resolve()
        if not place.is_relative_to(self.root.resolve()):
            raise UnavailableError(
                f"{self.subject}: {path} is a link that leads out of {self.root}; copy the file there"
            )
        if place.stat().st_size > MAX_MEMBER_BYTES:
            raise UnavailableError(
                f"{self.subject}: {path} is larger than the {MAX_MEMBER_BYTES} bytes of a source file"
            )
        return self.root / path


class StoredTree(Tree):
    """Files in the cache, checked at each use, and the list of all that the subject has."""

    def __init__(self, subject: str, version: str, root: Path) -> None:
        """Read the manifest in `root`."""
        super().__init__(subject, version, root)
        self._store = Store(root)

    @cached_property
    def _members(self) -> frozenset[str]:
        return frozenset(self._store.manifest["members"])

    def _describe(self, wheel: dict[str, str], members: tuple[str, ...]) -> None:
        """Remember the wheel and its members."""
        self._store.describe(wheel, members)
        self.__dict__.pop("_members", None)

    def has(self, path: str) -> bool:
        """Whether the subject has this file, brought here or not; answered from the list."""
        return path in self._members

    def fetch(self, paths: Iterable[str]) -> dict[str, Path]:
        """Make files local; those that are cached and intact are not read again."""
        wanted = [_plain(path) for path in dict.fromkeys(paths)]
        absent = [path for path in wanted if not self.has(path)]
        if absent:
            raise self.missing(absent[0])
        stale = [path for path in wanted if self._store.intact(path) is None]
        if stale:
            self._bring(stale)
        return {path: self.root / path for path in wanted}

    def _bring(self, paths: list[str]) -> None:
        """Store members that are not there, or not intact; this tree reads its disk alone."""
        raise NotStoredError(self.subject, paths[0])


class ReleaseTree(StoredTree):
    """A published wheel, of which only the directory and the wanted files are read; kept in the cache."""

    def __init__(self, version: Version, cache: Path) -> None:
        """Use what is cached; ask the index only if the release is not known there.

        Raises UnavailableError when it is not cached and cannot be had.
        """
        super().__init__(f"vllm=={version}", str(version), _stored(version, cache))
        self._release = version
        if not self._store.manifest["members"]:
            _ = self._archive

    @property
    def bytes_moved(self) -> int:
        """Bytes read from the wheel: its directory and the members fetched; 0 when all was cached."""
        return self._archive.bytes_moved if "_archive" in self.__dict__ else 0

    def _bring(self, paths: list[str]) -> None:
        try:
            self._store.add({path: self._archive.read(path) for path in paths})
        except UnavailableError as error:
            changed = [path for path in paths if path in self._store.manifest["files"]]
            reason = f"the cached {changed[0]} was changed" if changed else f"{paths[0]} is not cached"
            raise UnavailableError(f"{self.subject}: {reason} and cannot be fetched: {error}") from error

    @cached_property
    def _archive(self) -> Archive:
        """The remote wheel: the one the cache knows if it came from the index in use, else the index's."""
        source = index.endpoint()
        known = dict(self._store.manifest["wheel"])
        if known.pop("index", None) == index.bare(source) and "?" not in known["url"]:
            wheel = index.Wheel(**known)
        else:
            wheel = index.find_wheel(source, self._release)
        opened = Archive(wheel, index.with_credentials(wheel.url, source))
        self._describe(asdict(wheel) | {"index": index.bare(source)}, opened.names)
        return opened


_given: dict[str, Tree] = {}


def give(subject: str, tree: Tree) -> None:
    """Let `resolve` answer a subject with this tree, in this process."""
    _given[subject] = tree


def resolve(subject: str, cache: Path | None = None) -> Tree:
    """The tree of `vllm==X`, `tree:DIR` or `installed`, or of a subject that was given one.

    Raises BadInputError for anything else, UnavailableError when there is no such release, folder or install.
    """
    if subject in _given:
        return _given[subject]
    if subject == "installed":
        return _installed()
    if subject.startswith("tree:") and subject != "tree:":
        return _folder(subject, Path(subject.removeprefix("tree:")).expanduser())
    return ReleaseTree(_release(subject), cache or default_cache())


def is_stored(subject: str, cache: Path | None = None) -> bool:
    """Whether the cache knows the release `vllm==X`, so that `resolve` asks no index for it.

    Raises BadInputError for anything but a release.
    """
    return bool(Store(_stored(_release(subject), cache or default_cache())).manifest["members"])


def _stored(version: Version, cache: Path) -> Path:
    """The folder of a release in a cache."""
    return cache / f"vllm-{version}"


def _release(subject: str) -> Version:
    name, _, text = subject.partition("==")
    try:
        if name.strip() != "vllm":
            raise InvalidVersion
        return Version(text)
    except InvalidVersion:
        raise BadInputError(
            f"{subject!r} is not a subject: write vllm==X.Y.Z, tree:DIR (DIR holds vllm/) or installed"
        ) from None


def _plain(path: str) -> str:
    if not is_plain(path) or not path.startswith("vllm/"):
        raise BadInputError(
            f"{path!r} is not a path inside a tree; write it like vllm/v1/spec_decode/utils.py"
        )
    return path


def _folder(subject: str, root: Path) -> FolderTree:
    if not (root / "vllm").is_dir():
        inner = root.name == "vllm" and (root / "__init__.py").is_file()
        hint = f"give its parent, tree:{root.parent}" if inner else "give the folder that holds vllm/"
        raise UnavailableError(f"{subject}: {root} holds no folder vllm; {hint}")
    return FolderTree(subject, _version_in(root), root.absolute())


def _version_in(root: Path) -> str:
    """The version that a build or an installation left in the folder, else an empty string."""
    try:
        written = (root / "vllm" / "_version.py").read_text(encoding="utf-8")
    except (OSError, ValueError):
        written = ""
    if found := re.search(r"^__version__\b[^'\"\n]*['\"]([^'\"]+)['\"]", written, re.MULTILINE):
        return found[1]
    names = [re.fullmatch(r"vllm-(.+)\.dist-info", folder.name) for folder in root.glob("vllm-*.dist-info")]
    return next((name[1] for name in names if name), "")


def _installed() -> FolderTree:
    """The vLLM of this environment, found without importing it."""
    try:
        version, spec = metadata.version("vllm"), find_spec("vllm")
    except (metadata.PackageNotFoundError, ValueError):
        version, spec = "", None
    if spec is None or not spec.submodule_search_locations:
        raise UnavailableError(
            "installed: this environment has no vllm; install it, or name a release as vllm==X"
        )
    return FolderTree("installed", version, Path(spec.submodule_search_locations[0]).absolute().parent)
