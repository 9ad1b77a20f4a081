"""The two pieces of work of a judgement, and who does them.

`survey` finds the files of a subject and answers what is asked of its code; no code of the tree runs. `judge_all` runs
code: each judgement in a process of `specmortem.isolation`, which types every end.
"""

from __future__ import annotations

import itertools
import os
import re
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

from specmortem.errors import BadInputError, SpecmortemError, UnavailableError
from specmortem.incident import Probe, of_cause, probe_of
from specmortem.isolation import Arm, ArmResult, keep_supervisors, run_arms
from specmortem.judge import box
from specmortem.judge.records import Question, Record, Recorded, look_up
from specmortem.judge.subjects import Place, open_subject
from specmortem.upstream.cache import default_cache
from specmortem.upstream.tree import Tree
from specmortem.verdict import DeviceKind, Evidence, Verdict

OnEnd = Callable[[], None]
Tick = Callable[[str, int, int], None]  # what is done, how many of it, of how many
MOST_FETCHES = 60  # rounds of bringing files that a judgement turned out to need
MOST_TEXT = 2000  # characters of any text that came out of foreign code
_one_batch = threading.Lock()


@dataclass(frozen=True)
class Survey:
    """What to look up in one subject: for each cause what others were asked, and answered."""

    subject: str
    questions: Mapping[str, Sequence[Record]]
    python: str = ""
    cache: Path | None = None


@dataclass
class Surveyed:
    """What was found: where the files are, the answers a cause, and causes that cannot be judged, with the verdict."""

    place: Place | None = None
    answers: dict[str, Record] = field(default_factory=dict)
    settled: dict[str, Verdict] = field(default_factory=dict)
    bytes_moved: int = 0


@dataclass(frozen=True)
class Task:
    """One judgement."""

    cause: str
    place: Place
    device: DeviceKind
    timeout_s: float = 120.0
    python: str = ""
    cache: Path | None = None


@dataclass(frozen=True)
class Judged:
    """How it ended; without a record where the process did not end by itself."""

    verdict: Verdict
    record: Record | None = None
    bytes_moved: int = 0


def survey(job: Survey) -> Surveyed:
    """Find the files of a subject and answer the questions; a subject that cannot be had settles all its causes."""
    found = Surveyed()
    try:
        tree, found.place = open_subject(job.subject, python=job.python, cache=job.cache)
    except BadInputError:
        raise
    except SpecmortemError as error:
        lost = Verdict.not_judged(str(error), unavailable=True)
        found.settled = dict.fromkeys(job.questions, lost)
        return found
    memo: dict[Question, Record] = {}
    for cause, questions in job.questions.items():
        try:
            if (settled := _absent(tree, probe_of(cause), job.subject)) is not None:
                found.settled[cause] = settled
                continue
            recorded = Recorded(tree, memo)
            for record in questions:
                recorded.ask(record)
            found.answers[cause] = recorded.record
        except SpecmortemError as error:
            gone = isinstance(error, UnavailableError)
            found.settled[cause] = Verdict.not_judged(str(error), unavailable=gone)
    found.bytes_moved = tree.bytes_moved
    return found


def _absent(tree: Tree, probe: Probe, subject: str) -> Verdict | None:
    """The verdict where the tree lacks a file that the probe needs."""
    missing = next((group for group in probe.files if tree.first(list(group)) is None), None)
    if missing is None:
        return None
    return Verdict.not_judged(f"{subject} has no {missing[0]}", absent=missing[0])


def bring(tree: Tree, probe: Probe) -> None:
    """Fetch the files that a probe is sure to need; it asks for the others itself."""
    groups = [
        (tree.first(list(group)), name) for group, name in zip(probe.files, probe.functions, strict=True)
    ]
    sure = [*groups, *((path, name) for path, name in probe.also if tree.has(path))]
    with suppress(SpecmortemError):
        tree.fetch([path for path, name in sure if path and not name])
        for path, name in sure:
            if path and name:
                look_up(tree, Question("closure", path, name))


def judge_all(
    tasks: Sequence[Task],
    trees: Mapping[str, Tree],
    on_end: Callable[[ArmResult], None] = lambda end: None,
    *,
    progress: bool = False,
) -> list[Judged]:
    """Judge, in the order of `tasks`; where files turn out to be needed, `trees` fetch them and it runs again.

    One batch at a time in a process: with foreign code in it, the environment is scrubbed meanwhile. Supervisors are
    kept from then on.
    """
    judged: dict[int, Judged] = {}
    waiting = list(range(len(tasks)))
    is_foreign = any(task.place.kind != "own" for task in tasks)
    keep_supervisors()
    with _one_batch, box.scrubbed_environment() if is_foreign else nullcontext():
        for attempt in range(MOST_FETCHES):
            ends = run_arms(
                [_arm(tasks[i]) for i in waiting],
                cuda_parallel=8,
                progress=progress,
                memory_bytes=box.MEMORY_BYTES,
                on_end=lambda end: None if _wanted(end) else on_end(end),
            )
            for i, end in zip(waiting, ends, strict=True):
                reason = _fetched(tasks[i], trees, _wanted(end), is_first=not attempt)
                if reason is not None:
                    judged[i] = judged_of(end, reason)
            waiting = [i for i in waiting if i not in judged]
            if not waiting:
                break
    return [
        judged.get(i, Judged(Verdict.not_judged("it asks for ever more files"))) for i in range(len(tasks))
    ]


