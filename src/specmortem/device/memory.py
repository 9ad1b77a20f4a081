"""Which bytes an operation or a host access touches, and when two of them conflict."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

_MANY_BLOCKS = 1 << 14


@dataclass(frozen=True)
class Region:
    """The bytes [start, stop) of the address space; `name` is what the program calls them.

    A strided view has only some of them: blocks of `width` bytes, `steps` apart (count and bytes, for each
    dimension).
    """

    start: int
    stop: int
    name: str = ""
    width: int = 0
    steps: tuple[tuple[int, int], ...] = ()

    def overlaps(self, other: Region) -> bool:
        """Whether they share a byte; an empty region overlaps nothing."""
        return self.shared(other) is not None

    def shared(self, other: Region) -> tuple[int, int] | None:
        """The first run of bytes that both have; views of very many blocks count as having all in between."""
        low, high = max(self.start, other.start), min(self.stop, other.stop)
        if low >= high:
            return None
        if not (self.steps or other.steps) or max(self._count(), other._count()) > _MANY_BLOCKS:
            return low, high
        ours, theirs = self._blocks(), other._blocks()
        nearest = np.searchsorted(theirs[1], ours[0], side="right")
        met = nearest < theirs[0].size
        starts = np.maximum(ours[0][met], theirs[0][nearest[met]])
        stops = np.minimum(ours[1][met], theirs[1][nearest[met]])
        real = np.flatnonzero(starts < stops)
        return (int(starts[real[0]]), int(stops[real[0]])) if real.size else None

    def _count(self) -> int:
        return prod(count for count, _ in self.steps)

    def _blocks(self) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Where the blocks start and stop, in order."""
        starts = np.array([self.start], dtype=np.int64)
        for count, step in self.steps:
            starts = np.add.outer(starts, np.arange(count) * step).ravel()
        starts.sort()
        return starts, starts + (self.width if self.steps else self.stop - self.start)


def tensor_region(tensor: torch.Tensor, name: str = "") -> Region:
    """The bytes of a view inside its storage."""
    start, itemsize = tensor.data_ptr(), tensor.element_size()
    if tensor.numel() == 0:
        return Region(start, start, name)
    if tensor.is_contiguous():
        return Region(start, start + tensor.numel() * itemsize, name)
    strides = [stride * itemsize for stride in tensor.stride()]
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, strides, strict=True))
    return Region(start, start + last + itemsize, name, *_blocks(itemsize, tensor.shape, strides))


def array_region(array: npt.NDArray[Any], name: str = "") -> Region:
    """The same for a numpy view, whose strides may be negative."""
    start = array.__array_interface__["data"][0]
    if array.size == 0:
        return Region(start, start, name)
    offsets = [(size - 1) * stride for size, stride in zip(array.shape, array.strides, strict=True)]
    low, high = sum(min(0, offset) for offset in offsets), sum(max(0, offset) for offset in offsets)
    blocks = _blocks(array.itemsize, array.shape, [abs(stride) for stride in array.strides])
    return Region(start + low, start + high + array.itemsize, name, *blocks)


def _blocks(
    itemsize: int, shape: Sequence[int], strides: Sequence[int]
) -> tuple[int, tuple[tuple[int, int], ...]]:
    """`width` and `steps` of a region; nothing for one block."""
    width, steps = itemsize, list[tuple[int, int]]()
    for stride, size in sorted(zip(strides, shape, strict=True)):
        if size == 1 or stride == 0:
            continue
        if stride == width and not steps:
            width *= size
        else:
            steps.append((size, stride))
    return (width, tuple(steps)) if steps else (0, ())


@dataclass(frozen=True, eq=False)
class Op:
    """One unit of work of a queue, or one host access (`what` is then `read` or `write`).

    `tensors` keeps alive what the work refers to; `duration_us` matters to the simulator's timed schedule
    only.
    """

    what: str
    name: str = ""
    run: Callable[[], object] = lambda: None
    reads: tuple[Region, ...] = ()
    writes: tuple[Region, ...] = ()
    tensors: tuple[torch.Tensor, ...] = ()
    duration_us: float = 0.0

    def conflicts(self, other: Op) -> bool:
        """Whether their order can matter: they share a byte that at least one of them writes."""
        return _overlap(self.writes, other.reads + other.writes) or _overlap(self.reads, other.writes)


def host_access(what: str, region: Region, write: bool, *tensors: torch.Tensor) -> Op:
    """What the host does at once to the bytes of `region`, in the memory of `tensors`."""
    reads, writes = ((), (region,)) if write else ((region,), ())
    return Op(what, region.name, reads=reads, writes=writes, tensors=tensors)


def _overlap(some: tuple[Region, ...], others: tuple[Region, ...]) -> bool:
    return any(one.overlaps(other) for one in some for other in others)
