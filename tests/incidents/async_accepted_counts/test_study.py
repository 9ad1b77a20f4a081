import csv
from functools import wraps
from pathlib import Path

import pytest

from specmortem import facts, incident, study
from specmortem import statistics as exact
from specmortem.affected.released import released as book
from specmortem.errors import UnavailableError
from specmortem.incidents.async_accepted_counts import arms
from specmortem.incidents.async_accepted_counts import figures as drawn
from specmortem.incidents.async_accepted_counts import study as counts
from specmortem.isolation import ArmResult
from specmortem.tools.engine import compare
from specmortem.tools.engine import report as engines
from specmortem.verdict import Evidence, Row, Verdict

ROOT = Path(__file__).parents[3]
LINES = ("before", "after", "blocking-copy")


@pytest.fixture
def inline(monkeypatch):
    """Arms run in this process, one after another."""

    def run(asked, **_):
        return [
            ArmResult(arm, "value", getattr(arms, arm.target.split(":")[1])(**arm.kwargs)) for arm in asked
        ]

    monkeypatch.setattr(study, "run_arms", run)


def patched(monkeypatch, name, function):
    """Another function in place of an arm, under the arm's name."""
    monkeypatch.setattr(arms, name, wraps(getattr(arms, name))(function))


def released(cause, release, outcome, **evidence):
    return Row.of(
        Verdict(outcome, Evidence(**evidence)), cause=cause, arm="released", subject=f"vllm=={release}"
    )


def test_causes_are_those_of_the_probes_and_of_the_incident():
    named = {counts.NONE, counts.ALIGN, counts.METADATA}
    assert named == {cause.id for cause in facts.load(counts.SLUG).causes}
    assert named == {probe.cause for probe in incident.get(counts.SLUG).probes}


@pytest.mark.usefixtures("inline")
def test_a_row_counts_what_an_arm_counted(monkeypatch):
    patched(monkeypatch, "transitions", lambda **_: {"judged_rows": 9, "faults": 2, "steps": 5})
    row = counts.random_rows("sim", 0, 10)[0]
    assert (row.arm, row.subject) == ("random-delays-none", "before")
    assert (row.outcome, row.runs, row.faults) == ("fault", 9, 2)
    assert row.evidence.observed == "2 of 9 judged_rows"


def test_rows_say_how_an_arm_died(monkeypatch):
    died = lambda asked, **_: [ArmResult(arm, "timeout", None, "300 s") for arm in asked]  # noqa: E731
    monkeypatch.setattr(study, "run_arms", died)
    rows = counts.window_rows("sim") + counts.move_rows(1, 0) + counts.throughput_rows("sim", 1, 1)
    rows += counts.detector_rows() + counts.metadata_rows("sim")
    assert {(row.outcome, row.evidence.reason) for row in rows} == {("not-judged", "timeout: 300 s")}
    assert {row.arm for row in rows} >= {"window", "moves", "throughput", "consumers-72"}


@pytest.mark.usefixtures("inline")
def test_landings_become_rows_and_tables():
    rows = counts.completion_rows(60, 0)
    by = {(row.arm, row.subject): row for row in rows}
    assert by["landing-none", "before"].outcome == "fault"
    assert all(row.outcome == "clean" for row in rows if row.subject in ("after", "after-as-released"))
    table = counts.completion_table(rows, "none").set_index("policy")
    assert table.loc["before", "lands before"].startswith("0 of ")
    assert not table.loc["before", "lands inside"].startswith("0 of ")
    shapes = counts.shape_table(rows)
    assert list(shapes["policy"]) == list(counts.SHAPES) and shapes["what it does"].all()
    shapes = shapes.set_index("policy")
    blocking = shapes.loc["blocking-copy-gathered"]
    assert blocking["not in flight"].endswith(" of 60") and not blocking["not in flight"].startswith("0 ")
    assert list(blocking[["lands before", "lands inside", "lands after"]]) == ["", "", ""]
    assert shapes.loc["before", "not in flight"] == ""
    drafts = counts.first_draft_table(rows).set_index("a row starts from")
    corrected = drafts.loc["corrected on the device (none)"]
    assert corrected["wrong rows"] == corrected["at their first drafts"] > 0
    host = drafts.loc["the host's count (align)"]
    assert host["wrong rows"] > host["at their first drafts"]


@pytest.mark.usefixtures("inline")
def test_only_swaps_misplace_a_count():
    rows = {row.arm: row for row in counts.move_rows(120, 0)}
    assert set(rows) == {f"moves-{kind}" for kind in arms.MOVES}
    assert {arm for arm, row in rows.items() if row.faults} == {"moves-swapped", "moves-both"}
    assert rows["moves-condensed"].runs > 0


