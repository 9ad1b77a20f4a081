"""The result of a triage as data, with everything private replaced."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from specmortem.statements.facts import Fact
from specmortem.tools.triage import advice
from specmortem.tools.triage.judge import Answer, Candidate
from specmortem.tools.triage.mitigation import mitigation
from specmortem.tools.triage.redact import Redactor
from specmortem.tools.triage.rules import Argument

EXCERPT = 240  # characters of a message that are shown


@dataclass
class TriageReport:
    """All cases of one call, each its place and answer with everything private replaced; the first is the main one."""

    parts: list[dict[str, Any]]
    redacted: Mapping[str, int] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        """JSON form: the first case, and the others under `parts`."""
        main, *others = self.parts
        return {**main, **({"parts": others} if others else {}), "redacted": dict(self.redacted)}

    def as_json(self) -> str:
        """`as_dict` as text."""
        return json.dumps(self.as_dict(), indent=1, ensure_ascii=True)

    @property
    def answer(self) -> str:
        """The main answer."""
        return str(self.parts[0]["answer"])


def report(answers: Iterable[tuple[str, Answer]]) -> TriageReport:
    """The report of (place, answer) pairs."""
    redact = Redactor()
    parts = [{"where": redact(where), **_data(answer, redact)} for where, answer in answers]
    return TriageReport(parts, dict(redact.counts))


def _data(answer: Answer, redact: Redactor) -> dict[str, Any]:
    return {
        "answer": answer.answer,
        "cause": answer.cause,
        "confidence": answer.confidence,
        "because": answer.because,
        "candidates": [_candidate(c, redact) for c in answer.candidates],
        "facts": _facts(answer, redact),
        "weighs_nothing": answer.nothing,
        "next": [vars(entry) for entry in answer.next],
        "collect": answer.collect,
        "mitigation": _mitigation(answer, redact),
        "links": {name: text for name, text in advice.links(answer).items() if text},
    }


def _mitigation(answer: Answer, redact: Redactor) -> dict[str, str]:
    """Computed for the launch that the case states; empty where no incident fits."""
    found = mitigation(answer)
    return {name: redact(text) for name, text in vars(found).items() if text} if found else {}


def _candidate(candidate: Candidate, redact: Redactor) -> dict[str, Any]:
    return {
        "incident": candidate.incident,
        "cause": candidate.cause,
        "score": round(candidate.score, 2),
        "for": [_argument(a, redact) for a in candidate.pros],
        "against": [_argument(a, redact) for a in candidate.cons],
        "excluded_by": [_argument(a, redact) for a in candidate.excluded],
    }


def _argument(argument: Argument, redact: Redactor) -> dict[str, Any]:
    found = [{"fact": f"{f.name}={redact(f.value)}", **_place(f, redact)} for f in argument.facts]
    return {**vars(argument), "weight": abs(argument.weight), "facts": found}


def _place(fact: Fact, redact: Redactor) -> dict[str, Any]:
    return {"file": redact(fact.file), "line": fact.line, "text": _excerpt(fact, redact)}


def _excerpt(fact: Fact, redact: Redactor) -> str:
    """The part of the message around the match, cut out after everything private is gone."""
    text, match = redact(fact.text), " ".join(fact.match.split())
    at = text.find(match) if match else 0
    start = max(0, min(at - EXCERPT // 4, len(text) - EXCERPT))
    return text[start : start + EXCERPT]


def _facts(answer: Answer, redact: Redactor) -> dict[str, list[dict[str, Any]]]:
    names = dict.fromkeys(fact.name for fact in answer.book)
    return {
        name: [_fact(f, answer, redact) for f in _first_of_each(answer.book.named(name))] for name in names
    }


def _fact(fact: Fact, answer: Answer, redact: Redactor) -> dict[str, Any]:
    seen = answer.book.counts.get((fact.name, fact.value), 1)
    stated = {"value": redact(fact.value), **_place(fact, redact), "seen": seen}
    return {**stated, "time": redact(fact.time)} if fact.time else stated


def _first_of_each(facts: list[Fact]) -> list[Fact]:
    return list({fact.value: fact for fact in reversed(facts)}.values())[::-1][:8]
