"""Arms of incident `async-accepted-counts`: where the copy lands, what each change does, what the text becomes.

Every function takes JSON-able arguments, runs in a process of its own and returns what JSON can hold. An arm is a key
of `POLICIES`, a mode one of none, all, align. A *transition* is one step's rows becoming the next step's, with the
counts of the first under way; in a transition only rows with drafts are judged, since they alone look a state up.
"""

from __future__ import annotations

import math
import random
import statistics
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from specmortem import device as devices
from specmortem import upstream
from specmortem.detect import staging
from specmortem.device import Device, HostBuffer, Observer, Op, Region, Stream, TraceRecord
from specmortem.errors import BadInputError
from specmortem.incidents.async_accepted_counts import causal_conv_update
from specmortem.incidents.async_accepted_counts.engine import word_model
from specmortem.incidents.async_accepted_counts.engine.accepted_counts import Mode, policy
from specmortem.incidents.async_accepted_counts.engine.async_runner import (
    AsyncRunner,
    AsyncScheduler,
    RunnerConfig,
    WordRequest,
    serve,
)
from specmortem.incidents.async_accepted_counts.engine.count_loop import (
    Change,
    CountLoop,
    Counts,
    LoopSize,
    Timing,
    random_change,
)
from specmortem.incidents.async_accepted_counts.engine.graph_metadata import (
    ROWS,
    GraphMetadata,
    Rows,
    SpecMetadata,
)
from specmortem.incidents.async_accepted_counts.engine.word_model import WINDOW
from specmortem.kernels import Backend, gated_delta_state
from specmortem.kernels.released_lookups import PLATFORM, gating_inputs
from specmortem.upstream.vllm_files import CONV, GATING

ARRAY = "num_accepted_tokens_cpu"
COPY = "counts to host"
DRAFTS = 3
LANDINGS = ("before", "inside", "after")
NO_FLIGHT = "not-in-flight"
EXAMPLE_ROWS = {1: True, 2: True, 3: True, 4: False}
EXAMPLE_COUNTS = {1: 4, 2: 2, 3: 3, 4: 1}
EXAMPLE_CHANGE = Change(leaves=(1,), comes=(5,))
MOVES = ("neither", "swapped", "condensed", "both")


class Move(NamedTuple):
    """A transition: rows of step N in order with their drafts, what each accepted, and what changes."""

    rows: dict[int, bool]
    counts: dict[int, int]
    change: Change


EXAMPLE = Move(EXAMPLE_ROWS, EXAMPLE_COUNTS, EXAMPLE_CHANGE)
STEADY = Move({1: True, 2: True}, {1: 4, 2: 2}, EXAMPLE_CHANGE)


class Landed(NamedTuple):
    """One interleaving of a transition."""

    landing: str
    landed_before_read: bool
    rows: list[tuple[int, int, int]]  # request, count it got, count it should have


def random_move(rng: random.Random, most: int = 8, k: int = 3) -> Move:
    """2 to `most` rows, decodes ahead of prefills as a reordered batch has them."""
    size = rng.randint(2, most)
    decodes = rng.randint(1, size)
    rows = {name: name <= decodes for name in range(1, 1 + size)}
    counts = {name: rng.randint(1, 1 + k) if drafted else 1 for name, drafted in rows.items()}
    return Move(rows, counts, random_change(rng, rows, 1 + size, most))


def _transition(dev: Device, arm: str, mode: Mode, move: Move) -> CountLoop:
    loop = CountLoop(dev, policy(arm, mode), mode)
    loop.start(move.rows, lambda name, drafted: [move.counts[name]])
    loop.step(move.change, lambda name, drafted: [1])
    return loop


