"""Whole launches with the answer of each incident, derived by hand from the released source and data/audit.csv."""

import json

import pytest
from click.testing import CliRunner

from specmortem.affected.released import released
from specmortem.cli import main

MTP3 = """--speculative-config '{"method": "mtp", "num_speculative_tokens": 3}'"""
MTP5 = """--speculative-config '{"method": "mtp", "num_speculative_tokens": 5}'"""
MTP2 = """--speculative-config '{"method": "mtp", "num_speculative_tokens": 2}'"""
FI5 = """--speculative-config '{"method": "mtp", "num_speculative_tokens": 5, "attention_backend": "FLASHINFER"}'"""
TRITON5 = FI5.replace("FLASHINFER", "TRITON_ATTN")
EAGLE = """--speculative-config '{"method": "eagle3", "model": "org/head", "num_speculative_tokens": 5}'"""
EAGLE_FI = (
    '--speculative-config \'{"method": "eagle3", "model": "org/head", "num_speculative_tokens": 5, '
    '"attention_backend": "FLASHINFER"}\''
)
DFLASH = """--speculative-config '{"method": "dflash", "model": "org/draft", "num_speculative_tokens": 15}'"""
NGRAM = """--speculative-config '{"method": "ngram", "num_speculative_tokens": 3}'"""
HYBRID, DENSE = "vllm serve Qwen/Qwen3.5-27B", "vllm serve meta-llama/Llama-3.3-70B-Instruct"
H100, A100, ADA, PRO = "H100", "A100", "L40S", "RTX PRO 6000"
V1, V2 = "VLLM_USE_V2_MODEL_RUNNER=0", "VLLM_USE_V2_MODEL_RUNNER=1"
ASYNC, DFLASH_OOB, MTP, PP = "async-accepted-counts", "dflash-oob", "mtp-draft-loop", "pp-align-copy"
NONE, ALIGN = "stale-count-none", "stale-count-align"
CHAIN, SHIFT, ROW, PLACE = (
    "count-to-lookup-chain",
    "overlapping-shift",
    "batch-row-index",
    "accepted-written-in-place",
)
PLAN, BUILDER, LENGTHS, ZEROER = (
    "plan-staging-reuse", "builder-staging-reuse", "host-lengths-counted-twice", "zeroer-staging-reuse",
)  # fmt: skip
SEED, SLOT, BLOCK = "seed-column-divisor", "v2-slot-past-max-len", "stale-block-id"
V2_OLD = ("v2-null-block", "v2-past-max-len", "v2-rejected-context-slots", SLOT)
UNKNOWN = "unknown"

