"""A real server process that misbehaves on cue: each misbehaviour is detected, once, and health stays silent."""

from collections import Counter

import pytest

from specmortem.tools.load.outcome import Outcome
from specmortem.tools.load.result import Sign, Status

from .servers import drive, running, settings

STREAMED = [
    ("500", Outcome.SERVER_ERROR, "HTTP 500: it went wrong"),
    ("503", Outcome.SERVER_ERROR, "HTTP 503"),
    ("error_event", Outcome.SERVER_ERROR, "EngineCore encountered"),
    ("400", Outcome.REFUSED, "HTTP 400"),
    ("429", Outcome.REFUSED, "HTTP 429"),
    ("204", Outcome.GARBAGE, "HTTP 204"),
    ("drop", Outcome.DROPPED, "disconnected"),
    ("no_done", Outcome.CUT, "ended without [DONE]"),
    ("no_finish", Outcome.CUT, "ended without finish_reason"),
    ("half", Outcome.CUT, "incomplete chunked read"),
    ("garbage", Outcome.GARBAGE, "not JSON"),
    ("garbage_line", Outcome.GARBAGE, "no event field: <html>"),
    ("not_utf8", Outcome.GARBAGE, "not UTF-8"),
    ("deep", Outcome.GARBAGE, "not JSON"),
    ("not_a_stream", Outcome.GARBAGE, "got application/json"),
    ("huge", Outcome.TOO_LARGE, "more than 200000 bytes"),
    ("huge_line", Outcome.TOO_LARGE, "more than 200000 bytes"),
    ("501", Outcome.SERVER_ERROR, "HTTP 501"),
    ("loop", Outcome.LOOP, "'duct' 60 times"),
    ("repetition", Outcome.LOOP, "the server saw a loop"),
    ("early", Outcome.EARLY_EOS, "stop after 3 tokens; the others' median is 100"),
    ("empty", Outcome.EARLY_EOS, "stop without any text"),
]
WHOLE_BODIES = [
    ("500", Outcome.SERVER_ERROR, "HTTP 500"),
    ("drop", Outcome.DROPPED, "disconnected"),
    ("no_finish", Outcome.CUT, "ended without finish_reason"),
    ("half", Outcome.CUT, "peer closed"),
    ("not_a_stream", Outcome.GARBAGE, "without choices"),
    ("loop", Outcome.LOOP, "'duct' 60 times"),
    ("early", Outcome.EARLY_EOS, "stop after 3 tokens"),
    ("empty", Outcome.EARLY_EOS, "stop without any text"),
]
CASES = [(*case, True) for case in STREAMED] + [(*case, False) for case in WHOLE_BODIES]


@pytest.mark.parametrize("behaviour, outcome, said, stream", CASES)
def test_one_misbehaviour_among_healthy_answers(behaviour, outcome, said, stream):
    with running(requests={"3": behaviour}) as server:
        found = drive(settings(server.url, shape={"stream": stream}, limits={"response_bytes": 200_000}))
        posts = server.seen()["posts"]
    assert found.counts == {Outcome.OK: 12, outcome: 1}
    assert [(f.kind, len(f.requests)) for f in found.findings] == [(outcome, 1)]
    assert said in found.findings[0].said
    assert found.status is Status.FINISHED and not found.clean
    assert len(posts) == 13, "each request is sent exactly once"


@pytest.mark.parametrize("behaviour", ["ok", "slow", "no_usage"])
@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("api", ["chat", "completions"])
def test_silent_on_the_healthy_twin(behaviour, stream, api):
    made = {"shape": {"stream": stream}, "api": api, "check": True}
    with running(default=behaviour) as server:
        found = drive(settings(server.url, **made))
    assert found.clean, found.findings
    assert found.counts == {Outcome.OK: 13}
    assert bool(found.notes) is (behaviour == "no_usage")


def test_every_misbehaviour_in_one_run_is_counted_once():
    cues = {str(5 + 2 * i): name for i, (name, *_) in enumerate(STREAMED)}
    expected = Counter(outcome for _, outcome, _ in STREAMED)
    sent = 5 + 2 * len(STREAMED) + 40
    with running(requests=cues) as server:
        shape = {"concurrency": (8,), "requests": sent - 1}
        found = drive(settings(server.url, shape=shape, limits={"response_bytes": 200_000}))
        assert len(server.seen()["posts"]) == sent
    assert found.counts == {**expected, Outcome.OK: sent - len(STREAMED)}
    listed = [id for finding in found.findings for id in finding.requests]
    assert len(listed) == len(set(listed)) == len(STREAMED)


def test_hangs_before_and_within_an_answer():
    with running(requests={"2": "hang", "3": "hang_midway"}) as server:
        found = drive(settings(server.url, limits={"idle_s": 2.0, "first_byte_s": 2.0}))
    assert found.counts == {Outcome.OK: 11, Outcome.HUNG: 2}


def test_an_answer_that_never_ends_is_overtime_though_bytes_keep_coming():
    with running(requests={"2": "drip"}) as server:
        found = drive(settings(server.url, shape={"request_s": 2.0}))
    assert found.counts == {Outcome.OK: 12, Outcome.OVERTIME: 1}


def test_a_redirect_is_not_followed():
    with running() as other, running(requests={"4": "redirect"}, elsewhere=other.url) as server:
        found = drive(settings(server.url))
        assert other.seen()["posts"] == other.seen()["other"] == []
    assert found.counts == {Outcome.OK: 12, Outcome.REDIRECTED: 1}
    assert other.url in found.findings[0].said


