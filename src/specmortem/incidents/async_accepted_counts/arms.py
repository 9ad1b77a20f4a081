"""Arms of incident `async-accepted-counts`: where the copy completes, what each change does, what the text becomes.

Every function takes JSON-able arguments, runs in a process of its own and returns what JSON can hold. An arm is a key
of `POLICIES`, a mode one of none, all, align.
"""

from __future__ import annotations

import math
import random
import statistics
import time
from collections.abc import Sequence
from itertools import chain
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from specmortem import device as devices
from specmortem import upstream
from specmortem.detect import staging
from specmortem.device import Device, HostBuffer, Observer, Op, Region, Stream
from specmortem.errors import BadInputError
from specmortem.incidents.async_accepted_counts.engine import word_model
from specmortem.incidents.async_accepted_counts.engine.accepted_counts import COPY, Timing
from specmortem.incidents.async_accepted_counts.engine.async_runner import (
    AsyncRunner,
    AsyncScheduler,
    RunnerConfig,
    WordRequest,
    serve,
)
from specmortem.incidents.async_accepted_counts.engine.copy_completion import Phase
from specmortem.incidents.async_accepted_counts.engine.count_loop import (
    Change,
    CountLoop,
    LoopSize,
    random_change,
)
from specmortem.incidents.async_accepted_counts.engine.graph_metadata import (
    ROWS,
    GraphMetadata,
    Rows,
    SpecMetadata,
)
from specmortem.incidents.async_accepted_counts.engine.policies import Mode, policy
from specmortem.incidents.async_accepted_counts.engine.transition import (
    EXAMPLE,
    Landing,
    StepRow,
    Transition,
    by_phase,
    landings,
    own_step,
)
from specmortem.incidents.async_accepted_counts.engine.word_model import WINDOW
from specmortem.kernels import Backend
from specmortem.kernels.released_lookups import PLATFORM, gating_inputs
from specmortem.upstream.vllm_files import CONV, GATING

ARRAY = "num_accepted_tokens_cpu"
DRAFTS = 3
FEW, PADDED = 3, 4  # requests, and those of the graph, where the interpreter runs a kernel
PHASES: tuple[Phase, ...] = ("before", "inside", "after")
STEADY = Transition((StepRow("A", "decode", 4, finished=True), StepRow("B", "decode", 2)), ("Q",))
MOVES = ("neither", "swapped", "condensed", "both")


def random_transition(rng: random.Random, most: int = 8) -> Transition:
    """2 to `most` rows, decodes ahead of prefills as a reordered batch has them."""
    size = rng.randint(2, most)
    decodes = rng.randint(1, size)
    rows = {number: number < decodes for number in range(size)}
    accepted = [rng.randint(1, 1 + DRAFTS) if drafted else 1 for drafted in rows.values()]
    change = random_change(rng, rows, size, most)

    def row(number: int) -> StepRow:
        role: Any = "decode" if rows[number] else "prefill" if number in change.prefilling else "first-draft"
        return StepRow(str(number), role, accepted[number], number in change.finished_req_ids)

    return Transition(tuple(map(row, rows)), tuple(map(str, change.new_req_ids)))


def copy_completions(arm: str, mode: Mode = "none", transitions: int = 120, seed: int = 0) -> dict[str, Any]:
    """Random transitions, each under every completion of the copy among the host's row moves.

    `landings` counts interleavings, wrong and all: the copy completes ahead of the first access that a row move makes
    to the array, among them, or after the last; a copy that was waited for in its own step, or that there is none of,
    is not in flight. `counts_of_who_left` counts wrong rows whose value is also one that a request which left had
    accepted.
    """
    rng, step = random.Random(seed), own_step(arm, mode)
    each = [landings(step, [random_transition(rng)]) for _ in range(transitions)]
    found = list(chain.from_iterable(each))
    wrong = [landing for landing in found if landing.victims]
    phases = dict.fromkeys(PHASES, [0, 0]) | by_phase(found)
    return {
        "arm": arm,
        "mode": mode,
        "seed": seed,
        "transitions": transitions,
        "interleavings": len(found),
        "faults": len(wrong),
        "wrong_transitions": sum(any(landing.victims for landing in some) for some in each),
        "landings": {phase: {"wrong": bad, "total": total} for phase, (bad, total) in phases.items()},
        "wrong_rows": sum(len(landing.victims) for landing in wrong),
        "wrong_first_drafts": sum(landing.roles.count("first-draft") for landing in wrong),
        "counts_of_who_left": sum(map(_counts_of_who_left, wrong)),
        "landed_before_the_read": sum(landing.copy.precedes_the_read for landing in found),
    }