def _arm(task: Task) -> Arm:
    kind = "sim" if probe_of(task.cause).needs == "interpreter" else task.device
    return Arm(
        target="specmortem.judge.cell:judge",
        kwargs={
            "cause": task.cause,
            "place": asdict(task.place),
            "device": kind,
            "cpu_seconds": task.timeout_s,
        },
        name=f"{task.cause} on {task.place.subject}",
        timeout_s=task.timeout_s,
        device=kind,
        modules=(f"{of_cause(task.cause).package}.probe",),
    )


def _wanted(end: ArmResult) -> list[str]:
    wanted = end.value.get("wanted", []) if isinstance(end.value, dict) else []
    return [path for path in wanted if isinstance(path, str)]


def _fetched(task: Task, trees: Mapping[str, Tree], wanted: list[str], *, is_first: bool) -> str | None:
    """None when files were wanted and are here now; else why there is nothing to wait for, empty for no reason."""
    if not wanted:
        return ""
    tree = trees.get(task.place.subject)
    if tree is None:
        return f"{wanted[0]} is not here"
    try:
        tree.fetch(wanted)
    except SpecmortemError as error:
        return str(error)
    if is_first:
        bring(tree, probe_of(task.cause))
    return None


def judged_of(end: ArmResult, reason: str = "") -> Judged:
    """What an end amounts to; `reason` says why a judgement could not begin.

    On the simulated device only a value can be a fault or clean.
    """
    if reason:
        return Judged(Verdict.not_judged(reason, unavailable=True))
    if end.kind == "value":
        try:
            return _valued(end)
        except (SpecmortemError, TypeError, ValueError, LookupError, AttributeError) as error:
            told = f"the process left no verdict: {type(error).__name__}: {error}"
            return Judged(Verdict.not_judged(_plain(told)))
    evidence = Evidence(
        reason=_plain(f"{end.kind}: {end.message}"), detail={"stderr": _plain(end.stderr_tail[-800:])}
    )
    is_fault = end.arm.device == "cuda" and end.kind in ("illegal-address", "device-assert")
    return Judged(Verdict("fault" if is_fault else "not-judged", evidence))


def _valued(end: ArmResult) -> Judged:
    verdict = Verdict.from_dict(_plain(end.value["verdict"]))
    judged_on = "interpreter" if end.arm.device == "sim" else "cuda"
    detail = {**verdict.evidence.detail, "judged_on": judged_on}
    if end.value["box"]:
        detail["box"] = _plain(end.value["box"])
    verdict = verdict.replace(evidence=verdict.evidence.replace(detail=detail))
    return Judged(verdict, Record.from_dict(end.value["record"]))


def _plain(value: Any) -> Any:
    """Texts without control characters and of a sensible length, in whatever holds them."""
    if isinstance(value, str):
        return re.sub(
            r"[\x00-\x09\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]", "\N{REPLACEMENT CHARACTER}", value
        )[:MOST_TEXT]
    if isinstance(value, dict):
        return {_plain(str(key)): _plain(part) for key, part in value.items()}
    return [_plain(part) for part in value] if isinstance(value, list) else value


class Workers(Protocol):
    """Does surveys and judgements in parallel; both come back in the order that they were given."""

    def surveys(self, jobs: Sequence[Survey], on_end: OnEnd) -> list[Surveyed]:
        """Survey subjects."""

    def judgements(self, tasks: Sequence[Task], trees: Mapping[str, Tree], on_end: OnEnd) -> list[Judged]:
        """Judge pairs."""


@dataclass(frozen=True)
class Local:
    """This machine: isolated processes for judgements, and `processes` of joblib for surveys.

    `on_end` is told how each process ended; `progress` shows a bar of them where stderr is a terminal.
    """

    processes: int = field(default_factory=lambda: os.cpu_count() or 1)
    progress: bool = False
    on_end: Callable[[ArmResult], None] | None = None

    def surveys(self, jobs: Sequence[Survey], on_end: OnEnd) -> list[Surveyed]:
        """In processes where there are several subjects, else here.

        joblib keeps its processes, with the environment they began in: the cache is told to each.
        """
        jobs = [replace(job, cache=job.cache or default_cache()) for job in jobs]
        count = min(len(jobs), self.processes)
        if count < 2:
            return list(_ticking(map(survey, jobs), on_end))
        from joblib import Parallel, delayed

        found = Parallel(n_jobs=count, return_as="generator")(delayed(survey)(job) for job in jobs)
        return list(_ticking(found, on_end))

    def judgements(self, tasks: Sequence[Task], trees: Mapping[str, Tree], on_end: OnEnd) -> list[Judged]:
        """In isolated processes."""

        def ended(end: ArmResult) -> None:
            on_end()
            if self.on_end is not None:
                self.on_end(end)

        return judge_all(tasks, trees, ended, progress=self.progress)


def counter(tick: Tick, what: str, total: int) -> OnEnd:
    """Each call tells `tick` that one more of `total` is done."""
    done = itertools.count(1)
    return lambda: tick(what, next(done), total)


def _ticking(items: Iterable[Any], on_end: OnEnd) -> Iterator[Any]:
    for item in items:
        yield item
        on_end()


def is_absent(verdict: Verdict) -> bool:
    """Whether a verdict says that the tree does not have the code."""
    detail = verdict.evidence.detail
    return verdict.outcome == "not-judged" and bool(detail.get("absent")) and not detail.get("unavailable")
