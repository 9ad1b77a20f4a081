"""The lengths of the draft loop on releases, and on releases with one line changed."""

import ast
import shutil

import pytest
import torch

from specmortem import incident, upstream
from specmortem.errors import UnavailableError
from specmortem.incidents.mtp_draft_loop import host_lengths
from specmortem.incidents.mtp_draft_loop import probe as mtp_draft_loop
from specmortem.incidents.mtp_draft_loop.host_lengths import CAUSE, SITUATIONS, Lengths, verdict

pytestmark = pytest.mark.usefixtures("interpreted")
FIRST, PADDED, ON_DEVICE, ON_HOST, ASYNC_FIRST, ASYNC_ON_DEVICE = SITUATIONS
DRAFTER = "vllm/v1/spec_decode/llm_base_proposer.py"
RUNNER = "vllm/v1/worker/gpu_model_runner.py"


def tree(version):
    try:
        found = upstream.resolve(f"vllm=={version}")
        for group in incident.probe_of(CAUSE).files:
            found.fetch([found.first(group)])
    except UnavailableError as error:
        pytest.skip(str(error))
    return found


def told(subject, situation):
    """The outcome in one situation, and what was found in it."""
    judged = verdict(subject, situations=[situation])
    return judged, judged.evidence.detail["situations"][situation.name]


@pytest.mark.network
def test_lengths_on_the_host_grow_twice_without_async_scheduling():
    tree("0.24.0")
    judged, found = told("vllm==0.24.0", FIRST)
    assert judged.outcome == "fault"
    assert found["one_tensor"]
    assert (found["planned_grows"], found["device_grows"]) == ([2, 2, 2, 2], [1, 1, 1, 1])
    assert found["planned_minus_device"] == [[j] * 4 for j in (1, 2, 3, 4)]
    assert judged.evidence.observed.endswith("is made from [69, 70, 71, 72], the device has [65, 66, 67, 68]")


@pytest.mark.network
@pytest.mark.parametrize("situation", [PADDED, ON_DEVICE, ASYNC_FIRST, ASYNC_ON_DEVICE])
def test_silent_where_the_two_fields_are_not_counted_together(situation):
    tree("0.24.0")
    judged, found = told("vllm==0.24.0", situation)
    assert judged.outcome == "clean", judged.evidence
    assert found["planned_grows"] == found["device_grows"] == [1, 1, 1, 1]


@pytest.mark.network
def test_rejections_are_taken_off_before_the_first_pass():
    tree("0.24.0")
    found = host_lengths.lengths(upstream.resolve("vllm==0.24.0"), [ON_DEVICE])[ON_DEVICE.name]
    assert found.planned[0] == found.device[0] == [61, 63, 62, 65]
    assert found.upper_bound[0] == [62, 63, 64, 65]


@pytest.mark.network
def test_rejections_that_are_known_on_the_host_share_one_tensor_too():
    tree("0.24.0")
    found = told("vllm==0.24.0", ON_HOST)[1]
    assert found["one_tensor"] and found["planned_grows"] == [2, 2, 2, 2]


@pytest.mark.network
@pytest.mark.parametrize(
    ("version", "expected"),
    [("0.19.1", "clean"), ("0.20.0", "fault"), ("0.29.0", "fault"), ("0.30.0", "clean"), ("0.33.0", "clean")],
)
def test_verdicts_on_releases(version, expected):
    tree(version)
    judged = verdict(f"vllm=={version}")
    assert judged.outcome == expected, judged.evidence
    found = judged.evidence.detail["situations"]
    assert list(found) == [situation.name for situation in SITUATIONS]
    if expected == "fault":
        assert judged.evidence.observed.startswith(f"{FIRST.name}; {ON_HOST.name}: ")