def _landed(arm: str, mode: Mode, move: Move) -> list[Landed]:
    """Every distinguishable interleaving of a transition."""

    def program(dev: Device) -> Landed:
        loop = _transition(dev, arm, mode, move)
        trace = list(dev.trace)
        back = dev.host_buffer(loop.brought.shape, torch.int32, name="brought back")
        dev.copy_async(back, loop.brought, loop.stream)
        loop.stream.synchronize()
        got = dict(zip(loop.batch.order, back[...].ravel().tolist(), strict=False))
        quiet = (*move.change.comes, *move.change.prefilling)
        rows = [(name, got[name], move.counts[name]) for name in loop.batch.order if name not in quiet]
        return Landed(*_place(trace, loop), rows)

    found = []
    for one in devices.enumerate_schedules(program):
        if isinstance(one.outcome, Exception):
            raise one.outcome
        found.append(one.outcome)
    return found


def _place(trace: Sequence[TraceRecord], loop: CountLoop) -> tuple[str, bool]:
    """Where the copy ran among the row moves' accesses of the array, and whether it did before the gather's read.

    It is not in flight where there is none, or where the step before has waited for it.
    """
    span, copies = loop.move_span, [r.by for r in trace if r.name == COPY]
    at = next((i for i, r in enumerate(trace) if r.by == "queue" and r.name == COPY), len(trace))
    accesses = [
        i for i, r in enumerate(trace) if r.by == "host" and r.name == ARRAY and r.what in ("read", "write")
    ]
    moves = [i for i in accesses if span[0] <= i < span[1]]
    read = next((i for i in accesses if i >= span[1]), len(trace))
    gone = sum(i < at for i in moves)
    landing = "after" if gone == len(moves) else "before" if gone == 0 else "inside"
    return landing if copies and at >= loop.began else NO_FLIGHT, at < read


def _tally(found: Sequence[Landed], move: Move) -> Counter[str]:
    """Wrong and all interleavings by landing, and wrong rows by kind."""
    tally: Counter[str] = Counter()
    left = {move.counts[name] for name in move.change.leaves}
    for one in found:
        wrong = [(name, got) for name, got, own in one.rows if got != own]
        tally[f"total {one.landing}"] += 1
        tally[f"wrong {one.landing}"] += bool(wrong)
        tally["landed before the read"] += one.landed_before_read
        tally["wrong rows"] += len(wrong)
        tally["wrong first drafts"] += sum(not move.rows[name] for name, _ in wrong)
        tally["counts of who left"] += sum(got in left for _, got in wrong)
    tally["wrong transitions"] += any(got != own for one in found for _, got, own in one.rows)
    return tally


def landing(arm: str, mode: Mode = "none", transitions: int = 120, seed: int = 0) -> dict[str, Any]:
    """Random transitions, each under every landing of the copy among the host's row moves.

    `landings` counts interleavings, wrong and all: the copy lands ahead of the first access that a row move makes to
    the array, among them, or behind the last; a copy that was waited for in its own step, or that there is none of, is
    not in flight. `counts_of_who_left` counts wrong rows whose value is also one that a request which left had
    accepted.
    """
    rng = random.Random(seed)
    tally: Counter[str] = Counter()
    for _ in range(transitions):
        move = random_move(rng)
        tally += _tally(_landed(arm, mode, move), move)
    places = (*LANDINGS, NO_FLIGHT) if tally[f"total {NO_FLIGHT}"] else LANDINGS
    total = sum(tally[f"total {where}"] for where in places)
    return {
        "arm": arm,
        "mode": mode,
        "seed": seed,
        "transitions": transitions,
        "interleavings": total,
        "faults": sum(tally[f"wrong {where}"] for where in places),
        "wrong_transitions": tally["wrong transitions"],
        "landings": {w: {"wrong": tally[f"wrong {w}"], "total": tally[f"total {w}"]} for w in places},
        "wrong_rows": tally["wrong rows"],
        "wrong_first_drafts": tally["wrong first drafts"],
        "counts_of_who_left": tally["counts of who left"],
        "landed_before_the_read": tally["landed before the read"],
    }


