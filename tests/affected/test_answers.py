"""Answers for a launch: how causes, chains and links decide, and that less knowledge never removes exposure."""

import functools
from dataclasses import replace
from types import MappingProxyType

import pytest
from affected import home
from affected.launches import FIELDS, RELEASES, configs
from hypothesis import given, settings
from hypothesis import strategies as st

from specmortem.affected import answers
from specmortem.affected.answers import answer, joint, of_release
from specmortem.affected.released import KnownVerdict
from specmortem.exposure import Condition, Config, Rule
from specmortem.incident import Incident, Probe, rules

YES, NO, ASK = (Rule((Condition("x", lambda config, held=held: held),)) for held in (True, False, None))
STATUSES = ("fault", "clean", "not-present", "not-judged")


def toy(monkeypatch, exposure, probes=(), slug="toy"):
    """The registry holds one incident with these rules."""
    found = {slug: Incident(slug, "toy", tuple(probes), exposure)}
    monkeypatch.setattr(answers, "all_incidents", lambda: found)
    monkeypatch.setattr(answers, "rules", lambda: exposure)
    return functools.partial(_judged, slug)


def _judged(slug, **statuses):
    def verdicts(cause):
        return KnownVerdict(statuses.get(cause, "not-judged"), "a test")

    [found] = answer(Config(), verdicts).incidents
    assert found.incident == slug
    return found


@pytest.mark.parametrize(
    ("given", "found"),
    [
        ((), "not-affected"),
        (("not-affected", "not-affected"), "not-affected"),
        (("not-affected", "unknown"), "unknown"),
        (("unknown", "affected", "not-affected"), "affected"),
    ],
)
def test_the_worst_answer_is_that_of_all(given, found):
    assert joint(given) == found


@pytest.mark.parametrize("status", STATUSES)
@pytest.mark.parametrize(
    ("rule", "reach"), [(YES, "yes"), (NO, "no"), (ASK, "unknown")], ids=["yes", "no", "unknown"]
)
def test_a_cause_is_affected_only_where_it_faults_and_is_reached(monkeypatch, status, rule, reach):
    judged = toy(monkeypatch, {"cause": rule})(cause=status)
    expected = {
        ("yes", "fault"): "affected",
        ("yes", "not-judged"): "unknown",
        ("unknown", "fault"): "unknown",
        ("unknown", "not-judged"): "unknown",
    }
    assert judged.answer == expected.get((reach, status), "not-affected")
    assert [each.cause for each in judged.deciding] == ["cause"] * (judged.answer != "not-affected")


@pytest.mark.parametrize("effect", ["link", "unseen"])
@pytest.mark.parametrize("status", STATUSES)
@pytest.mark.parametrize("rule", [YES, ASK])
def test_links_and_what_nothing_reaches_never_decide(monkeypatch, effect, status, rule):
    exposure = {"cause": NO, "other": replace(rule, effect=effect)}
    judged = toy(monkeypatch, exposure)(cause="fault", other=status)
    assert (judged.answer, judged.deciding) == ("not-affected", ())
    assert [each.cause for each in judged.others] == ["other"]
    assert judged.others[0].reached == (status == "fault" and rule is YES)


def chain(monkeypatch, rule=YES, **links):
    """A chain of two groups, the first of which has two links."""
    parts = {name: replace(each, effect="link") for name, each in links.items()}
    whole = replace(rule, links=(("a", "b"), ("c",)))
    return toy(monkeypatch, {"whole": whole, "a": YES, "b": YES, "c": YES} | parts | {"whole": whole})


