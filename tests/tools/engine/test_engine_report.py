"""Comparisons and tables from results, committed or not."""

from __future__ import annotations

import copy
import json

import pytest
from tools.engine.engine_helpers import run, tables

from specmortem import facts
from specmortem import statistics as exact
from specmortem.errors import BadInputError, UnavailableError
from specmortem.tools.engine import arms, compare, report, result
from specmortem.tools.engine.compare import MEASURES, Rate
from specmortem.tools.engine.result import ArmRuns, Counts, EngineResults, Run, Start

YOUNGER = {"draft_delay_us", "draft_passes", "patched_calls"}  # fields of a run that older results lack
CUES = {
    "broken": {"fault": "raise", "at": 3},
    "wrong": {"fault": "wrong", "every": 5},
    "other": {"at": 1},
    "bug": {"fault": "bug", "at": 3},
}


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    folder = tmp_path_factory.mktemp("results")
    data = tables(**CUES)
    data["arms"].append({"name": "not-run", "set": {"engine.max_num_seqs": 2}})
    data["pairs"].append({"left": "sound", "right": "plain"})
    data["pairs"].append({"left": "sound", "right": "not-run"})
    data["notes"] = ["A <note>."]
    run(folder, data, ["sound", "plain", *CUES])
    return folder / "engine.json"


@pytest.fixture(scope="module")
def results(path):
    return EngineResults.load(path)


def said(results, right, measure):
    return next(
        each for each in compare.comparisons(results) if each.right == right and each.measure.name == measure
    )


def test_a_file_comes_back_as_it_was(results, tmp_path):
    assert EngineResults.load(results.save(tmp_path / "again.json")) == results
    assert results.status == "partial", "one arm was not run"


def test_a_file_has_every_field_in_order_and_requests_as_rows(path, results):
    data = json.loads(path.read_text())
    assert list(data) == ["schema", *EngineResults.__struct_fields__]
    assert list(data["arms"][0]) == list(ArmRuns.__struct_fields__)
    assert list(data["arms"][0]["starts"][0]) == list(Start.__struct_fields__)
    found, (said, *_) = data["arms"][3]["runs"][0], results.arms[3].runs[0].kept
    assert list(found) == list(Run.__struct_fields__)
    assert list(found["counts"]) == list(Counts.__struct_fields__)
    assert found["kept"][0] == [
        list(value) if isinstance(value, tuple) else value
        for value in (getattr(said, name) for name in result.EngineRequest.__struct_fields__)
    ]


@pytest.mark.parametrize("kind", ["arms", "starts", "runs", "counts"])
def test_a_file_without_one_of_its_fields_is_refused(path, kind):
    data = json.loads(path.read_text())
    arm = data["arms"][0]
    table = {"arms": arm, "starts": arm["starts"][0], "runs": arm["runs"][0]}
    table["counts"] = table["runs"]["counts"]
    for name in [name for name in table[kind] if name not in YOUNGER]:
        held = table[kind].pop(name)
        with pytest.raises(BadInputError, match=f"arms/0.*: {name} is missing"):
            EngineResults.from_dict(data)
        table[kind][name] = held


def test_a_file_holds_the_requests_alone_that_something_is_to_be_seen_of(path):
    arms_of = {arm["name"]: arm for arm in json.loads(path.read_text())["arms"]}
    kept = {name: sum(len(run["kept"]) for run in arm["runs"]) for name, arm in arms_of.items()}
    assert kept == {"sound": 0, "plain": 0, "broken": 0, "wrong": 10, "other": 0, "bug": 0}
    assert path.stat().st_size < 60_000


def test_a_file_that_is_older_than_idle_work_of_drafts_is_read(path, results):
    data = json.loads(path.read_text())
    for each in (each for arm in data["arms"] for each in arm["runs"]):
        assert [each.pop(name) for name in sorted(YOUNGER)] == [None, 0, 0]
    assert EngineResults.from_dict(data) == results
    data["arms"][0]["runs"][0]["draft_passes"] = -1
    with pytest.raises(BadInputError, match="arms/0/runs/0/draft_passes"):
        EngineResults.from_dict(data)


def test_a_file_with_a_kind_that_is_no_fault_is_refused(path, tmp_path):
    data = json.loads(path.read_text())
    data["arms"][2]["runs"][0]["kind"] = "python-error"
    with pytest.raises(BadInputError, match="arms/2/runs/0/kind"):
        EngineResults.from_dict(data)