@pytest.mark.usefixtures("inline")
def test_a_kind_of_moves_that_did_not_come_up_is_not_judged(monkeypatch):
    patched(monkeypatch, "by_move", lambda **_: {"moves": {"both": {"wrong": 0, "total": 0}}})
    (row,) = counts.move_rows(1, 0)
    assert (row.outcome, row.evidence.reason) == ("not-judged", "no such transition")


@pytest.mark.usefixtures("inline")
def test_the_detector_names_the_pair_and_clears_a_wrong_policy():
    rows = counts.detector_rows()
    by = {(row.arm, row.subject): row for row in rows}
    races = by["staging-detector-none", "before"].evidence.detail["races"]
    hosts = {race["host"] for race in races}
    assert {"add_request writes", "swap_states reads", "swap_states writes"} == hosts
    assert by["staging-detector-none", "after"].outcome == "clean"
    hoisted = by["staging-detector-align", "hoist-wait"]
    assert hoisted.outcome == "clean" and hoisted.evidence.detail["wrong_landings"] > 0
    table = counts.detector_table(rows).set_index(["mode", "policy"])
    in_this_run = table["wrong rows in this run"]
    assert in_this_run["none", "before"] == in_this_run["align", "before"] == 0
    assert in_this_run["align", "hoist-wait"] > 0
    table = table["pairs that the detector names"]
    assert table["align", "hoist-wait"] == "none" and "× swap_states writes" in table["none", "before"]


@pytest.mark.usefixtures("inline")
def test_texts_become_rows_a_table_and_stories():
    rows = counts.text_rows("sim", 0, 48, counts.TEXTS[:2])
    by = {(row.arm, row.subject): row for row in rows}
    window = by["text-none/window", "before"]
    assert window.outcome == "fault" and by["text-none/window", "after"].outcome == "clean"
    assert len(window.evidence.detail["texts"]) == window.faults
    table = counts.text_table(rows)
    assert table.loc["none/window", "after"] == table.loc["none/early", "before"] == "48 of 48 intact"
    stories = counts.story_table(window, 2)
    assert list(stories["count"].str.endswith(" instead of 1")) == [True, True]
    assert (stories["right"] != stories["garbled"]).all()
    assert (stories["garbled"].str.split().str.len() < stories["right"].str.split().str.len()).all()


def test_launch_blocking_is_the_environment_of_the_process_on_a_gpu_only():
    def env(device, control):
        return counts._text_cell("before", "none", "window", control, {"device": device, "seed": 0}).env

    assert env("cuda", "launch-blocking") == {"CUDA_LAUNCH_BLOCKING": "1"}
    assert env("sim", "launch-blocking") == env("cuda", "async") == {}


@pytest.mark.usefixtures("inline")
def test_the_window_and_random_delays_become_rows():
    before, after = counts.window_rows("sim")
    assert before.faults == sum(before.evidence.detail["wrong"]) > 0 == after.faults
    assert before.runs == after.runs == len(counts.WINDOW["sim"]["delays_us"])
    rows = counts.random_rows("sim", 0, 20_000)
    assert all((row.outcome == "fault") == (row.subject == "before") for row in rows)
    clean = next(row for row in rows if row.subject == "after")
    assert clean.evidence.detail["upper_bound_95_steps"] > 3 / clean.runs  # over steps, not rows
    assert counts.random_table(rows)["transitions"].iloc[1] == "20,032"


def test_rows_of_a_committed_gpu_run_name_their_device():
    detail = {"device": {"kind": "cuda", "name": "Some GPU", "driver": "1"}}
    rows = [
        Row(counts.NONE, arm, "before", "fault", 1, 1, 0, Evidence(detail=detail)) for arm in ("a-1", "b-1")
    ]
    (found,) = counts.of_arms(rows, "a-")
    assert found.arm == "a-1"
    assert counts.from_where([found], "sim") == "from the committed run on Some GPU"
    assert counts.from_where([], "sim") == "not yet run on a GPU"
    assert counts.from_where([], "cuda").startswith("this run is a GPU's")


def test_the_windows_title_counts_host_delays_of_both_arms():
    rows = [
        Row(counts.NONE, "window", arm, "fault", 9, 3, None, Evidence(detail={"wrong": wrong}))
        for arm, wrong in (("before", [0, 3, 1]), ("after", [0, 0, 2]))
    ]
    assert counts.window_title(rows) == "Wrong at 2 of 3 host delays before, at 1 of 3 after"


