"""Happens-before between the host and the streams, by vector clocks.

A clock counts, for every stream, the operations that are known to have run: the host's grows at synchronizes
and at queries that answer True, a stream's at its enqueues and waits. What the host has done, and what it
knows to be over, is ordered before all that it enqueues afterwards. So only queued operations that the host
does not know to be over can race, and only these are kept, with the memory that they refer to: an address in
use is not given to another buffer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch

from specmortem.detect.staging.report import Frame, place, user_stack
from specmortem.device import Op, Region
from specmortem.device.memory import host_access

Clock = dict[str, int]


@dataclass(frozen=True, eq=False)
class Access:
    """An operation of a stream, or one of the host (`stream` is then empty); `tick` is its number in its stream.

    `serial` numbers all accesses in the order of the program's calls.
    """

    serial: int
    op: Op
    stream: str
    tick: int
    stack: tuple[Frame, ...]


class Conflict(NamedTuple):
    """Bytes that two accesses share, and what each does with them."""

    start: int
    stop: int
    first: str
    second: str
    name: str


def conflicts(first: Op, second: Op) -> Iterator[Conflict]:
    """The shared bytes of which one side writes some, once each."""
    seen: set[tuple[int, int]] = set()
    ways = (
        (first.writes, second.writes, "write", "write"),
        (first.reads, second.writes, "read", "write"),
        (first.writes, second.reads, "write", "read"),
    )
    for ours, theirs, one, other in ways:
        for a in ours:
            for b in theirs:
                span = a.shared(b)
                if span is not None and span not in seen:
                    seen.add(span)
                    yield Conflict(*span, one, other, _name(a, b))


def _name(a: Region, b: Region) -> str:
    return next((name for name in (a.name, b.name) if name not in ("", "tensor")), "tensor")


class Order:
    """The clocks; `found` hears of every unordered conflicting pair, the earlier call first."""

    def __init__(self, found: Callable[[Access, Access, Conflict], None]) -> None:
        self._found = found
        self._serial = 0
        self.latest: Access | None = None
        self._host: Clock = {}
        self._clocks: dict[str, Clock] = {}
        self._records: WeakKeyDictionary[Any, Clock] = WeakKeyDictionary()
        self._pending: dict[str, dict[object, Access]] = {}
        self._wait = -1, ""

    # Work and host accesses

    def enqueue(self, stream: str, op: Op) -> Access:
        """An operation enters a stream."""
        clock = self._clocks.setdefault(stream, {})
        clock[stream] = clock.get(stream, 0) + 1
        access = self._access(op, stream, clock[stream])
        self._compare(access, clock)
        self.latest = access
        if op.reads or op.writes:
            key = (op.what, op.name, access.stack[:1], op.reads, op.writes)
            self._pending.setdefault(stream, {})[key] = access
        return access

    def host(self, region: Region, write: bool, *alive: torch.Tensor) -> None:
        """The host reads or writes now."""
        op = host_access("host", region, write, *alive)
        if any(op.conflicts(access.op) for access in self._all_pending()):
            self._compare(self._access(op, "", 0), self._host)
        else:
            self._serial += 1

    def pending(self, access: Access) -> bool:
        """Whether the host does not know yet that this operation is over."""
        return access.tick > self._host.get(access.stream, 0)

    def pending_write(self, region: Region) -> bool:
        """Whether an operation that the host does not know to be over writes into these bytes."""
        return any(region.overlaps(written) for access in self._all_pending() for written in access.op.writes)

    # What orders them

    def record(self, event: Any, stream: str) -> None:
        """The event stands for all that the stream holds by now."""
        self._records[event] = self.stream_end(stream)

    def wait(self, stream: str, event: Any) -> None:
        """What enters the stream from now on runs after the event's latest record."""
        _join(self._clocks.setdefault(stream, {}), self._records.get(event, {}))

    def host_waited_event(self, event: Any, how: str) -> None:
        """The host knows that the event's latest record has been reached; `how` in words."""
        self._host_joins([self._records.get(event, {})], how)

    def host_waited_stream(self, stream: str) -> None:
        """The host knows that all in the stream has run."""
        self._host_joins([self._clocks.get(stream, {})], f"the synchronize of stream {stream!r}")

    def host_waited_all(self) -> None:
        """The host knows that all in every stream has run."""
        self._host_joins(list(self._clocks.values()), "the device synchronize")

    def stream_end(self, stream: str) -> Clock:
        """A copy of the stream's clock: what is known to be over when its present end is reached."""
        return dict(self._clocks.get(stream, {}))

    def stream_follows(self, stream: str, clock: Clock) -> None:
        """What enters the stream from now on runs after all that the clock counts."""
        _join(self._clocks.setdefault(stream, {}), clock)

    def vain_wait(self, first: Access) -> str:
        """The host's latest wait since an operation's enqueue, which did not cover it; empty if none."""
        serial, words = self._wait
        return words if serial >= first.serial else ""

    # Shared steps

    def _all_pending(self) -> Iterator[Access]:
        for pending in self._pending.values():
            yield from pending.values()

    def _access(self, op: Op, stream: str, tick: int) -> Access:
        self._serial += 1
        return Access(self._serial, op, stream, tick, user_stack())

    def _compare(self, access: Access, clock: Clock) -> None:
        for stream, pending in self._pending.items():
            if stream == access.stream:
                continue
            known = clock.get(stream, 0)
            for earlier in pending.values():
                if earlier.tick > known:
                    for conflict in conflicts(earlier.op, access.op):
                        self._found(earlier, access, conflict)

    def _host_joins(self, clocks: Sequence[Clock], how: str) -> None:
        for clock in clocks:
            _join(self._host, clock)
        self._wait = self._serial, f"{how} at {place(user_stack())}"
        for stream, pending in self._pending.items():
            known = self._host.get(stream, 0)
            self._pending[stream] = {key: a for key, a in pending.items() if a.tick > known}


def _join(clock: Clock, other: Clock) -> None:
    for stream, tick in other.items():
        if clock.get(stream, 0) < tick:
            clock[stream] = tick
