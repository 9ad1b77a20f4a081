"""The part of a speculative engine in which an accepted count goes astray: three steps around a row move.

Requests A, B, C decode with drafts, P was just prefilled. In step N the rows are [A, B, C, P]. A finishes, a prefill Q
takes its row, and the batch is reordered so that decodes come first: step N + 1 runs the rows [P, B, C, Q]. The counts
of step N come back by a non-blocking copy into a pinned array whose rows the host moves meanwhile
(vllm/v1/worker/gpu_model_runner.py:1527 and 2013-2034, gpu_input_batch.py:466 and 661 in 0.22.1). A row that had drafts
is corrected on the device; P had none and takes what it finds.

What comes of a wrong count, link by link:
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
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch

from specmortem.device import Device, Graph, Stream
from specmortem.kernels import Arm, accepted_counts, gated_delta_state

VOCAB_SIZE = 1000
STATE_DIM = 8
CANARY = 0x3FFFFFFF
LAYER_US = 4.0
MOVE_US = 60.0  # between the two row moves
GAP = 0.3, 1.2  # bounds of the host's work between two steps, as multiples of the time of a forward
NO_STATES = -1  # last row of the table, all null: a prefill's states are another kernel's business


@dataclass(frozen=True)
class BatchRows:
    """Who is in which row of steps N, N + 1 and N + 2; requests are rows of the table of states.

    `drafted` says of each row whether it has drafts, in N and in N + 1; `previous` gives the row of step N of each
    row of N + 1, -1 for a request that is new. `moves` are the row that a finished request leaves to a new one and the
    row that is swapped with it; `new_req_ids` have written column 0 of their states alone.
    """

    steps: tuple[list[int], list[int], list[int]]
    drafted: list[int]
    previous: list[int]
    moves: tuple[int, int] | None = None
    new_req_ids: tuple[int, ...] = ()


ONE_REQUEST = BatchRows(steps=([0], [0], [0]), drafted=[1], previous=[0])
FOUR_REQUESTS = BatchRows(
    steps=([0, 1, 2, NO_STATES], [3, 1, 2, NO_STATES], [3, 1, 2, 4]),
    drafted=[1, 1, 1, 0],
    previous=[3, 1, 2, -1],
    moves=(0, 3),
    new_req_ids=(3, 4),
)


@dataclass(frozen=True)
class LoopConfig:
    """One arm of the loop: its controls, its three links, and the size of a forward."""

    graphs: bool = True
    speculative: bool = True
    one_request: bool = False
    num_speculative_tokens: int = 1
    counts: Literal["host", "device"] = "host"
    recovered: Arm = "before"
    lookup: Arm = "before"
    layers: int = 60
    canary: int = CANARY


@dataclass
class LookupTally:
    """What was seen over the transitions of one run."""

    transitions: int = 0
    wrong_counts: int = 0
    nan_rows: int = 0
    zero_counts: int = 0


class LookupLoop:
    """Runs transitions on a device; a faulting access, where there is one, is in the last step of a transition."""

    def __init__(self, device: Device, config: LoopConfig, seed: int) -> None:
        self.device, self.config, self.random = device, config, random.Random(seed)
        self.rows = ONE_REQUEST if config.one_request else FOUR_REQUESTS
        self.columns = 1 + config.num_speculative_tokens
        self.num_reqs = len(self.rows.drafted)
        self.stream: Stream = device.stream("main")
        self._launch = partial(device.launch, stream=self.stream)
        self._allocate(torch.Generator().manual_seed(seed))
        self._graph: Graph | None = None
        self.tally = LookupTally()

    def _allocate(self, generator: torch.Generator) -> None:
        dev, n, d, where = self.device, self.num_reqs, STATE_DIM, self.device.torch_device
        t = self.columns if self.config.speculative else 1

        def rand(*shape: int) -> torch.Tensor:
            return torch.rand(*shape, generator=generator).to(where)

        def full(*shape: int, value: int = 1) -> torch.Tensor:
            return torch.full(shape, value, dtype=torch.int32, device=where)

        self.inputs = (rand(n, t, d), rand(n, t, d) * 0.3, rand(n, t, d), -rand(n, t), rand(n, t))
        self.out = torch.zeros(n, t, d, device=where)
        slots = 1 + (n + 1) * self.columns
        self.clean_states = rand(slots, d, d)
        self.states = self.clean_states.clone()
        table = torch.arange(1, slots, dtype=torch.int32).reshape(n + 1, self.columns)
        self.table = torch.cat([table, torch.zeros_like(table[:1])]).to(where)
        self.state_indices = self._after_word(self.config.canary)
        self.num_accepted, self.valid, self.accepted = full(n), full(n), full(n)
        self.computed, self.next_computed = full(n, 1), full(n, 1)
        self.drafted = torch.tensor(self.rows.drafted, dtype=torch.int32, device=where)
        self.sampled = full(n, self.columns, value=-1)
        self.returned = dev.host_buffer((n,), torch.int32, name="num_accepted_tokens_cpu")
        self.staged = dev.host_buffer((n,), torch.int32, name="num_accepted_tokens")
        self.copied = dev.event("num_accepted_tokens_event")

    def _after_word(self, word: int) -> torch.Tensor:
        """State indices [num_reqs, K + 1] with `word` in front of row 0, 16-byte aligned as an allocation is."""
        size = 4 + self.num_reqs * self.columns
        storage = torch.zeros(size, dtype=torch.int32, device=self.device.torch_device)
        storage[3] = word
        return storage[4:].view(self.num_reqs, self.columns)

    def _update_states(self, indices: torch.Tensor) -> None:
        arguments = (*self.inputs, self.out, self.states, indices, self.num_accepted)
        gated_delta_state.launch(self.config.lookup, *arguments)

    def _layers(self, indices: torch.Tensor) -> None:
        reads, writes = (*self.inputs, indices, self.num_accepted), (self.out, self.states)
        self._launch(self._update_states, indices, reads=reads, writes=writes, name="gated delta")
        for _ in range(self.config.layers):
            self.device.spin(LAYER_US, stream=self.stream)

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

    def _forward(self, req_ids: list[int]) -> None:
        """One target forward over requests in this row order; a captured one reads the persistent indices."""
        index = torch.tensor(req_ids, device=self.device.torch_device)
        indices = self._after_word(0) if self._graph is None else self.state_indices
        self._launch(self._gather_into, indices, index, writes=(indices,), name="state indices")
        if self._graph is None:
            self._layers(indices)
        else:
            self._graph.replay(self.stream)

    def forward_again(self) -> None:
        """One forward over the rows as they stand, with the counts that are on the device."""
        self._forward(list(range(self.num_reqs)))

    def _gather_into(self, target: torch.Tensor, index: torch.Tensor) -> None:
        target.copy_(self.table[index])

    def _sample(self, accepted: torch.Tensor) -> None:
        """Ids of the step; a NaN row recovers an id at its first position and nothing after it."""
        self.sampled.fill_(-1)
        step = torch.arange(self.columns, device=self.sampled.device)
        self.sampled.masked_fill_(step[None, :] < accepted[:, None], 7)
        nan_rows = self._nan_rows()
        recovered = VOCAB_SIZE if self.config.recovered == "before" else VOCAB_SIZE - 1
        self.sampled[nan_rows] = -1
        self.sampled[:, 0] = torch.where(nan_rows, recovered, self.sampled[:, 0])

    def _nan_rows(self) -> torch.Tensor:
        return torch.isnan(self.out).flatten(1).any(dim=1)

    def _step(self, req_ids: list[int], counts: list[int]) -> None:
        """Forward, sample and count: the hybrid state counts ids that are not -1, the drafter those it knows."""
        self._forward(req_ids)
        accepted = torch.tensor(counts, dtype=torch.int32, device=self.device.torch_device)
        self._launch(self._sample, accepted, writes=(self.sampled,), name="sample")
        count, written = accepted_counts.count_reference, (self.accepted, self.valid)
        self._launch(count, self.sampled, VOCAB_SIZE, *written, writes=written, name="count")

    def transition(self) -> None:
        """Steps N, N + 1 and N + 2: in N + 1 a row may take another's count, in N + 2 it is what that made of it."""
        rows, forward_us = self.rows, self._forward_us()
        first, second, last = rows.steps
        self._reset()
        draws = [self.random.randint(2, self.columns) for _ in rows.drafted]
        counts = [draw if drafts else 1 for draw, drafts in zip(draws, rows.drafted, strict=True)]
        self.tally.transitions += 1
        if self.config.speculative:
            self._step(first, counts)
            self.device.copy_async(self.returned, self.accepted, stream=self.stream)
            self.copied.record(self.stream)
            self.device.host_time(forward_us * self.random.uniform(*GAP))
            self._move_rows()
            self._prepare_counts(counts)
            self._step(second, [1 + drafts for drafts in rows.drafted])
            self._correct(list(range(self.num_reqs)))
            self.device.synchronize()
            self.tally.nan_rows += int(self._nan_rows().sum())
            self.tally.zero_counts += int((self.num_accepted == 0).sum())
        else:
            self._step(first, [1] * self.num_reqs)
        self._forward(last)
        self.device.synchronize()

    def _forward_us(self) -> float:
        """Time of a forward: its layers on the simulated clock, measured anew on a GPU, whose clock varies."""
        if self.device.kind == "sim":
            return self.config.layers * LAYER_US
        began = time.perf_counter()
        self.forward_again()
        self.device.synchronize()
        return (time.perf_counter() - began) * 1e6

    def _reset(self) -> None:
        """Fresh states: every request has written all its columns, a new one only column 0."""
        self.states.copy_(self.clean_states)
        self.states[self.table[list(self.rows.new_req_ids), 1:].flatten().long()] = float("nan")
        self.num_accepted.fill_(1)
        self.device.synchronize()

    def _move_rows(self) -> None:
        """What `add_request` and `swap_states` do to the pinned counts."""
        if self.rows.moves is None:
            return
        hole, moved = self.rows.moves
        self.returned[hole] = 1
        self.device.host_time(MOVE_US)
        kept, taken = int(self.returned[hole]), int(self.returned[moved])
        self.returned[hole] = taken
        self.returned[moved] = kept

    def _prepare_counts(self, counts: list[int]) -> None:
        """What `_prepare_inputs` does: wait, gather through previous rows, upload, correct on the device."""
        previous = self.rows.previous
        self.copied.synchronize()
        gathered = [1 if p < 0 else int(self.returned[p]) for p in previous]
        if self.config.counts == "device":
            gathered = [1] * self.num_reqs
        self.staged[...] = gathered
        self.device.copy_async(self.num_accepted, self.staged, stream=self.stream)
        self._correct(previous)
        kept = [row for row, p in enumerate(previous) if p >= 0 and not self.rows.drafted[p]]
        self.tally.wrong_counts += sum(gathered[row] != counts[previous[row]] for row in kept)

    def _correct(self, previous: list[int]) -> None:
        """Rows that had drafts take their count on the device, through their previous row."""
        index = torch.tensor(previous, dtype=torch.int32, device=self.device.torch_device)
        self._launch(
            accepted_counts.correct_reference,
            self.num_accepted[:, None],
            self.computed,
            self.next_computed,
            self.valid[:, None],
            self.drafted,
            index,
            self.computed[:, 0],
            writes=(self.num_accepted, self.next_computed),
            name="correct counts",
        )
