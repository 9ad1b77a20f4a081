"""Logical bounds of every load, store and atomic of a Triton kernel, checked in Triton's interpreter.

`with bounds.watch() as watch:` checks each kernel that is launched inside the block. Without further words an access
must stay inside the tensor whose pointer it was derived from. Extents that a tensor's shape does not tell are declared:

- `watch.rows(block_table, of=program(0), allocated=num_blocks)`: program r may read only its own row, and of that row
  only the allocated prefix;
- `watch.segments(target_positions, query_start_loc, of=program(0))`: ragged rows;
- `watch.live(slot_mapping, n)`: the first n entries of a padded buffer;
- `watch.blocks(pool, owner, of=...)`: blocks of a pool, each with the owner that may touch it;
- `watch.pointers(table, *tensors)`: an int64 tensor of addresses, and what they point to.

A faulting access is not performed (a load yields the kernel's `other`, else `fill`), so Python survives and the kernel
runs on. With `perform_mapped=True` an access that leaves its extent but not the storages of the watched tensors is
performed all the same, as a GPU would: `Report.mapped` tells the two apart (silent damage, or an illegal address).
Provenance: every pointer carries the number of the tensor it came from in its upper 16 bits, which no address
of a user process uses. The number survives broadcasting, selection, casts to and from integers and a round trip
through a table of addresses, so a pointer derived from A that lands in B is a fault even though B is valid memory.

Needs TRITON_INTERPRET=1 before triton is imported. The hooks are methods of Triton's `InterpreterBuilder` whose form
has been stable from 3.6.0 on; `unsupported()` says what does not fit.
"""

from __future__ import annotations

import inspect
import os
import sys
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
import triton
from triton.runtime import interpreter

from specmortem._interpreter import mend
from specmortem.detect.hooks import Hook, hooked
from specmortem.errors import BadInputError, SpecmortemError, UnavailableError

mend()
Grid = tuple[int, int, int]
OwnerOf = Callable[[Grid], int]
Addresses = npt.NDArray[np.uint64]

_TAG_SHIFT = 48
_ADDRESS_MASK = np.uint64((1 << _TAG_SHIFT) - 1)
_ADDRESS_SIGN = 1 << (_TAG_SHIFT - 1)
_SKIPPED = (str(Path(triton.__file__).parent), str(Path(__file__).parent))  # of no kernel
# Odd numbers only: an offset that borrows from or carries into the tag gives an even one, which is recognised.
_MAX_TAG = (1 << 15) - 1
_HOOKS = {
    "create_masked_load": "self ptrs mask other cache_modifier eviction_policy is_volatile",
    "create_masked_store": "self ptrs value mask cache_modifier eviction_policy",
    "create_atomic_cas": "self ptr cmp val sem scope",
    "create_atomic_rmw": "self rmwOp ptr val mask sem scope",
}


class LimitReachedError(SpecmortemError):
    """A kernel was ended because the watch has as many reports as it may hold."""


def program(axis: int, divided_by: int = 1) -> OwnerOf:
    """The owner of a row is program id `axis`, divided by `divided_by` (heads of one request, say)."""
    return lambda grid: grid[axis] // divided_by


def mapped(idx_mapping: Sequence[int], axis: int = 0) -> OwnerOf:
    """The owner is `idx_mapping[program id]`, as with request slots under a batch order."""
    return lambda grid: int(idx_mapping[grid[axis]])


@dataclass(frozen=True)
class Report:
    """One access outside its logical extent.

    `index` counts elements from the start of the tensor that the pointer came from and may be negative; `extent` is
    what this program may touch there, `lies` what is at that place instead; `lanes` counts the lanes of the same
    access that were outside, `lane` is the first of them. `mapped` says that the place belongs to the storage of a
    watched tensor: a GPU would read or write it without a word.
    """

    kernel: str
    op: str
    file: str
    line: int
    program: Grid
    lane: int
    lanes: int
    tensor: str
    index: int
    extent: str
    lies: str
    mapped: bool

    @property
    def place(self) -> str:
        """Kernel, file and line."""
        return f"{self.kernel} ({Path(self.file).name}:{self.line})"

    def __str__(self) -> str:
        """One line for a terminal."""
        return (
            f"{self.op} at {self.place}, program {self.program}, lane {self.lane}: {self.tensor}[{self.index}] "
            f"is outside {self.extent}; there lies {self.lies}"
        )


