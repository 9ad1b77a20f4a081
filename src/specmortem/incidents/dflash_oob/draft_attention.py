"""The draft's forward, small: keys and values written at slots, and attention over a paged cache.

A row of the cache [slots, 8] holds a function of the token's id and position, so that a write to a wrong slot shows.
Attention is the mean of a request's rows, which depends on every slot that it reads.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from specmortem._interpreter import mend
from specmortem.errors import BadInputError

mend()

HEAD_DIM = 8


@triton.jit
def write_kv(kv, slots, ids, positions, D: tl.constexpr):
    """Store the key/value row of one token at its slot; a negative slot is padding."""
    row = tl.program_id(0)
    slot = tl.load(slots + row)
    if slot >= 0:
        d = tl.arange(0, D)
        value = tl.load(ids + row) * 0.001 + tl.load(positions + row) + d * 0.125
        tl.store(kv + slot * D + d, value)


@triton.jit
def attend_kernel(
    kv,
    block_table,
    seq_lens,
    out,
    row_stride,
    block_size,
    num_columns,
    num_reqs,
    num_rows,
    Q: tl.constexpr,
    Q_BLOCK: tl.constexpr,
    B: tl.constexpr,
    D: tl.constexpr,
):
    """Mean of the cached rows of a request, which each of its queries gets: out[row] = mean of kv over its sequence."""
    request = tl.program_id(0)
    d = tl.arange(0, D)
    total = tl.zeros((D,), tl.float32)
    length = 0
    if request < num_reqs:
        length = tl.load(seq_lens + request)
    for start in range(0, length, B):
        position = start + tl.arange(0, B)
        column = tl.minimum(position // block_size, num_columns - 1)
        live = position < length
        block = tl.load(block_table + request * row_stride + column, mask=live, other=0).to(tl.int64)
        slot = block * block_size + position % block_size
        rows = tl.load(kv + slot[:, None] * D + d[None, :], mask=(live & (block != 0))[:, None], other=0.0)
        total += tl.sum(rows, 0)
    query = tl.arange(0, Q_BLOCK)
    row = request * Q + query
    mean = (total / tl.maximum(length, 1))[None, :]
    tl.store(out + row[:, None] * D + d[None, :], mean, mask=((query < Q) & (row < num_rows))[:, None])


def write(kv: torch.Tensor, slots: torch.Tensor, ids: torch.Tensor, positions: torch.Tensor) -> None:
    """Store a row for each slot [rows] that is not negative; kv is float32 [slots, 8]."""
    if kv.dim() != 2 or kv.shape[1] != HEAD_DIM or not slots.shape == ids.shape == positions.shape:
        raise BadInputError(f"kv must be [slots, {HEAD_DIM}]; slots, ids and positions of one shape")
    write_kv[(slots.shape[0],)](kv, slots, ids, positions, D=HEAD_DIM)


def attend(
    kv: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    out: torch.Tensor,
    block_size: int,
    num_reqs: int,
    num_query_per_req: int,
) -> None:
    """Write float32 [rows, 8]; rows of requests from `num_reqs` on are zeros."""
    known = min(seq_lens.shape[0], block_table.shape[0])
    if out.dim() != 2 or out.shape[1] != HEAD_DIM or known < num_reqs:
        raise BadInputError(
            f"{num_reqs} requests need as many rows of block_table and seq_lens, and out [rows, {HEAD_DIM}]"
        )
    q, rows = num_query_per_req, out.shape[0]
    sizes = (block_table.stride(0), block_size, block_table.shape[1], num_reqs, rows)
    constants = {"Q": q, "Q_BLOCK": triton.next_power_of_2(q), "B": 64, "D": HEAD_DIM}
    attend_kernel[(triton.cdiv(rows, q),)](kv, block_table, seq_lens, out, *sizes, **constants)