def test_a_file_that_is_none_is_refused_with_its_place(path):
    data = json.loads(path.read_text())
    for change, said in (
        (lambda d: d.update(schema=0), "schema"),
        (lambda d: d.pop("schema"), "top level: schema is missing"),
        (lambda d: d.pop("arms"), "top level: arms is missing"),
        (lambda d: d["arms"][0].pop("runs"), "arms/0: runs is missing"),
        (lambda d: d["arms"][0]["config"].pop("env"), "arms/0: config: env is missing"),
        (lambda d: d["pairs"][0].pop("variable"), "top level: pairs: variable is missing"),
        (lambda d: d["arms"][0]["runs"][0].update(colour=1), "arms/0/runs/0: unknown key 'colour'"),
        (lambda d: d["arms"][3]["runs"][0]["kept"][0].pop(), "arms/3/runs/0/kept/0: got is missing"),
        (lambda d: d["arms"][3]["runs"][0]["kept"][0].append(1), "arms/3/runs/0/kept/0"),
    ):
        broken = copy.deepcopy(data)
        change(broken)
        with pytest.raises(BadInputError, match=f"x: {said}"):
            EngineResults.from_dict(broken, "x")
    with pytest.raises(BadInputError, match="x: top level"):
        EngineResults.from_dict([], "x")


def test_faults_are_runs_and_separate_the_arms(results):
    found = said(results, "broken", "faults")
    assert found.rates == (Rate(0, 5), Rate(5, 5))
    assert found.p == pytest.approx(2 / 252)
    assert found.adjusted == pytest.approx(4 * 2 / 252), "four pairs have trials"
    assert found.said == "more in broken (p = 0.032 over the pairs)"
    assert compare.kinds(results.arm("broken")) == "5 illegal-address"


def test_an_exception_is_no_fault(results):
    found = said(results, "bug", "faults")
    assert (found.p, found.adjusted, found.rates) == (None, None, (Rate(0, 5), Rate(0, 0)))
    assert found.said == (
        "not judged: bug ended with python-error: builtins.AttributeError: 'NoneType' object has no attribute 'step'"
    )
    assert [each.measure.name for each in compare.comparisons(results) if each.right == "bug"] == [
        "faults",
        "wrong",
        "early ends",
        "loops",
    ]


def test_wrong_answers_are_judged_by_run_and_told_by_request(results):
    found = said(results, "wrong", "wrong")
    assert found.rates == (Rate(0, 5), Rate(5, 5))
    assert found.said == "more in wrong (p = 0.024 over the pairs)", "broken has no whole run: three pairs"
    assert compare.requests(results.arm("wrong"), found.measure) == (10, 50)
    assert compare.requests(results.arm("wrong"), MEASURES[0]) is None


def test_a_burst_in_one_run_is_one_run():
    """43 bad requests in one run of twelve are one run: no p of requests makes them a difference."""
    runs = [counted(128, 43), *(counted(128, 0) for _ in range(11))]
    left, right = arm_of("left", runs), arm_of("right", [counted(128, 0)] * 12)
    pairs = ({"left": "left", "right": "right", "variable": "x", "question": ""},)
    results = EngineResults("toy", "?", "complete", "", "", 0, {}, (left, right), pairs)
    found = said(results, "right", "wrong")
    assert found.rates == (Rate(1, 12), Rate(0, 12)) and found.p == 1.0
    assert exact.fisher(43, 12 * 128, 0, 12 * 128) < 1e-9, "what requests would have said"
    assert found.said.startswith("no difference shown")


def counted(judged, wrong, outcome="whole", number=0):
    counts = Counts(ended=judged, judged=judged, wrong=wrong)
    return Run(number, 0, False, outcome, "value" if outcome == "whole" else "illegal-address", counts)


def arm_of(name, runs):
    start = Start("value", "done", None, "", 0, "", "", 1.0)
    config = {"vllm": "0.23.0", "engine": {}, "env": {}, "workload": {}}
    return ArmRuns(name, config, "", "", len(runs), (start,), tuple(runs))


def test_answers_of_a_run_that_faulted_are_not_judged():
    arm = arm_of("a", [counted(10, 1), counted(10, 5, outcome="fault")])
    assert [compare.rate(arm, m) for m in MEASURES[:2]] == [Rate(1, 2), Rate(1, 1)]


def test_a_difference_that_does_not_show_is_told_with_n_and_the_bound(results):
    for measure in ("wrong", "faults"):
        assert said(results, "other", measure).said == (
            "no difference shown: sound 0 / 5 (below 45%); other 0 / 5 (below 45%)"
        )