def _counts_of_who_left(landing: Landing) -> int:
    left = {row.accepted for row in landing.transition.rows if row.finished}
    return sum(count in left for count in landing.victims.values())


def by_move(arm: str = "before", transitions: int = 120, seed: int = 0) -> dict[str, Any]:
    """Mode none: the interleavings of random transitions, wrong and all, by how the host moved rows in them.

    `condensed`: holes were closed, no rows swapped; `swapped`: the other way about; `both`; `neither`.
    """
    rng, step = random.Random(seed), own_step(arm, "none")
    found = {kind: {"wrong": 0, "total": 0} for kind in MOVES}
    for _ in range(transitions):
        transition = random_transition(rng)
        kind = found[_moves(arm, transition)]
        for landing in landings(step, [transition]):
            kind["total"] += 1
            kind["wrong"] += bool(landing.victims)
    return {"arm": arm, "transitions": transitions, "seed": seed, "moves": found}


def _moves(arm: str, transition: Transition) -> str:
    """How the host moves rows, whatever the copy does."""
    loop = CountLoop(devices.open("sim", schedule="immediate"), policy(arm, "none"), "none")
    condensed, swapped = transition.started(loop).move_rows(transition.change)
    return MOVES[2 * bool(condensed) + bool(swapped)]


def races(arm: str = "before", mode: Mode = "none") -> dict[str, Any]:
    """What the staging detector says of two transitions, and under how many of their completions a count is wrong.

    The worked example, and A (4 accepted), B (2) becoming B, Q. The watched run has the copy complete as late as it
    may; `wrong_in_this_run` counts its wrong rows.
    """
    dev, wrong = devices.open("sim", schedule="lazy"), 0
    with staging.watch(dev) as watched:
        for transition in (EXAMPLE, STEADY):
            loop = transition.started(CountLoop(dev, policy(arm, mode), mode))
            loop.step(transition.change, _one)
            wrong += loop.judged().wrong
    reports = [
        {
            "device": race.first.subject,
            "host": f"{race.second.stack[0].rsplit(' in ', 1)[-1]} {race.second.action}s",
            "kind": race.kind,
            "message": str(race),
        }
        for race in watched.races
    ]
    found = landings(own_step(arm, mode), (EXAMPLE, STEADY))
    return {
        "arm": arm,
        "mode": mode,
        "races": reports,
        "wrong_in_this_run": wrong,
        "landings": len(found),
        "wrong_landings": sum(bool(landing.victims) for landing in found),
    }


def _one(req_id: int, drafted: bool) -> list[int]:
    return [1]


# The worked example, step by step


class _History(Observer):
    """What happened to the array in order, each with the counts of its first four rows ahead of it."""

    def __init__(self) -> None:
        self.array: HostBuffer | None = None
        self.steps: list[dict[str, Any]] = []

    @property
    def content(self) -> list[int]:
        """The counts of the rows that are watched."""
        assert self.array is not None, "a batch fills its array before all else"
        counts: list[int] = self.array.backing[:4].flatten().tolist()
        return counts

    def host_accessed(self, buffer: HostBuffer, region: Region, write: bool, site: str) -> None:
        if buffer.name == ARRAY:
            self.array, size = buffer, buffer.backing.element_size()
            whole = region.stop - region.start > size
            row = None if whole else (region.start - buffer.region.start) // size
            self.steps.append({"what": "write" if write else "read", "row": row, "before": self.content})

    def executed(self, stream: Stream, op: Op) -> None:
        if op.name == COPY:
            self.steps.append({"what": "copy lands", "row": None, "before": self.content})


