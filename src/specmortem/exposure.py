"""What a cause needs of a configuration of vLLM, and whether that holds; each incident states its rules with these.

A rule is a list of conditions on a `Config`. Each holds, does not hold, or cannot be told, and says so in words; one
that does not hold makes the cause unreachable, one that cannot be told makes the answer `unknown`. Defaults are those
of the released sources (named at each), and are used only where the launch command is known whole.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from packaging.version import InvalidVersion, Version

Runner = Literal["v1", "v2"]
CacheMode = Literal["none", "align", "all"]
Reachable = Literal["yes", "no", "unknown"]
Effect = Literal["crash", "text", "drafts", "link", "unseen"]
NO_SPECULATION = "none"

HYBRID_FAMILIES = (
    "qwen3next",
    "qwen35",
    "qwen36",
    "qwen38",
    "qwen4exp",
    "nemotronh",
    "nemotron3",
    "kimilinear",
    "kimik3",
    "jamba",
    "falconh1",
    "granitemoehybrid",
    "granite4",
    "bamba",
    "zamba2",
    "plamo2",
    "lfm2",
    "glm5next",
    "glm53flash",
)
PURE_ATTENTION_FAMILIES = (
    "qwen3forcausallm",
    "qwen3moe",
    "qwen2",
    "qwen25",
    "llama",
    "mistral",
    "mixtral",
    "gemma",
    "deepseekv2",
    "deepseekv3",
    "deepseekr1",
    "gptoss",
    "phi",
    "museglimmer",
)


@dataclass(frozen=True)
class Config:
    """What is known of a running engine; None (or an empty text) is "not known".

    `speculation` is the method, or `none`; `cudagraphs` the graph mode (`NONE`, `PIECEWISE`, `FULL`,
    `FULL_DECODE_ONLY`, `FULL_AND_PIECEWISE`). `attention` is the target's backend, `draft_attention` the drafter's.
    `gpu` is the compute capability times ten: 90 is sm_90. `complete` says that the whole launch command is known, so
    that what it leaves out has vLLM's default. `sources` tells where a field comes from, `prose` names the fields that
    only sentences state, which may speak of another launch: they never rule a cause out. `unknown` lists flags that
    were given and are not read.
    """

    version: str = ""
    model: str = ""
    hybrid: bool | None = None
    runner: Runner | None = None
    pipeline: int | None = None
    tensor: int | None = None
    speculation: str = ""
    drafts: int | None = None
    cache_mode: CacheMode | None = None
    prefix_caching: bool | None = None
    block_size: int | None = None
    async_scheduling: bool | None = None
    eager: bool | None = None
    cudagraphs: str = ""
    attention: str = ""
    draft_attention: str = ""
    kv_cache_dtype: str = ""
    draft_kv_cache_dtype: str = ""
    max_num_seqs: int | None = None
    gpu: int | None = None
    complete: bool = False
    sources: Mapping[str, str] = field(default_factory=dict)
    prose: frozenset[str] = frozenset()
    unknown: tuple[str, ...] = ()

    def without_prose(self) -> Config:
        """What is left where sentences do not count."""
        empty = Config()
        return replace(self, **{name: getattr(empty, name) for name in self.prose}, prose=frozenset())

    def before(self, release: str) -> bool | None:
        """Whether the engine is older than a release; None where its version is not known or is no number."""
        try:
            return Version(self.version) < Version(release) if self.version else None
        except InvalidVersion:
            return None

    def with_default(self, name: str, value: Any, why: str) -> Config:
        """The field filled in, unless it is known already."""
        if getattr(self, name) not in (None, ""):
            return self
        return replace(self, **{name: value}, sources={**self.sources, name: why})

    def told(self, name: str) -> str:
        """A field with where it comes from, for the middle of a sentence."""
        source = self.sources.get(name, "")
        return f" ({source})" if source else ""


@dataclass(frozen=True)
class Reach:
    """Whether a configuration reaches a cause, and the reason: what rules it out, what is missing, or what holds."""

    reachable: Reachable
    reason: str

    @property
    def reached(self) -> bool | None:
        """True, False, or None for unknown."""
        return {"yes": True, "no": False}.get(self.reachable)


@dataclass(frozen=True)
class Condition:
    """One thing that must hold. `text` completes "needs …"; `test` returns None where it cannot be told."""

    text: str
    test: Callable[[Config], bool | None]
    shown: Callable[[Config], str] = lambda config: ""


def is_hybrid(model: str) -> bool | None:
    """Whether a model has recurrent layers, by its name or architecture; None for a family that is not listed."""
    name = "".join(c for c in model.lower() if c.isalnum())
    if any(family in name for family in HYBRID_FAMILIES):
        return True
    return False if any(family in name for family in PURE_ATTENTION_FAMILIES) else None


def resolve(config: Config) -> Config:
    """The configuration with what follows from it: from its model, and from vLLM's defaults where it is whole."""
    steps: tuple[Callable[[Config], Config], ...] = (
        _model,
        _plain_defaults,
        _runner,
        _caching,
        _async,
        _attention,
        _draft_attention,
    )
    for step in steps:
        config = step(config)
    return config


