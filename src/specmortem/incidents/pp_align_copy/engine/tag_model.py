"""A model whose state is its own account: every block says which request's state after how many tokens it holds.

The temporal state after n tokens of request r is the number r * 2**20 + n, and a convolution window holds that number
for each token in it. A forward reads the state it starts from and knows at once whether it is the right one; what it
writes carries the error on, as a recurrent layer does.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import isnan
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from specmortem.device import Device
from specmortem.incidents.pp_align_copy.engine.pipeline import Pipeline, Sampler
from specmortem.incidents.pp_align_copy.engine.scheduler import Batch, BatchRow, EngineConfig, Request
from specmortem.incidents.pp_align_copy.engine.worker import Copies, Layout
from specmortem.incidents.pp_align_copy.kernels import AFTER, Guards, RecurrentState

PER_REQUEST = 1 << 20
Array = npt.NDArray[Any]


class WrongStart(NamedTuple):
    """A row that went on from a state that is not its own after `start` tokens; `found` is None for NaN."""

    step: int
    request: int
    start: int
    found: float | None


class TagModel:
    """States on the device, arithmetic on the host; for many small workloads."""

    def __init__(self, device: Device, config: EngineConfig) -> None:
        self.window = config.conv_width - 1
        width = self.window + config.num_speculative_tokens
        conv = device.zeros((config.num_blocks, max(1, width), 1), torch.float64, name="conv")
        ssm = device.zeros((config.num_blocks, 1), torch.float64, name="ssm")
        self.states = [RecurrentState(conv, conv_width=max(1, width)), RecurrentState(ssm)]
        self.wrong: list[WrongStart] = []

    def forward(self, batch: Batch, layout: Layout, hidden: torch.Tensor | None) -> None:
        """Check and advance every row."""
        table, columns, accepted = (
            t.cpu().numpy() for t in (layout.table, layout.counters.state_idx, layout.counters.num_accepted)
        )
        conv, ssm = (state.tensor.cpu().numpy() for state in self.states)
        for number, (row, req_idx) in enumerate(zip(batch.rows, layout.req_idxs.tolist(), strict=True)):
            blocks = table[number, columns[req_idx] :]
            offset = int(accepted[req_idx]) - 1
            base = self._check(batch.step, row, blocks, offset, conv, ssm)
            self._write(row, blocks, base, conv, ssm)
        for state, array in zip(self.states, (conv, ssm), strict=True):
            if state.tensor.is_cuda:
                state.tensor.copy_(torch.from_numpy(array))

    def _check(
        self, step: int, row: BatchRow, blocks: Array, offset: int, conv: Array, ssm: Array
    ) -> tuple[float, list[float]]:
        """What the start state is ahead of zero tokens, and the window before the first token."""
        zero = float(row.req_id * PER_REQUEST)
        history = [zero + max(token, 0) for token in range(row.start + 1 - self.window, row.start + 1)]
        if row.start == 0:
            return zero, history
        found = float(ssm[blocks[offset], 0])
        window = conv[blocks[0], offset : offset + self.window, 0].tolist()
        if found != zero + row.start or window != history:
            self.wrong.append(WrongStart(step, row.req_id, row.start, None if isnan(found) else found))
        return found - row.start, window

    def _write(
        self, row: BatchRow, blocks: Array, base: tuple[float, list[float]], conv: Array, ssm: Array
    ) -> None:
        """States after each token of a decode, or after the last of a prefill chunk."""
        zero, window = base
        after = zero + np.arange(row.start + 1, row.start + 1 + row.num_tokens, dtype=np.float64)
        tokens = np.concatenate([window, after])
        if row.decode:
            ssm[blocks[: row.num_tokens], 0] = after
            conv[blocks[0], :, 0] = tokens[1:] if self.window else after
        else:
            ssm[blocks[0], 0] = after[-1]
            if self.window:
                conv[blocks[0], : self.window, 0] = tokens[-self.window :]

    def unsaved(self, req_id: int, blocks: Sequence[int], num_tokens: int, block_size: int) -> list[int]:
        """Columns of whole blocks, up to `num_tokens`, that do not hold the request's state at their end."""
        conv, ssm = (state.tensor.cpu().numpy() for state in self.states)
        found = []
        for column in range(num_tokens // block_size):
            end = req_id * PER_REQUEST + (column + 1) * block_size
            window = np.maximum(end + np.arange(1 - self.window, 1), req_id * PER_REQUEST)
            kept = conv[blocks[column], : self.window, 0]
            if ssm[blocks[column], 0] != end or not np.array_equal(kept, window):
                found.append(column)
        return found


class TagPipeline(Pipeline):
    """A pipeline of which one rank runs, the first, with the `TagModel`; counts what goes wrong in it."""

    def __init__(
        self,
        device: Device,
        config: EngineConfig,
        requests: Sequence[Request],
        subject: str,
        sampler: Sampler,
        copies: Copies = "plain",
        guards: Guards = AFTER,
    ) -> None:
        self.model = TagModel(device, config)
        super().__init__(
            device,
            config,
            requests,
            subject=subject,
            models={0: self.model},
            sampler=sampler,
            copies=copies,
            guards=guards,
        )
        (self.worker,) = self.workers
        self.worker.on_leave = self._leave
        self.unsaved = 0

    def _leave(self, req_id: int) -> None:
        """The blocks that a prefix cache would keep; the step in flight is left out."""
        whole = self.worker.num_computed(req_id) - 1 - self.config.num_speculative_tokens
        blocks, size = self.worker.blocks[req_id], self.config.block_size
        self.unsaved += len(self.model.unsaved(req_id, blocks, max(0, whole), size))
