"""Run the arms of an experiment, one engine process after the other, and keep a valid result file all the time."""

from __future__ import annotations

import hashlib
import json
import platform
import signal
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from statistics import median, quantiles
from typing import Any, NamedTuple, cast

import msgspec

from specmortem import isolation, verdict
from specmortem.errors import BadInputError
from specmortem.tools.engine import judge, process
from specmortem.tools.engine.arms import EngineArm, Experiment
from specmortem.tools.engine.process import Environment, Event, StartLimits
from specmortem.tools.engine.result import (
    FAULTS,
    ArmRuns,
    Counts,
    EngineRequest,
    EngineResults,
    Run,
    RunAcceptance,
    RunKind,
    RunOutcome,
    Start,
    Status,
)
from specmortem.tools.engine.workload import Answers, Workload, plan, warm_up

Say = Callable[[str], None]
DRIVER_S = 20.0
ABORT = "abort"
AS_TOLD = ("delay_us", "draft_delay_us", "draft_passes", "patched_calls", "emitted")  # of the event `run`
Requests = Mapping[str, Mapping[str, Any]]  # as the child is told them, by id


@dataclass(frozen=True)
class Options:
    """What a call asks for: `arms` by name (none: all), the least count of runs, minutes for all of it."""

    arms: tuple[str, ...] = ()
    runs: int | None = None
    minutes: float | None = None
    resume: bool = False
    command: str = ""


def run(
    experiment: Experiment,
    environments: Mapping[str, Environment],
    root: Path,
    out: Path,
    options: Options,
    say: Say = lambda line: None,
) -> EngineResults:
    """Run the arms and write `out`; the result so far is there after every run.

    A run that faults or hangs counts as a run and costs its engine, so that a new one is started for those left. An
    engine that does not come up, or that ends in what is no fault (an exception in Python, memory that is not there),
    ends its arm: that is no run. SIGINT, SIGTERM and the end of the time leave a partial
    result. Raises BadInputError when an arm's release has no environment, UnavailableError when the model, a process
    or the result's folder cannot be had.
    """
    chosen = [experiment.arm(name) for name in options.arms] or list(experiment.arms)
    if lacking := sorted({arm.vllm for arm in chosen} - set(environments)):
        raise BadInputError(f"no environment for vllm {lacking[0]}; give --at {lacking[0]}=PYTHON or DIR:DIR")
    with _terminable(), isolation.open_supervisor("cuda") as supervisor:
        folder = experiment.model.folder(root, supervisor.folder / "model")
        named: dict[str | Path, str] = {root: "CHECKOUT", folder: "MODEL"}
        return EngineCampaign(experiment, folder, out, options, say, named).run(chosen, environments)


@contextmanager
def _terminable() -> Iterator[None]:
    """SIGTERM, as of a time limit around the command, ends the block like Ctrl-C; only where that can be caught."""
    try:
        old = signal.signal(signal.SIGTERM, signal.default_int_handler)
    except ValueError:  # not the main thread
        yield
        return
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, old)


class RunPlan(NamedTuple):
    """What the child is told of a run, its requests, and their right answers; None also where sampling makes others
    right.
    """

    told: Mapping[str, Any]
    requests: Requests
    answers: Answers


