"""Arms of incident `mtp-draft-loop`: the draft loop under each arm and schedule, hypotheses, price.

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
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from specmortem import device as devices
from specmortem.detect import bounds
from specmortem.device import Device, PromptCopies, Schedule, Timed, TraceRecord, enumerate_schedules
from specmortem.errors import BadInputError
from specmortem.incidents.mtp_draft_loop.kernels import Geometry, Plan
from specmortem.incidents.mtp_draft_loop.layouts import SMALL, find_layout
from specmortem.incidents.mtp_draft_loop.proposer import REFERENCE, Arm, MtpConfig, MtpProposer, arm_of

TOKEN_SETS = 3
# The loop


@dataclass(frozen=True)
class Case:
    """One configuration of the loop and its batch."""

    config: MtpConfig
    arm: Arm
    lens: tuple[int, ...]
    seed: int = 0
    metadata: bool = True


@dataclass
class Account:
    """What steps of a case did."""

    steps: int = 0
    forwards: int = 0
    mismatched_steps: int = 0
    wrong_plans: int = 0
    read_plans: dict[str, Counter[str]] = field(default_factory=dict)
    wrong_ids: int = 0
    clamped: int = 0
    illegal: str = ""

    def result(self) -> dict[str, Any]:
        """JSON form with the effect."""
        effect = "clean"
        for told, name in (
            (self.mismatched_steps, "wrong-result"),
            (self.wrong_plans, "wrong-plan"),
            (self.illegal, "illegal-address"),
        ):
            effect = name if told else effect
        return {
            "effect": effect,
            "why": self.illegal,
            "steps": self.steps,
            "forwards": self.forwards,
            "mismatched_steps": self.mismatched_steps,
            "wrong_plans": self.wrong_plans,
            "wrong_ids": self.wrong_ids,
            "clamped": self.clamped,
            "read_plans": {reader: dict(counts) for reader, counts in sorted(self.read_plans.items())},
        }


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
) -> Case:
    """A case with lengths as given, else found: `layout` is a kind of `find_layout`.

    Without speculative metadata the first two plans race, and of up to 3 tokens there are no others, so there
    the layout is searched for pass 1. Raises BadInputError for an unknown arm or a batch that does not fit
    the lengths.
    """
    chosen = arm_of(arm)
    geometry = _device_geometry(device)
    workspace = _workspace(geometry)
    if lens is None:
        low, high = (200, 500) if device == "sim" else (4000, 12000)
        lens = find_layout(
            geometry,
            batch or 4,
            low,
            high,
            kind=layout,
            first=2 if metadata and k > 3 else 1,
            rows=workspace // (4 * geometry.num_qo_heads * geometry.head_dim),
            seed=seed,
        )
    if batch not in (None, len(lens)):
        raise BadInputError(f"{len(lens)} lengths for a batch of {batch}; give one a request")
    config = MtpConfig(
        batch=len(lens),
        num_speculative_tokens=k,
        geometry=replace(geometry, constant=chosen.constant),
        max_model_len=max(lens) + 16,
        float_workspace=workspace,
        load_tokens=256 if device == "sim" else 32,
        load_rows=64 if device == "sim" else 8,
    )
    return Case(replace(config, **settings), chosen, tuple(int(n) for n in lens), seed, metadata)


def _device_geometry(device: str) -> Geometry:
    if device == "sim":
        return SMALL
    sms = torch.cuda.get_device_properties(0).multi_processor_count
    return Geometry(num_sms=sms, num_qo_heads=8, num_kv_heads=4, head_dim=64)


def _workspace(geometry: Geometry) -> int:
    """Bytes of float workspace; on a GPU enough to be an allocation of its own."""
    least = 4 * geometry.num_qo_heads * geometry.cta_tile_q * (geometry.head_dim + 1)
    return max(1 << 16, least * (geometry.max_chunks + 64)) if geometry == SMALL else 32 << 20


class Loop:
    """A proposer that drafts for the same batch again and again, and the right results of it."""

    def __init__(self, dev: Device, case: Case, golden: Sequence[Golden]) -> None:
        self.dev, self.case = dev, case
        self.proposer = MtpProposer(dev, case.config, case.arm, case.seed)
        self.lengths = dev.tensor(case.lens, torch.int32, "lengths")
        self.tokens = [dev.tensor(tokens, torch.int64, "tokens") for tokens in _tokens(case)]
        self.golden = [
            (dev.tensor(g.drafts, torch.int64), dev.tensor(g.attention, torch.float32)) for g in golden
        ]
        self.mismatched = dev.zeros([1], torch.int64, "mismatched steps")
        self.account = Account()
        dev.synchronize()

    def step(self, target_us: float = 0.0) -> None:
        """One engine step: the target's pass, then the drafts, then the host waits for them."""
        c, p = self.case, self.proposer
        which = self.account.steps % len(self.tokens)
        self.dev.trace.clear()
        self.dev.spin(target_us, p.stream)
        known = None if c.metadata else np.array(c.lens, dtype=np.int32)
        p.propose(self.tokens[which], self.lengths, known)
        if self.golden:
            self._compare(*self.golden[which])
        self.dev.synchronize()
        self.account.steps += 1
        self.account.forwards += c.config.num_speculative_tokens - 1
        if c.config.observe:
            self.observe(c.config.num_speculative_tokens)

    def _compare(self, drafts: torch.Tensor, attention: torch.Tensor) -> None:
        b = self.proposer.buffers
        reads = (b.drafts, b.attention, drafts, attention, self.mismatched)
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
        blocks, seen, drafts = (_fetch(t) for t in (b.seen_plans, b.seen_ids, b.drafts))
        for i in range(1, passes):
            held = _held(plans, i, blocks[i])
            self.account.read_plans.setdefault(str(i), Counter())[held] += 1
            self.account.wrong_plans += held != str(i)
            self.account.wrong_ids += int((seen[i] != drafts[i - 1]).any())

    def finish(self) -> dict[str, Any]:
        """The account of all steps; `clamped` counts requests past the model's length in the last one."""
        lengths = _fetch(self.proposer.buffers.seq_lens)
        self.account.clamped = int((lengths < np.array(self.case.lens)).sum())
        self.account.mismatched_steps = int(_fetch(self.mismatched)[0])
        return self.account.result()


