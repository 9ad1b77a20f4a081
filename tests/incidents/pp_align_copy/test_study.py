import pytest

from specmortem.incidents.pp_align_copy import arms as pp_align
from specmortem.incidents.pp_align_copy import figures as align_figures
from specmortem.incidents.pp_align_copy import shift as align_shift
from specmortem.incidents.pp_align_copy import study as align
from specmortem.isolation import Arm, ArmResult
from specmortem.verdict import Evidence, Row

pytestmark = pytest.mark.usefixtures("interpreted")


def control_row(control, subject, effect, pp=2):
    outcome = "clean" if effect == "clean" else "fault"
    evidence = Evidence(observed=effect, detail={"effect": effect})
    return Row(align.CAUSE, f"pp{pp}/{control}", subject, outcome, 1, int(outcome == "fault"), 0, evidence)


def controls(effect_of):
    return [
        control_row(control, subject, effect_of(control) if subject == "before" else "clean", pp)
        for control in pp_align.CONTROLS
        for subject in ("before", "after")
        for pp in (2, 3)
    ]


def stated(control):
    return "constant-token" if pp_align.STATED[control] == "fault" else "clean"


def released(cause, release, outcome):
    return Row(cause, "released", f"vllm=={release}", outcome, 1, int(outcome == "fault"), None, Evidence())


def test_controls_become_a_table_of_effects():
    table = align.control_table(controls(stated))
    assert list(table.index) == list(pp_align.CONTROLS)
    assert set(table.columns) == {f"{s}, PP {pp}" for s in ("before", "after") for pp in (2, 3)}
    assert table.loc["eager", "before, PP 3"] == "constant-token"


def test_a_flag_helps_only_where_every_pipeline_size_is_clean():
    table = align.workaround_table(controls(stated)).set_index("arm")["helps"]
    assert dict(table) == {"eager": "no", "graphs": "no", "pp1": "yes", "one-seq": "yes", "mtp-off": "yes"}
    mixed = [*controls(lambda _: "clean"), control_row("one-seq", "before", "corruption", 3)]
    assert align.workaround_table(mixed).set_index("arm").loc["one-seq", "helps"] == "no"


def test_answers_come_from_the_rows():
    rows = [released(align.CAUSE, "0.31.0", "fault"), released(align.CAUSE, "0.32.0", "clean")]
    answers = align.answer_table(controls(stated) + rows).set_index("question")["answer"]
    assert len(answers) == 5
    assert "fault in 0.31.0; clean in 0.32.0" in answers.iloc[0]
    assert "eager mode helps: no" in answers.iloc[1]
    assert "pp1, one-seq, mtp-off" in answers.iloc[2]
    other = align.answer_table(controls(lambda _: "clean") + rows[1:]).set_index("question")["answer"]
    assert "fault in none judged" in other.iloc[0] and "eager mode helps: yes" in other.iloc[1]


def test_the_reported_workload_becomes_a_row_and_a_table():
    wrong = {"step": 7, "request": 2, "why": "told"}
    runs = [
        {"seed": 0, "steps": 9, "finished": 3, "first_wrong_copy": wrong, "first_damage": None},
        {"seed": 1, "steps": 5, "finished": 3, "first_wrong_copy": None, "first_damage": None},
    ]
    row = align.reported_row(runs, "before", 0, "reported-workload")
    assert (row.outcome, row.runs, row.faults, row.evidence.witness) == ("fault", 2, 1, "told")
    assert row.evidence.detail["first_wrong_request"] == [2]
    assert align.reported_table(runs)["first wrong copy"].tolist() == ["told", "none"]
    lost = align.reported_row([*runs, {"failed": "killed"}], "before", 0, "reported-workload")
    assert lost.outcome == "not-judged" and lost.evidence.reason == "killed"


def test_ranks_tell_the_devices_that_they_had():
    detail = {"steps": [9, 9], "devices": ["H200", "H200"], "backend": "NCCL 2.28.9", "effect": "clean"}
    made = [
        Row(align.CAUSE, "ranks-nccl-2", "after", "clean", 1, 0, 0, Evidence(detail=detail)),
        Row(align.CAUSE, "ranks-nccl-2", "before", "not-judged", 0, 0, 0, Evidence(reason="killed")),
    ]
    table = align.rank_table(made)
    assert list(table["on"]) == ["2 x H200; NCCL 2.28.9", ""]
    assert list(table["effect"]) == ["clean", "killed"]


def test_damage_is_summed_over_parts():
    row = Row(align.CAUSE, "random-workloads", "before", "fault", 2, 1, 0, Evidence())
    ended = [
        ArmResult(
            Arm("specmortem.incidents.pp_align_copy.arms:random_workloads"), "value", {"damage": damage}
        )
        for damage in ({"stale-tail": 2}, {"stale-tail": 1, "other-block": 4})
    ]
    found = align._with_damage(row, ended).evidence.detail["damage"]
    assert found == {"live-neighbour": 0, "other-block": 4, "stale-tail": 3}


def test_shifts_make_a_table_of_windows_and_subjects():
    value = align_shift.shifts("after", 9, requests=1, layers=1)
    row = Row("overlapping-shift", "shifts", "after", "clean", 9, 0, 0, Evidence(detail=value))
    table = align.shift_table([row])
    assert len(table) == len(align_shift.SHAPES) and list(table.columns) == ["after"]
    assert table["after"].str.startswith("0 of ").all()
    assert align.shift_table([]).empty


def test_kernels_without_checks_stay_in_row_and_pool_however_wrong_the_owner():
    found = pp_align.outside("before", 6)
    assert found["faults"] == 0 and found["wrong_copies"] > 0


def test_a_column_after_the_row_would_be_seen(monkeypatch):
    postcopy = pp_align.Worker._postprocess

    def shifted(self, *args):
        self.counters.state_idx[:-1] += 40
        postcopy(self, *args)
        self.counters.state_idx[:-1] -= 40

    monkeypatch.setattr(pp_align.Worker, "_postprocess", shifted)
    assert pp_align.outside("before", 3)["faults"] > 0


def test_figures_show_what_was_recorded():
    timeline = pp_align.timeline("before", 20)
    rows = align_figures.rows_over_time(timeline, 2, 20, "rows")
    late = sum(bool(align_figures._late(step)) for step in timeline)
    arrows = [p for p in rows.axes[0].patches if type(p).__name__ == "FancyArrowPatch"]
    assert len(arrows) == sum(len(align_figures._late(step)) for step in timeline) >= late > 0
    assert len(align_figures.late_copy(timeline, 2, "copy").axes) == 3
    text = pp_align.control("before")
    figure = align_figures.texts(text["outputs"], text["expected"], 1023, "texts")
    assert len(figure.axes[0].get_yticklabels()) == 4
