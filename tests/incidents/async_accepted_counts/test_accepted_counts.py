import random

import numpy as np
import pytest

from specmortem import device
from specmortem.detect import staging
from specmortem.errors import BadInputError
from specmortem.incidents.async_accepted_counts import fix
from specmortem.incidents.async_accepted_counts.engine.accepted_counts import AcceptedCounts, Timing
from specmortem.incidents.async_accepted_counts.engine.count_loop import (
    Change,
    CountLoop,
    JudgedRows,
    LoopSize,
    random_change,
)
from specmortem.incidents.async_accepted_counts.engine.policies import ALIGN_SHAPES, MODES, POLICIES, policy
from specmortem.incidents.async_accepted_counts.engine.uploads import Uploads

ROWS = {1: True, 2: True, 3: True, 4: False}
COUNTS = {1: 4, 2: 2, 3: 3, 4: 1}


def transition(dev, arm, mode="none", **options):
    loop = CountLoop(dev, policy(arm, mode), mode, LoopSize(4), **options)
    loop.start(ROWS, lambda name, drafted: [COUNTS[name]])
    loop.step(Change((1,), (5,)), lambda name, drafted: [1])
    return loop


def chain(arm, mode="none", steps=40, lanes=3, schedule="timed", seed=0, **options):
    """Random steps in one batch; host delays decide where copies land, or the schedule."""
    rng, numbers = random.Random(seed), np.random.default_rng(seed)
    dev = device.open("sim", schedule=schedule, seed=seed)
    taken = policy(arm, mode, options.get("scheduling", "async"))
    loop = CountLoop(dev, taken, mode, LoopSize(lanes=lanes), **options)
    counts = lambda name, drafted: numbers.integers(1, 5 if drafted else 2, lanes)  # noqa: E731
    loop.start({0: True, 1: True, 2: False}, counts)
    rows = {0: True, 1: True, 2: False}
    for step in range(steps):
        change = random_change(rng, rows, 10 + 2 * step, 8)
        order = loop.step(change, counts, Timing(rng.uniform(0, 60), rng.uniform(0, 40), 40.0))
        rows = {name: change.drafts(name) for name in order}
    return loop.judged()


def test_the_worked_example_is_wrong_at_one_landing_of_six():
    found = [
        one.outcome for one in device.enumerate_schedules(lambda dev: transition(dev, "before").judged())
    ]
    assert sorted(judged.wrong for judged in found) == [0, 0, 0, 0, 0, 1]
    assert JudgedRows(first=1, steady=2, wrong_first=1, wrong_steady=0) in found


@pytest.mark.parametrize("mode", MODES)
def test_after_is_right_under_every_schedule(mode):
    found = [
        one.outcome for one in device.enumerate_schedules(lambda dev: transition(dev, "after", mode).judged())
    ]
    assert {judged.wrong for judged in found} == {0}
    assert {(judged.first, judged.steady) for judged in found} == {(1, 2)}


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(("arm", "mode"), [("after", "none"), ("after", "all"), ("after", "align")])
def test_after_is_right_over_random_steps(arm, mode, seed):
    judged = chain(arm, mode, seed=seed)
    assert judged.wrong == 0 and judged.first > 20 and judged.steady > 100


@pytest.mark.parametrize("arm", ["hoist-and-drop", "private-target", "blocking-copy", "after-0.24.0"])
def test_other_ways_that_are_right(arm):
    assert chain(arm).wrong == 0


@pytest.mark.parametrize(
    ("arm", "mode", "kinds"),
    [
        ("before", "none", {"first"}),
        ("before", "align", {"first", "steady"}),
        ("no-wait", "align", {"first", "steady"}),
        ("hoist-wait", "align", {"steady"}),
        ("blocking-copy-gathered", "align", {"steady"}),
        ("drop-gather", "align", {"first", "steady"}),
    ],
)
def test_ways_that_are_wrong_and_for_which_rows(arm, mode, kinds):
    found = [chain(arm, mode, seed=seed) for seed in range(8)]
    wrong = {"first": sum(j.wrong_first for j in found), "steady": sum(j.wrong_steady for j in found)}
    assert {kind for kind, count in wrong.items() if count} == kinds


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("schedule", ["lazy", "immediate", "random"])
@pytest.mark.parametrize("arm", ["before", "after"])
def test_sync_scheduling_is_right(mode, schedule, arm):
    assert chain(arm, mode, schedule=schedule, scheduling="sync").wrong == 0


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize(("arm", "mode"), [("before", "align"), ("after", "none")])
def test_kernels_judge_as_the_references_do(arm, mode):
    assert chain(arm, mode, steps=12, run="triton") == chain(arm, mode, steps=12)


@pytest.mark.parametrize("step", ["take", "correct"])
def test_a_step_left_out_is_seen(step, monkeypatch):
    monkeypatch.setattr(AcceptedCounts, step, lambda self, *args: None)
    assert chain("after").wrong > 0


def races(arm, mode="none"):
    dev = device.open("sim", schedule="timed")
    with staging.watch(dev) as watched:
        transition(dev, arm, mode).step(Change((2,), (6,)), lambda name, drafted: [1])
        dev.synchronize()
    return [str(race) for race in watched.races]


def test_the_detector_names_the_copy_and_the_host_s_row_moves():
    found = races("before")
    assert found and all("num_accepted_tokens_cpu" in race and "counts to host" in race for race in found)
    assert all("input_batch.py" in race and "prepare_inputs_event" in race for race in found)


@pytest.mark.parametrize(("arm", "mode"), [("after", "none"), ("after", "align"), ("hoist-wait", "align")])
def test_the_detector_is_silent_where_the_array_is_nobody_else_s(arm, mode):
    assert races(arm, mode) == []


def test_names_that_mean_nothing_are_refused():
    for arm, mode in (("never", "none"), ("before", "never"), ("after-0.24.0", "align")):
        with pytest.raises(BadInputError, match=r"never|0\.24\.0"):
            policy(arm, mode)
    assert policy("after", "align") is POLICIES["private-target"] is fix.private_target
    assert set(ALIGN_SHAPES) < set(POLICIES)
    with pytest.raises(BadInputError, match="with sync scheduling"):
        CountLoop(device.open("sim"), policy("after", "none"), "none", scheduling="sync")


def test_uploads_refuse_more_rows_than_they_have():
    dev = device.open("sim")
    uploads = Uploads(dev, dev.default_stream, {"rows": (2,)})
    with pytest.raises(BadInputError, match="has 2 rows, not 3"):
        uploads.put("rows", [1, 2, 3])


@pytest.mark.parametrize(("waits", "lost"), [(True, False), (False, True)])
def test_uploads_are_not_written_again_ahead_of_their_copy(waits, lost):
    dev = device.open("sim", schedule="lazy")
    uploads = Uploads(dev, dev.default_stream, {"rows": (2,)})
    first = dev.host_buffer((2,), uploads["rows"].dtype)
    dev.copy_async(first, uploads.put("rows", [1, 2]))
    uploads.seal()
    if waits:
        uploads.wait()
    uploads.put("rows", [3, 4])
    dev.synchronize()
    assert (first[...].tolist() == [3, 4]) == lost
