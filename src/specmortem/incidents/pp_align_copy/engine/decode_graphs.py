"""Captured forwards for batches that hold decodes only, as with `FULL_DECODE_ONLY`.

The state copies stay outside of them: they are launched by the host before and after.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from specmortem.device import Device, Graph
from specmortem.incidents.pp_align_copy.engine.recurrent_model import RecurrentModel
from specmortem.incidents.pp_align_copy.engine.scheduler import Batch, EngineConfig
from specmortem.incidents.pp_align_copy.engine.worker import Layout


class DecodeGraphs:
    """A graph for each padded number of rows, captured while the tables are still empty.

    Padding rows belong to the slot after those of requests.
    """

    def __init__(self, device: Device, config: EngineConfig, model: RecurrentModel, layout: Layout) -> None:
        self.device, self.model, self.most = device, model, config.max_num_seqs
        self.tokens = 1 + config.num_speculative_tokens
        req_idxs = device.full((self.most,), self.most, torch.int64, name="graph slots")
        self.layout = layout._replace(req_idxs=req_idxs)
        width = model.embed([0]).shape[1]
        self.inputs = device.zeros((self.most, self.tokens, width), torch.float32, name="graph inputs")
        self.outputs = device.zeros((self.most, self.tokens, width), torch.float32, name="graph outputs")
        sizes = {min(self.most, 1 << n) for n in range(self.most.bit_length() + 1)}
        self._graphs = {size: self._capture(size) for size in sorted(sizes)}

    def padded(self, batch: Batch) -> int:
        """Rows of the graph that serves a batch; 0 when none does."""
        rows = len(batch.rows)
        if not rows or not all(row.decode for row in batch.rows):
            return 0
        return min(self.most, 1 << (rows - 1).bit_length())

    def _capture(self, size: int) -> Graph:
        """The graph of that many rows; compiled by one eager run on null blocks."""
        self.device.launch(self._decode, size, name="warm up")
        self.device.synchronize()
        with self.device.capture(name=f"decode {size}") as graph:
            self.device.launch(self._decode, size, name="decode")
        return graph

    def run(self, batch: Batch, req_idxs: Sequence[int], hidden: torch.Tensor | None) -> torch.Tensor:
        """Hidden states [tokens of the batch, D] of a batch of decodes."""
        graph = self._graphs[self.padded(batch)]
        x = self.model.embed([t for row in batch.rows for t in row.tokens]) if hidden is None else hidden
        self.device.synchronize()  # x comes from outside the device's streams
        self.device.launch(
            self._fill, list(req_idxs), x.view(len(req_idxs), self.tokens, -1), name="graph inputs"
        )
        graph.replay()
        self.device.synchronize()
        return self.outputs[: len(req_idxs)].flatten(0, 1).clone()

    def _fill(self, req_idxs: list[int], x: torch.Tensor) -> None:
        self.layout.req_idxs.fill_(self.most)
        self.layout.req_idxs[: len(req_idxs)] = torch.tensor(req_idxs, device=x.device)
        self.inputs[: len(req_idxs)] = x

    def _decode(self, size: int) -> None:
        part = self.layout._replace(req_idxs=self.layout.req_idxs[:size])
        self.outputs[:size] = self.model.decode(part, self.inputs[:size])
