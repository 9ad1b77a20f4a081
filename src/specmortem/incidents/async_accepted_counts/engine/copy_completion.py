"""Where the copy of the counts completes among the host's accesses of them, and two faces of its pinned buffer."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any, Literal, NamedTuple

import numpy as np
import torch

from specmortem import device as devices
from specmortem.device import HostBuffer, Observer, Op, Region, Stream
from specmortem.errors import SpecmortemError
from specmortem.incidents.async_accepted_counts.engine.accepted_counts import COPY

Phase = Literal["before", "inside", "after", "not-in-flight"]
NOT_UNDER_TEST = (str(Path(devices.__file__).parent), __file__)


class UnfitError(SpecmortemError):
    """The code under test uses something that the probe does not give it."""


class CountAccess(NamedTuple):
    """A read or a write of rows `first` to `last` by a function under test."""

    function: str
    write: bool
    first: int
    last: int

    def __str__(self) -> str:
        """As in a witness."""
        rows = f"row {self.first}" if self.first == self.last else f"rows {self.first} to {self.last}"
        return f"{self.function} {'writes' if self.write else 'reads'} {rows}"


@dataclass
class CopyCompletion(Observer):
    """What the host did to the accepted counts in the second step, and where the copy came to lie in that.

    Buffers with `accepted` in their name are watched, and the first copy called COPY.
    """

    accesses: list[CountAccess] = field(default_factory=list)
    in_flight: bool = False
    completed: int | None = None
    moves: int = 0
    queued_at: str = ""

    def enqueued(self, stream: Stream, op: Op, site: str) -> None:
        """Note the line that queued the copy."""
        if op.name == COPY and not self.queued_at:
            caller = _caller()
            self.in_flight, self.queued_at = True, f"{Path(caller.f_code.co_filename).name}:{caller.f_lineno}"

    def executed(self, stream: Stream, op: Op) -> None:
        """Note the completion."""
        if op.name == COPY and self.completed is None:
            self.completed = len(self.accesses)

    def host_accessed(self, buffer: HostBuffer, region: Region, write: bool, site: str) -> None:
        """Note a move of counts, or what else the host does to them."""
        if "accepted" in buffer.name:
            backing = buffer.backing
            base, size = backing.data_ptr(), backing.stride(0) * backing.element_size()
            first, last = (region.start - base) // size, (region.stop - base) // size - 1
            self.accesses.append(CountAccess(_caller().f_code.co_name, write, first, last))

    def second_step_begins(self) -> None:
        """Forget what the first step did; a copy that has run by now was waited for."""
        self.in_flight = self.completed is None and self.in_flight
        self.accesses.clear()

    def rows_have_moved(self) -> None:
        """What follows reads the counts and moves no row."""
        self.moves = len(self.accesses)

    @property
    def phase(self) -> Phase:
        """Where the copy completed: before, inside or after the host's moves of rows."""
        if not self.in_flight:
            return "not-in-flight"
        if self.completed is None or self.completed >= self.moves:
            return "after"
        return "before" if self.completed == 0 else "inside"

    @property
    def precedes_the_read(self) -> bool:
        """Whether the copy had completed when the counts were read, after the row moves."""
        return self.completed is not None and self.completed <= self.moves

    def __str__(self) -> str:
        """The access before the copy and the one after it."""
        if not self.in_flight:
            return "no copy is in flight"
        if self.phase == "after":
            return "the copy lands after the rows have moved"
        assert self.completed is not None
        following = self.accesses[self.completed]
        if self.completed == 0:
            return f"the copy lands before {following}"
        return f"the copy lands after {self.accesses[self.completed - 1]} and before {following}"


def _caller() -> FrameType:
    """The nearest frame outside the device and this file: code under test."""
    frame = sys._getframe(1)
    while frame.f_back and frame.f_code.co_filename.startswith(NOT_UNDER_TEST):
        frame = frame.f_back
    return frame


class HostArray:
    """The numpy face of a pinned buffer: every access is told to the device; what is read cannot be written."""

    def __init__(self, buffer: HostBuffer) -> None:
        self._buffer = buffer

    def __getitem__(self, index: Any) -> Any:
        found = self._buffer[index]
        if isinstance(found, np.ndarray):
            found.flags.writeable = False
        return found

    def __setitem__(self, index: Any, value: Any) -> None:
        self._buffer[index] = value

    def __len__(self) -> int:
        return len(self._buffer)


class PinnedTensor:
    """The torch face of a pinned buffer: a non-blocking copy into it is queued, a blocking one waited for."""

    def __init__(self, buffer: HostBuffer) -> None:
        self.buffer = buffer

    def __getitem__(self, rows: slice) -> PinnedTensor:
        start, stop, step = rows.indices(len(self.buffer))
        if step != 1:
            raise UnfitError(f"a pinned tensor is indexed with {rows}")
        return PinnedTensor(self.buffer.rows(start, stop))

    def copy_(self, source: torch.Tensor, non_blocking: bool = False) -> PinnedTensor:
        """Queue the copy of what the device holds now, in the order of its one stream."""
        device = self.buffer.device
        device.copy_async(self.buffer, source.to(self.buffer.dtype, copy=True), name=COPY)
        if not non_blocking:
            device.synchronize()
        return self

    def fill_(self, value: int) -> PinnedTensor:
        """A host write."""
        self.numpy()[:] = value
        return self

    def numpy(self) -> HostArray:
        """The numpy face."""
        return HostArray(self.buffer)
