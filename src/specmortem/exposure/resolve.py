"""The configuration with what follows from it: from its model, and from the defaults of its release."""

from __future__ import annotations

from dataclasses import replace

from specmortem.exposure import released
from specmortem.exposure.config import NO_SPECULATION, UNNAMED, Config, brings_no_drafter, is_hybrid


def resolve(config: Config, *, assume: bool = True) -> Config:
    """The configuration with what follows from it: from its model, and from vLLM's defaults where it is whole.

    `assume` says that a launch which is not known whole has the default runner, cache mode and backend of the drafter,
    which a part of it that is not known may change.
    """
    config = _caching(_runner(_plain_defaults(_model(config)), assume), assume)
    return _draft_attention(_attention(_async(config)), assume)


def _model(c: Config) -> Config:
    hybrid = is_hybrid(c.model) if c.model else None
    return c if hybrid is None else c.with_default("hybrid", hybrid, f"by the name {c.model}")


def _plain_defaults(c: Config) -> Config:
    """Defaults that are the same in 0.19.1 to 0.33.0 (vllm/config/parallel.py, model.py and arg_utils.py).

    Without --speculative-config the model's own configuration may still name a drafter
    (vllm/transformers_utils/config.py, maybe_override_with_speculators).
    """
    if c.eager:
        c = c.with_default("cudagraphs", "NONE", "eager")
    if not c.complete:
        return c
    plain = {"pipeline": 1, "tensor": 1, "eager": False}
    for name, value in plain.items():
        c = c.with_default(name, value, "default")
    if c.own_drafter:
        c = c.with_default("speculation", UNNAMED, "of the model's own configuration")
    if not c.drafts and (c.own_drafter is False or brings_no_drafter(c.model)):
        c = c.with_default("speculation", NO_SPECULATION, "default")
    if not c.eager:
        c = c.with_default("cudagraphs", "FULL_AND_PIECEWISE", "default")
    return c.with_default("max_num_seqs", 128, "default, 128 or more")


def _runner(c: Config, assume: bool) -> Config:
    """`VllmConfig.use_v2_model_runner` (vllm/config/vllm.py), unless VLLM_USE_V2_MODEL_RUNNER says it.

    Releases before 0.19.1 have it off by default (0.17.0: vllm/envs.py, VLLM_USE_V2_MODEL_RUNNER).
    """
    if not (c.complete or assume) or c.runner is not None:
        return c
    if value := "v1" if c.before("0.19.1") else released.default(c, "runner"):
        told = f"default of {c.version}" + ("" if c.complete else ", if no variable sets it")
        return c.with_default("runner", value, told)
    return c


def _caching(c: Config, assume: bool) -> Config:
    """Prefix caching of hybrids (EngineArgs) and the cache mode that it gives (`MambaModelConfig`).

    Off by default to 0.27.1, as an option (arg_utils.py: 0.26.0:2518-2522), on from 0.28.0 (0.28.0:2650). Without it
    any mode becomes none (vllm/model_executor/models/config.py: 0.19.1:473-479, 0.33.0:780-782).
    """
    if c.hybrid is False:
        c = c.with_default("cache_mode", "none", "no recurrent layers")
    if c.complete and c.hybrid and (cached := released.default(c, "prefix_caching")):
        c = c.with_default("prefix_caching", cached == "True", f"default of {c.version} for hybrid models")
    if c.prefix_caching is False:
        given = f", whatever --mamba-cache-mode {c.cache_mode} says" if c.cache_mode else ""
        return replace(c, cache_mode="none", sources={**c.sources, "cache_mode": f"no prefix caching{given}"})
    known = (c.complete or assume) and c.prefix_caching and c.hybrid
    if known and (mode := released.default(c, "cache_mode_if_cached")):
        c = c.with_default("cache_mode", mode, "what prefix caching makes of it")
    if c.cache_mode in ("align", "all"):
        c = c.with_default("prefix_caching", True, f"{c.cache_mode} needs it")
    return c


def _async(c: Config) -> Config:
    """The statements of `VllmConfig.__post_init__` that decide it, as they were run for this runner."""
    if c.complete and c.runner and (value := released.default(c, f"async_{c.runner}")):
        return c.with_default("async_scheduling", value == "True", f"default of {c.version}")
    return c


