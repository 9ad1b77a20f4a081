"""What the summary computes from rows."""

import pytest
from report import toy_repository as toy

from specmortem import facts as fact_files
from specmortem.errors import BadInputError
from specmortem.report.summary import broken_expectations, joint, spans, summarize
from specmortem.report.terminal import MARKS
from specmortem.verdict import DeviceInfo, Evidence, Results, Row

SIM, CUDA = DeviceInfo("sim", "simulated"), DeviceInfo("cuda", "a GPU")


@pytest.fixture
def facts(tmp_path):
    return fact_files.load("toy", toy.repository(tmp_path))


def row(outcome, subject="before", arm="before", cause="past-end", seed=0, runs=4):
    if outcome == "not-judged":
        return Row(cause, arm, subject, outcome, 0, 0, seed, Evidence(reason="no GPU"))
    return Row(cause, arm, subject, outcome, runs, runs if outcome == "fault" else 0, seed)


def results(*rows, device=SIM):
    return Results("toy", device, rows, {"python": "3"})


def test_one_fault_makes_the_joint_outcome_a_fault():
    cell = joint([row("clean"), row("fault", runs=2), row("not-judged")])
    assert (cell.outcome, [count.text for count in cell.counts]) == ("fault", ["2 of 6 runs"])


def test_what_was_counted_in_other_units_is_not_added_up():
    def counted(runs, faults, unit):
        evidence = Evidence(detail={"unit": unit})
        return Row("c", "a", "after", "fault" if faults else "clean", runs, faults, 0, evidence)

    cell = joint(
        [
            counted(5, 1, "judged_rows"),
            counted(2000, 0, "steps"),
            counted(7, 0, "judged_rows"),
            row("clean", runs=1),
        ]
    )
    assert [count.text for count in cell.counts] == ["0 of 2,000 steps", "1 of 12 judged rows", "0 of 1 run"]


def test_clean_outweighs_not_judged():
    assert joint([row("not-judged"), row("clean")]).outcome == "clean"


def test_not_judged_keeps_its_reason():
    assert joint([row("not-judged")]).reason == "no GPU"


def test_no_rows_are_not_run():
    assert MARKS[joint([]).outcome].word == "not run"


def test_neighbouring_releases_with_one_outcome_become_a_span():
    rows = [row("fault", f"vllm==0.{n}.0") for n in (9, 22, 10)] + [row("clean", "vllm==0.24.0")]
    assert [(s.cell.outcome, s.text) for s in spans(rows)] == [
        ("fault", "vllm 0.9.0 to 0.22.0 (3 releases tried)"),
        ("clean", "vllm 0.24.0"),
    ]


def test_a_clean_release_between_faulting_ones_splits_the_span():
    rows = [row(o, f"vllm==0.{n}.0") for n, o in enumerate(["fault", "clean", "fault"])]
    assert [s.cell.outcome for s in spans(rows)] == ["fault", "clean", "fault"]


def test_packages_do_not_share_a_span():
    rows = [row("fault", "vllm==0.2.0"), row("fault", "flashinfer==0.2.0")]
    assert [s.package for s in spans(rows)] == ["flashinfer", "vllm"]


def test_controls_stay_out_of_the_before_and_after_columns(facts):
    rows = (row("clean", arm="one-request"), row("fault"), row("clean", "after", "after"))
    line = summarize(facts, results(*rows)).lines[0]
    assert (line.before.outcome, line.before.counts[0].runs, line.after.outcome) == ("fault", 4, "clean")


def test_a_cause_without_rows_is_not_run(facts):
    line = summarize(facts, results(row("fault"))).lines[1]
    assert (line.before.outcome, line.after.outcome, line.releases) == ("not-run", "not-run", ())


def test_an_installed_copy_is_shown_beside_the_releases(facts):
    line = summarize(facts, results(row("fault", "installed", "release"))).lines[0]
    assert [(subject, cell.outcome) for subject, cell in line.others] == [("installed", "fault")]


def test_a_row_of_an_unknown_cause_is_refused(facts):
    with pytest.raises(BadInputError, match="cause 'other' is not in its incident.toml; known: past-end"):
        summarize(facts, results(row("fault", cause="other")))


@pytest.mark.parametrize(
    ("seeds", "text"),
    [([], "none"), ([3, 1], "1, 3"), ([0, 1, 2, 3], "0 to 3"), ([0, 1, 2, 9], "0, 1, 2, 9")],
)
def test_seeds_in_words(facts, seeds, text):
    assert summarize(facts, results(*(row("fault", seed=s) for s in seeds))).seeds == text


def test_before_must_fault(facts):
    assert broken_expectations(facts, results(row("clean"))) == [
        "past-end: before is clean, expected a fault"
    ]


def test_before_must_be_judged_where_it_can_be(facts):
    assert broken_expectations(facts, results(row("not-judged"))) == [
        "past-end: before is not judged, expected a fault"
    ]


def test_a_cause_that_needs_a_gpu_may_stay_unjudged_on_the_simulated_device(facts):
    unjudged = row("not-judged", cause="gpu-only")
    assert broken_expectations(facts, results(unjudged)) == []
    assert broken_expectations(facts, results(unjudged, device=CUDA)) != []


def test_after_must_not_fault_in_any_arm(facts):
    broken = broken_expectations(facts, results(row("fault"), row("fault", "after", "graphs")))
    assert broken == ["past-end: after, arm graphs, faults in 4 of 4 runs, expected clean"]


def test_after_may_stay_unjudged(facts):
    assert broken_expectations(facts, results(row("fault"), row("not-judged", "after", "after"))) == []


def test_a_control_of_before_may_be_clean(facts):
    assert broken_expectations(facts, results(row("fault"), row("clean", arm="one-request"))) == []


def test_no_rows_at_all_break_the_expectation(facts):
    assert broken_expectations(facts, results()) == ["results.json has no rows"]
