"""Transitions: one step's rows becoming the next step's, while the counts of the first are under way.

A transition runs on this package's engine parts or on released ones, under every distinguishable completion of the
copy. Only requests with drafts in the second step are judged, since they alone look a state up by their count.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Literal

from specmortem.device import Device, enumerate_schedules
from specmortem.incidents.async_accepted_counts.engine.copy_completion import CopyCompletion, Phase
from specmortem.incidents.async_accepted_counts.engine.count_loop import Change, CountLoop
from specmortem.incidents.async_accepted_counts.engine.policies import Mode, policy

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
class Landing:
    """One completion of the copy, and the counts that the device then has for the requests with drafts."""

    transition: Transition
    counts: Mapping[str, int]
    copy: CopyCompletion

    @cached_property
    def victims(self) -> dict[str, int]:
        """The counts that are not the request's own."""
        right = self.transition.right
        return {req_id: count for req_id, count in self.counts.items() if count != right[req_id]}

    @property
    def roles(self) -> list[Role]:
        """What the victims did in the first step."""
        return [row.role for row in self.transition.rows if row.req_id in self.victims]


Step = Callable[[Transition, Device], Landing]


def own_step(arm: str, mode: Mode, watch: type[CopyCompletion] = CopyCompletion) -> Step:
    """This package's engine parts under a policy: `before`, `after` or another name of `policies.POLICIES`.

    The second step ends where its counts are in place: what it makes of them is not run.
    """
    chosen = policy(arm, mode)

    def step(transition: Transition, device: Device) -> Landing:
        copy = watch()
        device.observers.append(copy)
        loop = transition.started(CountLoop(device, chosen, mode))
        copy.second_step_begins()
        loop.move_rows(transition.change)
        copy.rows_have_moved()
        loop.bring_counts()
        device.synchronize()
        counts = dict(zip(loop.batch.order, loop.counts.on_device[:, 0].tolist(), strict=False))
        numbers = {row.req_id: number for number, row in enumerate(transition.rows)}
        return Landing(transition, {req_id: counts[numbers[req_id]] for req_id in transition.right}, copy)

    return step


def landings(step: Step, tried: Iterable[Transition]) -> list[Landing]:
    """Every transition under every distinguishable completion of the copy.

    Raises what the step raises under one of them.
    """
    found = []
    for transition in tried:
        for interleaving in enumerate_schedules(partial(step, transition)):
            if isinstance(interleaving.outcome, Exception):
                raise interleaving.outcome
            found.append(interleaving.outcome)
    return found


def by_phase(found: Iterable[Landing]) -> dict[Phase, list[int]]:
    """How many are wrong, and how many there are in all, by where the copy completed."""
    wrong, total = Counter[Phase](), Counter[Phase]()
    for landing in found:
        total[landing.copy.phase] += 1
        wrong[landing.copy.phase] += bool(landing.victims)
    return {phase: [wrong[phase], total[phase]] for phase in sorted(total)}
