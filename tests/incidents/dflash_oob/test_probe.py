import shutil

import pytest

from specmortem import incident, upstream
from specmortem import judge as probes
from specmortem.errors import BadInputError, UnavailableError
from specmortem.isolation import Arm, ArmResult
from specmortem.judge.work import judged_of
from specmortem.upstream import vllm_files
from specmortem.verdict import Verdict

CPU_CAUSES = [p.cause for p in incident.get("dflash-oob").probes if p.needs != "cuda"]
# cause: (releases that fault, releases that are clean); releases without the function are not judged
EXPECTED = {
    "v1-rejected-equals-context": ("0.20.1 0.22.1 0.24.0 0.28.0 0.33.0", ""),
    "stale-block-id": ("0.20.1 0.22.1 0.24.0 0.28.0 0.33.0", ""),
    "v2-null-block": ("0.24.0 0.25.1 0.27.1", "0.28.0 0.33.0"),
    "v2-rejected-context-slots": ("0.24.0 0.25.1 0.27.1", "0.28.0 0.33.0"),
    "v2-past-max-len": ("0.24.0 0.25.1 0.27.1", "0.28.0 0.33.0"),
    "v2-slot-past-max-len": ("0.24.0 0.28.0 0.33.0", ""),
    "v2-stale-tail": ("0.24.0", "0.25.1 0.27.1 0.28.0 0.33.0"),
    "gdn-unbounded-accepted": ("0.20.1 0.22.1 0.24.0 0.28.0 0.33.0", ""),
}


@pytest.fixture(scope="module")
def own():
    pairs = [(cause, subject) for cause in CPU_CAUSES for subject in ("before", "after")]
    return dict(zip(pairs, probes.judge_many(pairs), strict=True))


@pytest.mark.parametrize("cause", CPU_CAUSES)
def test_probe_fires_on_before_and_is_silent_on_after(own, cause):
    assert own[cause, "before"].outcome == "fault" and own[cause, "before"].evidence.witness
    assert own[cause, "after"].outcome == "clean" and own[cause, "after"].evidence.observed


def test_a_cause_that_needs_a_gpu_is_not_judged_on_the_simulator():
    verdict = probes.judge("recovered-token-out-of-vocab", "before")
    assert verdict.outcome == "not-judged" and "needs a GPU" in verdict.evidence.reason


@pytest.mark.network
def test_verdicts_on_released_code_are_those_of_the_record():
    expected = {
        (cause, f"vllm=={release}"): outcome
        for cause, listed in EXPECTED.items()
        for outcome, releases in zip(("fault", "clean"), listed, strict=True)
        for release in releases.split()
    }
    verdicts = dict(zip(expected, probes.judge_many(list(expected)), strict=True))
    unreachable = next((v for v in verdicts.values() if v.outcome == "not-judged"), None)
    if unreachable is not None and "index" in unreachable.evidence.reason:
        pytest.skip(unreachable.evidence.reason)
    assert {pair: verdict.outcome for pair, verdict in verdicts.items()} == expected


@pytest.fixture
def tree_of(tmp_path):
    """A tree with what the probes need of a release, some lines of one file changed."""

    def make(version, path, name, changes):
        try:
            tree = upstream.resolve(f"vllm=={version}")
            tree.fetch([path])
            upstream.closure_hash(tree, path, name)
        except UnavailableError as error:
            pytest.skip(str(error))
        shutil.copytree(tree.root / "vllm", tmp_path / "vllm")
        text = (tmp_path / path).read_text(encoding="utf-8")
        for old, new in changes.items():
            assert old in text
            text = text.replace(old, new)
        (tmp_path / path).write_text(text, encoding="utf-8")
        return f"tree:{tmp_path}"

    return make


@pytest.mark.network
def test_a_fix_applied_to_an_affected_tree_flips_the_verdict(tree_of):
    changes = {
        "target_positions_ptr + valid_ctx_end - 1)": (
            "target_positions_ptr + valid_ctx_end - 1, mask=valid_ctx_end > ctx_start, other=-1000)"
        ),
        "block_num = tl.minimum(block_num, block_table_stride - 1)": (
            "block_num = tl.maximum(tl.minimum(block_num, block_table_stride - 1), 0)"
        ),
        "slot = block_id * block_size + (positions % block_size)": (
            "slot = tl.where(positions >= 0, block_id * block_size + (positions % block_size), -1)"
        ),
    }
    subject = tree_of("0.22.1", vllm_files.UTILS, vllm_files.V1, changes)
    assert probes.judge("v1-rejected-equals-context", subject).outcome == "clean"
    assert probes.judge("stale-block-id", subject).outcome == "fault"


@pytest.mark.network
def test_a_fix_taken_out_of_a_fixed_tree_flips_the_verdict(tree_of):
    subject = tree_of(
        "0.28.0", vllm_files.V2_SPECULATOR, vllm_files.V2, {"is_query & (q_block_id != 0)": "is_query"}
    )
    assert probes.judge("v2-null-block", subject).outcome == "fault"
    assert probes.judge("v2-rejected-context-slots", subject).outcome == "clean"


@pytest.mark.network
def test_a_function_that_a_tree_does_not_have_is_not_judged(tree_of):
    subject = tree_of("0.22.1", vllm_files.UTILS, vllm_files.V1, {f"def {vllm_files.V1}(": "def renamed("})
    verdict = probes.judge("v1-rejected-equals-context", subject)
    assert verdict.outcome == "not-judged" and vllm_files.V1 in verdict.evidence.reason


def test_a_tree_without_the_file_is_not_judged(tmp_path):
    (tmp_path / "vllm").mkdir()
    verdict = probes.judge("v2-null-block", f"tree:{tmp_path}")
    assert verdict.outcome == "not-judged" and vllm_files.V2_SPECULATOR in verdict.evidence.reason


def test_an_unreachable_index_is_not_judged(monkeypatch, tmp_path):
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    monkeypatch.setenv("SPECMORTEM_CACHE", str(tmp_path))
    verdict = probes.judge("v2-null-block", "vllm==0.24.0")
    assert verdict.outcome == "not-judged" and "127.0.0.1" in verdict.evidence.reason


def test_a_hostile_tree_is_not_judged_and_the_other_rows_stand(tmp_path):
    target = tmp_path / vllm_files.UTILS
    target.parent.mkdir(parents=True)
    target.write_text(f"import os\nimport torch\n\n\n@os._exit(0)\ndef {vllm_files.V1}(a):\n    pass\n")
    pairs = [("v1-rejected-equals-context", f"tree:{tmp_path}"), ("v2-null-block", "after")]
    hostile, good = probes.judge_many(pairs)
    assert hostile.outcome == "not-judged" and good.outcome == "clean"


def test_unknown_words_are_refused():
    with pytest.raises(BadInputError, match="known causes: .*v2-null-block"):
        probes.judge("no-such-cause", "before")
    with pytest.raises(BadInputError, match="give sim, cuda or auto"):
        probes.judge("v2-null-block", "before", device="tpu")
    with pytest.raises(BadInputError):
        probes.judge("v2-null-block", "vllm=0.24")


@pytest.mark.parametrize(
    ("kind", "outcome"), [("illegal-address", "fault"), ("signal", "not-judged"), ("timeout", "not-judged")]
)
def test_how_a_probe_ended_decides_what_it_says(kind, outcome):
    arm = Arm("specmortem.incidents.dflash_oob.probe:judge", device="cuda")
    verdict = judged_of(ArmResult(arm, kind, message="told")).verdict
    assert isinstance(verdict, Verdict) and verdict.outcome == outcome and "told" in verdict.evidence.reason
