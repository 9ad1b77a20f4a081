"""Subjects, and the files of each: releases, folders, installations and archives; and this package's own code."""

from __future__ import annotations

import hashlib
import json
import re
import stat
import subprocess
import tarfile
import zipfile
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, Literal

from specmortem import upstream
from specmortem.errors import BadInputError, UnavailableError
from specmortem.upstream.archive import MAX_MEMBER_BYTES, MAX_RATIO, is_plain
from specmortem.upstream.cache import default_cache
from specmortem.upstream.tree import FolderTree, ReleaseTree, StoredTree, Tree

MAX_MEMBERS = 200_000
MAX_TOTAL_BYTES = 512 << 20
FIND_VLLM = (
    "import importlib.metadata as m, importlib.util as u, json\n"
    "s = u.find_spec('vllm')\n"
    "v = next((d.version for d in m.distributions(name='vllm')), '')\n"
    "print(json.dumps([list(s.submodule_search_locations or []) if s else [], v]))\n"
)
_BROKEN = (zipfile.BadZipFile, tarfile.TarError, zlib.error, EOFError, OSError, RuntimeError, ValueError)


@dataclass(frozen=True)
class Place:
    """Where the files of a subject are on this machine; `stored` folders are known by their manifest.

    A subject of kind `own` has none: `before`, `after`, or an installed package other than vLLM.
    """

    subject: str
    version: str
    root: str
    kind: Literal["folder", "stored", "own"]

    def open(self) -> Tree:
        """The tree, which reads this machine's disk and nothing else."""
        kind = FolderTree if self.kind == "folder" else StoredTree
        return kind(self.subject, self.version, Path(self.root))


class ArchiveTree(StoredTree):
    """A wheel or a source distribution on disk: members are read in memory and copied by their checked names.

    A member outside `vllm/`, or one that is no Python file, is never read; one that is a link, too large, packed too
    tightly or there twice makes the archive unusable.
    """

    def __init__(self, subject: str, file: Path, cache: Path) -> None:
        """List the archive, or find it listed in the cache.

        Raises UnavailableError when it cannot be read or is not to be trusted.
        """
        self.file = file
        digest = _sha256(file)
        super().__init__(subject, _version(file.name), cache / "audit" / "archives" / digest)
        if not self._store.manifest["members"]:
            self._list(digest)

    def _bring(self, paths: list[str]) -> None:
        self._store.add(self._read(paths))

    def _list(self, digest: str) -> None:
        try:
            names = sorted(self._zip_members() if zipfile.is_zipfile(self.file) else self._tar_members())
        except _BROKEN as error:
            raise self._unusable(error) from error
        if not names:
            raise UnavailableError(f"{self.subject}: {self.file.name} holds no Python file of vllm/")
        wheel = {"filename": self.file.name, "url": "", "sha256": digest, "index": ""}
        self._describe(wheel, tuple(names))

    def _zip_members(self) -> dict[str, str]:
        """Path below the root, and the member's own name."""
        with zipfile.ZipFile(self.file) as archive:
            found: dict[str, str] = {}
            for number, info in enumerate(archive.infolist()):
                _check_count(number)
                path = _path(info.filename)
                if path and not info.is_dir():
                    _check(path, found, info.file_size, info.compress_size, info.external_attr >> 16)
                    found[path] = info.filename
        return found

    def _read(self, paths: list[str]) -> dict[str, bytes]:
        try:
            if not zipfile.is_zipfile(self.file):
                found = self._tar_members(keep=frozenset(paths))
                return {path: found[path] for path in paths}
            names = self._zip_members()
            with zipfile.ZipFile(self.file) as archive:
                return {path: _limited(archive, names[path]) for path in paths}
        except (*_BROKEN, KeyError) as error:
            raise self._unusable(error) from error

    def _tar_members(self, keep: frozenset[str] = frozenset()) -> dict[str, bytes]:
        """Paths of the Python files, with the content of those to keep; one pass, at most MAX_TOTAL_BYTES."""
        found: dict[str, bytes] = {}
        total = 0
        with tarfile.open(self.file, "r:*") as archive:
            for number, info in enumerate(archive):
                _check_count(number)
                total += info.size
                if total > MAX_TOTAL_BYTES:
                    raise ValueError(f"it unpacks to more than {MAX_TOTAL_BYTES} bytes")
                path = _path(info.name)
                if path and not info.isdir():
                    mode = stat.S_IFREG if info.isreg() else stat.S_IFLNK
                    _check(path, found, info.size, info.size, mode)
                    member = archive.extractfile(info) if path in keep else None
                    found[path] = member.read(MAX_MEMBER_BYTES + 1) if member else b""
        return found

    def _unusable(self, error: BaseException) -> UnavailableError:
        return UnavailableError(
            f"{self.subject}: {self.file} cannot be used: {error or type(error).__name__}; build or download it again"
        )


