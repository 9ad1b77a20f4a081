"""Experiments of incident `mtp-draft-loop`: the loop in each arm under each schedule, its detector, clock and price.

Every function takes JSON-able arguments, may run in a process of its own and returns a dictionary. `effect`
is what a user would have seen: `illegal-address`, `wrong-plan` (a pass computed with another pass's plan and
stayed inside its memory), `wrong-result`, or `clean`. On the simulator an access outside the tensor that it
was derived from counts as `illegal-address`; on CUDA the process dies of a real one and the caller's
isolation says so.
"""

from __future__ import annotations

import math
import os
import random
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from specmortem import device as devices
from specmortem.detect import bounds, staging
from specmortem.device import Device, PromptCopies, Schedule, Timed, TraceRecord, enumerate_schedules
from specmortem.errors import BadInputError
from specmortem.incidents.mtp_draft_loop import fix
from specmortem.incidents.mtp_draft_loop.controls import REFERENCE, arm_of
from specmortem.incidents.mtp_draft_loop.kernels import Geometry, Plan
from specmortem.incidents.mtp_draft_loop.launches import KnownLaunches
from specmortem.incidents.mtp_draft_loop.layouts import SMALL, find_layout
from specmortem.incidents.mtp_draft_loop.proposer import TOKEN_SETS, DraftCase, LoopArm, MtpProposer

DETECTOR_SCHEDULES = ("immediate", "lazy", "random")

# The loop


@dataclass
class Account:
    """What steps of a case did; `why` tells of the access outside. `read_plans` counts plans read, by reader."""

    steps: int = 0
    forwards: int = 0
    mismatched_steps: int = 0
    wrong_plans: int = 0
    read_plans: dict[str, dict[str, int]] = field(default_factory=dict)
    wrong_ids: int = 0
    clamped: int = 0
    why: str = ""

    @property
    def effect(self) -> str:
        """The worst of what happened."""
        if self.why:
            return "illegal-address"
        return "wrong-plan" if self.wrong_plans else "wrong-result" if self.mismatched_steps else "clean"

    def result(self) -> dict[str, Any]:
        """JSON form with the effect."""
        return {"effect": self.effect, **asdict(self)}


def case(
    arm: str,
    device: str = "sim",
    k: int = 5,
    batch: int | None = None,
    lens: Sequence[int] | None = None,
    layout: str = "read",
    seed: int = 0,
    metadata: bool = True,
    **settings: Any,
) -> DraftCase:
    """A case with lengths as given, else found: `layout` is a kind of `find_layout`, `settings` are of `DraftCase`.

    Without speculative metadata the first two plans race, and of up to 3 tokens there are no others, so there the
    layout is searched for pass 1. On a GPU the float workspace is large enough to be an allocation of its own.
    Raises BadInputError for an unknown arm or a batch that does not fit the lengths.
    """
    chosen = arm_of(arm)
    if device == "sim":
        geometry, workspace, low, high = SMALL, 1 << 16, 200, 500
        settings = {"load_tokens": 256, "load_rows": 64, "launch": KnownLaunches()} | settings
    else:
        sms = torch.cuda.get_device_properties(0).multi_processor_count
        geometry = Geometry(num_sms=sms, num_qo_heads=8, num_kv_heads=4, head_dim=64)
        workspace, low, high = 32 << 20, 4000, 12000
    if lens is None:
        rows = workspace // (4 * geometry.num_qo_heads * geometry.head_dim)
        first = 2 if metadata and k > 3 else 1
        lens = find_layout(geometry, batch or 4, low, high, kind=layout, first=first, rows=rows, seed=seed)
    if batch not in (None, len(lens)):
        raise BadInputError(f"{len(lens)} lengths for a batch of {batch}; give one a request")
    settings = {"max_model_len": max(lens) + 16, "float_workspace": workspace} | settings
    geometry = replace(geometry, constant=chosen.constant)
    return DraftCase(
        chosen, tuple(int(n) for n in lens), k, geometry, seed=seed, metadata=metadata, **settings
    )


