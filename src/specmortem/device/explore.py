"""Every distinguishable interleaving of a program, by running it again for each (stateless model checking).

The result of a program depends only on the order of conflicting pairs (two operations, or an operation and a
host access, that share bytes of which one writes some) and on what queries answered. So an operation is left
pending until the host demands something that its order can affect, and only then the exploration branches:

- before a host access: which of the conflicting operations have run;
- before forced work: which conflicting operations of other streams have run, and in which order;
- at a query: whether the record has been reached.

Operations that nothing demands before the program returns do not run, and are not counted as different.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Generic, NamedTuple, Self, TypeVar

from specmortem.device.interface import Device
from specmortem.device.memory import Op
from specmortem.device.queues import Entry
from specmortem.device.schedules import Schedule, ScheduleError
from specmortem.device.sim import SimDevice
from specmortem.errors import BadInputError

T = TypeVar("T")


class Interleaving(NamedTuple, Generic[T]):
    """The choices that lead to it, and what the program returned or raised.

    `Chosen(choices)` is the schedule that runs it again.
    """

    choices: tuple[int, ...]
    outcome: T | Exception


class Chosen(Schedule):
    """Runs what the recorded choices say, and the first option at every further branch."""

    poll_limit = 200

    def __init__(self, choices: Sequence[int] = (), widths: Sequence[int] = ()) -> None:
        self.choices, self.widths = list(choices), list(widths)
        self._branch = 0

    def successor(self) -> Self | None:
        """Depth first: the deepest branch that has an option left takes it; None when there is none."""
        depth = len(self.choices)
        while depth and self.choices[depth - 1] + 1 >= self.widths[depth - 1]:
            depth -= 1
        if depth == 0:
            return None
        return type(self)([*self.choices[: depth - 1], self.choices[depth - 1] + 1], self.widths[:depth])

    def accessing(self, access: Op) -> None:
        """Run some conflicting operations and what must precede them; the last one run conflicts itself."""
        may_stop = True
        while conflicting := [entry for entry in self.queues.pending if entry.op.conflicts(access)]:
            targets = self._targets(conflicting, access)
            pick = self._pick(len(targets) + may_stop)
            if may_stop and pick == 0:
                return
            target = targets[pick - may_stop]
            self.queues.run(self.queues.needed([target]))
            may_stop = target.op.conflicts(access)

    def querying(self, record: Entry) -> None:
        """The first option answers True, so that a program that polls ends."""
        if self._pick(2) == 0:
            self.force([record])

    def force(self, entries: Sequence[Entry]) -> None:
        """Run the entries; where one conflicts with another stream's work, branch over which is first."""
        while goal := [entry for entry in entries if not entry.done]:
            targets = self._targets(goal)
            chosen = [targets[self._pick(len(targets))]] if targets else goal
            self.queues.run(self.queues.needed(chosen))

    def _pick(self, width: int) -> int:
        if width == 1:
            return 0
        branch, self._branch = self._branch, self._branch + 1
        if branch == len(self.choices):
            self.choices.append(0)
        if branch == len(self.widths):
            self.widths.append(width)
        if self.widths[branch] != width or self.choices[branch] >= width:
            raise self._strayed(branch)
        return self.choices[branch]

    def check_repeated(self) -> None:
        """Raise ScheduleError when the program ended before it came to all the recorded branches."""
        if self._branch < len(self.choices):
            raise self._strayed(self._branch)

    def _strayed(self, branch: int) -> ScheduleError:
        return ScheduleError(
            f"the program went another way at branch {branch} than before: "
            "it may depend on nothing but its device, so seed it and make its buffers inside"
        )

    def _targets(self, goals: Iterable[Entry], access: Op | None = None) -> list[Entry]:
        """The entries whose order matters to reaching the goals and that no other such entry precedes."""
        before = self._predecessors()
        relevant = self._relevant(goals, before)
        matters = {
            entry
            for entry in relevant
            if (access is not None and entry.op.conflicts(access))
            or any(_race(entry, other, before) for other in relevant)
        }
        first = [entry for entry in matters if not (before[entry] & matters) - {entry}]
        return sorted(first, key=lambda entry: entry.serial)

    def _predecessors(self) -> dict[Entry, set[Entry]]:
        """Every pending entry with all that must precede it, itself included."""
        before: dict[Entry, set[Entry]] = {}
        for entry in self.queues.pending:
            before[entry] = {entry}.union(*(before[e] for e in entry.before if not e.done))
        return before

    def _relevant(self, goals: Iterable[Entry], before: dict[Entry, set[Entry]]) -> set[Entry]:
        """The goals, their predecessors, and whatever may run before one of these and conflicts with it."""
        relevant = set[Entry]().union(*(before[goal] for goal in goals))
        while True:
            rest = (entry for entry in self.queues.pending if entry not in relevant)
            found = [entry for entry in rest if any(_race(entry, other, before) for other in relevant)]
            if not found:
                return relevant
            relevant.update(*(before[entry] for entry in found))


class PromptCopies(Chosen):
    """Leaves out that a copy waits although its stream is idle: such a copy runs at once.

    On a GPU it starts within microseconds. Use it where the host's next access is much later than that.
    """

    def enqueued(self) -> None:
        """Run a copy that nothing precedes."""
        last = next(reversed(self.queues.pending), None)
        if last is not None and last.op.what == "copy" and not last.before:
            self.queues.run([last])


def _race(one: Entry, other: Entry, before: dict[Entry, set[Entry]]) -> bool:
    """Whether two entries conflict and nothing orders them."""
    return other not in before[one] and one not in before[other] and one.op.conflicts(other.op)


class Interleavings(Iterator[Interleaving[T]]):
    """Runs the program once for each item; `explored` counts them."""

    def __init__(self, program: Callable[[Device], T], limit: int, schedule: type[Chosen]) -> None:
        self.explored, self._program, self._limit = 0, program, limit
        self._next: Chosen | None = schedule()

    def __next__(self) -> Interleaving[T]:
        if self._next is None:
            raise StopIteration
        if self.explored >= self._limit:
            raise BadInputError(
                f"more than {self._limit} interleavings: raise limit=, or order more with synchronizes"
            )
        schedule, self._next = self._next, None
        outcome = outcome_of(self._program, SimDevice(schedule))
        schedule.check_repeated()
        self.explored, self._next = self.explored + 1, schedule.successor()
        return Interleaving(tuple(schedule.choices), outcome)


def outcome_of(program: Callable[[Device], T], device: Device) -> T | Exception:
    """What a program returns, or raises; a schedule that gives up on it is no outcome."""
    try:
        return program(device)
    except ScheduleError:
        raise
    except Exception as error:
        return error


def enumerate_schedules(
    program: Callable[[Device], T], limit: int = 100_000, schedule: type[Chosen] = Chosen
) -> Interleavings[T]:
    """Run `program` under every distinguishable interleaving, each on a fresh simulated device.

    The program makes its own buffers, reads results through host buffers, and depends on nothing else. What
    it raises is its outcome. No distinguishable outcome is missed; some may come twice. End it with
    `dev.synchronize()` to have all its work run. `schedule` may leave some out (`PromptCopies`).
    Raises BadInputError beyond `limit` interleavings, for a
    program that is not deterministic, and for one that polls an event without bound.
    """
    if limit < 1:
        raise BadInputError(f"limit {limit}: allow at least one interleaving")
    return Interleavings(program, limit, schedule)
