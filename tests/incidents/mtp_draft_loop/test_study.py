import dataclasses
import json
import re
from pathlib import Path

import pandas as pd
import pytest

from specmortem import facts, study
from specmortem.errors import BadInputError
from specmortem.incidents.mtp_draft_loop import arms as mtp_loop
from specmortem.incidents.mtp_draft_loop import figures as mtp_figures
from specmortem.incidents.mtp_draft_loop import hypotheses
from specmortem.incidents.mtp_draft_loop import layouts as mtp_layouts
from specmortem.incidents.mtp_draft_loop import study as mtp
from specmortem.isolation import Arm, ArmResult
from specmortem.verdict import Evidence, Row, Verdict

pytestmark = pytest.mark.usefixtures("interpreted")
DATA = Path(__file__).parents[3] / "data"
STEPS = Arm("specmortem.incidents.mtp_draft_loop.arms:steps", {"arm": "before", "k": 5})
REAL_LOOP = Arm("specmortem.incidents.mtp_draft_loop.flashinfer:loop", {"arm": "unpinned"})
ILLEGAL = ArmResult(STEPS, "illegal-address", message="CUDA error: an illegal memory access\nmore")


def finished(effect, steps=3, mismatched=0):
    value = {"effect": effect, "why": "", "steps": steps, "mismatched_steps": mismatched}
    return ArmResult(STEPS, "value", value)


def row(arm, outcome, observed="told"):
    fault = int(outcome == "fault")
    return Row(mtp.CAUSE, arm, "before", outcome, 1, fault, None, Evidence(observed=observed))


def deciding(**outcomes):
    """Rows of every arm that decides a hypothesis without arms of its own."""
    expected = {"before": "fault", "wrong-stream-sync": "fault"} | outcomes
    arms = [arm for tested in hypotheses.HYPOTHESES.values() for arm in tested.arms(5)]
    return [
        row(arm, expected.get(arm.split("/")[1], "clean" if "schedules" in arm else "fault")) for arm in arms
    ]


def cell(arm, subject="before", seed=0):
    return study.Cell(mtp.CAUSE, arm, subject, mtp_loop.steps, seed=seed)


# Rows


def test_a_schedule_row_counts_every_schedule_that_is_not_clean():
    value = mtp_loop.schedules("before", k=4)
    made = mtp.schedule_row(ArmResult(STEPS, "value", value), cell("schedules/before/k4", "before"))
    assert (made.outcome, made.runs, made.faults) == ("fault", 5, 3)
    assert "upper_bound_95" not in made.evidence.detail
    assert made.evidence.place.startswith("merge_kernel (kernels.py:")
    assert made.evidence.witness.startswith("schedule [")
    line = mtp.schedule_table([made]).iloc[0]
    assert (line["arm"], line["K"], line["illegal address"], line["clean"]) == ("before", "4", "3", "2")


def test_a_clean_schedule_row_has_no_witness():
    value = mtp_loop.schedules("event", k=3)
    made = mtp.schedule_row(ArmResult(STEPS, "value", value), cell("schedules/event/k3", "after"))
    assert (made.outcome, made.runs, made.evidence.witness) == ("clean", 1, "")


def test_processes_that_die_are_faults_and_lost_ones_are_not_counted():
    lost = ArmResult(STEPS, "timeout", message="after 240 s")
    made = mtp.process_row(
        [ILLEGAL, ILLEGAL, finished("wrong-plan"), finished("clean"), lost], cell("processes/before/k5"), 1000
    )
    assert (made.outcome, made.runs, made.faults) == ("fault", 4, 3)
    assert made.evidence.detail["effects"]["illegal-address"] == 2 and len(made.evidence.detail["lost"]) == 1
    assert mtp.process_row([lost], cell("processes/before/k5"), 1000).outcome == "not-judged"
    assert mtp.process_row([finished("clean")], cell("processes/before/k5"), 1000).outcome == "clean"