@pytest.mark.parametrize(
    ("a", "b", "c", "verdict"),
    [
        ("fault", "clean", "fault", "fault"),  # one of a group suffices
        ("clean", "fault", "fault", "fault"),
        ("fault", "not-judged", "fault", "fault"),
        ("fault", "fault", "clean", "clean"),  # a group that is clean breaks it
        ("clean", "not-present", "fault", "clean"),
        ("clean", "clean", "not-judged", "clean"),
        ("not-judged", "not-judged", "clean", "clean"),
        ("fault", "fault", "not-judged", "not-judged"),
        ("clean", "not-judged", "fault", "not-judged"),  # the other one of the group may be at fault
        ("not-judged", "not-judged", "not-judged", "not-judged"),
    ],
)
def test_a_chain_is_at_fault_where_each_group_is(monkeypatch, a, b, c, verdict):
    judged = chain(monkeypatch, a=YES, b=YES, c=YES)(a=a, b=b, c=c)
    [whole] = judged.causes
    assert (whole.verdict.status, whole.verdict.source) == (verdict, answers.OF_CHAINS)
    assert judged.answer == {"fault": "affected", "clean": "not-affected", "not-judged": "unknown"}[verdict]


@pytest.mark.parametrize(
    ("a", "b", "c", "verdict"),
    [
        (NO, NO, YES, "clean"),
        (NO, YES, YES, "fault"),
        (NO, ASK, YES, "not-judged"),
        (YES, YES, NO, "clean"),
        (YES, YES, ASK, "not-judged"),
    ],
)
def test_a_link_that_is_not_reached_breaks_a_chain(monkeypatch, a, b, c, verdict):
    judged = chain(monkeypatch, a=a, b=b, c=c)(a="fault", b="fault", c="fault")
    assert judged.causes[0].verdict.status == verdict


@pytest.mark.parametrize(("rule", "found"), [(YES, "affected"), (NO, "not-affected"), (ASK, "unknown")])
def test_a_chain_has_conditions_of_its_own(monkeypatch, rule, found):
    links = dict.fromkeys("abc", YES)
    assert chain(monkeypatch, rule, **links)(a="fault", b="clean", c="fault").answer == found


def test_a_cause_without_a_rule_is_unknown_unless_its_probe_is_clean(monkeypatch):
    judged = toy(monkeypatch, {}, [Probe("bare", "no rule", (), ())])
    assert judged(bare="fault").answer == judged().answer == "unknown"
    assert "a rule for it" in judged(bare="fault").deciding[0].why
    assert judged(bare="clean").answer == "not-affected"


def test_an_incident_of_which_nothing_is_said_is_unknown(monkeypatch):
    assert toy(monkeypatch, {})().answer == "unknown"


def test_only_the_incidents_asked_for_are_answered(monkeypatch):
    toy(monkeypatch, {"cause": YES})
    assert answer(Config(), incidents=["toy"]).answer == "unknown"
    assert answer(Config(), incidents=[]).incidents == ()


def test_verdicts_are_those_of_the_release_of_the_launch():
    known = of_release("0.28.0")("stale-count-align")
    assert known.status == "fault"
    assert (
        answer(Config(version="0.28.0")).incidents
        == answer(Config(version="0.28.0"), of_release("0.28.0")).incidents
    )


NEW = """
from pathlib import Path
from specmortem.exposure import {rule}, Rule
from specmortem.incident import Incident, Probe

PROBES = (Probe("own-cause-{name}", "mine", (), ()),)
INCIDENT = Incident("own-{name}", __name__, PROBES, {exposure}, folder=Path(__file__).parent)
"""
ASKED = """
from specmortem.affected import matrix, screen
from specmortem.affected.answers import answer
from specmortem.affected.targets import advise
from specmortem.statements.launch import parse

launch = parse("vllm serve Qwen/Qwen3.5-27B --max-num-seqs 1 --speculative-config.method mtp vllm==0.28.0")
found = answer(launch)
print(*(f"{one.incident}={one.answer}" for one in found.incidents if one.incident.startswith("own-")))
print(advise(launch).move.release, screen.safest().safe)
print(matrix.as_csv().count("own-"), screen.exposure("own-bare").affected or "nothing")
"""


@pytest.fixture(scope="module")
def own_incidents(tmp_path_factory):
    """Folders as `specmortem new` makes them, with facts that are not read here."""
    folder = tmp_path_factory.mktemp("own")
    for name, rule, exposure in [
        ("reached", "SPECULATION", '{"own-cause-reached": Rule((SPECULATION,))}'),
        ("asked", "NEVER_SEEN", '{"own-cause-asked": Rule((NEVER_SEEN,))}'),
        ("bare", "V1", "{}"),
        ("elsewhere", "DFLASH", '{"own-cause-elsewhere": Rule((DFLASH,))}'),
    ]:
        package = folder / f"own_{name}"
        package.mkdir()
        (package / "incident.toml").touch()
        (package / "__init__.py").write_text(NEW.format(rule=rule, name=name, exposure=exposure))
    return folder


