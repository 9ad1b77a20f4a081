"""A launch on a release, judged: for each incident affected, not affected or unknown, with what decides it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, replace
from typing import Literal

from specmortem.affected.released import KnownVerdict, Released, released
from specmortem.exposure import Condition, Config, Reach, Resolved, Rule
from specmortem.incident import Incident, all_incidents, rules

Answer = Literal["affected", "not-affected", "unknown"]
Verdicts = Callable[[str], KnownVerdict]
CLEAN = ("clean", "not-present")
EFFECTS = {
    "crash": "the engine dies, or reads and writes what it may not",
    "text": "wrong answers",
    "drafts": "worse drafts; the text does not change",
    "link": "nothing by itself: another defect has to feed it",
    "unseen": "nothing is known to reach it",
}
OF_CHAINS = "what its links give"
NO_RULE = Rule((Condition("a rule for it, which its incident does not state", lambda config: None),))


@dataclass(frozen=True)
class CauseAnswer:
    """One cause of an incident for a launch: what its probe says of the release, and whether the launch reaches it."""

    cause: str
    answer: Answer
    verdict: KnownVerdict
    reach: Reach
    rule: Rule

    @property
    def reached(self) -> bool:
        """At fault and reached, whether it decides or only takes part."""
        return self.verdict.status == "fault" and self.reach.reachable == "yes"

    @property
    def why(self) -> str:
        """In a sentence."""
        if self.reach.reachable == "no":
            return self.reach.reason
        return f"{self.verdict.status} by {self.verdict.source}; {self.reach.reason}"


@dataclass(frozen=True)
class IncidentAnswer:
    """One incident for a launch. `causes` decide it, `others` are links and what nothing is known to reach."""

    incident: str
    answer: Answer
    causes: tuple[CauseAnswer, ...]
    others: tuple[CauseAnswer, ...] = ()

    @property
    def deciding(self) -> tuple[CauseAnswer, ...]:
        """The causes that make the answer what it is; none where it is not affected."""
        return tuple(cause for cause in self.causes if cause.answer == self.answer != "not-affected")


@dataclass(frozen=True)
class Answers:
    """All incidents for one launch, with what follows from its configuration."""

    config: Config
    incidents: tuple[IncidentAnswer, ...]

    @property
    def answer(self) -> Answer:
        """The worst of them."""
        return joint(each.answer for each in self.incidents)

    @property
    def safe(self) -> bool:
        """Nothing that is reached faults, and nothing is unknown."""
        return self.answer == "not-affected"

    def named(self, answer: Answer) -> list[IncidentAnswer]:
        """The incidents with this answer."""
        return [each for each in self.incidents if each.answer == answer]


def joint(answers: Iterable[Answer]) -> Answer:
    """One affected is affected, else one unknown is unknown."""
    found = set(answers)
    return "affected" if "affected" in found else "unknown" if "unknown" in found else "not-affected"


def answer(
    config: Config, verdicts: Verdicts | None = None, incidents: Collection[str] | None = None
) -> Answers:
    """Judge a launch; `verdicts` gives those of its vLLM, by default the ones on record for its release.

    `incidents` are the ones to answer for, by default all.
    """
    known, launch = verdicts or of_release(config.version), Resolved(config)
    wanted = [one for one in all_incidents().values() if incidents is None or one.slug in incidents]
    return Answers(config, tuple(_incident(one, launch, known) for one in wanted))


def of_release(release: str, book: Released | None = None) -> Verdicts:
    """The verdicts on record for a release."""
    book = book or released()
    return lambda cause: book.of(cause, release)


def _incident(one: Incident, launch: Resolved, verdicts: Verdicts) -> IncidentAnswer:
    ruled = {probe.cause: NO_RULE for probe in one.probes} | dict(one.exposure)
    judged = [_cause(cause, rule, launch, verdicts) for cause, rule in ruled.items()]
    causes = tuple(each for each in judged if each.rule.decides)
    others = tuple(each for each in judged if not each.rule.decides)
    found = joint(each.answer for each in causes) if judged else "unknown"
    return IncidentAnswer(one.slug, found, causes, others)


def _cause(cause: str, rule: Rule, launch: Resolved, verdicts: Verdicts) -> CauseAnswer:
    reach = rule.of(launch)
    verdict = _chain(rule, launch, verdicts) if rule.links else verdicts(cause)
    return CauseAnswer(cause, _answer(verdict, reach), verdict, reach, rule)


def _answer(verdict: KnownVerdict, reach: Reach) -> Answer:
    if reach.reachable == "no" or verdict.status in CLEAN:
        return "not-affected"
    return "affected" if (reach.reachable, verdict.status) == ("yes", "fault") else "unknown"


def _chain(rule: Rule, launch: Resolved, verdicts: Verdicts) -> KnownVerdict:
    """A chain is at fault where every link is, and clean where one of them is clean or not reached."""
    known = rules()
    links = [
        joint(_answer(verdicts(cause), known[cause].of(launch)) for cause in group) for group in rule.links
    ]
    if "not-affected" in links:
        return KnownVerdict("clean", OF_CHAINS)
    return KnownVerdict("not-judged" if "unknown" in links else "fault", OF_CHAINS)


def on_release(config: Config, release: str) -> Config:
    """The same launch on another release, its defaults resolved anew."""
    return replace(config, version=release, sources={**config.sources, "version": "the release asked about"})
