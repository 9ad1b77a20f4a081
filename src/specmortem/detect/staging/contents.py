"""Host writes that no call shows: what a queued copy will read, compared with what it was at the enqueue."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from specmortem.detect.staging.order import Access, Conflict
from specmortem.detect.staging.report import Frame, Touch, user_stack
from specmortem.detect.staging.watch import StagingWatch, touch
from specmortem.device import Region

LIMIT_BYTES = 64 << 20


@dataclass
class _Kept:
    access: Access
    region: Region
    content: npt.NDArray[np.uint8]
    since: tuple[Frame, ...]
    tensor: torch.Tensor


class Contents:
    """Sources of queued copies, and their bytes. A write of equal bytes leaves no trace."""

    def __init__(self, watch: StagingWatch) -> None:
        self._watch = watch
        self._kept: list[_Kept] = []

    def keep(self, access: Access, region: Region, tensor: torch.Tensor) -> None:
        """Remember what a copy will read, unless it is larger than `LIMIT_BYTES`."""
        if region.stop - region.start <= LIMIT_BYTES:
            self._kept = [k for k in self._kept if (k.region, k.since) != (region, access.stack)]
            self._kept.append(_Kept(access, region, _bytes(region).copy(), access.stack, tensor))

    def forget(self, region: Region) -> None:
        """These bytes change by a call that is known."""
        self._kept = [kept for kept in self._kept if not kept.region.overlaps(region)]

    def check(self) -> None:
        """Report each source that has changed under a copy that the host does not know to be over."""
        if not self._kept:
            return
        here = user_stack()
        self._kept = [kept for kept in self._kept if self._watch.order.pending(kept.access)]
        for kept in list(self._kept):
            changed = np.flatnonzero(_bytes(kept.region) != kept.content)
            if changed.size:
                self._kept.remove(kept)
                self._report(kept, int(changed[0]), int(changed[-1]) + 1, here)
            kept.since = here

    def _report(self, kept: _Kept, first: int, last: int, here: tuple[Frame, ...]) -> None:
        name, base = kept.region.name, kept.region.start
        conflict = Conflict(base + first, base + last, "read", "write", name)
        write = Touch("write", "host", name, "", _line(kept.since), until=_line(here))
        memory = kept.tensor.untyped_storage().data_ptr()
        self._watch.add(touch(kept.access, "read"), write, conflict, memory)


def _line(stack: tuple[Frame, ...]) -> str:
    return f"{stack[0][0]}:{stack[0][1]}"


def _bytes(region: Region) -> npt.NDArray[np.uint8]:
    """The memory itself, not a copy."""
    return np.ctypeslib.as_array((ctypes.c_uint8 * (region.stop - region.start)).from_address(region.start))
