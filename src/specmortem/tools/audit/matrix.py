"""The audit itself: every probe of the chosen causes over the subjects, identical code judged once.

In rounds: what the cache knows; what another subject with the same answers was judged; then one judgement for each
group of pairs that are still open and answer alike. A round can teach new questions, which the next one asks.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from functools import cache as cached
from pathlib import Path
from typing import Any, Literal

from packaging.version import InvalidVersion

from specmortem import facts as fact_files
from specmortem import upstream
from specmortem.errors import BadInputError, SpecmortemError
from specmortem.exposure import Config, Reach
from specmortem.facts import Cause, Facts
from specmortem.incident import Probe, all_incidents, of_cause, probe_of, reaches
from specmortem.incident import causes as known_causes
from specmortem.judge import device_kind
from specmortem.tools.audit.records import Digests, Known, Record
from specmortem.tools.audit.subjects import Place, open_subject
from specmortem.tools.audit.verdicts import RELEASES, Verdicts, scope_of
from specmortem.tools.audit.work import (
    Judged,
    Local,
    Survey,
    Surveyed,
    Task,
    Tick,
    Workers,
    bring,
    counter,
    is_absent,
)
from specmortem.upstream.tree import Tree
from specmortem.verdict import DeviceKind, Evidence, Verdict

Status = Literal["fault", "clean", "not-present", "not-judged"]


@dataclass(frozen=True)
class Row:
    """One line of an audit: a cause on a subject.

    `hashes` are those of the judged bodies. `same_code_as` names the subject that was judged in this one's place: its
    code is the same, and lines in the evidence are those of that subject. `fixed` and `workarounds` are the incident
    file's, `expected` is what it says of this release. `reach` is empty unless a configuration was given.
    """

    subject: str
    version: str
    cause: str
    incident: str
    title: str
    status: Status
    evidence: Evidence
    hashes: Mapping[str, str] = field(default_factory=dict)
    same_code_as: str = ""
    fixed: str = ""
    workarounds: tuple[str, ...] = ()
    expected: Literal["affected", "not affected", ""] = ""
    reach: str = ""
    reach_reason: str = ""
    unavailable: bool = False

    @property
    def witness(self) -> str:
        """One line: what was seen, and where."""
        evidence = self.evidence
        told = evidence.reason if self.status.startswith("not-") else evidence.observed or evidence.reason
        place = f" ({evidence.place})" if evidence.place and evidence.place not in told else ""
        if self.same_code_as and re.search(r"\.py:\d", told + place):
            place += f" [lines of {self.same_code_as}, the same code]"
        return " ".join(f"{told}{place}".split())

    @property
    def advice(self) -> str:
        """What to do about a fault."""
        if self.status != "fault":
            return ""
        fix = f"fixed in {self.fixed}" if self.fixed else ""
        return (
            "; ".join(filter(None, [fix, *self.workarounds]))
            or "the incident file records no fix or workaround"
        )

    @property
    def differs(self) -> bool:
        """Whether the verdict is not what the incident file says of this release."""
        said = {"affected": "fault", "not affected": "clean"}.get(self.expected)
        return said is not None and self.status in ("fault", "clean") and self.status != said

    def as_dict(self) -> dict[str, Any]:
        """JSON form."""
        told = {"witness": self.witness, "advice": self.advice, "differs": self.differs}
        return {
            **asdict(self),
            "evidence": self.evidence.as_dict(),
            "workarounds": list(self.workarounds),
            **told,
        }


@dataclass(frozen=True)
class Audit:
    """The rows, in the order of causes and subjects, and what they took."""

    rows: tuple[Row, ...]
    judged: int
    cached: int
    bytes_moved: int
    device: DeviceKind
    config: Config | None = None


def chosen(causes: Iterable[str] = (), slugs: Iterable[str] = ()) -> list[str]:
    """The causes that are named or belong to a named incident; all where none is named.

    Raises BadInputError for an unknown cause or incident.
    """
    causes, slugs = list(causes), list(slugs)
    known = list(all_incidents())
    for slug in slugs:
        if slug not in known:
            raise BadInputError(f"no incident {slug!r} with probes; known: {', '.join(known)}")
    wanted = {probe_of(cause).cause for cause in causes}
    if not causes and not slugs:
        return list(known_causes())
    return [cause for cause, one in known_causes().items() if cause in wanted or one.slug in slugs]


def audit(
    subjects: Sequence[str],
    causes: Sequence[str] = (),
    *,
    device: str = "sim",
    python: str = "",
    config: Config | None = None,
    cache: Path | None = None,
    keep: bool = True,
    workers: Workers | None = None,
    timeout_s: float = 120,
    root: Path | None = None,
    tick: Tick = lambda what, done, total: None,
) -> Audit:
    """Judge every cause (all without a list) on every subject.

    `python` is the interpreter whose environment `installed` means; `keep=False` neither reads nor writes the cache
    of verdicts; `root` is the folder of the incident files. A subject that cannot be had gives rows `not-judged`.
    Raises BadInputError for a malformed subject or an unknown cause.
    """
    run = _Run(
        list(dict.fromkeys(subjects)),
        [probe_of(cause).cause for cause in causes] or list(known_causes()),
        device_kind(device),
        python,
        cache,
        keep,
        workers or Local(),
        timeout_s,
        tick,
    )
    run.go()
    rows = tuple(run.row(cause, subject, config, root) for cause in run.causes for subject in run.subjects)
    return Audit(rows, run.judged, run.cached, run.bytes_moved, run.device, config)


class _Run:
    """The state of an audit: what is open, what was asked and answered, what is settled."""

    def __init__(
        self,
        subjects: list[str],
        causes: list[str],
        device: DeviceKind,
        python: str,
        cache: Path | None,
        keep: bool,
        workers: Workers,
        timeout_s: float,
        tick: Tick,
    ) -> None:
        self.subjects, self.causes, self.device, self.python = subjects, causes, device, python
        self.cache, self.workers, self.timeout_s, self.tick = cache, workers, timeout_s, tick
        self.verdicts = Verdicts(device, cache, keep=keep)
        self.places: dict[str, Place] = {}
        self.trees: dict[str, Tree] = {}
        self.answers: dict[tuple[str, str], Record] = {}
        self.settled: dict[tuple[str, str], Known] = {}
        self.bodies: dict[tuple[str, str], dict[str, str]] = {}
        self.judged = self.cached = self.bytes_moved = 0

    @property
    def open(self) -> list[tuple[str, str]]:
        """Pairs (cause, subject) without a verdict; the newest subject of the command line last."""
        pairs = ((cause, subject) for cause in self.causes for subject in self.subjects)
        return [pair for pair in pairs if pair not in self.settled]

    def go(self) -> None:
        """Settle every pair."""
        self.without_running()
        self.from_cache()
        while self.open:
            self.survey()
            self.match()
            self.judge()

    def settle(self, pair: tuple[str, str], known: Known) -> None:
        self.settled[pair] = known
        self.tick("verdicts", len(self.settled), len(self.causes) * len(self.subjects))

    def without_running(self) -> None:
        """Causes that need a GPU where there is none."""
        for cause in self.causes if self.device == "sim" else ():
            if probe_of(cause).needs == "cuda":
                told = "needs a GPU: run the audit with --device cuda"
                for subject in self.subjects:
                    self.settle(
                        (cause, subject), _known(cause, subject, Verdict.not_judged(told, needs="cuda"))
                    )

    def from_cache(self) -> None:
        """Verdicts whose files are, byte for byte, those that lie here; nothing is fetched."""
        for subject in self.subjects:
            place = self.place_here(subject)
            if place is None:
                continue
            digests = Digests(place.open())
            for cause in self.causes:
                if (cause, subject) not in self.settled:
                    known = next(
                        (k for k in self.verdicts.of(cause, place) if k.record.same_files(digests)), None
                    )
                    if known is not None:
                        self.cached += 1
                        self.settle((cause, subject), known)

    def place_here(self, subject: str) -> Place | None:
        """Where a subject lies on this machine; None for a release never fetched, or a subject not to be had."""
        if subject.partition("==")[0].strip() == "vllm" and not upstream.is_stored(subject, self.cache):
            return None
        try:
            self.places[subject] = open_subject(subject, python=self.python, cache=self.cache)[1]
        except BadInputError:
            raise
        except SpecmortemError:
            return None
        return self.places[subject]

    def survey(self) -> None:
        """Ask every subject what is known to matter and was not asked of it yet."""
        asked: dict[str, dict[str, Record]] = {}
        for cause, subject in self.open:
            questions = self.questions(cause, subject)
            before = self.answers.get((cause, subject))
            if before is None or not questions.asks <= before.asks:
                asked.setdefault(subject, {})[cause] = questions
        jobs = [
            Survey(subject, questions, self.python, str(self.cache or ""))
            for subject, questions in asked.items()
        ]
        on_end = counter(self.tick, "subjects read", len(jobs))
        for job, found in zip(jobs, self.workers.surveys(jobs, on_end), strict=True):
            self.learn(job.subject, found)

    def questions(self, cause: str, subject: str) -> Record:
        """All that known verdicts of a cause rest on."""
        every = Record()
        for known in (
            self.verdicts.of(cause, self.places[subject]) if subject in self.places else self.others(cause)
        ):
            every.looked_for |= known.record.looked_for
            every.whole |= known.record.whole
            every.answers |= known.record.answers
        return every

    def others(self, cause: str) -> list[Known]:
        """Verdicts on releases: those that may hold for a subject that was not opened yet."""
        return self.verdicts.of(cause, Place(f"vllm=={RELEASES}", "", "", "stored"))

    def learn(self, subject: str, found: Surveyed) -> None:
        """Take in what a survey found."""
        self.bytes_moved += found.bytes_moved
        if found.place is not None:
            self.places[subject] = found.place
        for cause, record in found.answers.items():
            self.answers[cause, subject] = record
        for cause, verdict in found.settled.items():
            self.settle((cause, subject), _known(cause, subject, verdict))

    def match(self) -> None:
        """Settle pairs that answer as a judged one did."""
        for cause, subject in self.open:
            place, answers = self.places[subject], self.answers[cause, subject]
            known = next(
                (k for k in self.verdicts.of(cause, place) if k.record.asks and k.record.same_code(answers)),
                None,
            )
            if known is not None:
                self.cached += 1
                shared = known.stands_for(answers)
                self.verdicts.add(shared, place)
                self.settle((cause, subject), shared)

    def judge(self) -> None:
        """Run one pair of each group that answers alike, unless new questions must be asked first."""
        groups: dict[tuple[str, str, str], tuple[str, str]] = {}
        for cause, subject in reversed(self.open):
            answers = self.answers[cause, subject]
            if self.questions(cause, subject).asks <= answers.asks:
                groups.setdefault((cause, scope_of(self.places[subject]), answers.key()), (cause, subject))
        tasks = [
            Task(cause, self.places[subject], self.device, self.timeout_s, self.python, str(self.cache or ""))
            for cause, subject in groups.values()
        ]
        self.bring_files(groups.values())
        done = 0

        def on_end() -> None:
            nonlocal done
            done += 1
            self.tick("bodies judged", done, len(tasks))

        for pair, task, end in zip(
            groups.values(), tasks, self.workers.judgements(tasks, self.trees, on_end), strict=True
        ):
            self.take(pair, task, end)
        self.bytes_moved += sum(tree.bytes_moved for tree in self.trees.values())

    def bring_files(self, pairs: Iterable[tuple[str, str]]) -> None:
        """Open the subjects of a round anew, for surveys fetched files meanwhile; where nothing is known to matter
        yet, fetch what surely does.
        """
        self.trees = {}
        for cause, subject in pairs:
            if subject not in self.trees:
                self.trees[subject] = open_subject(subject, python=self.python, cache=self.cache)[0]
            if not self.answers[cause, subject].asks:
                bring(self.trees[subject], probe_of(cause))

    def take(self, pair: tuple[str, str], task: Task, end: Judged) -> None:
        """A judgement; it is remembered if what it says it read is what the subject has."""
        self.judged += 1
        self.bytes_moved += end.bytes_moved
        known = Known(task.cause, task.place.subject, end.verdict, end.record or Record(), end.seconds)
        unavailable = end.verdict.evidence.detail.get("unavailable")
        if (
            end.record is not None
            and end.record.asks
            and not unavailable
            and self.is_true(end.record, pair[1])
        ):
            self.verdicts.add(known, task.place)
        self.settle(pair, known)

    def is_true(self, record: Record, subject: str) -> bool:
        """Whether the subject's files are those of a record: the process that wrote it also ran foreign code."""
        tree = self.trees.get(subject)
        return tree is not None and record.same_files(Digests(tree))

    def row(self, cause: str, subject: str, config: Config | None, root: Path | None) -> Row:
        """The row of a settled pair."""
        known = self.settled[cause, subject]
        probe, verdict = probe_of(cause), known.verdict
        place = self.places.get(subject)
        version = place.version if place else subject.partition("==")[2]
        facts = facts_of(probe, root)
        reach = reaches(cause, _of_release(config, version)) if config else Reach("unknown", "")
        same = known.subject if known.subject != subject else ""
        detail = verdict.evidence.detail
        return Row(
            subject=subject,
            version=version,
            cause=cause,
            incident=of_cause(probe.cause).slug,
            title=probe.title,
            status="not-present" if is_absent(verdict) else verdict.outcome,
            evidence=_renamed(verdict.evidence, known.subject, subject),
            hashes={str(name): str(body) for name, body in dict(detail.get("hashes") or {}).items()},
            same_code_as=same,
            fixed=facts.fixed,
            workarounds=facts.workarounds,
            expected=facts.expected(version),
            reach=reach.reachable if config is not None else "",
            reach_reason=reach.reason,
            unavailable=bool(detail.get("unavailable")),
        )