@dataclass
class EngineCampaign:
    """The state of a call of `run`: `folder` holds the model, `named` are words for places that are not told."""

    experiment: Experiment
    folder: Path
    out: Path
    options: Options
    say: Say
    named: Mapping[str | Path, str]

    def __post_init__(self) -> None:
        self.runs = self.options.runs or self.experiment.runs
        config = json.loads((self.folder / "config.json").read_text(encoding="utf-8"))
        self.eos = config.get("eos_token_id")
        minutes = self.options.minutes
        self.until = time.monotonic() + 60 * minutes if minutes is not None else float("inf")
        self.plans: dict[tuple[int, Workload], RunPlan] = {}
        self.host = {"system": platform.platform(), "driver": _driver(), **verdict.versions(("specmortem",))}
        self.results = self._begun()
        self.arms = {arm.name: arm for arm in self.results.arms}

    def _begun(self) -> EngineResults:
        """The result so far: what `--resume` finds, else an empty one."""
        fresh = self._fresh()
        if not (self.options.resume and self.out.exists()):
            return fresh
        old = EngineResults.load(self.out)
        if (old.incident, old.seed, dict(old.model)) != (fresh.incident, fresh.seed, dict(fresh.model)):
            raise BadInputError(
                f"{self.out} is of another incident, seed or model; give another --out, or go without --resume"
            )
        command = f"{old.command}\n{self.options.command}"
        return fresh.replace(arms=old.arms, started=old.started, command=command)

    def _fresh(self) -> EngineResults:
        found, model = self.experiment, self.experiment.model
        return EngineResults(
            incident=found.incident,
            question=found.question,
            status="partial",
            command=self.options.command,
            started=datetime.now(UTC).isoformat(timespec="seconds"),
            seed=found.seed,
            model={
                "path": model.path,
                "config": dict(model.config or {}),
                "tasks": model.tasks,
                "sha256": _digests(self.folder),
            },
            arms=(),
            pairs=tuple(asdict(pair) for pair in found.pairs),
            notes=found.notes,
        )

    def run(self, chosen: Sequence[EngineArm], environments: Mapping[str, Environment]) -> EngineResults:
        """All arms, in order."""
        try:
            ended = all(self.arm(arm, environments[arm.vllm]) for arm in chosen)
        except KeyboardInterrupt:
            ended = False
        if not ended:
            self.save("interrupted")
        elif all(arm.name in self.arms and self.arms[arm.name].whole for arm in self.experiment.arms):
            self.save("complete")
        else:
            self.save()
        return self.results

    def arm(self, arm: EngineArm, environment: Environment) -> bool:
        """All runs of an arm that are not there yet; False when the time was up or somebody interrupted."""
        self.arms[arm.name] = self._old(arm)
        while not self.arms[arm.name].whole:
            done = {run.run for run in self.arms[arm.name].runs}
            left = [number for number in range(self.runs) if number not in done]
            self.say(f"{arm.name}: vllm {arm.vllm}, runs {left[0]} to {left[-1]}: starting an engine")
            start = self._start(arm, environment, left)
            self.say(f"{arm.name}: {_told(start)}")
            if start.kind == "interrupted":
                return False
            if not start.judges or len(self.arms[arm.name].runs) == len(done):
                break  # what did not come up, or failed in Python, will do so the next time too
        return True

    def _old(self, arm: EngineArm) -> ArmRuns:
        """What an earlier call left of this arm. Raises BadInputError when it was another configuration."""
        fresh = ArmRuns(arm.name, arm.config(), arm.reference, arm.says, self.runs)
        if (old := self.arms.get(arm.name)) is None:
            return fresh
        if dict(old.config) != arm.config():
            raise BadInputError(
                f"{self.out}: arm {arm.name} was run with another configuration; give another --out"
            )
        return old.replace(planned=self.runs)

    def _start(self, arm: EngineArm, environment: Environment, left: Sequence[int]) -> Start:
        """One engine process for the runs that are left; what it tells goes into the result at once."""
        follower = _Follower(self, arm, len(self.arms[arm.name].starts))
        runs = [self.plan(arm, number).told for number in left]
        request = {
            "vllm": arm.vllm,
            "patch": arm.patch,
            "engine": {**arm.engine, "model": str(self.folder)},
            "warm": warm_up(runs[0]),
            "runs": runs,
        }
        limits = StartLimits(self.experiment.start_timeout_s, self.experiment.run_timeout_s, self.until)
        ended = process.run(request, environment, arm.env, limits, follower.take, self.named)
        start = ended.replace(host=self.host)
        follower.end(start)
        return start

    def plan(self, arm: EngineArm, number: int) -> RunPlan:
        """Run `number` of an arm; made once for all arms of a workload."""
        work = arm.workload
        if (number, work) not in self.plans:
            told, answers = plan(work, self.experiment.model.source(), self.experiment.seed, number)
            requests = {each["id"]: each for part in told["rounds"] for each in part["requests"]}
            known = answers if work.temperature == 0 else dict.fromkeys(answers)
            self.plans[number, work] = RunPlan(told | {"eos": self.eos}, requests, known)
        return self.plans[number, work]

    def compares(self, arm: EngineArm) -> bool:
        """Whether it has a reference, or is one."""
        return bool(arm.reference) or any(other.reference == arm.name for other in self.experiment.arms)

    def add_start(self, arm: EngineArm, start: Start) -> None:
        """Put in the end of a process, and save."""
        old = self.arms[arm.name]
        self.arms[arm.name] = old.replace(starts=(*old.starts, start))
        self.save()

    def add_run(self, arm: EngineArm, found: Run) -> None:
        """Put in a run, compare it, and save."""
        old = self.arms[arm.name]
        self.arms[arm.name] = old.replace(runs=(*old.runs, found))
        for other in self.experiment.arms:
            if other.reference and arm.name in (other.name, other.reference):
                self._compare(other, found.run)
        self.save()

    def save(self, status: Status = "partial") -> None:
        """Write the file, its arms in the order of the experiment."""
        order = [arm.name for arm in self.experiment.arms]
        named = sorted(self.arms, key=lambda name: order.index(name) if name in order else len(order))
        self.results = self.results.replace(status=status, arms=tuple(self.arms[name] for name in named))
        self.results.save(self.out)

    def _compare(self, arm: EngineArm, number: int) -> None:
        """Run `number` of an arm with that of its reference, if both are there and as they are asked for now."""
        mine, plain = self._run(arm, number), self._run(self.experiment.arm(arm.reference), number)
        if mine is None or plain is None:
            return
        _, requests, answers = self.plan(arm, number)
        made = beside(mine, plain, requests, answers)
        old = self.arms[arm.name]
        self.arms[arm.name] = old.replace(runs=tuple(made if run is mine else run for run in old.runs))

    def _run(self, arm: EngineArm, number: int) -> Run | None:
        found = self.arms.get(arm.name)
        if found is None or dict(found.config) != arm.config():
            return None
        return next((run for run in found.runs if run.run == number), None)


