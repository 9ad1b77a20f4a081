"""Steps of an engine reduced to what accepted counts go through: rows move, counts follow, and every one is judged.

There is no model: how many tokens a step accepts is given. After the counts of a step are in place, those of the rows
with drafts (which look a state up by them) are compared, on the device, with what their requests accepted.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from specmortem.device import Device
from specmortem.incidents.async_accepted_counts.engine.accepted_counts import (
    AcceptedCounts,
    Mode,
    Policy,
    Scheduling,
)
from specmortem.incidents.async_accepted_counts.engine.input_batch import InputBatch, NewRequest
from specmortem.incidents.async_accepted_counts.engine.uploads import Uploads
from specmortem.kernels import Backend

Counts = Callable[[int, bool], Sequence[int] | npt.NDArray[np.int64]]
DECODE, EXTEND, PREFILL = range(3)
NOT_JUDGED, FIRST_DRAFT, STEADY = range(3)
ID = 7


@dataclass(frozen=True)
class Timing:
    """Microseconds: the host's, ahead of the row moves and between adding and swapping, and a forward's."""

    before_us: float = 0.0
    between_us: float = 0.0
    forward_us: float = 0.0


@dataclass(frozen=True)
class Change:
    """A step against the one before it: who left, who came, and who of the others still prefills."""

    leaves: tuple[int, ...] = ()
    comes: tuple[int, ...] = ()
    prefilling: tuple[int, ...] = ()


class Judged(NamedTuple):
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


@dataclass
class _Rows:
    """Of the latest step, row by row: the request, and its drafts."""

    names: list[int] = field(default_factory=list)
    drafted: list[int] = field(default_factory=list)


class CountLoop:
    """`start` places requests as step 0; each `step` after it moves rows while the counts of the last are under way."""

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
        self.device, self.mode, self.size, self.scheduling = device, mode, size, scheduling
        self.stream = device.stream("main")
        self.batch = InputBatch(device, size.max_num_reqs, lanes=size.lanes)
        self.counts = AcceptedCounts(device, self.batch, policy, self.stream, run=run, scheduling=scheduling)
        shape = (size.max_num_reqs, size.lanes)
        self.inputs = Uploads(
            device, self.stream, {"accepted": shape, "kinds": shape[:1], "came from": shape[:1]}
        )
        columns = 1 + size.num_speculative_tokens
        self.sampled = device.full((shape[0] * shape[1], columns), -1, torch.int32, name="sampled")
        self.wrong = device.zeros((3,), torch.int64, name="wrong counts")
        self.brought = device.zeros(shape, torch.int32, name="counts of the step")
        self.began = 0
        self.move_span = (0, 0)
        self.moved: tuple[list[tuple[int, int]], list[tuple[int, int]]] = ([], [])
        self.seen = [0, 0, 0]
        self._last = _Rows()
        device.synchronize()

    def start(self, rows: Mapping[int, bool], counts: Counts) -> None:
        """Step 0 has these requests in this order, with drafts or without; nothing is judged in it."""
        for name in rows:
            self.batch.add_request(NewRequest(name))
        self._forward(rows, counts, 0.0)

    def step(self, change: Change, counts: Counts, timing: Timing = Timing()) -> list[int]:  # noqa: B008
        """Move rows, bring the counts, judge them, run; gives the requests in their new order.

        `began` is where it begins in the device's trace.
        """
        self.began = len(self.device.trace)
        self.counts.before_row_moves()
        self.inputs.wait()
        if self.scheduling == "sync":
            self.device.synchronize()
        self.device.host_time(timing.before_us)
        drafts = self._move_rows(change, timing.between_us)
        self._bring_counts()
        self._judge(drafts)
        return self._forward(drafts, counts, timing.forward_us)

    def _move_rows(self, change: Change, between_us: float) -> dict[int, bool]:
        """All four moves; gives which requests have drafts.

        `move_span` is where the device's trace has them, `moved` the pairs of rows condensed and swapped.
        """
        start = len(self.device.trace)
        for name in change.leaves:
            self.batch.remove_request(name)
        for name in change.comes:
            self.batch.add_request(NewRequest(name))
        condensed = self.batch.condense()
        self.device.host_time(between_us)
        drafts = {name: name not in (*change.comes, *change.prefilling) for name in self.batch.row_of}
        swapped = self.batch.reorder(lambda name: DECODE if drafts[name] else EXTEND + (name in change.comes))
        self.moved = (condensed, swapped)
        self.move_span = (start, len(self.device.trace))
        return drafts

    def _bring_counts(self) -> None:
        self.counts.take()
        self.counts.correct(self._last.drafted, [0] * self.batch.num_reqs)
        if self.mode == "align":
            self.counts.upload_again()

    def _judge(self, drafts: Mapping[int, bool]) -> None:
        had_drafts = dict(zip(self._last.names, self._last.drafted, strict=True))
        kinds = [
            NOT_JUDGED if not drafts[name] else STEADY if had_drafts[name] else FIRST_DRAFT
            for name in self.batch.order
        ]
        for kind in kinds:
            self.seen[kind] += self.size.lanes
        came_from = self.inputs.put("came from", self.batch.previous_rows())
        tensors = (
            self.counts.on_device[: len(kinds)],
            self.inputs["accepted"],
            came_from,
            self.inputs.put("kinds", kinds),
        )
        self.device.launch(
            _compare,
            *tensors,
            self.wrong,
            self.brought,
            stream=self.stream,
            reads=(*tensors, self.wrong),
            writes=(self.wrong, self.brought),
            name="judge counts",
        )

    def _forward(self, drafts: Mapping[int, bool], counts: Counts, forward_us: float) -> list[int]:
        """The forward, the step's ids, their counts, and the copy; what the device has now is in this step's order."""
        order = self.batch.order
        accepted = self.inputs.put("accepted", [counts(name, drafts[name]) for name in order])
        self.counts.uploads.seal()
        self.inputs.seal()
        if forward_us:
            self.device.spin(forward_us, self.stream)
        sampled = self.sampled[: len(order) * self.size.lanes]
        self.device.launch(
            _fill_ids,
            sampled,
            accepted,
            stream=self.stream,
            reads=(accepted,),
            writes=(sampled,),
            name="sample",
        )
        self.counts.count(sampled)
        self.counts.send(len(order))
        self.batch.remember_rows()
        tokens = self.size.num_speculative_tokens
        self._last = _Rows(order, [tokens if drafts[name] else 0 for name in order])
        return order

    def judged(self) -> Judged:
        """Over all steps so far; waits for the device."""
        self.device.synchronize()
        wrong = self.wrong.tolist()
        return Judged(self.seen[FIRST_DRAFT], self.seen[STEADY], wrong[FIRST_DRAFT], wrong[STEADY])


def _fill_ids(sampled: torch.Tensor, accepted: torch.Tensor) -> None:
    step = torch.arange(sampled.shape[1], device=sampled.device)
    sampled.fill_(-1)
    sampled.masked_fill_(step[None, :] < accepted.reshape(-1, 1), ID)


def _compare(
    counts: torch.Tensor,
    accepted: torch.Tensor,
    came_from: torch.Tensor,
    kinds: torch.Tensor,
    wrong: torch.Tensor,
    brought: torch.Tensor,
) -> None:
    """Add the wrong counts of each kind of row; one that is new has no drafts and is not judged."""
    brought[: counts.shape[0]] = counts
    own = accepted[came_from.clamp(min=0).long()]
    wrong.index_add_(0, kinds.long(), (counts != own).sum(dim=1))


def random_change(rng: random.Random, rows: Mapping[int, bool], next_name: int, max_num_reqs: int) -> Change:
    """Who leaves and comes after a step with these rows; a row without drafts prefills on in one case of ten."""
    leaves = tuple(name for name in rows if rng.random() < 0.3)
    free = max_num_reqs - len(rows) + len(leaves)
    comes = tuple(range(next_name, next_name + min(free, rng.choice((0, 1, 1, 2)))))
    left = (name for name, drafted in rows.items() if name not in leaves and not drafted)
    return Change(leaves, comes, tuple(name for name in left if rng.random() < 0.1))
