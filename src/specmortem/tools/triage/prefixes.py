"""What stands before the message: process tags, time stamps, levels, and the marks of whatever carried the log.

A line of a report has been through containers, collectors, browsers and mail. `records` takes all of that off and
keeps what says who wrote the line and when.
"""

from __future__ import annotations

import html
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from specmortem.statements.engine_re import compile_text
from specmortem.tools.triage.symptoms import measured

HEAD = 400  # characters; a prefix that is longer is none
LONGEST = 16_384  # characters of one record that are read
MAX_PIECES = 16
MAX_RECORDS = 64

_ANSI = re.compile(
    r"\x1b\[[0-9;:?]*[ -/]*[@-~]|\x1b\][^\x07\x1b]{0,200}(?:\x07|\x1b\\)?|\x1b.|\[\d{1,2}(?:;\d{1,3}){0,4}m"
)
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u200b-\u200f\u202a-\u202e\u2066-\u2069\ufeff]")
_TAG = compile_text(
    r"(?i)</?(?:a|abbr|article|b|blockquote|body|br|code|dd|details|div|dl|dt|em|h[1-6]|head|header|hr|html|i|img|"
    r"kbd|li|link|main|meta|ol|p|pre|script|section|small|span|strong|style|sub|summary|sup|table|tbody|td|th|thead|"
    r"time|title|tr|tt|u|ul)(?:\s[^<>]{0,400})?/?>"
)
_STAMP = r"\d{4}-\d{2}-\d{2}[T ]\d{2}:\d{2}:\d{2}(?:[.,]\d{1,9})?(?:Z|[ ]?[+-]\d{2}:?\d{2})?"
_SHORT = r"\d{2}-\d{2} \d{2}:\d{2}:\d{2}(?:[.,]\d{1,6})?"
_LEVEL = r"TRACE|DEBUG|INFO|NOTICE|WARN|WARNING|ERROR|CRITICAL|FATAL|E|W|I|F"
# Anchored, every repeat bounded, and applied to HEAD characters: the standard engine is safe here, and faster.
_PIECE = re.compile(
    r"\s*(?:"
    r"(?P<mark>>{1,9}|[-*•·+]\s|```\w{0,20}|\|\s|#{1,6}\s)"
    r"|(?P<csv>\"?(?:" + _STAMP + r")\"?,(?:\"?(?:" + _LEVEL + r")\"?,)?\"?)"
    r"|[\[(]?(?P<stamp>" + _STAMP + r")(?: TP\d{1,3}(?: [A-Z]{2}\d{1,3}){0,3})?[\])]?[,:]?"
    r"|(?P<stream>stdout|stderr) [FP](?:\s|$)"
    r"|(?P<container>[a-zA-Z0-9][\w.-]{0,60}\s{0,20}\|)\s"
    r"|(?P<journal>[A-Z][a-z]{2} [ \d]\d \d{2}:\d{2}:\d{2}) [\w.-]{1,64} [\w./@-]{1,64}(?:\[\d{1,9}\])?:"
    r"|\[(?P<dmesg>[A-Z][a-z]{2} [A-Z][a-z]{2} [ \d]\d \d{2}:\d{2}:\d{2} \d{4}|\s{0,8}\d{1,9}\.\d{3,9})\]"
    r"|\((?P<process>[A-Z][A-Za-z]{0,30}(?:Worker|Server|Core|Wrapper)[^()]{0,80}|(?:Worker|VllmWorker)[^()]{0,80})\)"
    r"|\[(?P<rank>rank\d{1,4}|\d{1,4},\d{1,4})\](?:<\w{1,10}>)?:?"
    r"|\[(?P<glog>[EWIF](?:\d{3,4} \d{2}:\d{2}:\d{2}\.\d{3,9})?) [\w.]{1,60}:\d{1,6}\]"
    r"|(?P<level>"
    + _LEVEL
    + r"):?\s{1,8}(?P<when>"
    + _SHORT
    + r")?(?:\s{0,4}\[[\w./-]{1,80}(?::\d{1,6})?\]|\s[\w.]{1,80}\.py:\d{1,6}\])"
    r")\s{0,80}"
)
_NEXT_RECORD = compile_text(
    r"(?:\((?:Worker|EngineCore|APIServer|VllmWorker)[^()]{0,80}\) )+(?:INFO|WARNING|ERROR|CRITICAL|DEBUG) "
    r"|(?:INFO|WARNING|ERROR|CRITICAL|DEBUG) \d{2}-\d{2} \d{2}:\d{2}:\d{2} \["
)
_MESSAGE_KEYS = ("log", "message", "msg", "MESSAGE", "text", "line")
_ANSWER_KEYS = {"completion_tokens", "finish_reason"}  # of a client's own record of what it was answered
_TALK_KEYS = {*_MESSAGE_KEYS, "answer", "completion", "content", "messages", "output", "prompt"}


