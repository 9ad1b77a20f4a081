import pytest

from specmortem.errors import BadInputError
from specmortem.incidents.async_accepted_counts import arms
from specmortem.incidents.async_accepted_counts.engine.policies import ALIGN_SHAPES


@pytest.fixture(scope="module")
def shapes():
    return {arm: arms.copy_completions(arm, "align") for arm in ("before", *ALIGN_SHAPES)}


def by_landing(found):
    return {where: one["wrong"] for where, one in found["landings"].items()}


@pytest.mark.parametrize("mode", ["none", "all"])
def test_before_is_wrong_only_inside_and_only_at_first_drafts(mode):
    found = arms.copy_completions("before", mode, 60)
    assert found["landings"]["before"]["total"] > 40 and found["landings"]["after"]["total"] == 60
    assert by_landing(found) == {"before": 0, "inside": found["faults"], "after": 0} and found["faults"] > 0
    assert found["wrong_rows"] == found["wrong_first_drafts"] == found["counts_of_who_left"]


@pytest.mark.parametrize("mode", ["none", "all", "align"])
def test_after_is_right_at_every_landing(mode):
    found = arms.copy_completions("after", mode, 60)
    assert found["faults"] == 0 and found["interleavings"] >= 60


def test_what_0_24_0_does_leaves_the_copy_in_flight_and_is_right():
    found = arms.copy_completions("after-0.24.0", "none", 60)
    assert found["faults"] == 0 and found["interleavings"] > 240


def test_two_of_the_four_align_shapes_are_wrong(shapes):
    wrong = {arm: shapes[arm]["faults"] for arm in ALIGN_SHAPES}
    assert wrong["hoist-wait"] > 0 and wrong["drop-gather"] > 0
    assert wrong["hoist-and-drop"] == wrong["private-target"] == 0


def test_where_each_align_shape_is_wrong(shapes):
    assert {where for where, n in by_landing(shapes["before"]).items() if n} == {"before", "inside"}
    assert {where for where, n in by_landing(shapes["hoist-wait"]).items() if n} == {"before"}
    assert {where for where, n in by_landing(shapes["drop-gather"]).items() if n} == {"inside", "after"}
    assert by_landing(shapes["hoist-wait"])["before"] == by_landing(shapes["before"])["before"]


def test_align_up_to_0_21_0_is_wrong_without_a_race():
    found = arms.copy_completions("blocking-copy-gathered", "align", 60)
    assert found["interleavings"] == 60 and found["faults"] > 0
    assert found["landings"].pop("not-in-flight") == {"wrong": found["faults"], "total": 60}
    assert {n["total"] for n in found["landings"].values()} == {0}


@pytest.mark.parametrize(
    ("arm", "in_flight"), [("after", False), ("after-0.24.0", True), ("hoist-wait", True)]
)
def test_a_copy_is_in_flight_unless_there_is_none_or_its_own_step_waits_for_it(arm, in_flight):
    found = arms.copy_completions(arm, "none", 20)["landings"]
    assert ("not-in-flight" not in found) == in_flight


def test_the_event_was_waited_for_each_time_and_did_not_help():
    tried = ("no-wait", "before", "hoist-wait", "private-target", "after")
    found = {arm: arms.copy_completions(arm, "none", 40) for arm in tried}
    assert found["before"]["landed_before_the_read"] == found["before"]["interleavings"]
    assert 0 < found["before"]["faults"] < found["no-wait"]["faults"]
    assert all(found[arm]["faults"] == 0 for arm in ("hoist-wait", "private-target", "after"))


def test_the_host_is_wrong_about_many_rows_and_the_correction_leaves_first_drafts():
    host, corrected = (arms.copy_completions("before", mode, 60) for mode in ("align", "none"))
    assert host["wrong_rows"] > host["wrong_first_drafts"] > 0
    assert corrected["wrong_rows"] == corrected["wrong_first_drafts"] == host["wrong_first_drafts"]


@pytest.mark.parametrize("mode", ["none", "align"])
def test_before_survives_the_run_that_the_detector_watches(mode):
    found = arms.races("before", mode)
    assert found["races"] and found["wrong_in_this_run"] == 0 < found["wrong_landings"]


def test_a_second_permutation_is_wrong_in_a_run_without_a_race():
    found = arms.races("hoist-wait", "align")
    assert not found["races"] and found["wrong_in_this_run"] > 0


def test_the_worked_example_landing_by_landing():
    found = arms.worked_example()
    assert sorted(one["phase"] for one in found) == ["after", "before", *["inside"] * 4]
    wrong = [one for one in found if one["got"] != one["own"]]
    assert [(one["phase"], one["got"], one["own"]) for one in wrong] == [("inside", [4, 2, 3], [1, 2, 3])]
    assert wrong[0]["host"] == [4, 2, 3, 1] and {one["host"][3] for one in found} == {1}
    steps = [step["what"] for step in wrong[0]["history"]]
    assert steps.index("copy lands") == 1 and steps[0] == "write"
    after_copy = wrong[0]["history"][2]
    assert (after_copy["what"], after_copy["row"], after_copy["before"]) == ("read", 0, [4, 2, 3, 1])