def _of_release(config: Config, version: str) -> Config:
    """The configuration on the audited release, whatever it says of the version; as it is where that is unknown."""
    if not version:
        return config
    return replace(config, version=version, sources={**config.sources, "version": "the subject"})


def _known(cause: str, subject: str, verdict: Verdict) -> Known:
    return Known(cause, subject, verdict, Record())


def _renamed(evidence: Evidence, judged: str, subject: str) -> Evidence:
    """A reason that names the subject it was judged on, for another one with the same code."""
    if judged == subject or judged not in evidence.reason:
        return evidence
    return Evidence(**{**asdict(evidence), "reason": evidence.reason.replace(judged, subject)})


@dataclass(frozen=True)
class CauseFacts:
    """What the incident file says of a cause; empty where there is no file, or it does not know the cause."""

    cause: Cause | None = None
    workarounds: tuple[str, ...] = ()

    @property
    def fixed(self) -> str:
        """The release that carries the fix."""
        return self.cause.fixed.release if self.cause and self.cause.fixed else ""

    def expected(self, version: str) -> Literal["affected", "not affected", ""]:
        """What the file says of a release."""
        with suppress(InvalidVersion):
            affected = self.cause.affects(version) if self.cause and version else None
            return "" if affected is None else "affected" if affected else "not affected"
        return ""


def facts_of(probe: Probe, root: Path | None = None) -> CauseFacts:
    """The fix and the workarounds that the incident file records for a cause."""
    incident = _incident(of_cause(probe.cause).slug, root)
    cause = next((c for c in incident.causes if c.id == probe.cause), None) if incident else None
    if incident is None or cause is None:
        return CauseFacts()
    actions = {w.id: w.action for w in incident.workarounds}
    return CauseFacts(cause, tuple(actions[id] for id in cause.workarounds))


@cached
def _incident(slug: str, root: Path | None) -> Facts | None:
    """The incident, or None where its file is missing or not fit to be read."""
    try:
        return fact_files.load(slug, root)
    except SpecmortemError:
        return None
