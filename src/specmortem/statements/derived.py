"""Facts that follow from others: what a model, a GPU or a single device implies, and whether speculation ran."""

from __future__ import annotations

import re
from dataclasses import replace

from specmortem import exposure
from specmortem.statements.config import config
from specmortem.statements.facts import PROSE, STATED, Fact, FactBook
from specmortem.statements.gpus import gpu_of
from specmortem.statements.signs import backend

CONCURRENT, SINGLE = "many", "single"
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
        result.extend(follow(result))
    return result


def with_names(book: FactBook) -> FactBook:
    """The book with what names stand for: the architecture of a GPU, and the backends that vLLM says it chose."""
    for follow in (_architecture, _chosen_backend):
        book.extend(follow(book))
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


def _architecture(book: FactBook) -> list[Fact]:
    if "arch" in book:
        return []
    found = ((fact, gpu_of(fact.value)) for fact in book.named("gpu"))
    return [_because(fact, "arch", f"sm_{gpu}") for fact, gpu in found if gpu][:4]


def _one_device(book: FactBook) -> list[Fact]:
    if "pp" in book or book.values("gpus") != ["1"] or (book.numbers("tp") and max(book.numbers("tp")) > 1):
        return []
    return [_because(book.named("gpus")[0], "pp", "1")]


def _default_pipeline(book: FactBook) -> list[Fact]:
    """A launch command that names no pipeline has none."""
    if "pp" in book:
        return []
    stated = [fact for name in COMMAND_FLAGS for fact in book.named(name) if fact.rank == STATED]
    return [_because(stated[0], "pp", "1")] if len({fact.name for fact in stated}) >= 2 else []


def _speculation(book: FactBook) -> list[Fact]:
    """`spec`: on, off, empty (a dump without draft tokens), or mentioned."""
    firm = [f for name in ("method", "k") for f in book.named(name) if f.rank == STATED]
    firm += book.named("acceptance_length") + book.named("acceptance_rate")
    firm += [f for f in book.named("spec_tokens") if f.value == "scheduled"]
    firm += [f for f in book.named("speculation") if f.rank == STATED and f.value == "on"]
    if firm:
        return [_because(firm[0], "spec", "on")]
    off = [f for f in book if f.name == "speculation" and f.value == "off" and f.rank == STATED]
    mentioned = book.named("method") or [f for f in book.named("speculation") if f.value == "on"]
    if off and not book.named("method"):
        return [_because(off[0], "spec", "off")]
    if mentioned:
        return [_because(mentioned[0], "spec", "mentioned")]
    empty = [f for f in book.named("spec_tokens") if f.value == "empty"]
    return [_because(empty[0], "spec", "empty")] if empty else []


def _cache_mode(book: FactBook) -> list[Fact]:
    """Hybrid models that cache prefixes run in align mode (the default since vLLM 0.26.0)."""
    if "cache_mode" in book or "hybrid" not in book or book.value("prefix_cache") != "on":
        return []
    return [_because(book.named("prefix_cache")[0], "cache_mode", "align")]


def _concurrency(book: FactBook) -> list[Fact]:
    running = [(fact, int(fact.value)) for fact in book.named("running")]
    if any(number > 1 for _, number in running):
        return [_because(max(running, key=lambda pair: pair[1])[0], "concurrency", CONCURRENT)]
    return []


def _kv(book: FactBook) -> list[Fact]:
    usage = [fact for fact in book.named("kv_usage") if float(fact.value) < LOW_KV_PERCENT]
    return (
        [_because(usage[-1], "kv_low", "yes")] if usage and len(usage) == len(book.named("kv_usage")) else []
    )


def _old_engine(book: FactBook) -> list[Fact]:
    """Releases before 0.8 ran V0 by default; a fork's number says nothing."""
    found = book.named("version")
    minor = _MINOR.match(found[0].value) if found else None
    if minor is None or int(minor[1]) >= FIRST_ON_V1 or "runner" in book or "fork" in book:
        return []
    return [_because(found[0], "runner", "v0")]


def _chosen_backend(book: FactBook) -> list[Fact]:
    """What vLLM chose: for the drafter alone where the target's is named, else first for the target."""
    chosen = book.named("chosen_backend")
    if not chosen:
        return []
    found = [] if "draft_backend" in book else [replace(chosen[-1], name="draft_backend")]
    if all(fact.rank == PROSE for fact in book.named("backend")):
        found.append(replace(chosen[0], name="backend"))
    return found


def _drafter_follows(book: FactBook) -> list[Fact]:
    """`drafter_follows`: whether the drafter has the target's attention backend in this release."""
    follows = exposure.follows_target(config(book))
    return (
        []
        if follows is None
        else [_because(book.named("version")[0], "drafter_follows", "yes" if follows else "no")]
    )


def _loop_backend(book: FactBook) -> list[Fact]:
    """`loop_backend`: the drafter's attention backend; `depends` where the one named need not be its own."""
    named = book.named("draft_backend") or book.named("backend")
    methods = book.values("method")
    if not named or (methods and not LOOP_DRAFTERS & set(methods)):
        return []
    known = exposure.resolve(config(book)).draft_attention
    return [_because(named[0], "loop_backend", backend(known) or "depends")]
