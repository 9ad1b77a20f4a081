"""Verdicts of many pairs: one judgement for one body of code, every subject named."""

import pytest
from judge.conftest import CAUSE

from specmortem.judge import judge_many
from specmortem.verdict import Row


def judged(pairs):
    ended = []
    verdicts = judge_many(pairs, on_end=ended.append)
    return verdicts, [end.arm.name for end in ended]


@pytest.mark.network
def test_releases_with_the_same_code_get_one_verdict_with_the_name_of_each():
    subjects = ["vllm==0.30.0", "vllm==0.32.0", "vllm==0.33.0"]
    verdicts, ran = judged([(CAUSE, subject) for subject in subjects])
    if any(verdict.outcome == "not-judged" for verdict in verdicts):
        pytest.skip(verdicts[0].evidence.reason)
    assert ran == [f"{CAUSE} on vllm==0.33.0"]
    details = [verdict.evidence.detail for verdict in verdicts]
    assert [detail.get("same_code_as") for detail in details] == ["vllm==0.33.0", "vllm==0.33.0", None]
    assert len({str(detail["hashes"]) for detail in details}) == 1
    assert "[lines of vllm==0.33.0, the same code]" in verdicts[0].evidence.place
    assert "lines of" not in verdicts[2].evidence.place
    rows = [
        Row.of(v, cause=CAUSE, subject=s, arm="released") for v, s in zip(verdicts, subjects, strict=True)
    ]
    assert {(row.outcome, row.runs, row.faults) for row in rows} == {("fault", 1, 1)}


def test_folders_and_arms_share_nothing(make_hostile):
    subjects = [make_hostile("raise RuntimeError('x')", name) for name in "ab"]
    verdicts, ran = judged([(CAUSE, subject) for subject in [*subjects, "before", "after"]])
    assert len(ran) == 4
    assert [v.outcome for v in verdicts] == ["not-judged", "not-judged", "fault", "clean"]
    assert not any("same_code_as" in v.evidence.detail for v in verdicts)


def test_the_same_pair_twice_is_judged_once():
    verdicts, ran = judged([(CAUSE, "after"), (CAUSE, "after")])
    assert len(ran) == 1 and verdicts[0] == verdicts[1]


def test_a_relative_folder_is_found(tmp_path, make_hostile, monkeypatch):
    make_hostile("raise RuntimeError('seen')", "checkout")
    monkeypatch.chdir(tmp_path)
    (verdict,), _ = judged([(CAUSE, "tree:checkout")])
    assert "seen" in verdict.evidence.reason
