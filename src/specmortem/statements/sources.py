"""Bytes of files, pipes and archives, as chunks of whole lines; any encoding, never the whole file at once."""

from __future__ import annotations

import codecs
import gzip
import sys
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from specmortem.errors import BadInputError, UnavailableError

CHUNK = 1 << 20
LONGEST_LINE = 1 << 16  # bytes; a longer line is cut into pieces
LARGEST = 64 << 30  # bytes after decompression
STANDARD_INPUT = "-"
_GZIP, _ZSTD = b"\x1f\x8b", b"\x28\xb5\x2f\xfd"
_ENCODINGS = (
    (codecs.BOM_UTF32_LE, "utf-32"),
    (codecs.BOM_UTF32_BE, "utf-32"),
    (codecs.BOM_UTF16_LE, "utf-16"),
    (codecs.BOM_UTF16_BE, "utf-16"),
)


def chunks(path: str) -> Iterator[bytes]:
    """Pieces of about a mebibyte of the file, or of standard input for `-`, in UTF-8, each ending with a line.

    Raises UnavailableError when it cannot be read, BadInputError when an archive is damaged or without end.
    """
    with _opened(path) as stream:
        yield from _whole_lines(_transcoded(_blocks(stream, path)))


@contextmanager
def _opened(path: str) -> Iterator[IO[bytes]]:
    if path == STANDARD_INPUT:
        yield sys.stdin.buffer
        return
    if Path(path).is_dir():
        raise BadInputError(f"{path} is a folder; give the files in it")
    try:
        with Path(path).open("rb") as stream:
            yield stream
    except OSError as error:
        raise UnavailableError(f"cannot read {path}: {error.strerror or error}") from error


def _blocks(stream: IO[bytes], path: str) -> Iterator[bytes]:
    """Decompressed blocks; what kind of archive it is, its first bytes say."""
    head = stream.read(CHUNK)
    unpacked: Any = _Prefixed(head, stream)
    try:
        if head.startswith(_GZIP):
            unpacked = gzip.GzipFile(fileobj=unpacked)
        elif head.startswith(_ZSTD):
            import zstandard

            unpacked = zstandard.ZstdDecompressor(max_window_size=1 << 27).stream_reader(
                unpacked, read_across_frames=True
            )
        total = 0
        while block := unpacked.read(CHUNK):
            total += len(block)
            if total > LARGEST:
                raise BadInputError(
                    f"{path} holds more than {LARGEST >> 30} GiB; cut out the part around the fault"
                )
            yield block
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise BadInputError(f"{path} is a damaged gzip file: {error}; compress it again") from error
    except OSError as error:
        raise UnavailableError(f"cannot read {path}: {error.strerror or error}") from error
    except Exception as error:
        if type(error).__name__ != "ZstdError":
            raise
        raise BadInputError(f"{path} is a damaged zstd file: {error}; compress it again") from error


class _Prefixed:
    """A stream of which the first bytes have been read already; reads at most what is asked for."""

    def __init__(self, head: bytes, stream: IO[bytes]) -> None:
        self._head, self._stream = head, stream

    def read(self, size: int = -1) -> bytes:
        if not self._head:
            return self._stream.read(size)
        taken, self._head = (self._head, b"") if size < 0 else (self._head[:size], self._head[size:])
        return taken


def _transcoded(blocks: Iterator[bytes]) -> Iterator[bytes]:
    """UTF-16 and UTF-32, as some shells write them, as UTF-8; other bytes as they are."""
    decoder: codecs.IncrementalDecoder | None = None
    for number, block in enumerate(blocks):
        if number == 0:
            decoder = _decoder(block)
        yield decoder.decode(block).encode("utf-8", "replace") if decoder else block


def _decoder(head: bytes) -> codecs.IncrementalDecoder | None:
    for mark, name in _ENCODINGS:
        if head.startswith(mark):
            return codecs.getincrementaldecoder(name)("replace")
    sample = head[:4096]
    if len(sample) >= 64 and sample[1::2].count(0) > len(sample) * 0.4:
        return codecs.getincrementaldecoder("utf-16-le")("replace")
    return None


def _whole_lines(blocks: Iterator[bytes]) -> Iterator[bytes]:
    rest: list[bytes] = []
    size = 0
    for block in blocks:
        cut = block.rfind(b"\n") + 1
        if cut:
            yield b"".join((*rest, block[:cut]))
            rest, size = ([block[cut:]], len(block) - cut) if cut < len(block) else ([], 0)
        else:
            rest.append(block)
            size += len(block)
        if size > CHUNK:
            yield b"".join(rest)
            rest, size = [], 0
    if rest:
        yield b"".join(rest)
