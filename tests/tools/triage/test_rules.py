"""The rule file is checked, and every rule can matter."""

import copy
import tomllib
from importlib import resources

import pytest

from specmortem import incident
from specmortem.errors import BadInputError
from specmortem.statements import signs
from specmortem.statements.facts import Fact, FactBook
from specmortem.tools.triage import rules
from specmortem.tools.triage.judge import judge


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
    assert (rules.FactCondition(text).evidence(book(pp="2")) is not None) is holds


@pytest.mark.parametrize("text", ["", "pp >", "=2", "pp=="])
def test_a_malformed_condition_is_refused(text):
    with pytest.raises(BadInputError, match="is no condition"):
        rules.FactCondition(text)


def refused(change, match):
    """Parse with one change made to the rules of the package and of an incident, which each is to be refused."""
    theirs = {"causes": ["own-cause"], **raw(), "rules": raw()["rules"][:0]}
    entry = {"id": "a", "when": ["pp"], "supports": ["own-cause"], "weight": 1, "reason": "r", "source": "s"}
    rules.parse(raw(), {"toy": theirs | {"rules": [entry]}})
    for own, incidents in (
        (change(raw()), {}),
        (raw(), {"toy": change(theirs | {"rules": [copy.deepcopy(entry)]})}),
    ):
        with pytest.raises(BadInputError, match=match):
            rules.parse(own, incidents)


def test_an_unknown_cause_is_refused():
    def change(data):
        data["rules"][0]["supports"] = ["no-such-cause"]
        return data

    refused(change, "no-such-cause")


def test_an_unknown_key_and_a_malformed_condition_are_refused_with_their_place():
    def unknown(data):
        data["rules"][0]["weigth"] = 1
        return data

    def malformed(data):
        data["rules"][0]["when"] = ["pp >"]
        return data

    refused(unknown, "rules/0: unknown key 'weigth'")
    refused(malformed, "rules/0/when/0: 'pp >' is no condition")


def test_a_rule_that_weighs_nothing_is_refused():
    def change(data):
        del data["rules"][0]["weight"]
        return data

    refused(change, "has no 'weight'")


def test_a_cause_of_another_incident_is_refused():
    entry = {"id": "a", "when": ["pp"], "supports": ["first"], "weight": 1, "reason": "r", "source": "s"}
    files = {name: {"schema": 1, "causes": [name], "rules": [entry]} for name in ("first", "second")}
    with pytest.raises(BadInputError, match="rules.toml of second: rule 'a' names 'first'"):
        rules.parse(raw(), files)


def test_two_rules_of_one_name_are_refused():
    def change(data):
        data["rules"].append(data["rules"][0])
        return data

    refused(change, "two rules")


def test_an_unknown_schema_is_refused():
    refused(lambda data: data | {"schema": 2}, "schema 2 is not 1")


def test_rules_of_an_incident_outside_the_repository_are_found(tmp_path, monkeypatch):
    home = tmp_path / "outside"
    home.mkdir()
    (home / "rules.toml").write_text(
        'schema = 1\ncauses = ["lost-update"]\n[[rules]]\nid = "torn"\nwhen = ["symptom=nan"]\n'
        'supports = ["outside"]\nweight = 9\nreason = "a torn word"\nsource = "by definition"\n'
        '[predicts.eager]\nlost-update = "clean"\n'
    )
    known = {**incident.all_incidents(), "outside": incident.Incident("outside", "outside", (), folder=home)}
    monkeypatch.setattr(rules, "all_incidents", lambda: known)
    loaded = rules.load()
    assert loaded.causes["lost-update"] == "outside"
    assert next(e for e in loaded.experiments if e.id == "eager").predicts["lost-update"] == "clean"
    found = judge(book(engine="vllm", symptom="nan", pp="1"))
    assert (found.answer, found.cause) == ("outside", "lost-update")


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
    stated |= {f"control.{sign.subject}" for sign in signs.data().controls}
    loaded = rules.load()
    conditions = [c for rule in loaded.rules for c in rule.when]
    conditions += [c for e in loaded.experiments for c in (*e.done, *e.needs, *e.unless)]
    conditions += [c for note in (*loaded.nothing, *loaded.collect) for c in (*note.when, *note.unless)]
    assert {c.name for c in conditions} <= stated


def test_every_rule_has_one_sentence_and_a_source():
    for rule in rules.load().rules:
        assert rule.reason and rule.source
        assert not rule.reason.endswith(".")