def _count_difference(
    drafts: torch.Tensor,
    attention: torch.Tensor,
    right_drafts: torch.Tensor,
    right_attention: torch.Tensor,
    count: torch.Tensor,
) -> None:
    """Bit for bit: NaNs of equal bits are equal."""
    differ = (drafts != right_drafts).any()
    differ |= (attention.view(torch.int32) != right_attention.view(torch.int32)).any()
    count += differ


def _fetch(tensor: torch.Tensor) -> npt.NDArray[Any]:
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


def _tokens(case: Case) -> npt.NDArray[np.int64]:
    rng = np.random.default_rng(case.seed + 1)
    return rng.integers(0, case.config.vocab, size=(TOKEN_SETS, len(case.lens)))


@dataclass(frozen=True)
class Golden:
    """The right drafts [K, B] and attention outputs [K, B, H * D] of one set of tokens."""

    drafts: npt.NDArray[np.int64]
    attention: npt.NDArray[np.float32]


def golden(dev: Device, case: Case, sets: int = TOKEN_SETS) -> list[Golden]:
    """Results with a buffer of its own for every plan and a drained stream after it."""
    arm = replace(REFERENCE, constant=case.arm.constant)
    config = replace(case.config, observe=False, forward_us=0.0, host_us=0.0)
    loop = Loop(dev, replace(case, config=config, arm=arm, metadata=True), [])
    found = []
    for _ in range(sets):
        loop.step()
        b = loop.proposer.buffers
        found.append(Golden(_fetch(b.drafts), _fetch(b.attention)))
    return found


def open_device(device: str, schedule: str | Schedule, arm: Arm, seed: int = 0) -> Device:
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


def _watch(dev: Device) -> AbstractContextManager[Any]:
    """On the simulator the first access outside ends the kernel: its loop has some 2**32 rounds."""
    return bounds.watch(limit=1, stop=True) if dev.kind == "sim" else nullcontext()


def _until_outside(work: Callable[[], object]) -> str:
    """Do it, on the simulator up to the first access outside a tensor: the account of that, empty without one."""
    try:
        work()
    except Exception as error:
        if not isinstance(error.__cause__, bounds.LimitReachedError):
            raise
        return str(error.__cause__)
    return ""


def run(
    dev: Device, case: Case, right: Sequence[Golden], steps: int = 1, target_us: float = 0.0
) -> dict[str, Any]:
    """Steps of a case until the end or, on the simulator, the first illegal address."""
    with _watch(dev):
        loop = Loop(dev, case, right)

        def all_steps() -> None:
            for _ in range(steps):
                loop.step(target_us)

        loop.account.illegal = _until_outside(all_steps)
        if not loop.account.illegal:
            return loop.finish()
        loop.account.steps += 1
        if case.config.observe:
            done = [r for r in dev.trace if r.by == "queue" and r.name == "observe plan"]
            loop.account.forwards += len(done)
            loop.observe(1 + len(done))
        return loop.account.result()


