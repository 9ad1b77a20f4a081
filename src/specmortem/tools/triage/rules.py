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

from specmortem.convert import Text, Value, build
from specmortem.errors import BadInputError
from specmortem.incident import all_incidents
from specmortem.statements.facts import Fact, FactBook

SCHEMA = 1
FILE_NAME = "rules.toml"
EVERY_INCIDENT = "*"
_CONDITION = re.compile(r"^(?P<not>!?)(?P<name>[a-z_][\w.-]*)(?:(?P<how><=|>=|=|<|>)(?P<value>[\w.|-]+))?$")
_COMPARE: Mapping[str, Callable[[float, float], bool]] = {
    "<": operator.lt,
    ">": operator.gt,
    "<=": operator.le,
    ">=": operator.ge,
}
ENVIRONMENT = ("gpu", "model", "version", "tp", "max_model_len", "running")  # of which one is `environment`


class FactCondition:
    """NAME, NAME=a|b or a comparison of numbers; a leading `!` turns it round. BadInputError for any other text."""

    def __init__(self, text: str) -> None:
        if not (match := _CONDITION.match(text)):
            raise BadInputError(f"{text!r} is no condition such as 'pp>1', 'fault=oom|ecc' or '!method'")
        self.name, self.how, self.value = match["name"], match["how"] or "", match["value"] or ""
        self.denied = bool(match["not"])

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


class TriageRule(Value, frozen=True):
    """What some facts say about some causes, incidents or other classes."""

    id: Text
    when: tuple[FactCondition, ...]
    reason: Text
    source: Text
    supports: tuple[str, ...] = ()
    contradicts: tuple[str, ...] = ()
    excludes: tuple[str, ...] = ()
    weight: float = 0.0  # only what excludes has none


@dataclass(frozen=True)
class Argument:
    """A rule's word on a candidate, with the facts that it rests on; a negative weight speaks against it."""

    rule: str
    weight: float
    reason: str
    source: str
    facts: tuple[Fact, ...] = ()


class NextExperiment(Value, frozen=True):
    """One change to make, and what each cause predicts of it; `otherwise` is what anything else does."""

    id: Text
    does: Text
    command: Text
    otherwise: Text
    done: tuple[FactCondition, ...] = ()
    needs: tuple[FactCondition, ...] = ()
    unless: tuple[FactCondition, ...] = ()
    predicts: Mapping[str, str] = {}


class Note(Value, frozen=True):
    """Something to say: what weighs nothing, when all of it holds; what is to be collected, unless any of it does."""

    text: Text
    when: tuple[FactCondition, ...] = ()
    unless: tuple[FactCondition, ...] = ()


class RuleFile(Value, frozen=True):
    """A rules.toml: an incident's has its causes and what they spare and predict, this package's has the rest."""

    schema: int
    rules: tuple[TriageRule, ...] = ()
    causes: tuple[str, ...] = ()
    spares: Mapping[str, list[str]] = {}
    predicts: Mapping[str, Mapping[str, str]] = {}
    thresholds: Mapping[str, float] = {}
    classes: Mapping[str, str] = {}
    nothing: tuple[Note, ...] = ()
    experiments: tuple[NextExperiment, ...] = ()
    collect: tuple[Note, ...] = ()


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
    common, files = _file(own, "triage"), {slug: _file(data, slug) for slug, data in incidents.items()}
    for slug, file in files.items():
        _check(file, slug, {slug, *file.causes, *common.classes})
    _check(common, "triage", {EVERY_INCIDENT, *common.classes})
    spares: dict[str, list[str]] = {}
    for file in files.values():
        for name, causes in file.spares.items():
            spares.setdefault(name, []).extend(causes)
    return Rules(
        common.thresholds,
        {cause: slug for slug, file in files.items() for cause in file.causes},
        common.classes,
        spares,
        tuple(rule for file in (*files.values(), common) for rule in file.rules),
        common.nothing,
        tuple(_predicted(experiment, files.values()) for experiment in common.experiments),
        common.collect,
    )


def _file(data: Mapping[str, Any], whose: str) -> RuleFile:
    name = f"{FILE_NAME} of {whose}"
    if data.get("schema") != SCHEMA:
        raise BadInputError(f"{name}: schema {data.get('schema')!r} is not {SCHEMA}")
    return build(RuleFile, data, lambda path: f"{name}: {'/'.join(map(str, path))}")


def _check(file: RuleFile, whose: str, known: Container[str]) -> None:
    """Refuse rules that share a name, lack a weight, or name what is not `known` to their file."""
    where = f"{FILE_NAME} of {whose}"
    for rule in file.rules:
        if not rule.weight and (rule.supports or rule.contradicts):
            raise BadInputError(f"{where}: rule {rule.id!r} has no 'weight'")
        for name in (*rule.supports, *rule.contradicts, *rule.excludes):
            if name not in known:
                raise BadInputError(
                    f"{where}: rule {rule.id!r} names {name!r}, which is no cause, incident or class"
                )
    ids = [rule.id for rule in file.rules]
    if twice := next((id for id in ids if ids.count(id) > 1), None):
        raise BadInputError(f"{where}: two rules are called {twice!r}")


def _predicted(experiment: NextExperiment, files: Iterable[RuleFile]) -> NextExperiment:
    told = [file.predicts.get(experiment.id, {}) for file in files]
    return experiment.replace(predicts={cause: text for table in told for cause, text in table.items()})
