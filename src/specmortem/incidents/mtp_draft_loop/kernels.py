"""Split-KV decode attention: a planner on the host, partial and merge kernels, and the plan's way to the GPU.

The keys of each request are cut into chunks of equal size so that all chunks together fill the GPU; one
program computes a partial result for a chunk, and a second kernel merges the partial results of a request by
their log-sum-exps. What runs where is decided on the host and sent as one block of integer arrays, the
*plan*. The block is filled by the CPU, copied to the GPU in one asynchronous copy, and the kernels are
launched with the byte offsets of the arrays inside it as scalars. Layout and search are those of FlashInfer's
planner for tensor-core decode (include/flashinfer/attention/scheduler.cuh in flashinfer-python 0.6.6: chunk
search :101-130, split :496-614, arrays and copy :694-797; allocator.h:38-60 aligns them): with 1 query token
a request,

- a chunk is the least number of pages, at least max(128 // page_size, 1), with which
  P = sum(ceil(pages / chunk)) <= 2 * num_sms // num_kv_heads;
- the arrays request_indices[P], qo_tile_indices[P], kv_tile_indices[P], o_indptr[B + 1], kv_chunk_size[1],
  merge_indptr[B + 1] (int32) and block_valid_mask[P] (bytes) follow each other, each at a multiple of 16
  bytes but kv_chunk_size. So every offset but the first depends on P;
- `constant` (CUDA graphs there) pads P to its maximum, which makes the offsets independent of the lengths.

Releases 0.6.6 and 0.6.16.post3 lay out alike; 0.7.2.post1 has the mask in padded plans only, and a smaller
float workspace.

The kernels index as the originals do (prefill.cuh:2065-2405, cascade.cuh:368-460): row counts and element
offsets are unsigned and 32 bits wide, so a merge_indptr that descends by x makes a request walk 2**32 - x
rows.

Where a plan waits for its copy is the incident: `fix`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import triton
import triton.language as tl
from torch import Tensor

from specmortem._interpreter import mend
from specmortem.errors import BadInputError

mend()

ALIGNMENT = 16
MIN_CHUNK_TOKENS = 128
LOG2_E = 1.4426950408889634
# A specialized offset would compile a kernel anew for every layout.
OFFSETS = ["request_at", "qo_tile_at", "kv_tile_at", "o_indptr_at", "chunk_at", "mask_at", "merge_indptr_at"]
PARTIAL_READS = ("request_indices", "qo_tile_indices", "kv_tile_indices", "o_indptr", "kv_chunk_size")
Array = npt.NDArray[Any]


@dataclass(frozen=True)
class Geometry:
    """What a plan depends on beside the lengths.

    Raises BadInputError for heads that do not divide, more than 64 query heads a KV head, or fewer CTAs than
    KV heads.
    """

    num_sms: int
    num_qo_heads: int
    num_kv_heads: int
    head_dim: int
    page_size: int = 16
    constant: bool = False

    def __post_init__(self) -> None:
        """Refuse what the planner cannot lay out."""
        if min(self.num_sms, self.num_qo_heads, self.num_kv_heads, self.head_dim, self.page_size) < 1:
            raise BadInputError(f"{self}: give positive numbers")
        if self.num_qo_heads % self.num_kv_heads or self.group_size > 64:
            raise BadInputError(
                f"{self.num_qo_heads} query heads over {self.num_kv_heads} KV heads: "
                "give a multiple of at most 64"
            )
        if self.max_chunks < 1:
            raise BadInputError(f"{self.num_sms} SMs give no CTA to {self.num_kv_heads} KV heads; give more")

    @property
    def group_size(self) -> int:
        """Query heads of one KV head."""
        return self.num_qo_heads // self.num_kv_heads

    @property
    def cta_tile_q(self) -> int:
        """Query rows a program is laid out for; sizes the float workspace (utils.cuh:384-403)."""
        return 16 if self.group_size <= 16 else 64

    @property
    def max_chunks(self) -> int:
        """Most chunks of all requests together, where a chunk size allows it: two CTAs an SM."""
        return 2 * self.num_sms // self.num_kv_heads

    @property
    def min_chunk_pages(self) -> int:
        """Least pages of a chunk."""
        return max(MIN_CHUNK_TOKENS // self.page_size, 1)


@dataclass(frozen=True)
class Plan:
    """One plan: arrays, and where each begins in the block (bytes). The offsets are launch arguments.

    `arrays` are int32, the mask uint8; `num_chunks` are live, `num_padded` are launched. Geometry and page counts
    determine all else.
    """

    geometry: Geometry
    page_counts: tuple[int, ...]
    split: bool = field(compare=False)
    num_chunks: int = field(compare=False)
    num_padded: int = field(compare=False)
    offsets: dict[str, int] = field(compare=False)
    arrays: dict[str, Array] = field(compare=False)
    nbytes: int = field(compare=False)

    @property
    def num_reqs(self) -> int:
        """Requests, and rows of the output."""
        return len(self.page_counts)

    @property
    def chunk_tokens(self) -> int:
        """Tokens of a chunk."""
        return int(self.arrays["kv_chunk_size"][0])

    @property
    def s_offset(self) -> int:
        """Bytes from the start of the float workspace to the log-sum-exps, which follow the partial values."""
        g = self.geometry
        return 4 * g.num_qo_heads * self.num_padded * g.cta_tile_q * g.head_dim

    @property
    def float_bytes(self) -> int:
        """Bytes of float workspace that the plan asks for; 0 without a split."""
        g = self.geometry
        return self.s_offset + 4 * g.num_qo_heads * self.num_padded * g.cta_tile_q if self.split else 0

    @cached_property
    def image(self) -> npt.NDArray[np.uint8]:
        """The block, with zeros between the arrays."""
        block = np.zeros(self.nbytes, dtype=np.uint8)
        self.fill(block)
        return block

    @cached_property
    def _bytes(self) -> tuple[Array, Array]:
        """Every byte that the arrays occupy: its place in the block, and its value."""
        parts = {start: self.arrays[name].view(np.uint8) for name, start in self.offsets.items()}
        places = [np.arange(start, start + part.size) for start, part in parts.items()]
        return np.concatenate(places), np.concatenate(list(parts.values()))

    def fill(self, block: Any) -> None:
        """Write the arrays into a block of bytes (numpy, or a host buffer) in one access; what is between them stays.

        Raises BadInputError when the block is too short.
        """
        if len(block) < self.nbytes:
            raise BadInputError(f"a plan of {self.nbytes} bytes does not fit into {len(block)}; give more")
        places, values = self._bytes
        block[places] = values

    def seen_in(self, block: npt.NDArray[np.uint8]) -> dict[str, Array]:
        """What kernels launched with this plan's offsets read from a block that may hold another plan."""
        return {
            name: block[start : start + self.arrays[name].nbytes].view(self.arrays[name].dtype)
            for name, start in self.offsets.items()
        }

    def is_in(self, block: npt.NDArray[np.uint8]) -> bool:
        """Whether a block holds this plan; what is between the arrays does not count."""
        return all(np.array_equal(part, self.arrays[name]) for name, part in self.seen_in(block).items())