@dataclass
class _Follower:
    """Turns what one process tells, that of start `start` of an arm, into runs."""

    campaign: EngineCampaign
    arm: EngineArm
    start: int
    current: int | None = None
    first: bool = True
    requests: list[EngineRequest] = field(default_factory=list)

    def take(self, event: Event) -> None:
        if event["event"] == "up":
            self.campaign.say(f"{self.arm.name}: engine up after {event['seconds']:.1f} s {event['chosen']}")
        elif event["event"] == "begin":
            self.current, self.requests = event["run"], []
        elif event["event"] == "request":
            id, (_, requests, answers) = event["id"], self.campaign.plan(self.arm, event["run"])
            found = judged(id, requests[id], event["tokens"], event["finish"], answers[id])
            self.requests.append(found)
        elif event["event"] == "run":
            self._whole(event)

    def _whole(self, event: Event) -> None:
        counted, times = event["acceptance"], event["step_ms"]
        self._add(
            "whole",
            "value",
            acceptance=msgspec.convert(counted, RunAcceptance) if "draft_tokens" in counted else None,
            steps=len(times),
            median_ms=round(median(times), 4) if times else None,
            p99_ms=round(p99(times), 4) if times else None,
            seconds=round(event["seconds"], 3),
            **{name: event[name] for name in AS_TOLD},
        )

    def _add(self, outcome: RunOutcome, kind: RunKind, **more: Any) -> None:
        assert self.current is not None
        number, self.current = self.current, None
        lost = set(self.campaign.plan(self.arm, number).requests) - {each.id for each in self.requests}
        bare = Run(number, self.start, self.first, outcome, kind, Counts(), lost=tuple(sorted(lost)), **more)
        found = with_requests(bare, self.requests, every=self.campaign.compares(self.arm))
        self.first = False
        self.campaign.add_run(self.arm, found)
        self.campaign.say(f"{self.arm.name}: run {number}: {_summary(found)}")

    def end(self, start: Start) -> None:
        """A run that ended in a fault, or hung, counts; one that was stopped, or failed otherwise, does not."""
        if self.current is not None and start.kind in FAULTS:
            self._add("timeout" if start.kind == "timeout" else "fault", cast(RunKind, start.kind))
        self.campaign.add_start(self.arm, start)


def judged(
    id: str, asked: Mapping[str, Any], tokens: Sequence[int], finish: str, answer: Sequence[int] | None
) -> EngineRequest:
    """A request by its right answer; without one, as where tokens are sampled, it stays unjudged."""
    came = EngineRequest(id, len(asked["prompt"]), asked["max_tokens"], len(tokens), finish, judged=False)
    if answer is None:
        return came.replace(got=tuple(tokens))
    at = judge.wrong_at(tokens, answer)
    return came.replace(
        judged=True,
        wrong_at=at,
        early=judge.ends_early(tokens, answer, finish),
        ends_in_loop=judge.ends_in_loop(tokens, answer),
        got=tuple(tokens) if at is not None else (),
    )