def steps(
    arm: str = "before",
    device: str = "sim",
    k: int = 5,
    steps: int = 1,
    batch: int | None = None,
    lens: Sequence[int] | None = None,
    layout: str = "read",
    seed: int = 0,
    schedule: str = "lazy",
    metadata: bool = True,
    target_us: float = 0.0,
    forward_us: float = 1000.0,
    host_us: float = 0.0,
    observe: bool | None = None,
) -> dict[str, Any]:
    """`steps` drafting steps of one arm, compared bit for bit with the reference.

    `schedule` says when simulated work runs. `observe` snapshots the plan that every pass read (on the
    simulator by default). On CUDA the arm `before` dies of its illegal address.
    """
    watched = device == "sim" if observe is None else observe
    chosen = case(
        arm,
        device,
        k,
        batch,
        lens,
        layout,
        seed,
        metadata,
        forward_us=forward_us,
        host_us=host_us,
        observe=watched,
    )
    dev = open_device(device, schedule, chosen.arm, seed)
    right = golden(
        dev if device == "cuda" else devices.open("sim", schedule="immediate"), chosen, min(steps, TOKEN_SETS)
    )
    result = run(dev, chosen, right, steps, target_us)
    return result | {"arm": arm, "k": k, "batch": len(chosen.lens), "lens": list(chosen.lens), "seed": seed}


def schedules(
    arm: str = "before",
    k: int = 5,
    metadata: bool = True,
    lens: Sequence[int] | None = None,
    layout: str = "read",
    graphs: bool = False,
    seed: int = 0,
) -> dict[str, Any]:
    """One step under every distinguishable schedule: how many fault, of all.

    A copy into an idle stream runs at once; all else may be late. With `graphs` the model is replayed from graphs
    and attention stays outside, as with the engine's PIECEWISE ones. Launch blocking is one schedule, the one that
    runs everything at once.
    """
    chosen = case(
        arm,
        "sim",
        k,
        lens=lens,
        layout=layout,
        seed=seed,
        metadata=metadata,
        observe=True,
        graphs=graphs,
    )
    right = golden(devices.open("sim", schedule="immediate"), chosen, 1)
    effects: Counter[str] = Counter()
    witness: dict[str, Any] = {}
    total = {"wrong_ids": 0, "wrong_plans": 0, "forwards": 0}
    for choices, found in _outcomes(chosen, right):
        effects[found["effect"]] += 1
        witness.setdefault(found["effect"], {"choices": choices, **found})
        for name in total:
            total[name] += found[name]
    return {
        "arm": arm,
        "k": k,
        "metadata": metadata,
        "graphs": graphs,
        "lens": list(chosen.lens),
        "schedules": effects.total(),
        "faults": effects["illegal-address"],
        "effects": dict(effects),
        "witness": {name: w for name, w in witness.items() if name != "clean"},
        **total,
    }


def two_steps(target_waits: bool, k: int = 2, seed: int = 0) -> dict[str, Any]:
    """Two steps in flight under every distinguishable schedule, each request one token longer in the second.

    The host knows all lengths and waits between the steps only where `target_waits`: there the build for the
    target's pass reads the lengths from the GPU, as it must where it is given none (gpu_model_runner.py:2443 and
    backend.py:553 of vLLM 0.28.0). Page ids are left out, since their host memory is one a pass.
    """
    chosen = case("no-page-kernel", "sim", k, seed=seed)
    effects: Counter[str] = Counter()
    witness: dict[str, Any] = {}
    for found in enumerate_schedules(
        lambda dev: _two_steps(dev, chosen, target_waits), schedule=PromptCopies
    ):
        if isinstance(found.outcome, Exception):
            raise found.outcome
        effect = "illegal-address" if found.outcome else "clean"
        effects[effect] += 1
        witness.setdefault(effect, {"choices": list(found.choices), "why": found.outcome})
    return {
        "k": k,
        "target_waits": target_waits,
        "lens": list(chosen.lens),
        "schedules": effects.total(),
        "effects": dict(effects),
        "witness": {name: w for name, w in witness.items() if name != "clean"},
    }


