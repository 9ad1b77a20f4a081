"""When the simulator's queued work runs.

A schedule is asked at the points where the host touches the device: after an enqueue, before a host access,
at a query, and when a synchronize forces work. Every schedule keeps CUDA's order; they differ in what else
has run by then.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from math import inf

from specmortem.device.memory import Op
from specmortem.device.queues import Entry, Queues
from specmortem.errors import BadInputError


class ScheduleError(BadInputError):
    """A program that its schedule cannot bring to an end, or cannot repeat."""


class Schedule:
    """Runs nothing but what is forced; the others override the points where they run more.

    `poll_limit` is the number of unsuccessful queries in a row after which the program is taken to poll for
    ever.
    """

    queues: Queues
    poll_limit: float = inf

    def bind(self, queues: Queues) -> None:
        """Serve one device. Raises BadInputError at the second."""
        if hasattr(self, "queues"):
            raise BadInputError(
                f"this {type(self).__name__} schedule already serves a device; give each its own"
            )
        self.queues = queues

    def launching(self) -> None:
        """The host starts a launch, a copy or a replay."""

    def placed(self, entry: Entry) -> None:
        """An entry was put into its queue."""

    def enqueued(self) -> None:
        """The host has enqueued something."""

    def accessing(self, access: Op) -> None:
        """The host is about to read or write a buffer."""

    def querying(self, record: Entry) -> None:
        """The host asks whether this pending record has run."""

    def force(self, entries: Sequence[Entry]) -> None:
        """The host waits until these have run."""
        self.queues.run(self.queues.needed(entries))

    def elapse(self, microseconds: float) -> None:
        """The host does something else."""

    def now(self) -> float | None:
        """Microseconds on the schedule's clock, if it has one."""
        return None


class Lazy(Schedule):
    """Nothing runs before a synchronize or a copy into pageable memory needs it."""

    poll_limit = 100_000


class Immediate(Schedule):
    """Everything runs as it is enqueued, as with CUDA_LAUNCH_BLOCKING=1."""

    def enqueued(self) -> None:
        self.force(list(self.queues.pending))


class Random(Schedule):
    """At every point a random number of operations runs, each at the head of a random stream."""

    def __init__(self, seed: int = 0) -> None:
        self._random = random.Random(seed)

    def enqueued(self) -> None:
        for _ in range(self._random.randint(0, len(self.queues.pending))):
            self._run_one()

    def accessing(self, access: Op) -> None:
        self.enqueued()

    def querying(self, record: Entry) -> None:
        self.enqueued()

    def elapse(self, microseconds: float) -> None:
        self.enqueued()

    def force(self, entries: Sequence[Entry]) -> None:
        while not all(entry.done for entry in entries):
            self._run_one()

    def _run_one(self) -> None:
        self.queues.run([self._random.choice(self.queues.runnable())])


class Timed(Schedule):
    """A clock in microseconds decides.

    A launch, copy or replay costs the host `launch_us`, a query `query_us`, all else nothing. An operation
    starts when it is enqueued, its stream is free and the events it waits for are reached; it takes its
    `duration_us` and has its effect at the end. Streams do not slow each other down.
    """

    def __init__(self, launch_us: float = 5.0, query_us: float = 1.0) -> None:
        self.launch_us, self.query_us = launch_us, query_us
        self._now = 0.0

    def now(self) -> float:
        return self._now

    def launching(self) -> None:
        self._now += self.launch_us

    def placed(self, entry: Entry) -> None:
        entry.start_us = max([self._now, *(_end(e) for e in entry.before)])
        entry.end_us = entry.start_us + entry.op.duration_us

    def enqueued(self) -> None:
        self._run_past()

    def accessing(self, access: Op) -> None:
        self._run_past()

    def querying(self, record: Entry) -> None:
        self.elapse(self.query_us)

    def force(self, entries: Sequence[Entry]) -> None:
        self._now = max([self._now, *(_end(e) for e in entries if not e.done)])
        self._run_past()

    def elapse(self, microseconds: float) -> None:
        self._now += microseconds
        self._run_past()

    def _run_past(self) -> None:
        past = [entry for entry in self.queues.pending if _end(entry) <= self._now]
        self.queues.run(sorted(past, key=lambda e: (_end(e), e.serial)))


def _end(entry: Entry) -> float:
    assert entry.end_us is not None, "the timed schedule placed every entry"
    return entry.end_us


NAMED = {"immediate": Immediate, "lazy": Lazy, "random": Random, "timed": Timed}


def named(schedule: str | Schedule, seed: int) -> Schedule:
    """The schedule of that name; `seed` is for `random`. Raises BadInputError for any other name."""
    if isinstance(schedule, Schedule):
        return schedule
    if schedule == "enumerate":
        raise BadInputError(
            "schedule 'enumerate' runs a program many times: call device.enumerate_schedules(program)"
        )
    if schedule not in NAMED:
        raise BadInputError(f"schedule {schedule!r} is not one of {', '.join(NAMED)}, enumerate")
    return Random(seed) if schedule == "random" else NAMED[schedule]()
