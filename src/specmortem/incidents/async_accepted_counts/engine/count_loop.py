"""Steps of an engine reduced to what accepted counts go through: rows move, counts follow, and every one is judged.

There is no model: how many tokens a step accepts is given. Once the counts of a step are in place, those of the rows
with drafts (which look a state up by them) are compared, on the device, with what their requests accepted.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from specmortem.device import Device
from specmortem.incidents.async_accepted_counts.engine.accepted_counts import AcceptedCounts, Timing
from specmortem.incidents.async_accepted_counts.engine.input_batch import InputBatch, NewRequest, RowPair
from specmortem.incidents.async_accepted_counts.engine.policies import Mode, Policy, Scheduling
from specmortem.kernels import Backend

Accepted = Callable[
    [int, bool], Sequence[int] | npt.NDArray[np.int64]
]  # of a request, with drafts or without
NOT_JUDGED, FIRST_DRAFT, STEADY = range(3)
ID = 7


@dataclass(frozen=True)
class Change:
    """A step against the one before it; `prefilling` are those of the others that have more of a prompt to come."""

    finished_req_ids: tuple[int, ...] = ()
    new_req_ids: tuple[int, ...] = ()
    prefilling: tuple[int, ...] = ()

    def drafts(self, req_id: int) -> bool:
        """Whether a request of the step has drafts in it."""
        return req_id not in self.new_req_ids and req_id not in self.prefilling


class JudgedRows(NamedTuple):
    """Rows with drafts, lane by lane: those at their first drafts and the others, and how many counts were wrong."""

    first: int
    steady: int
    wrong_first: int
    wrong_steady: int

    @property
    def wrong(self) -> int:
        """All wrong counts."""
        return self.wrong_first + self.wrong_steady


@dataclass(frozen=True)
class LoopSize:
    """Rows, lanes (batches whose rows move alike), and drafts a row."""

    max_num_reqs: int = 8
    lanes: int = 1
    num_speculative_tokens: int = 3


class CountLoop:
    """`start` places requests as step 0; each `step` after it moves rows while the counts of the last are under way.

    `counts_used` is int32 [max_num_reqs, lanes] on the device, of the latest step.
    """

    def __init__(
        self,
        device: Device,
        policy: Policy,
        mode: Mode,
        size: LoopSize = LoopSize(),  # noqa: B008
        *,
        run: Backend = "plain",
        scheduling: Scheduling = "async",
    ) -> None:
        self.device, self.mode, self.size = device, mode, size
        self.stream = device.stream("main")
        self.batch = InputBatch(device, size.max_num_reqs, lanes=size.lanes)
        shape = (size.max_num_reqs, size.lanes)
        inputs = {"right counts": shape, "kinds": shape[:1], "came from": shape[:1]}
        self.counts = AcceptedCounts(
            device, self.batch, policy, self.stream, inputs, run=run, scheduling=scheduling
        )
        self.inputs = self.counts.uploads
        columns = 1 + size.num_speculative_tokens
        self.sampled = device.full((shape[0] * shape[1], columns), -1, torch.int32, name="sampled")
        self.wrong = device.zeros((3,), torch.int64, name="wrong counts")
        self.counts_used = device.zeros(shape, torch.int32, name="counts of the step")
        self.seen = [0, 0, 0]
        device.synchronize()

    def start(self, rows: Mapping[int, bool], accepted: Accepted) -> None:
        """Step 0 has these requests in this order, with drafts or without; nothing is judged in it."""
        for req_id in rows:
            self.batch.add_request(NewRequest(req_id))
        self._forward(rows, accepted, 0.0)

    def step(self, change: Change, accepted: Accepted, timing: Timing = Timing()) -> list[int]:  # noqa: B008
        """Move rows, bring the counts, judge them, run; gives the requests in their new order."""
        self.move_rows(change, timing)
        self.bring_counts()
        drafts = {req_id: change.drafts(req_id) for req_id in self.batch.order}
        self._judge(drafts)
        return self._forward(drafts, accepted, timing.forward_us)

    def move_rows(self, change: Change, timing: Timing = Timing()) -> tuple[list[RowPair], list[RowPair]]:  # noqa: B008
        """The first part of a step: the host's waits and all moves; gives the pairs of rows condensed and swapped."""
        if self.counts.scheduling == "sync":
            self.device.synchronize()
        new = map(NewRequest, change.new_req_ids)
        return self.counts.move_rows(change.finished_req_ids, new, change.prefilling, timing)

    def bring_counts(self) -> None:
        """The second part: the counts of the step before into the rows as they are now."""
        self.counts.take()
        self.counts.correct([0] * self.batch.num_reqs)
        if self.mode == "align":
            self.counts.upload_again()

    def _kind(self, req_id: int, drafts: bool) -> int:
        if not drafts:
            return NOT_JUDGED
        return STEADY if self.counts.drafted[self.batch.previous_row_of[req_id]] else FIRST_DRAFT

    def _judge(self, drafts: Mapping[int, bool]) -> None:
        kinds = list(itertools.starmap(self._kind, drafts.items()))
        for kind in kinds:
            self.seen[kind] += self.size.lanes
        came_from = self.inputs.put("came from", self.batch.previous_rows())
        counts, right = self.counts.on_device[: len(kinds)], self.inputs["right counts"]
        read = (counts, right, came_from, self.inputs.put("kinds", kinds))
        written = (self.wrong, self.counts_used)
        self.device.launch(
            _compare,
            *read,
            *written,
            stream=self.stream,
            reads=(*read, self.wrong),
            writes=written,
            name="judge counts",
        )

    def _forward(self, drafts: Mapping[int, bool], accepted: Accepted, forward_us: float) -> list[int]:
        """The forward, the step's ids, their counts, and the copy; what the device has now is in this step's order."""
        order = self.batch.order
        counts = self.inputs.put("right counts", [accepted(req_id, drafts[req_id]) for req_id in order])
        self.inputs.seal()
        if forward_us:
            self.device.spin(forward_us, self.stream)
        sampled = self.sampled[: len(order) * self.size.lanes]
        self.device.launch(
            _fill_ids, sampled, counts, stream=self.stream, reads=(counts,), writes=(sampled,), name="sample"
        )
        self.counts.count(sampled)
        self.counts.send([self.size.num_speculative_tokens * drafts[req_id] for req_id in order])
        return order

    def judged(self) -> JudgedRows:
        """Over all steps so far; waits for the device."""
        self.device.synchronize()
        wrong = self.wrong.tolist()
        return JudgedRows(self.seen[FIRST_DRAFT], self.seen[STEADY], wrong[FIRST_DRAFT], wrong[STEADY])