def _two_steps(dev: Device, chosen: Case, target_waits: bool) -> str:
    """The account of the first access outside; empty without one."""
    with _watch(dev):
        proposer = MtpProposer(dev, chosen.config, chosen.arm, chosen.seed)
        tokens = dev.tensor(_tokens(chosen)[0], torch.int64, "tokens")
        lengths = [np.array(chosen.lens, dtype=np.int32) + n for n in range(2)]
        on_device = [dev.tensor(known, torch.int32, "lengths") for known in lengths]
        dev.synchronize()

        def draft() -> None:
            for known, target in zip(lengths, on_device, strict=True):
                if target_waits:
                    proposer.read_lengths()
                proposer.propose(tokens, target, known)
            dev.synchronize()

        return _until_outside(draft)


def _outcomes(chosen: Case, right: Sequence[Golden]) -> Iterator[tuple[list[int], dict[str, Any]]]:
    if chosen.arm.launch_blocking:
        yield [], run(devices.open("sim", schedule="immediate"), chosen, right)
        return
    for found in enumerate_schedules(lambda dev: run(dev, chosen, right), schedule=PromptCopies):
        if isinstance(found.outcome, Exception):
            raise found.outcome
        yield list(found.choices), found.outcome


def overtaken(device: str = "sim", later: int = 1, k: int = 5, seed: int = 0) -> dict[str, Any]:
    """What a lost race leaves, without a race: the kernels of plan 2 run when plan 2 + `later` is in their block.

    The block is as in the loop: the plans lie over each other in it. On CUDA the process dies of the first access
    outside.
    """
    chosen = case("before", device, k, seed=seed)
    dev = open_device(device, "immediate", chosen.arm)
    with _watch(dev):
        proposer = MtpProposer(dev, chosen.config, chosen.arm, seed)
        lengths = np.array(chosen.lens, dtype=np.int32)
        proposer.buffers.seq_lens.copy_(torch.from_numpy(lengths + 2))
        plans = [proposer.planner.plan(lengths + i) for i in range(3 + later)]
        for plan in plans[1:]:
            proposer.staging.send(plan, proposer.buffers.workspaces.ints, proposer.stream)
            dev.synchronize()

        def attend() -> None:
            proposer.attend(plans[2])
            dev.synchronize()

        why = _until_outside(attend)
    return {"effect": "illegal-address" if why else "clean", "why": why}


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
    k: int,
    ratio: float,
    metadata: bool,
    arm: str = "before",
    host_us: float = 10_000.0,
    pages: float = 0.0,
) -> Device:
    """One step on the simulator's clock, without attention: who comes first does not depend on the layout."""
    chosen = case(
        arm,
        "sim",
        k,
        lens=(206, 405, 490, 414),
        metadata=metadata,
        forward_us=ratio * host_us,
        host_us=host_us,
        pages_us=pages * host_us,
        attend=False,
    )
    dev = devices.open("sim", schedule=Timed(launch_us=0.0))
    loop = Loop(dev, chosen, [])
    loop.step(target_us=0.0 if metadata else 100 * k * host_us)
    return dev


def k_split(ratios: Sequence[float] = (1.1, 1.4, 1.6, 2.1, 3.0)) -> dict[str, Any]:
    """Which consecutive plans race, by K and by the ratio of GPU to host time: derived and measured.

    Gathering page ids takes no time in `rows`. `threshold` is the measured ratio from which on any pair races, by
    bisection; None where none does up to 64. `pages_threshold` is the measured time of gathering page ids, in host
    passes, from which on 3 drafts race.
    """
    rows = []
    for k in range(1, 7):
        for metadata in (True, False):
            for ratio in ratios:
                found = overwrites(_timed_step(k, ratio, metadata).trace)
                rows.append(
                    {
                        "k": k,
                        "metadata": metadata,
                        "ratio": ratio,
                        "derived": derived_pairs(k, ratio, metadata),
                        "measured": [(j, j + 1) for j, _ in found],
                        "read_instead": [list(pair) for pair in found],
                    }
                )
    threshold = {
        str(k): _threshold(lambda ratio, k=k: _timed_step(k, ratio, True), 1.0)  # type: ignore[misc]
        for k in range(1, 7)
    }
    pages = _threshold(lambda pages: _timed_step(3, 1.1, True, pages=pages), 0.0)
    return {"rows": rows, "threshold": threshold, "pages_threshold": pages}


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
    staging = arm_of(arm).staging
    reused = not staging.get("fresh", False) and staging.get("pinned", True)
    lost = dict(overwrites(trace)) if reused else {}
    copies = [r for r in trace if r.by == "queue" and r.name == "plan copy"]
    issued = [r for r in trace if r.by == "host" and r.name == "plan copy"]
    return {
        "arm": arm,
        "k": k,
        "ratio": ratio,
        "writes": [
            {"plan": i, "at_us": r.start_us} for i, r in enumerate((r for r in trace if _is_fill(r)), start=1)
        ],
        "copies": [
            {
                "plan": j,
                "carried": lost.get(j, j),
                "issued_us": call.start_us,
                "start_us": copy.start_us,
                "end_us": copy.end_us,
            }
            for j, (call, copy) in enumerate(zip(issued, copies, strict=True), start=1)
        ],
        "kernels": [
            {"name": r.name, "start_us": r.start_us, "end_us": r.end_us}
            for r in trace
            if r.by == "queue" and r.what in ("launch", "spin")
        ],
        "blocks": [
            {"stream": r.stream, "event": r.name, "until_us": r.start_us}
            for r in trace
            if r.by == "host" and r.what == "synchronize"
        ],
    }


