"""Probes of incident `mtp-draft-loop`; each runs in an isolated process.

Three causes are one mistake: the host refills a page-locked buffer whose copy to the device is still queued. The
released classes are built by their own constructors on stub configurations and called twice, or K times, while the
device has run nothing; clones that are enqueued after each call say what the device then finds. On the CPU the
released code's own PyTorch calls run on the stand-in for CUDA (schedule `lazy`: nothing runs until the host waits); on
CUDA they run on a stream that is kept busy. The fourth, `host-lengths-counted-twice`, needs no such moment and is
judged in `host_lengths`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from specmortem import device as devices
from specmortem import upstream
from specmortem.device import Device, PromptCopies, Stream
from specmortem.incidents.mtp_draft_loop import fix, flashinfer, host_lengths
from specmortem.incidents.mtp_draft_loop.kernels import Array, Plan, Planner
from specmortem.incidents.mtp_draft_loop.layouts import H200, WORKED_EXAMPLE
from specmortem.incidents.mtp_draft_loop.proposer import DraftLoop
from specmortem.incidents.mtp_draft_loop.released import (
    BUILDER,
    DEVICE,
    LAYER,
    LENGTHS,
    PAGE,
    PROPOSER,
    Bench,
    Drafter,
    K,
    bench,
    build_builder,
    stand_ins,
    taken,
    upload_helper,
)
from specmortem.upstream.stand_ins import stub
from specmortem.upstream.vllm_files import DRAFTER, FLASHINFER, WORKER_UTILS
from specmortem.verdict import Evidence, Verdict

ZEROER, ZERO_BLOCKS = "KVBlockZeroer", "_zero_kv_blocks_kernel"
BATCHES_IN_FLIGHT = 2  # what asynchronous scheduling allows


def judge(cause: str, subject: str, device: str = "sim") -> dict[str, Any]:
    """Run the probe of `cause`; a verdict as JSON."""
    return _as_json(lambda: _JUDGES[cause](subject, device))


def three_drafts(subject: str, device: str = "sim") -> dict[str, Any]:
    """The released draft loop with 3 drafts, as JSON; on the simulator a copy into an idle stream runs at once."""
    return _as_json(lambda: _released_plans(subject, device, 3, prompt=True))


def _as_json(judged: Callable[[], Verdict]) -> dict[str, Any]:
    try:
        verdict = judged()
    except upstream.NotPresentError as error:
        verdict = Verdict.not_judged(f"not present: {error}", absent=str(error))
    return verdict.as_dict()


# plan-staging-reuse


@dataclass
class Drafted:
    """What one step of drafts did: the plan of each rebuild, the one its forward read, and the host's waits.

    `busy` says of each rebuild, and of the step's end, whether the forward before was still running.
    """

    own: list[list[int]] = field(default_factory=list)
    read: list[torch.Tensor] = field(default_factory=list)
    waits: list[int] = field(default_factory=list)
    busy: list[bool] = field(default_factory=list)

    @property
    def seen(self) -> list[list[int]]:
        """What the forwards read; ask after the device has finished."""
        return [
            [int(x) for x in read[: len(own)].cpu()] for own, read in zip(self.own, self.read, strict=True)
        ]


class PlanDrafter(Drafter):
    """The released draft loop with a model that reads the plan."""

    drafted: Drafted

    def watch_builds(self) -> None:
        """Count the waits of each build."""
        build = self.builder.build_for_drafting

        def counted(*args: Any, **kwargs: Any) -> Any:
            before = self.on.waits
            if self.drafted.waits:
                self.drafted.busy.append(self.on.is_busy())
            metadata = build(*args, **kwargs)
            self.drafted.waits.append(self.on.waits - before)
            return metadata

        self.builder.build_for_drafting = counted

    def forward(self, hidden_states: torch.Tensor, **_: Any) -> torch.Tensor:
        """A forward of the draft model: busy for a while, then the plan is read; the first one is a prefill."""
        self.on.stall()
        wrapper = self.builder._decode_wrapper
        if wrapper is not None and len(self.drafted.waits) > 1:
            self.drafted.own.append(wrapper.plans[-1])
            self.drafted.read.append(wrapper.workspace.clone())
        return hidden_states + 1

    def step(self, with_rejections: bool) -> Drafted:
        """Draft for each request; without rejections the host already holds the sequence lengths."""
        self.drafted = Drafted()
        n = len(LENGTHS)
        positions = torch.zeros(n * (self.drafts + 1), dtype=torch.int64, device=DEVICE)
        rejected = torch.zeros(n, dtype=torch.int32, device=DEVICE) if with_rejections else None
        self.propose(self.metadata(host_lengths=not with_rejections), positions, rejected=rejected)
        self.drafted.busy.append(self.on.is_busy())
        return self.drafted


def _plan_staging(subject: str, device: str) -> Verdict:
    if subject in ("before", "after"):
        return _own_plan(subject, device)
    if subject.startswith("flashinfer=="):
        return _flashinfer(subject, device)
    return _released_plans(subject, device, K)


def _released_plans(subject: str, device: str, drafts: int, *, prompt: bool = False) -> Verdict:
    """The released loop and builder; with `prompt` a simulated copy into an idle stream does not wait."""
    tree = upstream.resolve(subject)
    steps: dict[str, Drafted] = {}
    with bench(device, PromptCopies() if prompt else "lazy") as on:
        drafter = PlanDrafter(tree, on, drafts)
        for situation, with_rejections in (("rejections known", True), ("no rejections", False)):
            if device == "cuda":
                drafter.step(with_rejections)  # compiles
            on.synchronize()
            steps[situation] = drafter.step(with_rejections)
            on.synchronize()
    return _plan_verdict(tree, steps, device, drafts)


def _plan_verdict(tree: upstream.Tree, steps: Mapping[str, Drafted], device: str, drafts: int = K) -> Verdict:
    """A fault where a forward read another plan; clean only if each build and the end found the stream busy."""
    path = str(tree.first(DRAFTER))
    hashes = {
        f"{BUILDER}.build": upstream.body_hash(tree, FLASHINFER, f"{BUILDER}.build"),
        f"{PROPOSER}.propose": upstream.body_hash(tree, path, f"{PROPOSER}.propose"),
    }
    witness = f"V1 runner, K = {drafts}, {len(LENGTHS)} requests of {LENGTHS} tokens, pages of {PAGE}, no CUDA graph"
    detail: dict[str, Any] = {"hashes": hashes, "runner": "V1"}
    if device != "cuda":
        detail["host_waits_by_build"] = {name: step.waits for name, step in steps.items()}
    wrong = [(name, _first_difference(step)) for name, step in steps.items() if step.own != step.seen]
    if any(len(step.own) != drafts - 1 for step in steps.values()):
        return Verdict.not_judged(f"{tree.subject} does not plan each of {drafts - 1} draft steps", **detail)
    if not wrong and not all(busy for step in steps.values() for busy in step.busy):
        why = "every forward reads its own plan, and the stream had caught up before the next was made"
        return Verdict.not_judged(why, **detail, caught_up=True)
    if not wrong:
        return Verdict("clean", Evidence(witness, "every forward reads its own plan", detail=detail))
    observed = "; ".join(f"{name}: {difference}" for name, difference in wrong)
    place = (
        f"{BUILDER}.build ({FLASHINFER.rpartition('/')[2]}), {PROPOSER}.propose ({path.rpartition('/')[2]})"
    )
    return Verdict(
        "fault", Evidence(witness, observed, "every forward reads its own plan", place, detail=detail)
    )


def _first_difference(step: Drafted) -> str:
    pairs = enumerate(zip(step.own, step.seen, strict=True), start=1)
    j, own, seen = next((j, own, seen) for j, (own, seen) in pairs if own != seen)
    return f"the forward of draft step {j} reads page counts {seen}, its plan was {own}"


class TwoPasses(DraftLoop):
    """Two passes over a batch that grows by a token, while the stream is busy; `found` is what the first one reads."""

    def __init__(self, dev: Device, planner: Planner, lengths: Sequence[int]) -> None:
        self.two = [planner.plan([length + more for length in lengths]) for more in (0, 1)]
        size = max(plan.nbytes for plan in self.two)
        super().__init__(dev, dev.zeros([size], torch.uint8, "plan"))
        self.clone = dev.zeros([size], torch.uint8, "clone")

    def found(self, draft_pass: Callable[[DraftLoop, int], None]) -> dict[str, Array]:
        """Arrays that the kernels of the first plan find in its block."""
        self.device.synchronize()
        self.device.spin(10_000, self.stream)
        for i in (1, 2):
            draft_pass(self, i)
        self.device.synchronize()
        return self.two[0].seen_in(self.clone.cpu().numpy())

    def next_lengths(self) -> Array:
        """Nothing: both plans are made."""
        return np.zeros(0, np.int32)

    def read_lengths(self) -> Array:
        """A wait until the stream has drained."""
        self.stream.synchronize()
        return self.next_lengths()

    def plan(self, i: int, lengths: Array, pages: bool = True) -> Plan:
        """One of the two plans."""
        return self.two[i - 1]

    def write_inputs(self, stream: Stream | None = None) -> None:
        """Nothing: there is no model."""

    def forward(self, i: int) -> None:
        """Keep what the first pass finds."""
        if i == 1:
            self.device.copy_async(self.clone, self.block, self.stream)


def _own_plan(arm: str, device: str) -> Verdict:
    """This package's passes on the worked example: `fix.before`, or `fix.fresh` as the fix."""
    loop = TwoPasses(devices.open("cuda" if device == "cuda" else "sim"), Planner(H200), WORKED_EXAMPLE)
    read, own = loop.found(fix.fresh if arm == "after" else fix.before), loop.two[0].arrays
    wrong = [name for name, array in own.items() if not np.array_equal(array, read[name])]
    witness = f"plans of {WORKED_EXAMPLE} tokens and of one more each, {H200}"
    if not wrong:
        return Verdict("clean", Evidence(witness, "every array is the first plan's"))
    observed, expected = (f"merge_indptr {of['merge_indptr'].tolist()}" for of in (read, own))
    return Verdict("fault", Evidence(witness, observed, expected, "fix.before", detail={"arrays": wrong}))


