"""Changes of a launch that an operator can make without another vLLM, and what each costs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from specmortem.exposure import NO_SPECULATION, Config, follows_target, resolve
from specmortem.exposure.config import brings_no_drafter

OTHER_BACKEND = "FLASH_ATTN"
FLASH_COST = "needs a model and a KV cache type that FlashAttention takes; not measured"


@dataclass(frozen=True)
class LaunchChange:
    """A flag, or a few that belong together: how it is written, what it makes of a launch, and its price.

    `weight` orders changes by what they take away; `fits` says whether a launch can be changed so.
    """

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
    """A key of --speculative-config beside those that are there.

    Not with a dot: vLLM puts such keys into a value of their own, which replaces the other one whole
    (vllm/utils/argparse_utils.py, 0.24.0:415-424).
    """
    return lambda config: (f"--speculative-config '{{…, \"{name}\": {value}}}'",)


def _one_backend(config: Config) -> bool:
    """Whether the drafter has the target's backend: to 0.20.2, and to 0.29.0 on the V2 runner."""
    return _speculates(config) and follows_target(resolve(config)) is True


def _own_backend(config: Config) -> bool:
    return _speculates(config) and follows_target(resolve(config)) is False


def _ends(config: Config) -> bool:
    """Whether nothing drafts without --speculative-config: the model's own configuration may name a drafter."""
    alone = config.own_drafter is False or brings_no_drafter(config.model)
    return _speculates(config) and config.own_drafter is not True and alone


CHANGES: tuple[LaunchChange, ...] = (
    LaunchChange(
        _fixed(f"--attention-backend {OTHER_BACKEND}"),
        {"attention": OTHER_BACKEND},
        FLASH_COST,
        1,
        _one_backend,
    ),
    LaunchChange(
        _key("attention_backend", f'"{OTHER_BACKEND}"'),
        {"draft_attention": OTHER_BACKEND},
        FLASH_COST,
        1,
        _own_backend,
    ),
    LaunchChange(
        _key("num_speculative_tokens", "2"),
        {"drafts": 2},
        "shorter accepted runs; on one reported server 2 drafts were the fastest (vllm#42603)",
        2,
        lambda config: _speculates(config) and (config.drafts or 0) > 2,
    ),
    LaunchChange(
        _fixed("--no-enable-prefix-caching"),
        {"prefix_caching": False, "cache_mode": None},
        "no reuse of prefixes",
        3,
        lambda config: config.hybrid is not False,
    ),
    LaunchChange(
        _fixed("--no-async-scheduling"),
        {"async_scheduling": False},
        "the host's work is no longer hidden behind the device's; not measured on a server",
        4,
        lambda config: (config.pipeline or 1) == 1,
    ),
    LaunchChange(
        _fixed("--enforce-eager"),
        {"eager": True, "cudagraphs": "NONE"},
        "20 to 40 % more time a decode step (z-lab/dflash#146)",
        6,
        lambda config: config.eager is not True,
    ),
    LaunchChange(
        _fixed("--pipeline-parallel-size 1"),
        {"pipeline": 1},
        "the model must fit, or tensor parallelism takes over",
        7,
        lambda config: (config.pipeline or 1) > 1,
    ),
    LaunchChange(
        _fixed("no --speculative-config"),
        {"speculation": NO_SPECULATION, "drafts": None, "draft_attention": ""},
        "the speed-up of speculation, 1.4 to 2.9 times in z-lab/dflash#146",
        8,
        _ends,
    ),
    LaunchChange(
        _fixed("--max-num-seqs 1"),
        {"max_num_seqs": 1},
        "all concurrency",
        9,
        lambda config: config.max_num_seqs != 1,
    ),
)
