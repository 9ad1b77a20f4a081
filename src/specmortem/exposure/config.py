"""What is known of a running engine."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from packaging.version import InvalidVersion, Version

Runner = Literal["v1", "v2"]
CacheMode = Literal["none", "align", "all"]
NO_SPECULATION = "none"
UNNAMED = "unnamed"

HYBRID_FAMILIES = (
    "qwen3next",
    "qwen3codernext",
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


# Qwen3-8B and its like, which without punctuation would be Qwen3.8.
QWEN3 = re.compile(r"qwen3[-_](?:(?:coder|vl|omni)[-_])?(?:0\.6|1\.7|2|4|8|14|30|32|235|480)b")
DENSE = re.compile(r"llama[-_.]?3|qwen2\.5[-_]\d|qwen3[-_][\d.]+b(?![-_]a\d)")
EXPERTS = re.compile(r"moe|b[-_]a\d+b|mixtral|deepseek[-_]?(?:v2|v3|r1)|gpt[-_]oss|llama[-_]?4")
QUANTIZED = re.compile(r"fp8|fp4|int[48]|awq|gptq|w[48]a|gguf|bnb|nvfp|mxfp|quant")
GDN_FAMILIES = ("qwen3next", "qwen3codernext", "qwen35", "qwen36", "qwen38")
OTHER_DRAFTERS = (
    NO_SPECULATION, "ngram", "ngram_gpu", "suffix", "medusa", "mlp_speculator", "custom_class", "extract_hidden_states",
)  # fmt: skip
VENDORS = (
    "qwen", "meta-llama", "deepseek-ai", "mistralai", "google", "openai", "zai-org", "moonshotai", "ibm-granite",
    "microsoft", "tiiuae", "ai21labs", "nvidia", "xiaomimimo",
)  # fmt: skip
DRAFTER_WORDS = ("specul", "eagle", "dflash", "draft", "medusa", "mtp", "p-eagle", "hass", "dspark")


@dataclass(frozen=True)
class Config:
    """What is known of a running engine; None (or an empty text) is "not known".

    `speculation` is the method, `none`, or `unnamed` for a drafter whose method is not said; `own_drafter` says whether
    the model's own configuration names one. `cudagraphs` is the graph mode (`NONE`, `PIECEWISE`, `FULL`,
    `FULL_DECODE_ONLY`, `FULL_AND_PIECEWISE`), `attention` the target's backend and `draft_attention` the drafter's,
    `gpu` the compute capability times ten: 90 is sm_90.

    `launched` says that a command or the start of an engine states it, `complete` that all of it is known, so that what
    it leaves out has vLLM's default. `sources` tells where a field comes from. `prose` names the fields that only
    sentences state, which may speak of another launch: they never rule a cause out. `unknown` lists flags that were
    given and are not read.
    """

    version: str = ""
    model: str = ""
    hybrid: bool | None = None
    runner: Runner | None = None
    pipeline: int | None = None
    tensor: int | None = None
    speculation: str = ""
    own_drafter: bool | None = None
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
    launched: bool = False
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


def is_hybrid(model: str) -> bool | None:
    """Whether a model has recurrent layers, by its name or architecture; None for a family that is not listed."""
    name = plain(model)
    if QWEN3.search(model.lower()):
        return False
    if any(family in name for family in HYBRID_FAMILIES):
        return True
    return False if any(family in name for family in PURE_ATTENTION_FAMILIES) else None


def drafter_family(method: str) -> str:
    """`mtp`, `eagle`, `draft`, `dflash` or `other`; an empty text for a method that is not known."""
    name = method.lower().replace("-", "_")
    if name == "mtp" or name.endswith("_mtp"):
        return "mtp"
    if name.startswith("draft"):
        return "draft"
    starts = (family for family in ("eagle", "dflash") if name.startswith(family))
    return next(starts, "other" if name in OTHER_DRAFTERS else "")


def brings_no_drafter(model: str) -> bool:
    """Whether a model is a maker's own checkpoint, which names no drafter of its own; of any other it is not known."""
    maker, _, name = model.lower().strip("/").rpartition("/")
    return maker in VENDORS and not any(word in name for word in DRAFTER_WORDS)


def model_kinds(config: Config) -> tuple[str, ...]:
    """Rows of `defaults.csv` that a model can be: of its family where its name tells, else of all that agree."""
    name = plain(config.model)
    if config.hybrid is None:
        return ("gdn", "mamba2", "dense", "qwen3", "moe")
    if not config.hybrid:
        return _of_attention(config.model.lower(), name)
    if any(family in name for family in GDN_FAMILIES):
        return ("gdn",)
    return ("mamba2",) if "nemotronh" in name else ("gdn", "mamba2")


def _of_attention(model: str, name: str) -> tuple[str, ...]:
    """Kinds without recurrent layers. To 0.23.0 a quantized model has the runner of a mixture of experts."""
    if EXPERTS.search(model):
        return ("moe",)
    if QUANTIZED.search(model):
        return ("dense", "moe")
    kinds = ("dense",) if DENSE.search(model) else ("dense", "moe")
    return (*kinds, "qwen3") if not name or "qwen3" in name else kinds


def plain(model: str) -> str:
    """The letters and digits of a model's name, without the folder that it lies in."""
    return "".join(c for c in model.lower().rstrip("/").rpartition("/")[2] if c.isalnum())
