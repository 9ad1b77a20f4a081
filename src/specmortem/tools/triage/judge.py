"""From facts to an answer: which cause they fit, how strongly, why, what contradicts it, and what to try next."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Literal

from specmortem.statements.config import config
from specmortem.statements.derived import complete
from specmortem.statements.facts import Fact, FactBook
from specmortem.tools.triage import reach
from specmortem.tools.triage.rules import Argument, FactCondition, NextExperiment, Rules, load

Confidence = Literal["high", "medium", "low", "none"]
NONE, INSUFFICIENT = "none", "insufficient"
NEAR = 2.5  # candidates within this of the best are separated by the next experiment
EXPERIMENTS = 3


@dataclass
class Candidate:
    """A cause of an incident, or another class of defect (`incident` none)."""

    incident: str
    cause: str
    arguments: list[Argument] = field(default_factory=list)
    excluded: list[Argument] = field(default_factory=list)

    @property
    def pros(self) -> list[Argument]:
        """What speaks for it."""
        return [argument for argument in self.arguments if argument.weight > 0]

    @property
    def cons(self) -> list[Argument]:
        """What speaks against it."""
        return [argument for argument in self.arguments if argument.weight < 0]

    @property
    def score(self) -> float:
        """What speaks for it less what speaks against it."""
        return sum(argument.weight for argument in self.arguments)

    @property
    def rank(self) -> tuple[bool, float, float]:
        """Order among candidates: excluded ones last, then by score, then by the strongest single argument."""
        return not self.alive, -self.score, -max((a.weight for a in self.pros), default=0.0)

    @property
    def alive(self) -> bool:
        """Nothing excludes it."""
        return not self.excluded


@dataclass(frozen=True)
class Next:
    """An experiment, and what the candidates that it separates predict."""

    experiment: str
    does: str
    command: str
    separates: dict[str, str]


@dataclass
class Answer:
    """The answer for one case."""

    answer: str
    cause: str
    confidence: Confidence
    because: str
    candidates: list[Candidate]
    book: FactBook
    next: list[Next]
    collect: list[str]
    nothing: list[str]


def judge(stated: FactBook, rules: Rules | None = None) -> Answer:
    """Weigh the facts of one case."""
    rules = rules or load()
    book = complete(stated)
    candidates = _weighed(book, rules)
    alive = sorted((c for c in candidates if c.alive), key=lambda c: c.rank)
    incidents = [c for c in alive if c.incident != NONE]
    others = [c for c in alive if c.incident == NONE]
    answer, cause, because = _decide(incidents, others, rules)
    confidence = _confidence(answer, incidents, others, rules)
    shown = [c for c in candidates if c.pros or c.incident != NONE]
    return Answer(
        answer, cause, confidence, because,
        sorted(shown, key=lambda c: c.rank),
        book, _next(alive, book, rules), _collect(book, rules), _nothing(book, rules),
    )  # fmt: skip


def _weighed(book: FactBook, rules: Rules) -> list[Candidate]:
    all_of = {cause: Candidate(incident, cause) for cause, incident in rules.causes.items()}
    all_of |= {name: Candidate(NONE, name) for name in rules.classes}
    for rule in rules.rules:
        if (facts := _holding(rule.when, book)) is None:
            continue
        argument = Argument(rule.id, rule.weight, rule.reason, rule.source, tuple(facts[:4]))
        for target in rules.targets(rule.supports):
            all_of[target].arguments.append(argument)
        for target in rules.targets(rule.contradicts):
            all_of[target].arguments.append(replace(argument, weight=-rule.weight))
        for target in rules.targets(rule.excludes):
            all_of[target].excluded.append(argument)
    settings = config(book)
    for cause, incident in rules.causes.items():
        all_of[cause].arguments += reach.arguments(incident, cause, book, settings)
    return list(all_of.values())


def _holding(conditions: Iterable[FactCondition], book: FactBook) -> list[Fact] | None:
    """The facts by which all conditions hold, or None."""
    facts: list[Fact] = []
    for condition in conditions:
        if (found := condition.evidence(book)) is None:
            return None
        facts += found[:2]
    return facts


def _decide(incidents: list[Candidate], others: list[Candidate], rules: Rules) -> tuple[str, str, str]:
    threshold = rules.thresholds["answer"]
    best = incidents[0] if incidents and incidents[0].score >= threshold else None
    other = others[0] if others and others[0].score >= threshold else None
    spared = best is not None and other is not None and best.cause in rules.spares.get(other.cause, ())
    if other and not spared and (best is None or other.score >= best.score):
        return NONE, other.cause, rules.classes[other.cause]
    if best:
        return best.incident, best.cause, best.pros[0].reason if best.pros else ""
    return INSUFFICIENT, "", "the facts do not single out a cause; see what to collect"


def _confidence(answer: str, incidents: list[Candidate], others: list[Candidate], rules: Rules) -> Confidence:
    if answer == INSUFFICIENT:
        return "none"
    ranked = others if answer == NONE else incidents
    rivals = [
        c.score
        for c in (incidents if answer == NONE else [c for c in incidents if c.incident != answer] + others)
    ]
    lead = ranked[0].score - max([0.0, *rivals])
    limits = rules.thresholds
    if ranked[0].score >= limits["high"] and lead >= limits["margin"]:
        return "high"
    if ranked[0].score >= limits["medium"] and lead >= limits["margin"] / 2:
        return "medium"
    return "low"


def _next(alive: list[Candidate], book: FactBook, rules: Rules) -> list[Next]:
    """The experiments not yet made that separate most of what is left, best first."""
    if not alive or alive[0].score <= 0:
        return []
    left = [c for c in alive if c.score > 0 and c.score >= alive[0].score - NEAR]
    scored = []
    for order, experiment in enumerate(rules.experiments):
        if not _possible(experiment, book):
            continue
        told = {c.cause: experiment.predicts[c.cause] for c in left if c.cause in experiment.predicts}
        told |= {"anything else": experiment.otherwise}
        worth = _separation(list(told.values()))
        if worth:
            scored.append((-worth, order, Next(experiment.id, experiment.does, experiment.command, told)))
    return [entry for _, _, entry in sorted(scored, key=lambda s: s[:2])[:EXPERIMENTS]]


def _possible(experiment: NextExperiment, book: FactBook) -> bool:
    done = any(condition.evidence(book) for condition in (*experiment.done, *experiment.unless))
    return not done and all(condition.evidence(book) is not None for condition in experiment.needs)


def _separation(predictions: list[str]) -> int:
    """How many pairs of candidates the outcome tells apart."""
    return sum(a != b for n, a in enumerate(predictions) for b in predictions[n + 1 :])


def _collect(book: FactBook, rules: Rules) -> list[str]:
    return [note.text for note in rules.collect if all(c.evidence(book) is None for c in note.unless)]


def _nothing(book: FactBook, rules: Rules) -> list[str]:
    return [note.text for note in rules.nothing if _holding(note.when, book) is not None]
