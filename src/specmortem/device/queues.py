"""The simulator's queues: what is pending, what must precede what, and running it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from specmortem.device.memory import Op
from specmortem.device.objects import Stream


@dataclass(eq=False)
class Entry:
    """An operation in a stream; `serial` grows with every enqueue, so it is an order that always works.

    `before` holds the direct predecessors that were pending at the enqueue.
    """

    op: Op
    stream: Stream
    serial: int
    step: int
    before: tuple[Entry, ...]
    done: bool = False
    start_us: float | None = None
    end_us: float | None = None


class Queues:
    """All pending entries of a device."""

    def __init__(self, executed: Callable[[Entry], None]) -> None:
        self.pending: dict[Entry, None] = {}
        self._tails: dict[Stream, Entry] = {}
        self._executed = executed
        self._serial = 0

    def add(self, stream: Stream, op: Op, step: int, awaited: Entry | None = None) -> Entry:
        """Put `op` at the end of a stream, held until `awaited` has run too."""
        direct = (self._tails.get(stream), awaited)
        entry = Entry(
            op, stream, self._serial, step, tuple(e for e in direct if e is not None and not e.done)
        )
        self._serial += 1
        self._tails[stream] = entry
        self.pending[entry] = None
        return entry

    def tail(self, stream: Stream) -> Entry | None:
        """The latest entry of a stream, run or not."""
        return self._tails.get(stream)

    def runnable(self) -> list[Entry]:
        """The entries that nothing holds back: heads of streams whose events have been reached."""
        return [entry for entry in self.pending if all(e.done for e in entry.before)]

    def needed(self, goals: Iterable[Entry]) -> list[Entry]:
        """The goals and everything that must run before them, in an order that works."""
        found: set[Entry] = set()
        todo = [goal for goal in goals if not goal.done]
        while todo:
            entry = todo.pop()
            if entry not in found:
                found.add(entry)
                todo.extend(e for e in entry.before if not e.done)
        return sorted(found, key=lambda e: e.serial)

    def run(self, entries: Iterable[Entry]) -> None:
        """Run entries whose predecessors have run, in the given order.

        What an operation raises is raised here; the operation counts as run.
        """
        for entry in entries:
            assert all(e.done for e in entry.before), f"{entry.op.name} would overtake its stream"
            del self.pending[entry]
            entry.done, entry.before = True, ()
            self._executed(entry)
            entry.op.run()