def throughput(arm, median, rates):
    detail = {"steps_a_second": median, "ratio_to_before": median / 200, "all": rates}
    return Row(counts.NONE, "throughput", arm, "clean", 1, 0, None, Evidence(detail=detail))


def test_throughput_is_told_against_both_other_paths_and_by_round():
    rows = [throughput("before", 200, [100, 200, 400]), throughput("after", 300, [110, 300, 360])]
    table = counts.throughput_table([*rows, throughput("blocking-copy", 150, [150, 150, 150])])
    table = table.set_index("path")
    assert table.loc["after", "ratio to before"] == "1.500"
    assert table.loc["after", "by round"] == "0.900 to 1.500" and table.loc["before", "by round"] == ""
    assert table.loc["after", "ratio to blocking-copy"] == "2.000"


@pytest.mark.usefixtures("inline")
def test_throughput_rows_hold_ratios_and_judge_counts(monkeypatch):
    rows = counts.throughput_rows("sim", 1, 20)
    assert [row.subject for row in rows] == ["before", "after", "blocking-copy"]
    assert rows[2].evidence.detail["ratio_to_before"] < 0.9
    assert all(row.outcome == "clean" for row in rows)
    assert list(counts.throughput_table(rows)["rounds"]) == [1, 1, 1]
    real = arms.throughput
    patched(monkeypatch, "throughput", lambda **k: {**real(**k), "wrong": dict.fromkeys(LINES, 1)})
    assert all(row.outcome == "fault" for row in counts.throughput_rows("sim", 1, 20))


@pytest.mark.usefixtures("inline", "interpreted")
def test_metadata_rows_hold_shapes_and_a_state_that_differs_is_a_fault(monkeypatch):
    rows = counts.metadata_rows("sim")
    assert [row.outcome for row in rows] == ["clean", "clean"]
    table = counts.metadata_table(rows)
    shapes = table[table["tensor"] == "state_indices"].set_index("requests")
    assert list(shapes.loc["72 in a graph for 72", ["before", "after"]]) == ["[288, 4]", "[72, 4]"]
    assert list(shapes.loc["3 in a graph for 4", ["before", "after"]]) == ["[16, 4]", "[4, 4]"]
    real = arms.metadata
    patched(monkeypatch, "metadata", lambda **k: {**real(**k), "inert": False})
    assert [row.outcome for row in counts.metadata_rows("sim")] == ["fault", "fault"]


@pytest.mark.network
@pytest.mark.usefixtures("inline", "interpreted")
def test_released_kernels_do_not_see_the_added_rows_and_a_wrong_count_would_be_seen(monkeypatch):
    try:
        (row,) = counts.consumer_rows(["0.23.0"])
    except UnavailableError as error:
        pytest.skip(str(error))
    assert (row.outcome, row.evidence.detail["rows"]) == ("clean", {"before": 16, "after": 4})
    build = arms.GraphMetadata.build

    def off_by_one(self, rows, indices, accepted, padded):
        return build(self, rows, indices, accepted.roll(int(rows == "per-token")), padded)

    monkeypatch.setattr(arms.GraphMetadata, "build", off_by_one)
    assert counts.consumer_rows(["0.23.0"])[0].outcome == "fault"


@pytest.mark.usefixtures("inline", "interpreted")
def test_questions_of_the_review_are_answered_from_rows():
    rows = counts.completion_rows(40, 0) + counts.metadata_rows("sim") + counts.random_rows("sim", 0, 6400)
    answers = counts.review_table(rows).set_index("question")["answer"]
    assert list(answers.index) == list(counts.QUESTIONS.values())
    assert answers.iloc[0].startswith("72 requests have 288 rows by tokens, 72 by requests; 216")
    assert answers.iloc[1] == "not judged in this run"
    assert "wrong in 0 of" in answers.iloc[2]
    wrong = [
        row.replace(outcome="fault", faults=row.runs) if row.subject == "after-as-released" else row
        for row in rows
    ]
    assert "wrong in 0 of" not in counts.review_table(wrong)["answer"].iloc[2]


def in_all(release, outcome, **landings):
    detail = {"mode_all": {"landings": landings} if landings else {"absent": "no such mode"}}
    return released(counts.NONE, release, outcome, detail=detail)


