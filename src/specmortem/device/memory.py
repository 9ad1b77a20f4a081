"""Which bytes an operation or a host access touches, and when two of them conflict."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy.typing as npt
import torch


@dataclass(frozen=True)
class Region:
    """The bytes [start, stop) of the address space; `name` is what the program calls them."""

    start: int
    stop: int
    name: str = ""

    def overlaps(self, other: Region) -> bool:
        """Whether they share a byte; an empty region overlaps nothing."""
        return max(self.start, other.start) < min(self.stop, other.stop)


def tensor_region(tensor: torch.Tensor, name: str = "") -> Region:
    """The span of a view inside its storage: views of one storage alias where their spans overlap."""
    start = tensor.data_ptr()
    if tensor.numel() == 0:
        return Region(start, start, name)
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return Region(start, start + (last + 1) * tensor.element_size(), name)


def array_region(array: npt.NDArray[Any], name: str = "") -> Region:
    """The same for a numpy view, whose strides may be negative."""
    start = array.__array_interface__["data"][0]
    if array.size == 0:
        return Region(start, start, name)
    offsets = [(size - 1) * stride for size, stride in zip(array.shape, array.strides, strict=True)]
    low, high = sum(min(0, offset) for offset in offsets), sum(max(0, offset) for offset in offsets)
    return Region(start + low, start + high + array.itemsize, name)


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


def _overlap(some: tuple[Region, ...], others: tuple[Region, ...]) -> bool:
    return any(one.overlaps(other) for one in some for other in others)