def _model(c: Config) -> Config:
    hybrid = is_hybrid(c.model) if c.model else None
    return c if hybrid is None else c.with_default("hybrid", hybrid, f"by the name {c.model}")


def _plain_defaults(c: Config) -> Config:
    """Defaults that are the same in 0.19.1 to 0.33.0 (vllm/config/parallel.py, model.py and arg_utils.py)."""
    if c.eager:
        c = c.with_default("cudagraphs", "NONE", "eager")
    if not c.complete:
        return c
    defaults = {"pipeline": 1, "tensor": 1, "speculation": NO_SPECULATION, "eager": False}
    for name, value in defaults.items():
        c = c.with_default(name, value, "default")
    if not c.eager:
        c = c.with_default("cudagraphs", "FULL_AND_PIECEWISE", "default")
    return c.with_default("max_num_seqs", 128, "default, 128 or more")


def _runner(c: Config) -> Config:
    """`use_v2_model_runner` of vllm/config/vllm.py: 0.19.1 off; to 0.28.0 not for hybrids; from 0.29.0 for all.

    0.22.1:494-530 lists Qwen3ForCausalLM only, 0.25.1:557-574 takes dense models that are not hybrid, 0.29.0:645-677
    all but what `_get_v2_model_runner_unsupported_features` names (n-gram and other methods, eagle3 in a pipeline).
    """
    old, method = c.before("0.29.0"), _family(c.speculation)
    told = f"default of {c.version or 'vLLM'}" + ("" if c.complete else ", if no variable sets it")
    if old is None or not (c.complete or old or method):
        return c
    if old:
        is_v1 = c.before("0.22.0") or c.hybrid
        return c.with_default("runner", "v1", told + " for hybrid models" * bool(c.hybrid)) if is_v1 else c
    if c.speculation != NO_SPECULATION and method == "other":
        return c.with_default("runner", "v1", f"V2 does not support {c.speculation}")
    return c.with_default("runner", "v2", told)


def _caching(c: Config) -> Config:
    """Prefix caching of hybrids is off by default to 0.25.1 and on from 0.26.0 (vllm/config/model.py,
    is_prefix_caching_supported: 0.25.1:1883-1888, 0.26.0:1895-1897); it decides the cache mode of recurrent state
    (vllm/model_executor/models/config.py: 0.25.1:555-597, 0.33.0:760-782).
    """
    if c.hybrid is False:
        c = c.with_default("cache_mode", "none", "no recurrent layers")
    if c.complete and c.hybrid and (old := c.before("0.26.0")) is not None:
        c = c.with_default("prefix_caching", not old, f"default of {c.version} for hybrid models")
    if c.prefix_caching is False:
        c = c.with_default("cache_mode", "none", "no prefix caching")
    if c.prefix_caching and c.hybrid:
        c = c.with_default("cache_mode", "align", "what prefix caching makes of it")
    if c.cache_mode in ("align", "all"):
        c = c.with_default("prefix_caching", True, f"{c.cache_mode} needs it")
    return c


def _async(c: Config) -> Config:
    """On by default with EAGLE, MTP and DFlash drafts (vllm/config/vllm.py: 0.19.1:755-788, 0.25.1:992-1040).

    From 0.29.0 the V1 runner turns it off in a pipeline (0.33.0:1665).
    """
    if not c.complete:
        return c
    if c.runner == "v1" and (c.pipeline or 1) > 1:
        return c
    if _family(c.speculation) in ("mtp", "eagle", "dflash") or c.speculation == NO_SPECULATION:
        return c.with_default("async_scheduling", True, "default")
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


