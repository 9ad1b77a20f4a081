import pytest

from specmortem.errors import BadInputError
from specmortem.incidents.pp_align_copy import arms as pp_align


@pytest.mark.parametrize("pp_size", [2, 3])
@pytest.mark.parametrize("control", pp_align.CONTROLS)
def test_before_behaves_under_each_control_as_stated(control, pp_size):
    cell = pp_align.control("before", control, pp_size=pp_size)
    assert (cell["effect"] == "clean") == (pp_align.STATED[control] == "clean")


@pytest.mark.parametrize("control", pp_align.CONTROLS)
def test_after_says_what_it_should_under_each_control(control):
    cell = pp_align.control("after", control, pp_size=3)
    assert cell["effect"] == "clean" and cell["outputs"] == cell["expected"] and cell["copies"] > 0


@pytest.mark.parametrize(("width", "token"), [(1024, 1023), (8192, 8191)])
def test_before_ends_in_one_token_for_ever(width, token):
    cell = pp_align.control("before", width=width)
    assert cell["effect"] == "constant-token" and cell["nan_rows"] > 0
    assert any(set(cell["outputs"][str(name)][-4:]) == {token} for name in cell["texts_stuck"])


@pytest.mark.parametrize("half", ["row-only", "table-only"])
def test_each_half_of_the_fix_alone_ruins_texts(half):
    cell = pp_align.control(half)
    assert cell["effect"] == "constant-token" and cell["missed_copies"] > 0


@pytest.mark.parametrize("subject", ["before", "row-only", "table-only"])
def test_random_workloads_find_the_fault(subject):
    found = pp_align.random_workloads(subject, 40)
    assert found["faults"] > 10 and found["wrong_starts"] > 0 and found["witness"]


def test_before_hits_neighbours_resets_counts_and_leaves_block_ends_unsaved():
    found = pp_align.random_workloads("before", 60)
    assert found["damage"]["live-neighbour"] > 0 and found["nan_starts"] > 0
    assert found["accepted_resets"] > 0 and found["unsaved_ends"] > 0


def test_random_workloads_are_clean_after_and_reach_what_they_should():
    found = pp_align.random_workloads("after", 150, seed=5000)
    assert found["faults"] == 0 and found["witness"] == ""
    assert found["copies"] > 1000 and found["preemptions"] > 0


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("subject", ["before", "after"])
def test_kernels_leave_what_the_reference_leaves(subject):
    found = pp_align.same_as_reference(subject, 4, seed=40)
    assert found["faults"] == 0 and found["copies"] > 0


def test_every_small_case_is_clean_after_and_some_are_not_before():
    before, after = (pp_align.every_small_case(subject, decisions=3) for subject in ("before", "after"))
    assert 0 < before["faults"] < before["cases"] == after["cases"]
    assert after["faults"] == 0


def test_every_interleaving_is_clean_after_and_some_are_not_before():
    before, after = (pp_align.interleavings(subject, decisions=1) for subject in ("before", "after"))
    assert 0 < before["faults"] < before["interleavings"] == after["interleavings"] >= after["cases"] == 32
    assert after["faults"] == 0 and before["witness"]


def test_the_reported_workload_goes_wrong_before_within_some_dozens_of_requests():
    before = pp_align.reported_workload("before", seed=0)
    assert before["first_wrong_copy"]["request"] <= 24 and before["first_damage"] is not None


def test_damage_outlives_its_request_in_a_prefix_cache():
    before, after = (pp_align.prefix_hits(subject) for subject in ("before", "after"))
    assert 0 < before["faults"] < before["prefixes"] == after["prefixes"]
    assert after["faults"] == 0


def test_a_timeline_shows_owners_and_the_first_wrong_copy():
    timeline = pp_align.timeline("before")
    wrong = [copy for step in timeline for copy in step["copies"] if copy["damage"]]
    assert wrong and all(copy["when"] == "post" for copy in wrong)
    assert len(timeline[0]["gathered"]) == pp_align.SMALL.max_num_seqs


def test_unknown_names_are_refused():
    for call in (lambda: pp_align.control("never"), lambda: pp_align.control("after", "never")):
        with pytest.raises(BadInputError, match="never"):
            call()