def test_the_window_is_as_wide_as_the_time_between_adding_and_swapping():
    narrow, wide = (
        arms.window(delays_us=range(150, 320, 10), trials=1, between_us=width) for width in (30.0, 90.0)
    )
    assert 0 < sum(narrow["wrong"]) < sum(wide["wrong"]) < len(wide["wrong"])
    assert sum(arms.window(arm="after", delays_us=range(150, 320, 10), trials=1)["wrong"]) == 0


@pytest.mark.parametrize(("mode", "lanes"), [("none", 8), ("align", 8)])
def test_random_transitions(mode, lanes):
    before, after = (arms.transitions(arm, 4000, mode=mode, lanes=lanes) for arm in ("before", "after"))
    assert before["faults"] > 0 and after["faults"] == 0
    assert after["transitions"] == 4000 and after["judged_rows"] == before["judged_rows"] > 4000
    assert mode == "align" or before["faults"] == before["wrong_first_drafts"]


def test_a_blocking_copy_costs_the_overlap_and_after_costs_nothing():
    found = arms.throughput(rounds=1, steps=30)
    assert found["ratio"]["after"] >= 0.99 and found["ratio"]["blocking-copy"] < 0.9


# Text


def test_texts_are_garbled_before_and_intact_after():
    before, after = (arms.generations(arm) for arm in ("before", "after"))
    assert 30 < before["intact"] < 48 and before["ended_early"] > 0
    assert (after["intact"], after["requests"], after["wrong_starts"]) == (48, 48, [])
    assert set(before["garbled"]) <= {start["request"] for start in before["wrong_starts"]}
    assert before["wrong_first_drafts"] == len(before["wrong_starts"])
    assert all(start["own"] == 1 < start["got"] for start in before["wrong_starts"])


@pytest.mark.parametrize("completion", ["early", "late"])
def test_texts_are_intact_when_the_copy_lands_ahead_or_behind(completion):
    assert arms.generations("before", completion=completion)["intact"] == 48


@pytest.mark.parametrize("control", ["sync", "launch-blocking", "one-request"])
def test_texts_are_intact_under_a_control(control):
    assert arms.generations("before", control=control)["intact"] == 48


@pytest.mark.parametrize(("arm", "intact"), [("before", False), ("after", True)])
def test_texts_in_mode_all_go_as_in_mode_none(arm, intact):
    assert (arms.generations(arm, "all")["intact"] == 48) == intact


def test_texts_in_mode_align():
    assert arms.generations("before", "align", "early")["intact"] < 48  # no race is needed
    assert arms.generations("before", "align", "late")["intact"] == 48
    assert arms.generations("after", "align")["intact"] == 48
    assert arms.generations("before", "align", control="sync")["intact"] == 48
    assert arms.generations("before", "align", control="one-request")["intact"] == 48


def test_launch_blocking_garbles_texts_in_mode_align_without_a_race():
    before, after = (arms.generations(arm, "align", control="launch-blocking") for arm in ("before", "after"))
    assert before["intact"] < 48 == after["intact"]
    assert set(before["garbled"]) <= {start["request"] for start in before["wrong_starts"]}


@pytest.mark.parametrize(
    ("arm", "completion", "intact"),
    [
        ("hoist-wait", "window", False),
        ("drop-gather", "late", False),
        ("hoist-and-drop", "window", True),
        ("hoist-and-drop", "late", True),
        ("private-target", "window", True),
    ],
)
def test_texts_of_the_four_align_shapes(arm, completion, intact):
    assert (arms.generations(arm, "align", completion)["intact"] == 48) == intact


def test_graph_metadata_by_tokens_has_rows_that_no_request_has_and_they_are_inert():
    found = arms.metadata(72, 3)
    assert found["before"]["shapes"]["state_indices"] == [288, 4]
    assert found["after"]["shapes"]["state_indices"] == [72, 4]
    assert (found["before"]["rows_of_no_request"], found["after"]["rows_of_no_request"]) == (216, 0)
    assert found["inert"]


@pytest.mark.usefixtures("interpreted")
def test_the_kernels_leave_the_added_rows_alone():
    assert arms.metadata(3, 3, padded=4, run="triton")["inert"]


def test_names_that_mean_nothing_are_refused():
    with pytest.raises(BadInputError, match="no completion 'never'"):
        arms.generations(completion="never")
    with pytest.raises(BadInputError, match="no arm 'never'"):
        arms.copy_completions("never")
