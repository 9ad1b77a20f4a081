"""Answers for made-up logs in the formats of the field."""

import shlex

import pytest

from specmortem.statements.facts import STATED, Fact, FactBook
from specmortem.tools.triage import rules, triage_text
from specmortem.tools.triage.judge import judge

from . import logs


def data(text):
    return triage_text(text).parts[0]


def candidate(found, cause):
    return next(c for c in found["candidates"] if c["cause"] == cause)


@pytest.mark.parametrize("slug", logs.INCIDENTS)
def test_each_incident_is_recognised(slug):
    assert data(logs.INCIDENTS[slug])["answer"] == slug


def test_without_align_mode_it_is_the_count_of_the_other_mode():
    assert data(logs.COUNTS)["cause"] == "stale-count-none"
    assert data(logs.COUNTS.replace("prefix caching off", "align mode"))["cause"] == "stale-count-align"


@pytest.mark.parametrize("version", ["0.6.3", "0.5.4.post1", "0.7.3"])
def test_a_release_that_ran_the_old_engine_is_none_of_these(version):
    old = f"vLLM {version}, Qwen3.5, MTP n=5\nCUDA error: an illegal memory access was encountered\n"
    assert (data(old)["answer"], data(old)["cause"]) == ("none", "old-engine")
    newer = old.replace(version, "0.8.1")
    assert data(newer)["cause"] != "old-engine"
    assert data(newer.replace("0.8.1,", f"{version}, a vllm fork,"))["cause"] != "old-engine"


def test_the_audit_command_is_one_that_audit_reads():
    from specmortem.statements import launch

    command = data(logs.PIPELINE)["links"]["audit"]
    config = launch.parse(shlex.split(command)[1])
    assert (config.pipeline, config.drafts, config.cache_mode, config.unknown) == (2, 3, "align", ())


def test_a_resumed_prefix_is_the_sibling_that_needs_no_drafts():
    found = data(logs.RESUME)
    assert (found["answer"], found["cause"]) == ("pp-align-copy", "seed-column-divisor")


@pytest.mark.parametrize(
    "text, cause",
    [
        (logs.NO_DRAFTER, "no-speculation"),
        (logs.OUT_OF_MEMORY, "oom"),
        ("vLLM 0.24.0, MTP n=3\nuncorrectable ECC error encountered\n", "hardware"),
        ("vLLM 0.24.0, MTP n=3\nRuntimeError: CUDA error: device-side assert triggered\n", "device-assert"),
        ("SGLang 0.5, MTP under load: CUDA error: an illegal memory access\n", "other-engine"),
        ("vLLM V0, draft model, num_speculative_tokens=4: an illegal memory access\n", "old-engine"),
        ("vLLM 0.2\nWatchdog caught collective operation timeout: WorkNCCL\n", "nccl"),
        ("vLLM 0.26.0, MTP n=3\nPOST /wake_up?tags=weights, then an illegal memory access\n", "sleep-wake"),
        ('vLLM 0.26.0, MTP n=3\nFile "a.py", line 3, in _dummy_run\nillegal memory access\n', "startup"),
    ],
)
def test_none_names_the_other_class(text, cause):
    found = data(text)
    assert (found["answer"], found["cause"]) == ("none", cause)


@pytest.mark.parametrize(
    "text", ["", "hello\n", "RuntimeError: CUDA error: an illegal memory access was encountered\n", "MTP\n"]
)
def test_too_little_is_said_to_be_too_little(text):
    found = data(text)
    assert found["answer"] == "insufficient"
    assert found["confidence"] == "none"
    assert found["collect"]


@pytest.mark.parametrize("slug", logs.INCIDENTS)
def test_an_exposed_configuration_in_which_nothing_broke_is_no_incident(slug):
    told = [
        line for line in logs.INCIDENTS[slug].splitlines() if "vllm serve" in line or line.startswith("vLLM")
    ]
    assert data("\n".join(told).split(" is ")[0])["answer"] == "insufficient"


def test_drafts_of_minus_one_and_python_frames_weigh_nothing():
    base = "vLLM 0.27.1, Qwen3.5, MTP n=5\nCUDA error: an illegal memory access was encountered\n"
    more = base + (
        "scheduled_spec_decode_tokens={r1: [-1, -1, -1, -1, -1]}\n"
        'File "/x/vllm/v1/attention/backends/gdn_attn.py", line 9, in build\n'
        "Process group watchdog thread terminated\n"
    )
    scores = [{c["cause"]: c["score"] for c in data(text)["candidates"]} for text in (base, more)]
    assert scores[0].items() <= scores[1].items()
    told = " ".join(data(more)["weighs_nothing"])
    assert "[-1, ...]" in told and "Python frame" in told and "watchdog" in told