def by_move(arm: str = "before", transitions: int = 120, seed: int = 0) -> dict[str, Any]:
    """Mode none: the interleavings of random transitions, wrong and all, by how the host moved rows in them.

    `condensed`: holes were closed, no rows swapped; `swapped`: the other way about; `both`; `neither`.
    """
    rng = random.Random(seed)
    found = {kind: {"wrong": 0, "total": 0} for kind in MOVES}
    for _ in range(transitions):
        move = random_move(rng)
        moved = _transition(devices.open("sim", schedule="immediate"), arm, "none", move).moved
        kind = MOVES[2 * bool(moved[0]) + bool(moved[1])]
        for one in _landed(arm, "none", move):
            found[kind]["total"] += 1
            found[kind]["wrong"] += _is_wrong(one)
    return {"arm": arm, "transitions": transitions, "seed": seed, "moves": found}


def races(arm: str = "before", mode: Mode = "none") -> dict[str, Any]:
    """What the staging detector says of two transitions, and under how many of their landings a count is wrong.

    The worked example, and A (4 accepted), B (2) becoming B, Q. The watched run has the copy land as late as it may;
    `wrong_in_this_run` counts its wrong rows.
    """
    dev, wrong = devices.open("sim", schedule="lazy"), 0
    with staging.watch(dev) as watched:
        for move in (EXAMPLE, STEADY):
            wrong += _transition(dev, arm, mode, move).judged().wrong
    told = [
        {
            "device": race.first.subject,
            "host": f"{race.second.stack[0].rsplit(' in ', 1)[-1]} {race.second.action}s",
            "kind": race.kind,
            "told": str(race),
        }
        for race in watched.races
    ]
    landed = [one for move in (EXAMPLE, STEADY) for one in _landed(arm, mode, move)]
    return {
        "arm": arm,
        "mode": mode,
        "races": told,
        "wrong_in_this_run": wrong,
        "landings": len(landed),
        "wrong_landings": sum(_is_wrong(one) for one in landed),
    }


def _is_wrong(landed: Landed) -> bool:
    return any(got != own for _, got, own in landed.rows)


# The worked example, step by step


class _History(Observer):
    """What happened to the array in order, each with the content ahead of it."""

    def __init__(self, array: HostBuffer, rows: int) -> None:
        self.array, self.rows = array, rows
        self.steps: list[dict[str, Any]] = []

    def _note(self, what: str, row: int | None, site: str) -> None:
        before = self.array.backing[: self.rows].flatten().tolist()
        self.steps.append({"what": what, "row": row, "before": before, "site": site})

    def host_accessed(self, buffer: HostBuffer, region: Region, write: bool, site: str) -> None:
        if buffer.name == ARRAY:
            whole = region.stop - region.start > self.array.backing.element_size()
            row = None if whole else (region.start - self.array.region.start) // (region.stop - region.start)
            self._note("write" if write else "read", row, Path(site).name)

    def executed(self, stream: Stream, op: Op) -> None:
        if op.name == COPY:
            self._note("copy lands", None, "")


def worked_example(arm: str = "before", mode: Mode = "none") -> list[dict[str, Any]]:
    """A (4 accepted), B (2), C (3) and P (prefilled) become P, B, C, Q: one entry a landing of the copy.

    `history` has every access to the array and the copy, with the array's content ahead of it; `host` the counts that
    the host has for the four rows then, `got` those that P, B and C start from, `own` what they accepted.
    """

    def program(dev: Device) -> dict[str, Any]:
        loop = CountLoop(dev, policy(arm, mode), mode, LoopSize(4))
        loop.start(EXAMPLE_ROWS, lambda name, drafted: [EXAMPLE_COUNTS[name]])
        history = _History(loop.batch.num_accepted, 4)
        dev.observers.append(history)
        loop.step(EXAMPLE_CHANGE, lambda name, drafted: [1])
        landing, _ = _place(list(dev.trace), loop)
        taken, host = len(history.steps), loop.batch.num_accepted.backing.flatten().tolist()
        dev.observers.clear()
        dev.synchronize()
        return {
            "landing": landing,
            "history": history.steps[:taken],
            "host": host,
            "got": loop.brought.flatten().tolist()[:3],
            "own": [EXAMPLE_COUNTS[name] for name in loop.batch.order[:3]],
            "previous": [3, 1, 2, -1],
        }

    outcomes = [one.outcome for one in devices.enumerate_schedules(program)]
    failed = next((outcome for outcome in outcomes if isinstance(outcome, Exception)), None)
    if failed is not None:
        raise failed
    return [outcome for outcome in outcomes if not isinstance(outcome, Exception)]