@dataclass(frozen=True)
class LogRecord:
    """One message, with who wrote it and when, as far as its prefix says; `logged` when it had any."""

    text: str
    process: str = ""
    level: str = ""
    time: str = ""
    logged: bool = False


def records(line: str) -> Iterator[LogRecord]:
    """The messages of one line, without their prefixes."""
    line = clean(line[:LONGEST])
    data = _object(line)
    if data.keys() & _ANSWER_KEYS:
        yield LogRecord(_answer(data))
        return
    inner = _messages(data)
    for part in (inner or [line])[:MAX_RECORDS]:
        for piece in _apart(part):
            yield replace(_stripped(piece), logged=True) if inner else _stripped(piece)


def clean(line: str) -> str:
    """Without escapes of terminals, tags of pages, and characters that are not to be seen."""
    if "\x1b" in line or "[" in line:
        line = _ANSI.sub("", line)
    if "<" in line:
        line = _TAG.sub(" ", line)
    if "&" in line:
        line = html.unescape(line)
    return line if line.isprintable() else _CONTROL.sub("", line)


def _object(line: str) -> dict[str, Any]:
    """The object that a line of JSON is; an empty one for any other line."""
    start = line.find("{")
    if not 0 <= start <= 1 or '"' not in line:
        return {}
    try:
        data = json.loads(line[start:])
    except (ValueError, RecursionError):
        return {}
    return data if isinstance(data, dict) else {}


def _messages(data: Mapping[str, Any]) -> list[str]:
    """The lines of the message in a collector's object."""
    texts = [data[key] for key in _MESSAGE_KEYS if isinstance(data.get(key), str)]
    return [clean(part) for part in texts[0].splitlines()] if texts else []


def _answer(data: Mapping[str, Any]) -> str:
    """A client's record of an answer, without what was asked and answered unless that repeats itself."""
    kept = {key: value for key, value in data.items() if key not in _TALK_KEYS or _repeats(value)}
    try:
        return clean(json.dumps(kept, ensure_ascii=False))
    except RecursionError:
        return ""


def _repeats(value: Any) -> bool:
    return isinstance(value, str) and any(measured(value))


def _apart(line: str) -> list[str]:
    """Records that were pasted into one line, each by itself."""
    starts = [match.start() for match in _NEXT_RECORD.finditer(line)] if len(line) > 160 else []
    if len(starts) < 2:
        return [line]
    edges = [0, *starts[1:MAX_RECORDS], len(line)]
    return [line[a:b] for a, b in zip(edges, edges[1:], strict=False)]


def _stripped(line: str) -> LogRecord:
    process: list[str] = []
    level = time = ""
    logged = False
    at = 0
    for _ in range(MAX_PIECES):
        match = _PIECE.match(line, at, at + HEAD)
        if match is None or match.end() == at:
            break
        at = match.end()
        logged |= match["mark"] is None and match["container"] is None
        if tag := match["process"] or match["rank"]:
            process.append(tag)
        level = match["level"] or (match["glog"] or "")[:1] or level
        time = time or match["stamp"] or match["dmesg"] or match["journal"] or match["when"] or ""
        if not time and (odd := match["glog"] or match["csv"]):
            time = odd.split(",")[0].strip('"') if len(odd) > 1 else ""
    return LogRecord(line[at:].strip(), " ".join(process), level, time, logged)