def worked_example() -> list[dict[str, Any]]:
    """A (4 accepted), B (2), C (3) and P (prefilled) become P, B, C, Q: one entry a completion of the copy, before.

    `history` has every access to the array and the copy, with the array's content ahead of it; `host` the counts that
    the host has for the four rows then, `got` those that P, B and C start from, `own` what they accepted.
    """
    own, histories = own_step("before", "none"), list[_History]()

    def step(transition: Transition, dev: Device) -> Landing:
        histories.append(_History())
        dev.observers.append(histories[-1])
        return own(transition, dev)

    return [
        {
            "phase": landing.copy.phase,
            "history": history.steps[
                -1 - len(landing.copy.accesses) :
            ],  # of the second step, the copy among them
            "host": history.content,
            "got": [landing.counts[req_id] for req_id in "PBC"],
            "own": [EXAMPLE.right[req_id] for req_id in "PBC"],
        }
        for landing, history in zip(landings(step, [EXAMPLE]), histories, strict=True)
    ]


# Time: how long the window is open, and how often it is hit


def _open(device: str, seed: int = 0, schedule: str = "timed") -> Device:
    return devices.open("cuda") if device == "cuda" else devices.open("sim", schedule=schedule, seed=seed)


def _warmed_up(loop: CountLoop) -> CountLoop:
    """With its kernels compiled, on a row that leaves again."""

    def ones(req_id: int, drafted: bool) -> list[int]:
        return [1] * loop.size.lanes

    loop.start({0: True}, ones)
    loop.step(Change(finished_req_ids=(0,)), ones)
    loop.device.synchronize()
    return loop


def window(
    device: str = "sim",
    arm: str = "before",
    delays_us: Sequence[float] = tuple(range(0, 600, 20)),
    trials: int = 20,
    forward_us: float = 300.0,
    between_us: float = 60.0,
) -> dict[str, Any]:
    """The worked example at each host delay ahead of the row moves: how often P got another's count.

    The copy completes when the forward is done; the window is the time between the host's adding and swapping.
    """
    dev = _open(device)
    loop = _warmed_up(CountLoop(dev, policy(arm, "none"), "none", LoopSize(4), run=_run(device)))
    wrong = []
    for delay in delays_us:
        before = loop.judged().wrong
        for _ in range(trials):
            _run_example(loop, Timing(delay, between_us, forward_us))
            dev.trace.clear()
        wrong.append(loop.judged().wrong - before)
    return {
        "device": dev.info.as_dict(),
        "arm": arm,
        "delays_us": list(delays_us),
        "trials": trials,
        "wrong": wrong,
        "examples": len(delays_us) * trials,
        "faults": sum(wrong),
        "forward_us": forward_us,
        "between_us": between_us,
    }


def _run(device: str) -> Backend:
    return "triton" if device == "cuda" else "plain"


def _run_example(loop: CountLoop, timing: Timing) -> None:
    """Three steps that end in the worked example's transition; the first two wait for each other's counts."""

    def accepted(number: int, drafted: bool) -> list[int]:
        return EXAMPLE.accepted(number, True) if drafted and number < len(EXAMPLE.rows) else [1]

    *decodes, prefilled = range(len(EXAMPLE.rows))
    loop.step(Change(tuple(loop.batch.order), tuple(decodes)), accepted)
    loop.device.synchronize()
    loop.step(Change(new_req_ids=(prefilled,)), accepted, Timing(forward_us=timing.forward_us))
    loop.step(EXAMPLE.change, accepted, Timing(timing.before_us, timing.between_us))
    loop.device.synchronize()


