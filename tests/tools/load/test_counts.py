"""Whatever happens: each request that was sent has one outcome, and the counts sum to what was sent."""

import asyncio
import json
import threading
from unittest import mock

import httpx
import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from specmortem.errors import BadInputError, UnavailableError
from specmortem.tools.load import client, driver
from specmortem.tools.load.outcome import WHOLE, Ask, Ledger, Outcome, RequestRecord, tally
from specmortem.tools.load.result import Result, Status
from specmortem.tools.load.signs import find_loop

from .servers import settings

IDS = [f"1-{n:03d}" for n in range(6)]
STEPS = st.lists(
    st.tuples(
        st.sampled_from(["send", "close", "amend", "interrupt"]),
        st.sampled_from(IDS),
        st.sampled_from(Outcome),
    )
)


def ask(id):
    return Ask(id, 1, "prompt", "value", 10)


def record(id, outcome=Outcome.OK, **more):
    return RequestRecord(id, 1, outcome, "", 0.0, 1.0, **more)


@given(STEPS)
def test_a_ledger_counts_each_request_once(steps):
    ledger, sent = Ledger(), set()
    for step, id, outcome in steps:
        try:
            if step == "send":
                ledger.send(ask(id), 0.0)
                sent.add(id)
            elif step == "close":
                ledger.close(record(id, outcome))
            elif step == "amend":
                ledger.amend(id, outcome, "")
            else:
                for pending in ledger.as_interrupted("", 1.0)[len(ledger.records) :]:
                    ledger.close(pending)
        except (ValueError, KeyError):
            pass
        assert ledger.sent == len(sent)
        assert sum(tally(ledger.records).values()) + ledger.in_flight == ledger.sent
        assert sorted(r.id for r in ledger.as_interrupted("", 1.0)) == sorted(sent)


def test_a_ledger_refuses_to_count_twice():
    ledger = Ledger()
    ledger.send(ask("1-000"), 0.0)
    with pytest.raises(ValueError, match="sent already"):
        ledger.send(ask("1-000"), 0.0)
    ledger.close(record("1-000", Outcome.CUT))
    with pytest.raises(ValueError, match="not in flight"):
        ledger.close(record("1-000"))
    with pytest.raises(ValueError, match="which stands"):
        ledger.amend("1-000", Outcome.EARLY_EOS, "")
    assert tally(ledger.records) == {Outcome.CUT: 1}
    assert Outcome.CUT not in WHOLE


class Whim:
    """Answers requests by a list of whims, and stops the driver at one of them."""

    def __init__(self, whims, stop_at, dies):
        self.whims, self.stop_at, self.dies, self.posts = whims, stop_at, dies, 0
        self.driver = None

    async def __call__(self, request):
        if request.url.path == "/health":
            if self.dies and self.posts >= self.dies:
                raise httpx.ConnectError("gone")
            return respond(200)
        if request.url.path == "/v1/models":
            return respond(200, json.dumps({"data": [{"id": "m"}]}))
        number, self.posts = self.posts, self.posts + 1
        await asyncio.sleep(0)
        if number == self.stop_at:
            self.driver.stop(Status.INTERRUPTED, "whim")
        return answer(self.whims[number % len(self.whims)])


def respond(status, text="", **more):
    async def pieces():
        yield text.encode()

    return httpx.Response(status, content=pieces(), **more)


def answer(whim):
    good = {"choices": [{"message": {"content": "one two three"}, "finish_reason": "stop"}]}
    made = {
        "ok": lambda: respond(200, json.dumps(good)),
        "loop": lambda: respond(200, json.dumps(good).replace("one", "duct" * 60)),
        "cut": lambda: respond(200, "{"),
        "500": lambda: respond(500),
        "404": lambda: respond(404),
        "302": lambda: respond(302, headers={"Location": "http://example.org"}),
    }
    if whim in made:
        return made[whim]()
    raise {"read": httpx.ReadError, "connect": httpx.ConnectError, "protocol": httpx.RemoteProtocolError}[
        whim
    ](whim)


WHIMS = st.sampled_from(["ok", "ok", "loop", "cut", "500", "404", "302", "read", "connect", "protocol"])