def _flashinfer(subject: str, device: str) -> Verdict:
    """The real library: a second plan behind a stalled stream."""
    if device != "cuda":
        return Verdict.not_judged(f"{subject} needs a GPU: its planner is compiled for one", needs="cuda")
    return flashinfer.verdict(subject)


# builder-staging-reuse


class _Calls:
    """Two calls behind a stall; what the first left for the device. Rounds before the last compile and allocate."""

    def __init__(
        self, on: Bench, call: Callable[[list[int]], torch.Tensor], first: list[int], second: list[int]
    ) -> None:
        for _ in range(3):
            on.synchronize()
            on.stall()
            clone = call(first)
            call(second)
            self.busy = on.is_busy()
        on.synchronize()
        self.found = [int(x) for x in clone.cpu()]

    def verdict(
        self, first: list[int], second: list[int], what: str, witness: str, hashes: dict[str, str]
    ) -> Verdict:
        """Clean if the device found the first call's values; a stream that has caught up proves nothing."""
        observed = f"behind the first call the device finds {what} {self.found}"
        evidence = Evidence(witness, observed, f"{what} {first}", detail={"hashes": hashes})
        if self.found == first and self.busy:
            return Verdict("clean", evidence)
        if self.found == second:
            return Verdict("fault", evidence)
        why = "neither call's" if self.busy else "and the stream had caught up before the second call ended"
        return Verdict.not_judged(f"{observed}, {why}", hashes=hashes, caught_up=not self.busy)