def test_launch_blocking_weighs_nothing():
    clean = logs.MTP + "CUDA_LAUNCH_BLOCKING=1 does not trigger the crash.\n"
    assert (
        candidate(data(clean), "plan-staging-reuse")["score"]
        == candidate(data(logs.MTP), "plan-staging-reuse")["score"]
    )


def test_a_fixed_release_speaks_against_a_cause():
    affected = candidate(data(logs.PIPELINE), "batch-row-index")
    fixed = candidate(data(logs.PIPELINE.replace("0.31.0", "0.33.0")), "batch-row-index")
    assert fixed["score"] < affected["score"]
    assert any(a["rule"] == "reach:release" for a in fixed["against"])


def test_settings_that_do_not_reach_a_cause_speak_against_it():
    found = candidate(data(logs.MTP.replace("FLASHINFER", "TRITON_ATTN")), "plan-staging-reuse")
    assert any(a["rule"] == "reach:settings" for a in found["against"])


def loop(release, target="", draft="", more=""):
    """A crash with MTP drafts, with the backends that are named."""
    named = f" --attention-backend {target}" * bool(target)
    own = f', "attention_backend": "{draft}"' * bool(draft)
    return (
        f"vllm serve Qwen/Qwen3.5-4B{named} --speculative-config "
        f'\'{{"method": "mtp", "num_speculative_tokens": 5{own}}}\'\n'
        f"INFO 03-04 10:00:00 [core.py:93] Initializing a V1 LLM engine (v{release}) with config: ...\n{more}"
        "RuntimeError: CUDA error: an illegal memory access was encountered\n"
    )


@pytest.mark.parametrize(
    ("release", "target", "draft", "value"),
    [
        ("0.20.2", "FLASHINFER", "", "flashinfer"),
        ("0.20.2", "TRITON_ATTN", "", "triton"),
        ("0.20.2", "TRITON_ATTN", "FLASHINFER", "triton"),
        ("0.21.0", "FLASHINFER", "", "depends"),
        ("0.24.0", "TRITON_ATTN", "", "depends"),
        ("0.24.0", "TRITON_ATTN", "FLASHINFER", "flashinfer"),
        ("0.24.0", "FLASHINFER", "FLASH_ATTN", "flash-attn"),
        ("0.24.0", "", "FLASHINFER", "flashinfer"),
    ],
)
def test_the_drafters_back_end_is_weighed(release, target, draft, value):
    found = data(loop(release, target, draft))
    assert [fact["value"] for fact in found["facts"]["loop_backend"]] == [value]
    told = candidate(found, "plan-staging-reuse")
    pros = {a["rule"] for a in told["for"]}
    assert ("flashinfer-plans" in pros) is (value == "flashinfer")
    assert ("flashinfer-named" in pros) is (value == "depends" and target == "FLASHINFER")
    assert ("reach:settings" in {a["rule"] for a in told["against"]}) is (value in ("triton", "flash-attn"))


def test_nothing_is_said_of_a_back_end_that_nobody_names():
    assert "loop_backend" not in data(loop("0.24.0"))["facts"]


def test_without_a_release_a_named_back_end_need_not_be_the_drafters():
    told = candidate(
        data("vLLM, MTP n=5, FlashInfer attention\nCUDA error: an illegal memory access\n"),
        "plan-staging-reuse",
    )
    assert "flashinfer-named" in {a["rule"] for a in told["for"]}


def test_ampere_with_an_fp8_cache_has_flashinfer_in_the_drafter_whatever_the_target_has():
    more = "RTX 3090, --kv-cache-dtype fp8\n"
    assert [f["value"] for f in data(loop("0.24.0", "FLASHINFER", "", more))["facts"]["loop_backend"]] == [
        "flashinfer"
    ]


@pytest.mark.parametrize("target", ["FLASHINFER", ""])
def test_what_the_log_says_was_chosen_is_the_drafters(target):
    more = "INFO 03-04 10:00:00 [cuda.py:300] Using FLASH_ATTN attention backend out of potential backends: [].\n"
    facts = data(loop("0.24.0", target, "", more))["facts"]
    assert [f["value"] for f in facts["loop_backend"]] == ["flash-attn"]
    assert [f["value"] for f in facts["backend"]] == ["flashinfer" if target else "flash-attn"]


def commands(text):
    return {entry["experiment"]: entry for entry in data(text)["next"]}


@pytest.mark.parametrize(("release", "target"), [("0.20.2", ""), ("0.20.2", "FLASHINFER")])
def test_to_0_20_the_targets_flag_takes_flashinfer_out_of_the_drafter(release, target):
    found = commands(loop(release, target))
    assert found["other-backend-of-both"]["command"] == "--attention-backend TRITON_ATTN"
    assert found["other-backend-of-both"]["separates"]["plan-staging-reuse"] == "clean"
    assert "other-backend" not in found