@pytest.mark.network
def test_what_one_situation_leaves_behind_does_not_reach_the_next():
    tree("0.24.0")
    together = verdict("vllm==0.24.0").evidence.detail["situations"]
    assert together == {each.name: told("vllm==0.24.0", each)[1] for each in SITUATIONS}
    backwards = verdict("vllm==0.24.0", situations=SITUATIONS[::-1]).evidence.detail["situations"]
    assert together == backwards


SECOND_ADD = """        if common_attn_metadata.seq_lens_cpu_upper_bound is not None:
            common_attn_metadata.seq_lens_cpu_upper_bound += 1
"""
SHARED = "seq_lens_cpu_upper_bound = seq_lens_cpu\n"
ASYNC = "self.use_async_scheduling and self.num_spec_tokens > 0"


@pytest.mark.network
@pytest.mark.parametrize(
    ("path", "old", "new", "situation", "expected"),
    [
        (DRAFTER, SECOND_ADD, "", FIRST, "clean"),
        (DRAFTER, SECOND_ADD, "", ON_HOST, "clean"),
        (RUNNER, SHARED, "seq_lens_cpu_upper_bound = seq_lens_cpu.clone()\n", FIRST, "clean"),
        (RUNNER, ASYNC, "False", ASYNC_FIRST, "fault"),
        (DRAFTER, "common_attn_metadata._seq_lens_cpu = None", "pass", ON_DEVICE, "fault"),
    ],
)
def test_one_line_flips_the_verdict(path, old, new, situation, expected, tmp_path):
    released = tree("0.24.0")
    assert told("vllm==0.24.0", situation)[0].outcome != expected  # fills the cache too
    shutil.copytree(released.root / "vllm", tmp_path / "vllm")
    text = (tmp_path / path).read_text(encoding="utf-8")
    assert text.count(old) == 1, old
    (tmp_path / path).write_text(text.replace(old, new), encoding="utf-8")
    assert told(f"tree:{tmp_path}", situation)[0].outcome == expected


@pytest.mark.network
def test_a_loop_that_makes_no_plan_is_not_judged(monkeypatch):
    tree("0.24.0")
    monkeypatch.setattr(host_lengths.LengthsDrafter, "_note", lambda *_: None)
    judged = verdict("vllm==0.24.0", situations=[FIRST])
    assert judged.outcome == "not-judged" and "not each of 4 draft passes" in judged.evidence.reason


def test_statements_that_a_name_depends_on_are_kept_with_their_conditions():
    body = ast.parse(
        "a = 1\nb = a\nunused = 2\nif self.flag:\n    b = None\n    unused = 3\nelse:\n    other = 4\n"
    ).body
    kept = host_lengths._needed(body, {"b"})
    assert [ast.unparse(each) for each in kept] == ["a = 1", "b = a", "if self.flag:\n    b = None"]


def test_growth_and_differences_are_told_by_pass():
    found = Lengths([5, 9], True, [[7, 11], [9, 13]], [], [torch.tensor([6, 10]), torch.tensor([7, 11])])
    told = found.as_dict()
    assert (told["planned_grows"], told["device_grows"]) == ([2, 2], [1, 1])
    assert told["planned_minus_device"] == [[1, 1], [2, 2]]
    assert told["upper_bound_ends_at"] is None


def test_own_arms_differ_in_what_the_two_fields_share():
    before, after = (
        verdict(arm).evidence.detail["situations"]["first drafts"] for arm in ("before", "after")
    )
    assert (before["one_tensor"], after["one_tensor"]) == (True, False)
    assert (before["planned_grows"], after["planned_grows"]) == ([2] * 4, [1] * 4)
    assert before["device_grows"] == after["device_grows"] == [1] * 4


def test_a_tree_without_the_runner_is_not_judged(tmp_path):
    (tmp_path / "vllm").mkdir()
    judged = mtp_draft_loop.judge(CAUSE, f"tree:{tmp_path}")
    assert judged["outcome"] == "not-judged" and "not present" in judged["evidence"]["reason"]
