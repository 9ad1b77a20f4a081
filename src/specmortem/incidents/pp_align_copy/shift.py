"""Arms of incident `pp-align-copy` that need a GPU to show: the shift inside one block, and the column past the row.

Every function takes JSON-able arguments, runs in a process of its own and returns a dictionary. An arm is `before`,
`after`, or a release such as "vllm==0.28.0", whose own kernels and launchers are lifted and run.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch

from specmortem import upstream
from specmortem.errors import BadInputError
from specmortem.incidents.pp_align_copy import kernels as align_copy
from specmortem.incidents.pp_align_copy import probe
from specmortem.incidents.pp_align_copy.kernels import (
    AFTER,
    BEFORE,
    AlignCounters,
    AlignStates,
    RecurrentState,
    Tuning,
)
from specmortem.upstream.vllm_files import MAMBA

BLOCK_SIZE = 64  # tokens; a window of more has biases of up to 63
BYTES_PER_LAUNCH = 256 << 20
KERNEL_WIDTH = 4  # of the convolution: a window has KERNEL_WIDTH - 1 + K tokens
SHAPES = (
    ("bfloat16", 96, 5),
    ("bfloat16", 100, 5),
    ("float32", 33, 6),
    ("bfloat16", 1021, 7),
    ("bfloat16", 256, 4),
    ("float32", 512, 7),
    ("bfloat16", 4096, 5),
    ("bfloat16", 8192, 6),
    ("float32", 6144, 8),
)


class ReleasedCopies:
    """`precopy` and `postcopy` of a release over `states`, through its own launchers: grid, tiles and block are its.

    The methods of its copy context are lifted; in place of that context stand the addresses of `states`. Windows are
    [width, inner], not the other way round.
    Raises upstream.NotPresentError where the release has no such method.
    """

    def __init__(self, tree: upstream.Tree, states: AlignStates, slots: int, block_size: int) -> None:
        where, number = states.descriptors.device, len(states.states)
        self.states = states  # held: the kernels have addresses only
        tensors = [s.tensor for s in states.states]
        bases, strides = states.descriptors[:, 3].contiguous(), states.descriptors[:, 4].contiguous()

        def column(dtype: torch.dtype, values: list[int]) -> torch.Tensor:
            return torch.tensor(values, dtype=dtype, device=where)

        self.context = SimpleNamespace(
            is_initialized=True,
            num_states=number,
            num_layers=number,  # up to 0.28.0 the product of these two
            num_state_types=1,
            block_size=block_size,
            num_accepted_tokens_out=torch.zeros(slots, dtype=torch.int32, device=where),
            block_table_ptrs=column(torch.int64, [t.data_ptr() for t in states.tables]),
            block_table_stride_req=states.tables[0].stride(0),
            state_base_addrs=bases,
            state_block_strides=strides,
            state_elem_sizes=column(torch.int32, [t.element_size() for t in tensors]),
            state_inner_sizes=column(torch.int64, [s.inner for s in states.states]),
            state_conv_widths=column(torch.int32, [s.conv_width for s in states.states]),
            state_group_indices=column(torch.int32, [s.group for s in states.states]),
            state_dim_row_count=torch.zeros(number, dtype=torch.int32, device=where),
            state_dim_row_stride=torch.zeros(number, dtype=torch.int64, device=where),
        )
        self._pre, self._post = (
            upstream.lift_method(
                tree,
                MAMBA,
                f"MambaSpecDecodeGPUContext.{name}",
                provide={"is_conv_state_dim_first": lambda: False},
            ).function
            for name in ("run_fused_precopy", "run_fused_postprocess_align")
        )

    def precopy(self, c: AlignCounters, idx_mapping: torch.Tensor) -> None:
        """The copies before the forward."""
        self._pre(self.context, len(idx_mapping), c.state_idx, c.src_col, c.src_off, idx_mapping)

    def postcopy(self, c: AlignCounters, idx_mapping: torch.Tensor) -> None:
        """The copies after sampling, and the reset of accepted counts."""
        self._post(self.context, len(idx_mapping), c.num_accepted, c.state_idx, c.num_computed, idx_mapping)


class WindowShape(NamedTuple):
    """A convolution window [width, inner]."""

    dtype: str
    inner: int
    width: int

    @property
    def torch_dtype(self) -> torch.dtype:
        """Of the elements."""
        return {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}[self.dtype]

    @property
    def token_bytes(self) -> int:
        """Bytes of one token of the window."""
        return self.inner * self.torch_dtype.itemsize

    @property
    def most(self) -> int:
        """K, the largest bias."""
        return self.width - KERNEL_WIDTH + 1

    def check(self) -> WindowShape:
        """Raises BadInputError for a window that cannot be shifted."""
        known = self.dtype in ("bfloat16", "float16", "float32")
        if not (known and self.inner > 0 and KERNEL_WIDTH <= self.width < BLOCK_SIZE):
            raise BadInputError(
                f"shape {list(self)}: give bfloat16, float16 or float32, at least one element a token, and a width "
                f"of {KERNEL_WIDTH} to {BLOCK_SIZE - 1} tokens"
            )
        return self


class _Wrong(NamedTuple):
    """What one launch left: windows with a wrong byte, wrong bytes, and the first of them in words."""

    windows: int
    wrong_bytes: int
    first: str


class _Windows:
    """Windows [layers, 1 + requests, width, inner] in which request s owns one block in every layer, in random order.

    Block 0 is nobody's. A boundary ends in the block itself, so that `postcopy` shifts it in place.
    """

    def __init__(
        self, shape: WindowShape, requests: int, layers: int, where: str, generator: torch.Generator
    ):
        self.shape, self.requests, self.layers, self.generator = shape, requests, layers, generator
        size = (layers, 1 + requests, shape.width, shape.inner)
        self.pool = torch.empty(size, dtype=shape.torch_dtype, device=where)
        self.table = torch.zeros(requests, 4, dtype=torch.int32, device=where)
        self.states = AlignStates(
            [self.table], [RecurrentState(part, conv_width=shape.width) for part in self.pool]
        )
        self.counters = AlignCounters.empty(requests, where)
        self.mapping = torch.arange(requests, dtype=torch.int32, device=where)
        self.bias = torch.zeros(requests, dtype=torch.int64, device=where)

    def fill(self) -> None:
        """New bytes, a new order of blocks, a new bias from 1 to K for each request."""
        self.pool.view(torch.uint8).random_(0, 256, generator=self.generator)
        where, g = self.pool.device, self.generator
        self.table[:, 0] = 1 + torch.randperm(self.requests, generator=g, device=where)
        self.bias.random_(1, 1 + self.shape.most, generator=g)
        self.counters.state_idx.fill_(0)
        self.counters.num_computed.fill_(BLOCK_SIZE)
        self.counters.num_accepted.copy_(self.bias + 1)

    def expected(self) -> torch.Tensor:
        """The pool after a right shift, by one gather: the last `bias` tokens of a window stay as they are."""
        where, width = self.pool.device, self.shape.width
        shift = torch.zeros(1 + self.requests, 1, dtype=torch.int64, device=where)
        shift[self.table[:, 0].long(), 0] = self.bias
        token = torch.arange(width, device=where).expand(1 + self.requests, width)
        source = torch.where(token + shift < width, token + shift, token)
        block = torch.arange(1 + self.requests, device=where)[:, None]
        return self.pool.view(_INTEGER[self.pool.element_size()])[:, block, source]

    def compare(self, expected: torch.Tensor) -> _Wrong:
        """The pool against what it should be, on the device."""
        differs = self.pool.view(torch.uint8) != expected.view(torch.uint8)
        by_window = differs.flatten(2).sum(dim=2)
        windows = int((by_window > 0).sum())
        return _Wrong(windows, int(by_window.sum()), self._first(differs, by_window) if windows else "")

    def _first(self, differs: torch.Tensor, by_window: torch.Tensor) -> str:
        layer, block = divmod(int((by_window > 0).flatten().long().argmax()), 1 + self.requests)
        at = int(differs[layer, block].flatten().long().argmax())
        owner = (self.table[:, 0] == block).nonzero().flatten().tolist()
        bias = int(self.bias[owner[0]]) if owner else 0
        return (
            f"{self.shape.dtype} window [{self.shape.width}, {self.shape.inner}] in block {block} of layer {layer}, "
            f"shift by {bias}: {int(by_window[layer, block])} wrong bytes, the first in token "
            f"{at // self.shape.token_bytes}"
        )


_INTEGER = {2: torch.int16, 4: torch.int32}


def shifts(
    arm: str,
    shifts: int,
    device: str = "sim",
    seed: int = 0,
    requests: int = 256,
    layers: int = 16,
    shapes: Sequence[Sequence[Any]] = SHAPES,
    tuning: Sequence[int] | None = None,
) -> dict[str, Any]:
    """At least `shifts` left shifts inside one block, spread over `shapes` (dtype, inner, width), all compared.

    Inputs are new at every launch; the expected windows are gathered and compared on the device, byte by byte. A shift
    `faults` when its window has a wrong byte; `rate` is faults a shift. `tuning` is [tiles, block, num_warps] of this
    package's kernel. On the simulator kernels are interpreted: a program there loads all lanes before it stores any
    and has no warps, so that every arm is right by construction, and only a GPU can tell `before` from `after`.
    """
    if shifts < 1 or requests < 1 or layers < 1 or not shapes:
        raise BadInputError(
            f"{shifts} shifts of {requests} requests in {layers} layers: give at least one of each, and a shape"
        )
    where = "cuda" if device == "cuda" else "cpu"
    generator = torch.Generator(where).manual_seed(seed)
    chosen = Tuning(*tuning) if tuning else None
    rows, witness = [], ""
    for given in shapes:
        shape = WindowShape(*given).check()
        windows = _Windows(shape, _fitting(shape, requests, layers), layers, where, generator)
        row, first = _shifted(windows, _copier(arm, windows, chosen), -(-shifts // len(shapes)))
        rows.append(row)
        witness = witness or first
    sums = {name: sum(row[name] for row in rows) for name in ("shifts", "faults", "wrong_bytes")}
    rate = sums["faults"] / sums["shifts"]
    return {"arm": arm, "seed": seed, **sums, "rate": rate, "shapes": rows, "witness": witness}


def _fitting(shape: WindowShape, requests: int, layers: int) -> int:
    """As many requests as one launch has bytes for."""
    return max(1, min(requests, BYTES_PER_LAUNCH // (layers * shape.width * shape.token_bytes)))


def _copier(arm: str, windows: _Windows, tuning: Tuning | None) -> Callable[[], None]:
    """One launch of the arm."""
    w = windows
    if arm in ("before", "after"):
        guards = BEFORE["overlapping-shift"] if arm == "before" else AFTER
        return lambda: align_copy.postcopy(w.states, w.counters, w.mapping, BLOCK_SIZE, guards, tuning)
    released = ReleasedCopies(upstream.resolve(arm), w.states, w.requests, BLOCK_SIZE)
    return lambda: released.postcopy(w.counters, w.mapping)


def _shifted(windows: _Windows, copy: Callable[[], None], shifts: int) -> tuple[dict[str, Any], str]:
    """A row of the table, and its first wrong window."""
    faults = wrong_bytes = done = 0
    witness = ""
    while done < shifts:
        windows.fill()
        expected = windows.expected()
        copy()
        wrong = windows.compare(expected)
        done += windows.requests * windows.layers
        faults, wrong_bytes = faults + wrong.windows, wrong_bytes + wrong.wrong_bytes
        witness = witness or wrong.first
    shape = windows.shape
    return {
        "dtype": shape.dtype,
        "token_bytes": shape.token_bytes,
        "width": shape.width,
        "largest_shift": shape.most,
        "shifts": done,
        "faults": faults,
        "wrong_bytes": wrong_bytes,
        "rate": faults / done,
    }, witness


# The column past the row

COLUMNS, STATE_BLOCK, ATTENTION_BLOCK = 123, 4480, 16
COMPUTED = 134_400  # tokens of a cached prefix: column 29 of state blocks, 8399 of attention blocks
SMALL_POOL_WORDS = 1 << 14
PAGE_BYTES = 1 << 16


def illegal_column(arm: str, device: str = "sim") -> dict[str, Any]:
    """A request starts after a cached prefix, and its column was computed with another group's block size.

    Column 8399 of a row of 123 is 33 KB after the row: the caching allocator has that address, and the load of the
    block id succeeds. What lies there decides. Here the tables lie where small tensors lie, at the start of a pool of
    64 KiB, and the draft probabilities of the batch fill the rest, float32 between 0 and 1. Their bits as an
    int32 are about 10**9; as a block id, times a page of 64 KiB, they give an address about 64 TiB after the states,
    which is nobody's. Nothing else is arranged: the column, the load of the id and the load of the state are the
    kernel's own. With zeros after the table block 0 would be copied and nothing seen.

    On CUDA the process dies of the access (`illegal-address` in the caller's isolation). On the simulator it is
    reported and not performed. `word` is what lies at column 8399 of the table that the subject was bound to, `first`
    the detector's report of that load.
    """
    where = "cuda" if device == "cuda" else "cpu"
    rig, expected = _column_rig(where), _column_rig(where)
    worker = probe.subject_of("seed-column-divisor", arm, device).on(rig)
    plain = probe.OwnCopies(expected, "seed-column-divisor", "after", plain=True)
    _start(rig, worker)
    _start(expected, plain)
    word = _word_after_the_row(rig, worker)
    with probe.watched(rig, worker, 0) as reports:
        probe.step(rig, worker, 0)
    probe.step(expected, plain, 0)
    if where == "cuda":
        torch.cuda.synchronize()
    wild = next((r for r in reports if not r.mapped), None)
    differ = list(probe.differences(rig, expected))
    effect = "illegal-address" if wild else "corruption" if differ else "clean"
    return {
        "arm": arm,
        "effect": effect,
        "why": str(wild) if wild else "; ".join(differ),
        "first": str(reports[0]) if reports else "",
        "columns": COLUMNS,
        "word": word,
    }


def _column_rig(where: str) -> probe.Rig:
    """Slot 0 has state blocks in columns 29 to 31; tables in a small pool, states in pages of PAGE_BYTES."""
    rig = probe.Rig({0: [*[0] * 29, 1, 2, 3]}, where, COLUMNS, STATE_BLOCK, ATTENTION_BLOCK)
    generator = torch.Generator().manual_seed(1)
    probabilities = torch.rand(SMALL_POOL_WORDS // 64, 64, generator=generator).softmax(dim=1)
    words = probabilities.flatten().to(where).view(torch.int32)
    tables = (rig.persistent, rig.gathered)
    for number, table in enumerate(tables):
        words[number * table.numel() : (number + 1) * table.numel()] = table.flatten()
    rig.persistent, rig.gathered = (
        words[number * table.numel() : (number + 1) * table.numel()].view(table.shape)
        for number, table in enumerate(tables)
    )
    rig.states = [replace(state, tensor=_paged(state.tensor)) for state in rig.states]
    return rig


def _word_after_the_row(rig: probe.Rig, worker: probe.AlignWorker) -> int:
    """The int32 at column 8399 of row 0; read on the host, within the small pool."""
    words = rig.persistent.as_strided((SMALL_POOL_WORDS,), (1,), 0)
    row = (int(worker.addresses()[0].flatten()[0]) - words.data_ptr()) // words.element_size()
    return int(words[row + align_copy.seed_column(COMPUTED, ATTENTION_BLOCK)])


def _paged(tensor: torch.Tensor) -> torch.Tensor:
    """The same blocks, each at the start of a page."""
    words = PAGE_BYTES // tensor.element_size()
    pages = torch.zeros(tensor.shape[0], words, dtype=tensor.dtype, device=tensor.device)
    return pages[:, : tensor[0].numel()].view(tensor.shape).copy_(tensor)


def _start(rig: probe.Rig, worker: probe.AlignWorker) -> None:
    """An empty step, which binds the tables of a release; then the request comes."""
    probe.step(rig, worker, 1)
    rig.num_computed[0] = COMPUTED
    worker.add(0, COMPUTED)