class Golden(NamedTuple):
    """The right ids of draft tokens, int64 [K, B], and attention outputs, float32 [K, B, H * D], of a set of tokens."""

    draft_token_ids: Tensor
    attention: Tensor


class RepeatedDrafts:
    """A proposer that drafts for the same batch again and again, and the right results of it on the same device."""

    def __init__(self, dev: Device, case: DraftCase, golden: Sequence[Golden]) -> None:
        self.dev, self.case, self.golden = dev, case, golden
        self.proposer = MtpProposer(dev, case)
        self.lengths = dev.tensor(case.lens, torch.int32, "lengths")
        self.tokens = [dev.tensor(tokens, torch.int64, "tokens") for tokens in case.tokens()]
        self.mismatched = dev.zeros([1], torch.int64, "mismatched steps")
        self.account = Account()
        dev.synchronize()

    def step(self, target_us: float = 0.0) -> None:
        """One engine step: the target's pass, then the drafts, then the host waits for them."""
        c, p = self.case, self.proposer
        which = self.account.steps % len(self.tokens)
        self.dev.trace.clear()
        self.dev.spin(target_us, p.stream)
        p.propose(self.tokens[which], self.lengths, c.known_lengths)
        if self.golden:
            self._compare(*self.golden[which])
        self.dev.synchronize()
        self.account.steps += 1
        self.account.forwards += c.num_speculative_tokens - 1
        if c.observe:
            self.observe(c.num_speculative_tokens)

    def steps(self, count: int, target_us: float = 0.0) -> dict[str, Any]:
        """The account of `count` steps or, on the simulator, of those up to the first access outside."""

        def all_steps() -> None:
            for _ in range(count):
                self.step(target_us)

        self.account.why = until_outside(all_steps)
        if not self.account.why:
            return self.finish()
        self.account.steps += 1
        if self.case.observe:
            done = [r for r in self.dev.trace if r.by == "queue" and r.name == "observe plan"]
            self.account.forwards += len(done)
            self.observe(1 + len(done))
        return self.account.result()

    def _compare(self, draft_token_ids: Tensor, attention: Tensor) -> None:
        b = self.proposer.buffers
        reads = (b.draft_token_ids, b.attention, draft_token_ids, attention, self.mismatched)
        self.dev.launch(
            _count_difference,
            *reads,
            stream=self.proposer.stream,
            reads=reads,
            writes=(self.mismatched,),
            name="compare",
        )

    def observe(self, passes: int) -> None:
        """Take down which plan, and which ids, each of the first passes read."""
        b, plans = self.proposer.buffers, self.proposer.plans
        blocks, seen, drafted = (_fetch(t) for t in (b.seen_plans, b.seen_ids, b.draft_token_ids))
        for i in range(1, passes):
            held = _held(plans, i, blocks[i])
            counts = self.account.read_plans.setdefault(str(i), {})
            counts[held] = counts.get(held, 0) + 1
            self.account.wrong_plans += held != str(i)
            self.account.wrong_ids += int((seen[i] != drafted[i - 1]).any())

    def finish(self) -> dict[str, Any]:
        """The account of all steps; `clamped` counts requests past the model's length in the last one."""
        lengths = _fetch(self.proposer.buffers.seq_lens)
        self.account.clamped = int((lengths < np.array(self.case.lens)).sum())
        self.account.mismatched_steps = int(_fetch(self.mismatched)[0])
        return self.account.result()


def _count_difference(
    ids: Tensor, attention: Tensor, right_ids: Tensor, right_attention: Tensor, count: Tensor
) -> None:
    """Bit for bit: NaNs of equal bits are equal."""
    differ = (ids != right_ids).any()
    differ |= (attention.view(torch.int32) != right_attention.view(torch.int32)).any()
    count += differ