def test_a_count_of_zero_has_one_bound_wherever_it_stands():
    assert str(Rate(0, 12)) == "0 / 12 (below 22%)"
    assert str(Rate(12, 12)) == "12 / 12 (74% to 100%)"
    assert str(Rate(0, 0)) == "not tried"


def test_a_difference_that_may_be_chance_is_told_so(results):
    pair = ("a", "b", "x", MEASURES[0])
    found = compare.Comparison(*pair, (Rate(1, 5), Rate(0, 5)), adjusted=1.0)
    assert found.said == "no difference shown at p < 0.05 (p = 1 over the pairs)"
    empty = compare.Comparison(*pair, (Rate(1, 5), Rate(0, 0)))
    assert (empty.p, empty.said) == (None, "not judged: an arm has no trial")


@pytest.mark.parametrize(("pairs", "shown"), [(6, True), (7, False)])
def test_the_more_pairs_the_less_one_of_them_says(pairs, shown):
    left = arm_of("left", [counted(10, 0, outcome="fault", number=n) for n in range(5)])
    others = [arm_of(f"r{n}", [counted(10, 0)] * 5) for n in range(pairs)]
    named = tuple({"left": "left", "right": each.name, "variable": "x", "question": ""} for each in others)
    others[1:] = [arm_of(each.name, left.runs) for each in others[1:]]
    results = EngineResults("toy", "?", "complete", "", "", 0, {}, (left, *others), named)
    assert ("more in left" in said(results, "r0", "faults").said) is shown


def test_a_pair_whose_arm_was_not_run_is_left_out(results):
    assert "not-run" not in {each.right for each in compare.comparisons(results)}


def test_acceptance_is_pooled_and_ranges_over_runs(results):
    told = compare.acceptance(results.arm("sound"))
    assert told.endswith("over 5 runs)") and "%" in told
    assert compare.acceptance(results.arm("plain")) == "no drafts"
    assert compare.acceptance(results.arm("broken")) == "not counted"


def test_what_an_exception_said_is_cut_for_a_table(results):
    arm = results.arm("bug")
    told = "words of an exception " * 20
    starts = [start.replace(message=told) for start in arm.starts]
    shown = compare.kinds(arm.replace(starts=tuple(starts)))
    assert shown.startswith("not judged: python-error: words of an") and shown.endswith(" ...")
    assert len(shown) <= len("not judged: ") + compare.ENDS_SHOWN


def test_times_leave_the_first_run_of_a_start_out(results):
    arm = results.arm("sound")
    later = sorted(each.median_ms for each in arm.runs[1:])
    assert compare.step_times(arm)[0] == pytest.approx((later[1] + later[2]) / 2)
    assert compare.step_times(results.arm("broken")) == (None, None)


def test_arms_are_a_row_each(results):
    table = report.arms_table(results)
    assert list(table["arm"]) == ["sound", "plain", "broken", "wrong", "other", "bug"]
    assert list(table["runs"]) == (
        ["5 of 5 in 1 start"] * 2 + ["5 of 5 in 5 starts"] + ["5 of 5 in 1 start"] * 2 + ["0 of 5 in 1 start"]
    )
    assert table.loc[3, "wrong"] == "5 / 5 (48% to 100%); 10 of 50 requests"
    assert table.loc[0, "faults"] == "0 / 5 (below 45%)"
    assert table.loc[0, "unlike plain"] == table.loc[5, "faults"] == "not judged"
    assert table.loc[5, "ends"].startswith("not judged: python-error: builtins.AttributeError")


def test_an_upright_table_has_a_column_an_arm_and_only_what_was_judged(results):
    table = report.arms_table(results)
    whole = report.upright(table)
    assert list(whole.columns) == list(table["arm"]) and whole.index.name == "arm"
    assert list(whole.loc["faults"]) == list(table["faults"])
    bare = report.upright(table.assign(wrong="not judged", ends=""))
    assert set(whole.index) - set(bare.index) <= {"wrong", "ends"} and "wrong" not in bare.index


def test_how_it_was_run_names_device_driver_python_pins_seed_and_commands(results):
    first = results.arms[0]
    host = {"driver": "580.1", "system": "Linux"}
    versions = {"python": "3.12.3", "vllm": "0.23.0", "torch": "2.11.0", "flashinfer-python": "0.6.12"}
    start = first.starts[0].replace(device="NVIDIA H200", host=host, versions=versions)
    some = results.replace(arms=(first.replace(starts=(start,)), results.arms[1].replace(starts=())))
    assert report.how(some).split("\n") == [
        "NVIDIA H200, driver 580.1, Python 3.12.3; flashinfer-python==0.6.12, torch==2.11.0, vllm==0.23.0",
        "seed 0; status: partial",
        "specmortem engine toy",
    ]
    assert report.pins(some.replace(arms=some.arms[1:])) == "vllm==0.23.0"