# Time: how long the window is open, and how often it is hit


def _open(device: str, seed: int = 0, schedule: str = "timed") -> Device:
    return devices.open("cuda") if device == "cuda" else devices.open("sim", schedule=schedule, seed=seed)


def _warm_up(loop: CountLoop) -> None:
    """Compile the kernels, on a row that leaves again."""
    loop.start({0: True}, lambda name, drafted: [1] * loop.size.lanes)
    loop.step(Change(leaves=(0,)), lambda name, drafted: [1] * loop.size.lanes)
    loop.device.synchronize()


def window(
    device: str = "sim",
    arm: str = "before",
    delays_us: Sequence[float] = tuple(range(0, 600, 20)),
    trials: int = 20,
    forward_us: float = 300.0,
    between_us: float = 60.0,
) -> dict[str, Any]:
    """The worked example at each host delay ahead of the row moves: how often P got another's count.

    The copy lands when the forward is done; the window is the time between the host's adding and swapping.
    """
    dev = _open(device)
    loop = CountLoop(dev, policy(arm, "none"), "none", LoopSize(4), run=_run(device))
    _warm_up(loop)
    wrong = []
    for delay in delays_us:
        before = loop.judged().wrong
        for _ in range(trials):
            _example(loop, Timing(delay, between_us, forward_us))
            dev.trace.clear()
        wrong.append(loop.judged().wrong - before)
    return {
        "device": dev.info.as_dict(),
        "arm": arm,
        "delays_us": list(delays_us),
        "trials": trials,
        "wrong": wrong,
        "forward_us": forward_us,
        "between_us": between_us,
    }


def _run(device: str) -> Backend:
    return "triton" if device == "cuda" else "plain"


def _example(loop: CountLoop, timing: Timing) -> None:
    """Three steps that end in the worked example's transition; the first two wait for each other's counts."""
    count: Counts = lambda name, drafted: [EXAMPLE_COUNTS.get(name, 1) if drafted else 1]  # noqa: E731
    loop.step(Change(leaves=tuple(loop.batch.order), comes=(1, 2, 3)), count)
    loop.device.synchronize()
    loop.step(Change(comes=(4,)), count, Timing(forward_us=timing.forward_us))
    loop.step(EXAMPLE_CHANGE, count, Timing(timing.before_us, timing.between_us))
    loop.device.synchronize()


def flight(before_us: float, between_us: float = 60.0, forward_us: float = 300.0) -> dict[str, Any]:
    """The worked example on the simulator's clock, before: spans in microseconds from the start of the forward.

    `host` has the host's accesses of the array in order, `got` the count that P starts from.
    """
    dev = _open("sim")
    loop = CountLoop(dev, policy("before", "none"), "none", LoopSize(4))
    _warm_up(loop)
    dev.trace.clear()
    _example(loop, Timing(before_us, between_us, forward_us))
    trace = list(dev.trace)
    at = max(i for i, r in enumerate(trace) if r.what == "spin")
    copy = next(r for r in trace[at:] if r.by == "queue" and r.name == COPY)
    last = [r for r in trace[loop.move_span[0] :] if r.by == "host"]
    touched = [r for r in last if r.name == ARRAY]
    wait = next(r for r in last if (r.what, r.name) == ("synchronize", "num_accepted_tokens_event"))
    zero = trace[at].start_us or 0.0

    def since(moment: float | None) -> float:
        return (moment or 0.0) - zero

    return {
        "forward": [0.0, since(trace[at].end_us)],
        "copy": [since(copy.start_us), since(copy.end_us)],
        "host": [[r.what, since(r.start_us)] for r in touched],
        "waited_until": since(wait.end_us),
        "got": int(loop.brought[0, 0]),
        "own": EXAMPLE_COUNTS[4],
    }


