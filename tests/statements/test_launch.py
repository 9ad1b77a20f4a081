"""What a configuration reaches: the four reports, labelled public reports, defaults, and words that are not known."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specmortem.errors import BadInputError, UnavailableError
from specmortem.exposure import is_hybrid, resolve
from specmortem.incident import causes, reached, reaches, rules
from specmortem.statements import flags, launch
from specmortem.statements.gpus import gpu_of

V2_DFLASH = {"v2-null-block", "v2-rejected-context-slots", "v2-past-max-len", "v2-slot-past-max-len"}
V1_HYBRID = {"gdn-unbounded-accepted", "recovered-token-out-of-vocab"}
ALIGN_V2 = {"batch-row-index", "accepted-written-in-place", "seed-column-divisor"}
STALE = {"stale-count-none", "stale-count-align"}
PLANS = {"plan-staging-reuse", "builder-staging-reuse"}
LENGTHS = "host-lengths-counted-twice"

# (source, text, reached, ruled out)
SEEDS = {
    "mtp-draft-loop": (
        """vLLM 0.20.1, RTX PRO 6000
vllm serve Qwen/Qwen3.5-9B \\
  --dtype bfloat16 --max-model-len 32768 --max-num-seqs 64 --gpu-memory-utilization 0.85 \\
  --kv-cache-dtype bfloat16 --attention-backend FLASHINFER --enable-prefix-caching \\
  --enable-chunked-prefill \\
  --speculative-config '{"method": "mtp", "num_speculative_tokens": 4}' \\
  --compilation-config '{"mode": 3}' --language-model-only""",
        {*PLANS, *V1_HYBRID, "stale-count-align"},
        {*V2_DFLASH, *ALIGN_V2, "zeroer-staging-reuse", "v1-rejected-equals-context", "stale-count-none"},
    ),
    "pp-align-copy": (
        """• vLLM: v0.29.1rc1.dev47+gdc36fcce9
• Three RTX 3090s, CUDA_VISIBLE_DEVICES=0,1,2
• PP=3 / TP=1
• MTP: {"method":"mtp","num_speculative_tokens":1}
• max-model-len=262144
• max-num-seqs=2
• max-num-batched-tokens=512
• prefix caching enabled
• mamba-cache-mode=align
• compilation: {"mode":0,"cudagraph_mode":"FULL_DECODE_ONLY", "cudagraph_capture_sizes":[1,2,4]}""",
        {"batch-row-index", "accepted-written-in-place", "overlapping-shift"},
        {*V2_DFLASH, *PLANS, "v1-rejected-equals-context"},
    ),
    "dflash-oob": (
        """vLLM 0.22.1
