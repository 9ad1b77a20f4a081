"""Acceptance over time, from the counters that vLLM shows at /metrics.

Names: `vllm/v1/spec_decode/metrics.py` of 0.23.0 (lines 154-191) and 0.24.0 to 0.33.0 (229-257) declares the counters
`vllm:spec_decode_num_drafts`, `..._num_draft_tokens`, `..._num_accepted_tokens` and, with a label `position`,
`..._num_accepted_tokens_per_pos`; the Prometheus client appends `_total`. Engines and models are summed.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import isfinite
from statistics import median
from typing import Annotated

from msgspec import Meta
from msgspec.structs import force_setattr

from specmortem.convert import Amount, Count, Value

WINDOW_DRAFTS = 100
COLLAPSED_SHARE, WINDOWS_IN_A_ROW, WINDOWS_BEFORE = 0.6, 2, 3
NOTHING_DRAFTS, NOTHING_RATE = 400, 0.01
COLLAPSE_RULE = (
    "windows hold at least 100 drafts each; acceptance has collapsed when two windows in a row stay below 0.6 of the "
    "median rate of all windows before them, of which there must be 3, or when less than 1 % of the draft tokens of "
    "at least 400 drafts is accepted in the whole run"
)
LINE = re.compile(
    r"^vllm:spec_decode_num_(drafts|draft_tokens|accepted_tokens|accepted_tokens_per_pos)(?:_total)?"
    r"(\{[^\n]*\})?[ \t]+([0-9.eE+-]+)(?:[ \t]+-?\d+)?\s*$",
    re.MULTILINE,
)
POSITION = re.compile(r'[{,]\s*position="(\d{1,4})"')


@dataclass(frozen=True)
class Counters:
    """The counters at one moment, `at_s` seconds into the run."""

    at_s: float
    drafts: float = 0.0
    draft_tokens: float = 0.0
    accepted_tokens: float = 0.0
    per_position: Mapping[int, float] = field(default_factory=dict)

    def behind(self, other: Counters) -> bool:
        """Whether a counter is smaller than before, as after a restart."""
        mine = (self.drafts, self.draft_tokens, self.accepted_tokens)
        theirs = (other.drafts, other.draft_tokens, other.accepted_tokens)
        return any(m < t for m, t in zip(mine, theirs, strict=True))


class Window(Value, frozen=True):
    """What happened between two moments, and what follows from it.

    `rate` is accepted over drafted tokens, 0 where nothing was drafted; `length` the mean of tokens a step, the bonus
    token counted.
    """

    from_s: float
    to_s: float
    drafts: Count
    draft_tokens: Count
    accepted_tokens: Count
    per_position: tuple[Amount, ...]
    rate: Amount = 0.0
    length: Annotated[float, Meta(ge=1)] = 1.0

    def __post_init__(self) -> None:
        """Fill in what follows from the counts."""
        if self.draft_tokens:
            force_setattr(self, "rate", self.accepted_tokens / self.draft_tokens)
        if self.drafts:
            force_setattr(self, "length", 1 + self.accepted_tokens / self.drafts)


def parse(text: str, at_s: float) -> Counters | None:
    """The counters of a scrape; None where the server drafts nothing or shows other metrics."""
    sums = dict.fromkeys(("drafts", "draft_tokens", "accepted_tokens"), 0.0)
    per_position: dict[int, float] = {}
    seen = False
    for name, labels, number in LINE.findall(text):
        value = _number(number)
        if value is None:
            continue
        if name in sums:
            sums[name] += value
            seen = True
        elif position := POSITION.search(labels):
            index = int(position[1])
            per_position[index] = per_position.get(index, 0.0) + value
    return Counters(at_s, **sums, per_position=per_position) if seen else None


def _number(text: str) -> float | None:
    try:
        value = float(text)
    except ValueError:
        return None
    return value if isfinite(value) and 0 <= value < 1e15 else None


class Acceptance:
    """Windows of a run, out of the scrapes as they come."""

    def __init__(self) -> None:
        """No scrape yet."""
        self.windows: list[Window] = []
        self.restarts: list[float] = []
        self._start: Counters | None = None
        self._last: Counters | None = None
        self._overall = [0, 0, 0]

    @property
    def offered(self) -> bool:
        """Whether the server showed the counters at all."""
        return self._last is not None

    @property
    def overall(self) -> Window | None:
        """The whole run as one window, restarts left out; None without two scrapes."""
        if self._last is None:
            return None
        drafts, draft_tokens, accepted = self._overall
        return Window(0.0, self._last.at_s, drafts, draft_tokens, accepted, ())

    def add(self, counters: Counters) -> None:
        """Take a scrape: close the window when it holds enough drafts, begin anew when counters went back."""
        if self._last is None or self._start is None:
            self._start = counters
        elif counters.behind(self._last):
            self.restarts.append(counters.at_s)
            self._start = counters
        else:
            step = _window(self._last, counters)
            parts = (step.drafts, step.draft_tokens, step.accepted_tokens)
            self._overall = [a + b for a, b in zip(self._overall, parts, strict=True)]
            if (window := _window(self._start, counters)).drafts >= WINDOW_DRAFTS:
                self.windows.append(window)
                self._start = counters
        self._last = counters


def _window(first: Counters, last: Counters) -> Window:
    drafts = last.drafts - first.drafts
    positions = range(1 + max(last.per_position, default=-1))
    rates = [last.per_position.get(p, 0.0) - first.per_position.get(p, 0.0) for p in positions]
    return Window(
        first.at_s,
        last.at_s,
        int(drafts),
        int(last.draft_tokens - first.draft_tokens),
        int(last.accepted_tokens - first.accepted_tokens),
        tuple(max(0.0, rate / drafts) if drafts else 0.0 for rate in rates),
    )


def collapse(windows: Sequence[Window], overall: Window | None) -> str:
    """Why acceptance has collapsed by `COLLAPSE_RULE`; empty when it has not."""
    if overall and overall.drafts >= NOTHING_DRAFTS and overall.rate < NOTHING_RATE:
        return f"{overall.accepted_tokens} of {overall.draft_tokens} draft tokens accepted in the whole run"
    for first in range(WINDOWS_BEFORE, len(windows) - WINDOWS_IN_A_ROW + 1):
        usual = median(window.rate for window in windows[:first])
        low = windows[first : first + WINDOWS_IN_A_ROW]
        if usual > 0 and all(window.rate < COLLAPSED_SHARE * usual for window in low):
            rates = " and ".join(f"{window.rate:.1%}" for window in low)
            return f"{rates} from {low[0].from_s:.0f} s on, after a median of {usual:.1%}"
    return ""
