"""Signs of damage in whole answers: loops and early ends. Every rule is stated where it stands.

The rules are heuristics on text: a model may loop by itself, above all under `ignore_eos`, which forbids it to end.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from statistics import median

import numpy as np
import numpy.typing as npt

from specmortem.tools.load.outcome import Outcome, RequestRecord

LOOP_RULE = (
    "a loop is a unit of 1 to 500 characters that stands unbroken at least 8 times over at least 200 characters, or "
    "4 times over 1,000, within the last 16,384 characters; at the very end of an answer 8 times over 48 characters "
    "suffice; a unit of white space and ruling characters only needs 8 times over 1,000; "
    "where token ids are expected that repeat themselves, a loop is no sign"
)
EARLY_RULE = (
    "an early end is finish_reason stop with fewer tokens than ignore_eos or min_tokens asked for, or with no text, "
    "or with at most a tenth of the median tokens of the other whole answers, if there are at least 8 others, their "
    "median is at least 64, and three quarters of them reach half of it"
)
WINDOW, LONGEST_UNIT = 16_384, 500
RULING = frozenset("-=_*#~.|+:")
PEERS, PEER_MEDIAN, PEER_SHARE = 8, 64, 0.1
Codes = npt.NDArray[np.uint32]
Breaks = npt.NDArray[np.intp]


@dataclass(frozen=True)
class Loop:
    """A unit of text that repeats: how often, and over how many characters."""

    unit: str
    times: int
    characters: int


def find_loop(text: str) -> Loop | None:
    """The loop with the shortest unit by `LOOP_RULE`, or None."""
    tail = text[-WINDOW:]
    codes: Codes = np.frombuffer(tail.encode("utf-32-le", "surrogatepass"), dtype=np.uint32)
    for period in range(1, min(LONGEST_UNIT, len(codes) // 4) + 1):
        breaks = np.flatnonzero(codes[period:] != codes[:-period])
        runs = {False: _longest_run(breaks, len(codes), period), True: _run_at_end(breaks, len(codes))}
        for at_end, (start, length) in runs.items():
            unit = tail[start : start + period]
            if _is_loop(unit, length, at_end=at_end):
                return Loop(unit, length // period, length)
    return None


def _is_loop(unit: str, length: int, *, at_end: bool) -> bool:
    times = length // max(1, len(unit))
    if all(character in RULING or character.isspace() for character in unit):
        return times >= 8 and length >= 1000
    return (times >= 8 and length >= (48 if at_end else 200)) or (times >= 4 and length >= 1000)


def _longest_run(breaks: Breaks, length: int, period: int) -> tuple[int, int]:
    """(start, characters) of the longest stretch in which each character equals the one a period before it.

    `breaks` are the places whose character differs from the one a period later, `length` is that of the text.
    """
    edges = np.concatenate(([-1], breaks, [length - period]))
    gaps = np.diff(edges) - 1
    widest = int(np.argmax(gaps))
    return int(edges[widest]) + 1, int(gaps[widest]) + period


def _run_at_end(breaks: Breaks, length: int) -> tuple[int, int]:
    """(start, characters) of the stretch that reaches the end of the text."""
    start = int(breaks[-1]) + 1 if len(breaks) else 0
    return start, length - start


def ends_early(finish_reason: str, text: str, tokens: int | None, asked: int) -> str:
    """Why a whole answer ended early, by `EARLY_RULE` without peers; empty when it did not.

    `asked` is the least number of tokens that was demanded, 0 for none. Without a count of the server the bytes of the
    text are taken, as a token holds at least one.
    """
    if finish_reason != "stop":
        return ""
    most = tokens if tokens is not None else len(text.encode("utf-8", "replace"))
    if asked and most < asked:
        counted = "tokens" if tokens is not None else "bytes"
        return f"stop after {most} {counted}; at least {asked} tokens were asked for"
    return "stop without any text" if not text else ""


def early_among_peers(records: Iterable[RequestRecord]) -> Mapping[str, str]:
    """Reasons by id of whole answers of the load that ended early beside their peers, by `EARLY_RULE`."""
    whole = {
        r.id: r
        for r in records
        if r.outcome is Outcome.OK and not r.warm_up and r.completion_tokens is not None
    }
    found = {}
    for record in (r for r in whole.values() if r.finish_reason == "stop"):
        usual = _usual([r.completion_tokens or 0 for r in whole.values() if r.id != record.id])
        if usual and (record.completion_tokens or 0) <= PEER_SHARE * usual:
            found[record.id] = (
                f"stop after {record.completion_tokens} tokens; the others' median is {usual:g}"
            )
    return found


def _usual(others: list[int]) -> float:
    """The peers' median; 0 where they are too few, too short or too different to tell."""
    if len(others) < PEERS or (middle := median(others)) < PEER_MEDIAN:
        return 0.0
    alike = sum(count >= middle / 2 for count in others)
    return float(middle) if alike >= 0.75 * len(others) else 0.0
