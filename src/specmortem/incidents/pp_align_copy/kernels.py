"""Copies of recurrent state between cache blocks, as `mamba_cache_mode=align` makes them.

A recurrent layer keeps one state a cache block: a convolution window [W, D] and a temporal state. A request's row of
the block table names its blocks; the column of the block that it writes now is its running column. Three launches a
step, one entry a request *slot* in every counter:

- `preprocess`, before the forward: note where the state lies (`src_col`, `src_off` = accepted - 1), advance the running
  column, and reset the accepted count where the column moved;
- `precopy`, before the forward: state from `src_col` to the running column;
- `postcopy`, after sampling: where the accepted run contains a block boundary, state to the block that ends there.

Both copies shift the convolution window left by `bias` accepted tokens and take the temporal state from column
`src_col + bias`, where the state after that token was left.

The kernels have one guard a cause, off one at a time in `BEFORE` (released code: vllm/v1/worker/mamba_utils.py):

- `row`: which row of the table belongs to a request, see `fix`; the table itself is one of those of `AlignStates`;
- `snapshot`: accepted counts are read from a copy while programs reset them (in place up to 0.27.1, line 253);
- `ordered_shift`: a shift inside one block goes token by token (as one copy by several warps up to 0.28.0);
- `in_row`: a column outside the row is not used (never checked; mamba_hybrid.py:118 in 0.31.0 computes one with the
  block size of another group, right since 0.32.0);
- `skip_null`: block 0 is nobody's state (never checked up to 0.33.0).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import triton
import triton.language as tl

from specmortem._interpreter import mend
from specmortem.errors import BadInputError
from specmortem.incidents.pp_align_copy.fix import batch_row, request_slot

mend()

NULL_BLOCK = 0


@dataclass(frozen=True)
class Guards:
    """What a kernel takes care of; the defaults are `AFTER`."""

    row: Any = request_slot
    snapshot: bool = True
    ordered_shift: bool = True
    in_row: bool = True
    skip_null: bool = True


AFTER = Guards()
BEFORE: Mapping[str, Guards] = {
    "batch-row-index": replace(AFTER, row=batch_row),
    "accepted-written-in-place": replace(AFTER, snapshot=False),
    "overlapping-shift": replace(AFTER, ordered_shift=False),
    "seed-column-divisor": replace(AFTER, in_row=False),
    "null-block-copied": replace(AFTER, skip_null=False),
}


@dataclass(frozen=True)
class Tuning:
    """Programs a state, 8-byte words a program and turn, and warps of a copy launch; 0 tiles: by the largest state."""

    tiles: int = 0
    block: int = 1024
    num_warps: int = 4


@dataclass(frozen=True)
class RecurrentState:
    """A state of one layer: [blocks, ...]; a convolution window is [blocks, conv_width, D], 0 means temporal.

    The content of a block is contiguous; blocks may lie apart (`stride(0)` counts, as in padded pages).
    """

    tensor: torch.Tensor
    group: int = 0
    conv_width: int = 0

    def __post_init__(self) -> None:
        """Refuse a tensor whose blocks the kernels could not copy as runs of bytes."""
        t, shape = self.tensor, tuple(self.tensor.shape)
        if t.dim() < 2 or not t[0].is_contiguous():
            raise BadInputError(f"a state is [blocks, ...] with contiguous blocks, not {shape} {t.stride()}")
        if self.conv_width and (t.dim() != 3 or t.shape[1] != self.conv_width):
            raise BadInputError(f"a conv state of width {self.conv_width} is [blocks, width, D], not {shape}")

    @property
    def inner(self) -> int:
        """Elements of one token of a window, or of a whole temporal block."""
        return self.tensor[0].numel() // (self.conv_width or 1)


@dataclass(frozen=True)
class AlignStates:
    """Block tables, one int32 [rows, columns] a group, and states, flattened for the kernels.

    A row of `descriptors` has the table's address, its row stride and columns, and the state's address, bytes from
    block to block, bytes of one token and conv width. The tensors are held: addresses into them stay good.
    """

    tables: list[torch.Tensor]
    states: list[RecurrentState]
    descriptors: torch.Tensor = field(init=False)  # int64 [states, 7]

    def __post_init__(self) -> None:
        """Check that the tables are alike and that every state has one, and flatten."""
        self._check()
        rows = [self._descriptor(state) for state in self.states]
        descriptors = torch.tensor(rows, dtype=torch.int64, device=self.tables[0].device)
        object.__setattr__(self, "descriptors", descriptors)

    def _descriptor(self, state: RecurrentState) -> list[int]:
        table, tensor = self.tables[state.group], state.tensor
        of_table = [table.data_ptr(), table.stride(0), self.columns]
        size = tensor.element_size()
        return [*of_table, tensor.data_ptr(), tensor.stride(0) * size, state.inner * size, state.conv_width]

    def _check(self) -> None:
        if not self.tables or not self.states:
            raise BadInputError("AlignStates needs a table and a state")
        first = self.tables[0]
        for table in self.tables:
            if table.dtype != torch.int32 or table.dim() != 2 or table.stride(1) != 1:
                raise BadInputError(
                    f"a block table is int32 [rows, columns], not {table.dtype} {tuple(table.shape)}"
                )
            if table.shape != first.shape or table.stride() != first.stride():
                raise BadInputError("block tables of all groups need one shape and one stride")
        for number, state in enumerate(self.states):
            if not 0 <= state.group < len(self.tables):
                raise BadInputError(f"state {number} is of group {state.group}; there are {len(self.tables)}")
            if state.tensor.device != first.device:
                raise BadInputError(
                    f"state {number} is on {state.tensor.device}, the tables on {first.device}"
                )

    @property
    def columns(self) -> int:
        """Columns of every table."""
        return int(self.tables[0].shape[1])

    @property
    def widest(self) -> int:
        """Bytes of the largest block content."""
        return max(s.tensor[0].numel() * s.tensor.element_size() for s in self.states)


@dataclass(frozen=True)
class AlignCounters:
    """Per-slot bookkeeping, int32 [slots] each; `snapshot` is the copy of `num_accepted` that `postcopy` reads."""

    state_idx: torch.Tensor  # running column, -1: none yet
    num_computed: torch.Tensor  # before the step for preprocess, after it for postcopy
    num_accepted: torch.Tensor  # bonus token included
    src_col: torch.Tensor
    src_off: torch.Tensor
    snapshot: torch.Tensor

    @classmethod
    def empty(cls, slots: int, device: torch.device | str = "cpu") -> AlignCounters:
        """No request in any slot."""

        def full(value: int) -> torch.Tensor:
            return torch.full((slots,), value, dtype=torch.int32, device=device)

        return cls(full(-1), full(0), full(1), full(-1), full(0), full(1))

    def __post_init__(self) -> None:
        """Refuse anything but contiguous int32 vectors of one length."""
        for name, tensor in vars(self).items():
            if tensor.dtype != torch.int32 or tensor.dim() != 1 or not tensor.is_contiguous():
                raise BadInputError(f"{name} must be a contiguous int32 vector")
            if tensor.shape != self.state_idx.shape:
                raise BadInputError(f"{name} has {tensor.shape[0]} slots, not {self.state_idx.shape[0]}")


def seed_column(num_computed: int, block_size: int) -> int:
    """Running column of a request that starts with this many computed tokens; -1 without any.

    `block_size` is the tokens of a *state* block. A smaller one (of the attention groups, say) gives a column far
    past the row.
    """
    return (num_computed - 1) // block_size


@dataclass(frozen=True)
class StateCopy:
    """One copy: the request in slot `req_idx`, table `row` read for it, and what goes where in `state`.

    Copies of the same bytes are equal, whichever row told them.
    """

    req_idx: int
    row: int = field(compare=False)
    state: int
    src_col: int
    dst_col: int
    src_block: int
    dst_block: int
    bias: int


def reference_preprocess(
    counters: AlignCounters, idx_mapping: torch.Tensor, query_start_loc: torch.Tensor, block_size: int
) -> None:
    """Bookkeeping of one step, request by request; the contract of `preprocess`."""
    loc = query_start_loc.tolist()
    columns, counts, computed = (
        c.tolist() for c in (counters.state_idx, counters.num_accepted, counters.num_computed)
    )
    for batch, req_idx in enumerate(idx_mapping.tolist()):
        if req_idx < 0:
            continue
        old, accepted = columns[req_idx], counts[req_idx]
        after = computed[req_idx] + loc[batch + 1] - loc[batch]
        new = -(-after // block_size) - 1
        counters.src_col[req_idx], counters.src_off[req_idx] = old, max(accepted - 1, 0)
        counters.state_idx[req_idx] = new
        if old >= 0 and old != new:
            counters.num_accepted[req_idx] = 1


def plan_precopy(
    states: AlignStates, counters: AlignCounters, idx_mapping: torch.Tensor, row: Any = request_slot
) -> list[StateCopy]:
    """The copies before the forward; nothing is changed."""
    src, dst, bias = (c.tolist() for c in (counters.src_col, counters.state_idx, counters.src_off))
    moves = []
    for batch, req_idx in enumerate(idx_mapping.tolist()):
        if req_idx >= 0 and 0 <= src[req_idx] != dst[req_idx]:
            at = row.fn(batch, req_idx)
            moves += _moves(states, req_idx, at, src[req_idx], dst[req_idx], bias[req_idx])
    return moves


def plan_postcopy(
    states: AlignStates,
    counters: AlignCounters,
    idx_mapping: torch.Tensor,
    block_size: int,
    row: Any = request_slot,
) -> tuple[list[StateCopy], list[int]]:
    """The copies after sampling, and the slots whose accepted count goes back to 1; nothing is changed."""
    src, new, accepted = (
        c.tolist() for c in (counters.state_idx, counters.num_computed, counters.num_accepted)
    )
    moves, reset = [], []
    for batch, req_idx in enumerate(idx_mapping.tolist()):
        running = new[req_idx] - accepted[req_idx] + 1
        aligned = new[req_idx] // block_size * block_size
        if req_idx < 0 or aligned < running:
            continue
        dst_col, bias = aligned // block_size - 1, aligned - running
        if src[req_idx] == dst_col:
            reset.append(req_idx)
        moves += _moves(states, req_idx, row.fn(batch, req_idx), src[req_idx], dst_col, bias)
    return moves, reset


def _moves(
    states: AlignStates, req_idx: int, row: int, src_col: int, dst_col: int, bias: int
) -> list[StateCopy]:
    moves, columns = [], states.columns
    rows = [table[row].tolist() for table in states.tables]
    for number, state in enumerate(states.states):
        from_col, shift = (src_col, bias) if state.conv_width else (src_col + bias, 0)
        if not (0 <= from_col < columns and 0 <= dst_col < columns):
            continue
        src, dst = rows[state.group][from_col], rows[state.group][dst_col]
        if NULL_BLOCK not in (src, dst) and (src != dst or shift):
            moves.append(StateCopy(req_idx, row, number, from_col, dst_col, src, dst, shift))
    return moves


def perform(states: AlignStates, moves: list[StateCopy]) -> None:
    """Do the copies, one after the other."""
    for move in moves:
        state = states.states[move.state]
        source, target = state.tensor[move.src_block], state.tensor[move.dst_block]
        kept = state.conv_width - move.bias if state.conv_width else len(source)
        target[:kept] = source[move.bias : move.bias + kept].clone()


def reference_precopy(
    states: AlignStates, counters: AlignCounters, idx_mapping: torch.Tensor
) -> list[StateCopy]:
    """Copy before the forward, move by move; the contract of `precopy`."""
    moves = plan_precopy(states, counters, idx_mapping)
    perform(states, moves)
    return moves


def reference_postcopy(
    states: AlignStates, counters: AlignCounters, idx_mapping: torch.Tensor, block_size: int
) -> list[StateCopy]:
    """Copy after sampling, move by move, and reset accepted counts; the contract of `postcopy`."""
    moves, reset = plan_postcopy(states, counters, idx_mapping, block_size)
    perform(states, moves)
    counters.num_accepted[reset] = 1
    return moves


@triton.jit
def _move_bytes(src, dst, size, tile, TILES: tl.constexpr, BLOCK: tl.constexpr):
    """Copy `size` bytes from address to address: 8 a lane where both are aligned to 8, else single bytes.

    Each tile has a run of its own. Words of 16 bytes were up to 4 % slower on an H200 (see benchmarks/README.md).
    """
    lane = tl.arange(0, BLOCK)
    words = tl.where(((src | dst) & 7) == 0, size // 8, 0)
    from_words = src.to(tl.pointer_type(tl.int64))
    to_words = dst.to(tl.pointer_type(tl.int64))
    span = (words + TILES * BLOCK - 1) // (TILES * BLOCK) * BLOCK
    end = tl.minimum((tile + 1) * span, words)
    for start in range(tile * span, end, BLOCK):
        mask = start + lane < end
        tl.store(to_words + start + lane, tl.load(from_words + start + lane, mask=mask), mask=mask)
    from_bytes = src.to(tl.pointer_type(tl.uint8))
    to_bytes = dst.to(tl.pointer_type(tl.uint8))
    # Not `lane`: with lanes in common, bytes are loaded in the words' layout and change it through shared memory.
    byte = tl.arange(0, 2 * BLOCK)
    for start in range(words * 8 + tile * 2 * BLOCK, size, TILES * 2 * BLOCK):
        mask = start + byte < size
        tl.store(to_bytes + start + byte, tl.load(from_bytes + start + byte, mask=mask), mask=mask)


@triton.jit
def _copy_state(
    row,
    src_col,
    dst_col,
    bias,
    descriptors,
    ORDERED_SHIFT: tl.constexpr,
    IN_ROW: tl.constexpr,
    SKIP_NULL: tl.constexpr,
    TILES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Copy state program_id(1) of one request from column to column."""
    of_state, tile = descriptors + 7 * tl.program_id(1), tl.program_id(2)
    table = tl.load(of_state).to(tl.pointer_type(tl.int32)) + row.to(tl.int64) * tl.load(of_state + 1)
    columns = tl.load(of_state + 2).to(tl.int32)
    base, stride = tl.load(of_state + 3), tl.load(of_state + 4)
    unit, width = tl.load(of_state + 5), tl.load(of_state + 6).to(tl.int32)
    is_conv = width > 0
    from_col = tl.where(is_conv, src_col, src_col + bias)
    shift = tl.where(is_conv, bias, 0)
    in_row = (from_col >= 0) & (from_col < columns) & (dst_col >= 0) & (dst_col < columns)
    usable = in_row | (not IN_ROW)  # guard: in_row
    src_block = tl.load(table + from_col, mask=usable, other=0).to(tl.int64)
    dst_block = tl.load(table + dst_col, mask=usable, other=0).to(tl.int64)
    is_state = (src_block != 0) & (dst_block != 0)
    usable = usable & (is_state | (not SKIP_NULL))  # guard: skip_null
    if usable & ((src_block != dst_block) | (shift > 0)):
        src = base + src_block * stride + shift * unit
        dst = base + dst_block * stride
        count = tl.where(is_conv, width - shift, 1)
        if src_block != dst_block:
            _move_bytes(src, dst, count * unit, tile, TILES, BLOCK)
        elif tile == 0:
            if ORDERED_SHIFT:  # guard: ordered_shift
                for token in range(0, count):
                    _move_bytes(src + token * unit, dst + token * unit, unit, 0, 1, BLOCK)
                    tl.debug_barrier()
            else:
                _move_bytes(src, dst, count * unit, 0, 1, BLOCK)


