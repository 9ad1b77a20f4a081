"""The path that every judgement takes: fetch what a probe needs, judge one body of code once, share its verdict.

In rounds: what the cache knows; what another subject with the same answers was judged; then one judgement for each
group of pairs that are still open and answer alike. A round can teach new questions, which the next one asks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from specmortem import upstream
from specmortem.errors import BadInputError, SpecmortemError
from specmortem.incident import causes as all_causes
from specmortem.incident import probe_of
from specmortem.judge.records import Digests, Known, Record
from specmortem.judge.subjects import Place, is_own, open_subject, package_of
from specmortem.judge.verdicts import RELEASES, Verdicts, scope_of
from specmortem.judge.work import Judged, Survey, Surveyed, Task, Tick, Workers, counter
from specmortem.upstream.tree import Tree
from specmortem.verdict import DeviceKind, Verdict

Pair = tuple[str, str]  # cause, subject


class Rounds:
    """The state of a run: which pairs are open, what was asked and answered, what is settled.

    `keep=False` neither reads nor writes the cache of verdicts: only pairs of this run share them. `python` is the
    interpreter whose environment `installed` means. `without_gpu` ends the verdict on a cause that needs one where
    there is none; by default it says why the cause does.
    """

    def __init__(
        self,
        pairs: Sequence[Pair],
        device: DeviceKind,
        *,
        keep: bool,
        workers: Workers,
        timeout_s: float,
        cache: Path | None = None,
        python: str = "",
        without_gpu: str = "",
        tick: Tick = lambda what, done, total: None,
    ) -> None:
        """Nothing is judged before `settle_all`."""
        self.pairs = list(dict.fromkeys(pairs))
        self.device, self.keep, self.workers, self.timeout_s = device, keep, workers, timeout_s
        self.cache, self.python, self.without_gpu, self.tick = cache, python, without_gpu, tick
        self.verdicts = Verdicts(device, cache, keep=keep)
        self.places: dict[str, Place] = {}
        self.settled: dict[Pair, Known] = {}
        self.judged = self.cached = self.bytes_moved = 0
        self._trees: dict[str, Tree] = {}
        self._answers: dict[Pair, Record] = {}
        self._apart: set[str] = set()  # causes of which a judgement gave nothing that could be shared

    @property
    def open(self) -> list[Pair]:
        """Pairs without a verdict; the newest subject of the command line last."""
        return [pair for pair in self.pairs if pair not in self.settled]

    def settle_all(self) -> dict[Pair, Known]:
        """What is known of every pair in the end. Raises BadInputError for a malformed subject."""
        for pair in self.pairs:
            self._without_running(*pair)
        if self.keep:
            self._from_cache()
        while self.open:
            self._survey()
            self._match()
            self._judge()
        return self.settled

    def _settle(self, pair: Pair, known: Known) -> None:
        self.settled[pair] = known
        self.tick("verdicts", len(self.settled), len(self.pairs))

    def _settle_unread(self, pair: Pair, verdict: Verdict) -> None:
        self._settle(pair, Known(*pair, verdict, Record()))

    def _without_running(self, cause: str, subject: str) -> None:
        """Settle what needs a GPU or another package; this package's own code is asked nothing."""
        probe = probe_of(cause)
        if is_own(subject):
            self.places[subject] = Place(subject, "", "", "own")
            self._answers[cause, subject] = Record()
        if self.device == "sim" and probe.needs == "cuda":
            told = f"needs a GPU: {self.without_gpu or probe.why}"
            self._settle_unread((cause, subject), Verdict.not_judged(told, needs="cuda"))
        elif (package := package_of(subject)) not in probe.packages:
            able = [name for name in all_causes() if package in probe_of(name).packages]
            told = f"{subject} is a subject of {', '.join(able) or 'no cause'} only"
            self._settle_unread((cause, subject), Verdict.not_judged(told))

    def _from_cache(self) -> None:
        """Verdicts whose files are, byte for byte, those that lie here; nothing is fetched."""
        for subject in dict.fromkeys(subject for _, subject in self.open):
            place = self._place_here(subject)
            if place is None:
                continue
            digests = Digests(place.open())
            for pair in [pair for pair in self.open if pair[1] == subject]:
                same = (
                    known for known in self.verdicts.of(pair[0], place) if known.record.same_files(digests)
                )
                if (known := next(same, None)) is not None:
                    self.cached += 1
                    self._settle(pair, known)

    def _place_here(self, subject: str) -> Place | None:
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

    def _survey(self) -> None:
        """Ask every subject what is known to matter, until nothing is left that was not asked of it yet."""
        while asked := self._unasked():
            jobs = [
                Survey(subject, questions, self.python, self.cache) for subject, questions in asked.items()
            ]
            on_end = counter(self.tick, "subjects read", len(jobs))
            for job, found in zip(jobs, self.workers.surveys(jobs, on_end), strict=True):
                self._learn(job.subject, found)

    def _unasked(self) -> dict[str, dict[str, list[Record]]]:
        """A subject and cause: what verdicts rest on of which its answers do not tell yet whether they hold."""
        asked: dict[str, dict[str, list[Record]]] = {}
        for cause, subject in self.open:
            answers = self._answers.get((cause, subject))
            records = [known.record for known in self._candidates(cause, subject)]
            unsure = [record for record in records if record.same_code(answers or Record()) is None]
            if answers is None or unsure:
                alone = {r.key(): Record(answers=r.answers) for r in unsure}  # without the files they rest on
                asked.setdefault(subject, {})[cause] = list(alone.values())
        return asked

    def _candidates(self, cause: str, subject: str) -> list[Known]:
        """Verdicts that may hold for a subject; for one that was not opened yet, those on releases."""
        place = self.places.get(subject, Place(f"vllm=={RELEASES}", "", "", "stored"))
        known = self.verdicts.of(cause, place) if place.kind != "own" else []
        return [one for one in known if one.record.answers]

    def _learn(self, subject: str, found: Surveyed) -> None:
        """Take in what a survey found."""
        self.bytes_moved += found.bytes_moved
        if found.place is not None:
            self.places[subject] = found.place
        for cause, record in found.answers.items():
            self._answers.setdefault((cause, subject), Record()).add(record)
        for cause, verdict in found.settled.items():
            self._settle_unread((cause, subject), verdict)

    def _match(self) -> None:
        """Settle pairs that answer as a judged one did."""
        for cause, subject in self.open:
            answers = self._answers[cause, subject]
            same = (known for known in self._candidates(cause, subject) if known.record.same_code(answers))
            if (known := next(same, None)) is not None:
                self.cached += 1
                shared = replace(known, record=answers)  # the same answers, from other files
                self.verdicts.add(shared, self.places[subject])
                self._settle((cause, subject), shared)

    def _judge(self) -> None:
        """Run one pair of each group that answers alike."""
        groups: dict[tuple[str, str, str], Pair] = {}
        for cause, subject in reversed(self.open):
            alike = subject if cause in self._apart else self._answers[cause, subject].key()
            groups.setdefault((cause, scope_of(self.places[subject]), alike), (cause, subject))
        tasks = [
            Task(cause, self.places[subject], self.device, self.timeout_s, self.python, self.cache)
            for cause, subject in groups.values()
        ]
        self._trees = {
            task.place.subject: open_subject(task.place.subject, python=self.python, cache=self.cache)[0]
            for task in tasks
            if task.place.kind != "own"
        }
        on_end = counter(self.tick, "bodies judged", len(tasks))
        for task, end in zip(tasks, self.workers.judgements(tasks, self._trees, on_end), strict=True):
            self._take(task, end)
        self.bytes_moved += sum(tree.bytes_moved for tree in self._trees.values())

    def _take(self, task: Task, end: Judged) -> None:
        """A judgement; it is remembered if what it says it read is what the subject has."""
        self.judged += 1
        self.bytes_moved += end.bytes_moved
        record = end.record or Record()
        known = Known(task.cause, task.place.subject, end.verdict, record)
        unavailable = end.verdict.evidence.detail.get("unavailable")
        if record.answers and not unavailable and self._is_true(record, known.subject):
            self.verdicts.add(known, task.place)
        elif task.place.kind != "own":
            self._apart.add(task.cause)
        self._settle((task.cause, known.subject), known)

    def _is_true(self, record: Record, subject: str) -> bool:
        """Whether the subject's files are those of a record: the process that wrote it also ran foreign code."""
        tree = self._trees.get(subject)
        return tree is not None and record.same_files(Digests(tree))
