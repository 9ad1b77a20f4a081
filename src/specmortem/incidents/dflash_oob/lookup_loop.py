"""The part of a speculative engine in which an accepted count goes astray: three steps around a row move.

Requests A, B, C decode with drafts, P was just prefilled. In step N the rows are [A, B, C, P]. A finishes, a prefill Q
takes its row, and the batch is reordered so that decodes come first: step N + 1 runs the rows [P, B, C, Q]. The counts
of step N come back by a non-blocking copy into a pinned array whose rows the host moves meanwhile
(vllm/v1/worker/gpu_model_runner.py:1527 and 2013-2034, gpu_input_batch.py:466 and 661 in 0.22.1). A row that had drafts
is corrected on the device; P had none and takes what it finds.

What follows a wrong count, link by link:
1. P looks its state up in a column that it never wrote. Fresh state slots hold NaN here: that is an *assumption*, the
   first NaN of the incident is not established.
2. A NaN row recovers a token id outside the vocabulary (`recovered="before"`), so no sampled id of the row is valid and
   its accepted count becomes 0.
3. In step N + 2 the count 0 makes the lookup read one element before its row. P is in row 0, so that is the word in
   front of a persistent buffer; it is `canary` here, and wild for a GPU.

Each link has its own fix: `counts="device"` (vLLM 0.24.0), `recovered="after"` (0.24.0), `lookup="after"` (none yet).
"""

from __future__ import annotations

import random
import time
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from specmortem.device import Device, Graph, Stream
from specmortem.kernels import accepted_counts, gated_delta_state
from specmortem.kernels.gated_delta_state import Arm

VOCAB_SIZE = 1000
STATE_DIM = 8
CANARY = 0x3FFFFFFF
HOLE, MOVED = 0, 3
NO_STATES = -1  # last row of the table, all null: a prefill's states are another kernel's business


@dataclass(frozen=True)
class LoopConfig:
    """One arm of the loop. Times are microseconds.

    `gap` bounds the host's work between two steps, as multiples of the time of a forward; `move_us` is the time
    between the two row moves.
    """

    graphs: bool = True
    speculative: bool = True
    one_request: bool = False
    num_speculative_tokens: int = 1
    counts: Literal["host", "device"] = "host"
    recovered: Arm = "before"
    lookup: Arm = "before"
    layers: int = 60
    layer_us: float = 4.0
    gap: tuple[float, float] = (0.3, 1.2)
    move_us: float = 60.0
    canary: int = CANARY


@dataclass
class Tally:
    """What was seen over the transitions of one run."""

    transitions: int = 0
    wrong_counts: int = 0
    nan_rows: int = 0
    zero_counts: int = 0
    seen: list[int] = field(default_factory=list)