def test_an_incident_of_ones_own_without_a_verdict_is_unknown_and_has_no_say_elsewhere(
    own_incidents, monkeypatch
):
    monkeypatch.setenv("SPECMORTEM_INCIDENTS", str(own_incidents))
    done = home.call(home.ROOT, ASKED)
    assert done.stderr == ""
    told = done.stdout.splitlines()
    assert told[0].split() == [
        "own-asked=unknown",
        "own-bare=unknown",
        "own-elsewhere=not-affected",
        "own-reached=unknown",
    ]
    monkeypatch.delenv("SPECMORTEM_INCIDENTS")
    assert told[1] == home.call(home.ROOT, ASKED).stdout.splitlines()[1]
    assert told[2] == "0 nothing"


def worse_or_equal(before, after):
    """Incidents that were affected or unknown, and are not any more."""
    return [
        (one.incident, one.answer, [cause.why for cause in other.causes])
        for one, other in zip(before.incidents, after.incidents, strict=True)
        if one.answer != "not-affected" and other.answer == "not-affected"
    ]


@settings(max_examples=300, deadline=None)
@given(config=configs(), blanked=st.sets(st.sampled_from(FIELDS)))
def test_what_is_not_known_never_removes_exposure(config, blanked):
    """Of a launch that is not known whole, each field that is taken away leaves exposure as it was, or adds to it."""
    empty = Config()
    fewer = replace(config, complete=False, **{name: getattr(empty, name) for name in blanked})
    assert worse_or_equal(answer(config), answer(fewer)) == []


@settings(max_examples=300, deadline=None)
@given(config=configs(), told=st.sets(st.sampled_from([name for name in FIELDS if name != "version"])))
def test_what_only_a_sentence_says_never_removes_exposure(config, told):
    """With its fields in prose a launch has the exposure that it has without them, or more.

    The release is another matter: the reader takes a launch for each one that a text names.
    """
    empty = Config()
    without = replace(config, **{name: getattr(empty, name) for name in told})
    assert worse_or_equal(answer(without), answer(replace(config, prose=frozenset(told)))) == []


@settings(max_examples=300, deadline=None)
@given(config=configs(), release=st.sampled_from([*RELEASES, "", "0.21.1", "0.34.0", "main"]))
def test_a_release_that_was_not_judged_is_never_not_affected_by_a_cause_it_may_reach(config, release):
    found = answer(replace(config, version=release))
    for one in found.incidents:
        for cause in one.causes:
            if cause.reach.reachable != "no" and release not in RELEASES and not cause.rule.links:
                assert cause.answer == "unknown"
        assert one.answer == joint(cause.answer for cause in one.causes)


@settings(max_examples=200, deadline=None)
@given(config=configs(), cause=st.sampled_from(sorted(rules())))
def test_a_verdict_that_is_taken_away_never_removes_exposure(config, cause):
    known = of_release(config.version)
    taken = functools.partial(_without, known, cause)
    assert worse_or_equal(answer(config), answer(config, taken)) == []


def _without(known, cause, asked):
    return KnownVerdict("not-judged", "taken away") if asked == cause else known(asked)


def test_the_invariant_fires_where_a_blank_field_is_taken_for_a_default(monkeypatch):
    """A rule that reads a field that is not known as its default is caught by the comparison above."""
    careless = Rule((Condition("x", lambda config: bool(config.async_scheduling)),))
    exposure = MappingProxyType({"cause": careless})
    toy(monkeypatch, exposure)

    def fault(cause):
        return KnownVerdict("fault", "a test")

    known, blank = answer(Config(async_scheduling=True), fault), answer(Config(), fault)
    assert [name for name, *_ in worse_or_equal(known, blank)] == ["toy"]
