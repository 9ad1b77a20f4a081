"""Who owns the host's accepted counts between two steps: before, after, and the fixes that were compared.

The counts lie on the device, in the row order of step N, and step N + 1 looks states up by them. Each function takes
them there; at a `yield` it is held until that place of step N + 1. The event of the copy says that its memory is
written, not whose memory it is. `engine.accepted_counts` runs these; vLLM's lines are in its docstring.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from specmortem.incidents.async_accepted_counts.engine.accepted_counts import AcceptedCounts

Place = Literal["next step", "rows have moved"]
NEXT_STEP: Place = "next step"
ROWS_HAVE_MOVED: Place = "rows have moved"


def reference(counts: npt.NDArray[np.int32], previous_rows: Sequence[int]) -> npt.NDArray[Any]:
    """What rows are to start from: the counts [M, L] of their previous rows; 1 for a row that had none (-1)."""
    rows = np.array(previous_rows, np.int64)
    return np.where((rows < 0)[:, None], 1, counts[np.maximum(rows, 0)])


def before(counts: AcceptedCounts) -> Iterator[Place]:
    """Up to 0.23.0, in mode align to this day: the copy completes in the array whose rows the host moves."""
    counts.copy_to(counts.batch.num_accepted)
    yield ROWS_HAVE_MOVED
    counts.copied.synchronize()
    counts.gather_and_upload(counts.batch.num_accepted)


def after(counts: AcceptedCounts) -> Iterator[Place]:
    """Modes none and all: rows with drafts are corrected on the device, and any other has accepted exactly 1."""
    yield ROWS_HAVE_MOVED
    counts.fill_with_ones()


def private_target(counts: AcceptedCounts) -> Iterator[Place]:
    """After in mode align, where the host needs counts: nobody moves rows of a buffer of the runner's own."""
    counts.copy_to(counts.private)
    yield ROWS_HAVE_MOVED
    counts.copied.synchronize()
    counts.gather_and_upload(counts.private)


def hoist_wait(counts: AcceptedCounts) -> Iterator[Place]:
    """Wrong in mode align: the counts move along with the rows, and are gathered once more."""
    counts.copy_to(counts.batch.num_accepted)
    yield NEXT_STEP
    counts.copied.synchronize()
    yield ROWS_HAVE_MOVED
    counts.gather_and_upload(counts.batch.num_accepted)


def drop_gather(counts: AcceptedCounts) -> Iterator[Place]:
    """Wrong in mode align: a copy that completes after the row moves leaves counts in the old order."""
    counts.copy_to(counts.batch.num_accepted)
    yield ROWS_HAVE_MOVED
    counts.copied.synchronize()
    counts.upload()


def hoist_and_drop(counts: AcceptedCounts) -> Iterator[Place]:
    """Right: the counts are complete before the rows move, and move along with them, once."""
    counts.copy_to(counts.batch.num_accepted)
    yield NEXT_STEP
    counts.copied.synchronize()
    yield ROWS_HAVE_MOVED
    counts.upload()
