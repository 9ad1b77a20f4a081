"""Single members of a remote wheel, read by HTTP range: never the whole file, never what is no source."""

from __future__ import annotations

import stat
import struct
import zipfile
import zlib
from contextlib import ExitStack
from pathlib import PurePosixPath
from typing import Any

from remotezip import RemoteFetcher, RemoteIOError, RemoteZip, RemoteZipError
from urllib3.exceptions import HTTPError

from specmortem.errors import UnavailableError
from specmortem.upstream import index

MAX_MEMBER_BYTES = 4 << 20
MAX_RATIO = 200
MAX_RANGE_BYTES = 16 << 20
_BROKEN = (
    RemoteZipError,
    HTTPError,
    OSError,
    zipfile.BadZipFile,
    zlib.error,
    struct.error,
    EOFError,
    LookupError,
    ValueError,
    RuntimeError,
)


def is_plain(name: str) -> bool:
    """Whether an archive member or a requested file has a relative path that stays below its root."""
    path = PurePosixPath(name)
    parts = path.parts
    is_relative = bool(parts) and not path.is_absolute() and ".." not in parts
    return is_relative and ":" not in parts[0] and not set("\\\0") & set(name)


class _Fetcher(RemoteFetcher):  # type: ignore[misc]
    """Counts the bytes of the ranges it reads, and refuses a range that no source file needs."""

    moved = 0

    def fetch(self, data_range: tuple[int, int | None], stream: bool = False) -> Any:
        """One range; an archive whose directory points far outside itself asks for too much."""
        first, last = data_range
        if last is not None and last - first >= MAX_RANGE_BYTES:
            raise RemoteZipError(f"its directory asks for {last - first + 1} bytes at once")
        buffer = super().fetch(data_range, stream)
        self.moved += len(buffer)
        return buffer


class Archive:
    """A remote wheel, opened: its directory is read at once, members when asked for."""

    def __init__(self, wheel: index.Wheel, url: str) -> None:
        """Read the directory.

        Raises UnavailableError when the server does not deliver ranges or the archive is not to be trusted.
        """
        self.wheel = wheel
        self._fetchers: list[_Fetcher] = []
        self._stack = ExitStack()
        try:
            session = self._stack.enter_context(index.session())
            self._zip = self._stack.enter_context(self._open(url, session))
            self.names = tuple(self._zip.namelist())
            self._check_names()
        except BaseException as error:
            self._stack.close()
            if isinstance(error, _BROKEN):
                raise self._unavailable(error) from error
            raise

    @property
    def bytes_moved(self) -> int:
        """Bytes read from the wheel so far."""
        return sum(fetcher.moved for fetcher in self._fetchers)

    def read(self, name: str) -> bytes:
        """The content of one member.

        Raises UnavailableError for a member that is broken, too large, packed too tightly or not a file.
        """
        try:
            info = self._zip.getinfo(name)
            self._check_member(info)
            with self._zip.open(info) as member:
                return bytes(member.read(MAX_MEMBER_BYTES + 1))
        except _BROKEN as error:
            raise self._unavailable(error, name) from error

    def _open(self, url: str, session: Any) -> Any:
        """The archive; servers that know ranges but not ranges from the end are asked for the size first."""
        options = {"session": session, "fetcher": self._fetcher, "timeout": index.TIMEOUT_S}
        try:
            return RemoteZip(url, **options)
        except RemoteIOError:
            raise
        except RemoteZipError:
            return RemoteZip(url, support_suffix_range=False, **options)

    def _fetcher(self, *args: Any, **kwargs: Any) -> _Fetcher:
        self._fetchers.append(_Fetcher(*args, **kwargs))
        return self._fetchers[-1]

    def _check_names(self) -> None:
        unsafe = [name for name in self.names if not is_plain(name)]
        if unsafe:
            raise zipfile.BadZipFile(f"it holds a member with the unsafe name {unsafe[0]!r}")

    def _check_member(self, info: zipfile.ZipInfo) -> None:
        kind = stat.S_IFMT(info.external_attr >> 16)
        if info.is_dir() or kind not in (0, stat.S_IFREG):
            raise zipfile.BadZipFile("it is a link or another special file, not a plain one")
        if self.names.count(info.filename) > 1:
            raise zipfile.BadZipFile("the archive holds it more than once")
        if max(info.file_size, info.compress_size) > MAX_MEMBER_BYTES:
            raise zipfile.BadZipFile(
                f"{info.file_size} bytes, more than the {MAX_MEMBER_BYTES} of a source file"
            )
        if info.file_size > MAX_RATIO * max(info.compress_size, 1):
            raise zipfile.BadZipFile(f"packed more than {MAX_RATIO} to 1")

    def _unavailable(self, error: BaseException, member: str = "") -> UnavailableError:
        """The error that a user sees."""
        wheel = f"the wheel {self.wheel.filename}"
        place = f"member {member} of {wheel}" if member else wheel
        if "support range" in str(error):
            reason = "its server does not support range requests, and the whole wheel is too large to fetch"
        else:
            reason = index.redacted(error)
        return UnavailableError(f"{place} cannot be read: {reason}; {index.WAY_OUT}")
