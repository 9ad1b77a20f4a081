"""Changes of a launch that an operator can make without another vLLM, and what each costs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from specmortem.exposure import NO_SPECULATION, Config, resolve

OTHER_BACKEND = "FLASH_ATTN"


@dataclass(frozen=True)
class LaunchChange:
    """A flag, or a few that belong together: how it is written, what it makes of a launch, and its price.

    `weight` orders changes by what they take away; `lever` is what it turns, so that two of one never go together.
    """

    lever: str
    flags: Callable[[Config], tuple[str, ...]]
    fields: dict[str, Any]
    cost: str
    weight: int
    fits: Callable[[Config], bool]

    def applied(self, config: Config) -> Config:
        """The launch with it, whatever it said before."""
        name = " ".join(self.flags(config))
        sources = {**config.sources, **dict.fromkeys(self.fields, name)}
        return replace(config, **self.fields, sources=sources, prose=config.prose - self.fields.keys())


def _fixed(*flags: str) -> Callable[[Config], tuple[str, ...]]:
    return lambda config: flags


def _speculates(config: Config) -> bool:
    return bool(config.speculation) and config.speculation != NO_SPECULATION


def _key(name: str, value: str) -> Callable[[Config], tuple[str, ...]]:
    """A key of --speculative-config; the rest of its value stays as it is."""
    return lambda config: (f"--speculative-config.{name} {value}",)


def _backend(config: Config) -> tuple[str, ...]:
    """Up to 0.20.2 the drafter of the V1 runner has the target's backend (`exposure.follows_target`)."""
    if config.before("0.21.0"):
        return (f"--attention-backend {OTHER_BACKEND}",)
    return (f"--speculative-config.attention_backend {OTHER_BACKEND}",)


def _reaches_drafter(config: Config) -> bool:
    """The V2 runner takes the drafter's own key from 0.30.0 on."""
    return _speculates(config) and not (resolve(config).runner == "v2" and config.before("0.30.0"))


CHANGES: tuple[LaunchChange, ...] = (
    LaunchChange(
        "draft attention",
        _backend,
        {"draft_attention": OTHER_BACKEND, "attention": OTHER_BACKEND},
        "needs a model and a KV cache type that FlashAttention takes; not measured",
        1,
        _reaches_drafter,
    ),
    LaunchChange(
        "drafts",
        _key("num_speculative_tokens", "2"),
        {"drafts": 2},
        "shorter accepted runs; on one reported server 2 drafts were the fastest (vllm#42603)",
        2,
        lambda config: _speculates(config) and (config.drafts or 0) > 2,
    ),
    LaunchChange(
        "prefix caching",
        _fixed("--no-enable-prefix-caching"),
        {"prefix_caching": False, "cache_mode": None},
        "no reuse of prefixes",
        3,
        lambda config: config.hybrid is not False,
    ),
    LaunchChange(
        "async",
        _fixed("--no-async-scheduling"),
        {"async_scheduling": False},
        "the host's work is no longer hidden behind the device's; not measured on a server",
        4,
        lambda config: (config.pipeline or 1) == 1,
    ),
    LaunchChange(
        "graphs",
        _fixed("--enforce-eager"),
        {"eager": True, "cudagraphs": "NONE"},
        "20 to 40 % more time a decode step (z-lab/dflash#146)",
        6,
        lambda config: config.eager is not True,
    ),
    LaunchChange(
        "pipeline",
        _fixed("--pipeline-parallel-size 1"),
        {"pipeline": 1},
        "the model must fit, or tensor parallelism takes over",
        7,
        lambda config: (config.pipeline or 1) > 1,
    ),
    LaunchChange(
        "speculation",
        _fixed("no --speculative-config"),
        {"speculation": NO_SPECULATION, "drafts": None},
        "the speed-up of speculation, 1.4 to 2.9 times in z-lab/dflash#146",
        8,
        _speculates,
    ),
    LaunchChange(
        "sequences",
        _fixed("--max-num-seqs 1"),
        {"max_num_seqs": 1},
        "all concurrency",
        9,
        lambda config: config.max_num_seqs != 1,
    ),
)
