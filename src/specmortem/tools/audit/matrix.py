"""The audit itself: every probe of the chosen causes over the subjects, joined with the incident files."""

from __future__ import annotations

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
from specmortem.judge import LINE, device_kind
from specmortem.judge.rounds import Rounds
from specmortem.judge.subjects import is_own
from specmortem.judge.work import Local, Tick, Workers, is_absent
from specmortem.verdict import DeviceKind, Evidence

Status = Literal["fault", "clean", "not-present", "not-judged"]


@dataclass(frozen=True)
class AuditRow:
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
        if self.same_code_as and LINE.search(told + place):
            place += f" [lines of {self.same_code_as}, the same code]"
        return " ".join(f"{told}{place}".split())

    @property
    def advice(self) -> str:
        """What to do about a fault."""
        if self.status != "fault":
            return ""
        fix = f"fixed in {self.fixed}" if self.fixed else ""
        return "; ".join(filter(None, [fix, *self.workarounds]))

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
    """The rows, in the order of causes and subjects, and what they took.

    `config` is the launch that was judged, the first of `launches` that were stated.
    """

    rows: tuple[AuditRow, ...]
    judged: int
    cached: int
    bytes_moved: int
    device: DeviceKind
    config: Config | None = None
    launches: int = 1


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
    for subject in filter(is_own, subjects):
        upstream.resolve(subject)
    subjects, kind = list(dict.fromkeys(subjects)), device_kind(device)
    causes = [probe_of(cause).cause for cause in causes] or list(known_causes())
    pairs = [(cause, subject) for cause in causes for subject in subjects]
    run = Rounds(
        pairs,
        kind,
        keep=keep,
        workers=workers or Local(),
        timeout_s=timeout_s,
        cache=cache,
        python=python,
        without_gpu="run the audit with --device cuda",
        tick=tick,
    )
    run.settle_all()
    rows = tuple(_row(run, cause, subject, config, root) for cause, subject in pairs)
    return Audit(rows, run.judged, run.cached, run.bytes_moved, kind, config)


def _row(run: Rounds, cause: str, subject: str, config: Config | None, root: Path | None) -> AuditRow:
    """The row of a settled pair."""
    known, probe = run.settled[cause, subject], probe_of(cause)
    verdict = known.verdict_on(subject)
    place = run.places.get(subject)
    version = place.version if place else subject.partition("==")[2]
    facts = facts_of(probe, root)
    reach = reaches(cause, _of_release(config, version)) if config else Reach("unknown", "")
    detail = verdict.evidence.detail
    return AuditRow(
        subject=subject,
        version=version,
        cause=cause,
        incident=of_cause(probe.cause).slug,
        title=probe.title,
        status="not-present" if is_absent(verdict) else verdict.outcome,
        evidence=verdict.evidence,
        hashes={str(name): str(body) for name, body in dict(detail.get("hashes") or {}).items()},
        same_code_as=known.subject if known.subject != subject else "",
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
