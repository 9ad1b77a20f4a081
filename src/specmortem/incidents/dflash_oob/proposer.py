"""A DFlash proposer: one pass drafts all K tokens of every request, with a captured graph over padded buffers.

Buffers are sized as the engine sizes them (vllm/v1/spec_decode/dflash.py:39-61 in 0.22.1): max_num_seqs * (1 + K) query
rows. A step launches the input kernel eagerly, fills the padded tail, writes the context's keys and values, and replays
the graph of the next captured size. Attention is single-head with a head size of 8 over a paged cache, small enough for
an interpreter and large enough to be corrupted like a real one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton

from specmortem.device import Device, Graph, Stream
from specmortem.errors import BadInputError
from specmortem.incidents.dflash_oob import draft_attention
from specmortem.incidents.dflash_oob.draft_attention import HEAD_DIM
from specmortem.incidents.dflash_oob.kernels import PADDING_SLOT, DFlashBatch, DFlashInputs, launch_for
from specmortem.kernels import Arm


def capture_sizes(
    max_num_seqs: int, num_speculative_tokens: int, *, aligned: bool = True, limit: int = 512
) -> list[int]:
    """Token counts that get a graph (vllm/config/vllm.py:1640-1700, config/compilation.py:1464-1509 in 0.22.1).

    `aligned` rounds them up to multiples of 1 + K, as is done for full graphs of uniform decode batches; `limit` is the
    default of max_cudagraph_capture_size.
    """
    query_len = 1 + num_speculative_tokens
    largest = min(max_num_seqs * query_len * 2, limit)
    sizes = [s for s in (1, 2, 4) if s <= largest]
    sizes += range(8, min(largest + 1, 256), 8)
    sizes += range(256, largest + 1, 16)
    if not aligned:
        return sizes
    rounded = {triton.cdiv(s, query_len) * query_len for s in sizes}
    return sorted(s for s in rounded if s <= largest) or [query_len]


def padded_size(num_tokens: int, sizes: list[int]) -> int | None:
    """The captured size a batch is padded to; None when it is larger than every graph and runs eagerly."""
    return next((s for s in sizes if s >= num_tokens), None)


def padded_batches(
    max_num_seqs: int, num_speculative_tokens: int, *, aligned: bool = True
) -> dict[int, tuple[int, int]]:
    """Batch sizes whose uniform decode step is padded at all: {num_reqs: (num_tokens, captured size)}."""
    sizes = capture_sizes(max_num_seqs, num_speculative_tokens, aligned=aligned)
    tokens = {n: n * (1 + num_speculative_tokens) for n in range(1, max_num_seqs + 1)}
    found = {n: (t, padded_size(t, sizes)) for n, t in tokens.items()}
    return {n: (t, size) for n, (t, size) in found.items() if size is not None and size != t}


@dataclass(frozen=True)
class DFlashConfig:
    """Sizes of a proposer; `num_cache_blocks` counts the null block 0."""

    max_num_seqs: int
    num_speculative_tokens: int
    block_size: int = 4
    max_model_len: int = 64
    max_num_tokens: int = 256
    num_cache_blocks: int = 64
    mask_token_id: int = 99

    @property
    def num_query_per_req(self) -> int:
        """Bonus token and masks."""
        return 1 + self.num_speculative_tokens

    @property
    def batch_sizes(self) -> dict[str, Any]:
        """The sizes of a batch, for `DFlashBatch.of`."""
        names = ("block_size", "max_model_len", "num_speculative_tokens", "mask_token_id")
        return {name: getattr(self, name) for name in names}

    @property
    def max_query_tokens(self) -> int:
        """Rows of the query buffers."""
        return self.max_num_seqs * self.num_query_per_req

    @property
    def num_columns(self) -> int:
        """Columns of a block table row."""
        return -(-self.max_model_len // self.block_size)


class DFlashProposer:
    """Drafts for a batch; `arm` picks the input kernel, `fill_tail` whether padded rows get no slot."""

    def __init__(self, device: Device, config: DFlashConfig, arm: Arm, *, fill_tail: bool = True) -> None:
        self.device, self.config, self.arm, self.fill_tail = device, config, arm, fill_tail
        rows, where, seqs = config.max_query_tokens, device.torch_device, config.max_num_seqs
        sizes = (config.max_num_tokens, seqs, config.num_speculative_tokens, rows)
        self.buffers = DFlashInputs.empty(*sizes, device=where, poison=0)
        self.block_table = torch.zeros(seqs, config.num_columns, dtype=torch.int32, device=where)
        self.kv = torch.zeros(config.num_cache_blocks * config.block_size, HEAD_DIM, device=where)
        self.out = torch.zeros(rows, HEAD_DIM, device=where)
        self.sizes = capture_sizes(config.max_num_seqs, config.num_speculative_tokens)
        self._graphs: dict[int, Graph] = {}

    def capture(self, sizes: list[int], stream: Stream) -> None:
        """Capture the draft forward at these sizes; addresses of the buffers are baked in.

        Raises BadInputError for a size beyond the query buffers.
        """
        for size in sizes:
            if size > self.config.max_query_tokens:
                raise BadInputError(
                    f"capture size {size} exceeds the {self.config.max_query_tokens} query rows"
                )
            if self.device.kind == "cuda":
                self._forward(size, stream)
                stream.synchronize()
            with self.device.capture(stream) as graph:
                self._forward(size, stream)
            self._graphs[size] = graph

    def _forward(self, rows: int, stream: Stream) -> None:
        b, written = self.buffers, (self.kv, self.out)
        read = (b.query_slot_mapping, b.input_ids, b.query_positions, b.seq_lens, self.block_table)
        for name, part in (("draft kv", self._write_queries), ("draft attention", self._attend)):
            self.device.launch(part, rows, stream=stream, reads=read, writes=written, name=name)

    def _write_queries(self, rows: int) -> None:
        queries = (self.buffers.query_slot_mapping, self.buffers.input_ids, self.buffers.query_positions)
        draft_attention.write(self.kv, *(buffer[:rows] for buffer in queries))

    def _attend(self, rows: int) -> None:
        c, lengths = self.config, self.buffers.seq_lens
        sizes = (c.block_size, c.max_num_seqs, c.num_query_per_req)
        draft_attention.attend(self.kv, self.block_table, lengths, self.out[:rows], *sizes)

    def propose(self, batch: DFlashBatch, stream: Stream, *, widest: int) -> None:
        """One drafting step.

        The caller has put the batch's block table into `self.block_table`, which the captured attention reads.
        """
        tokens = batch.num_reqs * batch.num_query_per_req
        size = padded_size(tokens, sorted(self._graphs))
        rows = size if size is not None else tokens
        context, k = batch.target_positions.shape[0], batch.num_speculative_tokens
        live = self.buffers.live(context, batch.num_reqs, k, tokens if self.arm == "before" else rows)
        self._write_inputs(batch, live, stream, widest)
        if self.fill_tail:
            tail = self.buffers.query_slot_mapping[tokens:]
            self.device.launch(
                tail.fill_, PADDING_SLOT, stream=stream, reads=(), writes=(tail,), name="fill tail"
            )
        self._write_context(live, stream)
        if size is None:
            self._forward(rows, stream)
        else:
            self._graphs[size].replay(stream)

    def _write_inputs(self, batch: DFlashBatch, live: DFlashInputs, stream: Stream, widest: int) -> None:
        read, written = list(batch.tensors.values()), list(vars(live).values())
        arguments = (self.arm, batch, live, widest)
        self.device.launch(
            launch_for, *arguments, stream=stream, reads=read, writes=written, name="input kernel"
        )

    def _write_context(self, live: DFlashInputs, stream: Stream) -> None:
        """Keys and values of the context; in the engine this precomputation runs outside every graph."""
        slots, positions = live.context_slot_mapping, live.context_positions
        rows = (slots, torch.zeros_like(slots, dtype=torch.int32), positions)
        write, written = draft_attention.write, (self.kv,)
        self.device.launch(
            write, self.kv, *rows, stream=stream, reads=rows, writes=written, name="context kv"
        )
