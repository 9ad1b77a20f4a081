"""Streams, events, graphs and host buffers: what a program holds. Their device does the work."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeGuard

import numpy as np
import numpy.typing as npt
import torch

from specmortem.device.memory import Op, Region, array_region
from specmortem.errors import BadInputError

if TYPE_CHECKING:
    from specmortem.device.interface import Device


class Stream:
    """An in-order queue of a device."""

    def __init__(self, device: Device, name: str) -> None:
        self.device, self.name = device, name

    def synchronize(self) -> None:
        """Block the host until everything enqueued here so far has run."""
        self.device._synchronize(self)

    def wait(self, event: Event) -> None:
        """Hold what is enqueued from now on until the latest record of `event` has been reached."""
        self.device._wait(self, event)

    def __repr__(self) -> str:
        return f"Stream({self.name!r})"


class Event:
    """A mark in a stream."""

    def __init__(self, device: Device, name: str) -> None:
        self.device, self.name = device, name

    def record(self, stream: Stream | None = None) -> None:
        """Mark the present end of the queue; an earlier record is forgotten."""
        self.device._record(self, stream or self.device.default_stream)

    def synchronize(self) -> None:
        """Block the host until the stream has reached the latest record."""
        self.device._synchronize(self)

    def query(self) -> bool:
        """Whether the stream has reached the latest record; True when there is none."""
        return self.device._query(self)

    def __repr__(self) -> str:
        return f"Event({self.name!r})"


class Graph:
    """Operations captured once, in order, and replayed as one launch."""

    def __init__(self, device: Device, stream: Stream, name: str) -> None:
        self.device, self.stream, self.name = device, stream, name
        self.ops: list[Op] = []
        self.captured = False
        self.refused = ""

    def replay(self, stream: Stream | None = None) -> None:
        """Enqueue all operations in order; replays of one graph never overlap, whatever their streams.

        Raises CaptureError before the capture has ended well, and inside another capture.
        """
        self.device._replay(self, stream or self.device.default_stream)

    def __repr__(self) -> str:
        return f"Graph({self.name!r}, {len(self.ops)} operations)"


class HostBuffer:
    """Host memory that copies read and write; `buffer[index]` is a host access, made at once.

    Reads give a numpy copy. Indices are numpy's; values convert as numpy assignment does.
    """

    def __init__(self, device: Device, backing: torch.Tensor, pinned: bool, name: str) -> None:
        self.device, self.backing, self.pinned, self.name = device, backing, pinned, name
        self.shape, self.dtype = tuple(backing.shape), backing.dtype
        self._array: npt.NDArray[Any] = backing.numpy()

    @property
    def region(self) -> Region:
        """All bytes of the buffer."""
        return array_region(self._array, self.name)

    def rows(self, start: int, stop: int) -> HostBuffer:
        """Rows start:stop as a buffer over the same memory, for copies of a part."""
        if not 0 <= start <= stop <= len(self):
            raise BadInputError(
                f"rows {start}:{stop} are not in host buffer {self.name!r} of {len(self)} rows"
            )
        return HostBuffer(self.device, self.backing[start:stop], self.pinned, self.name)

    def __len__(self) -> int:
        return len(self._array)

    def __getitem__(self, index: Any) -> Any:
        self.device._host_access(self, self._selected(index), write=False)
        return self._array[index].copy()

    def __setitem__(self, index: Any, value: Any) -> None:
        self.device._host_access(self, self._selected(index), write=True)
        self._array[index] = value

    def _selected(self, index: Any) -> Region:
        """The span of a basic index; the whole buffer for a gather or a mask."""
        selected = self._array[index]
        if isinstance(selected, np.generic) and not isinstance(index, np.ndarray | list):
            selected = self._array[(*(index if isinstance(index, tuple) else (index,)), ...)]
        inside = np.size(selected) == 0 or np.may_share_memory(selected, self._array)
        return array_region(selected, self.name) if inside else self.region

    def __repr__(self) -> str:
        kind = "pinned" if self.pinned else "pageable"
        return f"HostBuffer({self.name!r}, {self.shape}, {self.dtype}, {kind})"


Place = HostBuffer | torch.Tensor


def is_pageable(place: Place) -> TypeGuard[HostBuffer]:
    """Whether a copy with this end is staged by the host."""
    return isinstance(place, HostBuffer) and not place.pinned