def test_steps_are_counted_and_mismatched_ones_are_faults():
    clean = mtp.steps_row(finished("clean", 20_000), cell("steps/event/k5", "after"))
    assert (clean.outcome, clean.runs, clean.faults) == ("clean", 20_000, 0)
    assert clean.evidence.detail["upper_bound_95"] == pytest.approx(1.5e-4, rel=0.01)
    wrong = mtp.steps_row(finished("wrong-result", 9, 2), cell("steps/event/k5", "after"))
    assert (wrong.outcome, wrong.runs, wrong.faults) == ("fault", 9, 2)
    assert mtp.steps_row(ILLEGAL, cell("steps/event/k5", "after")).outcome == "fault"


@pytest.mark.parametrize(
    ("device", "controls"),
    [("sim", []), ("cuda", [("before", 3, 9), ("no-page-kernel", 3, 3), ("before", 5, 9)])],
)
def test_on_a_gpu_the_unguarded_loop_runs_beside_the_others(device, controls, monkeypatch):
    asked = []

    def run_arms(arms, cuda_parallel):
        asked.extend(arms)
        assert cuda_parallel >= len(arms)
        return [dataclasses.replace(finished("clean"), arm=arm) for arm in arms]

    monkeypatch.setattr(study, "run_arms", run_arms)
    rows = mtp.long_rows(device, 0, 9, 150.0, 9)
    expected = [*((arm, 5, 9) for arm in mtp.LONG_RUNS), *controls]
    assert [tuple(arm.kwargs[name] for name in ("arm", "k", "steps")) for arm in asked] == expected
    assert {arm.device for arm in asked} == {device}
    assert [row.arm for row in rows if row.arm in mtp.UNGUARDED] == list(mtp.UNGUARDED) * (device == "cuda")


def test_a_price_is_read_from_the_file_of_the_benchmark(tmp_path):
    path = tmp_path / "price.json"
    assert mtp.price_of(path) == ({}, "not yet run on a GPU")
    measured = {"measured": "today", "device": {"name": "H200"}, "forward_us": 3000.0, "rows": []}
    path.write_text(json.dumps(measured))
    assert mtp.price_of(path) == (measured, "H200, forwards of 3,000 us\ntoday")


@pytest.mark.parametrize("text", ["{}", "[]", '{"device": "H200"}', "{"])
def test_a_file_that_holds_no_price_is_refused(tmp_path, text):
    (path := tmp_path / "price.json").write_text(text)
    with pytest.raises(BadInputError, match=r"price.json .*benchmarks/mtp_price.py"):
        mtp.price_of(path)


def test_three_drafts_of_a_release_are_a_row_of_their_own(monkeypatch):
    def run_arms(arms, cuda_parallel):
        verdicts = [Verdict("fault", Evidence(observed="plan 2")), Verdict("clean")]
        return [
            ArmResult(arm, "value", verdict.as_dict()) for arm, verdict in zip(arms, verdicts, strict=True)
        ]

    monkeypatch.setattr(study, "run_arms", run_arms)
    found = [(row.arm, row.subject, row.outcome, row.faults) for row in mtp.three_draft_rows("sim")]
    assert found == [("released-k3", "vllm==0.28.0", "fault", 1), ("released-k3", "vllm==0.30.0", "clean", 0)]


def test_the_real_librarys_loops_become_rows():
    value = {"effect": "clean", "wrong_outputs": 0, "steps": 5000}
    clean = mtp.real_loop_row(
        ArmResult(REAL_LOOP, "value", value), cell("loop/unpinned", "flashinfer==0.6.6")
    )
    assert (clean.arm, clean.outcome, clean.runs) == ("loop/unpinned", "clean", 5000)
    corrupt = mtp.real_loop_row(
        ArmResult(REAL_LOOP, "value", value | {"effect": "corruption", "wrong_outputs": 20_000}),
        cell("loop/unpinned", "flashinfer==0.6.6"),
    )
    assert (corrupt.outcome, corrupt.faults) == ("fault", 5000)
    died = mtp.real_loop_row(
        dataclasses.replace(ILLEGAL, arm=REAL_LOOP), cell("loop/unpinned", "flashinfer==0.6.6")
    )
    assert died.outcome == "fault" and died.evidence.observed == "illegal-address"


def test_without_a_gpu_there_are_no_rows_of_the_real_library():
    assert mtp.flashinfer_rows("sim", 1, 1, 1, 0) == []


# Hypotheses