def _fill_ids(sampled: torch.Tensor, accepted: torch.Tensor) -> None:
    step = torch.arange(sampled.shape[1], device=sampled.device)
    sampled.fill_(-1)
    sampled.masked_fill_(step[None, :] < accepted.reshape(-1, 1), ID)


def _compare(
    counts: torch.Tensor,
    right: torch.Tensor,
    came_from: torch.Tensor,
    kinds: torch.Tensor,
    wrong: torch.Tensor,
    counts_used: torch.Tensor,
) -> None:
    """Add the wrong counts of each kind of row; one that is new has no drafts and is not judged."""
    counts_used[: counts.shape[0]] = counts
    own = right[came_from.clamp(min=0).long()]
    wrong.index_add_(0, kinds.long(), (counts != own).sum(dim=1))


def random_change(rng: random.Random, rows: Mapping[int, bool], next_id: int, max_num_reqs: int) -> Change:
    """Who leaves and comes after a step with these rows; a row without drafts prefills on in one case of ten."""
    finished = tuple(req_id for req_id in rows if rng.random() < 0.3)
    free = max_num_reqs - len(rows) + len(finished)
    new = tuple(range(next_id, next_id + min(free, rng.choice((0, 1, 1, 2)))))
    left = (req_id for req_id, drafted in rows.items() if req_id not in finished and not drafted)
    return Change(finished, new, tuple(req_id for req_id in left if rng.random() < 0.1))