# Hypotheses: each function gives rows, and the verdict that follows from them


def same_stream() -> dict[str, Any]:
    """The two buffer writes race with the model that reads them: looked for under every schedule.

    A control does what the hypothesis says: it issues the writes in another stream.
    """
    rows = [
        _row(schedules("before", k=4), "before"),
        _row(schedules("side-stream-writes", k=2), "side-stream-writes"),
    ]
    real, control = rows
    refuted = real["wrong_ids"] == 0 and real["faults"] > 0 and control["wrong_ids"] > 0
    return {"hypothesis": "same-stream-buffer-race", "rows": rows, "verdict": _verdict(refuted)}


def placeholders(steps: int = 3, k: int = 5) -> dict[str, Any]:
    """-1 in the scheduled draft tokens breaks the loop.

    Under asynchronous scheduling the scheduler knows no drafts and sends -1 for each; the runner fills in the
    drafts of the step before on the GPU. The step before the first is one of the reference. Counted are steps
    with placeholders, ids below 0 that are left after that, and faults.
    """
    rows = []
    for arm, asynchronous in (("event", True), ("before", True), ("before", False)):
        found = _scheduled(arm, asynchronous, steps, k)
        rows.append({"arm": f"{arm}, {'async' if asynchronous else 'sync'} scheduling", **found})
    healthy, before, without = rows
    refuted = (
        healthy["with_placeholders"] == healthy["steps"]
        and healthy["negative_ids"] == 0
        and healthy["effect"] == "clean"
        and before["with_placeholders"] > 0
        and without["with_placeholders"] == 0
        and without["effect"] == "illegal-address"
    )
    return {"hypothesis": "minus-one-placeholders", "rows": rows, "verdict": _verdict(refuted)}


def _scheduled(arm: str, asynchronous: bool, steps: int, k: int) -> dict[str, Any]:
    """Steps whose token ids are the last drafts, from the scheduler or filled in on the GPU."""
    chosen = case(arm, "sim", k, observe=True)
    dev = open_device("sim", "lazy", chosen.arm)
    earlier = golden(devices.open("sim", schedule="immediate"), chosen, 1)[0].drafts
    with_placeholders = negative = 0
    with _watch(dev):
        loop = Loop(dev, chosen, [])
        drafts = loop.proposer.buffers.drafts
        drafts.copy_(torch.from_numpy(earlier))
        scheduled = dev.zeros([k, len(chosen.lens)], torch.int64, "scheduled")
        while loop.account.steps < steps and not loop.account.illegal:
            sent = np.full(drafts.shape, -1) if asynchronous else _fetch(drafts)
            with_placeholders += bool((sent < 0).any())
            negative += _fill_in(dev, loop, sent, scheduled)
            loop.account.illegal = _until_outside(loop.step)
        loop.account.steps += bool(loop.account.illegal)
    return {
        **loop.account.result(),
        "with_placeholders": with_placeholders,
        "negative_ids": negative,
    }


def _fill_in(dev: Device, loop: Loop, sent: npt.NDArray[np.int64], scheduled: torch.Tensor) -> int:
    """Put the scheduler's ids where the next step takes them from; returns how many are still negative."""
    buffer = dev.host_buffer(sent.shape, torch.int64, name="scheduled ids")
    buffer[:] = sent
    dev.copy_async(scheduled, buffer, loop.proposer.stream)
    tokens = loop.tokens[loop.account.steps % len(loop.tokens)]
    args = (scheduled, loop.proposer.buffers.drafts, tokens)
    dev.launch(
        _resolve, *args, stream=loop.proposer.stream, reads=args, writes=(scheduled, tokens), name="fill in"
    )
    dev.synchronize()
    return int((_fetch(scheduled) < 0).sum())