@triton.jit
def preprocess_kernel(
    idx_mapping,  # [N] batch index -> req_idx, -1: nobody
    query_start_loc,  # [N + 1]
    state_idx,  # [slots], in and out
    num_computed,  # [slots]
    num_accepted,  # [slots], in and out
    src_col,  # [slots], out
    src_off,  # [slots], out
    num_reqs,
    block_size,
    BLOCK: tl.constexpr,
):
    batch = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    in_batch = batch < num_reqs
    req_idx = tl.load(idx_mapping + batch, mask=in_batch, other=-1)
    live = req_idx >= 0
    first = tl.load(query_start_loc + batch, mask=live, other=0)
    end = tl.load(query_start_loc + batch + 1, mask=live, other=0)
    old = tl.load(state_idx + req_idx, mask=live, other=-1)
    accepted = tl.load(num_accepted + req_idx, mask=live, other=1)
    after = tl.load(num_computed + req_idx, mask=live, other=0) + end - first
    new = (after + block_size - 1) // block_size - 1
    tl.store(src_col + req_idx, old, mask=live)
    tl.store(src_off + req_idx, tl.maximum(accepted - 1, 0), mask=live)
    tl.store(state_idx + req_idx, new, mask=live)
    tl.store(num_accepted + req_idx, 1, mask=live & (old >= 0) & (old != new))


