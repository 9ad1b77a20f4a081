"""Facts that follow from others: what a model, a GPU or a single device implies, and whether speculation ran."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace

from specmortem import exposure
from specmortem.statements.config import config
from specmortem.statements.facts import PROSE, STATED, Fact, FactBook
from specmortem.statements.gpus import gpu_of
from specmortem.statements.signs import backend

CONCURRENT = "many"
LOW_KV_PERCENT = 30.0
FIRST_ON_V1 = 8
_MINOR = re.compile(r"0\.(\d{1,3})\b")
LOOP_DRAFTERS = frozenset({"mtp", "eagle", "eagle3", "draft-model"})
COMMAND_FLAGS = ("max_model_len", "max_num_seqs", "max_num_batched_tokens", "model")


def complete(book: FactBook) -> FactBook:
    """The book with what follows from it; what it states itself is never overruled."""
    result = FactBook(_one_engine(_without_controls(book)))
    for follow in (
        _architecture,
        _one_device,
        _speculation,
        _cache_mode,
        _concurrency,
        _kv,
        _default_pipeline,
        _old_engine,
        _chosen_backend,
        _drafter_follows,
        _loop_backend,
    ):
        result.extend(tuple(follow(result)))
    return result


def with_names(book: FactBook) -> FactBook:
    """The book with what names stand for: the architecture of a GPU, and the backends that vLLM says it chose."""
    for follow in (_architecture, _chosen_backend):
        book.extend(tuple(follow(book)))
    return book


def _without_controls(book: FactBook) -> list[Fact]:
    """A drafter that ran clean beside the one that failed is a control, not the configuration."""
    if book.value("control.dflash") == "clean" and any(
        f.name == "method" and f.value != "dflash" for f in book
    ):
        return [f for f in book if (f.name, f.value, f.rank) != ("method", "dflash", PROSE)]
    return list(book)


def _one_engine(facts: list[Fact]) -> list[Fact]:
    """The engine that is named first, by a log where there is one; others are mentioned in passing."""
    named = [fact for fact in facts if fact.name == "engine"]
    if not named:
        return facts
    first = max(named, key=lambda fact: fact.rank)
    kept = ("vllm", "vllm-ascend") if first.value.startswith("vllm") else (first.value,)
    return [fact for fact in facts if fact.name != "engine" or fact.value in kept]


def _because(fact: Fact, name: str, value: str) -> Fact:
    return replace(fact, name=name, value=value, rank=PROSE)


def _architecture(book: FactBook) -> Iterator[Fact]:
    if "arch" not in book:
        found = ((fact, gpu_of(fact.value)) for fact in book.named("gpu"))
        known = [_because(fact, "arch", f"sm_{gpu}") for fact, gpu in found if gpu]
        yield from known[:4]


def _one_device(book: FactBook) -> Iterator[Fact]:
    if "pp" not in book and book.values("gpus") == ["1"] and max(book.numbers("tp"), default=1) <= 1:
        yield _because(book.named("gpus")[0], "pp", "1")


def _default_pipeline(book: FactBook) -> Iterator[Fact]:
    """A launch command that names no pipeline has none."""
    stated = [fact for name in COMMAND_FLAGS for fact in book.named(name) if fact.rank == STATED]
    if "pp" not in book and len({fact.name for fact in stated}) >= 2:
        yield _because(stated[0], "pp", "1")


def _speculation(book: FactBook) -> Iterator[Fact]:
    """`spec`: on, off, empty (a dump without draft tokens), or mentioned."""
    said = book.named("speculation")
    firm = [f for name in ("method", "k") for f in book.named(name) if f.rank == STATED]
    firm += book.named("acceptance_length") + book.named("acceptance_rate")
    firm += [f for f in book.named("spec_tokens") if f.value == "scheduled"]
    firm += [f for f in said if f.rank == STATED and f.value == "on"]
    off = [f for f in book if f.name == "speculation" and f.value == "off" and f.rank == STATED]
    mentioned = book.named("method") or [f for f in said if f.value == "on"]
    empty = [f for f in book.named("spec_tokens") if f.value == "empty"]
    if firm:
        yield _because(firm[0], "spec", "on")
    elif off and not book.named("method"):
        yield _because(off[0], "spec", "off")
    elif mentioned:
        yield _because(mentioned[0], "spec", "mentioned")
    elif empty:
        yield _because(empty[0], "spec", "empty")


def _cache_mode(book: FactBook) -> Iterator[Fact]:
    """Hybrid models that cache prefixes run in align mode (on by default since vLLM 0.28.0)."""
    if "cache_mode" not in book and "hybrid" in book and book.value("prefix_cache") == "on":
        yield _because(book.named("prefix_cache")[0], "cache_mode", "align")


def _concurrency(book: FactBook) -> Iterator[Fact]:
    most = max(book.named("running"), key=lambda fact: int(fact.value), default=None)
    if most and int(most.value) > 1:
        yield _because(most, "concurrency", CONCURRENT)


def _kv(book: FactBook) -> Iterator[Fact]:
    usage = book.named("kv_usage")
    if usage and all(float(fact.value) < LOW_KV_PERCENT for fact in usage):
        yield _because(usage[-1], "kv_low", "yes")


def _old_engine(book: FactBook) -> Iterator[Fact]:
    """Releases before 0.8 ran V0 by default; a fork's number says nothing."""
    minor = _MINOR.match(book.value("version"))
    if minor and int(minor[1]) < FIRST_ON_V1 and "runner" not in book and "fork" not in book:
        yield _because(book.named("version")[0], "runner", "v0")


def _chosen_backend(book: FactBook) -> Iterator[Fact]:
    """What vLLM chose: for the drafter alone where the target's is named, else first for the target."""
    chosen = book.named("chosen_backend")
    if chosen and "draft_backend" not in book:
        yield replace(chosen[-1], name="draft_backend")
    if chosen and all(fact.rank == PROSE for fact in book.named("backend")):
        yield replace(chosen[0], name="backend")


def _drafter_follows(book: FactBook) -> Iterator[Fact]:
    """`drafter_follows`: whether the drafter has the target's attention backend in this release."""
    follows = exposure.follows_target(config(book))
    if follows is not None:
        yield _because(book.named("version")[0], "drafter_follows", "yes" if follows else "no")


def _loop_backend(book: FactBook) -> Iterator[Fact]:
    """`loop_backend`: the drafter's attention backend; `depends` where the one named need not be its own."""
    named = book.named("draft_backend") or book.named("backend")
    methods = book.values("method")
    if named and (not methods or LOOP_DRAFTERS & set(methods)):
        known = exposure.resolve(config(book)).draft_attention
        yield _because(named[0], "loop_backend", backend(known) or "depends")
