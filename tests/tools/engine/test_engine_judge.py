"""What is wrong with an answer, counted once and only where it is."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tools.engine.engine_helpers import run, tables

from specmortem.tools.engine import campaign, judge, result

TOKENS = st.lists(st.integers(0, 5), max_size=40)


def total(arm, name):
    """A count over the runs of an arm."""
    return sum(getattr(each.counts, name) for each in arm.runs)


def kept(arm):
    return [request for each in arm.runs for request in each.kept]


def damage(tmp_path, **cue):
    """Over the 50 requests of an arm: early, loops, and where wrong ones are so."""
    arm = run(tmp_path, tables(broken=cue), ["broken"]).arm("broken")
    assert total(arm, "ended") == total(arm, "judged") == 50
    places = [request.wrong_at for request in kept(arm) if request.wrong_at is not None]
    assert len(places) == total(arm, "wrong")
    return total(arm, "early"), total(arm, "ends_in_loop"), places


def test_a_wrong_token_is_counted_where_it_is(tmp_path):
    assert damage(tmp_path, fault="wrong", every=5) == (0, 0, [3] * 10)


def test_a_loop_is_a_loop_and_wrong_from_its_first_token(tmp_path):
    early, loops, wrong = damage(tmp_path, fault="loop", every=10)
    assert (early, loops) == (0, 5) and set(wrong) == {2}


def test_an_early_end_is_told_and_its_eos_is_wrong(tmp_path):
    assert damage(tmp_path, fault="early", every=2) == (25, 0, [4] * 25)


def test_where_eos_is_ignored_the_engine_is_not_told_to_stop_at_it(tmp_path):
    data = tables(broken={"fault": "early", "every": 2})
    data["workloads"]["small"]["ignore_eos"] = True
    arm = run(tmp_path, data, ["broken"]).arm("broken")
    assert [request.finish for request in kept(arm)] == ["length"] * 25


def test_a_sound_engine_shows_nothing(tmp_path):
    assert damage(tmp_path, at=1) == (0, 0, [])


def test_unlike_the_engine_without_speculation_is_told_apart_from_wrong(tmp_path):
    cue = {"fault": "wrong", "every": 5}
    data = tables(both=cue, only={**cue, "speculating": True})
    data["arms"] += [
        {
            "name": f"plain-{name}",
            "set": dict(data["arms"][at]["set"]),
            "without": ["engine.speculative_config"],
        }
        for at, name in ((2, "both"), (3, "only"))
    ]
    for at, name in ((2, "both"), (3, "only")):
        data["arms"][at]["reference"] = f"plain-{name}"
    results = run(tmp_path, data, ["both", "plain-both", "only", "plain-only"])
    found = {}
    for name in ("both", "only"):
        arm = results.arm(name)
        counted = tuple(total(arm, each) for each in ("wrong", "compared", "differs"))
        found[name] = (*counted, {r.plain_at for r in kept(arm)})
    assert found == {"both": (10, 50, 0, {None}), "only": (10, 50, 10, {3})}


def test_a_request_that_is_wrong_without_speculation_only_is_kept_as_unlike_it(tmp_path):
    data = tables(sound2={"at": 1})
    data["arms"][0]["reference"] = "plain"
    data["arms"][1]["set"] = {}
    arm = run(tmp_path, data, ["sound", "plain"])
    assert total(arm.arm("sound"), "compared") == 50 and kept(arm.arm("sound")) == []
    asked = {"0-000": {"prompt": [1], "max_tokens": 4}, "0-001": {"prompt": [1], "max_tokens": 4}}
    answers = dict.fromkeys(asked, (1, 2, 3, 4))
    empty = result.Run(0, 0, True, "whole", "value", result.Counts())
    requests = [
        [campaign.judged(id, asked[id], tokens, "length", answers[id]) for id, tokens in given.items()]
        for given in (
            {"0-000": [1, 2, 3, 4], "0-001": [1, 2, 3, 4]},
            {"0-000": [1, 9, 9, 9], "0-001": [1, 2, 3, 4]},
        )
    ]
    mine, plain = (campaign.with_requests(empty, given, every=True) for given in requests)
    found = campaign.beside(mine, plain, asked, answers)
    assert [(r.id, r.plain, r.plain_at, r.damaged) for r in found.kept] == [("0-000", "differs", 1, False)]
    assert (found.counts.compared, found.counts.differs) == (2, 1)


def test_what_is_sampled_is_neither_judged_nor_kept(tmp_path):
    data = tables(broken={"fault": "wrong"})
    data["workloads"]["small"]["temperature"] = 0.7
    arm = run(tmp_path, data, ["broken"]).arm("broken")
    assert (total(arm, "ended"), total(arm, "judged"), total(arm, "wrong"), kept(arm)) == (50, 0, 0, [])
    data["workloads"]["small"]["temperature"] = 0.0
    arm = run(tmp_path, data, ["broken"]).arm("broken")
    assert (total(arm, "judged"), total(arm, "wrong")) == (50, 50)


@pytest.mark.parametrize(
    ("mine", "other", "finish", "likeness"),
    [
        ([1, 2, 3], [1, 2, 3], "length", ("same", None)),
        ([1, 2], [1, 2, 3], "length", ("differs", 2)),
        ([1, 2, 3], [1, 2], "length", ("differs", 2)),
        ([1, 2], [1, 2, 3], "abort", ("same", None)),
        ([1, 7], [1, 2, 3], "abort", ("differs", 1)),
        ([], [1, 2, 3], "abort", ("not-compared", None)),
        ([], [1, 2, 3], "length", ("differs", 0)),
    ],
)
def test_a_request_is_like_the_plain_one_as_far_as_both_were_let_go(mine, other, finish, likeness):
    asked, answer = {"prompt": [1], "max_tokens": 3}, [1, 2, 3]
    left, right = (
        campaign.judged("0-000", asked, tokens, end, answer)
        for tokens, end in ((mine, finish), (other, "length"))
    )
    found = campaign._beside(left, right, answer)
    assert (found.plain, found.plain_at) == likeness


def test_without_a_reference_nothing_is_compared(tmp_path):
    arm = run(tmp_path, tables(), ["sound"]).arm("sound")
    assert (total(arm, "ended"), total(arm, "compared")) == (50, 0)


def test_without_an_answer_nothing_is_judged_and_nothing_kept(tmp_path):
    data = tables(broken={"fault": "wrong"})
    del data["model"]["tasks"]
    arm = run(tmp_path, data, ["broken"]).arm("broken")
    assert (total(arm, "ended"), total(arm, "judged"), kept(arm)) == (50, 0, [])


def test_without_an_answer_tokens_are_kept_where_arms_are_compared(tmp_path):
    cue = {"fault": "wrong", "every": 5, "speculating": True}
    data = tables(broken=cue)
    del data["model"]["tasks"]
    data["arms"][2]["reference"] = "plain-broken"
    plain = {"name": "plain-broken", "set": dict(data["arms"][2]["set"])}
    data["arms"].append(plain | {"without": ["engine.speculative_config"]})
    results = run(tmp_path, data, ["broken", "plain-broken"])
    arm = results.arm("broken")
    assert (total(arm, "judged"), total(arm, "compared"), total(arm, "differs")) == (0, 50, 10)
    assert all(len(r.got) == r.tokens > 0 for r in kept(results.arm("plain-broken")))


@given(TOKENS, TOKENS)
def test_tokens_come_back_from_what_is_kept(tokens, answer):
    asked = {"prompt": [1, 2], "max_tokens": 40}
    request = campaign.judged("0-000", asked, tokens, "length", answer)
    assert campaign.tokens_of(request, answer) == tuple(tokens)
    assert campaign.tokens_of(campaign.judged("0-000", asked, tokens, "length", None), None) == tuple(tokens)


@given(TOKENS, TOKENS)
def test_wrong_at_is_the_first_token_that_is_not_the_answers(tokens, answer):
    at = judge.wrong_at(tokens, answer)
    if at is None:
        assert tokens == answer[: len(tokens)]
    else:
        assert tokens[:at] == answer[:at]
        assert at >= len(answer) or tokens[at] != answer[at]


@pytest.mark.parametrize(
    ("tokens", "unit"),
    [
        ([9, 8, 7] + [5] * 12, 1),
        ([9, 8, 7] + [5] * 11, 0),
        ([1, 2, 3] * 4, 3),
        ([1, 2, 3] * 3 + [1, 2], 0),
        ([1, 2, 3, 4, 5] * 4, 5),
        ([1, 2, 3, 4, 5] * 3, 0),
        ([5] * 30 + [1, 2, 3], 0),
        (list(range(17)) * 5, 0),
        ([], 0),
    ],
)
def test_a_loop_has_four_units_and_twelve_tokens_at_the_end(tokens, unit):
    assert judge.loop_at_end(tokens) == unit


def test_a_loop_that_the_answer_has_too_is_none():
    answer = [1, 2, 3] * 8
    assert not judge.ends_in_loop(answer[:15], answer)
    assert judge.ends_in_loop([1, 2, 3] * 5, [1, 2, 3, 4] * 5) is True


ENDS = st.tuples(TOKENS, st.sampled_from(["length", "stop", "abort", "error"]))


@given(st.lists(ENDS, max_size=6), st.lists(TOKENS.filter(lambda t: len(t) > 20), min_size=6, max_size=6))
def test_all_requests_come_back_from_those_kept(ends, answers):
    """Where what came is the answer's start nothing is kept, and yet all can be had again."""
    asked = {f"0-{n:03d}": {"prompt": [1], "max_tokens": len(a)} for n, a in enumerate(answers)}
    known = dict(zip(asked, map(tuple, answers), strict=True))
    requests = []
    for id, (tokens, finish) in zip(asked, ends, strict=False):
        answer = list(known[id])
        came = answer if finish == "length" and len(tokens) % 2 else answer[: len(tokens)] or tokens
        requests.append(campaign.judged(id, asked[id], came, finish, known[id]))
    lost = tuple(id for id in asked if id not in {request.id for request in requests})
    bare = result.Run(0, 0, True, "whole", "value", result.Counts(), lost=lost)
    run = campaign.with_requests(bare, requests, every=False)
    again = campaign.requests_of(run, asked, known)
    assert set(again) == {request.id for request in requests}
    for request in requests:
        both = [campaign.tokens_of(r, known[request.id]) for r in (request, again[request.id])]
        assert both[0] == both[1]


def test_an_early_end_takes_a_stop():
    assert judge.ends_early([1, 2], [1, 2, 3], "stop")
    assert not judge.ends_early([1, 2], [1, 2, 3], "abort")
    assert not judge.ends_early([1, 2, 3], [1, 2, 3], "stop")


def test_the_99th_percentile_is_interpolated():
    assert campaign.p99([float(n) for n in range(101)]) == 99
    assert campaign.p99([7.0]) == 7
