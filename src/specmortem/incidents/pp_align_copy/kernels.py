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

- `row`: a table with one row a request slot is read at the slot. Up to 0.31.0 the row is the batch index, into a table
  that every step gathers anew (479 and 613 in 0.31.0; since 0.32.0 481 and 612, and mamba_hybrid.py:175 binds the
  persistent table). Row and table are chosen apart here: `Guards.row`, and the tables that `AlignStates` is given;
- `snapshot`: accepted counts are read from a copy while programs reset them (in place up to 0.27.1, line 253);
- `ordered_shift`: a shift inside one block goes token by token (as one copy by several warps up to 0.28.0);
- `in_row`: a column outside the row is not used (never checked; mamba_hybrid.py:118 in 0.31.0 computes one with the
  block size of another group, right since 0.32.0);
- `skip_null`: block 0 is nobody's state (never checked up to 0.33.0).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from math import gcd, prod
from typing import Any, Literal

import torch
import triton
import triton.language as tl

from specmortem._interpreter import mend
from specmortem.errors import BadInputError

mend()

NULL_BLOCK = 0
Row = Literal["batch", "slot"]


@dataclass(frozen=True)
class Guards:
    """What a kernel takes care of; the defaults are `AFTER`."""

    row: Row = "slot"
    snapshot: bool = True
    ordered_shift: bool = True
    in_row: bool = True
    skip_null: bool = True


