"""Files of releases on disk: written whole or not at all, and checked against their hash at each use."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from specmortem.errors import UnavailableError

MANIFEST = "manifest.json"
WHEEL_KEYS = {"filename", "url", "sha256", "index"}


def default_cache() -> Path:
    """`$SPECMORTEM_CACHE`, else `specmortem` in the user's cache folder."""
    if given := os.environ.get("SPECMORTEM_CACHE"):
        return Path(given).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "specmortem"


class Store:
    """One release's folder: member files at their own paths, and a manifest that says what they must be.

    Manifest keys: `wheel` (filename, url without credentials, sha256 and index), `members` (all names of the
    wheel), `files` (path to sha256 and size).
    """

    def __init__(self, folder: Path) -> None:
        """Read what is there; an unreadable manifest counts as none."""
        self.folder = folder
        self.manifest = self._load()

    def intact(self, path: str) -> Path | None:
        """The cached file, if it is what the manifest says."""
        entry = self.manifest["files"].get(path)
        try:
            data = (self.folder / path).read_bytes() if entry else None
        except OSError:
            return None
        return self.folder / path if data is not None and _entry(data) == entry else None

    def describe(self, wheel: Mapping[str, str], members: tuple[str, ...]) -> None:
        """Remember the wheel; files of another wheel of the same release are forgotten.

        Raises UnavailableError when the folder cannot be written.
        """
        with self._updating() as manifest:
            if manifest["wheel"].get("filename") != wheel["filename"]:
                manifest["files"] = {}
            manifest.update(wheel=dict(wheel), members=list(members))

    def add(self, contents: Mapping[str, bytes]) -> None:
        """Write files, then the manifest that admits them.

        Raises UnavailableError when the folder cannot be written.
        """
        with self._updating() as manifest:
            for path, data in contents.items():
                _write(self._inside(path), data)
                manifest["files"][path] = _entry(data)

    def _inside(self, path: str) -> Path:
        """The place of a member; a link in the cache must not lead out of it."""
        target = self.folder / path
        if not target.parent.resolve().is_relative_to(self.folder.resolve()):
            raise UnavailableError(f"{target.parent} leads out of the cache {self.folder}; remove that link")
        return target

    @contextlib.contextmanager
    def _updating(self) -> Iterator[dict[str, Any]]:
        """The manifest as it is on disk now, written back at the end; one process at a time."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            with _locked(self.folder / ".lock"):
                self.manifest = self._load()
                yield self.manifest
                _write(self.folder / MANIFEST, json.dumps(self.manifest, indent=1).encode())
        except OSError as error:
            raise UnavailableError(
                f"cannot write the cache {self.folder}: {error.strerror or error}; set SPECMORTEM_CACHE to a "
                "folder with space that you can write"
            ) from error

    def _load(self) -> dict[str, Any]:
        empty: dict[str, Any] = {"wheel": {}, "members": [], "files": {}}
        try:
            found = json.loads((self.folder / MANIFEST).read_bytes())
        except (OSError, ValueError):
            return empty
        fits = isinstance(found, dict) and all(isinstance(found.get(key), type(empty[key])) for key in empty)
        fits = fits and found["wheel"].keys() in (set(), WHEEL_KEYS)
        return found if fits else empty


def _entry(data: bytes) -> dict[str, Any]:
    return {"sha256": hashlib.sha256(data).hexdigest(), "size": len(data)}


def _write(path: Path, data: bytes) -> None:
    """Replace a file in one step; a failure leaves what was there."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(prefix=".new-", dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
        Path(temporary).chmod(0o644)
        Path(temporary).replace(path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """An advisory lock between processes; systems without `fcntl` go without."""
    try:
        import fcntl
    except ImportError:
        yield
        return
    with path.open("ab") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