def _attention(c: Config) -> Config:
    """The backend of the target: as named, or as vLLM chooses it."""
    if not c.complete:
        return c
    return c.with_default("attention", *_chosen(c, c.kv_cache_dtype))


def follows_target(c: Config) -> bool | None:
    """Whether an MTP or EAGLE drafter has the target's attention backend; None where that cannot be told.

    On the V1 runner to 0.20.2 (vllm/v1/spec_decode, _create_draft_vllm_config: 0.19.1 eagle.py:1215-1228, then
    llm_base_proposer.py: 0.20.2:1274-1287). From 0.21.0 on it has what `attention_backend` of speculative_config
    names, a key since then, and else one of its own (0.21.0:1103-1112, 0.24.0:1205-1214, 0.29.0:1304-1313). On the V2
    runner to 0.29.0 (v1/worker/gpu/spec_decode/eagle/utils.py: 0.29.0:36-53; 0.30.0:97-106 takes the key where given).
    """
    older = c.before("0.21.0")
    return c.before("0.30.0") if older is False and c.runner == "v2" else older


def _draft_attention(c: Config, assume: bool) -> Config:
    """The backend of the drafter.

    Where the whole command is not known, the key may have been left out of it: then what would be chosen counts only
    if the target has the same. Where the release is not known, neither is which of the two counts.
    """
    follows = follows_target(c)
    if follows:
        told = f"the target's in {c.version}{c.told('attention')}"
        return replace(c, draft_attention=c.attention, sources={**c.sources, "draft_attention": told})
    if follows is False and c.runner == "v2":
        return c.with_default("draft_attention", c.attention, "the target's on the V2 runner")
    if follows is None and c.attention != c.draft_attention:
        return replace(c, draft_attention="")
    chosen, why = _chosen(c, c.draft_kv_cache_dtype or c.kv_cache_dtype)
    if c.attention and c.attention != chosen:
        if follows is None or not c.complete:
            return c
        why += f"; {c.attention} is the target's alone"
    known = c.complete or (assume and c.attention)
    return c.with_default("draft_attention", chosen, why) if known else c


def _chosen(c: Config, kv_cache_dtype: str) -> tuple[str, str]:
    """What is chosen where no backend is named, and why; two empty texts where that cannot be told.

    The first of vllm/platforms/cuda.py that supports the configuration (0.19.1:100-113, 0.24.0:144-159,
    0.29.0:148-164): FlashInfer on sm_100; elsewhere FlashAttention, then FlashInfer. Of fp8 caches FlashAttention has
    e4m3 on sm_90 alone (v1/attention/backends/flash_attn.py, supports_kv_cache_dtype: 0.22.1:183-193, 0.29.0:178-185
    with fa_utils.py:306-308). Below sm_80 it has nothing, and FlashInfer works on sm_75 to 0.23.0 (flashinfer.py,
    supports_compute_capability: 0.23.0:407-410, 0.24.0:426-434). Models with attention sinks, other head sizes than 64,
    128 and 256 or bidirectional prefixes may get another one.
    """
    cache = kv_cache_dtype or ("auto" if c.complete else "")
    if c.gpu is None:
        return "", ""
    if c.gpu // 10 == 10:
        return "FLASHINFER", f"chosen on sm_{c.gpu}"
    if c.gpu < 80:
        turing = c.gpu == 75 and c.before("0.24.0")
        return ("FLASHINFER", "chosen on sm_75") if turing else ("", "")
    if cache.startswith("fp8"):
        return _chosen_for_fp8(c.gpu, cache)
    if cache in ("auto", "float16", "bfloat16"):
        return "FLASH_ATTN", f"chosen on sm_{c.gpu}"
    return "", ""


def _chosen_for_fp8(gpu: int, cache: str) -> tuple[str, str]:
    """Releases differ on e5m2 and sm_90."""
    if cache not in ("fp8", "fp8_e4m3", "fp8_e5m2") or (cache == "fp8_e5m2" and gpu == 90):
        return "", ""
    if gpu == 90:
        return "FLASH_ATTN", f"chosen on sm_90, also for {cache}"
    return "FLASHINFER", f"chosen on sm_{gpu}, where FlashAttention has no {cache} cache"
