"""The fix: which position and slot a row gets. `before` is what the released V1 kernel decides, `after` has six guards.

A request without a valid position has no anchor (1), a rejected context row no slot (2), nor has a position outside
the allocated columns (3), in the null block 0 (4), or past max_model_len (5); padded rows get none either (6).
The lookup of recurrent states is fixed by a bound on its count: `gated_delta_before` and `gated_delta_after` (LOOKUP).
"""

import triton
import triton.language as tl

from specmortem.kernels.gated_delta_state import gated_delta_after, gated_delta_before

LOOKUP = {"before": gated_delta_before, "after": gated_delta_after}


def slot_reference(row: list[int], allocated: int, position: int, block_size: int, max_model_len: int) -> int:
    """The slot of a position in a request's row of the block table, -1 where it has none; the contract of `after`."""
    column = position // block_size
    if not 0 <= position < max_model_len or column >= allocated or row[column] == 0:
        return -1
    return row[column] * block_size + position % block_size


@triton.jit
def slots_before(row, position, live, num_columns, block_size):
    column = tl.minimum(position // block_size, num_columns - 1)
    block = tl.load(row + column, mask=live, other=0).to(tl.int64)
    return block * block_size + position % block_size


@triton.jit
def slots_after(row, position, live, allocated, block_size):
    column = position // block_size
    in_row = live & (position >= 0) & (column < allocated)  # guard 3
    block = tl.load(row + column, mask=in_row, other=0).to(tl.int64)
    return tl.where(block != 0, block * block_size + position % block_size, -1)  # guard 4


@triton.jit
def context_before(target_positions, row, at, end, valid_end, num_columns, block_size):
    position = tl.load(target_positions + at, mask=at < end, other=0)
    return position, slots_before(row, position, at < end, num_columns, block_size)


@triton.jit
def context_after(target_positions, row, at, end, valid_end, allocated, block_size):
    is_valid = at < valid_end  # guard 2
    position = tl.load(target_positions + at, mask=is_valid, other=0)
    return position, slots_after(row, position, is_valid, allocated, block_size)


@triton.jit
def queries_before(
    target_positions, row, offset, first, valid_end, num_columns, block_size, max_model_len, Q
):
    anchor = tl.load(target_positions + valid_end - 1)
    position = anchor + 1 + offset
    return position, slots_before(row, position, offset < Q, num_columns, block_size), anchor + 1 + Q


@triton.jit
def queries_after(target_positions, row, offset, first, valid_end, allocated, block_size, max_model_len, Q):
    has_anchor = valid_end > first  # guard 1
    anchor = tl.load(target_positions + valid_end - 1, mask=has_anchor, other=-1)
    position = tl.where(has_anchor, anchor + 1 + offset, 0)
    in_length = (offset < Q) & has_anchor & (position < max_model_len)  # guard 5
    slot = slots_after(row, position, in_length, allocated, block_size)
    seq_len = tl.where(has_anchor, tl.minimum(anchor + 1 + Q, max_model_len), 0)
    return tl.minimum(position, max_model_len - 1), slot, seq_len


@triton.jit
def padding_after(input_ids, query_positions, query_slot_mapping, row, num_padded):
    in_tail = row < num_padded  # guard 6
    tl.store(input_ids + row, 0, mask=in_tail)
    tl.store(query_positions + row, 0, mask=in_tail)
    tl.store(query_slot_mapping + row, -1, mask=in_tail)
