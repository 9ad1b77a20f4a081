"""First-pass inputs of a DFlash proposer: context and query positions, slots, ids, sample indices.

A drafting step of request r reads its context rows [query_start_loc[r], query_start_loc[r + 1]) of the target's
positions; the last `num_rejected[r]` of them belong to rejected tokens. After the last valid position come
Q = 1 + num_speculative_tokens query tokens: the bonus token and the masks. Every position maps to a slot of the draft's
KV cache through the request's row of the block table, and the graph that runs next writes keys and values there.

`before` does what the V1 kernel of vLLM does (`copy_and_expand_dflash_inputs_kernel`, vllm/v1/spec_decode/utils.py:459
in 0.22.1, the same body from 0.20.1 to 0.33.0). What `after` decides otherwise is in fix.py, by its guards:

1. anchor: a request whose context was rejected whole has no valid position; its queries get position 0 and no slot;
2. rejected: rejected context rows get position 0 and no slot (V2 from 0.28.0 on);
3. column: a position after the allocated blocks of its request, or before the first, gets no slot;
4. null: block 0 is the null block and never a slot (V2 from 0.28.0 on);
5. length: positions end at max_model_len - 1 and what would come after it gets no slot;
6. tail: the padded rows that a captured graph replays get no slot (V1: by a fill on the host side since 0.20.1).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from specmortem.errors import BadInputError
from specmortem.incidents.dflash_oob.fix import (
    context_after,
    context_before,
    padding_after,
    queries_after,
    queries_before,
    slot_reference,
)
from specmortem.kernels import Arm

PADDING_SLOT = -1


@dataclass(frozen=True)
class DFlashInputs:
    """What one launch writes, in the order of the kernel's arguments.

    N context rows, R requests, Q = 1 + K queries a request, T padded query rows.
    """

    input_ids: torch.Tensor  # int32 [T]
    query_positions: torch.Tensor  # int64 [T]
    query_slot_mapping: torch.Tensor  # int64 [T]
    context_positions: torch.Tensor  # int64 [N]
    context_slot_mapping: torch.Tensor  # int64 [N]
    seq_lens: torch.Tensor  # int32 [R]
    sample_indices: torch.Tensor  # int32 [R * K]

    @staticmethod
    def sizes(
        num_context: int, num_reqs: int, num_speculative_tokens: int, num_padded: int
    ) -> dict[str, int]:
        """Elements of each buffer: N, R, K and T as above."""
        queries = dict.fromkeys(("input_ids", "query_positions", "query_slot_mapping"), num_padded)
        context = dict.fromkeys(("context_positions", "context_slot_mapping"), num_context)
        samples = num_reqs * num_speculative_tokens
        return {**queries, **context, "seq_lens": num_reqs, "sample_indices": samples}

    @classmethod
    def empty(cls, *sizes: int, device: str = "cpu", poison: int = -77) -> DFlashInputs:
        """Buffers of a launch, of these `sizes`, filled with `poison` so that what is not written shows."""
        dtypes = dict.fromkeys(("input_ids", "seq_lens", "sample_indices"), torch.int32)
        made = {
            name: torch.full((size,), poison, dtype=dtypes.get(name, torch.int64), device=device)
            for name, size in cls.sizes(*sizes).items()
        }
        return cls(**made)

    def live(self, *sizes: int) -> DFlashInputs:
        """The first elements of each buffer: the part of persistent ones that a batch of these `sizes` uses."""
        return DFlashInputs(**{name: getattr(self, name)[:n] for name, n in self.sizes(*sizes).items()})


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

    @classmethod
    def of(
        cls,
        contexts: list[list[int]],
        block_table: torch.Tensor,
        *,
        num_rejected: list[int] | None = None,
        num_blocks: list[int] | None = None,
        next_token_ids: list[int] | None = None,
        device: str = "cpu",
        **sizes: int,
    ) -> DFlashBatch:
        """A batch from each request's context positions, with the four sizes by name.

        By default nothing is rejected, every row of the table is allocated whole, and the bonus tokens are 1 … R.
        """
        r = len(contexts)

        def i32(values: list[int]) -> torch.Tensor:
            return torch.tensor(values, dtype=torch.int32, device=device)

        return cls(
            next_token_ids=i32(next_token_ids or list(range(1, 1 + r))),
            target_positions=torch.tensor(sum(contexts, []), device=device),
            query_start_loc=i32([sum(map(len, contexts[:i])) for i in range(r + 1)]),
            num_rejected=i32(num_rejected or [0] * r),
            block_table=block_table.to(device),
            num_blocks=i32(num_blocks or [block_table.shape[1]] * r),
            **sizes,
        )

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        """All but the sizes, in the order of the kernel's arguments."""
        return {name: value for name, value in vars(self).items() if isinstance(value, torch.Tensor)}

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
    table, allocated = batch.block_table.tolist(), batch.num_blocks.tolist()
    out: dict[str, list[int]] = {name: [] for name in DFlashInputs.__dataclass_fields__}

    def slot(r: int, position: int) -> int:
        return slot_reference(table[r], allocated[r], position, batch.block_size, limit)

    for r in range(batch.num_reqs):
        valid_end = starts[r + 1] - rejected[r]
        for row in range(starts[r], starts[r + 1]):
            out["context_positions"].append(positions[row] if row < valid_end else 0)
            out["context_slot_mapping"].append(slot(r, positions[row]) if row < valid_end else PADDING_SLOT)
        anchor = positions[valid_end - 1] if valid_end > starts[r] else None
        out["seq_lens"].append(0 if anchor is None else min(anchor + 1 + q, limit))
        for offset in range(q):
            position = 0 if anchor is None else anchor + 1 + offset
            out["query_positions"].append(min(position, limit - 1))
            out["query_slot_mapping"].append(PADDING_SLOT if anchor is None else slot(r, position))
            out["input_ids"].append(bonus[r] if offset == 0 else batch.mask_token_id)
        out["sample_indices"] += range(r * q + 1, r * q + 1 + k)
    tail = num_padded - batch.num_reqs * q
    for name, padding in (("input_ids", 0), ("query_positions", 0), ("query_slot_mapping", PADDING_SLOT)):
        out[name] += [padding] * tail
    empty = vars(DFlashInputs.empty(len(positions), batch.num_reqs, k, num_padded))
    return DFlashInputs(**{name: torch.tensor(v, dtype=empty[name].dtype) for name, v in out.items()})


