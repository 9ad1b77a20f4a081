"""Rules, read and checked, and what they say about the facts of one case.

Those of an incident stand in the rules.toml beside its incident.toml, also where it lives outside the repository; those
that hold for all, and the classes of defect outside the incidents, in this package's.
"""

from __future__ import annotations

import operator
import re
import tomllib
from collections.abc import Callable, Container, Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

from specmortem.errors import BadInputError
from specmortem.incident import all_incidents
from specmortem.statements.facts import Fact, FactBook

SCHEMA = 1
FILE_NAME = "rules.toml"
EVERY_INCIDENT = "*"
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
class Argument:
    """A rule's word on a candidate, with the facts that it rests on; a negative weight speaks against it."""

    rule: str
    weight: float
    reason: str
    source: str
    facts: tuple[Fact, ...] = ()


@dataclass(frozen=True)
class NextExperiment:
    """One change to make, and what each cause predicts of it; `otherwise` is what anything else does."""

    id: str
    does: str
    command: str
    done: tuple[FactCondition, ...]
    needs: tuple[FactCondition, ...]
    unless: tuple[FactCondition, ...]
    predicts: Mapping[str, str]
    otherwise: str


@dataclass(frozen=True)
class Note:
    """Something to say when conditions hold: what weighs nothing, what is to be collected."""

    when: tuple[FactCondition, ...]
    text: str


@dataclass(frozen=True)
class Rules:
    """All rules, of this package and of every incident; `causes` gives the incident of a cause."""

    thresholds: Mapping[str, float]
    causes: Mapping[str, str]
    classes: Mapping[str, str]
    spares: Mapping[str, list[str]]
    rules: tuple[TriageRule, ...]
    nothing: tuple[Note, ...]
    experiments: tuple[NextExperiment, ...]
    collect: tuple[Note, ...]

    def targets(self, names: Iterable[str]) -> list[str]:
        """Causes and classes that the names stand for; an incident stands for its causes, `*` for all of them."""
        found: list[str] = []
        for name in names:
            found += [cause for cause, slug in self.causes.items() if name in (cause, slug, EVERY_INCIDENT)]
            found += [name] if name in self.classes else []
        return found


def load() -> Rules:
    """The rules of this package and of the incidents that have some. Raises BadInputError for what is wrong in them."""
    homes = {slug: one.home / FILE_NAME for slug, one in all_incidents().items()}
    return _load(tuple((slug, path) for slug, path in homes.items() if path.is_file()))


@cache
def _load(files: tuple[tuple[str, Path], ...]) -> Rules:
    own = resources.files("specmortem.tools.triage").joinpath(FILE_NAME).read_text(encoding="utf-8")
    incidents = {slug: tomllib.loads(path.read_text(encoding="utf-8")) for slug, path in files}
    return parse(tomllib.loads(own), incidents)


def parse(own: Mapping[str, Any], incidents: Mapping[str, Mapping[str, Any]]) -> Rules:
    """Rules from the TOML data of this package and of each incident; BadInputError names the entry that is wrong."""
    classes = own["classes"]
    rules = [
        rule
        for slug, data in incidents.items()
        for rule in _rules(data, slug, {slug, *data["causes"], *classes})
    ]
    rules += _rules(own, "triage", {EVERY_INCIDENT, *classes})
    return Rules(
        own["thresholds"],
        {cause: slug for slug, data in incidents.items() for cause in data["causes"]},
        classes,
        _merged(data.get("spares", {}) for data in incidents.values()),
        tuple(rules),
        tuple(Note(_conditions(entry["when"]), entry["reason"]) for entry in own["nothing"]),
        tuple(_experiment(entry, incidents.values()) for entry in own["experiments"]),
        tuple(Note(_conditions(entry["unless"]), entry["what"]) for entry in own["collect"]),
    )


def _merged(tables: Iterable[Mapping[str, list[str]]]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for table in tables:
        for name, values in table.items():
            found.setdefault(name, []).extend(values)
    return found


def _rules(data: Mapping[str, Any], whose: str, known: Container[str]) -> list[TriageRule]:
    """The rules of one file, which may name what is known to it alone."""
    file = f"{FILE_NAME} of {whose}"
    if data.get("schema") != SCHEMA:
        raise BadInputError(f"{file}: schema {data.get('schema')!r} is not {SCHEMA}")
    found = [_rule(entry, file) for entry in data.get("rules", ())]
    for rule in found:
        for name in (*rule.supports, *rule.contradicts, *rule.excludes):
            if name not in known:
                raise BadInputError(
                    f"{file}: rule {rule.id!r} names {name!r}, which is no cause, incident or class"
                )
    ids = [rule.id for rule in found]
    if twice := next((id for id in ids if ids.count(id) > 1), None):
        raise BadInputError(f"{file}: two rules are called {twice!r}")
    return found


def _rule(entry: Mapping[str, Any], file: str) -> TriageRule:
    try:
        supports, contradicts, excludes = (tuple(entry.get(effect, ())) for effect in EFFECTS)
        weight = float(entry["weight"]) if supports or contradicts else 0.0
        text = (entry["reason"], entry["source"])
        return TriageRule(
            entry["id"], _conditions(entry["when"]), supports, contradicts, excludes, weight, *text
        )
    except KeyError as error:
        raise BadInputError(f"{file}: rule {entry.get('id', entry)!r} has no {error}") from None


def _experiment(entry: Mapping[str, Any], incidents: Iterable[Mapping[str, Any]]) -> NextExperiment:
    done, needs, unless = (_conditions(entry.get(name, ())) for name in ("done", "needs", "unless"))
    told = [data.get("predicts", {}).get(entry["id"], {}) for data in incidents]
    predicts = {cause: text for table in told for cause, text in table.items()}
    head = (entry["id"], entry["does"], entry["command"])
    return NextExperiment(*head, done, needs, unless, predicts, entry["otherwise"])


def _conditions(texts: Iterable[str]) -> tuple[FactCondition, ...]:
    return tuple(FactCondition.of(text) for text in texts)
