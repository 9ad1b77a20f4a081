"""The simulated device: CPU tensors, queues that a schedule runs, no threads."""

from __future__ import annotations

import platform
from weakref import WeakKeyDictionary

import torch

from specmortem.device.interface import Device
from specmortem.device.memory import Op
from specmortem.device.objects import Event, Graph, Place, Stream
from specmortem.device.queues import Entry, Queues
from specmortem.device.schedules import Schedule, ScheduleError
from specmortem.device.trace import TraceRecord
from specmortem.verdict import DeviceInfo

_POISON = 0x7F


class SimDevice(Device):
    """CUDA's order of queues, events and host, run on the CPU when the schedule says.

    An operation that raises does so out of the host call that ran it. Nothing is poisoned by that, unlike on
    CUDA.
    """

    kind = "sim"
    torch_device = "cpu"

    def __init__(self, schedule: Schedule) -> None:
        self.queues = Queues(self._executed)
        self.schedule = schedule
        self._records: WeakKeyDictionary[Event, Entry] = WeakKeyDictionary()
        self._replays: WeakKeyDictionary[Graph, Entry] = WeakKeyDictionary()
        self._polls = 0
        schedule.bind(self.queues)
        super().__init__(DeviceInfo("sim", f"simulated on {platform.machine()}"))

    def _executed(self, entry: Entry) -> None:
        record = TraceRecord(
            "queue", entry.op.what, entry.stream.name, entry.op.name, entry.step, entry.start_us, entry.end_us
        )
        self.trace.append(record)
        for observer in self.observers:
            observer.executed(entry.stream, entry.op)

    def _host_memory(self, shape: tuple[int, ...], dtype: torch.dtype, pinned: bool) -> torch.Tensor:
        return torch.zeros(shape, dtype=dtype)

    def _empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Poison: a large positive number in every dtype but bool, the same in every run."""
        if dtype == torch.bool:
            return torch.ones(shape, dtype=dtype)
        tensor = torch.empty(shape, dtype=dtype)
        tensor.reshape(-1).view(torch.uint8).fill_(_POISON)
        return tensor

    def _source(self, src: Place) -> torch.Tensor:
        if isinstance(src, torch.Tensor):
            return src
        return src.backing if src.pinned else src.backing.clone()

    def _enqueue(self, stream: Stream, op: Op) -> None:
        self.schedule.launching()
        self._place(stream, op)
        self.schedule.enqueued()

    def _enqueue_record(self, event: Event, stream: Stream) -> None:
        self._records[event] = self._place(stream, Op("record", event.name))
        self.schedule.enqueued()

    def _enqueue_wait(self, stream: Stream, event: Event) -> None:
        if event in self._records:
            self._place(stream, Op("wait", event.name), self._records[event])
            self.schedule.enqueued()

    def _enqueue_graph(self, graph: Graph, stream: Stream) -> None:
        self.schedule.launching()
        previous = self._replays.get(graph)
        self._place(stream, Op("wait", f"previous replay of {graph.name}"), previous)
        for op in graph.ops:
            self._place(stream, op)
        self._replays[graph] = self._place(stream, Op("record", f"end of {graph.name}"))
        self.schedule.enqueued()

    def _place(self, stream: Stream, op: Op, awaited: Entry | None = None) -> Entry:
        entry = self.queues.add(stream, op, self._step, awaited)
        self.schedule.placed(entry)
        self._polls = 0
        return entry

    def _event_done(self, event: Event) -> bool:
        record = self._records.get(event)
        if record is None or record.done:
            return True
        self.schedule.querying(record)
        self._polls = 0 if record.done else self._polls + 1
        if self._polls > self.schedule.poll_limit:
            raise ScheduleError(
                f"event {event.name!r} was asked {self._polls} times in a row, and the schedule "
                f"{type(self.schedule).__name__} need never answer True: synchronize it, or bound the polls"
            )
        return record.done

    def _block_on(self, target: Stream | Event | None) -> None:
        if target is None:
            goals = list(self.queues.pending)
        else:
            entry = self.queues.tail(target) if isinstance(target, Stream) else self._records.get(target)
            goals = [] if entry is None else [entry]
        self.schedule.force(goals)
        self._polls = 0

    def _before_access(self, access: Op) -> None:
        self.schedule.accessing(access)
        self._polls = 0

    def _elapse(self, microseconds: float) -> None:
        self.schedule.elapse(microseconds)

    def _now(self) -> float | None:
        return self.schedule.now()
