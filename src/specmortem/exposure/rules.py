"""Rules: conditions on a configuration, and what a cause needs of them."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

from specmortem.exposure.config import NO_SPECULATION, Config, drafter_family, model_kinds
from specmortem.exposure.resolve import resolve

Reachable = Literal["yes", "no", "unknown"]
Effect = Literal["crash", "text", "drafts", "link", "unseen"]
TRTLLM = re.compile(r"(?i)trtllm|^--?(?:attention[-_]config|ac)\b")


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
        family = drafter_family(c.speculation)
        return family in families if family else None

    names = {"mtp": "MTP", "eagle": "EAGLE", "draft": "draft-model", "dflash": "DFlash"}
    text = f"{' or '.join(names[f] for f in families)} drafts"
    return Condition(text, test, lambda c: f"{c.speculation}{c.told('speculation')}")


def _plans(c: Config) -> bool | None:
    """Whether decode of FlashInfer plans on this GPU (vllm/utils/flashinfer.py, supports_trtllm_attention:
    sm_100 never; sm_90 until 0.24.0, 0.25.1:389-394; sm_120 until 0.27.1, 0.28.0:410-414). What turns those kernels
    off (VLLM_USE_TRTLLM_ATTENTION, --attention-config) is not read.
    """
    if c.gpu is None:
        return None
    bound = {9: "0.25.0", 10: "0", 12: "0.28.0"}.get(c.gpu // 10)
    plans = True if bound is None else False if bound == "0" else c.before(bound)
    return None if plans is False and any(TRTLLM.search(each) for each in c.unknown) else plans


def _speculates(c: Config) -> bool | None:
    return c.speculation != NO_SPECULATION if c.speculation else None


def _graphs(c: Config) -> bool | None:
    if c.eager or c.cudagraphs == "NONE":
        return False
    return True if c.cudagraphs or c.eager is False else None


def _full_graphs(c: Config) -> bool | None:
    if c.eager:
        return False
    return "FULL" in c.cudagraphs if c.cudagraphs else None


def _not_align(c: Config) -> bool | None:
    return None if c.cache_mode is None else c.cache_mode != "align"


def _blocks_differ(c: Config) -> bool | None:
    """Without --block-size, and without a drafter of its own kind of blocks, attention and recurrent state of a gated
    delta net have one size (vllm/platforms/interface.py: 0.29.0:916-925, 0.31.0:987-996); EngineCore then takes the
    smallest of all groups (v1/engine/core.py: 0.29.0:336, 0.31.0:346).
    """
    if c.block_size is not None:
        return True
    one_size = drafter_family(c.speculation) in ("mtp", "other") and model_kinds(c) == ("gdn",)
    return False if c.complete and one_size else None


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
DRAFT_LOOP = _drafted_by("mtp", "eagle", "draft")
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
    lambda c: f"--block-size {c.block_size}" if c.block_size else "one size for all layers",
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


class Resolved:
    """A configuration with what follows from it, worked out once."""

    def __init__(self, config: Config) -> None:
        """Nothing is worked out before it is asked for."""
        self.config = config

    @property
    def firm(self) -> bool:
        """Whether nothing of it is assumed, or said in a sentence alone."""
        return self.config.complete and not self.config.prose

    @cached_property
    def known(self) -> Config:
        """With all that is said, and the runner that is assumed."""
        return resolve(self.config)

    @cached_property
    def without_prose(self) -> Config:
        """With what can rule a cause out."""
        return resolve(self.config.without_prose(), assume=False)


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
        return self.of(Resolved(config))

    def of(self, launch: Resolved) -> Reach:
        """The same for a configuration that several rules look at."""
        reach = self._of(launch.known)
        if reach.reachable != "no" or launch.firm:
            return reach
        without = self._of(launch.without_prose)
        if without.reachable == "no":
            return without
        return Reach("unknown", f"{reach.reason}; but no launch command says so")

    def _of(self, known: Config) -> Reach:
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