def test_verdicts_follow_the_rows():
    found = mtp.verdicts_of(deciding(), {"clamping": "refuted"})
    assert found == {
        "plan-buffer": "supported",
        "async-scheduling": "refuted",
        "stale-accepted-counts": "refuted",
        "clamping": "refuted",
    }


@pytest.mark.parametrize(
    "changed",
    [{"before": "clean"}, {"event": "fault"}, {"stream-sync": "fault"}, {"wrong-stream-sync": "clean"}],
)
def test_one_row_that_says_otherwise_opens_the_verdict(changed):
    assert mtp.verdicts_of(deciding(**changed), {})["plan-buffer"] == "open"


def test_every_hypothesis_of_the_incident_has_a_prediction_and_arms():
    stated = facts.load("mtp-draft-loop").hypotheses
    tested = hypotheses.HYPOTHESES
    assert {h.id for h in stated} == set(tested)
    assert all(one.predicts and bool(one.rows) != bool(one.arms(5)) for one in tested.values())
    own = dict.fromkeys(hypotheses.own_arms(), "refuted")
    rows = deciding() + [row(f"{name}/before", "fault") for name in own]
    table = mtp.hypothesis_table(stated, rows, mtp.verdicts_of(rows, own))
    assert table["measured (arm: outcome)"].str.len().min() > 0
    assert dict(zip((h.id for h in stated), table["verdict"], strict=True)) == {
        h.id: h.verdict for h in stated
    }


def test_a_hypothesis_row_says_what_the_hypothesis_is_about():
    found = hypotheses.hypothesis("minus-one-placeholders")["rows"][0]
    made = mtp.hypothesis_row("minus-one-placeholders", found)
    assert made.arm == "minus-one-placeholders/event, async scheduling"
    assert (made.subject, made.outcome) == ("after", "clean")
    assert made.evidence.observed == "clean; 3 steps with placeholders; 0 ids below 0"


# Detector


def test_a_cuda_process_without_launch_blocking_is_refused_before_it_is_watched(monkeypatch):
    case = mtp_loop.case
    monkeypatch.setattr(mtp_loop, "case", lambda arm, *_, **__: case(arm, k=2, layout="benign"))
    monkeypatch.delenv("CUDA_LAUNCH_BLOCKING", raising=False)
    with pytest.raises(BadInputError, match="CUDA_LAUNCH_BLOCKING=1"):
        mtp_loop.first_step("launch-blocking", device="cuda")


@pytest.mark.parametrize(
    ("arm", "k", "effect", "reported"),
    [
        ("before", 5, "unordered", 3),
        ("before", 3, "unordered", 3),
        ("launch-blocking", 5, "unordered", 1),
        ("wrong-stream-sync", 5, "unordered", 3),
        *((arm, 5, "ordered", 0) for arm in mtp.LONG_RUNS),
    ],
)
def test_the_first_step_shows_the_missing_order_under_every_schedule(arm, k, effect, reported):
    found = mtp_loop.first_step(arm, k)
    assert (found["effect"], found["reported"]) == (effect, reported)
    made = mtp.detector_row(ArmResult(STEPS, "value", found), cell(f"detector/{arm}/k{k}"))
    assert (made.outcome, made.faults) == ("fault" if reported else "clean", reported)
    assert mtp.detector_table([made]).iloc[0]["order"] == effect


def test_the_blamed_writes_have_no_race_until_they_leave_the_stream():
    kept = " ".join(mtp_loop.first_step("event", 3)["pairs"])
    moved = " ".join(mtp_loop.first_step("side-stream-writes", 3)["pairs"])
    assert "write input_ids" not in kept and "write input_ids" in moved


# Tables and figures


def test_the_reports_figures_are_patched_runs_and_agree_with_each_other():
    data = pd.read_csv(DATA / "mtp-draft-loop-throughput.csv")
    assert set(data["patched"]) == {"yes"} and len(data) == 16
    table = mtp.throughput_table(data)
    assert table.set_index(["validator", "measure"]).loc[(1, "throughput"), "K = 2"] == "1,429.6"
    assert mtp.tokens_in_flight(data)["of 40 x 2,048"].between(0.95, 1).all()
    drawn = mtp_figures.throughput(data, "told")
    heights = [[bar.get_height() for bar in ax.patches] for ax in drawn.axes]
    assert heights == [[1429.6, 1163.2, 1167.8, 690.7], [25.9, 27.9, 27.9, 27.3]]


