"""The rule file is checked, and every rule can matter."""

import copy
import tomllib
from importlib import resources

import pytest

from specmortem.errors import BadInputError
from specmortem.tools.triage import rules, signs
from specmortem.tools.triage.facts import Fact, FactBook


def raw():
    return tomllib.loads(
        resources.files("specmortem.tools.triage").joinpath("rules.toml").read_text(encoding="utf-8")
    )


def book(**facts):
    found = FactBook()
    for name, value in facts.items():
        found.add(Fact(name, value, "f", 1, ""))
    return found


@pytest.mark.parametrize(
    "text, holds",
    [
        ("pp", True),
        ("!pp", False),
        ("pp=2|3", True),
        ("pp=4", False),
        ("pp>1", True),
        ("pp<=1", False),
        ("!pp<=1", True),
    ],
)
def test_conditions(text, holds):
    assert (rules.FactCondition.of(text).evidence(book(pp="2")) is not None) is holds


@pytest.mark.parametrize("text", ["", "pp >", "=2", "pp=="])
def test_a_malformed_condition_is_refused(text):
    with pytest.raises(BadInputError, match="is no condition"):
        rules.FactCondition.of(text)


def test_an_unknown_cause_is_refused():
    data = copy.deepcopy(raw())
    data["rules"][0]["supports"] = ["no-such-cause"]
    with pytest.raises(BadInputError, match="no-such-cause"):
        rules.parse(data)


def test_two_rules_of_one_name_are_refused():
    data = copy.deepcopy(raw())
    data["rules"].append(data["rules"][0])
    with pytest.raises(BadInputError, match="two rules"):
        rules.parse(data)


def test_rules_ask_only_for_facts_that_can_be_stated():
    stated = {sign.fact for sign in signs.all_signs().signs} | {
        "spec",
        "environment",
        "runner",
        "symptom",
        "graphs",
        "async",
        "loop_backend",
        "drafter_follows",
    }
    stated |= {f"control.{entry['subject']}" for entry in signs.data()["controls"]}
    loaded = rules.load()
    conditions = [c for rule in loaded.rules for c in rule.when]
    conditions += [c for e in loaded.experiments for c in (*e.done, *e.needs, *e.unless)]
    conditions += [c for note in (*loaded.nothing, *loaded.collect) for c in note.when]
    assert {c.name for c in conditions} <= stated


def test_every_rule_has_one_sentence_and_a_source():
    for rule in rules.load().rules:
        assert rule.reason and rule.source
        assert not rule.reason.endswith(".")
