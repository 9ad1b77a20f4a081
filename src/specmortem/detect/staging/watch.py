"""The detector on this package's devices, simulated or CUDA: it needs their calls only, not their timing."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar

import torch

from specmortem import device as devices
from specmortem.detect.staging.order import Access, Clock, Conflict, Order
from specmortem.detect.staging.report import Race, Touch, kind_of, lines, missing_edge
from specmortem.device import Device, Event, Graph, HostBuffer, Interleaving, Observer, Op, Region, Stream
from specmortem.device.explore import outcome_of
from specmortem.errors import BadInputError

T = TypeVar("T")


class StagingWatch(Observer):
    """Hears what a program does; `races` holds what nothing orders, each pair of lines once."""

    def __init__(self) -> None:
        self.order = Order(self._found)
        self._races: dict[object, Race] = {}
        self._ends: dict[Graph, Clock] = {}
        self._last_ops: dict[Op, Graph] = {}

    @property
    def races(self) -> list[Race]:
        """In the order of their discovery."""
        return list(self._races.values())

    def take(self) -> list[Race]:
        """The races so far, which are then forgotten."""
        races = self.races
        self._races.clear()
        return races

    # What the device tells

    def enqueued(self, stream: Stream, op: Op, site: str) -> None:
        self.order.enqueue(stream.name, op)
        if op in self._last_ops:
            self._ends[self._last_ops[op]] = self.order.stream_end(stream.name)

    def replaying(self, stream: Stream, graph: Graph, site: str) -> None:
        """Replays of one graph never overlap, on whatever streams."""
        self.order.stream_follows(stream.name, self._ends.get(graph, {}))
        if graph.ops:
            self._last_ops[graph.ops[-1]] = graph

    def host_accessed(self, buffer: HostBuffer, region: Region, write: bool, site: str) -> None:
        self.order.host(region, write, buffer.backing)

    def recorded(self, event: Event, stream: Stream, site: str) -> None:
        self.order.record(event, stream.name)

    def waited(self, stream: Stream, event: Event, site: str) -> None:
        self.order.wait(stream.name, event)

    def synchronized(self, target: Stream | Event | None, site: str) -> None:
        if isinstance(target, Event):
            self.order.host_waited_event(target, f"the synchronize of {_called(target)}")
        elif isinstance(target, Stream):
            self.order.host_waited_stream(target.name)
        else:
            self.order.host_waited_all()

    def queried(self, event: Event, done: bool, site: str) -> None:
        if done:
            self.order.host_waited_event(event, f"the query of {_called(event)}")

    # Races

    def add(self, first: Touch, second: Touch, conflict: Conflict, base: int, vain: str = "") -> None:
        """One more meeting of two touches; `base` is where the buffer's memory begins."""
        key = (first.site, first.action, second.site, second.action, conflict.name)
        if key in self._races:
            self._races[key] = replace(self._races[key], count=self._races[key].count + 1)
            return
        edge = missing_edge(first, second, vain)
        span = conflict.start - base, conflict.stop - base
        self._races[key] = Race(first, second, conflict.name, *span, kind_of(first, second), edge)

    def _found(self, first: Access, second: Access, conflict: Conflict) -> None:
        touches = touch(first, conflict.first), touch(second, conflict.second)
        base = _base(conflict.start, (*first.op.tensors, *second.op.tensors))
        self.add(*touches, conflict, base, self.order.vain_wait(first))


def touch(access: Access, action: str) -> Touch:
    """An access as one side of a race."""
    file, line, _ = access.stack[0]
    op, site = access.op, f"{file}:{line}"
    return Touch(action, op.what, op.name, access.stream, site, lines(access.stack))


def _base(address: int, tensors: tuple[torch.Tensor, ...]) -> int:
    """Where the memory begins that holds an address; the address itself when no tensor tells."""
    for tensor in tensors:
        storage = tensor.untyped_storage()
        if storage.data_ptr() <= address < storage.data_ptr() + storage.nbytes():
            return storage.data_ptr()
    return address


def _called(event: Event) -> str:
    return f"event {event.name!r}" if event.name else "an event"


@contextmanager
def watch(device: Device) -> Iterator[StagingWatch]:
    """Watch all that a program does with `device` inside the block.

    Work enqueued before the block is unknown. A launch touches what it declares, and without `reads=` and
    `writes=` it writes every tensor among its arguments. A query that answers True orders, one that answers
    False does not. The order depends on the program's calls alone: without queries, every schedule has the
    same races.

    Raises BadInputError when `device` is not one of this package's devices.
    """
    if not isinstance(device, Device):
        raise BadInputError(
            f"staging.watch({device!r}) needs a device of specmortem.device.open; "
            "for a plain PyTorch program use staging.watch_torch()"
        )
    watched = StagingWatch()
    device.observers.append(watched)
    try:
        yield watched
    finally:
        device.observers.remove(watched)


@dataclass(frozen=True)
class Confirmation(Generic[T]):
    """What the interleavings of a program gave: `differing` of `explored` are not as under `immediate`.

    `witness` is the first of these (None when there is none): `Chosen(witness.choices)` is a schedule that
    runs it again.
    """

    races: tuple[Race, ...]
    explored: int
    differing: int
    expected: T | Exception
    witness: Interleaving[T] | None


def confirm(program: Callable[[Device], T], limit: int = 100_000) -> Confirmation[T]:
    """Run `program` under every distinguishable interleaving and compare what it returns or raises.

    The program and `limit` are those of `device.enumerate_schedules`. Raises BadInputError as that does, and
    when two results cannot be compared with `==`.
    """
    dev = devices.open("sim", schedule="immediate")
    with watch(dev) as watched:
        expected = outcome_of(program, dev)
    explored = devices.enumerate_schedules(program, limit)
    different = [found for found in explored if not _same(found.outcome, expected)]
    witness = different[0] if different else None
    return Confirmation(tuple(watched.races), explored.explored, len(different), expected, witness)


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, Exception) or isinstance(other, Exception):
        return type(one) is type(other) and str(one) == str(other)
    try:
        return bool(one == other)
    except (RuntimeError, ValueError) as error:
        raise BadInputError(
            f"the program returns a {type(one).__name__}, which == cannot judge; return numbers or lists"
        ) from error
