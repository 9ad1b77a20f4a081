"""First-pass inputs of a DFlash proposer: context and query positions, slots, ids, sample indices.

A drafting step of request r reads its context rows [query_start_loc[r], query_start_loc[r + 1]) of the target's
positions; the last `num_rejected[r]` of them belong to rejected tokens. Behind the last valid position come
Q = 1 + num_speculative_tokens query tokens: the bonus token and the masks. Every position maps to a slot of the draft's
KV cache through the request's row of the block table, and the graph that runs next writes keys and values there.

`before` does what the V1 kernel of vLLM does (`copy_and_expand_dflash_inputs_kernel`, vllm/v1/spec_decode/utils.py:459
in 0.22.1, the same body from 0.20.1 to 0.33.0). `after` differs in six guards, each marked `guard` below:

- anchor: a request whose context was rejected whole has no valid position; its queries get position 0 and no slot;
- rejected: rejected context rows get position 0 and no slot (V2 from 0.28.0 on);
- column: a position behind the allocated blocks of its request, or before the first, gets no slot;
- null: block 0 is the null block and never a slot (V2 from 0.28.0 on);
- length: positions end at max_model_len - 1 and what would lie behind gets no slot;
- tail: the padded rows that a captured graph replays get no slot (V1: by a fill on the host side since 0.20.1).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
import triton
import triton.language as tl

from specmortem._interpreter import mend
from specmortem.errors import BadInputError

mend()

PADDING_SLOT = -1
NULL_BLOCK = 0
Arm = Literal["before", "after"]


@dataclass(frozen=True)
class DFlashInputs:
    """What one launch writes. N context rows, R requests, Q = 1 + K queries a request, T padded query rows."""

    input_ids: torch.Tensor  # int32 [T]
    query_positions: torch.Tensor  # int64 [T]
    query_slots: torch.Tensor  # int64 [T]
    context_positions: torch.Tensor  # int64 [N]
    context_slots: torch.Tensor  # int64 [N]
    seq_lens: torch.Tensor  # int32 [R]
    sample_indices: torch.Tensor  # int32 [R * K]

    @classmethod
    def empty(
        cls,
        num_context: int,
        num_reqs: int,
        num_speculative_tokens: int,
        num_padded: int,
        device: str = "cpu",
        poison: int = -77,
    ) -> DFlashInputs:
        """Buffers of a launch, filled with `poison` so that what is not written shows."""
        i32: dict[str, Any] = {"dtype": torch.int32, "device": device}
        i64: dict[str, Any] = {"dtype": torch.int64, "device": device}
        return cls(
            input_ids=torch.full((num_padded,), poison, **i32),
            query_positions=torch.full((num_padded,), poison, **i64),
            query_slots=torch.full((num_padded,), poison, **i64),
            context_positions=torch.full((num_context,), poison, **i64),
            context_slots=torch.full((num_context,), poison, **i64),
            seq_lens=torch.full((num_reqs,), poison, **i32),
            sample_indices=torch.full((num_reqs * num_speculative_tokens,), poison, **i32),
        )


@dataclass(frozen=True)
class DFlashBatch:
    """What one launch reads."""

    next_token_ids: torch.Tensor  # int32 [R], the bonus token of each request
    target_positions: torch.Tensor  # int64 [N]
    query_start_loc: torch.Tensor  # int32 [R + 1]
    num_rejected: torch.Tensor  # int32 [R]
    block_table: torch.Tensor  # int32 [R, S]
    num_blocks: torch.Tensor  # int32 [R], allocated prefix of each row
    block_size: int
    max_model_len: int
    num_speculative_tokens: int
    mask_token_id: int

    @property
    def num_reqs(self) -> int:
        """Requests in the batch."""
        return int(self.next_token_ids.shape[0])

    @property
    def num_query_per_req(self) -> int:
        """Bonus token and masks."""
        return 1 + self.num_speculative_tokens


def reference(batch: DFlashBatch, num_padded: int) -> DFlashInputs:
    """What the inputs should be, request by request in plain Python; the contract of `after`."""
    k, q, limit = batch.num_speculative_tokens, batch.num_query_per_req, batch.max_model_len
    positions, starts = batch.target_positions.tolist(), batch.query_start_loc.tolist()
    rejected, bonus = batch.num_rejected.tolist(), batch.next_token_ids.tolist()
    slots = _slots_of(batch)
    out: dict[str, list[int]] = {name: [] for name in DFlashInputs.__dataclass_fields__}
    for r in range(batch.num_reqs):
        valid_end = starts[r + 1] - rejected[r]
        for row in range(starts[r], starts[r + 1]):
            out["context_positions"].append(positions[row] if row < valid_end else 0)
            out["context_slots"].append(slots(r, positions[row]) if row < valid_end else PADDING_SLOT)
        anchor = positions[valid_end - 1] if valid_end > starts[r] else None
        out["seq_lens"].append(0 if anchor is None else min(anchor + 1 + q, limit))
        for offset in range(q):
            position = 0 if anchor is None else anchor + 1 + offset
            out["query_positions"].append(min(position, limit - 1))
            out["query_slots"].append(PADDING_SLOT if anchor is None else slots(r, position))
            out["input_ids"].append(bonus[r] if offset == 0 else batch.mask_token_id)
        out["sample_indices"] += range(r * q + 1, r * q + 1 + k)
    tail = num_padded - batch.num_reqs * q
    for name, padding in (("input_ids", 0), ("query_positions", 0), ("query_slots", PADDING_SLOT)):
        out[name] += [padding] * tail
    empty = DFlashInputs.empty(len(positions), batch.num_reqs, k, num_padded)
    return DFlashInputs(
        **{name: torch.tensor(v, dtype=getattr(empty, name).dtype) for name, v in out.items()}
    )


def _slots_of(batch: DFlashBatch) -> Callable[[int, int], int]:
    """The slot of a position of a request, or PADDING_SLOT where it has none."""
    size, limit = batch.block_size, batch.max_model_len
    table, allocated = batch.block_table.tolist(), batch.num_blocks.tolist()

    def slot(request: int, position: int) -> int:
        column = position // size
        if not 0 <= position < limit or column >= allocated[request]:
            return PADDING_SLOT
        block = int(table[request][column])
        return PADDING_SLOT if block == NULL_BLOCK else block * size + position % size

    return slot


@triton.jit
def dflash_inputs_before(
    next_token_ids,  # [R]
    target_positions,  # [N]
    query_start_loc,  # [R + 1]
    num_rejected,  # [R]
    block_table,  # [R, S]
    num_blocks,  # [R], not looked at here
    input_ids,  # [T]
    query_positions,  # [T]
    query_slots,  # [T]
    context_positions,  # [N]
    context_slots,  # [N]
    seq_lens,  # [R]
    sample_indices,  # [R * K]
    row_stride,
    num_reqs,
    num_padded,
    mask_token_id,
    block_size,
    max_model_len,
    num_columns,
    Q: tl.constexpr,
    BLOCK: tl.constexpr,
):
    request = tl.program_id(0)
    lane = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    first = tl.load(query_start_loc + request)
    end = tl.load(query_start_loc + request + 1)
    row = block_table + request * row_stride
    valid_end = end - tl.load(num_rejected + request)
    anchor = tl.load(target_positions + valid_end - 1)

    in_context = lane < end - first
    position = tl.load(target_positions + first + lane, mask=in_context, other=0)
    column = tl.minimum(position // block_size, num_columns - 1)
    block = tl.load(row + column, mask=in_context, other=0).to(tl.int64)
    tl.store(context_positions + first + lane, position, mask=in_context)
    tl.store(context_slots + first + lane, block * block_size + position % block_size, mask=in_context)

    in_query = lane < Q
    position = anchor + 1 + lane
    column = tl.minimum(position // block_size, num_columns - 1)
    block = tl.load(row + column, mask=in_query, other=0).to(tl.int64)
    query_row = request * Q + lane
    tl.store(query_positions + query_row, position, mask=in_query)
    tl.store(query_slots + query_row, block * block_size + position % block_size, mask=in_query)
    bonus = tl.load(next_token_ids + request)
    tl.store(input_ids + query_row, tl.where(lane == 0, bonus, mask_token_id), mask=in_query)
    tl.store(sample_indices + request * (Q - 1) + lane - 1, query_row, mask=in_query & (lane > 0))
    if tl.program_id(1) == 0:
        tl.store(seq_lens + request, anchor + 1 + Q)


@triton.jit
def dflash_inputs_after(
    next_token_ids,  # [R]
    target_positions,  # [N]
    query_start_loc,  # [R + 1]
    num_rejected,  # [R]
    block_table,  # [R, S]
    num_blocks,  # [R]
    input_ids,  # [T]
    query_positions,  # [T]
    query_slots,  # [T]
    context_positions,  # [N]
    context_slots,  # [N]
    seq_lens,  # [R]
    sample_indices,  # [R * K]
    row_stride,
    num_reqs,
    num_padded,
    mask_token_id,
    block_size,
    max_model_len,
    num_columns,
    Q: tl.constexpr,
    BLOCK: tl.constexpr,
):
    request = tl.program_id(0)
    lane = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    if request == num_reqs:
        pad = num_reqs * Q + lane
        in_tail = pad < num_padded  # guard: tail
        tl.store(input_ids + pad, 0, mask=in_tail)
        tl.store(query_positions + pad, 0, mask=in_tail)
        tl.store(query_slots + pad, -1, mask=in_tail)
        return
    first = tl.load(query_start_loc + request)
    end = tl.load(query_start_loc + request + 1)
    row = block_table + request * row_stride
    allocated = tl.load(num_blocks + request)
    valid_end = end - tl.load(num_rejected + request)
    has_anchor = valid_end > first  # guard: anchor
    anchor = tl.load(target_positions + valid_end - 1, mask=has_anchor, other=-1)

    in_context = lane < end - first
    is_valid = in_context & (first + lane < valid_end)  # guard: rejected
    position = tl.load(target_positions + first + lane, mask=is_valid, other=0)
    column = position // block_size
    has_block = is_valid & (position >= 0) & (column < allocated)  # guard: context column
    block = tl.load(row + column, mask=has_block, other=0).to(tl.int64)
    slot = tl.where(block != 0, block * block_size + position % block_size, -1)  # guard: context null
    tl.store(context_positions + first + lane, position, mask=in_context)
    tl.store(context_slots + first + lane, slot, mask=in_context)

    in_query = lane < Q
    position = tl.where(has_anchor, anchor + 1 + lane, 0)
    in_length = in_query & has_anchor & (position >= 0) & (position < max_model_len)  # guard: length
    column = position // block_size
    has_block = in_length & (column < allocated)  # guard: query column
    block = tl.load(row + column, mask=has_block, other=0).to(tl.int64)
    slot = tl.where(block != 0, block * block_size + position % block_size, -1)  # guard: query null
    query_row = request * Q + lane
    tl.store(query_positions + query_row, tl.minimum(position, max_model_len - 1), mask=in_query)
    tl.store(query_slots + query_row, slot, mask=in_query)
    bonus = tl.load(next_token_ids + request)
    tl.store(input_ids + query_row, tl.where(lane == 0, bonus, mask_token_id), mask=in_query)
    tl.store(sample_indices + request * (Q - 1) + lane - 1, query_row, mask=in_query & (lane > 0))
    if tl.program_id(1) == 0:
        length = tl.minimum(anchor + 1 + Q, max_model_len)
        tl.store(seq_lens + request, tl.where(has_anchor, length, 0))


KERNELS = {"before": dflash_inputs_before, "after": dflash_inputs_after}


def check(batch: DFlashBatch, out: DFlashInputs) -> None:
    """Raise BadInputError when shapes, dtypes or strides are not what the kernels index."""
    r, n, k = batch.num_reqs, batch.target_positions.shape[0], batch.num_speculative_tokens
    shapes = {
        "query_start_loc": (batch.query_start_loc, (r + 1,)),
        "num_rejected": (batch.num_rejected, (r,)),
        "num_blocks": (batch.num_blocks, (r,)),
        "context_positions": (out.context_positions, (n,)),
        "context_slots": (out.context_slots, (n,)),
        "seq_lens": (out.seq_lens, (r,)),
        "sample_indices": (out.sample_indices, (r * k,)),
        "query_positions": (out.query_positions, out.input_ids.shape),
        "query_slots": (out.query_slots, out.input_ids.shape),
    }
    for name, (tensor, shape) in shapes.items():
        if tensor.shape != shape or not tensor.is_contiguous():
            raise BadInputError(
                f"{name} must be contiguous of shape {tuple(shape)}, not {tuple(tensor.shape)}"
            )
    if batch.block_table.shape[0] < r or batch.block_table.stride(1) != 1:
        raise BadInputError(f"block_table must have {r} rows with contiguous columns")
    if out.input_ids.shape[0] < r * (k + 1):
        raise BadInputError(f"{out.input_ids.shape[0]} query rows cannot hold {r} requests of {k + 1}")


def launch(arm: Arm, batch: DFlashBatch, out: DFlashInputs, kernel: Any = None) -> None:
    """Write the inputs of one drafting step into `out`; `kernel` replaces the arm's (a mutant, in tests)."""
    check(batch, out)
    r, q, padded = batch.num_reqs, batch.num_query_per_req, out.input_ids.shape[0]
    lengths = batch.query_start_loc[1:] - batch.query_start_loc[:-1]
    widest = max(int(lengths.max()), q, padded - r * q)
    launch_for(arm, batch, out, widest, kernel)


def launch_for(arm: Arm, batch: DFlashBatch, out: DFlashInputs, widest: int, kernel: Any = None) -> None:
    """`launch` without reading the batch: `widest` bounds context rows, queries and tail of one program row."""
    r, q = batch.num_reqs, batch.num_query_per_req
    block = min(256, triton.next_power_of_2(widest))
    grid = (r + (arm == "after"), triton.cdiv(widest, block))
    (kernel or KERNELS[arm])[grid](
        batch.next_token_ids,
        batch.target_positions,
        batch.query_start_loc,
        batch.num_rejected,
        batch.block_table,
        batch.num_blocks,
        out.input_ids,
        out.query_positions,
        out.query_slots,
        out.context_positions,
        out.context_slots,
        out.seq_lens,
        out.sample_indices,
        batch.block_table.stride(0),
        r,
        out.input_ids.shape[0],
        batch.mask_token_id,
        batch.block_size,
        batch.max_model_len,
        batch.block_table.shape[1],
        Q=q,
        BLOCK=block,
    )