@triton.jit
def precopy_kernel(
    idx_mapping,  # [N]
    state_idx,  # [slots], running column
    src_col,  # [slots]
    src_off,  # [slots]
    descriptors,  # [states, 7]
    ROW: tl.constexpr,  # of `fix`: batch row and request slot -> row of the table
    ORDERED_SHIFT: tl.constexpr,
    IN_ROW: tl.constexpr,
    SKIP_NULL: tl.constexpr,
    TILES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    batch = tl.program_id(0)
    req_idx = tl.load(idx_mapping + batch)
    if req_idx >= 0:
        row = ROW(batch, req_idx)  # guard: row of precopy
        source, target = tl.load(src_col + req_idx), tl.load(state_idx + req_idx)
        if (source >= 0) & (source != target):
            bias = tl.load(src_off + req_idx)
            _copy_state(
                row, source, target, bias, descriptors, ORDERED_SHIFT, IN_ROW, SKIP_NULL, TILES, BLOCK
            )


@triton.jit
def postcopy_kernel(
    idx_mapping,  # [N]
    state_idx,  # [slots], running column of the step that was sampled
    num_computed,  # [slots], that step included
    accepted_in,  # [slots]
    accepted_out,  # [slots]
    block_size,
    descriptors,  # [states, 7]
    ROW: tl.constexpr,  # of `fix`: batch row and request slot -> row of the table
    ORDERED_SHIFT: tl.constexpr,
    IN_ROW: tl.constexpr,
    SKIP_NULL: tl.constexpr,
    TILES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    batch = tl.program_id(0)
    req_idx = tl.load(idx_mapping + batch)
    if req_idx >= 0:
        row = ROW(batch, req_idx)  # guard: row of postcopy
        new = tl.load(num_computed + req_idx)
        running = new - tl.load(accepted_in + req_idx) + 1
        aligned = new // block_size * block_size
        if aligned >= running:
            source, target = tl.load(state_idx + req_idx), aligned // block_size - 1
            if (source == target) & (tl.program_id(1) == 0) & (tl.program_id(2) == 0):
                tl.store(accepted_out + req_idx, 1)
            bias = aligned - running
            _copy_state(
                row, source, target, bias, descriptors, ORDERED_SHIFT, IN_ROW, SKIP_NULL, TILES, BLOCK
            )


def preprocess(
    counters: AlignCounters, idx_mapping: torch.Tensor, query_start_loc: torch.Tensor, block_size: int
) -> None:
    """Advance the bookkeeping of the slots in `idx_mapping` [N] by `query_start_loc` [N + 1]; see the module."""
    n, c = _check_batch(idx_mapping), counters
    if query_start_loc.shape != (n + 1,) or not query_start_loc.is_contiguous():
        raise BadInputError(f"query_start_loc must be [{n + 1}], not {list(query_start_loc.shape)}")
    vectors = (c.state_idx, c.num_computed, c.num_accepted, c.src_col, c.src_off)
    preprocess_kernel[(triton.cdiv(n, 256),)](
        idx_mapping, query_start_loc, *vectors, n, block_size, BLOCK=256
    )


def precopy(
    states: AlignStates,
    counters: AlignCounters,
    idx_mapping: torch.Tensor,
    guards: Guards = AFTER,
    tuning: Tuning | None = None,
    kernel: Any = None,
) -> None:
    """Copy before the forward; `kernel` replaces the kernel (a mutant, in tests)."""
    arguments = (counters.state_idx, counters.src_col, counters.src_off)
    _launch(kernel or precopy_kernel, states, counters, idx_mapping, arguments, guards, tuning)


def postcopy(
    states: AlignStates,
    counters: AlignCounters,
    idx_mapping: torch.Tensor,
    block_size: int,
    guards: Guards = AFTER,
    tuning: Tuning | None = None,
    kernel: Any = None,
) -> None:
    """Copy after sampling and reset accepted counts; `kernel` replaces the kernel (a mutant, in tests)."""
    c, read = counters, counters.num_accepted
    if guards.snapshot:  # guard: snapshot
        read = c.snapshot.copy_(c.num_accepted)
    arguments = (c.state_idx, c.num_computed, read, c.num_accepted, block_size)
    _launch(kernel or postcopy_kernel, states, counters, idx_mapping, arguments, guards, tuning)


def _launch(
    kernel: Any,
    states: AlignStates,
    counters: AlignCounters,
    idx_mapping: torch.Tensor,
    arguments: tuple[Any, ...],
    guards: Guards,
    tuning: Tuning | None,
) -> None:
    n, rows = _check_batch(idx_mapping), states.tables[0].shape[0]
    needed = n if guards.row is batch_row else counters.state_idx.shape[0]
    if rows < needed:
        raise BadInputError(
            f"block tables have {rows} rows; indexed by {guards.row.__name__} they need {needed}"
        )
    chosen = tuning or Tuning()
    tiles = chosen.tiles or min(16, triton.cdiv(states.widest, 8 * chosen.block))
    kernel[(n, len(states.states), tiles)](
        idx_mapping,
        *arguments,
        states.descriptors,
        ROW=guards.row,
        ORDERED_SHIFT=guards.ordered_shift,
        IN_ROW=guards.in_row,
        SKIP_NULL=guards.skip_null,
        TILES=tiles,
        BLOCK=chosen.block,
        num_warps=chosen.num_warps,
    )


def _check_batch(idx_mapping: torch.Tensor) -> int:
    if idx_mapping.dim() != 1 or not idx_mapping.is_contiguous() or idx_mapping.is_floating_point():
        raise BadInputError(f"idx_mapping must be a contiguous integer vector, not {list(idx_mapping.shape)}")
    if idx_mapping.shape[0] == 0:
        raise BadInputError("idx_mapping is empty; skip the launch of an empty batch")
    return int(idx_mapping.shape[0])
