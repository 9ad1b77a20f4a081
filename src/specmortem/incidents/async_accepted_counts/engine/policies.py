"""What each arm does with the counts in a mode: the fixes of `fix`, and four controls beside them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Literal

from specmortem.errors import BadInputError
from specmortem.incidents.async_accepted_counts import fix
from specmortem.incidents.async_accepted_counts.fix import ROWS_HAVE_MOVED, Place

if TYPE_CHECKING:
    from specmortem.incidents.async_accepted_counts.engine.accepted_counts import AcceptedCounts

Policy = Callable[["AcceptedCounts"], Iterator[Place]]
Mode = Literal["none", "all", "align"]
Scheduling = Literal["async", "sync"]
MODES: tuple[Mode, ...] = ("none", "all", "align")


def after_as_released(counts: AcceptedCounts) -> Iterator[Place]:
    """0.24.0: the copy is still made, and nobody looks at it."""
    counts.copy_to(counts.batch.num_accepted)
    yield ROWS_HAVE_MOVED
    counts.fill_with_ones()


def no_wait(counts: AcceptedCounts) -> Iterator[Place]:
    """`before` without its wait."""
    counts.copy_to(counts.batch.num_accepted)
    yield ROWS_HAVE_MOVED
    counts.gather_and_upload(counts.batch.num_accepted)


def blocking_copy(counts: AcceptedCounts) -> Iterator[Place]:
    """No overlap: the step that makes the counts waits for them, and they move along with the rows."""
    counts.copy_to(counts.batch.num_accepted)
    counts.copied.synchronize()
    yield ROWS_HAVE_MOVED
    counts.upload()


def blocking_copy_gathered(counts: AcceptedCounts) -> Iterator[Place]:
    """Mode align up to 0.21.0: without a race, and wrong as `hoist_wait` is."""
    counts.copy_to(counts.batch.num_accepted)
    counts.copied.synchronize()
    yield ROWS_HAVE_MOVED
    counts.gather_and_upload(counts.batch.num_accepted)


ALIGN_SHAPES = ("hoist-wait", "drop-gather", "hoist-and-drop", "private-target")
POLICIES: dict[str, Policy] = {
    "before": fix.before,
    "after": fix.after,
    "after-0.24.0": after_as_released,
    "no-wait": no_wait,
    "hoist-wait": fix.hoist_wait,
    "drop-gather": fix.drop_gather,
    "hoist-and-drop": fix.hoist_and_drop,
    "private-target": fix.private_target,
    "blocking-copy": blocking_copy,
    "blocking-copy-gathered": blocking_copy_gathered,
}


def policy(arm: str, mode: Mode, scheduling: Scheduling = "async") -> Policy:
    """What an arm does in a mode. Raises BadInputError for an unknown name, and for one that means nothing there.

    With `sync` scheduling every arm is one: the copy has completed before rows move, and counts move along with them.
    """
    if arm not in POLICIES or mode not in MODES:
        known = f"arms {', '.join(POLICIES)}; modes {', '.join(MODES)}"
        raise BadInputError(f"no arm {arm!r} in mode {mode!r}; {known}")
    if scheduling == "sync":
        return fix.drop_gather
    if mode != "align":
        return POLICIES[arm]
    if arm == "after-0.24.0":
        raise BadInputError(f"arm {arm!r}: mode align needs the counts on the host; take 'before' or 'after'")
    return fix.private_target if arm == "after" else POLICIES[arm]
