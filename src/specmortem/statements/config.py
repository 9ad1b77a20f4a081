"""Facts to the `Config` that exposure judges, and back to the key=value words that say the same."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from packaging.version import InvalidVersion, Version

from specmortem.exposure import NO_SPECULATION, Config
from specmortem.statements.facts import Fact, FactBook, as_number

SWITCH = {"on": True, "off": False}
ATTENTION = {"flashinfer": "FLASHINFER", "flash-attn": "FLASH_ATTN", "triton": "TRITON_ATTN"}
# A "draft model" is no method: most of these have one.
DRAFTERS = ("mtp", "eagle", "eagle3", "dflash", "ngram", "medusa", "suffix", NO_SPECULATION)
GRAPH_MODES = frozenset({"NONE", "PIECEWISE", "FULL", "FULL_DECODE_ONLY", "FULL_AND_PIECEWISE"})
OTHER_NUMBERS = "vllm-backport"  # a fork whose releases are numbered on their own
Read = Callable[[Sequence[str]], Any]


def attention(value: str) -> str:
    """An attention backend by vLLM's name."""
    return ATTENTION.get(value, value.upper())


def version_of(text: str) -> Version | None:
    """A release, `0.27.x` too; None for what is none, as `0.1.devN`, which a build without tags calls itself."""
    try:
        found = Version(re.sub(r"\.x$", "", text))
    except InvalidVersion:
        return None
    return None if found.is_devrelease and found.release == (0, 1) else found


def version_fact(book: FactBook) -> Fact | None:
    """The first statement of vLLM's version that is one; None where there is none, or only a fork's own number."""
    if OTHER_NUMBERS in book.values("fork"):
        return None
    return next((fact for fact in book.named("version") if version_of(fact.value)), None)


def _only(convert: Callable[[str], Any] = str) -> Read:
    """The value when there is exactly one; None as soon as there are several, or for one that `convert` refuses."""

    def read(values: Sequence[str]) -> Any:
        found = {made for value in values if (made := convert(value)) is not None}
        return found.pop() if len(found) == 1 else None

    return read


def _of(*allowed: str) -> Callable[[str], str | None]:
    return lambda value: value if value in allowed else None


def _most(values: Sequence[str]) -> int | None:
    """The largest number stated; 0 is a rank."""
    numbers = [number for value in values if (number := as_number(value))]
    return int(max(numbers)) if numbers else None


def _graphs(value: str) -> str | None:
    return _of(*GRAPH_MODES)(value.upper().replace("-", "_"))


def _arch(value: str) -> int:
    return int(value.removeprefix("sm_"))


# Field of `Config`: the fact that states it, how its values are read, and its name as a key=value word.
FIELDS: Mapping[str, tuple[str, Read, str]] = {
    "version": ("version", lambda values: values[0].removesuffix(".x"), "version"),
    "model": ("model", lambda values: values[0], "model"),
    "hybrid": ("hybrid", lambda values: True, ""),
    "runner": ("runner", _only(_of("v1", "v2")), "runner"),
    "pipeline": ("pp", _most, "pipeline-parallel-size"),
    "tensor": ("tp", _most, "tensor-parallel-size"),
    "speculation": ("method", _only(_of(*DRAFTERS)), "method"),
    "drafts": ("k", _most, "num-speculative-tokens"),
    "cache_mode": ("cache_mode", _only(_of("none", "align", "all")), "mamba-cache-mode"),
    "prefix_caching": ("prefix_cache", _only(SWITCH.get), "enable-prefix-caching"),
    "async_scheduling": ("async", _only(SWITCH.get), "async-scheduling"),
    "eager": ("graphs", lambda values: True if set(values) == {"eager"} else None, ""),
    "cudagraphs": ("graphs", _only(_graphs), ""),
    "attention": ("backend", _only(attention), "attention-backend"),
    "draft_attention": ("draft_backend", _only(attention), "draft-attention-backend"),
    "max_num_seqs": ("max_num_seqs", _most, "max-num-seqs"),
    "block_size": ("block_size", _most, "block-size"),
    "kv_cache_dtype": ("kv_cache_dtype", _only(), "kv-cache-dtype"),
    "gpu": ("arch", _only(_arch), ""),
}


def config(book: FactBook, cite: Callable[[Fact], str] = lambda fact: f"line {fact.line}") -> Config:
    """The facts as a `Config`; what several facts contradict each other on is left open.

    `cite` says where a field comes from, by the first fact that states it.
    """
    stated: dict[str, Any] = {}
    sources: dict[str, str] = {}
    for name, (fact, read, _) in FIELDS.items():
        facts = _facts(book, name, fact)
        if facts and (value := read([each.value for each in facts])) is not None:
            stated[name], sources[name] = value, cite(facts[0])
    return Config(**stated, sources=sources)


def _facts(book: FactBook, name: str, fact: str) -> list[Fact]:
    if name == "version":
        return [found] if (found := version_fact(book)) else []
    if name == "speculation" and book.value("spec") in ("off", "empty"):
        return [
            Fact("method", NO_SPECULATION, each.file, each.line, each.text) for each in book.named("spec")
        ]
    return book.named(fact)


def settings(book: FactBook) -> dict[str, str]:
    """The facts that are settings, as the key=value words that `launch` reads."""
    words = [(fact, word) for fact, _, word in FIELDS.values() if word] + [("gpu", "gpu")]
    return {word: _spelt(fact, value) for fact, word in words if (value := book.value(fact))}


def _spelt(fact: str, value: str) -> str:
    """A value as a flag has it."""
    if fact in ("prefix_cache", "async"):
        return str(SWITCH[value]).lower() if value in SWITCH else value
    return attention(value) if fact.endswith("backend") else value