class Planner:
    """Plans by number of pages; equal batches give the same `Plan` object."""

    def __init__(self, geometry: Geometry) -> None:
        self.geometry = geometry
        self._known: dict[tuple[int, ...], Plan] = {}

    def pages(self, seq_lens: Sequence[int] | Array) -> tuple[int, ...]:
        """Pages that sequences of these lengths occupy."""
        return tuple(-(-int(length) // self.geometry.page_size) for length in seq_lens)

    def plan(self, seq_lens: Sequence[int] | Array) -> Plan:
        """The plan for these lengths in tokens. Raises BadInputError for no request or a negative length."""
        counts = self.pages(seq_lens)
        if not counts or min(counts) < 0:
            raise BadInputError(f"sequence lengths {list(seq_lens)}: give at least one, none negative")
        if counts not in self._known:
            self._known[counts] = _planned(self.geometry, counts)
        return self._known[counts]


def chunk_pages(geometry: Geometry, page_counts: Sequence[int]) -> tuple[bool, int]:
    """Whether to split, and the pages of a chunk.

    When even the longest request in one chunk leaves more than `max_chunks`, the search ends there.
    """
    counts = np.maximum(np.asarray(page_counts, dtype=np.int64), 1)
    low, high = geometry.min_chunk_pages, int(counts.max())
    longest = high
    while low < high:
        middle = (low + high) // 2
        if int((-(-counts // middle)).sum()) > geometry.max_chunks:
            low = middle + 1
        else:
            high = middle
    return geometry.constant or low < longest, low


def _planned(geometry: Geometry, page_counts: tuple[int, ...]) -> Plan:
    split, pages = chunk_pages(geometry, page_counts)
    chunks = -(-np.maximum(np.array(page_counts), 1) // pages)
    live, batch = int(chunks.sum()), len(page_counts)
    padded = _padded(geometry, batch) if geometry.constant else live
    indptr = np.concatenate([[0], np.cumsum(chunks)]).astype(np.int32)
    arrays: dict[str, Array] = {
        "request_indices": np.repeat(np.arange(batch), chunks).astype(np.int32),
        "qo_tile_indices": np.zeros(live, np.int32),
        "kv_tile_indices": np.concatenate([np.arange(n) for n in chunks]).astype(np.int32),
        "o_indptr": indptr,
        "kv_chunk_size": np.array([pages * geometry.page_size], np.int32),
        "total_num_rows": np.array([batch], np.int32),
        "merge_indptr": indptr,
        "block_valid_mask": (np.arange(padded) < live).astype(np.uint8),
    }
    offsets, nbytes = _layout(geometry, split, batch, padded)
    named = {name: arrays[name] for name in offsets}
    return Plan(geometry, page_counts, split, live, padded, offsets, named, nbytes)


def _padded(geometry: Geometry, batch: int) -> int:
    tiles = -(-batch * geometry.group_size // geometry.cta_tile_q) + batch - 1
    return max(geometry.max_chunks, tiles)


def _layout(geometry: Geometry, split: bool, batch: int, padded: int) -> tuple[dict[str, int], int]:
    """Byte offsets of the arrays in the order of allocation, and the bytes that are copied."""
    per_chunk = ("request_indices", "qo_tile_indices", "kv_tile_indices")
    sizes = [(name, 4 * padded, ALIGNMENT) for name in per_chunk]
    sizes += [("o_indptr", 4 * (batch + 1), ALIGNMENT), ("kv_chunk_size", 4, 1)]
    if geometry.constant:
        sizes.append(("total_num_rows", 4, ALIGNMENT))
    if split:
        sizes += [("merge_indptr", 4 * (batch + 1), ALIGNMENT), ("block_valid_mask", padded, ALIGNMENT)]
    offsets, end = {}, 0
    for name, size, alignment in sizes:
        offsets[name] = -(-end // alignment) * alignment
        end = offsets[name] + size
    return offsets, end


@triton.jit(do_not_specialize=OFFSETS[:-1])
def partial_kernel(
    q,  # [B, H, D]
    kv,  # [slots, 2, KVH, D]
    block_table,  # [B, columns]
    seq_lens,  # [B]
    plan,  # the block as int32 words
    plan_bytes,  # the same block
    values,  # [rows, H, D]: partial values, or the output where the plan does not split
    sums,  # [rows, H]: base-2 log-sum-exps
    row_stride,
    request_at,
    qo_tile_at,
    kv_tile_at,
    o_indptr_at,
    chunk_at,
    mask_at,
    scale,
    H: tl.constexpr,
    KVH: tl.constexpr,
    G: tl.constexpr,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    PAGE: tl.constexpr,
    TOKENS: tl.constexpr,
    SPLIT: tl.constexpr,
    MASKED: tl.constexpr,
):
    p = tl.program_id(0)
    head = tl.program_id(1) * GROUP + tl.arange(0, G)
    d = tl.arange(0, D)
    live = p >= 0
    if MASKED:
        live = tl.load(plan_bytes + mask_at + p) != 0
    request = tl.load(plan + request_at + p, mask=live, other=0)
    live = live & (tl.load(plan + qo_tile_at + p, mask=live, other=0) == 0)
    kv_tile = tl.load(plan + kv_tile_at + p, mask=live, other=0).to(tl.int64)
    chunk = tl.load(plan + chunk_at).to(tl.int64)
    length = tl.load(seq_lens + request, mask=live, other=0).to(tl.int64)
    start = tl.minimum((kv_tile * chunk) & 0xFFFFFFFF, length)
    end = tl.minimum(((kv_tile + 1) * chunk) & 0xFFFFFFFF, length)

    in_group = live & (tl.arange(0, G) < GROUP)
    query = tl.load(q + (request * H + head)[:, None] * D + d[None, :], mask=in_group[:, None], other=0.0)
    best = tl.full((G,), float("-inf"), tl.float32)
    total = tl.zeros((G,), tl.float32)
    value = tl.zeros((G, D), tl.float32)
    for first in range(start, end, TOKENS):
        position = first + tl.arange(0, TOKENS)
        ok = position < end
        block = tl.load(block_table + request * row_stride + position // PAGE, mask=ok, other=0).to(tl.int64)
        row = (block * PAGE + position % PAGE) * 2 * KVH + tl.program_id(1)
        keys = tl.load(kv + row[:, None] * D + d[None, :], mask=ok[:, None], other=0.0)
        vals = tl.load(kv + (row + KVH)[:, None] * D + d[None, :], mask=ok[:, None], other=0.0)
        scores = tl.sum(query[:, None, :] * keys[None, :, :], 2) * scale
        scores = tl.where(ok[None, :], scores, float("-inf"))
        top = tl.maximum(best, tl.max(scores, 1))
        weights = tl.exp2(scores - top[:, None])
        decay = tl.exp2(best - top)
        total = total * decay + tl.sum(weights, 1)
        value = value * decay[:, None] + tl.sum(weights[:, :, None] * vals[None, :, :], 1)
        best = top
    some = tl.where(total > 0, total, 1.0)

    row = tl.load(plan + o_indptr_at + request, mask=live, other=0).to(tl.int64)
    if SPLIT:
        row = row + kv_tile
        at = ((row * H) & 0xFFFFFFFF) + head
        tl.store(sums + at, best + tl.log2(some), mask=in_group)
    at = ((row * H * D) & 0xFFFFFFFF) + head * D
    tl.store(values + at[:, None] + d[None, :], value / some[:, None], mask=in_group[:, None])


@triton.jit(do_not_specialize=OFFSETS[-1:])
def merge_kernel(
    values,  # [rows, H, D]
    sums,  # [rows, H]
    plan,  # the block as int32 words
    out,  # [B, H, D]
    merge_indptr_at,
    H: tl.constexpr,
    D: tl.constexpr,
    ROWS: tl.constexpr,
):
    request = tl.program_id(0)
    head = tl.program_id(1)
    d = tl.arange(0, D)
    low = tl.load(plan + merge_indptr_at + request).to(tl.int64)
    high = tl.load(plan + merge_indptr_at + request + 1).to(tl.int64)
    count = (high - low) & 0xFFFFFFFF
    best = tl.full((1,), float("-inf"), tl.float32)
    total = tl.zeros((1,), tl.float32)
    value = tl.zeros((D,), tl.float32)
    for first in range(0, count, ROWS):
        step = first + tl.arange(0, ROWS)
        ok = step < count
        at = (((low + step) & 0xFFFFFFFF) * H + head) & 0xFFFFFFFF
        lse = tl.load(sums + at, mask=ok, other=float("-inf"))
        rows = tl.load(values + ((at * D) & 0xFFFFFFFF)[:, None] + d[None, :], mask=ok[:, None], other=0.0)
        top = tl.maximum(best, tl.max(lse, 0))
        base = tl.where(top == float("-inf"), 0.0, top)
        weights = tl.exp2(lse - base)
        decay = tl.exp2(best - base)
        total = total * decay + tl.sum(weights, 0)
        value = value * decay + tl.sum(weights[:, None] * rows, 0)
        best = top
    some = tl.where(total > 0, total, 1.0)
    tl.store(out + (request * H + head) * D + d, value / some)


@triton.jit
def page_indices_kernel(
    page_indices,  # [pages of all requests]
    block_table,  # [B, columns]
    row_pointers,  # [B + 1]
    row_stride,
    columns,
    BLOCK: tl.constexpr,
):
    request = tl.program_id(0)
    begin = tl.load(row_pointers + request)
    count = tl.load(row_pointers + request + 1) - begin
    for first in range(0, count, BLOCK):
        column = first + tl.arange(0, BLOCK)
        ok = column < count
        known = ok & (column < columns)
        block = tl.load(block_table + request * row_stride + column, mask=known, other=0)
        tl.store(page_indices + begin + column, block, mask=ok)


def partial(
    plan: Plan,
    q: Tensor,
    kv: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    ints: Tensor,
    floats: Tensor,
    out: Tensor,
    tokens: int = 32,
) -> None:
    """Partial results of all chunks into the float workspace; without a split the output itself.

    q and out [B, H, D]; kv [slots, 2, KVH, D] holds keys and values; block_table int32 [B, columns]; seq_lens int32
    [B]; all others float32, and contiguous but for the rows of block_table. `ints` uint8 [capacity] is the block that
    plans are copied to, `floats` float32 [elements] has room for partial results. `tokens` of a chunk are loaded at a
    time. What is computed is what `ints` says, whatever plan it holds.
    """
    g, at = plan.geometry, plan.offsets
    _check(plan, block_table, ints, floats, q=q, kv=kv, seq_lens=seq_lens, out=out)
    values = floats if plan.split else out
    indices = (at[name] // 4 for name in PARTIAL_READS)
    partial_kernel[(plan.num_padded, g.num_kv_heads)](
        *(q, kv, block_table, seq_lens, ints.view(torch.int32), ints, values),
        floats[plan.s_offset // 4 :] if plan.split else floats,
        block_table.stride(0),
        *indices,
        at.get("block_valid_mask", 0),
        LOG2_E / g.head_dim**0.5,
        H=g.num_qo_heads,
        KVH=g.num_kv_heads,
        G=triton.next_power_of_2(g.group_size),
        GROUP=g.group_size,
        D=g.head_dim,
        PAGE=g.page_size,
        TOKENS=tokens,
        SPLIT=plan.split,
        MASKED=g.constant,
    )


def merge(plan: Plan, ints: Tensor, floats: Tensor, out: Tensor, rows: int = 8) -> None:
    """Merge partial results into `out` [B, H, D] as `ints` says, `rows` at a time; nothing without a split."""
    if not plan.split:
        return
    g = plan.geometry
    merge_kernel[(plan.num_reqs, g.num_qo_heads)](
        *(floats, floats[plan.s_offset // 4 :], ints.view(torch.int32), out),
        plan.offsets["merge_indptr"] // 4,
        H=g.num_qo_heads,
        D=g.head_dim,
        ROWS=rows,
    )


def gather_pages(block_table: Tensor, row_pointers: Tensor, page_indices: Tensor) -> None:
    """Page ids of all requests one after the other, as vLLM's builder of this backend gathers them before it plans.

    block_table int32 [B, columns]; row_pointers int32 [B + 1]; page_indices int32, at least row_pointers[B] long.
    A page after the last column is 0. Not a copy of its kernel (flashinfer.py:2638 in vLLM 0.28.0): what matters
    here is that it stands in the stream.
    """
    page_indices_kernel[(row_pointers.numel() - 1,)](
        page_indices, block_table, row_pointers, block_table.stride(0), block_table.shape[1], BLOCK=1024
    )


def _check(plan: Plan, block_table: Tensor, ints: Tensor, floats: Tensor, **named: Tensor) -> None:
    g, b = plan.geometry, plan.num_reqs
    if plan.nbytes > ints.numel() or plan.float_bytes > 4 * floats.numel():
        raise BadInputError(
            f"a plan of {plan.nbytes} bytes with {plan.float_bytes} bytes of partial results does not "
            f"fit into workspaces of {ints.numel()} and {4 * floats.numel()} bytes; give more"
        )
    if g.head_dim & (g.head_dim - 1):
        raise BadInputError(f"head size {g.head_dim} is no power of two; the kernels need one")
    queries = (b, g.num_qo_heads, g.head_dim)
    cache = (named["kv"].shape[0], 2, g.num_kv_heads, g.head_dim)
    shapes = {"q": queries, "out": queries, "seq_lens": (b,), "kv": cache}
    for name, shape in shapes.items():
        found = named[name]
        if tuple(found.shape) != shape or not found.is_contiguous():
            raise BadInputError(f"{name} must be contiguous of shape {shape}, not {tuple(found.shape)}")
    if block_table.shape[0] < b or block_table.stride(1) != 1:
        raise BadInputError(f"block_table must have {b} rows with contiguous columns")
