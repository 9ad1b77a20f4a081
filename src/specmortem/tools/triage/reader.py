"""Logs and reports to facts: small texts are read whole, large ones where a word of a sign stands."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

from specmortem.statements import sources
from specmortem.statements.engine_re import compile_text, literals
from specmortem.statements.facts import PROSE, STATED, Fact
from specmortem.statements.signs import Found, all_signs, data
from specmortem.tools.triage import controls, symptoms
from specmortem.tools.triage.prefixes import LogRecord, records

READ_WHOLE = 256 << 10  # bytes at the beginning of a file
WHOLE_LINES = 4_000
FACTS_WHOLE = 2_500  # facts after which the rest is only searched
FACTS_SEARCHED = 4_000  # facts after which only the words of faults are searched for
MOST_FACTS = 6_000  # facts after which each of those words may bring up only a few lines more
LAST_LINES = 40
LINES_A_WORD = 120  # lines that one word may bring up before it is only sampled
LINES_A_FATAL_WORD = 1_500
LINES_BEFORE, LINES_AFTER = 40, 160  # read whole around the first fault of each kind
FATAL = (
    "illegal memory",
    "illegaladdress",
    "device-side assert",
    "out of memory",
    "xid",
    "watchdog caught",
    "uncorrectable",
    "warp illegal",
    "cuda exception",
    "mamba",
    "misaligned",
    "launch failure",
    "not permitted",
)
SAMPLED = (b"Running: ", b"Mean acceptance length", b"scheduled_spec_decode_tokens")
UNDECODED, MOST_UNDECODED = "\ufffd", 20  # one in so many characters that are none: not text
MATCH = 80
JOINED, FULL_LINE = 600, 50  # characters
FLAGS_OF_A_COMMAND = 2

BOUNDARY = compile_text(
    r"(?i)^\s*(?:\[[\w-]{2,39}\]|@?[\w-]{1,39} commented\b.{0,60}|#{1,6} .{0,40}\bcomment\b.{0,60}"
    r"|on .{6,60} wrote:|[-=*_]{3,}.{0,80}[-=*_]{0,}"
    r"|Engine/version:.*"
    r"|#{0,6} ?your current environment.*|(?:\*\*)?vllm version(?:\*\*)?:.*)\s*$"
)
_STARTS_ANEW = compile_text(r"^\s*(?:[-*•+>|#`]|\d{1,2}[.)]\s|--|[A-Z][\w /&]{1,40}:|\S+\s*[=(\[{]|File \")")
_ENDS = tuple(".:;!?|{}[]`")


@dataclass
class Segment:
    """A stretch of one file between marks at which another author or case may begin."""

    file: str
    line: int
    facts: list[Fact] = field(default_factory=list)


def words() -> tuple[str, ...]:
    """The words that large logs are searched for; those of one or two letters stand in too many lines."""
    found = {word.lower() for sign in all_signs().signs for word in sign.words}
    return tuple(sorted(word for word in found | set(data().control_words) if len(word) > 2))


def read(paths: Iterable[str]) -> list[Segment]:
    """Segments of all files, in order."""
    return [segment for path in paths for segment in read_chunks(sources.chunks(path), name_of(path))]


def read_text(text: str, name: str = "text") -> list[Segment]:
    """Segments of a text."""
    data = text.encode("utf-8", "replace")
    return read_chunks((data[at : at + sources.CHUNK] for at in range(0, len(data), sources.CHUNK)), name)


def name_of(path: str) -> str:
    """How facts call the file: without its folder, which is nobody's business."""
    return "stdin" if path == sources.STANDARD_INPUT else Path(path).name


def read_chunks(chunks: Iterable[bytes], name: str) -> list[Segment]:
    """Segments of one file."""
    reader = _Reader(name)
    for chunk in chunks:
        reader.feed(chunk)
    return reader.segments


