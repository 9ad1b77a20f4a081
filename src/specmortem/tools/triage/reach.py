"""What the release and the settings say about a cause.

Affected releases come from `investigations/<slug>/incident.toml`; on settings `specmortem.exposure` decides, so
that `audit --config` and `triage` cannot disagree.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from packaging.specifiers import SpecifierSet
from packaging.version import InvalidVersion, Version

from specmortem import incident
from specmortem.errors import SpecmortemError
from specmortem.exposure import Config
from specmortem.tools.triage.facts import Fact, FactBook

FIXED_WEIGHT, EARLIER_WEIGHT, AFFECTED_WEIGHT, UNREACHED_WEIGHT = -3.0, -0.5, 0.5, -2.0
DEVELOPMENT_SHARE = 0.5  # a development build or a fork may hold a fix, or lack it


@dataclass(frozen=True)
class Word:
    """For (positive) or against a cause, and why."""

    kind: str
    weight: float
    reason: str
    source: str
    facts: tuple[Fact, ...] = ()


def words(slug: str, cause: str, book: FactBook, settings: Config) -> Iterator[Word]:
    """Release first, then settings."""
    if (fact := _version_fact(book)) and (word := _release(slug, cause, fact, book)):
        yield word
    yield from _settings(cause, settings)


def _version_fact(book: FactBook) -> Fact | None:
    found = [f for f in book.named("version") if _version(f.value)]
    return found[0] if found else None


def _version(text: str) -> Version | None:
    try:
        return Version(re.sub(r"\.x$", "", text))
    except InvalidVersion:
        return None


def _release(slug: str, cause: str, fact: Fact, book: FactBook) -> Word | None:
    version, affected = _version(fact.value), affected_releases(slug).get(cause, "")
    if version is None or not affected or "vllm-backport" in book.values("fork"):
        return None
    source = f"investigations/{slug}/incident.toml, cause {cause}"
    own = version.is_prerelease or version.local is not None or "fork" in book
    share = DEVELOPMENT_SHARE if own else 1.0
    if SpecifierSet(affected).contains(Version(version.base_version), prereleases=True):
        return Word(
            "release",
            AFFECTED_WEIGHT * share,
            f"{fact.value} is among the affected releases ({affected})",
            source,
            (fact,),
        )
    lowest = [Version(s.version) for s in SpecifierSet(affected) if s.operator in (">=", ">", "==")]
    if lowest and Version(version.base_version) < max(lowest):
        return Word(
            "release",
            EARLIER_WEIGHT,
            f"{fact.value} is older than the releases examined ({affected})",
            source,
            (fact,),
        )
    return Word(
        "release",
        FIXED_WEIGHT * share,
        f"{fact.value} is not among the affected releases ({affected})",
        source,
        (fact,),
    )


@cache
def affected_releases(slug: str) -> Mapping[str, str]:
    """Specifiers by cause, as the incident file has them; none where there is no file."""
    try:
        return {cause.id: cause.affected for cause in incident.facts(slug).causes if cause.affected}
    except SpecmortemError:
        return {}


def _settings(cause: str, settings: Config) -> Iterator[Word]:
    reach = incident.reaches(cause, settings)
    if reach.reachable == "no":
        yield Word(
            "settings",
            UNREACHED_WEIGHT,
            f"this configuration does not reach it: {reach.reason}",
            "specmortem.exposure",
        )


ATTENTION = {"flashinfer": "FLASHINFER", "flash-attn": "FLASH_ATTN", "triton": "TRITON_ATTN"}


def attention(value: str) -> str:
    """An attention backend by vLLM's name."""
    return ATTENTION.get(value, value.upper())


def config(book: FactBook) -> Config:
    """The facts as the `Config` that `audit` judges; what several facts contradict each other on is left open."""
    stated: dict[str, Any] = {
        "version": _plain_version(book),
        "model": book.value("model"),
        "hybrid": True if "hybrid" in book else None,
        "runner": _only(book, "runner", ("v1", "v2")),
        "pipeline": _most(book, "pp"),
        "tensor": _most(book, "tp"),
        "speculation": _speculation(book),
        "drafts": _most(book, "k"),
        "cache_mode": _only(book, "cache_mode", ("none", "align", "all")),
        "prefix_caching": SWITCH.get(_only(book, "prefix_cache") or ""),
        "block_size": _most(book, "block_size"),
        "async_scheduling": SWITCH.get(_only(book, "async") or ""),
        "eager": True if book.values("graphs") == ["eager"] else None,
        "attention": attention(_only(book, "backend") or ""),
        "draft_attention": attention(_only(book, "draft_backend") or ""),
        "kv_cache_dtype": _only(book, "kv_cache_dtype") or "",
        "max_num_seqs": _most(book, "max_num_seqs"),
        "gpu": int(arch.removeprefix("sm_")) if (arch := _only(book, "arch")) else None,
    }
    return Config(**stated)


SWITCH = {"on": True, "off": False}


def _only(book: FactBook, name: str, allowed: tuple[str, ...] = ()) -> str | None:
    """The value when there is exactly one."""
    values = [value for value in book.values(name) if not allowed or value in allowed]
    return values[0] if len(values) == 1 else None


def _most(book: FactBook, name: str) -> int | None:
    """The largest number stated."""
    return int(max(numbers)) if (numbers := book.numbers(name)) else None


def _speculation(book: FactBook) -> str:
    if book.value("spec") in ("off", "empty"):
        return "none"
    return _only(book, "method") or ""


def _plain_version(book: FactBook) -> str:
    fact = _version_fact(book)
    return "" if fact is None or "vllm-backport" in book.values("fork") else fact.value.removesuffix(".x")


SETTINGS: Mapping[str, str] = {
    "version": "version",
    "model": "model",
    "runner": "runner",
    "pp": "pipeline-parallel-size",
    "tp": "tensor-parallel-size",
    "method": "method",
    "k": "num-speculative-tokens",
    "cache_mode": "mamba-cache-mode",
    "prefix_cache": "enable-prefix-caching",
    "async": "async-scheduling",
    "backend": "attention-backend",
    "draft_backend": "draft-attention-backend",
    "max_num_seqs": "max-num-seqs",
    "block_size": "block-size",
    "kv_cache_dtype": "kv-cache-dtype",
    "gpu": "gpu",
}


def settings(book: FactBook) -> dict[str, str]:
    """The facts that are settings, as the key=value words that `audit --config` reads."""
    found = {name: book.value(fact) for fact, name in SETTINGS.items() if book.value(fact)}
    for name in ("enable-prefix-caching", "async-scheduling"):
        if name in found:
            found[name] = {"on": "true", "off": "false"}.get(found[name], found[name])
    for name in ("attention-backend", "draft-attention-backend"):
        if name in found:
            found[name] = attention(found[name])
    return found
