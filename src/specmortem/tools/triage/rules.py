"""The rules of `rules.toml`, read and checked, and what they say about the facts of one case."""

from __future__ import annotations

import operator
import re
import tomllib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any

from specmortem.errors import BadInputError
from specmortem.tools.triage.facts import Fact, FactBook

SCHEMA = 1
EFFECTS = ("supports", "contradicts", "excludes")
_CONDITION = re.compile(r"^(?P<not>!?)(?P<name>[a-z_][\w.-]*)(?:(?P<how><=|>=|=|<|>)(?P<value>[\w.|-]+))?$")
_COMPARE: Mapping[str, Callable[[float, float], bool]] = {
    "<": operator.lt,
    ">": operator.gt,
    "<=": operator.le,
    ">=": operator.ge,
}
ENVIRONMENT = ("gpu", "model", "version", "tp", "max_model_len", "running")  # of which one is `environment`


@dataclass(frozen=True)
class FactCondition:
    """NAME, NAME=a|b or a comparison of numbers; `denied` turns it round."""

    name: str
    how: str = ""
    value: str = ""
    denied: bool = False

    @classmethod
    def of(cls, text: str) -> FactCondition:
        """Parse; BadInputError when it is no condition."""
        if not (match := _CONDITION.match(text)):
            raise BadInputError(
                f"rules.toml: {text!r} is no condition such as 'pp>1', 'fault=oom|ecc' or '!method'"
            )
        return cls(match["name"], match["how"] or "", match["value"] or "", bool(match["not"]))

    def evidence(self, book: FactBook) -> list[Fact] | None:
        """The facts by which it holds, none where it holds by their absence; None where it does not hold."""
        found = self._found(book)
        if self.denied:
            return None if found else []
        return found or None

    def _found(self, book: FactBook) -> list[Fact]:
        if self.name == "environment":
            return [fact for name in ENVIRONMENT for fact in book.named(name)][:1]
        facts = book.named(self.name)
        if self.how == "=":
            return [fact for fact in facts if fact.value in self.value.split("|")]
        if self.how:
            return [fact for fact in facts if _holds(fact.value, self.how, float(self.value))]
        return facts


def _holds(value: str, how: str, limit: float) -> bool:
    try:
        return _COMPARE[how](float(value), limit)
    except ValueError:
        return False


@dataclass(frozen=True)
class TriageRule:
    """What some facts say about some causes, incidents or other classes."""

    id: str
    when: tuple[FactCondition, ...]
    supports: tuple[str, ...]
    contradicts: tuple[str, ...]
    excludes: tuple[str, ...]
    weight: float
    reason: str
    source: str


@dataclass(frozen=True)
class NextExperiment:
    """One change to make, and what each cause predicts of it."""

    id: str
    does: str
    command: str
    done: tuple[FactCondition, ...]
    needs: tuple[FactCondition, ...]
    unless: tuple[FactCondition, ...]
    predicts: Mapping[str, str]


@dataclass(frozen=True)
class Note:
    """Something to say when conditions hold: what weighs nothing, what is to be collected."""

    when: tuple[FactCondition, ...]
    text: str


@dataclass(frozen=True)
class Rules:
    """All of `rules.toml`."""

    thresholds: Mapping[str, float]
    causes: Mapping[str, str]
    classes: Mapping[str, str]
    spares: Mapping[str, list[str]]
    rules: tuple[TriageRule, ...]
    nothing: tuple[Note, ...]
    experiments: tuple[NextExperiment, ...]
    collect: tuple[Note, ...]

    def targets(self, names: Iterable[str]) -> list[str]:
        """Causes and classes that the names stand for; an incident stands for its causes."""
        found: list[str] = []
        for name in names:
            found += [cause for cause, incident in self.causes.items() if name in (cause, incident)]
            found += [name] if name in self.classes else []
        return found


@cache
def load() -> Rules:
    """The rules of this package. Raises BadInputError for the first thing wrong in them."""
    text = resources.files("specmortem.tools.triage").joinpath("rules.toml").read_text(encoding="utf-8")
    return parse(tomllib.loads(text))


def parse(data: Mapping[str, Any]) -> Rules:
    """Rules from TOML data; BadInputError names the entry that is wrong."""
    if data.get("schema") != SCHEMA:
        raise BadInputError(f"rules.toml: schema {data.get('schema')!r} is not {SCHEMA}")
    rules = Rules(
        data["thresholds"],
        data["causes"],
        data["classes"],
        data.get("spares", {}),
        tuple(_rule(entry) for entry in data["rules"]),
        tuple(Note(_conditions(entry["when"]), entry["reason"]) for entry in data["nothing"]),
        tuple(_experiment(entry) for entry in data["experiments"]),
        tuple(Note(_conditions(entry["unless"]), entry["what"]) for entry in data["collect"]),
    )
    _check(rules)
    return rules


def _rule(entry: Mapping[str, Any]) -> TriageRule:
    try:
        supports, contradicts, excludes = (tuple(entry.get(effect, ())) for effect in EFFECTS)
        weight = float(entry["weight"]) if supports or contradicts else 0.0
        return TriageRule(
            entry["id"],
            _conditions(entry["when"]),
            supports,
            contradicts,
            excludes,
            weight,
            entry["reason"],
            entry["source"],
        )
    except KeyError as error:
        raise BadInputError(f"rules.toml: rule {entry.get('id', entry)!r} has no {error}") from None


def _experiment(entry: Mapping[str, Any]) -> NextExperiment:
    done, needs, unless = (_conditions(entry.get(name, ())) for name in ("done", "needs", "unless"))
    return NextExperiment(
        entry["id"], entry["does"], entry["command"], done, needs, unless, entry["predicts"]
    )


def _conditions(texts: Iterable[str]) -> tuple[FactCondition, ...]:
    return tuple(FactCondition.of(text) for text in texts)


def _check(rules: Rules) -> None:
    known = {*rules.causes, *rules.causes.values(), *rules.classes}
    for rule in rules.rules:
        for name in (*rule.supports, *rule.contradicts, *rule.excludes):
            if name not in known:
                raise BadInputError(
                    f"rules.toml: rule {rule.id!r} names {name!r}, which is no cause, incident or class"
                )
    ids = [rule.id for rule in rules.rules]
    if twice := next((id for id in ids if ids.count(id) > 1), None):
        raise BadInputError(f"rules.toml: two rules are called {twice!r}")