def _fetch(tensor: Tensor) -> npt.NDArray[Any]:
    """A tensor's content, once all work has run."""
    array: npt.NDArray[Any] = tensor.cpu().numpy().copy()
    return array


def _held(plans: dict[int, Plan], reader: int, block: npt.NDArray[np.uint8]) -> str:
    """Whose bytes a block holds: the reader's, else those of the latest plan that fit, else `torn`."""
    for i in (reader, *sorted(set(plans) - {reader}, reverse=True)):
        stop = min(plans[i].nbytes, plans[reader].nbytes)
        image = block.copy()
        plans[i].fill(image)
        if np.array_equal(image[:stop], block[:stop]):
            return str(i)
    return "torn"


def golden(dev: Device, case: DraftCase, sets: int = TOKEN_SETS) -> list[Golden]:
    """Results of `fix.reference`."""
    arm = replace(REFERENCE, constant=case.arm.constant)
    right = replace(case, arm=arm, metadata=True, observe=False, forward_us=0.0, host_us=0.0)
    found = []
    with watch(dev):
        drafting = RepeatedDrafts(dev, right, [])
        for _ in range(sets):
            drafting.step()
            b = drafting.proposer.buffers
            found.append(Golden(b.draft_token_ids.clone(), b.attention.clone()))
    return found


def simulated_golden(case: DraftCase, sets: int = 1) -> list[Golden]:
    """The right results on a simulated device of its own."""
    return golden(devices.open("sim", schedule="immediate"), case, sets)


def open_device(device: str, schedule: str | Schedule, arm: LoopArm, seed: int = 0) -> Device:
    """The device under an arm. Raises BadInputError for launch blocking on CUDA without the variable."""
    if device == "cuda":
        if arm.launch_blocking != (os.environ.get("CUDA_LAUNCH_BLOCKING") == "1"):
            raise BadInputError(
                f"arm {arm.name!r} on CUDA: the process must have CUDA_LAUNCH_BLOCKING=1 for launch-blocking "
                "and for no other; use env_of(arm) as the environment of its isolation.Arm"
            )
        return devices.open("cuda")
    return devices.open("sim", schedule="immediate" if arm.launch_blocking else schedule, seed=seed)


def env_of(arm: str) -> dict[str, str]:
    """The environment that the arm's CUDA process needs."""
    return {"CUDA_LAUNCH_BLOCKING": "1"} if arm_of(arm).launch_blocking else {}


def watch(dev: Device) -> AbstractContextManager[Any]:
    """On the simulator the first access outside ends the kernel: its loop has some 2**32 rounds."""
    return bounds.watch(limit=1, stop=True) if dev.kind == "sim" else nullcontext()


def until_outside(work: Callable[[], object]) -> str:
    """Do it, on the simulator up to the first access outside a tensor: the account of that, empty without one."""
    try:
        work()
    except Exception as error:
        if not isinstance(error.__cause__, bounds.LimitReachedError):
            raise
        return str(error.__cause__)
    return ""


def run(
    dev: Device, case: DraftCase, right: Sequence[Golden], steps: int = 1, target_us: float = 0.0
) -> dict[str, Any]:
    """The account of steps of a case, as `RepeatedDrafts.steps` gives it."""
    with watch(dev):
        return RepeatedDrafts(dev, case, right).steps(steps, target_us)


def steps(
    arm: str = "before",
    device: str = "sim",
    *,
    steps: int = 1,
    schedule: str = "lazy",
    target_us: float = 0.0,
    forward_us: float = 1000.0,
    **wanted: Any,
) -> dict[str, Any]:
    """`steps` drafting steps of one arm, compared bit for bit with the reference; `wanted` as in `case`.

    `schedule` says when simulated work runs. The plan that every pass read is kept (`observe`) on the simulator
    alone, unless that is said. On CUDA the arm `before` dies of its illegal address.
    """
    chosen = case(arm, device, **{"forward_us": forward_us, "observe": device == "sim"} | wanted)
    dev = open_device(device, schedule, chosen.arm, chosen.seed)
    sets = min(steps, TOKEN_SETS)
    right = golden(dev, chosen, sets) if device == "cuda" else simulated_golden(chosen, sets)
    batch = {"k": chosen.num_speculative_tokens, "batch": chosen.batch, "lens": list(chosen.lens)}
    return run(dev, chosen, right, steps, target_us) | {"arm": arm, **batch, "seed": chosen.seed}