def flight(before_us: float, between_us: float = 60.0, forward_us: float = 300.0) -> dict[str, Any]:
    """The worked example on the simulator's clock, before: spans in microseconds from the start of the forward.

    `host` has the host's accesses of the array in order, `got` the count that P starts from.
    """
    dev = _open("sim")
    loop = _warmed_up(CountLoop(dev, policy("before", "none"), "none", LoopSize(4)))
    dev.trace.clear()
    _run_example(loop, Timing(before_us, between_us, forward_us))
    trace = list(dev.trace)
    trace = trace[max(i for i, r in enumerate(trace) if r.what == "spin") :]
    copy = next(r for r in trace if r.by == "queue" and r.name == COPY)
    touched = [r for r in trace if r.by == "host" and r.name == ARRAY]
    wait = next(r for r in trace if (r.what, r.name) == ("synchronize", "num_accepted_tokens_event"))
    zero = trace[0].start_us or 0.0

    def since(moment: float | None) -> float:
        return (moment or 0.0) - zero

    return {
        "forward": [0.0, since(trace[0].end_us)],
        "copy": [since(copy.start_us), since(copy.end_us)],
        "host": [[r.what, since(r.start_us)] for r in touched],
        "waited_until": since(wait.end_us),
        "got": int(loop.counts_used[0, 0]),
        "own": EXAMPLE.right["P"],
    }


def transitions(
    arm: str,
    n: int = 4000,
    device: str = "sim",
    mode: Mode = "none",
    lanes: int = 64,
    seed: int = 0,
) -> dict[str, Any]:
    """At least `n` random transitions in one chain of steps, with random host delays around the copy's completion.

    `lanes` transitions share a step: their rows move alike and their copy is one, their counts differ. So `steps` is
    the number of independent timings. A forward has to outlast what the host enqueues after it: it takes 80 to 240
    microseconds on the simulator and 400 to 900 on a GPU.
    """
    dev, size, steps = _open(device, seed), LoopSize(lanes=lanes), math.ceil(n / lanes)
    loop = _warmed_up(CountLoop(dev, policy(arm, mode), mode, size, run=_run(device)))
    began = time.perf_counter()
    _random_steps(loop, steps, seed, (400.0, 900.0) if device == "cuda" else (80.0, 240.0))
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


def _random_steps(loop: CountLoop, steps: int, seed: int, forward_us: tuple[float, float]) -> None:
    rng, numbers = random.Random(seed), np.random.default_rng(seed)

    def accepted(req_id: int, drafted: bool) -> npt.NDArray[np.int64]:
        return numbers.integers(1, 2 + DRAFTS if drafted else 2, loop.size.lanes)

    rows = dict.fromkeys(loop.batch.order, True)
    for step in range(steps):
        change = random_change(rng, rows, 1 + 2 * step, loop.size.max_num_reqs)
        forward = rng.uniform(*forward_us)
        timing = Timing(rng.uniform(0.2, 1.2) * forward, rng.uniform(0, 60.0), forward)
        rows = {req_id: change.drafts(req_id) for req_id in loop.step(change, accepted, timing)}
        loop.device.trace.clear()


def throughput(device: str = "sim", rounds: int = 5, steps: int = 200) -> dict[str, Any]:
    """Steps a second of before, after and a blocking copy, taking turns in one process; `ratio` is to `before`.

    A step's forward takes a millisecond on the device, its host work 0.4; on the simulator both are clock time.
    `wrong` counts the wrong rows of all rounds.
    """
    dev, timing = _open(device), Timing(before_us=400.0, forward_us=1000.0)
    loops = {
        arm: _warmed_up(CountLoop(dev, policy(arm, "none"), "none", run=_run(device)))
        for arm in ("before", "after", "blocking-copy")
    }
    found: dict[str, list[float]] = {arm: [] for arm in loops}
    for loop in loops.values():
        loop.step(Change(new_req_ids=tuple(range(1, 9))), _one)
    for turn in range(rounds):
        for arm, loop in loops.items():
            found[arm].append(_steps_a_second(loop, steps, timing, turn))
    median = {arm: statistics.median(rates) for arm, rates in found.items()}
    return {
        "device": dev.info.as_dict(),
        "steps_a_second": median,
        "all": found,
        "wrong": {arm: loop.judged().wrong for arm, loop in loops.items()},
        "ratio": {arm: rate / median["before"] for arm, rate in median.items()},
        "rounds": rounds,
        "steps": steps,
        "forward_us": timing.forward_us,
        "host_us": timing.before_us,
    }


