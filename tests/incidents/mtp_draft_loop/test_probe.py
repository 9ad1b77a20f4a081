"""The probes of mtp-draft-loop on this package's arms, on releases, and on releases with one line changed."""

import shutil

import pytest
import torch
from packaging.version import Version

from specmortem import facts, incident, upstream
from specmortem import judge as probes
from specmortem.errors import UnavailableError
from specmortem.incidents.mtp_draft_loop import probe as mtp_draft_loop
from specmortem.upstream.vllm_files import FLASHINFER, WORKER_UTILS

pytestmark = pytest.mark.usefixtures("interpreted")
CAUSES = [probe.cause for probe in incident.get("mtp-draft-loop").probes]
VERSIONS = ["0.19.1", "0.24.0", "0.25.1", "0.26.0", "0.28.0", "0.29.0", "0.30.0", "0.33.0"]
SINCE = {"host-lengths-counted-twice": "0.20.0"}  # the others: since 0.19.0 or earlier
FIXED = {
    "plan-staging-reuse": "0.30.0",
    "builder-staging-reuse": "0.29.0",
    "zeroer-staging-reuse": "0.26.0",
    "host-lengths-counted-twice": "0.30.0",
}


def judged(cause, subject):
    return mtp_draft_loop.judge(cause, subject)


def outcome(cause, subject):
    return judged(cause, subject)["outcome"]


def test_causes_and_their_bounds_are_those_of_the_incident():
    causes = {cause.id: cause for cause in facts.load("mtp-draft-loop").causes}
    assert set(causes) == set(CAUSES) == set(FIXED)
    for cause, fixed in FIXED.items():
        assert causes[cause].affected == f">={SINCE.get(cause, '0.19.0')},<{fixed}"


@pytest.mark.parametrize("cause", CAUSES)
def test_probe_fires_on_before_and_is_silent_on_after(cause):
    assert [outcome(cause, arm) for arm in ("before", "after")] == ["fault", "clean"]


def test_evidence_of_the_plan_shows_the_descending_indices():
    evidence = judged("plan-staging-reuse", "before")["evidence"]
    assert evidence["observed"] == "merge_indptr [15, 14, 39, 48, 0]"


def test_a_device_that_keeps_up_hides_the_reuse():
    with mtp_draft_loop.bench("sim", schedule="immediate") as on:
        build = mtp_draft_loop._own_build("before")
        calls = mtp_draft_loop._Calls(on, lambda v: build(v).clone(), [1, 1, 1, 1], [2, 2, 2, 2])
    assert calls.found == [0, 1, 2, 3, 4]


def test_a_stream_that_has_caught_up_proves_nothing():
    with mtp_draft_loop.bench("sim") as on:
        build = mtp_draft_loop._own_build("after")
        calls = mtp_draft_loop._Calls(on, lambda v: build(v).clone(), [1, 1, 1, 1], [2, 2, 2, 2])
    calls.busy = False
    verdict = calls.verdict([0, 1, 2, 3, 4], [0, 2, 4, 6, 8], "row pointers", "two calls", {})
    assert verdict.outcome == "not-judged" and verdict.evidence.detail["caught_up"]


class Tree:
    subject = "vllm==0.0.0"

    @staticmethod
    def first(paths):
        return paths[0]


@pytest.mark.parametrize(
    ("read", "busy", "expected"),
    [([1], [True, True], "clean"), ([1], [True, False], "not-judged"), ([2], [True, False], "fault")],
)
def test_a_release_is_clean_only_on_a_stream_that_never_caught_up(read, busy, expected, monkeypatch):
    monkeypatch.setattr(upstream, "body_hash", lambda *_: "hash")
    drafted = mtp_draft_loop.Drafted([[1]], [torch.tensor(read)], [1, 1], busy)
    verdict = mtp_draft_loop._plan_verdict(Tree(), {"rejections known": drafted}, "cuda", 2)
    assert verdict.outcome == expected
    assert bool(verdict.evidence.detail.get("caught_up")) == (expected == "not-judged")


def test_flashinfer_subjects_need_a_gpu_and_one_cause():
    verdicts = probes.judge_many([(cause, "flashinfer==0.6.11.post2") for cause in CAUSES])
    assert [verdict.outcome for verdict in verdicts] == ["not-judged"] * len(CAUSES)
    told = dict(zip(CAUSES, (verdict.evidence.reason for verdict in verdicts), strict=True))
    assert "needs a GPU" in told["plan-staging-reuse"]
    assert "a subject of plan-staging-reuse only" in told["zeroer-staging-reuse"]