def _draft_attention(c: Config) -> Config:
    """The backend of the drafter.

    Where the whole command is not known, the key may have been left out of it: then what would be chosen counts only
    if the target has the same.
    """
    follows = follows_target(c)
    if follows:
        told = f"the target's in {c.version}{c.told('attention')}"
        return replace(c, draft_attention=c.attention, sources={**c.sources, "draft_attention": told})
    if follows is False and c.runner == "v2":
        return c.with_default("draft_attention", c.attention, "the target's on the V2 runner")
    chosen, why = _chosen(c, c.draft_kv_cache_dtype or c.kv_cache_dtype)
    if c.attention and c.attention != chosen:
        if follows is None or not c.complete:
            return c
        why += f"; {c.attention} is the target's alone"
    return c.with_default("draft_attention", chosen, why) if c.complete or c.attention else c


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


def _family(method: str) -> str:
    """`mtp`, `eagle`, `dflash` or `other`; an empty text for an unknown method."""
    name = method.lower()
    if not name:
        return ""
    if name == "mtp" or name.endswith("_mtp"):
        return "mtp"
    if name.startswith("eagle"):
        return "eagle"
    return "dflash" if name.startswith("dflash") else "other"


# Conditions


def _equal(name: str, value: Any, text: str) -> Condition:
    def test(c: Config) -> bool | None:
        found = getattr(c, name)
        return None if found in (None, "") else found == value

    return Condition(text, test, lambda c: f"{getattr(c, name)}{c.told(name)}")


def _at_least(name: str, least: int, text: str) -> Condition:
    def test(c: Config) -> bool | None:
        found = getattr(c, name)
        return None if found is None else found >= least

    return Condition(text, test, lambda c: f"{getattr(c, name)}{c.told(name)}")


def _drafted_by(*families: str) -> Condition:
    def test(c: Config) -> bool | None:
        if c.speculation == NO_SPECULATION:
            return False
        return _family(c.speculation) in families if c.speculation else None

    names = {"mtp": "MTP", "eagle": "EAGLE", "dflash": "DFlash"}
    text = f"{' or '.join(names[f] for f in families)} drafts"
    return Condition(text, test, lambda c: f"{c.speculation}{c.told('speculation')}")