def schedules(arm: str = "before", k: int = 5, **wanted: Any) -> dict[str, Any]:
    """One step under every distinguishable schedule: how many fault, of all; `wanted` as in `case`.

    A copy into an idle stream runs at once; all else may be late. With `graphs` the model is replayed from graphs
    and attention stays outside, as with the engine's PIECEWISE ones. Launch blocking is one schedule, the one that
    runs everything at once.
    """
    chosen = case(arm, "sim", k, observe=True, **wanted)
    right = simulated_golden(chosen)
    if chosen.arm.launch_blocking:
        found = [(list[int](), run(devices.open("sim", schedule="immediate"), chosen, right))]
    else:
        found = list(_every_schedule(lambda dev: run(dev, chosen, right)))
    counted = ("wrong_ids", "wrong_plans", "forwards")
    return {
        "arm": arm,
        "k": k,
        "metadata": chosen.metadata,
        "graphs": chosen.graphs,
        "lens": list(chosen.lens),
        "faults": sum(each["effect"] == "illegal-address" for _, each in found),
        **_effects(found),
        **{name: sum(each[name] for _, each in found) for name in counted},
    }


def _every_schedule(
    program: Callable[[Device], dict[str, Any]],
) -> Iterator[tuple[list[int], dict[str, Any]]]:
    """What a program gives under each schedule, and the choices that make it."""
    for found in enumerate_schedules(program, schedule=PromptCopies):
        if isinstance(found.outcome, Exception):
            raise found.outcome
        yield list(found.choices), found.outcome


def _effects(outcomes: Iterable[tuple[list[int], dict[str, Any]]]) -> dict[str, Any]:
    """How many schedules there are, how many have each effect, and the first of each that is not clean."""
    effects: Counter[str] = Counter()
    witness: dict[str, Any] = {}
    for choices, found in outcomes:
        effects[found["effect"]] += 1
        witness.setdefault(found["effect"], {"choices": choices, **found})
    witness.pop("clean", None)
    return {"schedules": effects.total(), "effects": dict(effects), "witness": witness}


def two_steps(target_waits: bool, k: int = 2, seed: int = 0) -> dict[str, Any]:
    """Two steps in flight under every distinguishable schedule, each request one token longer in the second.

    The host knows all lengths and waits between the steps only where `target_waits`: there the build for the
    target's pass reads the lengths from the GPU, as it must where it is given none (gpu_model_runner.py:2443 and
    backend.py:553 of vLLM 0.28.0). Page ids are left out, since their host memory is one a pass.
    """
    chosen = case("no-page-kernel", "sim", k, seed=seed)
    found = _effects(_every_schedule(lambda dev: _two_steps(dev, chosen, target_waits)))
    return {"k": k, "target_waits": target_waits, "lens": list(chosen.lens), **found}


def _two_steps(dev: Device, chosen: DraftCase, target_waits: bool) -> dict[str, Any]:
    with watch(dev):
        proposer = MtpProposer(dev, chosen)
        tokens = dev.tensor(chosen.tokens()[0], torch.int64, "tokens")
        lengths = [np.array(chosen.lens, dtype=np.int32) + n for n in range(2)]
        on_device = [dev.tensor(known, torch.int32, "lengths") for known in lengths]
        dev.synchronize()

        def draft() -> None:
            for known, target in zip(lengths, on_device, strict=True):
                if target_waits:
                    proposer.read_lengths()
                proposer.propose(tokens, target, known)
            dev.synchronize()

        return _accessed(draft)