@pytest.mark.parametrize(
    ("release", "target", "draft"),
    [("0.21.0", "", ""), ("0.24.0", "TRITON_ATTN", ""), ("0.24.0", "", "FLASHINFER")],
)
def test_from_0_21_0_on_the_experiment_names_the_drafters_back_end(release, target, draft):
    found = commands(loop(release, target, draft))
    assert found["other-backend"]["command"].startswith("--speculative-config")
    assert '"attention_backend": "TRITON_ATTN"' in found["other-backend"]["command"]
    assert found["other-backend"]["separates"]["plan-staging-reuse"] == "clean"
    assert "other-backend-of-both" not in found


@pytest.mark.parametrize(
    ("release", "target", "draft"), [("0.20.2", "TRITON_ATTN", ""), ("0.24.0", "", "TRITON_ATTN")]
)
def test_a_drafter_without_flashinfer_needs_no_other_back_end(release, target, draft):
    assert not {"other-backend", "other-backend-of-both"} & set(commands(loop(release, target, draft)))


def test_a_run_with_another_target_back_end_tells_of_the_drafter_only_to_0_20():
    tried = "With TRITON_ATTN it still crashes.\n"
    new, old = (data(loop(release, "FLASHINFER", "", tried)) for release in ("0.24.0", "0.20.2"))
    assert "other-backend" in {entry["experiment"] for entry in new["next"]}
    assert "other-backend-of-both" not in {entry["experiment"] for entry in old["next"]}
    assert ["the target's alone" in " ".join(found["weighs_nothing"]) for found in (new, old)] == [
        True,
        False,
    ]


def test_the_audit_command_carries_the_drafters_back_end():
    from specmortem.statements import launch

    config = launch.parse(shlex.split(data(logs.MTP)["links"]["audit"])[1])
    assert (config.attention, config.draft_attention, config.unknown) == ("FLASHINFER", "FLASHINFER", ())


def test_rules_that_ignore_the_drafters_key_are_found_out(monkeypatch):
    from specmortem.statements import signs

    kept = [sign for sign in signs.all_signs().signs if sign.fact != "draft_backend"]
    monkeypatch.setattr("specmortem.tools.triage.reader.all_signs", lambda: signs.Signs(kept))
    found = data(loop("0.24.0", "TRITON_ATTN", "FLASHINFER"))
    assert [fact["value"] for fact in found["facts"]["loop_backend"]] != ["flashinfer"]


def test_without_a_pipeline_the_row_mix_up_is_excluded():
    found = candidate(
        data(logs.PIPELINE.replace("--pipeline-parallel-size 2", "--pipeline-parallel-size 1")),
        "batch-row-index",
    )
    assert [a["rule"] for a in found["excluded_by"]] == ["no-pipeline"]


def test_the_next_experiment_separates_and_was_not_made():
    found = data(logs.MTP)
    assert found["next"]
    assert "no-async" not in {entry["experiment"] for entry in found["next"]}
    for entry in found["next"]:
        assert len(set(entry["separates"].values())) > 1


def test_arguments_name_file_and_line():
    found = candidate(data(logs.DFLASH), "count-to-lookup-chain")
    lines = {fact["line"] for argument in found["for"] for fact in argument["facts"]}
    assert lines <= {1, 2, 3, 4} and lines


def test_low_evidence_never_gives_high_confidence():
    text = "vLLM 0.27.1, MTP n=3\nCUDA error: an illegal memory access was encountered\n"
    assert data(text)["confidence"] in ("low", "none")


def test_adding_a_supporting_fact_never_lowers_its_cause():
    book = FactBook()
    for name, value in {
        "method": "mtp",
        "fault": "illegal-access",
        "engine": "vllm",
        "hybrid": "yes",
    }.items():
        book.add(Fact(name, value, "f", 1, "", STATED))
    before = next(c for c in judge(book).candidates if c.cause == "plan-staging-reuse").score
    book.add(Fact("control.unpinned", "clean", "f", 2, "", STATED))
    after = next(c for c in judge(book).candidates if c.cause == "plan-staging-reuse").score
    assert after > before


def test_causes_of_the_rules_are_known_to_the_probes_or_marked_open():
    from specmortem.incident import of_cause

    unprobed = {"draft-past-drafter-limit", "dflash-open", "mtp-open", "count-to-lookup-chain"}
    for cause, slug in rules.load().causes.items():
        if cause in unprobed:
            continue
        assert of_cause(cause).slug == slug