class SpecLoop:
    """Runs transitions on a device; a faulting access, where there is one, is in the last step of a transition."""

    def __init__(self, device: Device, config: LoopConfig, seed: int) -> None:
        self.device, self.config, self.random = device, config, random.Random(seed)
        self.columns = 1 + config.num_speculative_tokens
        self.tokens = self.columns if config.speculative else 1
        self.num_reqs = 1 if config.one_request else 4
        self.stream: Stream = device.stream("main")
        self._allocate(torch.Generator().manual_seed(seed))
        self._graph: Graph | None = None
        self.tally = Tally()

    def _allocate(self, generator: torch.Generator) -> None:
        dev, n, t, d = self.device, self.num_reqs, self.tokens, STATE_DIM

        def rand(*shape: int) -> torch.Tensor:
            return torch.rand(*shape, generator=generator).to(dev.torch_device)

        self.inputs = (rand(n, t, d), rand(n, t, d) * 0.3, rand(n, t, d), -rand(n, t), rand(n, t))
        self.out = torch.zeros(n, t, d, device=dev.torch_device)
        slots = 1 + (n + 1) * self.columns
        self.clean_states = rand(slots, d, d)
        self.states = self.clean_states.clone()
        table = torch.arange(1, slots, dtype=torch.int32).reshape(n + 1, self.columns)
        self.table = torch.cat([table, torch.zeros_like(table[:1])]).to(dev.torch_device)
        self.state_indices = self._behind(self.config.canary)
        self.num_accepted = torch.ones(n, dtype=torch.int32, device=dev.torch_device)
        self.sampled = torch.full((n, self.columns), -1, dtype=torch.int32, device=dev.torch_device)
        self.valid = torch.ones(n, dtype=torch.int32, device=dev.torch_device)
        self.accepted = torch.ones(n, dtype=torch.int32, device=dev.torch_device)
        self.returned = dev.host_buffer((n,), torch.int32, pinned=True, name="num_accepted_tokens_cpu")
        self.staged = dev.host_buffer((n,), torch.int32, pinned=True, name="num_accepted_tokens")
        self.copied = dev.event("num_accepted_tokens_event")

    def _behind(self, word: int) -> torch.Tensor:
        """State indices [num_reqs, K + 1] with `word` in front of row 0, 16-byte aligned as an allocation is."""
        storage = torch.zeros(
            4 + self.num_reqs * self.columns, dtype=torch.int32, device=self.device.torch_device
        )
        storage[3] = word
        return storage[4:].view(self.num_reqs, self.columns)

    def _update_states(self, indices: torch.Tensor) -> None:
        gated_delta_state.launch(
            self.config.lookup, *self.inputs, self.out, self.states, indices, self.num_accepted
        )

    def _layers(self, indices: torch.Tensor) -> None:
        reads = (*self.inputs, indices, self.num_accepted)
        writes = (self.out, self.states)
        self.device.launch(
            self._update_states, indices, stream=self.stream, reads=reads, writes=writes, name="gated delta"
        )
        for _ in range(self.config.layers):
            self.device.spin(self.config.layer_us, stream=self.stream)

    def warm_up(self) -> None:
        """Compile, and capture the forward when graphs are on."""
        self._update_states(self.table[: self.num_reqs].contiguous())
        self.device.synchronize()
        self.states.copy_(self.clean_states)
        if self.config.graphs:
            with self.device.capture(self.stream) as graph:
                self._layers(self.state_indices)
            self._graph = graph
        self.device.synchronize()

    def _forward(self, rows: list[int]) -> None:
        """One target forward over requests in this row order."""
        index = torch.tensor(rows, device=self.device.torch_device)
        if self._graph is not None:
            self._launch(
                self._gather_into,
                self.state_indices,
                index,
                writes=(self.state_indices,),
                name="state indices",
            )
            self._graph.replay(self.stream)
        else:
            fresh = self._behind(0)
            self._launch(self._gather_into, fresh, index, writes=(fresh,), name="state indices")
            self._layers(fresh)

    def forward_again(self) -> None:
        """One forward over the rows as they stand, with the counts that are on the device."""
        self._forward(list(range(self.num_reqs)))

    def _gather_into(self, target: torch.Tensor, index: torch.Tensor) -> None:
        target.copy_(self.table[index])

    def _launch(self, fn: Any, *args: Any, writes: tuple[torch.Tensor, ...], name: str) -> None:
        self.device.launch(fn, *args, stream=self.stream, writes=writes, name=name)

    def _sample(self, accepted: torch.Tensor) -> None:
        """Ids of the step; a NaN row recovers an id at its first position and nothing behind."""
        self.sampled.fill_(-1)
        step = torch.arange(self.columns, device=self.sampled.device)
        self.sampled.masked_fill_(step[None, :] < accepted[:, None], 7)
        nan_rows = torch.isnan(self.out).flatten(1).any(dim=1)
        recovered = VOCAB_SIZE if self.config.recovered == "before" else VOCAB_SIZE - 1
        self.sampled[nan_rows] = -1
        self.sampled[:, 0] = torch.where(nan_rows, recovered, self.sampled[:, 0])

    def _count(self) -> None:
        """Two counts of the same ids: the hybrid state's (id != -1) and the drafter's (id in the vocabulary)."""
        accepted_counts.count_reference(self.sampled, VOCAB_SIZE, self.accepted, self.valid)

    def _correct(self, previous: torch.Tensor, had_drafts: torch.Tensor) -> None:
        """Rows that had drafts take their count on the device, through their previous row."""
        self.num_accepted.copy_(torch.where(had_drafts, self.valid[previous], self.num_accepted))

    def _sample_and_count(self, accepted: list[int]) -> None:
        counts = torch.tensor(accepted, dtype=torch.int32, device=self.device.torch_device)
        self._launch(self._sample, counts, writes=(self.sampled,), name="sample")
        self._launch(self._count, writes=(self.accepted, self.valid), name="count")

    def transition(self) -> None:
        """Steps N, N + 1 and N + 2."""
        forward_us = self._forward_us()
        self._reset()
        drafted = [self.random.randint(2, self.columns) for _ in range(self.num_reqs)]
        counts = drafted if self.config.one_request else [*drafted[:MOVED], 1]
        self._forward([0] if self.config.one_request else [0, 1, 2, NO_STATES])
        self._sample_and_count(counts if self.config.speculative else [1] * self.num_reqs)
        if not self.config.speculative:
            self._forward(self._moved_rows())
            self.device.synchronize()
            self.tally.transitions += 1
            return
        self.device.copy_async(self.returned, self.accepted, stream=self.stream)
        self.copied.record(self.stream)
        self.device.host_time(forward_us * self.random.uniform(*self.config.gap))
        self._move_rows()
        self._prepare_counts(counts)
        self._forward([0] if self.config.one_request else [3, 1, 2, NO_STATES])
        self._sample_and_count([2] if self.config.one_request else [2, 2, 2, 1])
        self._last_step()

    def _forward_us(self) -> float:
        """Time of a forward: its layers on the simulated clock, measured anew on a GPU, whose clock varies."""
        if self.device.kind == "sim":
            return self.config.layers * self.config.layer_us
        began = time.perf_counter()
        self.forward_again()
        self.device.synchronize()
        return (time.perf_counter() - began) * 1e6

    def _moved_rows(self) -> list[int]:
        return [0] if self.config.one_request else [3, 1, 2, 4]

    def _reset(self) -> None:
        """Fresh states: every request has written all its columns, P and Q only column 0."""
        self.states.copy_(self.clean_states)
        if not self.config.one_request:
            fresh = self.table[MOVED:NO_STATES, 1:].flatten().long()
            self.states[fresh] = float("nan")
        self.num_accepted.fill_(1)
        self.device.synchronize()

    def _move_rows(self) -> None:
        """What `add_request` and `swap_states` do to the pinned counts."""
        if self.config.one_request:
            return
        self.returned[HOLE] = 1
        self.device.host_time(self.config.move_us)
        hole, moved = int(self.returned[HOLE]), int(self.returned[MOVED])
        self.returned[HOLE] = moved
        self.returned[MOVED] = hole

    def _prepare_counts(self, counts: list[int]) -> None:
        """What `_prepare_inputs` does: wait, gather through previous rows, upload, correct on the device."""
        previous = [0] if self.config.one_request else [3, 1, 2, -1]
        self.copied.synchronize()
        gathered = [1 if p < 0 else int(self.returned[p]) for p in previous]
        if self.config.counts == "device":
            gathered = [1] * self.num_reqs
        self.staged[...] = torch.tensor(gathered, dtype=torch.int32).numpy()
        self.device.copy_async(self.num_accepted, self.staged, stream=self.stream)
        had_drafts = [True] if self.config.one_request else [False, True, True, False]
        self._launch_correction([max(p, 0) for p in previous], had_drafts)
        self.tally.transitions += 1
        if not self.config.one_request and gathered[0] != counts[MOVED]:
            self.tally.wrong_counts += 1
            self.tally.seen.append(gathered[0])

    def _launch_correction(self, previous: list[int], had_drafts: list[bool]) -> None:
        where = self.device.torch_device
        index, mask = torch.tensor(previous, device=where), torch.tensor(had_drafts, device=where)
        self._launch(self._correct, index, mask, writes=(self.num_accepted,), name="correct counts")

    def _last_step(self) -> None:
        """The counts of step N + 1 decide the lookup; Q, which was prefilled in it, has a count of 1."""
        had_drafts = [True] if self.config.one_request else [True, True, True, False]
        self._launch_correction(list(range(self.num_reqs)), had_drafts)
        self.device.synchronize()
        self.tally.nan_rows += int(torch.isnan(self.out).flatten(1).any(dim=1).sum())
        self.tally.zero_counts += int((self.num_accepted == 0).sum())
        self._forward(self._moved_rows())
        self.device.synchronize()

    def run(self, transitions: int) -> Tally:
        """Warm up and run; on CUDA a faulting transition ends the process, and the caller's isolation types it."""
        self.warm_up()
        for _ in range(transitions):
            self.transition()
        return self.tally