def transitions(
    arm: str,
    n: int = 4000,
    device: str = "sim",
    mode: Mode = "none",
    lanes: int = 64,
    seed: int = 0,
    forward_us: tuple[float, float] | None = None,
    between_us: float = 60.0,
) -> dict[str, Any]:
    """At least `n` random transitions in one chain of steps, with random host delays around the copy's landing.

    `lanes` transitions share a step: their rows move alike and their copy is one, their counts differ. So `steps` is
    the number of independent timings. A forward has to outlast what the host enqueues behind it; `forward_us` bounds
    it, by default 80 to 240 on the simulator and 400 to 900 on a GPU.
    """
    dev, size, steps = _open(device, seed), LoopSize(lanes=lanes), math.ceil(n / lanes)
    loop = CountLoop(dev, policy(arm, mode), mode, size, run=_run(device))
    _warm_up(loop)
    bounds = forward_us or ((400.0, 900.0) if device == "cuda" else (80.0, 240.0))
    began = time.perf_counter()
    _random_steps(loop, steps, seed, bounds, between_us)
    judged = loop.judged()
    return {
        "device": dev.info.as_dict(),
        "arm": arm,
        "mode": mode,
        "seed": seed,
        "lanes": lanes,
        "steps": steps,
        "transitions": steps * lanes,
        "faults": judged.wrong,
        "judged_rows": judged.first + judged.steady,
        "wrong_first_drafts": judged.wrong_first,
        "seconds": time.perf_counter() - began,
    }


def _random_steps(
    loop: CountLoop, steps: int, seed: int, forward_us: tuple[float, float], between_us: float
) -> None:
    rng = random.Random(seed)
    accepted = _random_counts(np.random.default_rng(seed), loop.size)
    rows = dict.fromkeys(loop.batch.order, True)
    for step in range(steps):
        change = random_change(rng, rows, 1 + 2 * step, loop.size.max_num_reqs)
        forward = rng.uniform(*forward_us)
        timing = Timing(rng.uniform(0.2, 1.2) * forward, rng.uniform(0, between_us), forward)
        order = loop.step(change, accepted, timing)
        rows = {name: name not in (*change.comes, *change.prefilling) for name in order}
        loop.device.trace.clear()


def _random_counts(numbers: np.random.Generator, size: LoopSize) -> Counts:
    def accepted(name: int, drafted: bool) -> npt.NDArray[np.int64]:
        return numbers.integers(1, 2 + size.num_speculative_tokens if drafted else 2, size.lanes)

    return accepted


def throughput(
    device: str = "sim",
    arms: Sequence[str] = ("before", "after", "blocking-copy"),
    mode: Mode = "none",
    rounds: int = 5,
    steps: int = 200,
    forward_us: float = 1000.0,
    host_us: float = 400.0,
) -> dict[str, Any]:
    """Steps a second of each arm, the arms taking turns in one process; `ratio` is to `before`.

    A step's forward takes `forward_us` on the device, its host work `host_us`; on the simulator both are clock time.
    `wrong` counts the wrong rows of all rounds.
    """
    dev = _open(device)
    loops = {arm: CountLoop(dev, policy(arm, mode), mode, run=_run(device)) for arm in arms}
    found: dict[str, list[float]] = {arm: [] for arm in arms}
    rows = dict.fromkeys(range(1, 9), True)
    for loop in loops.values():
        _warm_up(loop)
        loop.step(Change(comes=tuple(rows)), lambda name, drafted: [1])
    for turn in range(rounds):
        for arm, loop in loops.items():
            found[arm].append(_steps_a_second(loop, steps, Timing(host_us, 0, forward_us), turn))
    median = {arm: statistics.median(rates) for arm, rates in found.items()}
    return {
        "device": dev.info.as_dict(),
        "steps_a_second": median,
        "all": found,
        "wrong": {arm: loop.judged().wrong for arm, loop in loops.items()},
        "ratio": {arm: rate / median[arms[0]] for arm, rate in median.items()},
        "rounds": rounds,
        "steps": steps,
        "forward_us": forward_us,
        "host_us": host_us,
    }