class _OwnStaging:
    """This package's arms: one page-locked buffer refilled at each call, or a fresh one each time."""

    def __init__(self, arm: str, size: int) -> None:
        self.arm = arm
        self.reused = torch.zeros(size, dtype=torch.int32, pin_memory=True)
        self.target = torch.zeros(size, dtype=torch.int32, device=DEVICE)

    def upload(self, values: Sequence[int]) -> torch.Tensor:
        """Enqueue the copy of some values; the device tensor that it writes."""
        n = len(values)
        source = self.reused[:n]
        if self.arm == "after":
            source = torch.zeros(n, dtype=torch.int32, pin_memory=True)
        source.numpy()[:] = values
        return self.target[:n].copy_(source, non_blocking=True)


def _indptr(counts: Sequence[int]) -> list[int]:
    return [int(x) for x in np.cumsum([0, *counts])]


def _builder_staging(subject: str, device: str) -> Verdict:
    """The row pointers as the device finds them between two builds."""
    first, second = [10, 10, 10, 10], [11, 11, 11, 11]
    witness = f"two builds while the device is busy: page counts {first}, then {second}"
    hashes: dict[str, str] = {}
    with bench(device) as on:
        build = (
            _own_build(subject) if subject in ("before", "after") else _released_build(subject, on, hashes)
        )
        calls = _Calls(on, lambda counts: build(counts).clone(), first, second)
    return calls.verdict(_indptr(first), _indptr(second), "row pointers", witness, hashes)