class _Span(NamedTuple):
    """One owner's part of a tensor: addresses [start, stop), of which the owner may touch [start, live)."""

    start: int
    stop: int
    live: int
    owner: int


@dataclass
class _Region:
    """One tensor and who may touch which part of it. Bounds are byte addresses; `spans` are sorted."""

    name: str
    tensor: torch.Tensor
    low: int
    high: int
    itemsize: int
    tag: int = 0
    of: OwnerOf | None = None
    owner_name: str = "request"
    spans: list[_Span] = field(default_factory=list)
    points_to: dict[int, int] | None = None
    holes: list[tuple[int, int]] = field(default_factory=list)

    def span_of(self, address: int) -> _Span | None:
        at = bisect_right(self.spans, address, key=lambda span: span.start) - 1
        return self.spans[at] if at >= 0 and address < self.spans[at].stop else None

    @cached_property
    def by_owner(self) -> dict[int, list[tuple[int, int]]]:
        """Where the parts that an owner may touch start and stop."""
        found: dict[int, list[tuple[int, int]]] = {}
        for span in self.spans:
            found.setdefault(span.owner, []).append((span.start, span.live))
        return found

    def allowed(self, grid: Grid) -> list[tuple[int, int]]:
        """Where the parts that `grid`'s program may touch start and stop."""
        return [(self.low, self.high)] if self.of is None else self.by_owner.get(self.of(grid), [])

    def element(self, address: int) -> int:
        return (address - self.low) // self.itemsize

    def extent_text(self, grid: Grid) -> str:
        """What this program may touch, in elements."""
        spans = ", ".join(f"[{self.element(a)}, {self.element(b)})" for a, b in self.allowed(grid))
        if self.of is None:
            return f"{self.name}{spans}"
        return f"{self.name}{spans or '[]'} of {self.owner_name} {self.of(grid)}"

    def content_text(self, address: int) -> str:
        """What lies at an address inside this region."""
        if self.of is None and not self._in_hole(address):
            return f"{self.name}[{self.element(address)}]"
        span = self.span_of(address)
        if span is None:
            return f"padding of {self.name}"
        owner = f"{self.owner_name} {span.owner}" if span.owner >= 0 else f"no {self.owner_name}"
        if address >= span.live:
            return f"the unallocated tail of the row of {owner} in {self.name}"
        return f"{self.name}[{self.element(address)}] of {owner}"

    def _in_hole(self, address: int) -> bool:
        return bool(self.holes) and not bool(self.inside(np.array([address], dtype=np.uint64))[0])

    def inside(self, addresses: Addresses) -> npt.NDArray[np.bool_]:
        """Which addresses are elements of a view with gaps between its rows."""
        rest = (addresses - np.uint64(self.low)).astype(np.int64)
        ok = (rest >= 0) & (addresses < np.uint64(self.high))
        for stride, size in self.holes:
            ok &= rest // stride < size
            rest = rest % stride
        return np.asarray(ok & (rest < self.itemsize), dtype=np.bool_)


def _region(tensor: torch.Tensor, name: str) -> _Region:
    size = tensor.element_size()
    low = tensor.data_ptr()
    if tensor.numel() == 0:
        return _Region(name, tensor, low, low, size)
    span = 1 + sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    holes = []
    if span != tensor.numel():
        dims = sorted(zip(tensor.stride(), tensor.shape, strict=True), reverse=True)
        holes = [(s * size, n) for s, n in dims if s > 0]
    return _Region(name, tensor, low, low + span * size, size, holes=holes)