# (release, launch, GPU, {incident: its causes, or UNKNOWN}, reason). An incident that is not named is not affected.
LAUNCHES = [
    # Hybrid model, MTP, defaults. Prefix caching of hybrids is off to 0.27.1, so mode none; on from 0.28.0: align.
    ("0.19.1", f"{HYBRID} {MTP3}", H100, {ASYNC: [NONE], DFLASH_OOB: [CHAIN]}, "V1, none, async by default"),
    ("0.20.1", f"{HYBRID} {MTP3}", H100, {ASYNC: [NONE], DFLASH_OOB: [CHAIN]}, "V1, none, async by default"),
    ("0.22.1", f"{HYBRID} {MTP3}", H100, {ASYNC: [NONE], DFLASH_OOB: [CHAIN]}, "V1, none; the reported release"),
    ("0.23.0", f"{HYBRID} {MTP3}", H100, {ASYNC: [NONE], DFLASH_OOB: [CHAIN]}, "last release with the race in none"),
    ("0.24.0", f"{HYBRID} {MTP3}", H100, {}, "vllm#45100: mode none is clean, the recovered id too"),
    ("0.25.1", f"{HYBRID} {MTP3}", H100, {}, "as 0.24.0"),
    ("0.26.0", f"{HYBRID} {MTP3}", H100, {}, "prefix caching of hybrids is an option here: arg_utils.py:2518-2522"),
    ("0.27.1", f"{HYBRID} {MTP3}", H100, {}, "as 0.26.0: arg_utils.py:2604-2606"),
    ("0.28.0", f"{HYBRID} {MTP3}", H100, {ASYNC: [ALIGN], PP: [SHIFT]}, "on by default, V1: mode align races"),
    ("0.29.0", f"{HYBRID} {MTP3}", H100, {}, "V2 by default, which has no such host array; shift is mended"),
    ("0.30.0", f"{HYBRID} {MTP3}", H100, {}, "V2, align, no pipeline"),
    ("0.31.0", f"{HYBRID} {MTP3}", H100, {}, "V2, align, no pipeline, one block size"),
    ("0.32.0", f"{HYBRID} {MTP3}", H100, {}, "V2"),
    ("0.33.0", f"{HYBRID} {MTP3}", H100, {}, "V2"),
    # Mode align by hand, and out of it.
    ("0.19.1", f"{HYBRID} --enable-prefix-caching {MTP3}", H100, {ASYNC: [ALIGN], DFLASH_OOB: [CHAIN]}, "align"),
    (
        "0.21.0",
        f"{HYBRID} --enable-prefix-caching --no-async-scheduling {MTP3}",
        H100,
        {ASYNC: [ALIGN]},
        "to 0.21.0 the counts are permuted twice without a race; the chain needs async",
    ),
    (
        "0.23.0",
        f"{HYBRID} --enable-prefix-caching --no-async-scheduling {MTP3}",
        H100,
        {},
        "from 0.22.0 on mode align needs async",
    ),
    ("0.24.0", f"{HYBRID} --enable-prefix-caching {MTP3}", H100, {ASYNC: [ALIGN]}, "align races on, id is mended"),
    ("0.26.0", f"{HYBRID} --enable-prefix-caching {MTP3}", H100, {ASYNC: [ALIGN], PP: [SHIFT]}, "align by option"),
    ("0.26.0", f"{HYBRID} --mamba-cache-mode align {MTP3}", H100, {}, "without prefix caching it becomes none"),
    ("0.28.0", f"{HYBRID} --no-enable-prefix-caching {MTP3}", H100, {}, "mode none again, clean since 0.24.0"),
    ("0.28.0", f"{HYBRID} --no-async-scheduling {MTP3}", H100, {PP: [SHIFT]}, "no race without async; shift stays"),
    ("0.28.0", f"{HYBRID} --max-num-seqs 1 {MTP3}", H100, {PP: [SHIFT]}, "one request: no row moves"),
    ("0.33.0", f"{V1} {HYBRID} {MTP3}", H100, {ASYNC: [ALIGN]}, "V1 by hand: the race is still there"),
    ("0.33.0", f"{V1} {HYBRID} --no-enable-prefix-caching {MTP3}", H100, {}, "V1, mode none"),
    ("0.29.0", f"{V1} {HYBRID} --no-async-scheduling {MTP3}", H100, {}, "V1, align, no race"),
    # Mode none: ways out before 0.24.0.
    ("0.23.0", f"{HYBRID} --no-async-scheduling {MTP3}", H100, {}, "no copy in flight"),
    ("0.23.0", f"{HYBRID} --max-num-seqs 1 {MTP3}", H100, {}, "no other request"),
    ("0.23.0", f"{HYBRID} --enforce-eager {MTP3}", H100, {ASYNC: [NONE]}, "eager takes the chain away, not the race"),
    ("0.23.0", f"{HYBRID} {NGRAM}", H100, {}, "n-gram turns async off by default (vllm.py, 0.23.0:979)"),
    ("0.28.0", f"{HYBRID} {NGRAM}", H100, {PP: [SHIFT]}, "no async with n-gram; align and speculation: shift"),
    ("0.23.0", HYBRID, H100, {}, "no speculation, a maker's own checkpoint"),
    ("0.28.0", HYBRID, H100, {}, "no speculation"),
    # The MTP draft loop: FlashInfer's own decode kernels in the drafter, on V1.
    ("0.20.2", f"{DENSE} --attention-backend FLASHINFER {EAGLE}", H100, {MTP: [PLAN, BUILDER]}, "target's to 0.20.2"),
    ("0.20.2", f"{DENSE} --attention-backend TRITON_ATTN {EAGLE}", H100, {}, "the drafter follows the target"),
    ("0.21.0", f"{DENSE} --attention-backend FLASHINFER {EAGLE}", H100, {}, "the drafter's own: FlashAttention"),
    ("0.21.0", f"{DENSE} {EAGLE_FI}", H100, {MTP: [PLAN, BUILDER]}, "by attention_backend of speculative_config"),
    ("0.22.1", f"{DENSE} {EAGLE_FI}", A100, {MTP: [PLAN, BUILDER]}, "Llama is V1 here; sm_80 plans"),
    ("0.24.0", f"{DENSE} {EAGLE_FI}", A100, {}, "dense models take V2 from 0.23.0 on"),
    ("0.24.0", f"{V1} {DENSE} {EAGLE_FI}", A100, {MTP: [PLAN, BUILDER]}, "V1 by hand"),
    ("0.24.0", f"{HYBRID} {FI5}", H100, {MTP: [PLAN, BUILDER]}, "sm_90 plans to 0.24"),
    ("0.25.1", f"{HYBRID} {FI5}", H100, {}, "sm_90 decodes by trtllm from 0.25"),
    ("0.25.1", f"{HYBRID} {FI5}", ADA, {MTP: [PLAN, BUILDER]}, "sm_89 always plans"),
    ("0.27.1", f"{HYBRID} {FI5}", PRO, {MTP: [PLAN, BUILDER]}, "sm_120 plans to 0.27"),
    ("0.28.0", f"{HYBRID} --no-enable-prefix-caching {FI5}", PRO, {}, "sm_120 plans no longer"),
    ("0.28.0", f"{HYBRID} --no-enable-prefix-caching {FI5}", A100, {MTP: [PLAN, BUILDER]}, "sm_80 plans"),
    ("0.26.0", f"{HYBRID} --kv-cache-dtype fp8 {MTP5}", ADA, {MTP: [PLAN, BUILDER]}, "fp8 on sm_89: FlashInfer"),
    ("0.26.0", f"{HYBRID} --kv-cache-dtype fp8 {TRITON5}", ADA, {}, "Triton in the drafter"),
    ("0.26.0", f"{HYBRID} --attention-backend TRITON_ATTN --kv-cache-dtype fp8 {MTP5}", ADA, {MTP: [PLAN, BUILDER]},
     "the target's flag does not reach the drafter"),
    ("0.26.0", f"{HYBRID} {MTP5}", ADA, {}, "16 bits on sm_89: FlashAttention"),
    ("0.26.0", f"{HYBRID} --kv-cache-dtype fp8 {MTP2}", ADA, {MTP: [BUILDER]}, "2 drafts: one plan a step"),
    (
        "0.26.0",
        f"{HYBRID} --kv-cache-dtype fp8 --no-async-scheduling {MTP5}",
        ADA,
        {MTP: [PLAN, BUILDER, LENGTHS]},
        "without async the lengths are counted twice as well",
    ),
    ("0.29.0", f"{V1} {HYBRID} --no-async-scheduling {FI5}", A100, {MTP: [PLAN, LENGTHS]}, "the builder is mended"),
    ("0.30.0", f"{V1} {HYBRID} --no-async-scheduling {FI5}", A100, {}, "every build waits"),
    ("0.26.0", f"{HYBRID} {MTP5}", "", {MTP: UNKNOWN}, "no GPU is named, so no backend is known"),
    # V2 and the zeroer.
    (
        "0.23.0",
        f"{V2} {HYBRID} {MTP3}",
        H100,
        {MTP: [ZEROER]},
        "V2 by hand: its zeroer reuses one buffer to 0.25; no host counts",
    ),
    ("0.26.0", f"{V2} {HYBRID} {MTP3}", H100, {}, "the zeroer is mended; mode none"),
    ("0.26.0", f"{V2} {HYBRID} --enable-prefix-caching {MTP3}", H100, {PP: [PLACE, SHIFT]}, "V2, align, no pipeline"),
    # Pipelines.
    ("0.28.0", f"{V2} {HYBRID} -pp 2 {MTP3}", H100, {PP: [ROW, SHIFT]}, "V2 by hand in a pipeline"),
    ("0.29.0", f"{HYBRID} -pp 2 {MTP3}", H100, {PP: [ROW]}, "V2 by default, align, pipeline"),
    ("0.31.0", f"{HYBRID} -pp 2 {MTP3}", H100, {PP: [ROW]}, "the release of stock wheels"),
    ("0.31.0", f"{HYBRID} -pp 2 --max-num-seqs 1 {MTP3}", H100, {}, "row 0 always is the one request"),
    ("0.31.0", f"{HYBRID} -pp 2", H100, {}, "no speculation: source and destination are one block"),
    ("0.31.0", f"{HYBRID} -pp 2 --no-enable-prefix-caching {MTP3}", H100, {}, "mode none copies nothing"),
    ("0.31.0", f"{HYBRID} --block-size 128 {MTP3}", H100, {PP: [SEED]}, "a block smaller than the state's"),
    ("0.32.0", f"{HYBRID} -pp 2 --block-size 128 {MTP3}", H100, {}, "both are mended"),
    ("0.31.0", f"{DENSE} -pp 2 {EAGLE}", H100, {}, "no recurrent state"),
    # DFlash.
    ("0.22.1", f"{DENSE} {DFLASH}", H100, {DFLASH_OOB: [BLOCK]}, "V1; K slots are reserved to 0.22.1"),
    ("0.22.1", f"{HYBRID} {DFLASH}", H100, {ASYNC: [NONE], DFLASH_OOB: [BLOCK, CHAIN]}, "the report"),
    ("0.22.1", f"{HYBRID} --enforce-eager {DFLASH}", H100, {ASYNC: [NONE], DFLASH_OOB: [BLOCK]}, "no graphs: no chain"),
    ("0.23.0", f"{DENSE} {DFLASH}", H100, {}, "V1, K + 1 slots; what is left needs a count out of range"),
    ("0.24.0", f"{DENSE} {DFLASH}", H100, {DFLASH_OOB: [*V2_OLD, "v2-stale-tail"]}, "dense DFlash takes V2 here"),
    ("0.24.0", f"{HYBRID} {DFLASH}", H100, {}, "hybrids stay on V1, mode none"),
    ("0.27.1", f"{DENSE} {DFLASH}", H100, {DFLASH_OOB: [*V2_OLD]}, "the stale tail is mended in 0.25"),
    ("0.28.0", f"{DENSE} {DFLASH}", H100, {DFLASH_OOB: [SLOT]}, "three of four are mended"),
    ("0.33.0", f"{DENSE} {DFLASH}", H100, {DFLASH_OOB: [SLOT]}, "past max_model_len slots of its own are reused"),
    ("0.30.0", f"{HYBRID} {DFLASH}", H100, {DFLASH_OOB: [SLOT], PP: UNKNOWN}, "the drafter's block size is not known"),
    # What is not speculation, or may be.
    ("0.23.0", DENSE, H100, {}, "nothing recurrent, no drafter"),
    ("0.23.0", f"{DENSE} {NGRAM}", H100, {}, "n-gram has no draft loop"),
    (
        "0.23.0",
        "vllm serve /models/mine",
        H100,
        {ASYNC: UNKNOWN, DFLASH_OOB: UNKNOWN, MTP: UNKNOWN},
        "the name tells nothing",
    ),
    (
        "0.22.1",
        "vllm serve RedHatAI/Qwen3-8B-speculator.eagle3",
        A100,
        {DFLASH_OOB: UNKNOWN},
        "the model brings a drafter that no flag names; not hybrid, and FlashAttention in the drafter",
    ),
]  # fmt: skip


