"""Launches that are computed once: what makes two of them equal, and that a known one has the same effects."""

import numpy as np
import pytest
import torch

from specmortem.incidents.mtp_draft_loop import arms
from specmortem.incidents.mtp_draft_loop.kernels import Geometry, Planner
from specmortem.incidents.mtp_draft_loop.launches import KnownKernel, KnownLaunches, plainly

pytestmark = pytest.mark.usefixtures("interpreted")


class Counted:
    """Adds one tensor to another, and counts how often."""

    def __init__(self, error=None):
        self.calls, self.error = 0, error

    def __call__(self, added, to, factor=1):
        self.calls += 1
        to += factor * added
        if self.error:
            raise self.error


def test_equal_arguments_are_computed_once_and_written_each_time():
    known, add = KnownLaunches(), Counted()
    for _ in range(3):
        added, to = torch.tensor([1, 2]), torch.tensor([10, 20])
        known(add, added, to)
        assert (added.tolist(), to.tolist()) == ([1, 2], [11, 22])
    assert add.calls == 1


@pytest.mark.parametrize(
    "changed",
    [([1, 3], [10, 20], 1), ([1, 2], [10, 21], 1), ([1, 2], [10, 20], 2), ([[1, 2]], [[10, 20]], 1)],
)
def test_one_argument_that_differs_is_another_launch(changed):
    known, add = KnownLaunches(), Counted()
    known(add, torch.tensor([1, 2]), torch.tensor([10, 20]), 1)
    added, to, factor = changed
    known(add, torch.tensor(added), found := torch.tensor(to), factor)
    assert add.calls == 2
    assert found.tolist() == (np.array(to) + factor * np.array(added)).tolist()


def test_what_a_launch_raises_is_raised_again_after_what_it_wrote():
    known, add = KnownLaunches(), Counted(ValueError("told"))
    for _ in range(2):
        to = torch.tensor([1])
        with pytest.raises(ValueError, match="told"):
            known(add, torch.tensor([5]), to)
        assert to.tolist() == [6]
    assert add.calls == 1


def test_a_kernel_is_computed_anew_for_another_grid_and_another_named_argument():
    class Kernel:
        __name__, grids = "kernel", []

        def __getitem__(self, grid):
            self.grids.append(grid)
            return Counted()

    known = KnownKernel(Kernel())
    for grid, factor in (((1,), 1), ((1,), 1), ((2,), 1), ((2,), 3)):
        known[grid](torch.tensor([1]), to=(found := torch.tensor([5])), factor=factor)
        assert found.tolist() == [5 + factor]
    assert known.kernel.grids == [(1,), (2,), (2,)]


@pytest.mark.parametrize(("place", "calls"), [("gap", 1), ("array", 2)])
def test_of_a_block_that_holds_the_plan_only_what_lies_between_its_arrays_may_differ(place, calls):
    plan = Planner(Geometry(5, 1, 1, 8)).plan([208, 407, 492, 416])
    known, seen = KnownLaunches(), []
    one = torch.from_numpy(plan.image.copy())
    other = one.clone()
    ends = {at + plan.arrays[name].nbytes for name, at in plan.offsets.items()} - set(plan.offsets.values())
    other[min(ends) if place == "gap" else 0] += 1
    assert plan.is_in(other.numpy()) == (place == "gap")

    def launch(plan, block):
        seen.append(block)

    for block in (one, other):
        known(launch, plan, block)
    assert len(seen) == calls


def test_plans_of_equal_batches_are_equal_whoever_made_them():
    one, two = (Planner(Geometry(5, 1, 1, 8)).plan([208, 407]) for _ in range(2))
    assert one == two and one is not two and len({one, two}) == 1
    assert one != Planner(Geometry(5, 1, 1, 8)).plan([208, 423])


@pytest.mark.parametrize("arm", ["before", "event"])
def test_every_schedule_is_what_it_is_without_known(arm):
    assert arms.schedules(arm, k=3) == arms.schedules(arm, k=3, launch=plainly)
