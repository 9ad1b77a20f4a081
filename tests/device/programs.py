"""Small random programs over two streams, tensors and pinned buffers and one event, and what orders them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from hypothesis import strategies as st

from specmortem import device
from specmortem.device import Chosen, Device, Event, HostBuffer, Op, Region, SimDevice, Stream
from specmortem.device.queues import Entry

Instruction = tuple[Any, ...]
Clock = dict[str, int]
T = TypeVar("T")

_which = st.integers(0, 1)
_work = st.one_of(
    st.tuples(st.just("down"), _which, _which, _which),
    st.tuples(st.just("up"), _which, _which, _which),
    st.tuples(st.just("mix"), _which, _which, _which),
    st.tuples(st.just("assign"), _which, _which, st.integers(10, 19)),
)
_host = st.one_of(
    st.tuples(st.just("write"), _which, _which, st.integers(20, 29)),
    st.tuples(st.just("read"), _which, _which),
)
_order = st.one_of(
    st.tuples(st.just("record"), _which),
    st.tuples(st.just("wait"), _which),
    st.just(("event-sync",)),
    st.tuples(st.just("stream-sync"), _which),
    st.just(("device-sync",)),
)
_query = st.just(("query",))


def programs(min_size: int = 4, max_size: int = 10) -> st.SearchStrategy[list[Instruction]]:
    """Any mixture: many of these programs race."""
    return st.lists(st.one_of(_work, _work, _host, _order, _query), min_size=min_size, max_size=max_size)


def ordered_programs(max_size: int = 6) -> st.SearchStrategy[list[Instruction]]:
    """Work and host accesses with something that may order them after each; many of these do not race."""
    pairs = st.lists(st.tuples(st.one_of(_work, _host), _order, _order), min_size=1, max_size=max_size)
    return pairs.map(lambda steps: [instruction for step in steps for instruction in step])


def assign(tensor: torch.Tensor, value: int) -> None:
    tensor.fill_(value)


def mix(into: torch.Tensor, other: torch.Tensor) -> None:
    """Neither commutes nor forgets, so every order of two of them shows."""
    into.mul_(3).add_(other)


def interpret(instructions: Sequence[Instruction]) -> Callable[[Device], tuple[object, ...]]:
    """A program that returns all that the host saw, and every tensor and buffer at the end."""

    def program(dev: Device) -> tuple[object, ...]:
        run = _Run(dev)
        for name, *operands in instructions:
            getattr(run, name.replace("-", "_"))(*operands)
        return run.finish()

    return program


class _Run:
    def __init__(self, dev: Device) -> None:
        self.dev, self.seen, self.event = dev, list[object](), dev.event()
        self.streams = [dev.default_stream, dev.stream("side")]
        self.tensors = [dev.tensor([1, 2], torch.int64), dev.tensor([3, 4], torch.int64)]
        self.buffers = [dev.host_buffer([2], torch.int64, name=name) for name in "ab"]

    def down(self, stream: int, tensor: int, buffer: int) -> None:
        self.dev.copy_async(self.tensors[tensor], self.buffers[buffer], self.streams[stream])

    def up(self, stream: int, tensor: int, buffer: int) -> None:
        self.dev.copy_async(self.buffers[buffer], self.tensors[tensor], self.streams[stream])

    def mix(self, stream: int, into: int, other: int) -> None:
        tensors = self.tensors[into], self.tensors[other]
        self.dev.launch(mix, *tensors, stream=self.streams[stream], writes=tensors[:1])

    def assign(self, stream: int, tensor: int, value: int) -> None:
        half = self.tensors[tensor][value % 2 :][:1]
        self.dev.launch(assign, half, value, stream=self.streams[stream], reads=[])

    def write(self, buffer: int, index: int, value: int) -> None:
        self.buffers[buffer][index] = value

    def read(self, buffer: int, index: int) -> None:
        self.seen.append(int(self.buffers[buffer][index]))

    def record(self, stream: int) -> None:
        self.event.record(self.streams[stream])

    def wait(self, stream: int) -> None:
        self.streams[stream].wait(self.event)

    def query(self) -> None:
        self.seen.append(self.event.query())

    def event_sync(self) -> None:
        self.event.synchronize()

    def stream_sync(self, stream: int) -> None:
        self.streams[stream].synchronize()

    def device_sync(self) -> None:
        self.dev.synchronize()

    def finish(self) -> tuple[object, ...]:
        self.dev.synchronize()
        for value in (*self.tensors, *(buffer.backing for buffer in self.buffers)):
            self.seen.append(tuple(value.tolist()))
        return tuple(self.seen)


class RaceFinder(device.Observer):
    """Vector clocks over the host and the streams: `racy` once two conflicting accesses are unordered."""

    def __init__(self) -> None:
        self.racy = False
        self._clocks: dict[str, Clock] = {}
        self._records: dict[Event, Clock] = {}
        self._accesses: list[tuple[str, Clock, Op]] = []

    def enqueued(self, stream: Stream, op: Op, site: str) -> None:
        self._join(stream.name, self._clock("host"))
        self._access(stream.name, op)

    def host_accessed(self, buffer: HostBuffer, region: Region, write: bool, site: str) -> None:
        regions = ((), (region,)) if write else ((region,), ())
        self._access("host", Op("host", reads=regions[0], writes=regions[1]))

    def recorded(self, event: Event, stream: Stream, site: str) -> None:
        self._join(stream.name, self._clock("host"))
        self._records[event] = dict(self._clock(stream.name))

    def waited(self, stream: Stream, event: Event, site: str) -> None:
        self._join(stream.name, self._records.get(event, {}))

    def synchronized(self, target: Stream | Event | None, site: str) -> None:
        if isinstance(target, Event):
            self._join("host", self._records.get(target, {}))
        for name in [target.name] if isinstance(target, Stream) else [] if target else list(self._clocks):
            self._join("host", self._clock(name))

    def queried(self, event: Event, done: bool, site: str) -> None:
        self.synchronized(event if done else Event(event.device, ""), site)

    def _clock(self, name: str) -> Clock:
        return self._clocks.setdefault(name, {})

    def _join(self, name: str, other: Clock) -> None:
        mine = self._clock(name)
        for key, value in other.items():
            mine[key] = max(mine.get(key, 0), value)

    def _access(self, name: str, op: Op) -> None:
        mine = self._clock(name)
        for other, then, earlier in self._accesses:
            ordered = then[other] <= mine.get(other, 0)
            self.racy |= not ordered and earlier.conflicts(op)
        mine[name] = mine.get(name, 0) + 1
        self._accesses.append((name, dict(mine), op))


class Unreduced(Chosen):
    """Branches over every runnable operation at every host access and query, conflict or not."""

    def accessing(self, access: Op) -> None:
        while self.queues.pending:
            runnable = self.queues.runnable()
            pick = self._pick(1 + len(runnable))
            if pick == 0:
                return
            self.queues.run([runnable[pick - 1]])

    def querying(self, record: Entry) -> None:
        self.accessing(record.op)

    def force(self, entries: Sequence[Entry]) -> None:
        while not all(entry.done for entry in entries):
            runnable = self.queues.runnable()
            self.queues.run([runnable[self._pick(len(runnable))]])


def unreduced_outcomes(program: Callable[[Device], T], limit: int) -> set[T] | None:
    """What all interleavings give, equal ones counted apart; None beyond `limit` of them."""
    found, schedule = set[T](), Unreduced()
    for _ in range(limit):
        found.add(program(SimDevice(schedule)))
        following = schedule.successor()
        if following is None:
            return found
        schedule = following
    return None


def races(program: Callable[[Device], object]) -> bool:
    """Whether happens-before leaves a conflicting pair of the program unordered."""
    dev, finder = device.open("sim", schedule="lazy"), RaceFinder()
    dev.observers.append(finder)
    program(dev)
    return finder.racy