CUDA_VISIBLE_DEVICES=4,5,6,7 setsid python -m vllm.entrypoints.openai.api_server \\
  --model /models/Qwen3.6-35B-A3B --served-model-name repro --port 18094 --tensor-parallel-size 4 \\
  --dtype bfloat16 --trust-remote-code --max-model-len 65536 --max-num-seqs 64 \\
  --speculative-config '{"method": "dflash", "model": "/m/DFlash", "num_speculative_tokens": 15}' \\
  --max-num-batched-tokens 32768 --gdn-prefill-backend triton --api-key sk-local""",
        {"v1-rejected-equals-context", "stale-block-id", "count-to-lookup-chain", *V1_HYBRID},
        {*V2_DFLASH, *PLANS, *ALIGN_V2, "stale-count-align"},
    ),
    "async-accepted-counts": (
        "version=0.23.0 model=Qwen3.5-27B method=mtp k=3 async=on cache-mode=none max-num-seqs=72 tp=1 pp=1",
        {"stale-count-none", *V1_HYBRID},
        {*V2_DFLASH, *ALIGN_V2, "stale-count-align", "v1-rejected-equals-context"},
    ),
}
REPORTS = {
    "vllm#53142": (
        "Engine/version: vLLM 0.27.1, V2 GPU runner\nHardware: 1x RTX 3090\nModel: Qwen3.8-27B W4A16\n"
        "--block-size 128 --enable-prefix-caching --mamba-cache-mode align, W4A16",
        {"seed-column-divisor"},
        {*PLANS, *STALE, "v1-rejected-equals-context"},
    ),
    "vllm#55506": (
        "VLLM_USE_V2_MODEL_RUNNER=1 vllm serve Qwen/Qwen3.5-27B --pipeline-parallel-size 2 "
        '--speculative-config \'{"method":"mtp","num_speculative_tokens":4}\' --async-scheduling '
        "--enable-prefix-caching --mamba-cache-mode align --max-num-seqs 8 --seed 42",
        {"batch-row-index", "accepted-written-in-place", "overlapping-shift", "zeroer-staging-reuse"},
        {*V2_DFLASH, *STALE, *PLANS, "gdn-unbounded-accepted"},
    ),
    "vllm#44889": (
        "Engine/version: vLLM 0.22.0\nHardware: 1x H200\n"
        "Model: google/gemma-4-31B-it\n--no-async-scheduling "
        '--speculative-config=\'{"model":"gemma-4-31B-it-speculator.dflash","num_speculative_tokens":7,'
        '"method":"dflash"}\' --tensor-parallel-size=1',
        {"stale-block-id"},
        {"gdn-unbounded-accepted", "count-to-lookup-chain", "batch-row-index", *STALE},
    ),
    "club-3090#1089": (
        "Engine/version: vLLM 0.27.1\nHardware: 2x RTX 3090\n"
        "W4A8 target, MTP n=4, --kv-cache-dtype fp8, TP=2, FlashInfer attention, MAX_NUM_SEQS>=4",
        set(),
        {*V2_DFLASH, "v1-rejected-equals-context", "stale-block-id"},
    ),
    "vllm#55279": (
        "Engine/version: vLLM 0.27.1\nHardware: A100\nModel: Qwen3.8-27B\n"
        '--speculative-config \'{"method":"dflash", k=7}\' --attention-backend FLASH_ATTN '
        "--kv-cache-dtype bfloat16 --max-num-seqs 1",
        {"v1-rejected-equals-context", "gdn-unbounded-accepted"},
        {"count-to-lookup-chain", *STALE, *PLANS, "stale-block-id"},
    ),
    "wtdcode#96": (
        "Hardware: 2 nodes of NVIDIA A40 (sm_86), TP=8 PP=2\n"
        "GLM-5.3-Flash FP8 (Glm5NextForConditionalGeneration), TP=8 PP=2, MTP 3, prefix caching",
        set(),
        {*V2_DFLASH, "v1-rejected-equals-context"},
    ),
    "vllm#55279, second": (
        "Engine/version: vLLM 0.29.0\nHardware: 2x RTX PRO 6000 Blackwell (sm_120)\n"
        "Model: Qwen3.8-27B-NVFP4 + DFlash2\n--kv-cache-dtype fp8 --max-num-seqs 10 "
        "--kv-offloading-size 90; speculative method dflash",
        V2_DFLASH,
        {*PLANS, "stale-block-id"},
    ),
    "vllm#56736": (
        "V2 runner\nModel: Qwen3.8-27B AWQ int4\n--enable-prefix-caching --mamba-cache-mode align "
        "--max-num-seqs 8, async on, FULL_AND_PIECEWISE, DFlash2-W4A16 num_speculative_tokens=7",
        {"accepted-written-in-place", "overlapping-shift", "v2-null-block"},
        {*STALE, *PLANS, "v1-rejected-equals-context"},
    ),
    "vllm#37917": (
        "vllm serve Qwen/Qwen3.5-27B-GPTQ-Int4 --host <HOST> --max-model-len 1000000 "
        "--tensor-parallel-size 2 --speculative-config "
        '\'{"method":"qwen3_next_mtp","num_speculative_tokens":3}\' --max-num-seqs 256',
        {"graph-metadata-rows"},
        {"batch-row-index", "v1-rejected-equals-context", *V2_DFLASH},
    ),
    "z-lab/dflash#146": (
        "Engine/version: vLLM 0.22.1\nModel: Qwen3.6-35B-A3B\n"
        'TP=4, --speculative-config \'{"method":"dflash",...}\' (15 draft tokens), CUDA graphs on',
        {"v1-rejected-equals-context", "stale-block-id", "gdn-unbounded-accepted"},
        {*PLANS},
    ),
    "qwen38-27b-rtx3090#34": (
        "Engine/version: vLLM 0.27.1\nHardware: 1x RTX 3090\nModel: Qwen3.8-27B W4A16\n"
        "attention backend flashinfer, MTP num_spec_tokens=3, enable_prefix_caching=true, "
        "kv_cache_dtype=fp8, enforce_eager=false, cudagraph_mode=PIECEWISE",
        {"plan-staging-reuse", "gdn-unbounded-accepted"},
        {*V2_DFLASH, "stale-count-none", "v1-rejected-equals-context"},
    ),
    "vllm#37035": (
        "Engine/version: vLLM 0.17.1rc1.dev126\nModel: Qwen3.5-27B\n--attention-backend FLASHINFER "
        "--tensor-parallel-size 2 --speculative-config "
        '\'{"method":"qwen3_next_mtp","num_speculative_tokens":5}\'',
        {"gdn-unbounded-accepted"},
        {*V2_DFLASH, "v1-rejected-equals-context"},
    ),
    "vllm#57941": (
        "Engine/version: vLLM 0.29.0, V1\nModel: Muse-Glimmer-30B FP8 + DFlash2\n"
        "--tensor-parallel-size 2, method dflash, 15 speculative tokens, cudagraph_mode PIECEWISE, "
        "prefix caching and chunked prefill on",
        {"v1-rejected-equals-context"},
        {*V2_DFLASH, *ALIGN_V2, "gdn-unbounded-accepted", "stale-block-id"},
    ),
    "vllm#50021": (
        "Hardware: 1x RTX 5090 (sm_120)\nQwen3.6-27B NVFP4, MTP n=3, --mamba-cache-mode align, "
        "prefix caching, --enforce-eager",
        {"overlapping-shift"},
        {*V2_DFLASH, "count-to-lookup-chain", "stale-count-none", "v1-rejected-equals-context"},
    ),
}


@pytest.mark.parametrize("name", [*SEEDS, *REPORTS])
def test_reports_reach_what_they_reach_and_cannot_reach_the_rest(name):
    text, yes, no = (SEEDS | REPORTS)[name]
    found = {cause: reach.reachable for cause, reach in reached(launch.parse(text)).items()}
    assert {cause: found[cause] for cause in yes} == dict.fromkeys(yes, "yes")
    assert "yes" not in {found[cause] for cause in no}
    if launch.parse(text).complete or name == "async-accepted-counts":  # sentences rule nothing out
        assert {cause: found[cause] for cause in no} == dict.fromkeys(no, "no")


def test_every_cause_with_a_probe_has_a_rule():
    assert set(causes()) <= set(rules())


@pytest.mark.parametrize(
    ("release", "expected"),
    [
        ("0.23.0", {"runner": "v1", "cache_mode": "none", "async_scheduling": True}),
        ("0.25.1", {"runner": "v1", "cache_mode": "none", "async_scheduling": True}),
        ("0.27.1", {"runner": "v1", "cache_mode": "none", "async_scheduling": True}),
        ("0.28.0", {"runner": "v1", "cache_mode": "align", "async_scheduling": True}),
        ("0.29.0", {"runner": "v2", "cache_mode": "align", "async_scheduling": True}),
    ],
)
def test_defaults_of_a_hybrid_model_with_mtp(release, expected):
    text = f"vLLM {release}\nvllm serve Qwen/Qwen3.5-9B --speculative-config.method mtp -tp 2"
    known = resolve(launch.parse(text))
    assert {name: getattr(known, name) for name in expected} == expected


def test_default_exposure_to_stale_counts_follows_the_release():
    text = "vLLM {}\nvllm serve Qwen/Qwen3.5-9B --speculative-config.method mtp"
    found = {
        release: [c for c in sorted(STALE) if reaches(c, launch.parse(text.format(release))).reached]
        for release in ("0.23.0", "0.27.1", "0.28.0", "0.29.0")
    }
    assert found["0.23.0"] == ["stale-count-none"]
    assert found["0.28.0"] == ["stale-count-align"]  # caching is an option of hybrids to 0.27.1
    assert found["0.29.0"] == []


def test_nothing_is_assumed_of_a_fragment():
    found = reached(launch.parse("--speculative-config.method mtp"))
    assert {r.reachable for c, r in found.items() if "v2-" in c} == {"no"}
    assert found["batch-row-index"].reachable == "unknown"
    assert "a pipeline of two or more ranks" in found["batch-row-index"].reason


def test_each_reason_names_the_flag_that_decides():
    text = "vLLM 0.31.0\nvllm serve Qwen/Qwen3.5-27B -pp 2 --mamba-cache-mode align --max-num-seqs 1"
    told = reaches("batch-row-index", launch.parse(text))
    assert told.reachable == "no"
    assert told.reason == "needs speculative decoding; here: none (default)"
    text += ' --speculative-config \'{"method": "mtp", "num_speculative_tokens": 2}\''
    told = reaches("batch-row-index", launch.parse(text))
    assert told.reason == "needs two or more requests at a time; here: 1 (--max-num-seqs)"


@pytest.mark.parametrize(
    ("gpu", "release", "plans"),
    [
        ("sm_86", "0.29.0", "yes"),
        ("sm_90", "0.24.0", "yes"),
        ("sm_90", "0.25.1", "no"),
        ("sm_100", "0.20.1", "no"),
        ("sm_120", "0.27.1", "yes"),
        ("sm_120", "0.28.0", "no"),
    ],
)
def test_plans_depend_on_the_gpu_and_the_release(gpu, release, plans):
    text = f"version={release} runner=v1 method=mtp k=5 attention-backend=FLASHINFER gpu={gpu}"
    text += " draft-attention-backend=FLASHINFER"
    assert reaches("plan-staging-reuse", launch.parse(text)).reachable == plans


def launched(release, target="", draft="", more="", gpu="RTX 3090", cache=""):
    """A whole command with five MTP drafts; `draft` and `cache` are keys of its speculative config."""
    own = f', "attention_backend": "{draft}"' * bool(draft) + f', "kv_cache_dtype": "{cache}"' * bool(cache)
    named = f"--attention-backend {target} " * bool(target)
    return (
        f"vLLM {release}, {gpu}\nvllm serve Qwen/Qwen3.5-9B {named}{more} --speculative-config "
        f'\'{{"method": "mtp", "num_speculative_tokens": 5{own}}}\''
    )


FP8 = "--kv-cache-dtype fp8"
# (release, backend of the target, of the drafter, further flags, whether the draft loop plans)
DRAFTERS = [
    ("0.20.2", "FLASHINFER", "", "", "yes"),
    ("0.20.2", "TRITON_ATTN", "", "", "no"),
    ("0.20.2", "TRITON_ATTN", "FLASHINFER", "", "no"),
    ("0.20.2", "FLASHINFER", "TRITON_ATTN", "", "yes"),
    ("0.20.2", "", "", "", "no"),
    ("0.20.2", "", "", FP8, "yes"),
    ("0.20.2", "TRITON_ATTN", "", FP8, "no"),
    ("0.21.0", "FLASHINFER", "", "", "no"),
    ("0.21.0", "TRITON_ATTN", "", FP8, "yes"),
    ("0.21.0", "TRITON_ATTN", "FLASHINFER", "", "yes"),
    ("0.24.0", "FLASHINFER", "", "", "no"),
    ("0.24.0", "FLASHINFER", "auto", "", "no"),
    ("0.24.0", "", "FLASHINFER", "", "yes"),
    ("0.24.0", "FLASHINFER", "FLASHINFER", "", "yes"),
    ("0.24.0", "FLASHINFER", "TRITON_ATTN", "", "no"),
    ("0.24.0", "", "", "", "no"),
    ("0.24.0", "", "", FP8, "yes"),
    ("0.28.0", "TRITON_ATTN", "", FP8, "yes"),
    ("0.28.0", "TRITON_ATTN", "TRITON_ATTN", FP8, "no"),
]


@pytest.mark.parametrize("cause", sorted(PLANS))
@pytest.mark.parametrize(("release", "target", "draft", "more", "plans"), DRAFTERS)
def test_the_drafters_back_end_decides_from_0_21_0_on_and_the_targets_before(
    cause, release, target, draft, more, plans
):
    assert reaches(cause, launch.parse(launched(release, target, draft, more))).reachable == plans


@pytest.mark.parametrize(("release", "target", "draft", "more", "plans"), DRAFTERS)
def test_lengths_are_counted_twice_where_the_draft_loop_plans_without_asynchronous_scheduling(
    release, target, draft, more, plans
):
    for flag, reachable in (("--no-async-scheduling", plans), ("--async-scheduling", "no"), ("", "no")):
        text = launched(release, target, draft, f"{more} {flag}")
        assert reaches(LENGTHS, launch.parse(text)).reachable == reachable, flag


@pytest.mark.parametrize(
    ("words", "reachable"),
    [
        ("runner=v1 k=2 async=off gpu=sm_86", "yes"),
        ("runner=v1 k=1 async=off gpu=sm_86", "no"),
        ("runner=v2 k=2 async=off gpu=sm_86", "no"),
        ("runner=v1 k=2 async=off gpu=sm_100", "no"),
        ("runner=v1 k=2 gpu=sm_86", "unknown"),
    ],
)
def test_lengths_counted_twice_need_the_v1_runner_two_drafts_and_a_plan(words, reachable):
    text = f"version=0.24.0 method=mtp draft-attention-backend=FLASHINFER {words}"
    told = reaches(LENGTHS, launch.parse(text))
    assert told.reachable == reachable
    if reachable == "yes":
        assert told.reason.endswith("and a batch that is not padded for a CUDA graph")


def test_rules_that_ignore_the_drafters_key_are_found_out(monkeypatch):
    keys = [case for case in DRAFTERS if case[2] in ("FLASHINFER", "TRITON_ATTN") and case[0] != "0.20.2"]
    inside = flags._inside
    ignored = {"attention-backend": "ignored"}
    monkeypatch.setattr(flags, "_inside", lambda head, key: ignored.get(key, inside(head, key)))
    wrong = [
        case
        for case in keys
        if reaches("plan-staging-reuse", launch.parse(launched(*case[:4]))).reachable != case[4]
    ]
    assert len(wrong) == 4 and {case[4] for case in wrong} == {"yes", "no"}


def test_a_cache_of_the_drafters_own_decides_what_is_chosen_for_it():
    own = launched("0.28.0", "TRITON_ATTN", more=FP8, cache="bfloat16")
    assert reaches("plan-staging-reuse", launch.parse(own)).reachable == "no"
    own = launched("0.28.0", "TRITON_ATTN", cache="fp8")
    assert reaches("plan-staging-reuse", launch.parse(own)).reachable == "yes"


@pytest.mark.parametrize(
    "text",
    [
        launched("0.24.0", "FLASHINFER", gpu="some GPU"),
        launched("(see below)", "FLASHINFER"),
        launched("0.24.0", "FLASHINFER", more="--kv-cache-dtype int4_per_token_head"),
        "version=0.24.0 runner=v1 method=mtp k=5 attention-backend=FLASHINFER gpu=sm_86",
        "version=0.24.0 runner=v1 method=mtp k=5 attention-backend=TRITON_ATTN gpu=sm_86 kv-cache-dtype=fp8",
    ],
)
def test_a_drafter_that_may_have_either_is_not_judged(text):
    told = reaches("plan-staging-reuse", launch.parse(text))
    assert told.reachable == "unknown"
    assert "attention_backend of speculative_config" in told.reason


def test_the_reason_says_whose_back_end_was_named():
    told = reaches("plan-staging-reuse", launch.parse(launched("0.24.0", "FLASHINFER"))).reason
    assert told.endswith("here: FLASH_ATTN (chosen on sm_86; FLASHINFER is the target's alone)")
    told = reaches("plan-staging-reuse", launch.parse(launched("0.20.2", "TRITON_ATTN"))).reason
    assert told.endswith("here: TRITON_ATTN (the target's in 0.20.2 (--attention-backend))")


@pytest.mark.parametrize(
    ("gpu", "release", "cache", "backend"),
    [
        ("sm_75", "0.23.0", "auto", "FLASHINFER"),
        ("sm_75", "0.24.0", "auto", ""),
        ("sm_80", "0.24.0", "auto", "FLASH_ATTN"),
        ("sm_89", "0.24.0", "fp8_e5m2", "FLASHINFER"),
        ("sm_90", "0.24.0", "bfloat16", "FLASH_ATTN"),
        ("sm_90", "0.24.0", "fp8", "FLASH_ATTN"),
        ("sm_90", "0.24.0", "fp8_e5m2", ""),
        ("sm_100", "0.24.0", "auto", "FLASHINFER"),
        ("sm_103", "0.29.0", "fp8", "FLASHINFER"),
        ("sm_120", "0.24.0", "auto", "FLASH_ATTN"),
        ("sm_121", "0.26.0", "fp8", "FLASHINFER"),
        ("sm_86", "0.24.0", "fp8_per_token_head", ""),
    ],
)
def test_what_is_chosen_depends_on_the_gpu_and_the_cache(gpu, release, cache, backend):
    text = launched(release, more=f"--kv-cache-dtype {cache}", gpu=gpu)
    known = resolve(launch.parse(text))
    assert (known.attention, known.draft_attention) == (backend, backend)


@pytest.mark.parametrize(
    ("release", "draft", "backend"),
    [
        ("0.29.0", "FLASHINFER", "TRITON_ATTN"),
        ("0.30.0", "FLASHINFER", "FLASHINFER"),
        ("0.30.0", "", "TRITON_ATTN"),
    ],
)
def test_on_the_v2_runner_a_drafter_without_the_key_has_the_targets(release, draft, backend):
    config = launch.parse(
        "VLLM_USE_V2_MODEL_RUNNER=1 " + launched(release, "TRITON_ATTN", draft).split("\n")[1]
    )
    assert resolve(replace(config, version=release, gpu=86)).draft_attention == backend


def test_a_log_tells_what_was_chosen_for_the_drafter():
    log = (
        "INFO vLLM API server version 0.24.0\nINFO non-default args: {'model': 'Qwen/Qwen3.5-9B', 'attention_backend': "
        "'FLASHINFER', 'speculative_config': {'method': 'mtp', 'num_speculative_tokens': 5}}\n"
        "INFO Using AttentionBackendEnum.FLASHINFER backend.\n"
        "INFO Using FLASH_ATTN attention backend out of potential backends: ['FLASH_ATTN', 'FLASHINFER'].\n"
    )
    config = resolve(launch.parse(log))
    assert (config.attention, config.draft_attention) == ("FLASHINFER", "FLASH_ATTN")
    assert resolve(launch.parse(log.replace("0.24.0", "0.20.2"))).draft_attention == "FLASHINFER"
    bare = launch.parse("\n".join(log.splitlines()[-2:]))
    assert (bare.attention, bare.draft_attention) == ("FLASHINFER", "FLASH_ATTN")


def test_a_log_head_is_a_whole_configuration():
    log = "\n".join(
        [
            "INFO 06-01 10:00:00 [api_server.py:1] vLLM API server version 0.30.0",
            "INFO non-default args: {'model_tag': 'x', 'model': 'Qwen/Qwen3.5-9B', 'pipeline_parallel_size': 2, "
            "'speculative_config': {'method': 'mtp', 'num_speculative_tokens': 2}, 'mamba_cache_mode': 'align'}",
            "INFO Resolved architecture: Qwen3_5ForConditionalGeneration",
            "INFO Asynchronous scheduling is enabled.",
            "INFO Using V2 Model Runner",
            "INFO Initializing a V1 LLM engine (v0.30.0) with config: model='Qwen/Qwen3.5-9B', "
            "speculative_config=SpeculativeConfig(method='mtp', model='m', num_spec_tokens=2), "
            "tensor_parallel_size=1, pipeline_parallel_size=2, enforce_eager=False, kv_cache_dtype=auto, "
            "enable_prefix_caching=True",
        ]
    )
    config = launch.parse(log)
    assert config.complete and config.version == "0.30.0" and config.drafts == 2
    assert reaches("batch-row-index", config).reachable == "yes"


def test_a_log_without_a_drafter_says_so():
    log = (
        "INFO Initializing a V1 LLM engine (v0.30.0) with config: model='m', speculative_config=None, seed=0"
    )
    assert reaches("overlapping-shift", launch.parse(log)).reachable == "no"


def test_unknown_flags_are_listed_and_decide_nothing():
    plain = "vllm serve Qwen/Qwen3.5-9B --port 8000"
    config = launch.parse("FOO=bar " + plain + " --frobnicate 3 --turbo -v")
    assert config.unknown == ("--frobnicate", "--turbo")
    assert {**vars(config), "unknown": (), "complete": True} == vars(launch.parse(plain))


def test_a_launch_with_a_flag_that_vllm_does_not_know_is_not_known_whole():
    plain = "vllm serve Qwen/Qwen3.5-9B --port 8000"
    assert launch.parse(plain).complete
    for flag in (
        "--speculative-confg '{}'",
        "--frobnicate",
        "--config x.yaml",
        "$EXTRA",
        "--scheduler-cls x.Y",
    ):
        assert not launch.parse(f"{plain} {flag}").complete, flag


@pytest.mark.parametrize(
    ("flag", "field", "value"),
    [
        ("-pp 4", "pipeline", 4),
        ("-tp=2", "tensor", 2),
        ("--pipeline_parallel_size=3", "pipeline", 3),
        ("--no-enable-prefix-caching", "prefix_caching", False),
        ("--no-async-scheduling", "async_scheduling", False),
        ("--async-scheduling", "async_scheduling", True),
        ("--enforce-eager", "eager", True),
        ("-cc.cudagraph_mode=PIECEWISE", "cudagraphs", "PIECEWISE"),
        ('--compilation-config \'{"cudagraph_mode": "NONE"}\'', "cudagraphs", "NONE"),
        ("--attention-backend flashinfer", "attention", "FLASHINFER"),
        ("--attention-config.backend TRITON_ATTN", "attention", "TRITON_ATTN"),
        ('-ac \'{"backend": "FLASHINFER"}\'', "attention", "FLASHINFER"),
        ("--speculative-config.attention_backend flash_attn", "draft_attention", "FLASH_ATTN"),
        ('-sc \'{"method": "mtp", "attention_backend": "FLASHINFER"}\'', "draft_attention", "FLASHINFER"),
        ('-sc \'{"method": "mtp", "attention_backend": "FLASHINFER"}\'', "attention", ""),
        ('-sc \'{"attention_backend": "TRITON_ATTN", ...}\'', "draft_attention", "TRITON_ATTN"),
        ('-sc \'{"method": "mtp", "attention_backend": "auto"}\'', "draft_attention", ""),
        ('-sc \'{"method": "mtp", "attention_backend": null}\'', "draft_attention", ""),
        ('-sc \'{"method": "mtp", "kv_cache_dtype": "fp8"}\'', "kv_cache_dtype", ""),
        ('--speculative-config \'{"method": "eagle3", "num_speculative_tokens": 3}\'', "drafts", 3),
        ("VLLM_USE_V2_MODEL_RUNNER=0", "runner", "v1"),
        ("--speculative-config.num_speculative_tokens 6", "drafts", 6),
    ],
)
def test_spellings_of_flags(flag, field, value):
    before = f"{flag} vllm serve m" if flag.startswith("VLLM") else f"vllm serve m {flag}"
    assert getattr(launch.parse(before), field) == value


def test_a_drafters_model_is_not_the_target():
    text = 'vllm serve Qwen/Qwen3.5-9B --speculative-config \'{"model": "meta/llama", "method": "dflash"}\''
    assert launch.parse(text).model == "Qwen/Qwen3.5-9B"


def test_unreadable_values_stay_unknown():
    config = launch.parse("vllm serve m --max-num-seqs many --mamba-cache-mode sideways")
    assert config.max_num_seqs is None and config.cache_mode is None


@pytest.mark.parametrize(
    ("text", "field"),
    [
        ("vllm serve m -pp ²", "pipeline"),
        ("vllm serve m -pp " + "9" * 5000, "pipeline"),
        ("VLLM_USE_V2_MODEL_RUNNER=auto vllm serve m", "runner"),
        ("MTP with " + "9" * 5000 + " draft tokens", "drafts"),
        ("TP=" + "9" * 5000, "tensor"),
    ],
)
def test_values_that_are_no_plain_number_or_switch_stay_unknown(text, field):
    assert getattr(launch.parse(text), field) is None


@pytest.mark.parametrize(
    ("name", "gpu"),
    [
        ("A100", 80),
        ("A30", 80),
        ("NVIDIA A10G", 86),
        ("RTX A5000", 86),
        ("A4000", 86),
        ("3090s", 86),
        ("RTX 6000 Ada", 89),
        ("4090", 89),
        ("L40S", 89),
        ("H800", 90),
        ("GH200", 90),
        ("B100", 100),
        ("GB300", 103),
        ("RTX PRO 6000", 120),
        ("5060", 120),
        ("GB10", 121),
        ("sm_90", 90),
        ("9.0", 90),
        ("RTX 6000", None),
        ("MI300X", None),
    ],
)
def test_architectures_of_gpus(name, gpu):
    assert gpu_of(name) == gpu


@pytest.mark.parametrize(("name", "gpu"), [("A100", 80), ("H800", 90), ("RTX 6000 Ada", 89)])
def test_audit_and_triage_know_the_same_gpus(name, gpu):
    from specmortem.tools.triage import triage_text

    text = f"vLLM 0.27.1 on 2x {name}, MTP n=3"
    facts = triage_text(text).parts[0]["facts"]
    assert [fact["value"] for fact in facts["arch"]] == [f"sm_{gpu}"]
    assert launch.parse(text).gpu == gpu


@pytest.mark.parametrize(
    ("text", "field"),
    [
        ("vLLM with a draft model, k=3", "speculation"),  # what DFlash and EAGLE have, too
        ("vLLM 0.1.dev20051+g487ecf187", "version"),  # a build without tags
        ("MTP here, DFlash2 there", "speculation"),
        ("EngineCore (Worker_TP0 pid=3)", "tensor"),
    ],
)
def test_words_that_leave_it_open_rule_nothing_out(text, field):
    assert not getattr(launch.parse(text), field)


def test_what_a_report_states_names_its_words_as_the_source():
    config = launch.parse("vLLM 0.27.1 on 2x RTX 3090, MTP n=3, mamba align")
    assert config.sources["cache_mode"] == "“mamba align”"
    assert (config.version, config.drafts, config.gpu, config.hybrid) == ("0.27.1", 3, 86, True)
    assert config.sources.keys() <= vars(config).keys()


@given(st.text())
def test_no_text_breaks_the_parser_or_the_rules(text):
    config = launch.parse(text)
    assert set(reached(config)) == set(rules())


@given(st.lists(st.sampled_from(["--", "-pp", "=", "{", "'", '"', "method", "vllm serve", "\\\n", " ", "3"])))
def test_no_pieces_of_commands_break_the_parser(pieces):
    launch.parse("".join(pieces))


def test_hybrids_are_known_by_family_and_never_guessed():
    assert is_hybrid("Qwen/Qwen3.5-9B") is True
    assert is_hybrid("meta-llama/Llama-3.1-8B") is False
    assert is_hybrid("my-model") is None


def test_load_reads_a_file_and_refuses_what_says_nothing(tmp_path):
    (tmp_path / "launch.sh").write_text("vllm serve Qwen/Qwen3.5-9B -pp 2")
    assert launch.load(str(tmp_path / "launch.sh")).pipeline == 2
    (tmp_path / "empty").write_text("hello there")
    with pytest.raises(BadInputError, match="give a launch command"):
        launch.load(str(tmp_path / "empty"))
    with pytest.raises(UnavailableError, match="cannot read"):
        launch.load(str(tmp_path / "gone"))


INNER = '{"method": "mtp", "num_speculative_tokens": 3, "enforce_eager": true, "tensor_parallel_size": 2}'


@pytest.mark.parametrize(
    "written",
    [
        f"--speculative-config '{INNER}'",
        f"-sc '{INNER}'",
        "--speculative-config.method mtp --speculative-config.num_speculative_tokens 3 "
        "--speculative-config.enforce_eager true --speculative-config.tensor_parallel_size 2",
        '--speculative-config \'{"method": "mtp", "num_speculative_tokens": 3, "enforce_eager": true, …\'',
    ],
)
def test_what_the_drafter_has_of_its_own_is_not_the_engines(written):
    found = launch.parse(f"vllm serve m -tp 4 {written}")
    assert (found.speculation, found.drafts, found.tensor) == ("mtp", 3, 4)
    assert found.eager is None and not found.unknown
    assert launch.parse(f"vllm serve m --enforce-eager {written}").eager is True
