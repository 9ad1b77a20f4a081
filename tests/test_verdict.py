import json
import stat
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specmortem import verdict
from specmortem.errors import BadInputError, UnavailableError
from specmortem.verdict import DeviceInfo, Evidence, Results, Row, Verdict

WORDS = st.text('ab <&"\\é☃', max_size=12)
SUBJECTS = st.sampled_from(
    ["before", "after", "installed", "vllm==0.22.1", "flashinfer==0.6.11.post2", "tree:/a b"]
)


@st.composite
def rows(draw):
    outcome = draw(st.sampled_from(["fault", "clean", "not-judged"]))
    runs = 0 if outcome == "not-judged" else draw(st.integers(1, 10**6))
    faults = draw(st.integers(1, runs)) if outcome == "fault" else 0
    evidence = Evidence(
        draw(WORDS), draw(WORDS), reason=draw(WORDS) or "x", detail={"n": draw(st.integers())}
    )
    seed = draw(st.none() | st.integers(0, 99))
    return Row("some-cause", draw(WORDS) or "arm", draw(SUBJECTS), outcome, runs, faults, seed, evidence)


def some_results(*found):
    return Results("dflash-oob", DeviceInfo("sim", "simulated"), tuple(found), {"python": "3.11"})


@settings(deadline=None)
@given(st.lists(rows(), max_size=4))
def test_results_survive_the_file_and_fit_the_schema(found):
    results = some_results(*found)
    assert Results.from_dict(json.loads(json.dumps(results.as_dict()))) == results


@pytest.mark.parametrize(
    ("change", "where"),
    [
        ({"schema": 2}, "schema"),
        ({"incident": "Not A Slug"}, "incident"),
        ({"device": {"kind": "tpu", "name": "x"}}, "device/kind"),
        ({"extra": 1}, "top level"),
    ],
)
def test_a_file_outside_the_schema_is_refused_with_its_place(change, where):
    with pytest.raises(BadInputError, match=f"file.json: {where}"):
        Results.from_dict(some_results().as_dict() | change, "file.json")


@pytest.mark.parametrize(
    "bad",
    [
        {"outcome": "clean", "faults": 1},
        {"outcome": "fault", "faults": 0},
        {"outcome": "not-judged", "runs": 0, "evidence": {}},
        {"outcome": "clean", "runs": 0},
        {"subject": "vllm 0.22.1"},
    ],
)
def test_a_row_that_contradicts_itself_is_refused(bad):
    row = Row("c", "a", "before", "clean", 1, 0).as_dict() | bad
    with pytest.raises(BadInputError, match="rows/0"):
        Results.from_dict(some_results().as_dict() | {"rows": [row]})


def test_rows_and_verdicts_refuse_what_they_cannot_mean():
    with pytest.raises(BadInputError, match="needs evidence.reason"):
        Verdict("not-judged")
    with pytest.raises(BadInputError, match="is not one of"):
        Verdict("maybe")
    with pytest.raises(BadInputError, match="2 faults in 1 runs"):
        Row("c", "a", "before", "fault", 1, 2)
    with pytest.raises(BadInputError, match="outcome clean with 1 faults"):
        Row("c", "a", "before", "clean", 1, 1)


def test_a_row_of_an_unjudged_verdict_counts_no_run():
    row = Row.of(Verdict.not_judged("no index", host="x"), cause="c", arm="a", subject="vllm==1.0")
    assert (row.runs, row.faults, row.evidence.detail) == (0, 0, {"host": "x"})


def test_where_selects_rows():
    results = some_results(Row("c", "a", "before", "fault", 1, 1), Row("c", "a", "after", "clean", 1, 0))
    assert [r.subject for r in results.where(outcome="clean")] == ["after"]


def test_saved_file_is_whole_and_readable_by_others(tmp_path):
    path = some_results().save(tmp_path / "deep" / "results.json")
    assert Results.load(path) == some_results()
    assert stat.S_IMODE(path.stat().st_mode) == 0o644 and [p.name for p in path.parent.iterdir()] == [
        "results.json"
    ]


def test_a_folder_that_cannot_be_made_is_one_error(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UnavailableError, match="give another folder with --out"):
        some_results().save(tmp_path / "file" / "results.json")


def test_a_full_disk_leaves_the_earlier_file_and_no_other(tmp_path):
    path = some_results().save(tmp_path / "results.json")
    old = path.read_text()
    program = (
        "import resource, signal, sys; from pathlib import Path; from specmortem.verdict import write_atomically\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN); resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))\n"
        "write_atomically(Path(sys.argv[1]), 'x' * 5000)"
    )
    done = subprocess.run([sys.executable, "-c", program, str(path)], capture_output=True, text=True)
    assert "UnavailableError: cannot write" in done.stderr
    assert path.read_text() == old and [p.name for p in tmp_path.iterdir()] == ["results.json"]


@pytest.mark.parametrize(("text", "message"), [("{", "is not JSON"), ("[]", "top level")])
def test_a_file_that_is_no_result_names_itself(tmp_path, text, message):
    path = tmp_path / "results.json"
    path.write_text(text)
    with pytest.raises(BadInputError, match=message):
        Results.load(path)


def test_a_missing_file_is_unavailable(tmp_path):
    with pytest.raises(UnavailableError, match="cannot read"):
        Results.load(tmp_path / "none.json")


def test_versions_name_what_is_installed_and_nothing_else():
    found = verdict.versions(["torch", "no-such-distribution"])
    assert set(found) == {"python", "torch"}


def test_reading_results_needs_no_torch():
    program = "import sys, specmortem.verdict, specmortem.incident; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program]).returncode == 0
