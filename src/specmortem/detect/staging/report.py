"""What the staging detector says: two touches of the same bytes that nothing orders."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

import specmortem.device
from specmortem.detect import hooks

Frame = tuple[str, int, str]

_HIDDEN = (
    *(f"{Path(file).parent}/" for file in (hooks.__file__, specmortem.device.__file__, str(torch.__file__))),
    contextlib.__file__,
)
_DEPTH = 8


def user_stack() -> tuple[Frame, ...]:
    """File, line and function of the callers, innermost first, from the first that is the program's own."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_HIDDEN):
        frame = frame.f_back
    stack: list[Frame] = []
    at = frame
    while at is not None and len(stack) < _DEPTH:
        stack.append((at.f_code.co_filename, at.f_lineno, at.f_code.co_name))
        at = at.f_back  # type: ignore[assignment]
    return tuple(stack)


def place(stack: Sequence[Frame]) -> str:
    """`name.py:line` of the innermost frame."""
    return f"{Path(stack[0][0]).name}:{stack[0][1]}" if stack else "an unknown place"


@dataclass(frozen=True)
class Touch:
    """One side of a race: what read or wrote the bytes, and the program's line that did or enqueued it.

    `what` is `copy`, `launch` or `host`; `stream` is empty for the host. `stack` goes outwards from `site`
    and is not compared. A host write that only the changed content shows happened after `site` and before
    `until`, and has no stack.
    """

    action: str
    what: str
    name: str
    stream: str
    site: str
    stack: tuple[str, ...] = field(default=(), compare=False)
    until: str = ""

    @property
    def subject(self) -> str:
        """Without its place."""
        return f"host {self.action}" if self.what == "host" else f"{self.what} {self.name!r}"

    def __str__(self) -> str:
        site = self.site.rsplit("/", 1)[-1]
        if self.until:
            return f"{self.subject} between {site} and {self.until.rsplit('/', 1)[-1]}"
        return f"{self.subject} {'at' if self.what == 'host' else 'enqueued at'} {site}"


@dataclass(frozen=True)
class Race:
    """Two conflicting touches of `buffer` that nothing orders.

    Bytes [`start`, `stop`), counted from the start of the buffer's memory, are the first run that the first
    pair shared; `count` says how often the two lines met unordered. `edge` is the order that is missing, in
    words. `kind` is `source-overwritten` (a copy or kernel reads what the host writes), `destination-read`
    and `destination-overwritten` (the host reads or writes what a copy or kernel writes), or
    `between-streams`.
    """

    first: Touch
    second: Touch
    buffer: str
    start: int
    stop: int
    kind: str
    edge: str
    count: int = 1

    def __str__(self) -> str:
        """One line for a terminal."""
        times = f", {self.count} times" if self.count > 1 else ""
        return f"{self.kind} of {self.buffer} bytes [{self.start}, {self.stop}){times}: {self.edge}"


def kind_of(first: Touch, second: Touch) -> str:
    """The kind of a race whose first touch is queued work."""
    if second.what != "host":
        return "between-streams"
    if first.action == "read":
        return "source-overwritten"
    return "destination-read" if second.action == "read" else "destination-overwritten"


def missing_edge(first: Touch, second: Touch, vain: str = "") -> str:
    """Which order is missing and what would give it; `vain` names a wait that does not."""
    order = f"nothing orders the {first} before the {second}"
    marked = f"an event recorded behind the {first.what} in stream {first.stream!r}"
    if second.what == "host":
        cure = f"{marked} and synchronized before the {second.action} would"
    else:
        cure = f"{marked} and waited for by stream {second.stream!r} before the {second.what} would"
    return f"{order}{f' ({vain} does not)' if vain else ''}; {cure}"


def lines(stack: Sequence[Frame]) -> tuple[str, ...]:
    """A stack for people, innermost first."""
    return tuple(f"{file}:{line} in {function}" for file, line, function in stack)