class _Reader:
    def __init__(self, file: str) -> None:
        self.file = file
        self.segments = [Segment(file, 1)]
        self._seen = 0
        self._line = 0
        self._scan = _Scan()
        self._held = ""
        self._held_lines: list[tuple[int, int]] = []  # where in it each line begins, and its number
        self._kinds: set[str] = set()
        self._stated = 0

    def feed(self, chunk: bytes) -> None:
        """Read one chunk of whole lines."""
        whole = max(0, READ_WHOLE - self._seen) if self._reads_whole() else 0
        self._seen += len(chunk)
        cut = len(chunk) if len(chunk) <= whole else chunk.rfind(b"\n", 0, whole) + 1
        if cut:
            done = self._prose(chunk[:cut])
            if done == len(chunk):
                return
            chunk = chunk[done:]
        self._flush()
        self._search(chunk)

    def _reads_whole(self) -> bool:
        return self._line < WHOLE_LINES and self._stated < FACTS_WHOLE

    def _prose(self, part: bytes) -> int:
        """Read every line, up to the limit; how many bytes were read."""
        at = 0
        while at < len(part) and self._reads_whole():
            end = part.find(b"\n", at, at + sources.LONGEST_LINE)
            end = end + 1 if end >= 0 else min(len(part), at + sources.LONGEST_LINE)
            self._line += part.count(b"\n", at, end)
            self._one(part[at:end].decode("utf-8", "replace").rstrip("\n"), self._line or 1)
            at = end
        self._flush()
        return at

    def _one(self, line: str, number: int) -> None:
        if len(line) < 120 and BOUNDARY.search(line):
            self._flush()
            self.segments.append(Segment(self.file, number))
        for record in records(line):
            if record.logged or len(record.text) > JOINED:
                self._flush()
                self._state(record, number)
            else:
                self._hold(line, record, number)

    def _hold(self, line: str, record: LogRecord, number: int) -> None:
        """Sentences run over lines: join those that go on."""
        if self._held and record.text and self._goes_on(line, record.text):
            self._held_lines.append((len(self._held) + 1, number))
            self._held = f"{self._held} {record.text}"
            return
        self._flush()
        self._held, self._held_lines = record.text, [(0, number)]

    def _goes_on(self, line: str, text: str) -> bool:
        """Whether a line continues the one before: it begins in the middle, or that one was full."""
        last = len(self._held) - self._held_lines[-1][0]
        fits = len(self._held) < JOINED and not self._held.endswith(_ENDS) and not _STARTS_ANEW.search(line)
        return fits and (text[0].islower() or last >= FULL_LINE)

    def _flush(self) -> None:
        text, lines = self._held, self._held_lines
        self._held, self._held_lines = "", []
        if text:
            self._state(LogRecord(text), lines[0][1], lines)

    def _search(self, chunk: bytes) -> None:
        """Read the lines in which a word of a sign stands, and everything around a new kind of fault."""
        first = self._line + 1
        at = counted = lines = 0
        for start, end in self._scan.lines(chunk):
            if self._stated > FACTS_SEARCHED:
                self._scan.only_fatal(LINES_A_FATAL_WORD if self._stated < MOST_FACTS else LAST_LINES)
            if start < at:
                continue
            lines += chunk.count(b"\n", counted, start)
            counted = start
            found = self._bytes(chunk[start:end], first + lines)
            at = self._around(chunk, start, end, first + lines) if found else end
        for start, end in samples(chunk):
            if start >= at:
                self._bytes(chunk[start:end], first + chunk.count(b"\n", 0, start))
        self._line += chunk.count(b"\n")

    def _around(self, chunk: bytes, start: int, end: int, number: int) -> int:
        """Read the neighbours of a line; where reading may go on."""
        before = chunk[max(0, start - LINES_BEFORE * 400) : start].splitlines()[-LINES_BEFORE:]
        for offset, line in enumerate(before):
            self._bytes(line[: sources.LONGEST_LINE], number - len(before) + offset)
        end += chunk[end : end + 1] == b"\n"
        for offset in range(1, LINES_AFTER + 1):
            stop = chunk.find(b"\n", end)
            if stop < 0 or self._stated > 2 * MOST_FACTS:
                break
            self._bytes(chunk[end : min(stop, end + sources.LONGEST_LINE)], number + offset)
            end = stop + 1
        return end

    def _bytes(self, line: bytes, number: int) -> bool:
        """Read one line; whether it states a kind of fault that was not seen before."""
        known = len(self._kinds)
        for record in records(line.decode("utf-8", "replace")):
            self._state(record, number)
        return len(self._kinds) > known

    def _state(self, record: LogRecord, number: int, lines: Sequence[tuple[int, int]] = ()) -> None:
        text = record.text
        if (
            not text
            or (record.logged and "prompt:" in text)
            or text.count(UNDECODED) * MOST_UNDECODED > len(text)
        ):
            return
        for fact in facts_of(record, self.file, lines or ((0, number),)):
            self._stated += 1
            self.segments[-1].facts.append(fact)
            if fact.name == "fault":
                self._kinds.add(fact.value)