AFTER = Guards()
BEFORE: Mapping[str, Guards] = {
    "batch-row-index": replace(AFTER, row="batch"),
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
class State:
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

    The tensors are held: addresses into them stay good. `block_strides` counts bytes.
    """

    tables: list[torch.Tensor]
    states: list[State]
    table_ptrs: torch.Tensor = field(init=False)  # int64 [groups]
    bases: torch.Tensor = field(init=False)  # int64 [states]
    block_strides: torch.Tensor = field(init=False)  # int64 [states]
    elem_sizes: torch.Tensor = field(init=False)  # int32 [states]
    inner_sizes: torch.Tensor = field(init=False)  # int64 [states]
    conv_widths: torch.Tensor = field(init=False)  # int32 [states]
    groups: torch.Tensor = field(init=False)  # int32 [states]

    def __post_init__(self) -> None:
        """Check that the tables are alike and that every state has one, and flatten."""
        self._check()
        tensors = [s.tensor for s in self.states]
        columns: dict[str, tuple[torch.dtype, list[int]]] = {
            "table_ptrs": (torch.int64, [t.data_ptr() for t in self.tables]),
            "bases": (torch.int64, [t.data_ptr() for t in tensors]),
            "block_strides": (torch.int64, [t.stride(0) * t.element_size() for t in tensors]),
            "elem_sizes": (torch.int32, [t.element_size() for t in tensors]),
            "inner_sizes": (torch.int64, [s.inner for s in self.states]),
            "conv_widths": (torch.int32, [s.conv_width for s in self.states]),
            "groups": (torch.int32, [s.group for s in self.states]),
        }
        for name, (dtype, values) in columns.items():
            object.__setattr__(self, name, torch.tensor(values, dtype=dtype, device=self.tables[0].device))

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
class Counters:
    """Per-slot bookkeeping, int32 [slots] each; `snapshot` is the copy of `num_accepted` that `postcopy` reads."""

    state_idx: torch.Tensor  # running column, -1: none yet
    num_computed: torch.Tensor  # before the step for preprocess, after it for postcopy
    num_accepted: torch.Tensor  # bonus token included
    src_col: torch.Tensor
    src_off: torch.Tensor
    snapshot: torch.Tensor

    @classmethod
    def empty(cls, slots: int, device: torch.device | str = "cpu") -> Counters:
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
    behind the row.
    """
    return (num_computed - 1) // block_size


@dataclass(frozen=True)
class Move:
    """One copy: request `slot`, table `row` read for it, and what goes where in `state`."""

    slot: int
    row: int
    state: int
    src_col: int
    dst_col: int
    src_block: int
    dst_block: int
    bias: int


def reference_preprocess(
    counters: Counters, idx_mapping: torch.Tensor, query_start_loc: torch.Tensor, block_size: int
) -> None:
    """Bookkeeping of one step, request by request; the contract of `preprocess`."""
    loc = query_start_loc.tolist()
    columns, counts, computed = (
        c.tolist() for c in (counters.state_idx, counters.num_accepted, counters.num_computed)
    )
    for batch, slot in enumerate(idx_mapping.tolist()):
        if slot < 0:
            continue
        old, accepted = columns[slot], counts[slot]
        after = computed[slot] + loc[batch + 1] - loc[batch]
        new = -(-after // block_size) - 1
        counters.src_col[slot], counters.src_off[slot] = old, max(accepted - 1, 0)
        counters.state_idx[slot] = new
        if old >= 0 and old != new:
            counters.num_accepted[slot] = 1


def plan_precopy(
    states: AlignStates, counters: Counters, idx_mapping: torch.Tensor, row: Row = "slot"
) -> list[Move]:
    """The copies before the forward; nothing is changed."""
    src, dst, bias = (c.tolist() for c in (counters.src_col, counters.state_idx, counters.src_off))
    moves = []
    for batch, slot in enumerate(idx_mapping.tolist()):
        if slot >= 0 and 0 <= src[slot] != dst[slot]:
            at = slot if row == "slot" else batch
            moves += _moves(states, slot, at, src[slot], dst[slot], bias[slot])
    return moves


def plan_postcopy(
    states: AlignStates, counters: Counters, idx_mapping: torch.Tensor, block_size: int, row: Row = "slot"
) -> tuple[list[Move], list[int]]:
    """The copies after sampling, and the slots whose accepted count goes back to 1; nothing is changed."""
    src, new, accepted = (
        c.tolist() for c in (counters.state_idx, counters.num_computed, counters.num_accepted)
    )
    moves, reset = [], []
    for batch, slot in enumerate(idx_mapping.tolist()):
        running = new[slot] - accepted[slot] + 1
        aligned = new[slot] // block_size * block_size
        if slot < 0 or aligned < running:
            continue
        dst_col, bias = aligned // block_size - 1, aligned - running
        if src[slot] == dst_col:
            reset.append(slot)
        moves += _moves(states, slot, slot if row == "slot" else batch, src[slot], dst_col, bias)
    return moves, reset


def _moves(states: AlignStates, slot: int, row: int, src_col: int, dst_col: int, bias: int) -> list[Move]:
    moves = []
    for number, state in enumerate(states.states):
        from_col, shift = (src_col, bias) if state.conv_width else (src_col + bias, 0)
        if not (0 <= from_col < states.columns and 0 <= dst_col < states.columns):
            continue
        table = states.tables[state.group]
        ids = table[row].tolist()
        src, dst = ids[from_col], ids[dst_col]
        if NULL_BLOCK not in (src, dst) and (src != dst or shift):
            moves.append(Move(slot, row, number, from_col, dst_col, src, dst, shift))
    return moves


def perform(states: AlignStates, moves: list[Move]) -> None:
    """Do the copies, one after the other."""
    for move in moves:
        state = states.states[move.state]
        source, target = state.tensor[move.src_block], state.tensor[move.dst_block]
        kept = state.conv_width - move.bias if state.conv_width else len(source)
        target[:kept] = source[move.bias : move.bias + kept].clone()


def reference_precopy(
    states: AlignStates, counters: Counters, idx_mapping: torch.Tensor, row: Row = "slot"
) -> list[Move]:
    """Copy before the forward, move by move; the contract of `precopy`."""
    moves = plan_precopy(states, counters, idx_mapping, row)
    perform(states, moves)
    return moves


def reference_postcopy(
    states: AlignStates, counters: Counters, idx_mapping: torch.Tensor, block_size: int, row: Row = "slot"
) -> list[Move]:
    """Copy after sampling, move by move, and reset accepted counts; the contract of `postcopy`."""
    moves, reset = plan_postcopy(states, counters, idx_mapping, block_size, row)
    perform(states, moves)
    for slot in reset:
        counters.num_accepted[slot] = 1
    return moves


@dataclass(frozen=True)
class ShiftOrders:
    """Every order in which warps can take their loads and stores of one shift inside a block.

    `example` is one of the wrong orders: (warp, "load" or "store", first byte, bytes) a step.
    """

    orders: int
    wrong: int
    example: tuple[tuple[int, str, int, int], ...] = ()


def shift_orders(
    width: int, bias: int, token_bytes: int, *, warps: int = 4, warp_bytes: int = 512, ordered: bool = False
) -> ShiftOrders:
    """Enumerate the shift of a window [width, token_bytes] to the left by `bias` tokens.

    A warp moves `warp_bytes` with one load and one store and takes its own steps in order; warps do not wait for
    each other. `ordered` goes token by token, else the window is one run of bytes.
    Raises BadInputError when there is too much to enumerate.
    """
    if not 0 <= bias < width or min(token_bytes, warps, warp_bytes) < 1:
        raise BadInputError(f"a shift of {width} tokens of {token_bytes} bytes by {bias} is no shift")
    grain = gcd(token_bytes, warp_bytes)
    run = token_bytes if ordered else (width - bias) * token_bytes
    programs = _warp_steps(width - bias, bias * token_bytes, run, token_bytes, warps, warp_bytes)
    if (found := prod(len(p) + 1 for p in programs)) > 100_000:
        raise BadInputError(f"{found} states are too many to enumerate; use fewer warps or a smaller window")
    return _Orders(programs, width * token_bytes // grain, bias * token_bytes // grain, grain).count()


_Step = tuple[str, int, int]


def _warp_steps(
    tokens: int, shift: int, run: int, token_bytes: int, warps: int, warp_bytes: int
) -> list[list[_Step]]:
    """For each warp its loads and stores (kind, first byte, bytes), over runs of `run` bytes."""
    programs: list[list[_Step]] = [[] for _ in range(warps)]
    for start in range(0, tokens * token_bytes, run):
        for number, at in enumerate(range(start, start + run, warp_bytes)):
            size = min(warp_bytes, start + run - at)
            programs[number % warps] += [("load", at + shift, size), ("store", at, size)]
    return programs


class _Orders:
    """Counts paths through (steps taken, memory, registers), each such state once."""

    def __init__(self, programs: list[list[_Step]], grains: int, shift: int, grain: int) -> None:
        self.programs, self.grain = programs, grain
        self.memory = tuple(range(grains))
        self.right = self.memory[shift:] + self.memory[grains - shift :]
        self.known: dict[Any, ShiftOrders] = {}

    def count(self) -> ShiftOrders:
        """All orders from the beginning."""
        return self._from((0,) * len(self.programs), self.memory, ((),) * len(self.programs))

    def _from(self, taken: tuple[int, ...], memory: Any, registers: Any) -> ShiftOrders:
        state = taken, memory, registers
        if state not in self.known:
            self.known[state] = self._branch(taken, memory, registers)
        return self.known[state]

    def _branch(self, taken: tuple[int, ...], memory: Any, registers: Any) -> ShiftOrders:
        orders = wrong = 0
        example: tuple[tuple[int, str, int, int], ...] = ()
        for warp, program in enumerate(self.programs):
            if taken[warp] < len(program):
                kind, first, size = program[taken[warp]]
                rest = self._from(*self._step(warp, kind, first, size, taken, memory, registers))
                orders, wrong = orders + rest.orders, wrong + rest.wrong
                if rest.wrong and not example:
                    example = ((warp, kind, first, size), *rest.example)
        if orders:
            return ShiftOrders(orders, wrong, example)
        return ShiftOrders(1, int(memory != self.right))

    def _step(
        self, warp: int, kind: str, first: int, size: int, taken: tuple[int, ...], memory: Any, registers: Any
    ) -> tuple[tuple[int, ...], Any, Any]:
        at, end = first // self.grain, (first + size) // self.grain
        held = memory[at:end] if kind == "load" else ()
        if kind == "store":
            memory = memory[:at] + registers[warp] + memory[end:]
        taken = (*taken[:warp], taken[warp] + 1, *taken[warp + 1 :])
        return taken, memory, (*registers[:warp], held, *registers[warp + 1 :])


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
    table_ptrs,
    row_stride,
    columns,
    bases,
    block_strides,
    elem_sizes,
    inner_sizes,
    conv_widths,
    groups,
    ORDERED_SHIFT: tl.constexpr,
    IN_ROW: tl.constexpr,
    SKIP_NULL: tl.constexpr,
    TILES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Copy state program_id(1) of one request from column to column."""
    state, tile = tl.program_id(1), tl.program_id(2)
    width = tl.load(conv_widths + state)
    is_conv = width > 0
    from_col = tl.where(is_conv, src_col, src_col + bias)
    shift = tl.where(is_conv, bias, 0)
    in_row = (from_col >= 0) & (from_col < columns) & (dst_col >= 0) & (dst_col < columns)
    usable = in_row | (not IN_ROW)  # guard: in_row
    base, stride = tl.load(bases + state), tl.load(block_strides + state)
    unit = tl.load(inner_sizes + state) * tl.load(elem_sizes + state)
    table = tl.load(table_ptrs + tl.load(groups + state)).to(tl.pointer_type(tl.int32))
    table += row.to(tl.int64) * row_stride
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
    idx_mapping,  # [N] batch index -> slot, -1: nobody
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
    slot = tl.load(idx_mapping + batch, mask=in_batch, other=-1)
    live = slot >= 0
    first = tl.load(query_start_loc + batch, mask=live, other=0)
    end = tl.load(query_start_loc + batch + 1, mask=live, other=0)
    old = tl.load(state_idx + slot, mask=live, other=-1)
    accepted = tl.load(num_accepted + slot, mask=live, other=1)
    after = tl.load(num_computed + slot, mask=live, other=0) + end - first
    new = (after + block_size - 1) // block_size - 1
    tl.store(src_col + slot, old, mask=live)
    tl.store(src_off + slot, tl.maximum(accepted - 1, 0), mask=live)
    tl.store(state_idx + slot, new, mask=live)
    tl.store(num_accepted + slot, 1, mask=live & (old >= 0) & (old != new))


@triton.jit
def precopy_kernel(
    idx_mapping,  # [N]
    state_idx,  # [slots], running column
    src_col,  # [slots]
    src_off,  # [slots]
    table_ptrs,
    row_stride,
    columns,
    bases,
    block_strides,
    elem_sizes,
    inner_sizes,
    conv_widths,
    groups,
    BY_SLOT: tl.constexpr,
    ORDERED_SHIFT: tl.constexpr,
    IN_ROW: tl.constexpr,
    SKIP_NULL: tl.constexpr,
    TILES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    batch = tl.program_id(0)
    slot = tl.load(idx_mapping + batch)
    if slot >= 0:
        row = slot if BY_SLOT else batch  # guard: row of precopy
        source, target = tl.load(src_col + slot), tl.load(state_idx + slot)
        if (source >= 0) & (source != target):
            _copy_state(
                row,
                source,
                target,
                tl.load(src_off + slot),
                table_ptrs,
                row_stride,
                columns,
                bases,
                block_strides,
                elem_sizes,
                inner_sizes,
                conv_widths,
                groups,
                ORDERED_SHIFT,
                IN_ROW,
                SKIP_NULL,
                TILES,
                BLOCK,
            )


@triton.jit
def postcopy_kernel(
    idx_mapping,  # [N]
    state_idx,  # [slots], running column of the step that was sampled
    num_computed,  # [slots], that step included
    accepted_in,  # [slots]
    accepted_out,  # [slots]
    block_size,
    table_ptrs,
    row_stride,
    columns,
    bases,
    block_strides,
    elem_sizes,
    inner_sizes,
    conv_widths,
    groups,
    BY_SLOT: tl.constexpr,
    ORDERED_SHIFT: tl.constexpr,
    IN_ROW: tl.constexpr,
    SKIP_NULL: tl.constexpr,
    TILES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    batch = tl.program_id(0)
    slot = tl.load(idx_mapping + batch)
    if slot >= 0:
        row = slot if BY_SLOT else batch  # guard: row of postcopy
        new = tl.load(num_computed + slot)
        running = new - tl.load(accepted_in + slot) + 1
        aligned = new // block_size * block_size
        if aligned >= running:
            source, target = tl.load(state_idx + slot), aligned // block_size - 1
            if (source == target) & (tl.program_id(1) == 0) & (tl.program_id(2) == 0):
                tl.store(accepted_out + slot, 1)
            _copy_state(
                row,
                source,
                target,
                aligned - running,
                table_ptrs,
                row_stride,
                columns,
                bases,
                block_strides,
                elem_sizes,
                inner_sizes,
                conv_widths,
                groups,
                ORDERED_SHIFT,
                IN_ROW,
                SKIP_NULL,
                TILES,
                BLOCK,
            )


def preprocess(
    counters: Counters,
    idx_mapping: torch.Tensor,
    query_start_loc: torch.Tensor,
    block_size: int,
    kernel: Any = None,
) -> None:
    """Advance the bookkeeping of the slots in `idx_mapping` [N] by `query_start_loc` [N + 1]; see the module."""
    n = _check_batch(idx_mapping)
    if query_start_loc.shape != (n + 1,) or not query_start_loc.is_contiguous():
        raise BadInputError(f"query_start_loc must be [{n + 1}], not {list(query_start_loc.shape)}")
    c = counters
    (kernel or preprocess_kernel)[(triton.cdiv(n, 256),)](
        idx_mapping,
        query_start_loc,
        c.state_idx,
        c.num_computed,
        c.num_accepted,
        c.src_col,
        c.src_off,
        n,
        block_size,
        BLOCK=256,
    )


def precopy(
    states: AlignStates,
    counters: Counters,
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
    counters: Counters,
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
    counters: Counters,
    idx_mapping: torch.Tensor,
    arguments: tuple[Any, ...],
    guards: Guards,
    tuning: Tuning | None,
) -> None:
    n, rows = _check_batch(idx_mapping), states.tables[0].shape[0]
    needed = n if guards.row == "batch" else counters.state_idx.shape[0]
    if rows < needed:
        raise BadInputError(f"block tables have {rows} rows; indexed by {guards.row} they need {needed}")
    chosen = tuning or Tuning()
    tiles = chosen.tiles or min(16, triton.cdiv(states.widest, 8 * chosen.block))
    kernel[(n, len(states.states), tiles)](
        idx_mapping,
        *arguments,
        states.table_ptrs,
        states.tables[0].stride(0),
        states.columns,
        states.bases,
        states.block_strides,
        states.elem_sizes,
        states.inner_sizes,
        states.conv_widths,
        states.groups,
        BY_SLOT=guards.row == "slot",
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