def test_mode_all_is_answered_from_the_rows_of_releases():
    old = [in_all(release, "fault", before=[0, 38], inside=[7, 136]) for release in ("0.22.1", "0.23.0")]
    new = [in_all("0.24.0", "clean", before=[0, 38], inside=[0, 136]), in_all("0.32.0", "clean")]
    other = [
        released(counts.ALIGN, "0.24.0", "fault"),
        released(counts.NONE, "0.25.1", "not-judged", reason="r"),
    ]
    told = "7 of 174 landings wrong in 0.22.1 to 0.23.0; 0 of 174 landings wrong in 0.24.0; no such mode in 0.32.0"
    assert counts._in_mode_all([*old, *new, *other]) == f"yes: {told}"
    assert counts._in_mode_all(new).startswith("no: 0 of 174 landings wrong in 0.24.0")


def test_faults_of_releases_with_one_account_share_a_line():
    rows = [
        released(counts.NONE, "0.22.1", "fault", observed="P has 4", witness="w"),
        released(counts.NONE, "0.23.0", "fault", observed="P has 4", witness="w"),
        released(counts.NONE, "0.24.0", "clean"),
        released(counts.ALIGN, "0.24.0", "fault", observed="B has 1", witness="w"),
    ]
    assert counts.fault_table(rows)["releases"].tolist() == ["0.22.1, 0.23.0", "0.24.0"]
    told = released(counts.NONE, "0.23.0", "fault", detail={"landings": {"before": [0, 3], "inside": [1, 4]}})
    line = counts.agreement_table([told, *rows]).iloc[0]
    assert [line[f"lands {w}"] for w in ("before", "inside", "after")] == ["0 of 3", "1 of 4", ""]


def test_default_exposure_joins_the_defaults_with_the_verdicts():
    """Prefix caching of hybrids is off by default to 0.27.1 and on from 0.28.0; the V2 runner comes with 0.29.0."""
    rows = [
        released(cause, release, "clean" if cause == counts.NONE and release > "0.23.0" else "fault")
        for cause in (counts.NONE, counts.ALIGN)
        for release in ("0.23.0", "0.25.1", "0.26.0", "0.27.1", "0.28.0", "0.29.0", "0.33.0")
    ]
    table = counts.exposure_table(rows).set_index("release")
    assert dict(table["by default"]) == {
        "0.23.0": "fault",
        "0.25.1": "clean",
        "0.26.0": "clean",
        "0.27.1": "clean",
        "0.28.0": "fault",
        "0.29.0": "not this runner",
        "0.33.0": "not this runner",
    }
    assert table.index[table["mode"] == "align"].tolist() == ["0.28.0", "0.29.0", "0.33.0"]
    assert table.index[table["prefix caching"] == "on"].tolist() == ["0.28.0", "0.29.0", "0.33.0"]
    assert table.index[table["runner"] == "V2"].tolist() == ["0.29.0", "0.33.0"]


def test_the_page_s_defaults_are_those_of_the_exposure_table():
    """What the notebook calls exposed by default is what data/exposure.csv has for the launch at defaults."""
    with (ROOT / "data/exposure.csv").open(encoding="utf-8") as file:
        cells = [row for row in csv.DictReader(file) if row["configuration"] == "hybrid-mtp"]
    recorded = {row["release"]: row["answer"] for row in cells if row["incident"] == counts.SLUG}
    known = book()
    rows = [
        released(cause, release, known.of(cause, release).status)
        for cause in (counts.NONE, counts.ALIGN)
        for release in counts.RELEASES
        if known.of(cause, release).status in ("fault", "clean")
    ]
    table = counts.exposure_table(rows).set_index("release")["by default"]
    assert {release: answer == "affected" for release, answer in recorded.items()} == {
        release: table.get(release) == "fault" for release in counts.RELEASES
    }


def test_the_wait_returns_behind_the_copy_in_and_out_of_the_window():
    found = {delay: arms.flight(delay) for delay in (40, 250, 400)}
    assert [one["got"] for one in found.values()] == [1, 4, 1]
    for one in found.values():
        assert one["waited_until"] >= one["copy"][1] > one["forward"][1]


def texts_of(figure):
    return [text.get_text() for ax in figure.axes for text in ax.texts]


def test_figures_show_what_was_recorded():
    moves = drawn.array_moves(arms.worked_example(), "moves")
    assert sum(text == "copy lands" for text in texts_of(moves)) == 3
    assert [t.replace("\n", " ") for t in texts_of(moves) if "gathers" in t] == [
        "P gathers row 3: 1, right",
        "P gathers row 3: 4, its own is 1",
        "P gathers row 3: 1, right",
    ]
    flown = drawn.flights({"window": arms.flight(250)}, "flight")
    assert "wait returns; P has 4" in texts_of(flown)
    found = {arm: arms.window(arm=arm, trials=1, delays_us=[0, 250]) for arm in ("before", "after")}
    lines = drawn.window(found, "window", "simulated clock").axes[0].get_lines()
    assert [list(line.get_ydata()) for line in lines] == [[0.0, 1.0], [0.0, 0.0]]


