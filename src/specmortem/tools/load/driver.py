"""Sends the rounds, watches the server beside them, and ends in time with a result that is always whole."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from time import monotonic
from typing import TYPE_CHECKING, Any

from specmortem.errors import BadInputError, UnavailableError
from specmortem.tools.load import metrics
from specmortem.tools.load.client import Client, NoAnswerError, Reply
from specmortem.tools.load.outcome import SUSPICIOUS, WHOLE, Ask, Ledger, Outcome, RequestRecord, tally
from specmortem.tools.load.prompts import is_right
from specmortem.tools.load.result import AcceptedDrafts, Finding, Result, Sign, Status
from specmortem.tools.load.settings import Settings
from specmortem.tools.load.signs import Loop, early_among_peers, ends_early, find_loop
from specmortem.verdict import versions

if TYPE_CHECKING:
    import httpx

CONFIRM_S = 0.5
GRACE_S = 5.0
LONGEST_VALUE = 1000
NO_RECALL = "--check: the warm-up, alone on the server, did not recall its value"
NOT_OFFERED = 501
Show = Callable[[int, RequestRecord | None], None]


class Driver:
    """One run. `stop` may be called at any time from the same loop; `run` then returns what there is."""

    def __init__(
        self,
        settings: Settings,
        key: str = "",
        say: Callable[[str], None] = lambda line: None,
        show: Show = lambda in_flight, closed: None,
        checkpoint: Callable[[Result], None] = lambda result: None,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        """After each round `say` gets a line, and `checkpoint` the result so far.

        `show` gets the number of requests in flight whenever it changes, with the record where one was closed.
        """
        self.settings, self._say, self._show, self._checkpoint = settings, say, show, checkpoint
        self._client = Client(settings, key, transport)
        self.ledger = Ledger()
        self.acceptance = metrics.Acceptance()
        self.status, self.said, self.model = Status.RUNNING, "", settings.model
        self._signs: list[Finding] = []
        self._notes: dict[str, None] = {}
        self._ending = asyncio.Event()
        self._one_probe, self._one_judge = asyncio.Lock(), asyncio.Lock()
        self._watches: list[asyncio.Task[None]] = []
        self._closing: set[asyncio.Task[None]] = set()
        self._recalls = True
        self._scrapes_failed = self._health_silent = 0
        self._started, self._date = monotonic(), datetime.now(UTC).isoformat(timespec="seconds")

    async def run(self) -> Result:
        """Send everything that is planned, or what the limits and the server allow.

        Raises UnavailableError when nothing answers at the start, BadInputError when no model is known.
        """
        tasks: list[asyncio.Task[Any]] = [
            asyncio.create_task(self._load()),
            asyncio.create_task(self._ending.wait()),
        ]
        try:
            await asyncio.wait(tasks, timeout=self.settings.limits.run_s, return_when=asyncio.FIRST_COMPLETED)
            if not tasks[0].done() and self.status is Status.RUNNING:
                self.stop(Status.TIME_LIMIT, f"the run took {self.settings.limits.run_s:g} s")
            if self.status is Status.SERVER_DEAD:
                await asyncio.wait(tasks[:1], timeout=GRACE_S)
        finally:
            try:
                await _cancel([*tasks, *self._watches])
                await asyncio.gather(*self._closing)
            finally:
                await self._client.aclose()
        return self._finish()

    def stop(self, status: Status, said: str) -> None:
        """End the run now; the first call counts."""
        if self.status is Status.RUNNING:
            self.status, self.said = status, said
            self._ending.set()

    def result(self) -> Result:
        """The result so far; what is in flight counts as interrupted."""
        reason = f"in flight when the run ended: {self.said or self.status}"
        return Result(
            status=self.status,
            said=self.said,
            command=replace(self.settings, model=self.model).command(self._fit),
            started=self._date,
            seconds=round(self._now(), 3),
            model=self._client.clean(self.model),
            settings=json.loads(json.dumps(self.settings.as_dict())),
            versions=versions(("specmortem", "httpx")),
            planned=self.settings.planned,
            requests=self.ledger.as_interrupted(reason, self._now()),
            findings=tuple(self._signs),
            notes=tuple(self._notes),
            not_judged=() if self._recalls else (NO_RECALL,),
            acceptance=AcceptedDrafts(
                self.acceptance.offered, self.acceptance.overall, tuple(self.acceptance.windows)
            ),
        )

    def _now(self) -> float:
        return monotonic() - self._started

    def _fit(self, text: str) -> str:
        """A name or a path, fit to keep."""
        return self._client.clean(text, LONGEST_VALUE)

    async def _load(self) -> None:
        """Greet the server, warm up, send the rounds, and look at the server once more."""
        await self._greet()
        self._watches = [asyncio.create_task(self._every(self.settings.health_s, self._check_health))]
        if self.settings.metrics_s:
            await self._scrape()
        if self.acceptance.offered:
            self._watches.append(asyncio.create_task(self._every(self.settings.metrics_s, self._scrape)))
        for number, concurrency, asks in self.settings.rounds():
            if number > 1:
                await asyncio.sleep(self.settings.shape.pause_s)
            await self._round(number, concurrency, asks)
            if self._ending.is_set():
                return
        await self._check_health()
        if self.acceptance.offered:
            await self._scrape()

    async def _greet(self) -> None:
        """See that the server lives, and learn the model's name."""
        url = self.settings.url
        try:
            status, _ = await self._client.get("/health")
            if _is_ill(status):
                raise UnavailableError(f"{url}/health says {status}; start the server anew")
            if not self.model:
                self._client.model = _first_model(*await self._client.get("/v1/models"))
                self.model = self._fit(self._client.model)
        except (NoAnswerError, TimeoutError) as error:
            why = str(error) or "no answer in time"
            raise UnavailableError(
                f"nothing answers at {url} ({why}); start the server or correct --url"
            ) from None

    async def _round(self, number: int, concurrency: int, asks: Iterator[Ask]) -> None:
        before = len(self.ledger.records)
        async with asyncio.TaskGroup() as group:
            for _ in range(concurrency):
                group.create_task(self._worker(asks))
        records = self.ledger.records[before:]
        if number == 0:
            self._after_warm_up(records)
        counted = ", ".join(f"{n} {name}" for name, n in tally(records).items())
        self._say(f"{f'round {number}' if number else 'warm-up'}: {counted}")
        self._checkpoint(self.result())

    async def _worker(self, asks: Iterator[Ask]) -> None:
        """One request at a time; after a suspicious end the next waits for the server's health."""
        for ask in asks:
            if self._ending.is_set():
                return
            self.ledger.send(ask, self._now())
            self._show(self.ledger.in_flight, None)
            reply = await self._client.ask(ask)
            # An answer that came is judged and counted, even if the run ends meanwhile.
            closing = asyncio.create_task(self._close(ask, reply))
            self._closing.add(closing)
            closing.add_done_callback(self._closing.discard)
            await asyncio.shield(closing)
            if reply.outcome in SUSPICIOUS:
                await self._check_health()

    def _after_warm_up(self, records: tuple[RequestRecord, ...]) -> None:
        """A failed warm-up ends the run; one that loops is worth a note."""
        failed = [record for record in records if record.outcome not in WHOLE]
        if failed:
            self.stop(Status.WARM_UP_FAILED, f"{failed[0].outcome}: {failed[0].reason}")
        if any(record.outcome is Outcome.LOOP for record in records):
            self._note("the warm-up, alone on the server, looped too: a loop under load says little here")

    async def _close(self, ask: Ask, reply: Reply) -> None:
        """Judge a reply where it is whole, and give its request the outcome."""
        text = "".join(reply.text)
        outcome, reason = reply.outcome, reply.reason
        if outcome is Outcome.OK:
            # In a thread, so that other answers are read and timed meanwhile; in turn, as threads slow each other.
            async with self._one_judge:
                loop = await asyncio.to_thread(_unexpected_loop, ask, self._client.clean.without_key(text))
            outcome, reason = self._judged(ask, reply, text, loop)
        if outcome is Outcome.OK and reply.completion_tokens is None:
            self._note("the server gave no usage for some answers: their tokens were not counted")
        record = self._record(ask, reply, text, outcome, reason)
        self.ledger.close(record)
        self._show(self.ledger.in_flight, record)

    def _record(self, ask: Ask, reply: Reply, text: str, outcome: Outcome, reason: str) -> RequestRecord:
        """The record of a reply, everything in it fit to keep."""
        clean = self._client.clean
        at = [when - reply.started for when in reply.text_at]
        gaps = [later - sooner for sooner, later in zip(at, at[1:], strict=False)]
        return RequestRecord(
            ask.id,
            ask.round,
            outcome,
            clean(reason),
            reply.started - self._started,
            reply.ended - reply.started,
            first_text_s=at[0] if at else None,
            longest_gap_s=max(gaps, default=None),
            status=reply.status,
            finish_reason=clean(reply.finish_reason, 40),
            max_tokens=ask.max_tokens,
            prompt_tokens=reply.prompt_tokens,
            completion_tokens=reply.completion_tokens,
            chunks=len(at),
            bytes=reply.bytes,
            excerpt=clean.ends(text),
        )

    def _judged(self, ask: Ask, reply: Reply, text: str, loop: Loop | None) -> tuple[Outcome, str]:
        """Outcome and reason of a whole answer by its text alone, in which `loop` was found."""
        if reply.finish_reason == "repetition":
            return Outcome.LOOP, "finish_reason repetition: the server saw a loop"
        settings = self.settings
        if loop:
            return Outcome.LOOP, f"{loop.unit[:60]!r} {loop.times} times over {loop.characters} characters"
        asked = ask.max_tokens if settings.ignore_eos else settings.min_tokens
        if why := ends_early(reply.finish_reason, text, reply.completion_tokens, asked):
            return Outcome.EARLY_EOS, why
        if settings.check and not is_right(ask.expected, text, tuple(reply.token_ids)):
            if ask.round == 0:
                self._recalls = False
            elif self._recalls:
                return Outcome.WRONG, _missed(ask, reply.token_ids)
        return Outcome.OK, ""

    async def _every(self, seconds: float, look: Callable[[], Awaitable[None]]) -> None:
        while not self._ending.is_set():
            await asyncio.sleep(seconds)
            await look()

    async def _check_health(self) -> None:
        """Ask /health; two bad answers half a second apart say that the server is dead, which ends the run."""
        async with self._one_probe:
            if self._ending.is_set() or not await self._ill():
                return
            await asyncio.sleep(CONFIRM_S)
            if why := await self._ill():
                self._signs.append(Finding(Sign.SERVER_DEAD.value, f"{why}, at {self._now():.1f} s"))
                self.stop(Status.SERVER_DEAD, why)

    async def _ill(self) -> str:
        """Why the server looks dead; empty when it does not. Slowness is no death: it is noted only."""
        try:
            status, _ = await self._client.get("/health")
        except NoAnswerError as error:
            return f"/health: {error}"
        except TimeoutError:
            self._health_silent += 1
            return ""
        return f"/health says {status}" if _is_ill(status) else ""

    async def _scrape(self) -> None:
        try:
            status, text = await self._client.get("/metrics")
        except (NoAnswerError, TimeoutError):
            self._scrapes_failed += 1
            return
        found = metrics.parse(text, self._now()) if status == 200 else None
        if found is not None:
            self.acceptance.add(found)

    def _note(self, text: str) -> None:
        self._notes[text] = None

    def _finish(self) -> Result:
        """Weigh answers against their peers, and sum up the server's signs."""
        if self.status is Status.RUNNING:
            limited = self.ledger.sent < self.settings.planned
            self.status = Status.COUNT_LIMIT if limited else Status.FINISHED
            self.said = f"{self.settings.limits.requests} requests were allowed" if limited else ""
        for id, reason in early_among_peers(self.ledger.records).items():
            self.ledger.amend(id, Outcome.EARLY_EOS, reason)
        for at_s in self.acceptance.restarts:
            self._signs.append(
                Finding(Sign.SERVER_RESTARTED.value, f"its counters went back at {at_s:.1f} s")
            )
        if why := metrics.collapse(self.acceptance.windows, self.acceptance.overall):
            self._signs.append(Finding(Sign.ACCEPTANCE_COLLAPSE.value, why))
        if self._health_silent:
            self._note(f"/health gave no answer within 5 s {self._health_silent} times")
        if self._scrapes_failed and self.status is not Status.SERVER_DEAD:
            self._note(f"/metrics could not be read {self._scrapes_failed} times")
        return self.result()