@hypothesis_settings(deadline=None, max_examples=60)
@given(
    st.lists(WHIMS, min_size=1, max_size=12),
    st.none() | st.integers(0, 12),
    st.none() | st.integers(1, 12),
    st.integers(1, 5),
    st.integers(0, 2),
)
def test_counts_sum_to_what_was_sent(whims, stop_at, dies, concurrency, warm_up):
    whim = Whim(whims, stop_at, dies)
    made = settings(
        "http://127.0.0.1:1",
        shape={"stream": False, "requests": 10, "concurrency": (concurrency,)},
        warm_up=warm_up,
    )
    whim.driver = driver.Driver(made, transport=httpx.MockTransport(whim))
    with mock.patch.object(driver, "CONFIRM_S", 0):
        found = asyncio.run(whim.driver.run())
    assert sum(found.counts.values()) == len(found.requests) == whim.posts
    assert len({r.id for r in found.requests}) == whim.posts
    listed = [id for finding in found.findings for id in finding.requests]
    assert len(listed) == len(set(listed))
    told = json.loads(found.as_json())
    assert json.loads(Result.from_dict(told).as_json()) == told


def judged_by(judge, whim, **shape):
    """The result of a few whole answers whose loops this judge looks for."""
    made = settings(
        "http://127.0.0.1:1", shape={"stream": False, "requests": 3, "concurrency": (1,), **shape}
    )
    whim.driver = driver.Driver(made, transport=httpx.MockTransport(whim))
    with mock.patch.object(driver, "find_loop", judge):
        return asyncio.run(whim.driver.run())


class Clock:
    """Stands until it is set on."""

    now = 0.0

    def __call__(self):
        return self.now


def test_judging_takes_no_part_in_the_time_of_a_request():
    clock = Clock()

    class Second(Whim):
        async def __call__(self, request):
            clock.now += request.method == "POST"
            return await super().__call__(request)

    def judge(text):
        clock.now += 50.0

    with mock.patch.object(client, "monotonic", clock), mock.patch.object(driver, "monotonic", clock):
        found = judged_by(judge, Second(["ok"], None, None))
    assert [r.seconds for r in found.requests] == [1.0] * 4
    assert [r.started_s for r in found.requests] == [0.0, 101.0, 202.0, 303.0]


def test_the_loop_turns_while_an_answer_is_judged():
    turns = []

    class Looped(Whim):
        async def __call__(self, request):
            self.loop = asyncio.get_running_loop()
            return await super().__call__(request)

    def judge(text):
        turned = threading.Event()
        whim.loop.call_soon_threadsafe(turned.set)
        assert turned.wait(10)
        turns.append(text)

    whim = Looped(["ok"], None, None)
    judged_by(judge, whim)
    assert "one two three" in turns


def test_answers_are_counted_in_the_order_in_which_they_came():
    def show(in_flight, closed):
        if closed:
            told.append(closed.id)

    told = []
    whim = Whim(["ok"], None, None)
    made = settings("http://127.0.0.1:1", shape={"stream": False, "requests": 20, "concurrency": (5,)})
    whim.driver = driver.Driver(made, show=show, transport=httpx.MockTransport(whim))
    found = asyncio.run(whim.driver.run())
    assert told == [r.id for r in found.requests] == sorted(told)


def test_an_answer_that_came_is_judged_though_the_run_ends_meanwhile():
    cancelled = threading.Event()
    whim = Whim(["ok"], 2, None)
    cancel = driver._cancel

    async def cancel_and_tell(tasks):
        await cancel(tasks)
        cancelled.set()

    def judge(text):
        if whim.posts == 3:
            assert cancelled.wait(10)
        return find_loop("duct" * 60) if text else None

    with mock.patch.object(driver, "_cancel", cancel_and_tell):
        found = judged_by(judge, whim)
    assert found.status is Status.INTERRUPTED
    assert found.counts == {Outcome.LOOP: 3}


def test_no_model_and_no_server_are_told():
    def nothing(request):
        return respond(200, "{}")

    def sick(request):
        return respond(503)

    made = settings("http://127.0.0.1:1")
    with pytest.raises(BadInputError, match="--model"):
        asyncio.run(driver.Driver(made, transport=httpx.MockTransport(nothing)).run())
    with pytest.raises(UnavailableError, match="health says 503"):
        asyncio.run(driver.Driver(made, transport=httpx.MockTransport(sick)).run())


def test_a_result_file_that_does_not_add_up_is_refused():
    made = settings("http://127.0.0.1:1", shape={"stream": False, "requests": 3})
    mocked = httpx.MockTransport(Whim(["ok"], None, None))
    data = asyncio.run(driver.Driver(made, transport=mocked).run()).as_dict()
    wrong = [
        ({**data, "sent": 7}, "sent does not fit"),
        ({**data, "counts": {"ok": 3, "cut": 1}}, "counts does not fit"),
        ({**data, "requests": data["requests"] * 2}, "appears twice"),
        ({**data, "requests": [{**data["requests"][0], "outcome": "fine"}]}, "requests/0/outcome"),
        ({**data, "schema": 2}, "schema"),
    ]
    for told, said in wrong:
        with pytest.raises(BadInputError, match=said):
            Result.from_dict(json.loads(json.dumps(told)))
