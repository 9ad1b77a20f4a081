"""Strategies for launches as they are known, whole or in part."""

from dataclasses import fields

from hypothesis import strategies as st

from specmortem.affected.released import released
from specmortem.exposure import Config, is_hybrid

RELEASES = released().releases
MODELS = ("", "Qwen/Qwen3.5-27B", "nvidia/Nemotron-H-8B", "meta-llama/Llama-3.3-70B-Instruct", "org/model")
NOT_KNOWN = {"launched", "complete", "sources", "prose", "unknown"}
FIELDS = sorted({field.name for field in fields(Config)} - NOT_KNOWN)
VALUES = {
    "version": [*RELEASES, ""],
    "runner": ["v1", "v2", None],
    "pipeline": [1, 2, None],
    "speculation": ["mtp", "eagle3", "dflash", "ngram", "draft_model", "unnamed", "none", ""],
    "own_drafter": [True, False, None],
    "drafts": [1, 2, 3, 5, None],
    "cache_mode": ["none", "align", "all", None],
    "prefix_caching": [True, False, None],
    "block_size": [128, None],
    "async_scheduling": [True, False, None],
    "eager": [True, False, None],
    "cudagraphs": ["NONE", "PIECEWISE", "FULL_AND_PIECEWISE", ""],
    "attention": ["FLASHINFER", "FLASH_ATTN", "TRITON_ATTN", ""],
    "draft_attention": ["FLASHINFER", "FLASH_ATTN", "TRITON_ATTN", ""],
    "kv_cache_dtype": ["auto", "fp8", "fp8_e5m2", ""],
    "draft_kv_cache_dtype": ["auto", "fp8", ""],
    "max_num_seqs": [1, 256, None],
    "gpu": [75, 80, 89, 90, 100, 120, None],
}


@st.composite
def configs(draw):
    """A configuration of which anything is known; it does not contradict its model's name, nor its caching."""
    model = draw(st.sampled_from(MODELS))
    found = {name: draw(st.sampled_from(values)) for name, values in VALUES.items()}
    by_name = is_hybrid(model) if model else None
    hybrid = draw(st.sampled_from([True, False, None] if by_name is None else [by_name, None]))
    if False in (hybrid, by_name) and found["cache_mode"]:
        found["cache_mode"] = "none"
    return Config(model=model, hybrid=hybrid, complete=draw(st.booleans()), **found)