def test_a_cell_is_coloured_by_whose_count_it_holds():
    wrong = next(one for one in arms.worked_example() if one["got"] != one["own"])
    array = drawn._Array()
    gather = next(i for i, s in enumerate(wrong["history"]) if s["what"] == "read" and s["row"] is None)
    for step in wrong["history"][:gather]:
        array.follow(step)
    assert array.owners == ["P", "B", "C", "A"]


def campaign(name):
    return engines.campaigns(ROOT / "investigations" / counts.SLUG)[name]


def test_wrong_answers_of_engines_are_told_by_the_arms_that_gave_them():
    found = campaign("engine-12-runs")
    table = counts.wrong_answers_table(found).set_index("wrong in")
    alone, shared = table.loc["before"], table.loc["before, after, no-async, no-added-delay"]
    assert len(table) == 2
    assert list(alone) == [12, 7, "2", "203 of 222", 9]
    assert list(shared) == [2, 2, "2", "19 of 40", 0]


def test_an_answer_with_other_tokens_is_another_wrong_answer():
    found = campaign("engine-12-runs")
    arms_by_name = {arm.name: arm for arm in found.arms}
    first, *rest = arms_by_name["after"].runs
    (request,) = first.kept
    other = request.replace(got=(*request.got[:-1], request.got[-1] + 1))
    arms_by_name["after"] = arms_by_name["after"].replace(runs=(first.replace(kept=(other,)), *rest))
    edited = found.replace(arms=tuple(arms_by_name.values()))
    table = counts.wrong_answers_table(edited).set_index("wrong in")
    assert table["requests"].to_dict() == {
        "before": 12,
        "before, no-async, no-added-delay": 1,
        "before, after, no-async, no-added-delay": 1,
        "after": 1,
    }


def test_the_second_campaign_shows_what_the_page_says():
    """The page's prose and the claims whole-engine and whole-engine-async hold these numbers."""
    found = {(each.right, each.measure.name): each for each in compare.comparisons(campaign("engine"))}
    unlike, off = found["after", "unlike plain"], found["no-async", "unlike plain"]
    assert [str(rate) for rate in unlike.rates] == ["6 / 24 (9.8% to 47%)", "1 / 24 (0.11% to 21%)"]
    assert str(off.rates[1]) == "0 / 24 (below 12%)"
    assert f"{unlike.adjusted:.2g}" == "0.097" and f"{off.p:.2g} {off.adjusted:.2g}" == "0.022 0.044"
    assert f"{max(exact.holm([off.p, off.p, unlike.p])[:2]):.2g}" == "0.066", "were a third pair judged"
    others = [each for (_, measure), each in found.items() if measure == "wrong"]
    assert {(each.rates[0].events, each.rates[1].events, each.adjusted) for each in others} == {(10, 7, 1)}
    assert len(others) == 4


def test_the_second_campaign_has_the_models_errors_in_every_arm_and_others_in_one():
    table = counts.wrong_answers_table(campaign("engine")).set_index("wrong in")
    speculating = "before, after, no-async, no-added-delay"
    everywhere = f"{speculating}, plain, plain-0.24.0, plain-no-async"
    assert list(table.loc["before"]) == [6, 5, "2", "120 of 128", 4]
    assert table["requests"].to_dict() == {
        everywhere: 6,
        "before": 6,
        speculating: 1,
        "plain, plain-0.24.0": 2,
        "plain-no-async": 1,
    }


def test_the_one_answer_of_0_24_0_that_is_unlike_plain_is_right_and_the_plain_one_wrong():
    found = campaign("engine")
    kept = {(arm.name, run.run, each.id): each for arm in found.arms for run in arm.runs for each in run.kept}
    unlike = [(key, each.wrong_at) for key, each in kept.items() if each.plain == "differs"]
    (of_after,) = ((key, wrong_at) for key, wrong_at in unlike if key[0] == "after")
    assert of_after == (("after", 7, "0-105"), None)
    assert kept["plain-0.24.0", 7, "0-105"].wrong_at == 1
    wrong = [key[1:] for key, wrong_at in unlike if key[0] == "before" and wrong_at is not None]
    assert len(wrong) == 5 and (7, "0-105") not in wrong
