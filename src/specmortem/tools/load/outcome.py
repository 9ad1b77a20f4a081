"""What became of a request: exactly one outcome each, kept by a ledger that cannot count one twice."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated, Self

from msgspec import Meta

from specmortem.convert import Amount, Count, Value


class DescribedEnum(StrEnum):
    """Words of a result file, each with what it means to a reader."""

    meaning: str

    def __new__(cls, word: str, meaning: str) -> Self:
        """A member of the value `word`."""
        made = str.__new__(cls, word)
        made._value_, made.meaning = word, meaning
        return made


class Outcome(DescribedEnum):
    """The one outcome of a request that was sent."""

    OK = "ok", "a whole answer with nothing to remark"
    SERVER_ERROR = "server-error", "HTTP 5xx, or an error reported inside an answer"
    REFUSED = "refused", "HTTP 4xx"
    REDIRECTED = "redirected", "HTTP 3xx; not followed"
    UNREACHABLE = "unreachable", "no connection could be made"
    DROPPED = "dropped", "the connection ended before a status line"
    CUT = "cut", "the answer ended before its end: no finish_reason, no [DONE], or too few bytes"
    HUNG = "hung", "no byte for longer than allowed"
    OVERTIME = "overtime", "not finished within the time of one request"
    TOO_LARGE = "too-large", "more bytes than allowed"
    GARBAGE = "garbage", "not what the protocol says"
    LOOP = "loop", "the same unit of text over and over"
    EARLY_EOS = "early-eos", "an end far too soon"
    WRONG = "wrong", "the value that was asked for is not in the answer"
    INTERRUPTED = "interrupted", "in flight when this client stopped; says nothing of the server"


UNREMARKABLE = frozenset({Outcome.OK, Outcome.INTERRUPTED})
# After these the server may be gone: its health is asked before the next request.
SUSPICIOUS = frozenset({Outcome.SERVER_ERROR, Outcome.UNREACHABLE, Outcome.DROPPED, Outcome.CUT})
# A judgement of a whole answer, which further evidence may still change.
WHOLE = frozenset({Outcome.OK, Outcome.LOOP, Outcome.EARLY_EOS, Outcome.WRONG})


@dataclass(frozen=True)
class Ask:
    """A request to send. Round 0 is the warm-up."""

    id: str
    round: int
    prompt: str | tuple[int, ...]
    expected: str | tuple[int, ...]
    max_tokens: int


class RequestRecord(Value, frozen=True):
    """A request that was sent, and what became of it.

    Times are seconds, `started_s` since the start of the run; `completion_tokens` are the server's own count, None
    where it gave none; `chunks` counts stream events with text; `excerpt` is fit to print.
    """

    id: Annotated[str, Meta(pattern=r"^[0-9]+-[0-9]{3,}$")]
    round: Count
    outcome: Outcome
    reason: str
    started_s: Amount
    seconds: Amount
    first_text_s: float | None = None
    longest_gap_s: float | None = None
    status: int | None = None
    finish_reason: str = ""
    max_tokens: Count = 0
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    chunks: Count = 0
    bytes: Count = 0
    excerpt: str = ""

    @property
    def warm_up(self) -> bool:
        """Whether this one was sent alone before the load."""
        return self.round == 0


class Ledger:
    """Requests by id: sent, and closed once."""

    def __init__(self) -> None:
        """Empty."""
        self._in_flight: dict[str, tuple[Ask, float]] = {}
        self._closed: dict[str, RequestRecord] = {}

    @property
    def sent(self) -> int:
        """How many requests went out."""
        return len(self._in_flight) + len(self._closed)

    @property
    def in_flight(self) -> int:
        """How many have no outcome yet."""
        return len(self._in_flight)

    @property
    def records(self) -> tuple[RequestRecord, ...]:
        """Those with an outcome, in the order of their outcomes."""
        return tuple(self._closed.values())

    def send(self, ask: Ask, at_s: float) -> None:
        """Note that a request goes out now. Raises ValueError for an id that went out before."""
        if ask.id in self._in_flight or ask.id in self._closed:
            raise ValueError(f"request {ask.id} was sent already")
        self._in_flight[ask.id] = (ask, at_s)

    def close(self, record: RequestRecord) -> None:
        """Give a request its outcome. Raises ValueError when it is not in flight."""
        if record.id not in self._in_flight:
            raise ValueError(f"request {record.id} is not in flight")
        del self._in_flight[record.id]
        self._closed[record.id] = record

    def amend(self, id: str, outcome: Outcome, reason: str) -> None:
        """Judge a whole answer anew. Raises ValueError for one that was not whole."""
        if self._closed[id].outcome not in WHOLE or outcome not in WHOLE:
            raise ValueError(f"request {id} is {self._closed[id].outcome}, which stands")
        self._closed[id] = self._closed[id].replace(outcome=outcome, reason=reason)

    def as_interrupted(self, reason: str, now_s: float) -> tuple[RequestRecord, ...]:
        """All records as they would be if this client gave up now, those in flight last."""
        pending = [
            RequestRecord(
                ask.id,
                ask.round,
                Outcome.INTERRUPTED,
                reason,
                at_s,
                max(0.0, now_s - at_s),
                max_tokens=ask.max_tokens,
            )
            for ask, at_s in self._in_flight.values()
        ]
        return (*self.records, *pending)


def tally(records: Iterable[RequestRecord]) -> dict[Outcome, int]:
    """Requests by outcome, in the order of the outcomes."""
    counted = Counter(record.outcome for record in records)
    return {outcome: counted[outcome] for outcome in Outcome if counted[outcome]}