def with_requests(run: Run, requests: Iterable[EngineRequest], every: bool) -> Run:
    """A run with the counts of all of its requests, and those of them that are worth keeping.

    `every` keeps those without a known answer too, whose tokens could not be had again.
    """
    requests = tuple(requests)
    kept = tuple(r for r in requests if _telling(r) or (every and not r.judged))
    ids = {request.id for request in kept}
    short = {r.id: r.tokens for r in requests if r.id not in ids and r.tokens < r.max_tokens}
    counts = Counts(
        ended=len(requests),
        judged=sum(r.judged for r in requests),
        wrong=sum(r.wrong_at is not None for r in requests),
        early=sum(r.early for r in requests),
        ends_in_loop=sum(r.ends_in_loop for r in requests),
        compared=sum(r.plain != "not-compared" for r in requests),
        differs=sum(r.plain == "differs" for r in requests),
    )
    return run.replace(counts=counts, kept=kept, short=short)


def _telling(request: EngineRequest) -> bool:
    if not request.judged:
        return request.plain == "differs"
    cut = request.tokens < request.max_tokens and request.finish != ABORT
    return request.damaged or request.plain == "differs" or cut


def requests_of(run: Run, planned: Requests, answers: Answers) -> dict[str, EngineRequest]:
    """All requests of a run that ended, by id: those kept, and the others, which have the start of their answer."""
    found = {request.id: request for request in run.kept}
    for id, asked in planned.items():
        if id not in found and id not in run.lost and answers.get(id) is not None:
            most = asked["max_tokens"]
            finish = ABORT if id in run.short else "length"
            tokens = run.short.get(id, most)
            found[id] = EngineRequest(id, len(asked["prompt"]), most, tokens, finish, judged=True)
    return found


def beside(run: Run, plain: Run, planned: Requests, answers: Answers) -> Run:
    """A run whose requests are compared with those of the same run without speculation."""
    others = requests_of(plain, planned, answers)
    mine = requests_of(run, planned, answers).values()
    return with_requests(run, (_beside(r, others.get(r.id), answers.get(r.id)) for r in mine), every=True)


def tokens_of(request: EngineRequest, answer: Sequence[int] | None) -> tuple[int, ...]:
    """The tokens of a request, from those kept or from the right answer."""
    if request.got or request.tokens == 0 or answer is None:
        return request.got
    return tuple(answer[: request.tokens])


def _beside(
    request: EngineRequest, plain: EngineRequest | None, answer: Sequence[int] | None
) -> EngineRequest:
    """A request with what the same one got without speculation, as far as both go.

    Where one was aborted before its first token there is nothing to compare.
    """
    if plain is None or (ABORT in (request.finish, plain.finish) and not (request.tokens and plain.tokens)):
        return request.replace(plain="not-compared", plain_at=None)
    mine, other = tokens_of(request, answer), tokens_of(plain, answer)
    at = judge.first_difference(mine, other)
    if at is None and len(mine) != len(other) and ABORT not in (request.finish, plain.finish):
        at = min(len(mine), len(other))
    return request.replace(plain="same" if at is None else "differs", plain_at=at)


def p99(values: Sequence[float]) -> float:
    """The 99th percentile, interpolated; of fewer than two values the largest."""
    return max(values) if len(values) < 2 else quantiles(values, n=100, method="inclusive")[98]


def _driver() -> str:
    """The GPU driver's version by nvidia-smi; empty where it does not say."""
    try:
        ended = subprocess.run(
            ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"],
            capture_output=True,
            text=True,
            timeout=DRIVER_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return ended.stdout.strip().partition("\n")[0] if ended.returncode == 0 else ""


def _digests(folder: Path) -> dict[str, str]:
    """SHA-256 of the model's files."""
    return {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.iterdir())
        if path.suffix in (".json", ".safetensors") and path.name != "training.json"
    }


def _summary(run: Run) -> str:
    ended = run.counts.ended
    if run.outcome != "whole":
        return f"{run.outcome} ({run.kind}), {ended} requests ended, {len(run.lost)} lost"
    damaged = sum(request.damaged for request in run.kept)
    judged = f"{damaged} damaged" if run.counts.judged else "answers not judged"
    rate = run.acceptance.rate if run.acceptance else None
    accepted = f", accepted {rate:.1%}" if rate is not None else ""
    return f"{ended} requests, {judged}{accepted}, {run.steps} steps, {run.seconds:.1f} s"


def _told(start: Start) -> str:
    if start.kind == "value":
        return "engine done"
    judged = "" if start.judges else "; the arm is not judged"
    return f"engine ended in {start.phase}: {start.told}{judged}"