@pytest.mark.parametrize("below", ["", "engine.json"])
def test_results_are_found_from_their_folder_or_file(path, results, below):
    assert report.committed(path.parent / below) == results


def put(path, folder, **changes):
    data = json.loads(path.read_text()) | changes
    (folder / "engine.json").parent.mkdir(parents=True)
    (folder / "engine.json").write_text(json.dumps(data))


def test_an_earlier_campaign_stands_behind_the_one_that_counts(path, tmp_path):
    put(path, tmp_path / "runs" / "engine-a", command="specmortem engine first")
    put(path, tmp_path / "runs" / "engine", command="specmortem engine second")
    found = report.campaigns(tmp_path)
    assert {name: each.command for name, each in found.items()} == {
        "engine": "specmortem engine second",
        "engine-a": "specmortem engine first",
    }
    assert list(found) == ["engine", "engine-a"]
    assert report.committed(tmp_path) == found["engine"]


def test_an_earlier_campaign_alone_is_told_by_its_name(path, tmp_path):
    put(path, tmp_path / "runs" / "engine-a")
    assert list(report.campaigns(tmp_path)) == ["engine-a"]
    assert report.committed(tmp_path) is None
    put(path, tmp_path / "runs" / "engine-b", arms=1)
    with pytest.raises(BadInputError, match=r"engine-b/engine\.json"):
        report.campaigns(tmp_path)


def test_the_first_campaign_of_mtp_draft_loop_is_kept():
    found = report.campaigns(facts.find_root() / "mtp-draft-loop")["engine-auto-draft-backend"]
    first = report.arms_table(found).set_index("arm")
    assert first.loc["before", "faults"] == "0 / 5 (below 45%)"
    assert first.loc["before", "idle GPU work, median us"] == "3,000 to 3,000"


def test_without_a_result_there_is_no_campaign(tmp_path):
    assert report.committed(tmp_path) is None
    assert report.campaigns(tmp_path) == {}


@pytest.mark.parametrize("slug", arms.with_arms())
def test_committed_results_are_of_the_committed_arms(slug):
    found = report.committed(facts.find_root() / slug)
    assert found is not None
    experiment = arms.load(slug)
    for arm in found.arms:
        assert dict(arm.config) == experiment.arm(arm.name).config()
        assert len(arm.runs) >= 5 or found.status == "interrupted"


def test_the_committed_engines_of_mtp_draft_loop_are_what_the_notebook_says_of_them():
    found = report.committed(facts.find_root() / "mtp-draft-loop")
    ended = {arm.name: [run.kind for run in arm.runs] for arm in found.arms}
    assert ended.pop("before") == ["illegal-address"] * 5
    assert ended.pop("no-async-by-two") == ["illegal-address"] * 4
    assert ended.pop("no-added-delay") == []
    assert set(ended) == {"after", "two-drafts", "launch-blocking", "draft-flash-attention", "no-async"}
    assert all(kinds == ["value"] * 5 for kinds in ended.values())
    assert all(not run.counts.ended for run in found.arm("before").runs), "it dies in its first burst"
    assert {run.patched_calls for run in found.arm("after").runs} == {576}
    judged = [each for each in compare.comparisons(found) if each.p is not None]
    assert {(round(each.p, 4), round(each.adjusted, 3)) for each in judged} == {(0.0079, 0.048)}
    assert len(judged) == 6


def test_the_pages_hold_tables_commands_and_notes(results):
    text, page = report.markdown(results), report.html(results)
    assert "| broken |" in text and "specmortem engine toy" in text and "- A <note>." in text
    assert "A &lt;note&gt;." in page and "<note>" not in page
    assert compare.CAVEAT in text and page.count("<table") == 2


def test_a_file_that_is_none_is_named(tmp_path, path):
    file = tmp_path / "engine.json"
    with pytest.raises(UnavailableError, match="cannot read"):
        EngineResults.load(file)
    file.write_text("{")
    with pytest.raises(BadInputError, match="is not JSON"):
        EngineResults.load(file)
    data = json.loads(path.read_text())
    data["arms"][0]["runs"][0]["outcome"] = "fine"
    file.write_text(json.dumps(data))
    with pytest.raises(BadInputError, match="arms/0/runs/0/outcome"):
        EngineResults.load(file)
