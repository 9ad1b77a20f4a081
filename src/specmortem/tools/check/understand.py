"""Inputs to launches: files that go together are joined, what contradicts each other is judged apart."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

from packaging.version import InvalidVersion, Version

from specmortem.errors import BadInputError
from specmortem.exposure import Config, is_hybrid, resolve
from specmortem.exposure.config import plain
from specmortem.statements.launch import fill, launches, says_anything
from specmortem.tools.check.inputs import Input

APART = ("version", "speculation", "runner", "pipeline", "drafts", "cache_mode", "gpu")
MOST_CASES = 64
OPTION = "--vllm"
UNNAMED = (None, "", "auto")
AROUND = ("version", "gpu", "runner")
EFFECTIVE = tuple(
    {each.name for each in fields(Config)} - {"sources", "prose", "unknown", "launched", "complete"}
)
ARCHITECTURE = re.compile(r"\w+(?:For[A-Z]\w+|Model|LM)")


@dataclass(frozen=True)
class Understood:
    """One launch to judge: what is known of it, and the inputs that said it."""

    name: str
    config: Config


def understand(inputs: Sequence[Input], release: str = "") -> list[Understood]:
    """The launches that the inputs state, each once. `release` overrides what they say of the version.

    Raises BadInputError where nothing in them says how vLLM runs, and for inputs of too many launches.
    """
    whole: list[Understood] = []
    parts: list[Understood] = []
    for each in inputs:
        for config in launches(each.text):
            (whole if config.launched and not config.prose else parts).append(Understood(each.name, config))
    said = [each for each in (*whole, *parts) if says_anything(each.config)]
    if not said and not release:
        names = ", ".join(each.name for each in inputs) or "no input"
        raise BadInputError(
            f"{names}: nothing in it says how vLLM runs; give a launch command, its log, or key=value words"
        )
    cases = _joined(*([_on(each, release) for each in some if each in said] for some in (whole, parts)))
    if len(cases) > MOST_CASES:
        raise BadInputError(f"{len(cases)} launches are more than {MOST_CASES}; give fewer files at a time")
    return cases or [Understood(OPTION, _version(Config(), release))]


def _joined(whole: Sequence[Understood], parts: Sequence[Understood]) -> list[Understood]:
    """Fragments go to every launch that they do not contradict, and stand alone where they contradict all."""
    cases: list[Understood] = []
    for each in whole:
        same = next((at for at, case in enumerate(cases) if _same_launch(case.config, each.config)), None)
        if same is None:
            cases.append(each)
        else:
            cases[same] = _together(cases[same], each)
    for part in parts:
        fitting = [at for at, case in enumerate(cases) if _joins(case.config, part.config)]
        if ARCHITECTURE.fullmatch(part.config.model) and len({cases[at].config.model for at in fitting}) > 1:
            fitting = []  # it is of one of them, and nothing says of which
        for at in fitting:
            cases[at] = _together(cases[at], part)
        if not fitting:
            cases.append(part)
    return cases


def _together(case: Understood, more: Understood) -> Understood:
    known = more.name in case.name.split(" + ")
    return Understood(case.name if known else f"{case.name} + {more.name}", fill(case.config, more.config))


def _same_launch(one: Config, other: Config) -> bool:
    """Whether a command and a log, or two logs, are of one launch: both known whole, and the same in effect.

    What neither a flag nor the arguments of a log say, the one may know of the other: release, GPU, runner.
    """
    if not (one.complete and other.complete) or one.prose or other.prose:
        return False
    if _of_log(one) == _of_log(other) and one.runner != other.runner:
        return False
    around = [(getattr(one, name), getattr(other, name)) for name in AROUND]
    if any(a != b for a, b in around if a not in (None, "") and b not in (None, "")):
        return False
    first, second = (
        resolve(replace(a, **{name: getattr(fill(a, b), name) for name in AROUND}))
        for a, b in ((one, other), (other, one))
    )
    return all(_equal(getattr(first, name), getattr(second, name), name) for name in EFFECTIVE)


def _of_log(config: Config) -> bool:
    """Whether the start of an engine says it, which does not print variables."""
    return "log" in config.sources.values()


def _mentioned(case: Config, told: Config) -> bool:
    """Whether a command inside a sentence is the one of a launch: it has every flag that this has, and no other."""
    names = set(EFFECTIVE) - {*AROUND, "model", "hybrid"}
    return not case.prose and all(getattr(case, name) == getattr(told, name) for name in names)


def _equal(one: object, other: object, name: str) -> bool:
    """Whether two values are the same in effect; `auto` is what nothing else is."""
    if name == "model":
        return plain(str(one)) == plain(str(other))
    return one == other or (one in UNNAMED and other in UNNAMED)


def _joins(case: Config, part: Config) -> bool:
    return _fits(case, part) and (not part.launched or _mentioned(case, part))


def _fits(one: Config, other: Config) -> bool:
    """Whether nothing that both state differs."""
    pairs = ((getattr(one, name), getattr(other, name)) for name in APART)
    return _same_model(one.model, other.model) and all(
        a == b for a, b in pairs if a not in (None, "") and b not in (None, "")
    )


def _same_model(one: str, other: str) -> bool:
    """Whether two names may be of one model; an architecture is of any that has as much recurrence."""
    if not one or not other or plain(one) == plain(other):
        return True
    if not (ARCHITECTURE.fullmatch(one) or ARCHITECTURE.fullmatch(other)):
        return False
    kinds = {is_hybrid(one), is_hybrid(other)} - {None}
    return len(kinds) < 2


def _on(case: Understood, release: str) -> Understood:
    return Understood(case.name, _version(case.config, release)) if release else case


def _version(config: Config, release: str) -> Config:
    return replace(config, version=release, sources={**config.sources, "version": OPTION})


def release_of(text: str) -> str:
    """The release that `--vllm` names as 0.28.0, v0.28.0 or vllm==0.28.0. Raises BadInputError for what is none."""
    bare = re.sub(r"^(?:vllm==|v)", "", text.strip())
    try:
        return str(Version(bare))
    except InvalidVersion:
        raise BadInputError(
            f"--vllm {text}: give a release such as 0.28.0, installed, tree:DIR, wheel:FILE or sdist:FILE"
        ) from None