def _accessed(work: Callable[[], object]) -> dict[str, Any]:
    """Effect and account of the first access outside, if there is one."""
    why = until_outside(work)
    return {"effect": "illegal-address" if why else "clean", "why": why}


def overtaken(device: str = "sim", later: int = 1, k: int = 5, seed: int = 0) -> dict[str, Any]:
    """What a lost race leaves, without a race: the kernels of plan 2 run when plan 2 + `later` is in their block.

    The block is as in the loop: the plans lie over each other in it. On CUDA the process dies of the first access
    outside.
    """
    chosen = case("before", device, k, seed=seed)
    dev = open_device(device, "immediate", chosen.arm)
    with watch(dev):
        proposer = MtpProposer(dev, chosen)
        lengths = np.array(chosen.lens, dtype=np.int32)
        proposer.buffers.seq_lens.copy_(torch.from_numpy(lengths + 2))
        plans = [proposer.planner.plan(lengths + i) for i in range(3 + later)]
        for plan in plans[1:]:
            plan.fill(proposer.staging)
            proposer.copy(plan, proposer.staging)
            dev.synchronize()

        def attend() -> None:
            proposer.attend(plans[2])
            dev.synchronize()

        return _accessed(attend)


# What the detector reports


def first_step(
    arm: str = "before",
    k: int = 5,
    device: str = "sim",
    schedules: Sequence[str] = DETECTOR_SCHEDULES,
    seed: int = 0,
) -> dict[str, Any]:
    """Races that the staging detector reports in one step without attention, so that no plan can fault.

    On CUDA there is one schedule, the GPU's own. Launch blocking is the schedule `immediate`. `effect` is
    `unordered` when every schedule has a race, `ordered` when none has, else `mixed`; `races` counts them by
    schedule. Raises BadInputError for an unknown arm, or a CUDA process without the arm's environment.
    """
    chosen = case(arm, device, k, layout="benign", attend=False, seed=seed)
    if device == "cuda":
        schedules = ("cuda",)
    elif chosen.arm.launch_blocking:
        schedules = ("immediate",)
    found = {
        schedule: _races(open_device(device, schedule, chosen.arm, seed), chosen) for schedule in schedules
    }
    races, seen = [race for each in found.values() for race in each], [bool(each) for each in found.values()]
    return {
        "effect": "unordered" if all(seen) else "mixed" if any(seen) else "ordered",
        "why": str(races[0]) if races else "",
        "races": {schedule: len(each) for schedule, each in found.items()},
        "pairs": sorted({f"{race.first} / {race.second}" for race in races}),
        "schedules": len(found),
        "reported": sum(seen),
    }


def _races(dev: Device, chosen: DraftCase) -> list[staging.Race]:
    with staging.watch(dev) as watched:
        RepeatedDrafts(dev, chosen, []).step()
    return watched.races


# When the host overtakes the copies


def _is_fill(record: TraceRecord) -> bool:
    return (record.by, record.what, record.name) == ("host", "write", "plan")


def overwrites(trace: Sequence[TraceRecord]) -> list[tuple[int, int]]:
    """Plans (reader, writer) of a simulated step: copy `reader` ran when `writer` was in the buffer."""
    written = copied = 0
    found = []
    for record in trace:
        written += _is_fill(record)
        if (record.by, record.name) == ("queue", "plan copy"):
            copied += 1
            found += [(copied, written)] if written > copied else []
    return found


def derived_pairs(k: int, ratio: float, metadata: bool = True, pages: float = 0.0) -> list[tuple[int, int]]:
    """Consecutive plans that race when a pass takes the GPU `ratio` times as long as the host.

    Copy j stands behind the page ids of builds 1 to j, which take `pages` host passes each, and behind the forwards
    of passes 1 to j - 1; plan j + 1 is made after j passes of the host, both counted from the blocking read. So it
    is overtaken when j * pages + (j - 1) * ratio > j: copy 1 only when gathering page ids alone takes longer than a
    host pass. The last plan has no successor. Without speculative metadata the host does not block, and the target's
    pass stands before copy 1 (it is taken to be longer than the whole loop here).
    """
    late = [j for j in range(1, k - 1) if not metadata or j * pages + (j - 1) * ratio > j]
    return [(j, j + 1) for j in late]