def test_death_in_the_middle_ends_the_run():
    with running(requests={"6": "die"}) as server:
        found = drive(settings(server.url, shape={"requests": 50}))
    assert found.status is Status.SERVER_DEAD
    assert found.signs[0].kind == Sign.SERVER_DEAD
    assert found.counts[Outcome.CUT] >= 1
    assert sum(found.counts.values()) == len(found.requests) < 51
    assert not set(found.counts) - {Outcome.OK, Outcome.CUT, Outcome.DROPPED, Outcome.UNREACHABLE}


def test_a_dead_engine_behind_a_living_server_ends_the_run():
    with running(requests={"6": "engine_dead"}) as server:
        found = drive(settings(server.url, shape={"requests": 200}))
    assert found.status is Status.SERVER_DEAD
    assert "/health says 503" in found.signs[0].said
    assert found.counts[Outcome.SERVER_ERROR] == 1
    assert len(found.requests) < 201


def test_a_500_alone_is_no_death():
    with running(default="500", requests={"0": "ok"}) as server:
        found = drive(settings(server.url))
    assert found.status is Status.FINISHED
    assert found.counts == {Outcome.OK: 1, Outcome.SERVER_ERROR: 12}
    assert not found.signs


def test_a_server_that_dies_after_the_last_answer():
    with running(requests={"12": "engine_dead"}) as server:
        found = drive(settings(server.url))
    assert (found.status, len(found.requests)) == (Status.SERVER_DEAD, 13)


def test_a_warm_up_that_fails_ends_the_run():
    with running(requests={"0": "400"}) as server:
        found = drive(settings(server.url))
    assert found.status is Status.WARM_UP_FAILED
    assert found.counts == {Outcome.REFUSED: 1}


@pytest.mark.parametrize("demand", [{"ignore_eos": True}, {"min_tokens": 50}])
def test_an_early_end_where_a_length_was_demanded(demand):
    with running(requests={"1": "early"}) as server:
        found = drive(settings(server.url, shape={"requests": 2}, **demand))
        body = server.seen()["bodies"][0]
    assert found.counts == {Outcome.OK: 2, Outcome.EARLY_EOS: 1}
    assert body.items() >= demand.items()


def test_a_wrong_answer_where_the_model_can_recall():
    with running(requests={"5": "wrong"}) as server:
        assert drive(settings(server.url)).clean, "without --check nothing is recalled"
    with running(requests={"5": "wrong"}) as server:
        found = drive(settings(server.url, check=True))
    assert found.counts == {Outcome.OK: 12, Outcome.WRONG: 1}


def test_a_model_that_cannot_recall_alone_is_not_judged():
    with running(default="wrong") as server:
        found = drive(settings(server.url, check=True))
    assert found.counts == {Outcome.OK: 13}
    assert found.not_judged and not found.clean


@pytest.mark.parametrize(
    "kind, signs",
    [
        ("collapse", [Sign.ACCEPTANCE_COLLAPSE]),
        ("nothing", [Sign.ACCEPTANCE_COLLAPSE]),
        ("restart", [Sign.SERVER_RESTARTED]),
        ("healthy", []),
    ],
)
def test_acceptance_over_time(kind, signs):
    with running(metrics=kind, requests={"1": "wait_for_scrapes"}) as server:
        found = drive(settings(server.url, shape={"concurrency": (1,)}, metrics_s=0.02))
    assert [sign.kind for sign in found.signs] == signs
    assert found.counts == {Outcome.OK: 13}
    assert found.acceptance.offered and len(found.acceptance.windows) >= 9
    assert found.acceptance.windows[0].rate == pytest.approx(0 if kind == "nothing" else 0.6)
    assert found.acceptance.windows[0].per_position == pytest.approx([found.acceptance.windows[0].rate] * 3)


def test_metrics_that_are_not_offered():
    with running() as server:
        found = drive(settings(server.url, metrics_s=0.02))
    assert found.clean and not found.acceptance.offered


def test_limits_on_count_and_time():
    with running() as server:
        found = drive(settings(server.url, limits={"requests": 5}))
        assert (found.status, found.clean, len(server.seen()["posts"])) == (Status.COUNT_LIMIT, True, 5)
    with running(default="hang", requests={"0": "ok"}) as server:
        found = drive(settings(server.url, limits={"run_s": 2.0}))
    assert (found.status, found.clean) == (Status.TIME_LIMIT, False)
    assert found.counts == {Outcome.OK: 1, Outcome.INTERRUPTED: 4}


def test_no_more_at_once_than_allowed():
    with running(default="hang", requests={"0": "ok"}) as server:
        drive(settings(server.url, shape={"concurrency": (3,)}, limits={"run_s": 2.0}))
        assert len(server.seen()["posts"]) == 1 + 3


def test_what_is_sent():
    with running() as server:
        drive(settings(server.url, model="a-model"))
        seen = server.seen()
    body, headers = seen["bodies"][1], seen["headers"][1]
    assert body["model"] == "a-model" and body["max_tokens"] == 100 and body["stream"] is True
    assert "ignore_eos" not in body and "min_tokens" not in body
    assert headers["accept-encoding"] == "identity" and "authorization" not in headers
    prompts = [body["messages"][0]["content"] for body in seen["bodies"]]
    assert len(set(prompts)) == len(prompts)
