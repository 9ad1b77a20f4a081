"""Before and its fixes: what the first of two passes reads, and how far each is from `before`."""

import ast
import difflib
import inspect

import numpy as np
import pytest

from specmortem import device
from specmortem.incidents.mtp_draft_loop import fix
from specmortem.incidents.mtp_draft_loop.controls import ARMS, wrong_stream_sync
from specmortem.incidents.mtp_draft_loop.kernels import Geometry, Planner
from specmortem.incidents.mtp_draft_loop.probe import TwoPasses

pytestmark = pytest.mark.usefixtures("interpreted")
FIXES = (fix.reference, fix.event, fix.fresh, fix.pageable, fix.reread_lengths, fix.stream_sync)


def guarded(draft_pass):
    """Whether the first pass finds its own plan, and not the second."""
    loop = TwoPasses(device.open("sim", schedule="lazy"), Planner(Geometry(5, 1, 1, 8)), [208, 407, 492, 416])
    seen = loop.found(draft_pass)["kv_tile_indices"]
    one, two = (plan.image[loop.two[0].offsets["kv_tile_indices"] :][:16].view(np.int32) for plan in loop.two)
    held = [(seen[:4] == expected).all() for expected in (one, two)]
    assert sum(held) == 1
    return held[0]


@pytest.mark.parametrize("draft_pass", FIXES)
def test_with_a_fix_the_first_pass_reads_its_own_plan(draft_pass):
    assert guarded(draft_pass)


@pytest.mark.parametrize("draft_pass", [fix.before, wrong_stream_sync])
def test_without_the_order_it_reads_the_second(draft_pass):
    assert not guarded(draft_pass)


def statements(draft_pass):
    return [ast.unparse(each) for each in ast.parse(inspect.getsource(draft_pass)).body[0].body[1:]]


@pytest.mark.parametrize(
    ("draft_pass", "differ"),
    [("event", 2), ("fresh", 5), ("pageable", 4), ("reread-lengths", 2), ("stream-sync", 1)],
)
def test_the_difference_to_before_is_a_few_statements(draft_pass, differ):
    found = difflib.ndiff(statements(fix.before), statements(ARMS[draft_pass].draft_pass))
    assert sum(line.startswith(("+ ", "- ")) for line in found) == differ


def test_all_forms_are_read_in_two_minutes():
    assert len(inspect.getsource(fix).splitlines()) < 80