def checked(release, launch, gpu=""):
    """The answers of `specmortem check --format json`, by incident."""
    text = f"{launch}\n{gpu and f'GPU 0: NVIDIA {gpu}'}"
    result = CliRunner().invoke(main, ["check", "--vllm", release, "--format", "json", "-"], input=text)
    assert result.exit_code in (0, 1, 3), result.output
    return json.loads(result.stdout), result.exit_code


def test_there_are_sixty_and_they_cover_what_decides():
    assert len(LAUNCHES) >= 60
    assert {release for release, *_ in LAUNCHES} <= set(released().releases)
    assert {min(r for r, *_ in LAUNCHES), max(r for r, *_ in LAUNCHES)} == {"0.19.1", "0.33.0"}


@pytest.mark.parametrize(
    ("release", "launch", "gpu", "expected", "reason"),
    LAUNCHES,
    ids=[f"{r}-{n}" for n, (r, *_) in enumerate(LAUNCHES)],
)
def test_launch(release, launch, gpu, expected, reason):
    data, code = checked(release, launch, gpu)
    found = {
        each["incident"]: UNKNOWN if each["answer"] == "unknown" else sorted(each["causes"])
        for each in data["answers"]
        if each["answer"] != "not-affected"
    }
    wanted = {slug: causes if causes == UNKNOWN else sorted(causes) for slug, causes in expected.items()}
    assert found == wanted, reason
    affected = any(causes != UNKNOWN for causes in expected.values())
    assert code == (1 if affected else 3 if expected else 0)