def _steps_a_second(loop: CountLoop, steps: int, timing: Timing, turn: int) -> float:
    dev = loop.device
    began = _clock(dev)
    for step in range(steps):
        new = 10 + turn * steps + step
        change = Change((loop.batch.order[0],), (new,)) if step % 8 == 0 else Change()
        loop.step(change, lambda req_id, drafted: [2 if drafted else 1], timing)
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
    for req_id, one in enumerate(texts):
        whole = len(one.expected)
        most = rng.randint(whole // 2, whole - 1) if req_id % 2 else whole + 8
        asked.append(WordRequest(req_id, tuple(one.prompt), most))
    return asked, texts


def _draft_table(texts: Sequence[word_model.Text], k: int, rate: float, seed: int) -> torch.Tensor:
    """Drafts by request and its number of output tokens, int32: the text's own words, each with probability `rate`."""
    rng, most = random.Random(seed), max(len(one.expected) for one in texts) + 16
    table = torch.zeros(len(texts), most, k, dtype=torch.int32)
    for req_id, one in enumerate(texts):
        coming = [*one.expected, *[0] * (most + k)]
        for at in range(most):
            words = [w if rng.random() < rate else rng.randrange(8, 120) for w in coming[at : at + k]]
            table[req_id, at] = torch.tensor(words)
    return table


def generations(
    arm: str = "before",
    mode: Mode = "none",
    completion: str = "window",
    control: str = "async",
    requests: int = 48,
    device: str = "sim",
    seed: int = 0,
) -> dict[str, Any]:
    """Requests served to their end, with their texts and what the model says to each when nobody shares its states.

    `completion` says when the copy of the counts completes: `early`, ahead of the row moves; `late`, after them;
    `window`, between adding and swapping, for which the host dwells there. `control` is `async`, or what differs from
    it; on a GPU launch blocking is the environment of the process. Nine drafts of ten are the text's own words.
    """
    if completion not in TIMINGS or control not in CONTROLS:
        known = f"{', '.join(TIMINGS)}; {', '.join(CONTROLS)}"
        raise BadInputError(f"no completion {completion!r} under {control!r}; {known}")
    config = RunnerConfig(
        mode=mode,
        scheduling="sync" if control == "sync" else "async",
        max_num_seqs=1 if control == "one-request" else 8,
        timing=TIMINGS[completion],
    )
    if device == "sim":
        torch.set_num_threads(1)
    dev = _open(device, seed, "immediate" if control == "launch-blocking" else "timed")
    (asked, texts), k = _workload(requests, seed), config.num_speculative_tokens
    model = word_model.WordModel(dev, config.num_blocks, k, _run(device))
    drafts = _draft_table(texts, k, 0.9, seed)
    runner = AsyncRunner(dev, config, policy(arm, mode, config.scheduling), model, drafts)
    outputs = serve(runner, AsyncScheduler(config, asked, word_model.ID[word_model.STOP]))
    about = {"arm": arm, "mode": mode, "device": dev.info.as_dict()}
    return _texts(runner, asked, texts, outputs) | about


def _texts(
    runner: AsyncRunner,
    asked: Sequence[WordRequest],
    texts: Sequence[word_model.Text],
    outputs: dict[int, list[int]],
) -> dict[str, Any]:
    rows = [_text(request, one, outputs[request.req_id]) for request, one in zip(asked, texts, strict=True)]
    garbled = [row for row in rows if not row["intact"]]
    return {
        "requests": len(rows),
        "intact": len(rows) - len(garbled),
        "faults": len(garbled),
        "ended_early": sum(bool(row["ended_early"]) for row in garbled),
        "garbled": [row["request"] for row in garbled],
        "texts": rows,
        "steps": runner.steps,
        "wrong_starts": [one._asdict() for one in runner.wrong],
        "wrong_first_drafts": sum(one.first_draft for one in runner.wrong),
    }


def _text(request: WordRequest, text: word_model.Text, output_token_ids: list[int]) -> dict[str, Any]:
    expected = text.expected[: request.max_tokens]
    return {
        "request": request.req_id,
        "prompt": word_model.words(text.prompt),
        "text": word_model.words(output_token_ids),
        "expected": word_model.words(expected),
        "intact": output_token_ids == expected,
        "ended_early": len(output_token_ids) < len(expected),
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
    same = _equal(*(arms[arm].pop("result") for arm in ROWS))
    return {"requests": requests, "drafts": drafts, "padded": padded, "inert": same, **arms}


def _equal(one: Sequence[torch.Tensor], other: Sequence[torch.Tensor]) -> bool:
    return all(torch.equal(*pair) for pair in zip(one, other, strict=True))


def _with_metadata(
    dev: Device, rows: Rows, requests: int, drafts: int, padded: int, run: Backend
) -> dict[str, Any]:
    """The kernels over every row of the metadata, those that no request has among them."""
    columns, dim, where = 1 + drafts, 8, dev.torch_device
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
    own, counts = views.state_indices.contiguous(), views.num_accepted
    out = word_model.gated_delta_layer(
        run, x, x, weight, (conv, states), own, counts, lambda mixed: (mixed, mixed)
    )
    return {
        "shapes": {name: list(tensor.shape) for name, tensor in views._asdict().items()},
        "rows_of_no_request": size - requests,
        "result": [out[:requests], conv, states],
    }


def released_consumers(subject: str) -> dict[str, Any]:
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
    recurrent, convolved = (kernel.function for kernel in kernels)
    graphs = {arm: _small_graph(rows) for arm, rows in ROWS.items()}
    results = [[*_recurrent(recurrent, views), *_convolved(convolved, views)] for views in graphs.values()]
    return {
        "subject": subject,
        "requests": FEW,
        "padded": PADDED,
        "rows": {arm: len(views.num_accepted) for arm, views in graphs.items()},
        "inert": _equal(*results),
        "hashes": {kernel.name: kernel.body_hash for kernel in kernels},
    }


def _small_graph(rows: Rows) -> SpecMetadata:
    """Requests with counts 1, 2, … in turn."""
    columns = 1 + DRAFTS
    indices = torch.arange(1, 1 + FEW * columns, dtype=torch.int32).reshape(FEW, columns)
    counts = torch.arange(FEW, dtype=torch.int32) % columns + 1
    graph = GraphMetadata(_open("sim", schedule="immediate"), PADDED, DRAFTS)
    return graph.build(rows, indices, counts, PADDED)


def _recurrent(kernel: Any, views: SpecMetadata) -> list[torch.Tensor]:
    """Outputs and states."""
    inputs = gating_inputs(FEW, 1 + DRAFTS)
    inputs |= {"ssm_state_indices": views.state_indices, "cu_seqlens": views.query_start_loc}
    out = kernel(**inputs, num_accepted_tokens=views.num_accepted)[0]
    return [out, inputs["initial_state"]]


def _convolved(kernel: Any, views: SpecMetadata) -> list[torch.Tensor]:
    """Outputs and windows."""
    generator, columns, dim = torch.Generator().manual_seed(0), 1 + DRAFTS, 8
    pool = torch.rand(1 + FEW * columns, 3 + DRAFTS, dim, generator=generator)
    out = kernel(
        x=torch.rand(FEW * columns, dim, generator=generator),
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