def _check_count(number: int) -> None:
    if number >= MAX_MEMBERS:
        raise ValueError(f"it has more than {MAX_MEMBERS} members")


def _check(path: str, found: Mapping[str, Any], size: int, packed: int, mode: int) -> None:
    if stat.S_IFMT(mode) not in (0, stat.S_IFREG):
        raise ValueError(f"{path} is a link or another special file")
    if path in found:
        raise ValueError(f"it holds {path} more than once")
    if size > MAX_MEMBER_BYTES:
        raise ValueError(f"{path} has {size} bytes, more than the {MAX_MEMBER_BYTES} of a source file")
    if size > MAX_RATIO * max(packed, 1):
        raise ValueError(f"{path} is packed more than {MAX_RATIO} to 1")


def _limited(archive: zipfile.ZipFile, name: str) -> bytes:
    with archive.open(name) as member:
        data = member.read(MAX_MEMBER_BYTES + 1)
    if len(data) > MAX_MEMBER_BYTES:
        raise ValueError(f"{name} is larger than it says")
    return data


def _path(name: str) -> str:
    """The path below the tree's root of a Python file of vLLM; empty for anything else.

    Raises ValueError for a name that leads out of the archive.
    """
    if not is_plain(name.rstrip("/")):
        raise ValueError(f"it holds a member with the unsafe name {name!r}")
    parts = PurePosixPath(name).parts
    if parts[0].startswith("vllm-") and not parts[0].endswith((".dist-info", ".data")):
        parts = parts[1:]
    path = "/".join(parts)
    return path if path.startswith("vllm/") and path.endswith(".py") else ""


def _sha256(file: Path) -> str:
    try:
        with file.open("rb") as opened:
            return hashlib.file_digest(opened, "sha256").hexdigest()
    except OSError as error:
        raise UnavailableError(f"cannot read {file}: {error.strerror or error}") from error


def _version(filename: str) -> str:
    parts = filename.split("-")
    return parts[1].removesuffix(".tar.gz").removesuffix(".zip") if len(parts) > 1 else ""


def package_of(subject: str) -> str:
    """The package that a subject `PACKAGE==VERSION` is a release of; `vllm` for any other subject."""
    pinned = re.match(r"([\w.-]+)\s*==", subject)
    return pinned[1] if pinned else "vllm"


def is_own(subject: str) -> bool:
    """Whether no tree is needed: this package's `before` and `after`, and installed packages other than vLLM."""
    return subject in ("before", "after") or package_of(subject) != "vllm"


def open_subject(subject: str, *, python: str = "", cache: Path | None = None) -> tuple[Tree, Place]:
    """The tree of a subject, which can fetch, and the place where its files will be.

    Raises BadInputError for a malformed subject, UnavailableError for one that cannot be had.
    """
    kind, _, rest = subject.partition(":")
    if kind in ("wheel", "sdist"):
        if not rest:
            raise BadInputError(f"{subject!r} names no file; write {kind}:FILE")
        archive = ArchiveTree(subject, Path(rest).expanduser(), cache or default_cache())
        return archive, Place(subject, archive.version, str(archive.root), "stored")
    if subject == "installed" and python:
        tree: Tree = _installed_elsewhere(python)
    else:
        tree = upstream.resolve(subject, cache)
    stored = isinstance(tree, ReleaseTree)
    return tree, Place(subject, tree.version, str(tree.root.absolute()), "stored" if stored else "folder")


def _installed_elsewhere(python: str) -> FolderTree:
    """The vLLM of another environment, found by its interpreter without importing it."""
    command = [python, "-I", "-c", FIND_VLLM]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
        places, version = json.loads(done.stdout.splitlines()[-1])
    except (OSError, subprocess.SubprocessError, ValueError, IndexError) as error:
        raise UnavailableError(
            f"installed: {python} cannot be asked for its vllm: {error}; give the interpreter of that environment"
        ) from error
    if not places:
        raise UnavailableError(f"installed: the environment of {python} has no vllm; install it there")
    return FolderTree("installed", str(version), Path(places[0]).absolute().parent)