def _is_ill(status: int) -> bool:
    return status >= 500 and status != NOT_OFFERED


def _first_model(status: int, text: str) -> str:
    """The first model that a server lists. Raises BadInputError when it lists none."""
    try:
        return str(json.loads(text)["data"][0]["id"])
    except (ValueError, RecursionError, LookupError, TypeError):
        raise BadInputError(
            f"/v1/models answers {status} and names no model; give its name with --model"
        ) from None


def _unexpected_loop(ask: Ask, text: str) -> Loop | None:
    """The loop in an answer; None also where the token ids that are expected repeat themselves."""
    told = "" if isinstance(ask.expected, str) else "".join(f"{id} " for id in ask.expected)
    return None if find_loop(told) else find_loop(text)


def _missed(ask: Ask, token_ids: list[int]) -> str:
    """What a wrong answer lacks."""
    if isinstance(ask.expected, str):
        return f"the value {ask.expected} is not in the answer"
    pairs = enumerate(zip(ask.expected, token_ids, strict=False))
    at = next((index for index, (want, got) in pairs if want != got), None)
    if at is None:
        return "no token ids came back"
    return f"token {at} of the answer is {token_ids[at]}, expected {ask.expected[at]}"


async def _cancel(tasks: Sequence[asyncio.Task[Any]]) -> None:
    """End tasks. Raises the first error among them that is not a cancellation."""
    for task in tasks:
        task.cancel()
    ends = await asyncio.gather(*tasks, return_exceptions=True)
    for end in ends:
        if isinstance(end, ExceptionGroup):
            raise end.exceptions[0]
        if isinstance(end, Exception):
            raise end
