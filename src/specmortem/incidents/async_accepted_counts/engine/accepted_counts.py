"""Accepted counts between two steps: where the copy of step N lands, and which count a row of step N + 1 starts from.

The counts lie on the device in the row order of step N. Speculative recurrent states are looked up by them in step
N + 1, whose rows the host has moved since. A policy says how a count gets there:

- `before` (up to 0.23.0): a non-blocking copy into `InputBatch.num_accepted`, which the host's row moves read and write
  meanwhile; then the host waits for the copy, gathers through the previous rows, and uploads (vLLM
  v1/worker/gpu_model_runner.py:1536-1540 and 2021-2042 in 0.23.0). The wait orders the *read* behind the copy. It
  orders nothing between the copy and the row moves: the copy is complete, the memory is not its own.
- `after` (0.24.0, modes none and all): the host's count is not asked for. Every row starts from 1, and the correction
  kernel gives rows that had drafts their count; a row without previous drafts has accepted exactly 1.
- In mode align the host needs the counts, for the offset of a state copy, and uploads its own over the corrected ones
  (4178-4185 in 0.23.0; 4069-4076 in 0.33.0, where the copy and the gather are as in `before`). Here `after` is
  `private-target`; `ALIGN_SHAPES` has the four changes that were proposed or suggest themselves.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

import numpy as np
import torch

from specmortem.device import Device, Stream
from specmortem.errors import BadInputError
from specmortem.incidents.async_accepted_counts.engine.input_batch import NEW, InputBatch
from specmortem.incidents.async_accepted_counts.engine.uploads import Uploads
from specmortem.kernels import Backend
from specmortem.kernels import accepted_counts as kernels

Mode = Literal["none", "all", "align"]
Scheduling = Literal["async", "sync"]
MODES: tuple[Mode, ...] = ("none", "all", "align")


class Policy(NamedTuple):
    """Where the copy lands (`nowhere`: there is none), when the host waits for it, and what the host makes of it.

    `wait`: `at-once` behind the copy, `first` ahead of the row moves, `late` behind them, or `never`.
    """

    target: Literal["batch", "private", "nowhere"] = "batch"
    wait: Literal["at-once", "first", "late", "never"] = "late"
    gather: bool = True
    source: Literal["host", "device"] = "host"


POLICIES = {
    "before": Policy(),
    "after": Policy(target="nowhere", source="device"),
    "after-0.24.0": Policy(source="device"),
    "no-wait": Policy(wait="never"),
    "hoist-wait": Policy(wait="first"),
    "drop-gather": Policy(gather=False),
    "hoist-and-drop": Policy(wait="first", gather=False),
    "private-target": Policy(target="private"),
    "blocking-copy": Policy(wait="at-once", gather=False),
    "blocking-copy-gathered": Policy(wait="at-once"),
}
ALIGN_SHAPES = ("hoist-wait", "drop-gather", "hoist-and-drop", "private-target")


def policy(arm: str, mode: Mode, scheduling: Scheduling = "async") -> Policy:
    """What an arm does in a mode. Raises BadInputError for an unknown name, and for one that means nothing there.

    With `sync` scheduling every arm is one: the copy has landed before rows move, and counts move along with them.
    """
    if arm not in POLICIES or mode not in MODES:
        known = f"arms {', '.join(POLICIES)}; modes {', '.join(MODES)}"
        raise BadInputError(f"no arm {arm!r} in mode {mode!r}; {known}")
    if scheduling == "sync":
        return POLICIES["drop-gather"]
    if mode == "align" and arm == "after":
        return POLICIES["private-target"]
    if mode == "align" and POLICIES[arm].source == "device":
        raise BadInputError(f"arm {arm!r}: mode align needs the counts on the host; take 'before' or 'after'")
    return POLICIES[arm]


class AcceptedCounts:
    """The counts of a batch. Tensors are int32 [max_num_reqs, lanes], in the row order of the step that wrote them.

    `on_device` is what the forward of a step looks states up with. One step calls, in this order: `before_row_moves`,
    (the row moves), `take`, `correct`, in mode align `upload_again`, (the forward), `count`, `send`.
    """

    def __init__(
        self,
        device: Device,
        batch: InputBatch,
        policy: Policy,
        stream: Stream,
        *,
        run: Backend = "plain",
        vocab_size: int = 1 << 30,
        scheduling: Scheduling = "async",
    ) -> None:
        if scheduling == "sync" and policy != POLICIES["drop-gather"]:
            raise BadInputError("with sync scheduling the policy is that of policy(arm, mode, 'sync')")
        self.device, self.batch, self.policy, self.stream = device, batch, policy, stream
        self.run, self.vocab_size, self.scheduling = run, vocab_size, scheduling
        shape = (batch.max_num_reqs, batch.lanes)
        self.on_device = device.full(shape, 1, torch.int32, name="num_accepted_tokens")
        self.valid = device.full(shape, 1, torch.int32, name="valid_sampled_token_count")
        self.computed = device.zeros(shape, torch.int32, name="num_computed_tokens")
        self._next_computed = device.zeros(shape, torch.int32, name="next num_computed_tokens")
        self.uploads = Uploads(
            device,
            stream,
            {
                "counts": shape,
                "counts again": shape,
                "previous": shape[:1],
                "drafted": shape[:1],
                "host_computed": shape[:1],
            },
        )
        self.target = batch.num_accepted
        if policy.target == "private":
            self.target = device.host_buffer(shape, torch.int32, name="runner's accepted counts")
        self.copied = device.event("num_accepted_tokens_event")

    def count(self, sampled: torch.Tensor) -> None:
        """Enqueue the counts of sampled ids int32 [rows * lanes, 1 + K]."""
        rows = sampled.shape[0] // self.batch.lanes
        accepted, valid = self.on_device[:rows].view(-1), self.valid[:rows].view(-1)
        kernel = kernels.count_launch if self.run == "triton" else kernels.count_reference
        self.device.launch(
            kernel,
            sampled,
            self.vocab_size,
            accepted,
            valid,
            stream=self.stream,
            reads=(sampled,),
            writes=(accepted, valid),
            name="count accepted",
        )

    def send(self, rows: int) -> None:
        """Enqueue the copy of the counts to the host, behind which the event is recorded."""
        if self.policy.target == "nowhere":
            return
        target = self.target.rows(0, rows)
        self.device.copy_async(target, self.on_device[:rows], self.stream, name="counts to host")
        self.copied.record(self.stream)
        if self.policy.wait == "at-once":
            self.copied.synchronize()

    def before_row_moves(self) -> None:
        """The place of a wait that was hoisted; the uploads of the step before must have been read in any case."""
        self.uploads.wait()
        if self.policy.wait == "first":
            self.copied.synchronize()

    def take(self) -> None:
        """Enqueue what the rows start from, ahead of the correction."""
        rows = self.batch.num_reqs
        if self.policy.source == "device":
            target = self.on_device
            self.device.launch(target.fill_, 1, stream=self.stream, reads=(), writes=(target,), name="fill 1")
            return
        if self.policy.wait == "late":
            self.copied.synchronize()
        if self.policy.gather:
            self.batch.num_accepted[:rows] = self._gathered()
        self._upload("counts")

    def _gathered(self) -> np.ndarray[tuple[int, ...], np.dtype[np.int32]]:
        """The host's counts through the previous rows, 1 for a row that had none."""
        previous = np.array(self.batch.previous_rows(), np.int64)
        landed = self.target[...]
        gathered: np.ndarray[tuple[int, ...], np.dtype[np.int32]] = landed[np.maximum(previous, 0)]
        gathered[previous == NEW] = 1
        return gathered

    def _upload(self, name: str) -> None:
        rows = self.batch.num_reqs
        uploaded = self.uploads.put(name, self.batch.num_accepted[:rows])
        self.device.launch(
            self.on_device[:rows].copy_,
            uploaded,
            stream=self.stream,
            reads=(uploaded,),
            writes=(self.on_device[:rows],),
            name=name,
        )

    def correct(self, drafted: Sequence[int], host_computed: Sequence[int]) -> None:
        """Enqueue the correction; `drafted` has the drafts of each *previous* row, `host_computed` one number a row.

        With `sync` scheduling the host's numbers are right, and all rows count as new.
        """
        rows = self.batch.num_reqs
        previous = self.batch.previous_rows() if self.scheduling == "async" else [NEW] * rows
        tensors = (
            self.on_device[:rows],
            self.computed,
            self._next_computed[:rows],
            self.valid,
            self.uploads.put("drafted", [*drafted, *[0] * (self.batch.max_num_reqs - len(drafted))]),
            self.uploads.put("previous", previous),
            self.uploads.put("host_computed", list(host_computed)),
        )
        kernel = kernels.correct_launch if self.run == "triton" else kernels.correct_reference
        self.device.launch(
            kernel,
            *tensors,
            stream=self.stream,
            reads=tensors,
            writes=(tensors[0], tensors[2]),
            name="correct counts",
        )
        self.computed, self._next_computed = self._next_computed, self.computed

    def upload_again(self) -> None:
        """Mode align: the host's counts over the corrected ones."""
        self._upload("counts again")