def _steps_a_second(loop: CountLoop, steps: int, timing: Timing, turn: int) -> float:
    dev = loop.device
    began = _clock(dev)
    for step in range(steps):
        name = 10 + turn * steps + step
        leaves, comes = ((loop.batch.order[0],), (name,)) if step % 8 == 0 else ((), ())
        loop.step(Change(leaves, comes), lambda name, drafted: [2 if drafted else 1], timing)
        dev.trace.clear()
    return steps / (_clock(dev) - began)


def _clock(dev: Device) -> float:
    """Seconds at the end of a synchronize; on the simulator those of its schedule."""
    dev.synchronize()
    now = dev.trace[-1].start_us
    assert now is not None, "a timed schedule has a clock"
    return now / 1e6


# Text


CONTROLS = ("async", "sync", "launch-blocking", "one-request")
TIMINGS = {
    "early": Timing(before_us=12_000.0, forward_us=3000.0),
    "window": Timing(between_us=12_000.0, forward_us=3000.0),
    "late": Timing(forward_us=6000.0),
}
OPENING = 4


def _workload(requests: int, seed: int) -> tuple[list[WordRequest], list[word_model.Text]]:
    """Stories to be told again; every second request ends by its length, the others by their stop."""
    rng = random.Random(seed)
    texts = [word_model.text(rng, OPENING) for _ in range(requests)]
    asked = []
    for name, one in enumerate(texts):
        whole = len(one.expected)
        most = rng.randint(whole // 2, whole - 1) if name % 2 else whole + 8
        asked.append(WordRequest(name, tuple(one.prompt), most))
    return asked, texts


def _draft_table(texts: Sequence[word_model.Text], k: int, rate: float, seed: int) -> torch.Tensor:
    """Drafts by request and words said, int32: the text's own words, each with probability `rate`."""
    rng, most = random.Random(seed), max(len(one.expected) for one in texts) + 16
    table = torch.zeros(len(texts), most, k, dtype=torch.int32)
    for name, one in enumerate(texts):
        coming = [*one.expected, *[0] * (most + k)]
        for said in range(most):
            words = coming[said : said + k]
            table[name, said] = torch.tensor(
                [w if rng.random() < rate else rng.randrange(8, 120) for w in words]
            )
    return table


def generations(
    arm: str = "before",
    mode: Mode = "none",
    landing: str = "window",
    control: str = "async",
    requests: int = 48,
    device: str = "sim",
    seed: int = 0,
    rate: float = 0.9,
    run: Backend | None = None,
) -> dict[str, Any]:
    """Requests served to their end, with their texts and what the model says to each when nobody shares its states.

    `landing` says when the copy of the counts lands: `early`, ahead of the row moves; `late`, behind them; `window`,
    between adding and swapping, for which the host dwells there. `control` is `async`, or what differs from it; on a
    GPU launch blocking is the environment of the process. Drafts are the text's own words with probability `rate`.
    """
    if landing not in TIMINGS or control not in CONTROLS:
        raise BadInputError(
            f"no landing {landing!r} under {control!r}; {', '.join(TIMINGS)}; {', '.join(CONTROLS)}"
        )
    config = RunnerConfig(
        mode=mode,
        scheduling="sync" if control == "sync" else "async",
        max_num_seqs=1 if control == "one-request" else 8,
        timing=TIMINGS[landing],
    )
    runner, asked, texts = _served(
        arm, config, requests, device, control == "launch-blocking", seed, rate, run
    )
    scheduler = AsyncScheduler(config, asked, word_model.ID[word_model.STOP])
    said = serve(runner, scheduler)
    about = {"arm": arm, "mode": mode, "device": runner.device.info.as_dict()}
    return _told(asked, texts, said) | _starts(runner) | about


def _served(
    arm: str,
    config: RunnerConfig,
    requests: int,
    device: str,
    blocking: bool,
    seed: int,
    rate: float,
    run: Backend | None,
) -> tuple[AsyncRunner, list[WordRequest], list[word_model.Text]]:
    """A runner with its model, and what it is to serve."""
    if device == "sim":
        torch.set_num_threads(1)
    dev = _open(device, seed, "immediate" if blocking else "timed")
    asked, texts = _workload(requests, seed)
    k = config.num_speculative_tokens
    model = word_model.WordModel(dev, config.num_blocks, k, run or _run(device))
    taken = policy(arm, config.mode, config.scheduling)
    return AsyncRunner(dev, config, taken, model, _draft_table(texts, k, rate, seed)), asked, texts


def _told(
    asked: Sequence[WordRequest], texts: Sequence[word_model.Text], said: dict[int, list[int]]
) -> dict[str, Any]:
    rows = []
    for request, one in zip(asked, texts, strict=True):
        expected = one.expected[: request.max_tokens]
        rows.append(
            {
                "request": request.name,
                "prompt": word_model.words(one.prompt),
                "text": word_model.words(said[request.name]),
                "expected": word_model.words(expected),
                "intact": said[request.name] == expected,
                "ended_early": len(said[request.name]) < len(expected),
            }
        )
    garbled = [row for row in rows if not row["intact"]]
    return {
        "requests": len(rows),
        "intact": len(rows) - len(garbled),
        "faults": len(garbled),
        "ended_early": sum(bool(row["ended_early"]) for row in garbled),
        "garbled": [row["request"] for row in garbled],
        "texts": rows,
    }


def _starts(runner: AsyncRunner) -> dict[str, Any]:
    wrong = runner.wrong
    return {
        "steps": runner.steps,
        "wrong_starts": [one._asdict() for one in wrong],
        "wrong_first_drafts": sum(one.first_draft for one in wrong),
    }


# Metadata of captured decodes


def metadata(
    requests: int = 72,
    drafts: int = 3,
    padded: int | None = None,
    device: str = "sim",
    run: Backend | None = None,
) -> dict[str, Any]:
    """Shapes of a graph's metadata sliced by tokens (`before`) and by requests (`after`), and what both kernels do.

    `inert` says that the rows which no request has left every state and every real row's output as they were.
    """
    dev = _open(device, schedule="immediate")
    padded = requests if padded is None else padded
    arms = {
        arm: _with_metadata(dev, rows, requests, drafts, padded, run or _run(device))
        for arm, rows in ROWS.items()
    }
    results = [arms[arm].pop("result") for arm in ROWS]
    same = all(torch.equal(one, other) for one, other in zip(*results, strict=True))
    return {"requests": requests, "drafts": drafts, "padded": padded, "inert": same, **arms}


def _with_metadata(
    dev: Device, rows: Rows, requests: int, drafts: int, padded: int, run: Backend, dim: int = 8
) -> dict[str, Any]:
    """The kernels over every row of the metadata, those that no request has among them."""
    columns, where = 1 + drafts, dev.torch_device
    generator = torch.Generator().manual_seed(0)

    def rand(*shape: int) -> torch.Tensor:
        return torch.rand(*shape, generator=generator).to(where)

    blocks = 1 + requests * columns
    conv, states = rand(blocks, WINDOW + drafts, dim), rand(blocks, dim, dim)
    indices = torch.arange(1, blocks, dtype=torch.int32, device=where).reshape(requests, columns)
    counts = torch.randint(1, 1 + columns, (requests,), generator=generator, dtype=torch.int32).to(where)
    graph = GraphMetadata(dev, padded, drafts)
    views = graph.build(rows, indices, counts, padded)
    dev.synchronize()
    size, weight = views.num_accepted.shape[0], rand(word_model.WIDTH, dim)
    x = rand(padded * columns, columns, dim)[:size].contiguous()
    out = _both_kernels(run, x, weight, conv, states, views)
    return {
        "shapes": {name: list(tensor.shape) for name, tensor in views._asdict().items()},
        "rows_of_no_request": size - requests,
        "result": [out[:requests], conv, states],
    }


def _both_kernels(
    run: Backend,
    x: torch.Tensor,
    weight: torch.Tensor,
    conv: torch.Tensor,
    states: torch.Tensor,
    views: SpecMetadata,
) -> torch.Tensor:
    """Outputs of every row; the rows that the kernels leave alone have zeros."""
    indices, counts = views.state_indices.contiguous(), views.num_accepted
    lines, ones = indices[:, 0].contiguous(), x.new_ones(x.shape[:2])
    if run == "triton":
        mixed, out = torch.empty_like(x), torch.empty_like(x)
        causal_conv_update.launch(x, weight, conv, lines, counts, mixed)
        gated_delta_state.launch("after", mixed, mixed, x, 0 * ones, ones, out, states, indices, counts)
        return out
    mixed = causal_conv_update.reference(x, weight, conv, lines, counts)
    return gated_delta_state.reference(mixed, mixed, x, 0 * ones, ones, states, indices, counts)


def released_consumers(subject: str, requests: int = 3, padded: int = 4) -> dict[str, Any]:
    """A release's own gated delta and convolution kernels over metadata sliced by tokens and by requests.

    The tokens are those of the requests in both; the rows that no request has come from `GraphMetadata`. `inert` says
    that outputs and states are equal. Needs Triton's interpreter. Raises UnavailableError when the release cannot be
    had, LiftError when it has no such kernel.
    """
    tree = upstream.resolve(subject)
    path = tree.first(list(GATING))
    if path is None:
        raise upstream.NotPresentError(f"{GATING[0]} in {subject}")
    kernels = (
        upstream.lift(tree, path, "fused_sigmoid_gating_delta_rule_update"),
        upstream.lift(tree, CONV, "causal_conv1d_update", provide={"current_platform": PLATFORM}),
    )
    found = {}
    for arm, rows in ROWS.items():
        views = _small_graph(rows, requests, padded)
        results = [_recurrent(kernels[0].function, views, requests)]
        results.append(_convolved(kernels[1].function, views, requests))
        found[arm] = (views.num_accepted.shape[0], results)
    same = [
        all(torch.equal(one, other) for one, other in zip(*pair, strict=True))
        for pair in zip(found["before"][1], found["after"][1], strict=True)
    ]
    return {
        "subject": subject,
        "requests": requests,
        "padded": padded,
        "rows": {arm: size for arm, (size, _) in found.items()},
        "inert": all(same),
        "hashes": {kernel.name: kernel.body_hash for kernel in kernels},
    }


def _small_graph(rows: Rows, requests: int, padded: int) -> SpecMetadata:
    """Requests with counts 1, 2, … in turn."""
    columns = 1 + DRAFTS
    indices = torch.arange(1, 1 + requests * columns, dtype=torch.int32).reshape(requests, columns)
    counts = torch.arange(requests, dtype=torch.int32) % columns + 1
    graph = GraphMetadata(_open("sim", schedule="immediate"), padded, columns - 1)
    return graph.build(rows, indices, counts, padded)


def _recurrent(kernel: Any, views: SpecMetadata, requests: int) -> list[torch.Tensor]:
    """Outputs and states."""
    inputs = gating_inputs(requests, 1 + DRAFTS)
    inputs |= {"ssm_state_indices": views.state_indices, "cu_seqlens": views.query_start_loc}
    out = kernel(**inputs, num_accepted_tokens=views.num_accepted)[0]
    return [out, inputs["initial_state"]]


def _convolved(kernel: Any, views: SpecMetadata, requests: int, dim: int = 8) -> list[torch.Tensor]:
    """Outputs and windows."""
    generator, columns = torch.Generator().manual_seed(0), 1 + DRAFTS
    pool = torch.rand(1 + requests * columns, 3 + DRAFTS, dim, generator=generator)
    out = kernel(
        x=torch.rand(requests * columns, dim, generator=generator),
        conv_state=pool.transpose(1, 2),
        weight=torch.rand(dim, 4, generator=generator),
        bias=None,
        activation="silu",
        conv_state_indices=views.state_indices[:, 0].contiguous(),
        num_accepted_tokens=views.num_accepted,
        query_start_loc=views.query_start_loc,
        max_query_len=columns,
    )
    return [out, pool]