def test_the_split_table_tells_pairs_thresholds_and_steps_without_metadata():
    table = mtp.split_table(mtp_loop.k_split((1.6, 2.1)))
    assert list(table["races from ratio"])[:3] == ["never"] * 3
    assert table.loc[4, "ratio 1.6"] == "none" and table.loc[4, "ratio 2.1"] == "2-3"
    assert table.loc[3, "no metadata"] == "1-2"


def test_layout_tables_hold_what_the_search_found():
    grown = {"some SMs (card)": mtp_layouts.growth("h200", trials=2000)["rows"]}
    table = mtp.growth_table(grown)
    row = grown["some SMs (card)"][5]
    column = "card: changes / reads / stores"
    assert table[column][5] == f"{row['layout_changes']} / {row['read']} / {row['write']}"
    worked = mtp.examples_table([mtp_layouts.example("h200", mtp_layouts.WORKED_EXAMPLE)])
    assert worked.iloc[0]["read"] == "[15, 14, 39, 48, 0]" and worked.iloc[0]["consequence"] == "read"
    assert len(mtp_figures.growth(grown, "told").axes) == 1


def test_waits_are_told_once_for_releases_that_agree():
    detail = {"host_waits_by_build": {"rejections known": [1, 1], "no rejections": [0, 0]}}
    rows = [
        Row(mtp.CAUSE, "released", f"vllm=={v}", "clean", 1, 0, None, Evidence(detail=detail))
        for v in ("0.28.0", "0.29.0")
    ]
    table = mtp.waits_table([*rows, row("released", "clean")])
    assert table["releases"].tolist() == ["0.28.0 to 0.29.0 (2 releases)"]


def test_growth_of_lengths_is_told_once_for_neighbours_that_agree():
    def judged(version, planned):
        detail = {"situations": {"first drafts": {"planned_grows": planned, "device_grows": [1, 1]}}}
        return Row("lengths", "released", f"vllm=={version}", "clean", 1, 0, None, Evidence(detail=detail))

    grown = {"0.19.1": [1, 1], "0.20.0": [2, 2], "0.21.0": [2, 2], "0.22.0": [1, 2], "0.30.0": [1, 1]}
    rows = [judged(version, planned) for version, planned in grown.items()]
    table = mtp.lengths_table([*rows, row("released", "clean")])
    assert table.to_dict("records") == [
        {
            "step": "first drafts",
            "0.19.1": "1 / 1",
            "0.20.0 to 0.21.0": "2 / 1",
            "0.22.0": "1, 2 / 1",
            "0.30.0": "1 / 1",
        }
    ]
    assert mtp.lengths_table([row("released", "clean")]).empty


def test_the_timeline_marks_the_copies_that_carry_a_later_plan():
    drawn = mtp_figures.timeline({arm: mtp_loop.timeline(arm) for arm in ("before", "event")}, "told")
    texts = [[text.get_text() for text in ax.texts] for ax in drawn.axes]
    assert [t for t in texts[0] if "carries" in t] == ["copy 2 carries plan 4", "copy 3 carries plan 4"]
    assert not [t for t in texts[1] if "carries" in t or "reads" in t]


def test_price_is_told_over_before_and_over_the_synchronize():
    found = mtp_loop.price("sim", ["before", "event", "stream-sync"], [2], steps=1, rounds=1)
    table = mtp.price_table(found, "before")
    assert list(table.index) == ["event", "stream-sync"] and table.index.name == "over before"
    assert re.fullmatch(r"\d\.\d{3} \(\d\.\d{3} to \d\.\d{3}\)", table.loc["event", "K = 2"])
    assert list(mtp.price_table(found, "stream-sync").index) == ["before", "event"]
    assert len(mtp_figures.price(found, "told").axes[0].lines) == 3


def test_counts_of_released_rows_follow_the_incident():
    incident = facts.load("mtp-draft-loop")
    assert {cause.id for cause in incident.causes} == set(study.causes("mtp-draft-loop"))
    affected = [r for r in mtp.RELEASES if incident.cause(mtp.CAUSE).affects(r)]
    assert (affected[0], affected[-1], len(mtp.RELEASES)) == ("0.19.1", "0.29.0", 15)