def _own_build(arm: str) -> Callable[[list[int]], torch.Tensor]:
    staging = _OwnStaging(arm, 5)
    return lambda counts: staging.upload(_indptr(counts))


def _released_build(subject: str, on: Bench, hashes: dict[str, str]) -> Callable[[list[int]], torch.Tensor]:
    tree = upstream.resolve(subject)
    name = f"{BUILDER}._compute_flashinfer_kv_metadata"
    hashes[name] = upstream.body_hash(tree, FLASHINFER, name)
    builder = build_builder(tree, on)
    table = torch.arange(128, dtype=torch.int32, device=DEVICE).reshape(4, 32)

    def build(counts: list[int]) -> torch.Tensor:
        blocks = np.array(counts, dtype=np.int32)
        builder._compute_flashinfer_kv_metadata(blocks, blocks * PAGE, table, len(counts), PAGE)
        pointers: torch.Tensor = builder.paged_kv_indptr.gpu[: len(counts) + 1]
        return pointers

    return build


# zeroer-staging-reuse


def _zeroer_staging(subject: str, device: str) -> Verdict:
    """Block 1 is zeroed, then block 2, while the device is busy; which of them is zero in between?"""
    witness = "block 1 is to be zeroed, then block 2, in two calls while the device is busy"
    hashes: dict[str, str] = {}
    with bench(device) as on:
        pool = torch.ones(4, 32, dtype=torch.int32, device=DEVICE)
        if subject in ("before", "after"):
            zero = _own_zeroer(subject, pool)
        else:
            tree = upstream.resolve(subject)
            name = f"{ZEROER}.zero_block_ids"
            hashes[name] = upstream.body_hash(tree, WORKER_UTILS, name)
            zero = _build_zeroer(tree, pool, on).zero_block_ids

        def zeroed(ids: list[int]) -> torch.Tensor:
            pool.fill_(1)
            zero(ids)
            return (pool == 0).all(dim=1).int()

        calls = _Calls(on, zeroed, [1], [2])
    return calls.verdict([0, 1, 0, 0], [0, 0, 1, 0], "zero blocks", witness, hashes)


def _own_zeroer(arm: str, pool: torch.Tensor) -> Callable[[list[int]], object]:
    staging = _OwnStaging(arm, 1)
    return lambda ids: pool.index_fill_(0, staging.upload(ids).long(), 0)


def _build_zeroer(tree: upstream.Tree, pool: torch.Tensor, on: Bench) -> Any:
    """The released zeroer over a pool of blocks, made by its own constructor."""
    kernel = upstream.lift(tree, WORKER_UTILS, ZERO_BLOCKS).function
    spec = stub("AttentionSpec")
    specs = {"AttentionSpec": spec, "FullAttentionSpec": spec}
    given = stand_ins(**{ZERO_BLOCKS: on.kernel(kernel, addresses=True)}, **specs, **upload_helper(tree))
    group = SimpleNamespace(
        kv_cache_spec=spec(block_size=1, num_kv_heads=1, head_size=1),
        kv_cache_group_id=0,
        layer_names=[LAYER],
        kernel_block_stride=0,
        backend=SimpleNamespace(get_kv_cache_block_dim=lambda *_, **__: 0),
    )
    offered = {
        "device": DEVICE,
        "pin_memory": True,
        "attn_groups_iter": [group],
        "kernel_block_sizes": [1],
        "cache_dtype": "auto",
        "static_forward_context": {LAYER: SimpleNamespace(kv_cache=pool)},
        "num_blocks": len(pool),
        "runner_only_attn_layers": set(),
        "max_concurrency": BATCHES_IN_FLIGHT,
    }
    zeroer_class = upstream.lift(tree, WORKER_UTILS, ZEROER, provide=given).function
    zeroer = zeroer_class(**taken(zeroer_class, offered))
    if hasattr(zeroer, "init_meta"):
        zeroer.init_meta(**taken(zeroer.init_meta, offered))
    return zeroer


_JUDGES: dict[str, Callable[[str, str], Verdict]] = {
    "plan-staging-reuse": _plan_staging,
    "builder-staging-reuse": _builder_staging,
    "zeroer-staging-reuse": _zeroer_staging,
    host_lengths.CAUSE: host_lengths.verdict,
}