def _timed_step(
    k: int, ratio: float, metadata: bool, arm: str = "before", host_us: float = 10_000.0, pages: float = 0.0
) -> Device:
    """One step on the simulator's clock, without attention: who comes first does not depend on the layout."""
    times: dict[str, Any] = {"forward_us": ratio * host_us, "host_us": host_us, "pages_us": pages * host_us}
    chosen = case(arm, k=k, lens=(206, 405, 490, 414), metadata=metadata, attend=False, **times)
    dev = devices.open("sim", schedule=Timed(launch_us=0.0))
    RepeatedDrafts(dev, chosen, []).step(target_us=0.0 if metadata else 100 * k * host_us)
    return dev


def k_split(ratios: Sequence[float] = (1.1, 1.4, 1.6, 2.1, 3.0)) -> dict[str, Any]:
    """Which consecutive plans race, by K and by the ratio of GPU to host time: derived and measured.

    Gathering page ids takes no time in `rows`. `threshold` is the measured ratio from which on any pair races, by
    bisection; None where none does up to 64. `pages_threshold` is the measured time of gathering page ids, in host
    passes, from which on 3 drafts race.
    """
    rows = [_split(k, metadata, ratio) for k in range(1, 7) for metadata in (True, False) for ratio in ratios]
    threshold = {
        str(k): _threshold(lambda ratio, k=k: _timed_step(k, ratio, True), 1.0)  # type: ignore[misc]
        for k in range(1, 7)
    }
    pages = _threshold(lambda pages: _timed_step(3, 1.1, True, pages=pages), 0.0)
    return {"rows": rows, "threshold": threshold, "pages_threshold": pages}


def _split(k: int, metadata: bool, ratio: float) -> dict[str, Any]:
    """Which plans race in one step: derived and measured."""
    found = overwrites(_timed_step(k, ratio, metadata).trace)
    return {
        "k": k,
        "metadata": metadata,
        "ratio": ratio,
        "derived": derived_pairs(k, ratio, metadata),
        "measured": [(j, j + 1) for j, _ in found],
    }


def _threshold(step: Callable[[float], Device], low: float) -> float | None:
    """The least value from which on plans race in a step, to 0.01; None where they do not at 64."""
    high = 64.0
    if not overwrites(step(high).trace):
        return None
    while high - low > 0.01:
        middle = (low + high) / 2
        low, high = (low, middle) if overwrites(step(middle).trace) else (middle, high)
    return round(high, 2)


def timeline(
    arm: str = "before", k: int = 5, ratio: float = 3.0, metadata: bool = True, host_us: float = 500.0
) -> dict[str, Any]:
    """What host, copies and kernels did when, in one step on the simulator's clock (microseconds).

    `copies` are the plan copies with the plan they carried and the plan they were meant to carry; `writes`
    are the host's fills of a plan buffer, `blocks` the calls in which the host waited.
    """
    trace = _timed_step(k, ratio, metadata, arm, host_us).trace
    by_host, queued = ([r for r in trace if r.by == by] for by in ("host", "queue"))
    reused = arm_of(arm).draft_pass not in (fix.fresh, fix.pageable)
    lost = dict(overwrites(trace)) if reused else {}
    calls, copies = ([r for r in side if r.name == "plan copy"] for side in (by_host, queued))
    return {
        "arm": arm,
        "k": k,
        "ratio": ratio,
        "writes": [
            {"plan": i, "at_us": r.start_us} for i, r in enumerate(filter(_is_fill, by_host), start=1)
        ],
        "copies": [
            {"plan": j, "carried": lost.get(j, j), "issued_us": call.start_us, **_span(copy)}
            for j, (call, copy) in enumerate(zip(calls, copies, strict=True), start=1)
        ],
        "kernels": [{"name": r.name, **_span(r)} for r in queued if r.what in ("launch", "spin")],
        "blocks": [
            {"stream": r.stream, "event": r.name, "until_us": r.start_us}
            for r in by_host
            if r.what == "synchronize"
        ],
    }