class _Scan:
    """Lines with a word of a sign; a word that is everywhere is dropped and from then on only sampled."""

    def __init__(self) -> None:
        self._left = dict(_all_words())
        self._pattern: Any = _pattern_of_all()
        self._limit = 0

    def lines(self, chunk: bytes) -> Iterator[tuple[int, int]]:
        """Bounds of the lines to read."""
        at = 0
        while self._left and (match := self._pattern.search(chunk, at)):
            hit = match.start()
            start = max(chunk.rfind(b"\n", 0, hit) + 1, hit - sources.LONGEST_LINE // 4)
            end = chunk.find(b"\n", hit, hit + sources.LONGEST_LINE // 4)
            end = end if end >= 0 else min(len(chunk), hit + sources.LONGEST_LINE // 4)
            yield start, end
            at = end
            self._spend(match.group().lower().decode("utf-8", "replace"))

    def only_fatal(self, lines: int) -> None:
        """Drop every word but those of faults, and leave these at most so many lines."""
        if lines == self._limit:
            return
        self._limit = lines
        self._left = {word: min(left, lines) for word, left in self._left.items() if word in FATAL}
        self._pattern = literals(self._left)

    def _spend(self, word: str) -> None:
        self._left[word] = self._left.get(word, 1) - 1
        if self._left[word] <= 0:
            del self._left[word]
            self._pattern = literals(self._left)


@cache
def _all_words() -> Mapping[str, int]:
    """How many lines each word may bring up."""
    return {word: LINES_A_FATAL_WORD if word in FATAL else LINES_A_WORD for word in (*words(), *FATAL)}


@cache
def _pattern_of_all() -> Any:
    return literals(_all_words())


def samples(chunk: bytes) -> Iterator[tuple[int, int]]:
    """Bounds of the last line of each kind that is everywhere: the state at the end of the chunk."""
    for word in SAMPLED:
        if (hit := chunk.rfind(word)) >= 0:
            start = chunk.rfind(b"\n", 0, hit) + 1
            end = chunk.find(b"\n", hit)
            yield max(start, hit - 4096), min(end if end >= 0 else len(chunk), hit + 4096)


def facts_of(record: LogRecord, file: str, lines: Sequence[tuple[int, int]]) -> Iterator[Fact]:
    """What one message states; `lines` tells where in it each line of the file begins, and its number."""
    text = record.text
    flags = text.count("--")
    for found in all_signs().find(text):
        if record.logged and found.sign.rank == PROSE and not found.sign.firm:
            continue
        fact = _fact(found, record, file, line_of(lines, found.start))
        if not fact.name.endswith("_flag"):
            yield fact
        elif flags >= FLAGS_OF_A_COMMAND:
            yield replace(fact, name=fact.name.removesuffix("_flag"), rank=STATED)
    if not record.logged or "Accepted: 0" in text:
        for name, value, rank in symptoms.measured(text):
            yield Fact(name, value, file, lines[0][1], text, rank, record.time)
    if not record.logged:
        for control in controls.controls(text):
            number = line_of(lines, control.start)
            yield Fact(f"control.{control.subject}", control.result, file, number, text)


def line_of(lines: Sequence[tuple[int, int]], at: int) -> int:
    """The number of the line in which a position of a joined text stands."""
    return next(number for start, number in reversed(lines) if start <= at)


def _fact(found: Found, record: LogRecord, file: str, number: int) -> Fact:
    sign, match = found.sign, record.text[found.start : found.end][:MATCH]
    return Fact(sign.fact, found.value, file, number, record.text, sign.rank, record.time, match)
