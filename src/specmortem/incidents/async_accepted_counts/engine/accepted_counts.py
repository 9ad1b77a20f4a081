"""Accepted counts between two steps: where the copy of step N completes, and what rows of step N + 1 start from.

A policy, one of the functions in `fix` and `policies`, says how counts get from the device to the next step's rows.

- `before` (up to 0.23.0): vLLM v1/worker/gpu_model_runner.py:1536-1540 and 2021-2042 in 0.23.0. The wait orders the
  copy before the *read*. It orders nothing between the copy and the row moves.
- `after` (0.24.0, modes none and all): the host's count is not asked for; the correction kernel gives rows that had
  drafts their count, and a row without previous drafts has accepted exactly 1.
- In mode align the host needs the counts, for the offset of a state copy, and uploads its own over the corrected ones
  (4178-4185 in 0.23.0; 4069-4076 in 0.33.0, where the copy and the gather are as in `before`). Here `after` is
  `private-target`; `ALIGN_SHAPES` has the four changes that were proposed or suggest themselves.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

from specmortem.device import Device, HostBuffer, Stream
from specmortem.errors import BadInputError
from specmortem.incidents.async_accepted_counts import fix
from specmortem.incidents.async_accepted_counts.engine.input_batch import NEW, InputBatch, NewRequest, RowPair
from specmortem.incidents.async_accepted_counts.engine.policies import Policy, Scheduling
from specmortem.incidents.async_accepted_counts.engine.uploads import Uploads
from specmortem.kernels import Backend
from specmortem.kernels import accepted_counts as kernels

COPY = "counts to host"  # what traces and observers call the copy
DECODE, EXTEND, PREFILL = range(3)  # regions of a batch, in the order of its rows


@dataclass(frozen=True)
class Timing:
    """Microseconds: the host's, ahead of the row moves and between adding and swapping, and a forward's."""

    before_us: float = 0.0
    between_us: float = 0.0
    forward_us: float = 0.0


class AcceptedCounts:
    """The counts of a batch. Tensors are int32 [max_num_reqs, lanes], in the row order of the step that wrote them.

    `on_device` is what the forward of a step looks states up with, `drafted` the drafts of each row of the latest step.
    One step calls, in this order: `move_rows`, `take`, `correct`, in mode align `upload_again`, (`uploads.seal`, the
    forward), `count`, `send`. `uploads` takes `inputs`, by name and shape, beside those of the counts.
    """

    def __init__(
        self,
        device: Device,
        batch: InputBatch,
        policy: Policy,
        stream: Stream,
        inputs: Mapping[str, Sequence[int]],
        *,
        run: Backend = "plain",
        vocab_size: int = 1 << 30,
        scheduling: Scheduling = "async",
    ) -> None:
        if scheduling == "sync" and policy is not fix.drop_gather:
            raise BadInputError("with sync scheduling the policy is that of policy(arm, mode, 'sync')")
        self.device, self.batch, self.policy, self.stream = device, batch, policy, stream
        self.run, self.vocab_size, self.scheduling = run, vocab_size, scheduling
        shape = (batch.max_num_reqs, batch.lanes)
        self.on_device = device.full(shape, 1, torch.int32, name="num_accepted_tokens")
        self.valid = device.full(shape, 1, torch.int32, name="valid_sampled_token_count")
        self.computed = device.zeros(shape, torch.int32, name="num_computed_tokens")
        self._next_computed = device.zeros(shape, torch.int32, name="next num_computed_tokens")
        by_row = dict.fromkeys(("previous", "drafted", "host_computed"), shape[:1])
        self.uploads = Uploads(device, stream, {"counts": shape, "counts again": shape, **by_row, **inputs})
        self.copied = device.event("num_accepted_tokens_event")
        self.send([])

    @cached_property
    def private(self) -> HostBuffer:
        """A pinned buffer of the runner's own, whose rows nobody moves."""
        shape = (self.batch.max_num_reqs, self.batch.lanes)
        return self.device.host_buffer(shape, torch.int32, name="runner's accepted counts")

    def count(self, sampled: torch.Tensor) -> None:
        """Enqueue the counts of sampled ids int32 [rows * lanes, 1 + K]."""
        rows = sampled.shape[0] // self.batch.lanes
        written = self.on_device[:rows].view(-1), self.valid[:rows].view(-1)
        kernel = kernels.count_launch if self.run == "triton" else kernels.count_reference
        args = (sampled, self.vocab_size, *written)
        self.device.launch(
            kernel, *args, stream=self.stream, reads=(sampled,), writes=written, name="count accepted"
        )

    def send(self, drafted: Sequence[int]) -> None:
        """A step is enqueued, its rows with so many drafts: they are the previous rows now; the policy sets out."""
        self.drafted = drafted
        self.batch.remember_rows()
        self._hops: Iterator[fix.Place] = self.policy(self)
        self._held_until = next(self._hops, None)

    def move_rows(
        self,
        finished_req_ids: Iterable[int],
        new_requests: Iterable[NewRequest],
        prefilling: Iterable[int] = (),
        timing: Timing = Timing(),  # noqa: B008
    ) -> tuple[list[RowPair], list[RowPair]]:
        """A step's moves, all four in vLLM's order; gives the pairs of rows condensed and swapped.

        Ahead of them the uploads of the step before must have been read, and a wait that was hoisted has its place.
        """
        self.uploads.wait()
        self._reached(fix.NEXT_STEP)
        self.device.host_time(timing.before_us)
        for req_id in finished_req_ids:
            self.batch.remove_request(req_id)
        regions = dict.fromkeys(prefilling, EXTEND)
        for request in new_requests:
            regions[request.req_id] = PREFILL
            self.batch.add_request(request)
        condensed = self.batch.condense()
        self.device.host_time(timing.between_us)
        return condensed, self.batch.reorder(lambda req_id: regions.get(req_id, DECODE))

    def take(self) -> None:
        """Enqueue what the rows start from, before the correction."""
        self._reached(fix.ROWS_HAVE_MOVED)

    def _reached(self, place: fix.Place) -> None:
        if self._held_until == place:
            self._held_until = next(self._hops, None)

    def copy_to(self, target: HostBuffer) -> None:
        """Enqueue the copy of the latest step's counts, and record its event."""
        if rows := len(self.drafted):
            self.device.copy_async(target.rows(0, rows), self.on_device[:rows], self.stream, name=COPY)
            self.copied.record(self.stream)

    def fill_with_ones(self) -> None:
        """Every row starts from 1."""
        target = self.on_device
        self.device.launch(target.fill_, 1, stream=self.stream, reads=(), writes=(target,), name="fill 1")

    def gather_and_upload(self, source: HostBuffer) -> None:
        """The host's counts by the previous rows, 1 for a row that had none; every row starts from them."""
        gathered = fix.reference(source[...], self.batch.previous_rows())
        self.batch.num_accepted[: self.batch.num_reqs] = gathered
        self.upload()

    def upload(self, name: str = "counts") -> None:
        """Every row starts from the batch's count."""
        rows = self.batch.num_reqs
        uploaded, target = self.uploads.put(name, self.batch.num_accepted[:rows]), self.on_device[:rows]
        self.device.launch(
            target.copy_, uploaded, stream=self.stream, reads=(uploaded,), writes=(target,), name=name
        )

    def upload_again(self) -> None:
        """Mode align: the host's counts over the corrected ones."""
        self.upload("counts again")

    def correct(self, host_computed: Sequence[int]) -> None:
        """Enqueue the correction; `host_computed` has one number a row, as the host knows it.

        With `sync` scheduling the host's numbers are right, and all rows count as new.
        """
        rows = self.batch.num_reqs
        previous = self.batch.previous_rows() if self.scheduling == "async" else [NEW] * rows
        tensors = (
            self.on_device[:rows],
            self.computed,
            self._next_computed[:rows],
            self.valid,
            self.uploads.put(
                "drafted", [*self.drafted, *[0] * (self.batch.max_num_reqs - len(self.drafted))]
            ),
            self.uploads.put("previous", previous),
            self.uploads.put("host_computed", host_computed),
        )
        kernel = kernels.correct_launch if self.run == "triton" else kernels.correct_reference
        written = (tensors[0], tensors[2])
        self.device.launch(
            kernel, *tensors, stream=self.stream, reads=tensors, writes=written, name="correct counts"
        )
        self.computed, self._next_computed = self._next_computed, self.computed
