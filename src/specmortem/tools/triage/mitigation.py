"""What to do about the launch that a case states, computed as `check` does; no advice of a log or a report is taken."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice, pairwise

from specmortem.affected.answers import Answer as Affected
from specmortem.affected.answers import Answers
from specmortem.affected.answers import answer as judge
from specmortem.affected.targets import advise
from specmortem.affected.words import NOTHING, missing, way_out
from specmortem.statements.config import FIELDS
from specmortem.statements.facts import Fact, FactBook
from specmortem.statements.launch import launches
from specmortem.tools.triage.judge import INSUFFICIENT, NONE, Answer

STATING = frozenset({name for name, _, _ in FIELDS.values()} | {"gpu", "spec", "speculation"})
MOST_LINES = 500
LOG_HEAD = "INFO 01-01 00:00:00 "  # a dated message came from a log, and is read as one
NOT_AFFECTED = (
    "by the verdicts on record the launch that is stated is not affected; give the command that failed"
)


@dataclass(frozen=True)
class Mitigation:
    """Whether the launch is affected by the incident that fits, the way out in words, and what to know beside it."""

    answer: Affected
    told: str
    note: str = ""


def mitigation(answer: Answer) -> Mitigation | None:
    """For the first launch that the case states and that is affected, else the first that may be.

    None where no incident fits.
    """
    if answer.answer in (NONE, INSUFFICIENT):
        return None
    stated = launches(_text(answer.book))
    judged = [judge(config) for config in stated]
    names = [_of(answers, answer.answer) for answers in judged]
    order: tuple[Affected, ...] = ("affected", "unknown", "not-affected")
    worst = min(range(len(stated)), key=lambda at: order.index(names[at]))
    note = f"the text states {len(stated)} launches; specmortem check judges all of them"
    return Mitigation(names[worst], _told(judged[worst], names[worst]), note if len(stated) > 1 else "")


def _of(answers: Answers, slug: str) -> Affected:
    return next((one.answer for one in answers.incidents if one.incident == slug), "unknown")


def _told(answers: Answers, named: Affected) -> str:
    if named == "affected":
        told, asks = way_out(advise(answers.config)), missing(answers)
        return f"{told}; add {'; '.join(asks)}" if told == NOTHING and asks else told
    if named == "not-affected":
        return NOT_AFFECTED
    asks = missing(answers)
    return f"not known for this launch; add {'; '.join(asks)}" if asks else "not known for this launch"


def _text(book: FactBook) -> str:
    """The messages that state how vLLM runs, in their order; those that were not neighbours stay apart."""
    lines = list(islice(_lines(book), MOST_LINES))
    return "\n".join(
        [shown for shown, _ in lines[:1]]
        + [
            f"{'' if here.file == before.file and here.line == before.line + 1 else chr(10)}{shown}"
            for (_, before), (shown, here) in pairwise(lines)
        ]
    )


def _lines(book: FactBook) -> Iterator[tuple[str, Fact]]:
    seen = set()
    for fact in sorted(book, key=lambda fact: (fact.file, fact.line)):
        if fact.name in STATING and fact.text not in seen:
            seen.add(fact.text)
            yield f"{LOG_HEAD if fact.time else ''}{fact.text}", fact