@triton.jit
def dflash_inputs_kernel(
    next_token_ids,  # [R]
    target_positions,  # [N]
    query_start_loc,  # [R + 1]
    num_rejected,  # [R]
    block_table,  # [R, S]
    num_blocks,  # [R], not looked at before the fix
    input_ids,  # [T]
    query_positions,  # [T]
    query_slot_mapping,  # [T]
    context_positions,  # [N]
    context_slot_mapping,  # [N]
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
    FIXED: tl.constexpr,
):
    request = tl.program_id(0)
    offset = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    query_row = request * Q + offset
    if FIXED:
        if request == num_reqs:
            padding_after(input_ids, query_positions, query_slot_mapping, query_row, num_padded)
            return
    first = tl.load(query_start_loc + request)
    end = tl.load(query_start_loc + request + 1)
    valid_end = end - tl.load(num_rejected + request)
    row = block_table + request * row_stride
    at = first + offset
    if FIXED:
        allocated = tl.load(num_blocks + request)
        position, slot = context_after(target_positions, row, at, end, valid_end, allocated, block_size)
        query_position, query_slot, seq_len = queries_after(
            target_positions, row, offset, first, valid_end, allocated, block_size, max_model_len, Q
        )
    else:
        position, slot = context_before(target_positions, row, at, end, valid_end, num_columns, block_size)
        query_position, query_slot, seq_len = queries_before(
            target_positions, row, offset, first, valid_end, num_columns, block_size, max_model_len, Q
        )
    tl.store(context_positions + at, position, mask=at < end)
    tl.store(context_slot_mapping + at, slot, mask=at < end)
    tl.store(query_positions + query_row, query_position, mask=offset < Q)
    tl.store(query_slot_mapping + query_row, query_slot, mask=offset < Q)
    bonus = tl.load(next_token_ids + request)
    tl.store(input_ids + query_row, tl.where(offset == 0, bonus, mask_token_id), mask=offset < Q)
    is_mask = (offset > 0) & (offset < Q)
    tl.store(sample_indices + request * (Q - 1) + offset - 1, query_row, mask=is_mask)
    if tl.program_id(1) == 0:
        tl.store(seq_lens + request, seq_len)


def check(batch: DFlashBatch, out: DFlashInputs) -> None:
    """Raise BadInputError when shapes, dtypes or strides are not what the kernels index."""
    r, n, k = batch.num_reqs, batch.target_positions.shape[0], batch.num_speculative_tokens
    sizes = {"query_start_loc": r + 1, "num_rejected": r, "num_blocks": r}
    sizes |= DFlashInputs.sizes(n, r, k, out.input_ids.shape[0])
    tensors = vars(batch) | vars(out)
    for name, size in sizes.items():
        if tensors[name].shape != (size,) or not tensors[name].is_contiguous():
            found = tuple(tensors[name].shape)
            raise BadInputError(f"{name} must be contiguous of shape {(size,)}, not {found}")
    if batch.block_table.shape[0] < r or batch.block_table.stride(1) != 1:
        raise BadInputError(f"block_table must have {r} rows with contiguous columns")
    if out.input_ids.shape[0] < r * (k + 1):
        raise BadInputError(f"{out.input_ids.shape[0]} query rows cannot hold {r} requests of {k + 1}")


def launch(arm: Arm, batch: DFlashBatch, out: DFlashInputs) -> None:
    """Write the inputs of one drafting step into `out`. Raises BadInputError as `check` does."""
    check(batch, out)
    r, q, padded = batch.num_reqs, batch.num_query_per_req, out.input_ids.shape[0]
    lengths = batch.query_start_loc[1:] - batch.query_start_loc[:-1]
    launch_for(arm, batch, out, widest=max(int(lengths.max()), q, padded - r * q))


def launch_for(arm: Arm, batch: DFlashBatch, out: DFlashInputs, widest: int) -> None:
    """`launch` without reading the batch: `widest` bounds context rows, queries and tail of one program row."""
    block = min(256, triton.next_power_of_2(widest))
    fixed = arm == "after"
    dflash_inputs_kernel[(batch.num_reqs + fixed, triton.cdiv(widest, block))](
        *batch.tensors.values(),
        *vars(out).values(),
        batch.block_table.stride(0),
        batch.num_reqs,
        out.input_ids.shape[0],
        batch.mask_token_id,
        batch.block_size,
        batch.max_model_len,
        batch.block_table.shape[1],
        Q=batch.num_query_per_req,
        BLOCK=block,
        FIXED=fixed,
    )