def _plans(c: Config) -> bool | None:
    """Whether decode of FlashInfer plans on this GPU (vllm/utils/flashinfer.py, supports_trtllm_attention:
    sm_100 never; sm_90 until 0.24.0, 0.25.1:389-394; sm_120 until 0.27.1, 0.28.0:410-414).
    """
    if c.gpu is None:
        return None
    if c.gpu // 10 == 10:
        return False
    bound = {9: "0.25.0", 12: "0.28.0"}.get(c.gpu // 10)
    return True if bound is None else c.before(bound)


def _speculates(c: Config) -> bool | None:
    return c.speculation != NO_SPECULATION if c.speculation else None


def _graphs(c: Config) -> bool | None:
    if c.eager or c.cudagraphs == "NONE":
        return False
    return True if c.cudagraphs or c.eager is False else None


def _full_graphs(c: Config) -> bool | None:
    return "FULL" in c.cudagraphs if c.cudagraphs else (False if c.eager else None)


def _not_align(c: Config) -> bool | None:
    return None if c.cache_mode is None else c.cache_mode != "align"


def _blocks_differ(c: Config) -> bool | None:
    return None if c.block_size is None else True


def _waits_for_counts(c: Config) -> bool | None:
    """To 0.21.0 align mode permutes the counts twice, with or without asynchronous scheduling."""
    if c.before("0.22.0"):
        return True
    return c.async_scheduling


V1 = _equal("runner", "v1", "the V1 runner")
V2 = _equal("runner", "v2", "the V2 runner")
HYBRID = _equal("hybrid", True, "a hybrid model")
ALIGN = _equal("cache_mode", "align", "mamba_cache_mode align")
NOT_ALIGN = Condition(
    "a mamba_cache_mode other than align", _not_align, lambda c: f"{c.cache_mode}{c.told('cache_mode')}"
)
ASYNC = _equal("async_scheduling", True, "asynchronous scheduling")
NOT_ASYNC = _equal("async_scheduling", False, "asynchronous scheduling turned off")
PIPELINE = _at_least("pipeline", 2, "a pipeline of two or more ranks")
CONCURRENT = _at_least("max_num_seqs", 2, "two or more requests at a time")
CACHING = _equal("prefix_caching", True, "prefix caching")
SPECULATION = Condition(
    "speculative decoding", _speculates, lambda c: f"{c.speculation or 'not known'}{c.told('speculation')}"
)
GRAPHS = Condition("CUDA graphs", _graphs, lambda c: f"{c.cudagraphs or 'not known'}{c.told('cudagraphs')}")
FULL_GRAPHS = Condition("full CUDA graphs", _full_graphs, lambda c: f"{c.cudagraphs}{c.told('cudagraphs')}")
DFLASH = _drafted_by("dflash")
DRAFT_LOOP = _drafted_by("mtp", "eagle")
FLASHINFER = _equal(
    "draft_attention",
    "FLASHINFER",
    "FlashInfer in the drafter (to 0.20 the target's backend, from 0.21.0 attention_backend of speculative_config, "
    "else chosen by GPU and cache type)",
)
PLANS = Condition(
    "decode kernels of FlashInfer that plan (sm_80 to sm_89 always, sm_90 to 0.24, sm_120 to 0.27, sm_100 never)",
    _plans,
    lambda c: f"sm_{c.gpu}, {c.version or 'version not known'}",
)
SMALL_BLOCKS = Condition(
    "blocks smaller than the recurrent state's (a --block-size, or a drafter's)",
    _blocks_differ,
    lambda c: f"--block-size {c.block_size}",
)
OLD_LOOKAHEAD = Condition(
    "a scheduler that reserves fewer slots than are drafted (to 0.22.1)",
    lambda c: c.before("0.23.0"),
    lambda c: c.version,
)
COUNTS = Condition(
    "asynchronous scheduling (to 0.21.0 with or without)",
    _waits_for_counts,
    lambda c: f"{c.async_scheduling}{c.told('async_scheduling')}",
)
NEVER_SEEN = Condition("something that no flag tells and no public report shows", lambda c: None)


def drafts(least: int) -> Condition:
    """At least that many drafts a step."""
    return _at_least("drafts", least, f"{least} or more drafts a step")


@dataclass(frozen=True)
class Rule:
    """What a cause needs of the configuration, and what it needs beside it that no flag tells.

    `effect` is the worst that is known to follow in ordinary traffic: `crash`, `text` (wrong answers), `drafts` (worse
    drafts alone), `link` where another defect has to feed it, `unseen` where nothing is known to reach it. `links` are
    groups of causes of which one each has to be at fault and reached, for a cause that is a chain and has no probe.
    """

    needs: tuple[Condition, ...]
    also: str = ""
    effect: Effect = "text"
    links: tuple[tuple[str, ...], ...] = ()

    @property
    def decides(self) -> bool:
        """Whether a launch that reaches it is affected, whatever else it reaches."""
        return self.effect in ("crash", "text", "drafts")

    def reaches(self, config: Config) -> Reach:
        """Whether a configuration, with what follows from it, meets every condition.

        What only sentences state does not rule it out.
        """
        reach = self._reaches(config)
        if reach.reachable != "no" or not config.prose:
            return reach
        without = self._reaches(config.without_prose())
        if without.reachable == "no":
            return without
        return Reach("unknown", f"{reach.reason}; but only a sentence says so, not a launch command")

    def _reaches(self, config: Config) -> Reach:
        known = resolve(config)
        answers = [(condition, condition.test(known)) for condition in self.needs]
        for condition, holds in answers:
            if holds is False:
                told = f"needs {condition.text}; here: {condition.shown(known)}"
                return Reach("no", told.removesuffix("; here: "))
        missing = [condition.text for condition, holds in answers if holds is None]
        if missing:
            return Reach("unknown", f"not told: {'; '.join(missing)}")
        given = [f"{condition.text}: {condition.shown(known)}" for condition, _ in answers]
        return Reach("yes", "; ".join([*given, *([f"also needs {self.also}"] if self.also else [])]))