def tree(version):
    try:
        found = upstream.resolve(f"vllm=={version}")
        found.fetch([FLASHINFER, WORKER_UTILS])
    except UnavailableError as error:
        pytest.skip(str(error))
    return found


@pytest.mark.network
@pytest.mark.parametrize("cause", CAUSES)
def test_verdicts_on_releases(cause):
    for version in VERSIONS:
        tree(version)
    verdicts = probes.judge_many([(cause, f"vllm=={version}") for version in VERSIONS])
    first, fixed = Version(SINCE.get(cause, "0.19.0")), Version(FIXED[cause])
    expected = ["fault" if first <= Version(version) < fixed else "clean" for version in VERSIONS]
    assert [verdict.outcome for verdict in verdicts] == expected, [v.evidence for v in verdicts]
    assert all(verdict.evidence.detail["hashes"] for verdict in verdicts)


@pytest.mark.network
@pytest.mark.parametrize(
    ("version", "known", "unknown"),
    [("0.28.0", [1, 1, 0, 0, 0], [0, 0, 0, 0, 0]), ("0.30.0", [1, 1, 1, 1, 1], [1, 1, 1, 1, 1])],
)
def test_the_host_waits_in_the_builds_that_read_lengths_from_the_device(version, known, unknown):
    tree(version)
    waits = judged("plan-staging-reuse", f"vllm=={version}")["evidence"]["detail"]["host_waits_by_build"]
    assert waits == {"rejections known": known, "no rejections": unknown}


@pytest.mark.network
def test_three_drafts_read_the_second_plan_where_the_first_copy_is_late():
    tree("0.28.0")
    tree("0.30.0")
    old, new = (mtp_draft_loop.three_drafts(f"vllm=={release}") for release in ("0.28.0", "0.30.0"))
    assert (old["outcome"], new["outcome"]) == ("fault", "clean")
    known = old["evidence"]["observed"].partition(";")[0]
    assert known.endswith("step 1 reads page counts [0, 4, 8, 13, 18], its plan was [0, 4, 8, 12, 17]")
    assert old["evidence"]["detail"]["host_waits_by_build"]["rejections known"] == [1, 1, 0]


@pytest.mark.network
def test_a_release_without_the_zeroer_is_not_judged_and_says_so():
    tree("0.19.1")
    verdict = judged("zeroer-staging-reuse", "vllm==0.12.0")
    assert verdict["outcome"] == "not-judged" and "not present" in verdict["evidence"]["reason"]


CACHED, READ = (
    f"seq_lens_cpu = common_attn_metadata.{read}\n" for read in ("seq_lens_cpu", "seq_lens.cpu()")
)
RING = "% self.max_concurrency"


@pytest.mark.network
@pytest.mark.parametrize(
    ("cause", "version", "path", "old", "new", "expected"),
    [
        ("plan-staging-reuse", "0.28.0", FLASHINFER, CACHED, READ, "clean"),
        (
            "plan-staging-reuse",
            "0.30.0",
            FLASHINFER,
            "common_attn_metadata.seq_lens.cpu()",
            "common_attn_metadata.seq_lens_cpu_upper_bound",
            "fault",
        ),
        (
            "builder-staging-reuse",
            "0.28.0",
            FLASHINFER,
            "use_v2_model_runner and PIN_MEMORY",
            "use_v2_model_runner and False",
            "clean",
        ),
        (
            "builder-staging-reuse",
            "0.29.0",
            FLASHINFER,
            "max_num_reqs + 1, dtype=torch.int32, device=self.device, pin_memory=False",
            "max_num_reqs + 1, dtype=torch.int32, device=self.device, pin_memory=True",
            "fault",
        ),
        (
            "zeroer-staging-reuse",
            "0.25.1",
            WORKER_UTILS,
            "self._ids_pinned[:n_blocks], non_blocking=True",
            "self._ids_pinned[:n_blocks].clone(), non_blocking=True",
            "clean",
        ),
        ("zeroer-staging-reuse", "0.26.0", WORKER_UTILS, RING, "% 1", "fault"),
    ],
)
def test_one_line_flips_the_verdict(cause, version, path, old, new, expected, tmp_path):
    released = tree(version)
    assert outcome(cause, f"vllm=={version}") != expected  # fills the cache too
    shutil.copytree(released.root / "vllm", tmp_path / "vllm")
    text = (tmp_path / path).read_text(encoding="utf-8")
    assert text.count(old) == 1, old
    (tmp_path / path).write_text(text.replace(old, new), encoding="utf-8")
    assert outcome(cause, f"tree:{tmp_path}") == expected