def _resolve(scheduled: torch.Tensor, drafts: torch.Tensor, tokens: torch.Tensor) -> None:
    scheduled.copy_(torch.where(scheduled < 0, drafts, scheduled))
    tokens.copy_(scheduled[-1])


def stale_metadata() -> dict[str, Any]:
    """The plan of the first pass is used for all: wrong attention, but nothing outside."""
    rows = [_row(steps(arm), arm) for arm in ("plan-once", "event", "before")]
    stale, fixed, before = rows
    refuted = (
        stale["effect"] == "wrong-result"
        and fixed["effect"] == "clean"
        and before["effect"] == "illegal-address"
    )
    return {"hypothesis": "stale-metadata", "rows": rows, "verdict": _verdict(refuted)}


def kv_boundary() -> dict[str, Any]:
    """A request that crosses into a new page faults: without and with a change of the plan."""
    rows = [
        _row(steps("before", layout="page"), "before, page added, plan unchanged"),
        _row(steps("event"), "event, page added, plan changed"),
        _row(steps("before"), "before, page added, plan changed"),
    ]
    refuted = [row["effect"] for row in rows] == ["clean", "clean", "illegal-address"]
    return {"hypothesis": "kv-boundary", "rows": rows, "verdict": _verdict(refuted)}


def clamping() -> dict[str, Any]:
    """A request reaches max_model_len while it drafts: its length is 1, the plan is for more."""
    rows = []
    for arm in ("before", "event"):
        chosen = case(arm, "sim", 5, layout="benign", observe=True)
        limit = max(chosen.lens) + 1
        chosen = replace(chosen, config=replace(chosen.config, max_model_len=limit))
        right = golden(devices.open("sim", schedule="immediate"), chosen, 1)
        dev = devices.open("sim")
        found = run(dev, chosen, right)
        rows.append(_row(found, f"{arm}, clamped at {limit}") | {"clamped": found["clamped"]})
    refuted = all(row["effect"] == "clean" and row["clamped"] for row in rows)
    return {"hypothesis": "clamping", "rows": rows, "verdict": _verdict(refuted)}


HYPOTHESES = {
    "same-stream-buffer-race": same_stream,
    "minus-one-placeholders": placeholders,
    "stale-metadata": stale_metadata,
    "kv-boundary": kv_boundary,
    "clamping": clamping,
}


def hypothesis(name: str) -> dict[str, Any]:
    """Rows and verdict of one hypothesis. Raises BadInputError for an unknown name."""
    if name not in HYPOTHESES:
        raise BadInputError(f"hypothesis {name!r} is not one of {', '.join(HYPOTHESES)}")
    return HYPOTHESES[name]()


def _row(found: dict[str, Any], arm: str) -> dict[str, Any]:
    kept = ("effect", "why", "effects", "schedules", "faults", "wrong_ids", "wrong_plans", "mismatched_steps")
    return {"arm": arm} | {name: found[name] for name in kept if name in found}


def _verdict(refuted: bool) -> str:
    return "refuted" if refuted else "open"


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
        loops = {arm: Loop(dev, _priced(arm, device, k, forward_us, seed), []) for arm in arms}
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
    told: dict[str, Any] = {"step_us": statistics.median(times[arm])}
    for base in ("before", "stream-sync"):
        if base in times:
            ratios = [mine / other for mine, other in zip(times[arm], times[base], strict=True)]
            told |= {f"to_{base}": statistics.median(ratios), f"to_{base}_95": median_interval(ratios)}
    return told


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


def _priced(arm: str, device: str, k: int, forward_us: float, seed: int) -> Case:
    return case(arm, device, k, layout="benign", seed=seed, forward_us=forward_us)


def _time(dev: Device, loop: Loop, steps: int, target_us: float) -> float:
    """Microseconds a step, host and GPU together."""
    dev.synchronize()
    begin = time.perf_counter()
    for _ in range(steps):
        dev.trace.clear()
        dev.spin(target_us, loop.proposer.stream)
        loop.proposer.propose(loop.tokens[0], loop.lengths)
    dev.synchronize()
    return 1e6 * (time.perf_counter() - begin) / steps
