"""Launches judged: the answer of each, the way out, and what is missing where the answer is unknown."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from specmortem.affected.answers import Answer, Answers, IncidentAnswer, Verdicts, answer, joint, of_release
from specmortem.affected.released import KnownVerdict, released
from specmortem.affected.targets import Advice, Target, advise
from specmortem.affected.words import missing
from specmortem.exposure import Config, resolve
from specmortem.incident import causes, facts, reaches
from specmortem.tools.check.understand import Understood

EXIT_CODES: dict[Answer, int] = {"not-affected": 0, "affected": 1, "unknown": 3}
SHOWN = (
    "version", "model", "hybrid", "runner", "speculation", "drafts", "cache_mode", "async_scheduling", "pipeline",
    "prefix_caching", "attention", "draft_attention", "cudagraphs",
    "max_num_seqs", "block_size", "kv_cache_dtype", "gpu",
)  # fmt: skip


@dataclass(frozen=True)
class Checked:
    """One launch with its answers; `subject` is the vLLM that was judged where it is not a release on record."""

    name: str
    config: Config
    answers: Answers
    advice: Advice
    subject: str = ""

    @property
    def understood(self) -> dict[str, dict[str, Any]]:
        """The effective configuration, each value with where it came from."""
        known = resolve(self.config)
        found = {name: getattr(known, name) for name in SHOWN}
        return {
            name: {"value": value, "source": known.sources.get(name, "")}
            for name, value in found.items()
            if value not in (None, "")
        }

    @property
    def assumed(self) -> list[str]:
        """Fields that nothing states, with what was taken for them."""
        stated = self.config.sources
        return [name for name in self.understood if name not in stated]

    @property
    def missing(self) -> list[str]:
        """What would settle what is unknown."""
        return missing(self.answers, self.subject)

    @property
    def target(self) -> Target | None:
        """Where to go; None where nothing safe is on record."""
        return self.advice.best

    def commands(self, one: IncidentAnswer) -> list[str]:
        """Command lines for an incident: the way out, which is the same for all, and the evidence."""
        subject = self.subject or f"vllm=={self.config.version}"
        found = self.ways if one.answer == "affected" else []
        return (
            [*found, f"specmortem audit {subject} --incident {one.incident}"]
            if self.config.version
            else found
        )

    @property
    def ways(self) -> list[str]:
        """The ways out as command lines: another release, or flags on this one."""
        found = []
        if move := self.advice.move:
            flags = f" && vllm serve … {' '.join(move.flags)}" if move.flags else ""
            found.append(f"pip install vllm=={move.release}{flags}")
        if self.advice.stay and self.advice.stay.changes:
            found.append(f"vllm serve … {' '.join(self.advice.stay.flags)}")
        return found


@dataclass(frozen=True)
class CheckReport:
    """All launches that the inputs stated."""

    checked: tuple[Checked, ...]

    @property
    def answer(self) -> Answer:
        """The worst of them."""
        return joint(each.answers.answer for each in self.checked)

    @property
    def worst(self) -> Checked:
        """The launch to speak of where one is asked for."""
        return next(each for each in self.checked if each.answers.answer == self.answer)

    @property
    def exit_code(self) -> int:
        """0 not affected, 1 affected, 3 not enough to say."""
        return EXIT_CODES[self.answer]


Judge = Callable[[str, Sequence[str]], Verdicts]


def check(cases: Sequence[Understood], subject: str = "", judge: Judge | None = None) -> CheckReport:
    """Answer for every launch; `judge` gives verdicts of a subject that is not a release on record."""
    return CheckReport(tuple(_checked(case, subject, judge) for case in cases))


def _checked(case: Understood, subject: str, judge: Judge | None) -> Checked:
    config = case.config
    if subject and judge:
        verdicts = judge(subject, _reachable(config))
        answers = answer(config, verdicts)
        return Checked(case.name, config, answers, _moves_only(config), subject)
    return Checked(case.name, config, answer(config, of_release(config.version)), advise(config))


def _moves_only(config: Config) -> Advice:
    """A build that is no release has no advice to stay; the releases on record are offered."""
    advice = advise(config)
    return Advice(None, advice.move)


def _reachable(config: Config) -> list[str]:
    """Causes that a probe judges and that the launch may reach; one without a rule may be reached by any."""
    return [cause for cause in causes() if reaches(cause, config).reachable != "no"]


def judged_now(subject: str, wanted: Sequence[str]) -> Verdicts:
    """Verdicts of this moment on a tree, an archive or what is installed."""
    from specmortem.judge import judge_many
    from specmortem.judge.work import is_absent

    found = judge_many([(cause, subject) for cause in wanted])
    known = {
        cause: KnownVerdict("not-present" if is_absent(verdict) else verdict.outcome, subject)
        for cause, verdict in zip(wanted, found, strict=True)
    }
    return lambda cause: known.get(cause) or KnownVerdict("not-judged", f"not judged on {subject}")


def title(slug: str, cause: str) -> str:
    """What a cause is called."""
    return facts(slug).cause(cause).title


def date() -> str:
    """Of the verdicts on record."""
    return released().date
