"""Transitions: one step's rows becoming the next step's, while the counts of the first are under way.

A transition runs on this package's engine parts or on released ones, under every distinguishable completion of the
copy. Only requests with drafts in the second step are judged, since they alone look a state up by their count.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, TypeVar

from specmortem.device import Device, enumerate_schedules
from specmortem.incidents.async_accepted_counts.engine.copy_completion import CopyCompletion, Phase
from specmortem.incidents.async_accepted_counts.engine.count_loop import Change, CountLoop
from specmortem.incidents.async_accepted_counts.engine.policies import Mode, policy

T = TypeVar("T")
Role = Literal["decode", "first-draft", "prefill"]


@dataclass(frozen=True)
class StepRow:
    """A request of the step that has just run.

    `decode`: it had drafts and goes on to have them; `first-draft`: its prefill is complete, the next step is its
    first with drafts; `prefill`: more of its prompt is to come. `accepted` counts the tokens it got.
    """

    req_id: str
    role: Role
    accepted: int = 1
    finished: bool = False

    def __str__(self) -> str:
        """As in a witness."""
        shown = {"decode": f"accepted {self.accepted}", "first-draft": "prefilled", "prefill": "prefilling"}
        return f"{self.req_id} {shown[self.role]}" + " and leaves" * self.finished


@dataclass(frozen=True)
class Transition:
    """Two steps: the rows of the first, and the requests that begin in the second."""

    rows: tuple[StepRow, ...]
    new_req_ids: tuple[str, ...] = ()

    def __str__(self) -> str:
        """One line: A accepted 4 and leaves, P prefilled ..."""
        return f"rows {', '.join(map(str, self.rows))}; {', '.join(self.new_req_ids) or 'nobody'} arrives"

    @property
    def right(self) -> dict[str, int]:
        """The count of each request that has drafts in the second step."""
        return {row.req_id: row.accepted for row in self.rows if not row.finished and row.role != "prefill"}

    @property
    def change(self) -> Change:
        """The second step against the first, requests by their numbers: the rows', then those of who begins."""
        finished = tuple(number for number, row in enumerate(self.rows) if row.finished)
        staying = (number for number, row in enumerate(self.rows) if not row.finished)
        new = range(len(self.rows), len(self.rows) + len(self.new_req_ids))
        prefilling = tuple(number for number in staying if self.rows[number].role == "prefill")
        return Change(finished, tuple(new), prefilling)

    def accepted(self, number: int, drafted: bool) -> list[int]:
        """The tokens that the first step gave a request."""
        return [self.rows[number].accepted]

    def started(self, loop: CountLoop) -> CountLoop:
        """The first step, run by a loop."""
        rows = {number: row.role == "decode" for number, row in enumerate(self.rows)}
        loop.start(rows, self.accepted)
        return loop


EXAMPLE = Transition(
    (
        StepRow("A", "decode", 4, finished=True),
        StepRow("B", "decode", 2),
        StepRow("C", "decode", 3),
        StepRow("P", "first-draft"),
    ),
    ("Q",),
)


@dataclass(frozen=True)
class CountsUsed:
    """Accepted counts that the device has for the requests with drafts, and where the copy completed."""

    by_request: dict[str, int]
    copy: CopyCompletion


Step = Callable[[Transition, Device], CountsUsed]


def own_step(arm: str, mode: Mode) -> Step:
    """This package's engine parts under a policy: `before`, `after` or another name of `policies.POLICIES`."""
    chosen = policy(arm, mode)

    def step(transition: Transition, device: Device) -> CountsUsed:
        copy = CopyCompletion()
        device.observers.append(copy)
        loop = transition.started(CountLoop(device, chosen, mode))
        copy.second_step_begins()
        loop.move_rows(transition.change)
        copy.rows_have_moved()
        loop.run(transition.change, lambda number, drafted: [1])
        device.synchronize()
        counts = dict(zip(loop.batch.order, loop.counts_used[:, 0].tolist(), strict=False))
        numbers = {row.req_id: number for number, row in enumerate(transition.rows)}
        return CountsUsed({req_id: counts[numbers[req_id]] for req_id in transition.right}, copy)

    return step


@dataclass(frozen=True)
class WrongCounts:
    """A completion after which a request has another count than its own."""

    transition: Transition
    used: CountsUsed

    @property
    def victims(self) -> dict[str, int]:
        """The wrong counts."""
        right = self.transition.right
        return {req_id: count for req_id, count in self.used.by_request.items() if count != right[req_id]}

    @property
    def counts_of_who_left(self) -> int:
        """How many of them are also the count of a request that is finished."""
        left = {row.accepted for row in self.transition.rows if row.finished}
        return sum(count in left for count in self.victims.values())

    def roles(self) -> Iterator[Role]:
        """What the victims did in the first step."""
        return (row.role for row in self.transition.rows if row.req_id in self.victims)


@dataclass
class Completions:
    """Completions by phase, wrong and in all, and what went wrong."""

    total: Counter[Phase] = field(default_factory=Counter)
    before_the_read: int = 0
    wrong: list[WrongCounts] = field(default_factory=list)

    @property
    def wrong_by_phase(self) -> Counter[Phase]:
        """How many were wrong, by where the copy completed."""
        return Counter(each.used.copy.phase for each in self.wrong)

    def as_dict(self) -> dict[str, Any]:
        """JSON form: [wrong, all] by phase, wrong counts by role."""
        bad, victims = self.wrong_by_phase, Counter(role for each in self.wrong for role in each.roles())
        return {
            "landings": {phase: [bad[phase], count] for phase, count in sorted(self.total.items())},
            "victims": dict(victims),
        }


def tally(step: Step, tried: Iterable[Transition]) -> Completions:
    """Run every transition under every distinguishable completion of the copy.

    Raises what the step raises.
    """
    found = Completions()
    for transition in tried:
        for used in outcomes(partial(step, transition)):
            found.total[used.copy.phase] += 1
            found.before_the_read += (
                used.copy.completed is not None and used.copy.completed <= used.copy.moves
            )
            wrong = WrongCounts(transition, used)
            if wrong.victims:
                found.wrong.append(wrong)
    return found


def outcomes(program: Callable[[Device], T]) -> Iterator[T]:
    """What a program gives under each distinguishable schedule. Raises what it raises under one."""
    for interleaving in enumerate_schedules(program):
        if isinstance(interleaving.outcome, Exception):
            raise interleaving.outcome
        yield interleaving.outcome