def _span(record: TraceRecord) -> dict[str, float | None]:
    return {"start_us": record.start_us, "end_us": record.end_us}


# Price


def price(
    device: str = "cuda",
    arms: Sequence[str] = ("before", "event", "fresh", "pageable", "reread-lengths", "stream-sync"),
    ks: Sequence[int] = (2, 3, 4, 5, 6),
    forward_us: float = 3000.0,
    target_us: float = 2000.0,
    steps: int = 5,
    rounds: int = 31,
    seed: int = 0,
) -> dict[str, Any]:
    """Median microseconds of a step, arms side by side, and ratios to `before` and `stream-sync`.

    A ratio is the median of those of single rounds, in which all arms have a turn, in an order of its own: what slows
    the host for a while slows all of them. Beside it an interval that holds the median of such ratios with 95 %. The
    layout is one in which all passes have equal plans, so that no arm faults. Launch blocking needs a process of its
    own.
    """
    rows = []
    dev = open_device(device, "timed", arm_of(arms[0]), seed)
    draw = random.Random(seed)
    for k in ks:
        cases = [case(arm, device, k, layout="benign", seed=seed, forward_us=forward_us) for arm in arms]
        loops = {arm: RepeatedDrafts(dev, one, []) for arm, one in zip(arms, cases, strict=True)}
        times: dict[str, list[float]] = {arm: [] for arm in arms}
        for _ in range(rounds + 1):
            for arm in draw.sample(list(arms), len(arms)):
                times[arm].append(_time(dev, loops[arm], steps, target_us))
        measured = {arm: found[1:] for arm, found in times.items()}
        rows += [{"k": k, "arm": arm, **_price_of(measured, arm)} for arm in arms]
    return {
        "device": dev.info.as_dict(),
        "forward_us": forward_us,
        "target_us": target_us,
        "steps": steps,
        "rounds": rounds,
        "rows": rows,
    }


def _price_of(times: Mapping[str, Sequence[float]], arm: str) -> dict[str, Any]:
    """Of an arm: median microseconds of a step, and its ratio to each base, with the interval."""
    row: dict[str, Any] = {"step_us": statistics.median(times[arm])}
    for base in ("before", "stream-sync"):
        if base in times:
            ratios = [mine / other for mine, other in zip(times[arm], times[base], strict=True)]
            row |= {f"to_{base}": statistics.median(ratios), f"to_{base}_95": median_interval(ratios)}
    return row


def median_interval(values: Sequence[float], miss: float = 0.05) -> list[float]:
    """Two of the values, between which the median of what they are drawn from lies, but for a chance of `miss`.

    By order statistics: no shape is assumed. With fewer than six values the chance is larger.
    """
    ordered, count = sorted(values), len(values)
    left, below = 0, 1 / 2**count
    while left < (count - 1) // 2 and 2 * (below + math.comb(count, left + 1) / 2**count) <= miss:
        left += 1
        below += math.comb(count, left) / 2**count
    return [ordered[left], ordered[-1 - left]]


def _time(dev: Device, loop: RepeatedDrafts, steps: int, target_us: float) -> float:
    """Microseconds a step, host and GPU together."""
    dev.synchronize()
    begin = time.perf_counter()
    for _ in range(steps):
        dev.trace.clear()
        dev.spin(target_us, loop.proposer.stream)
        loop.proposer.propose(loop.tokens[0], loop.lengths)
    dev.synchronize()
    return 1e6 * (time.perf_counter() - begin) / steps