class Watch:
    """Extents of the tensors that kernels are launched with, and the reports about them."""

    def __init__(
        self, *, fill: int = 0, limit: int = 1000, perform_mapped: bool = False, stop: bool = False
    ) -> None:
        self.reports: list[Report] = []
        self.faults = 0
        self.launches = 0
        self.accesses = 0
        self.fill = fill
        self.limit = limit
        self.perform_mapped = perform_mapped
        self.stop = stop
        self._declared: dict[int, _Region] = {}
        self._regions: dict[int, _Region] = {}
        self._arguments: dict[int, _Region] = {}
        self._names: dict[int, str] = {}
        self._kernel = ""
        self._grid: Grid = (0, 0, 0)
        self._bounds: dict[int, tuple[int, int] | None] = {}

    def tensor(self, tensor: torch.Tensor, name: str = "") -> None:
        """The whole of a view, under a name of your own."""
        self._declare(_region(tensor, name or f"tensor{len(self._declared)}"))

    def live(self, tensor: torch.Tensor, count: int, name: str = "") -> None:
        """Only the first `count` elements (along dim 0 of a 1-D tensor) are live; the rest is padding."""
        if tensor.dim() != 1 or not 0 <= count <= tensor.numel():
            raise BadInputError(
                f"live prefix of {count} does not fit a tensor of shape {tuple(tensor.shape)}"
            )
        self.segments(tensor, [0, count], of=lambda _: 0, name=name, owner_name="live prefix")

    def rows(
        self,
        table: torch.Tensor,
        *,
        of: OwnerOf,
        allocated: Sequence[int] | torch.Tensor | None = None,
        name: str = "",
        owner_name: str = "request",
    ) -> None:
        """Rows of a 2-D table [rows, columns]; row r belongs to owner r, its first `allocated[r]` columns are live.

        `of` says which owner a program acts for. Raises BadInputError when `allocated` does not fit the table.
        """
        if table.dim() != 2 or table.stride(1) != 1:
            raise BadInputError(
                f"rows() needs a 2-D tensor with contiguous columns, not shape {tuple(table.shape)}"
            )
        count = table.shape[0]
        widths = [table.shape[1]] * count if allocated is None else [int(a) for a in allocated]
        if len(widths) != count or any(not 0 <= w <= table.shape[1] for w in widths):
            raise BadInputError(
                f"allocated must give {count} counts between 0 and {table.shape[1]}, not {widths}"
            )
        pitch, columns = table.stride(0), table.shape[1]
        spans = [_Span(r * pitch, r * pitch + columns, r * pitch + w, r) for r, w in enumerate(widths)]
        self._partition(table, spans, of, name, owner_name)

    def segments(
        self,
        tensor: torch.Tensor,
        start_loc: Sequence[int] | torch.Tensor,
        *,
        of: OwnerOf,
        name: str = "",
        owner_name: str = "request",
    ) -> None:
        """Ragged rows of a 1-D tensor: owner r has elements [start_loc[r], start_loc[r + 1])."""
        loc = [int(x) for x in start_loc]
        if tensor.dim() != 1 or sorted(loc) != loc or (loc and loc[-1] > tensor.numel()):
            raise BadInputError(
                f"start_loc {loc} does not ascend inside a tensor of {tensor.numel()} elements"
            )
        spans = [_Span(start, stop, stop, r) for r, (start, stop) in enumerate(pairwise(loc))]
        self._partition(tensor, spans, of, name, owner_name)

    def blocks(
        self,
        pool: torch.Tensor,
        owner: Sequence[int],
        *,
        of: OwnerOf,
        name: str = "",
        owner_name: str = "request",
    ) -> None:
        """Blocks of a pool [num_blocks, ...]; `owner[b]` may touch block b, -1 is nobody."""
        if len(owner) != pool.shape[0]:
            raise BadInputError(f"{len(owner)} owners for a pool of {pool.shape[0]} blocks")
        content = int(np.prod(pool.shape[1:], dtype=np.int64))
        starts = [b * pool.stride(0) for b in range(len(owner))]
        spans = [_Span(s, s + content, s + content, int(o)) for s, o in zip(starts, owner, strict=True)]
        self._partition(pool, spans, of, name, owner_name)

    def pointers(self, table: torch.Tensor, *targets: torch.Tensor, name: str = "") -> None:
        """An int64 tensor of addresses; each may be used to reach the target that starts there, and no other."""
        if table.dtype != torch.int64:
            raise BadInputError(f"a table of addresses is int64, not {table.dtype}")
        region = _region(table, name or f"pointers{len(self._declared)}")
        self._declare(region)
        region.points_to = {}
        for number, target in enumerate(targets):
            if target.data_ptr() not in self._declared:
                self.tensor(target, f"{region.name}->{number}")
            region.points_to[target.data_ptr()] = self._declared[target.data_ptr()].tag

    def _partition(
        self, tensor: torch.Tensor, spans: list[_Span], of: OwnerOf, name: str, owner_name: str
    ) -> None:
        """Declare a tensor whose parts are given in elements."""
        region = _region(tensor, name or f"tensor{len(self._declared)}")
        region.of, region.owner_name = of, owner_name
        for *places, owner in spans:
            start, stop, live = (region.low + place * region.itemsize for place in places)
            region.spans.append(_Span(start, stop, live, owner))
        self._declare(region)

    def _declare(self, region: _Region) -> None:
        if region.low in self._declared:
            region.points_to = self._declared[region.low].points_to
        self._declared[region.low] = region
        self._number(region)

    def _number(self, region: _Region) -> None:
        region.tag = 2 * len(self._regions) + 1
        if region.tag > _MAX_TAG:
            raise BadInputError(
                f"one watch() follows at most {_MAX_TAG // 2} tensors; open a new one for each launch"
            )
        self._regions[region.tag] = region

    def take(self) -> list[Report]:
        """The reports so far; they are no longer held here."""
        taken, self.reports = self.reports, []
        return taken

    def begin(self, kernel: str, arguments: dict[str, Any]) -> None:
        """A launch starts: take the names of its tensors."""
        self._kernel = kernel
        self.launches += 1
        self._names = {a.data_ptr(): n for n, a in arguments.items() if hasattr(a, "data_ptr")}

    def tag_of(self, tensor: torch.Tensor) -> int:
        """The number that pointers derived from `tensor` carry."""
        low = tensor.data_ptr()
        declared = self._declared.get(low)
        if declared is not None:
            if declared.name.startswith("tensor") and low in self._names:
                declared.name = self._names[low]
            return declared.tag
        known = self._arguments.get(low)
        fresh = _region(tensor, self._names.get(low, "argument"))
        if known is not None and (known.high, known.holes) == (fresh.high, fresh.holes):
            known.name, known.tensor = fresh.name, tensor
            return known.tag
        self._arguments[low] = fresh
        self._number(fresh)
        return fresh.tag

    def at(self, grid: Grid) -> None:
        """The interpreter moves to another program of the grid."""
        if grid != self._grid:
            self._grid = grid
            self._bounds.clear()

    def check(
        self, pointers: Addresses, mask: npt.NDArray[np.bool_], size: int, op: str
    ) -> tuple[Addresses, npt.NDArray[np.bool_], _Region | None]:
        """Plain addresses to access, the mask of the lanes that may, and the region when all lanes share one."""
        self.accesses += 1
        plain = pointers & _ADDRESS_MASK
        active = pointers if mask.all() else pointers[mask]
        if active.size == 0:
            return plain, mask, None
        low, high = int(active.min()), int(active.max())
        tag = low >> _TAG_SHIFT
        bounds = self._bounds[tag] if tag in self._bounds else self._bounds_of(tag)
        if bounds is not None and bounds[0] <= low and high + size <= bounds[1]:
            return plain, mask, self._regions[tag]
        return self._check_lanes(pointers, plain, mask, size, op)

    def _bounds_of(self, tag: int) -> tuple[int, int] | None:
        """Tagged bounds when what the program may touch is one span without gaps."""
        region = self._regions.get(tag)
        bounds = None
        if region is not None and not region.holes:
            allowed = region.allowed(self._grid)
            if len(allowed) == 1:
                base = tag << _TAG_SHIFT
                bounds = (base + allowed[0][0], base + allowed[0][1])
        self._bounds[tag] = bounds
        return bounds

    def _check_lanes(
        self, pointers: Addresses, plain: Addresses, mask: npt.NDArray[np.bool_], size: int, op: str
    ) -> tuple[Addresses, npt.NDArray[np.bool_], _Region | None]:
        allowed = np.zeros_like(mask)
        tags = pointers >> np.uint64(_TAG_SHIFT)
        region = None
        for tag in np.unique(tags[mask]):
            lanes = mask & (tags == tag)
            region = self._resolve(int(tag), int(plain[lanes].flat[0]))
            allowed |= lanes & self._permitted(region, plain, size)
        outside = mask & ~allowed
        if outside.any():
            self._report(pointers, outside, op)
            if self.perform_mapped:
                allowed |= outside & self._mapped(plain, size)
        return plain, allowed, region if np.unique(tags[mask]).size == 1 else None

    def _resolve(self, tag: int, address: int) -> _Region | None:
        """The region a tag stands for; a cast from a plain integer has none and is looked up by its address."""
        if tag == 0:
            return next((r for r in self._regions.values() if r.low <= address < r.high), None)
        if tag % 2 == 0:
            tag += 1 if address >= _ADDRESS_SIGN else -1
        return self._regions.get(tag)

    def _permitted(self, region: _Region | None, plain: Addresses, size: int) -> npt.NDArray[np.bool_]:
        ok = np.zeros(plain.shape, dtype=np.bool_)
        if region is None:
            return ok
        if region.holes and region.of is None:
            return region.inside(plain)
        for start, stop in region.allowed(self._grid):
            ok |= (plain >= np.uint64(start)) & (plain + np.uint64(size) <= np.uint64(stop))
        return ok

    def _mapped(self, plain: Addresses, size: int) -> npt.NDArray[np.bool_]:
        """Which accesses stay inside the storage of some watched tensor."""
        ok = np.zeros(plain.shape, dtype=np.bool_)
        for region in self._regions.values():
            storage = region.tensor.untyped_storage()
            low = storage.data_ptr()
            ok |= (plain >= np.uint64(low)) & (plain + np.uint64(size) <= np.uint64(low + storage.nbytes()))
        return ok

    def _report(self, pointers: Addresses, outside: npt.NDArray[np.bool_], op: str) -> None:
        self.faults += 1
        if len(self.reports) >= self.limit:
            return
        lane = int(np.flatnonzero(outside.ravel())[0])
        pointer = int(pointers.ravel()[lane])
        region = self._resolve(pointer >> _TAG_SHIFT, pointer & int(_ADDRESS_MASK))
        address = pointer - ((region.tag if region else 0) << _TAG_SHIFT)
        file, line = _kernel_frame()
        self.reports.append(
            Report(
                kernel=self._kernel,
                op=op,
                file=file,
                line=line,
                program=self._grid,
                lane=lane,
                lanes=int(outside.sum()),
                tensor=region.name if region else "an address of unknown origin",
                index=region.element(address) if region else address,
                extent=region.extent_text(self._grid) if region else "every watched tensor",
                lies=self._content(address, region),
                mapped=bool(self._mapped(np.array([address], dtype=np.uint64), 1)[0]),
            )
        )
        if self.stop and len(self.reports) >= self.limit:
            raise LimitReachedError(str(self.reports[-1]))

    def _content(self, address: int, origin: _Region | None) -> str:
        """What lies at an address: first in the tensor the pointer came from, then in any other, else nothing."""
        ordered = ([origin] if origin else []) + [r for r in self._regions.values() if r is not origin]
        for region in ordered:
            if region.low <= address < region.high:
                return region.content_text(address)
        for region in ordered:
            storage = region.tensor.untyped_storage()
            if storage.data_ptr() <= address < storage.data_ptr() + storage.nbytes():
                return f"memory beside {region.name}, in the same storage"
        return "nothing that was passed to the kernel"

    def tag_addresses(self, region: _Region, values: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Addresses as loaded from a table, each with the number of what it points to."""
        assert region.points_to is not None
        tagged = values.copy()
        for at, value in np.ndenumerate(values):
            tagged[at] = int(value) | (region.points_to.get(int(value), 0) << _TAG_SHIFT)
        return tagged


_active: Watch | None = None


def unsupported() -> str:
    """Why this triton cannot be watched; empty when it can."""
    for name, parameters in _HOOKS.items():
        expected = parameters.split()
        method = getattr(interpreter.InterpreterBuilder, name, None)
        found = list(inspect.signature(method).parameters) if method is not None else None
        if found != expected:
            return (
                f"triton {triton.__version__}: InterpreterBuilder.{name} takes {found}, expected {expected}"
            )
    for name in ("_implicit_cvt", "GridExecutor", "_interpreter"):
        if not hasattr(interpreter, name):
            return f"triton {triton.__version__}: triton.runtime.interpreter has no {name}"
    return ""


@contextmanager
def watch(
    *, fill: int = 0, limit: int = 1000, perform_mapped: bool = False, stop: bool = False
) -> Iterator[Watch]:
    """Check every Triton kernel launched inside the block.

    With `stop` the report number `limit` ends its kernel, which may loop for hours over what is not there: the launch
    raises triton's InterpreterError, caused by LimitReachedError.
    Raises BadInputError when another watch is open or kernels are not interpreted, UnavailableError when this triton's
    interpreter has another form than the hooks expect.
    """
    global _active
    if os.environ.get("TRITON_INTERPRET") != "1":
        raise BadInputError(
            "bounds.watch() needs the interpreter: set TRITON_INTERPRET=1 before triton is imported"
        )
    if _active is not None:
        raise BadInputError("bounds.watch() is open already; close it before opening another")
    problem = unsupported()
    if problem:
        raise UnavailableError(f"{problem}; install a triton between 3.6 and the pinned one")
    _active = Watch(fill=fill, limit=limit, perform_mapped=perform_mapped, stop=stop)
    try:
        with _Hooks(_active).installed():
            yield _active
    finally:
        _active = None


class _Hooks:
    """What stands in for the interpreter's accesses and launches while a watch is open."""

    def __init__(self, watch: Watch) -> None:
        self.watch = watch

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Put the hooks in; they are out again after the block."""
        accesses = {name: getattr(self, name.removeprefix("create_")) for name in _HOOKS}
        with (
            hooked(interpreter.InterpreterBuilder, set_grid_idx=self.set_grid_idx, **accesses),
            hooked(interpreter, _implicit_cvt=self.implicit_cvt),
            hooked(interpreter.GridExecutor, __call__=self.call),
        ):
            yield

    def set_grid_idx(self, original: Hook, builder: Any, x: int, y: int, z: int) -> None:
        original(builder, x, y, z)
        self.watch.at((x, y, z))

    def _check(
        self, ptrs: Any, mask: Any, op: str
    ) -> tuple[Addresses, npt.NDArray[np.bool_], _Region | None]:
        """`Watch.check` of a mask as the interpreter passes it: a handle, or from block pointers a bare array."""
        data = mask if isinstance(mask, np.ndarray) else mask.data
        lanes = np.broadcast_to(np.asarray(data, dtype=np.bool_), ptrs.data.shape)
        return self.watch.check(ptrs.data, lanes, _dtype_of(ptrs).itemsize, op)

    def masked_load(self, original: Hook, builder: Any, ptrs: Any, mask: Any, other: Any, *hints: Any) -> Any:
        dtype = _dtype_of(ptrs)
        plain, allowed, region = self._check(ptrs, mask, "load")
        default = np.full(ptrs.data.shape, self.watch.fill, dtype=dtype) if other is None else other.data
        value = interpreter._interpreter.load(plain, allowed, default, dtype)
        if region is not None and region.points_to is not None:
            value = self.watch.tag_addresses(region, value)
        return interpreter.TensorHandle(value, ptrs.get_element_ty())

    def masked_store(
        self, original: Hook, builder: Any, ptrs: Any, value: Any, mask: Any, *hints: Any
    ) -> Any:
        plain, allowed, _ = self._check(ptrs, mask, "store")
        return interpreter._interpreter.store(plain, value.data, allowed)

    def atomic_rmw(
        self, original: Hook, builder: Any, op: Any, ptr: Any, val: Any, mask: Any, *order: Any
    ) -> Any:
        handle = interpreter.TensorHandle
        plain, allowed, _ = self._check(ptr, mask, "atomic")
        return original(builder, op, handle(plain, ptr.dtype), val, handle(allowed, mask.dtype), *order)

    def atomic_cas(self, original: Hook, builder: Any, ptr: Any, cmp: Any, val: Any, *order: Any) -> Any:
        handle = interpreter.TensorHandle
        plain, allowed, _ = self._check(ptr, np.ones(ptr.data.shape, dtype=np.bool_), "atomic")
        if not allowed.all():
            return handle(np.full(ptr.data.shape, self.watch.fill, dtype=cmp.data.dtype), cmp.dtype.scalar)
        return original(builder, handle(plain, ptr.dtype), cmp, val, *order)

    def implicit_cvt(self, original: Hook, arg: Any) -> Any:
        """A kernel's argument; the pointer of a tensor gets the number of its region."""
        converted = original(arg)
        if hasattr(arg, "data_ptr"):
            tag = self.watch.tag_of(getattr(arg, "base", arg))
            converted.handle.data = converted.handle.data | np.uint64(tag << _TAG_SHIFT)
        return converted

    def call(self, original: Hook, executor: Any, *args: Any, **kwargs: Any) -> None:
        """A launch."""
        known = {k: v for k, v in kwargs.items() if k in executor.arg_names}
        named = dict(zip(executor.arg_names, args, strict=False)) | known
        self.watch.begin(executor.fn.__name__, named)
        original(executor, *args, **kwargs)


def _dtype_of(pointers: Any) -> Any:
    """The numpy dtype of what the pointers of a load, a store or an atomic point to."""
    return interpreter._get_np_dtype(pointers.get_element_ty())


def _kernel_frame() -> tuple[str, int]:
    """File and line of the innermost frame that is neither Triton's nor a detector's; empty when there is none."""
    frame = sys._getframe(1)
    while frame.f_back is not None:
        name = frame.f_code.co_filename
        if not name.startswith(_SKIPPED):
            return name, frame.f_lineno
        frame = frame.f_back
    return "", 0
