"""Arms of incident `dflash-oob`: candidate causes under the reporter's controls, and the long runs of `after`.

Every function takes JSON-able arguments, runs in a process of its own and returns a dictionary with `effect`: what a
user would have seen. On the simulator `illegal-address` means an access outside every storage of the device's tensors;
on CUDA the process dies of it and the caller's isolation says so.
"""

from __future__ import annotations

import functools
import itertools
import random
import statistics
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import torch
import triton

from specmortem import device as devices
from specmortem.detect import bounds
from specmortem.device import Device, Stream
from specmortem.errors import BadInputError
from specmortem.incidents.dflash_oob import kernels as dflash_inputs
from specmortem.incidents.dflash_oob import probe as dflash_probes
from specmortem.incidents.dflash_oob.kernels import DFlashBatch, DFlashInputs
from specmortem.incidents.dflash_oob.lookup_loop import LookupLoop, LoopConfig
from specmortem.incidents.dflash_oob.proposer import DFlashConfig, DFlashProposer
from specmortem.kernels import Arm
from specmortem.upstream.vllm_files import V1

CANDIDATES = (
    "input-kernel",
    "stale-graph-tail",
    "stale-graph-tail-k3",
    "buffer-1024-capture-512",
    "stale-block-id",
    "gdn-lookup",
    "count-to-lookup-chain",
)
CONTROLS = ("graphs", "eager", "no-dflash", "launch-blocking", "one-request")
CELLS = tuple(itertools.product(CANDIDATES, CONTROLS))
REPORTED = dict.fromkeys(CONTROLS, "clean") | {"graphs": "illegal-address"}
NEGATIVE_GARBAGE = -(1 << 30)
NULL_ID = 0


def consistent(effects: dict[str, str]) -> bool:
    """Whether a candidate's effects under the five controls are those that were reported."""
    return effects == REPORTED


def control(
    candidate: str, control: str, device: str = "sim", seed: int = 0, transitions: int = 60
) -> dict[str, Any]:
    """One cell of the table causes x controls; without DFlash every candidate leaves the target loop alone to run.

    Raises BadInputError for a name outside CANDIDATES or CONTROLS.
    """
    if (candidate, control) not in CELLS:
        raise BadInputError(
            f"no cell {candidate!r} x {control!r}; candidates {CANDIDATES}, controls {CONTROLS}"
        )
    if control == "no-dflash" or candidate == "count-to-lookup-chain":
        return _chain(control, device, seed, transitions)
    if candidate == "gdn-lookup":
        return _gdn_lookup(control, device, seed)
    return _PROPOSER[candidate](control, _open(device, control))


def _open(device: str, control: str, seed: int = 0) -> Device:
    """The device under a control; on CUDA launch blocking is the process's environment."""
    if device == "cuda":
        return devices.open("cuda")
    return devices.open("sim", schedule="immediate" if control == "launch-blocking" else "timed", seed=seed)


def _watch(dev: Device) -> AbstractContextManager[bounds.Watch | None]:
    return bounds.watch(perform_mapped=True) if dev.kind == "sim" else nullcontext()


def _effect(watch: bounds.Watch | None, corrupted: bool) -> dict[str, Any]:
    """What a user sees: a fault where an access left all memory, else silent damage, else nothing."""
    wild = next((r for r in watch.reports if not r.mapped), None) if watch else None
    if wild is not None:
        return {"effect": "illegal-address", "why": str(wild)}
    if corrupted:
        return {"effect": "corruption", "why": "another request's cache changed"}
    return {"effect": "clean", "why": ""}


class _Drafting:
    """A proposer with requests whose blocks are known, so that writes into someone else's cache show."""

    def __init__(
        self,
        dev: Device,
        arm: Arm,
        control: str,
        k: int,
        *,
        fill_tail: bool = True,
        seqs: int = 4,
        largest_graph: int = 512,
    ) -> None:
        self.dev, self.control = dev, control
        tokens = seqs * (k + 1) + 64
        self.config = DFlashConfig(seqs, k, num_cache_blocks=2 + seqs * 16, max_num_tokens=tokens)
        self.proposer = DFlashProposer(dev, self.config, arm, fill_tail=fill_tail)
        self.stream: Stream = dev.stream("main")
        where = dev.torch_device
        self.table = torch.arange(1, 1 + seqs * 16, dtype=torch.int32, device=where).reshape(seqs, 16)
        self.positions_storage = torch.full((8 + tokens,), NEGATIVE_GARBAGE, device=where)
        if control != "eager":
            sizes = [s for s in self.proposer.sizes if s <= min(self.config.max_query_tokens, largest_graph)]
            self.proposer.capture(sizes, self.stream)

    def blocks(self) -> torch.Tensor:
        """The cache as [blocks, block size, head size]."""
        return self.proposer.kv.view(-1, self.config.block_size, self.proposer.kv.shape[1])

    def foreign(self, snapshot: torch.Tensor, requests: int) -> list[int]:
        """Blocks that changed since `snapshot` and belong to no live request."""
        changed = (snapshot != self.proposer.kv).view(len(self.blocks()), -1).any(dim=1)
        return [b for b in changed.nonzero().flatten().tolist() if not 0 < b <= requests * 16]

    def batch(
        self, requests: int, *, context: int = 4, start: int = 10, rejected: list[int] | None = None
    ) -> DFlashBatch:
        """A batch of equal requests; a word of negative garbage stands before their positions."""
        contexts, table = [list(range(start, start + context))] * requests, self.table[:requests]
        sizes, where = self.config.batch_sizes, self.dev.torch_device
        batch = DFlashBatch.of(contexts, table, num_rejected=rejected, device=where, **sizes)
        positions = self.positions_storage[8 : 8 + requests * context]
        return replace(batch, target_positions=positions.copy_(batch.target_positions))

    def step(self, batch: DFlashBatch) -> None:
        """Draft once and wait."""
        self.proposer.block_table[: batch.num_reqs].copy_(batch.block_table)
        self.dev.synchronize()
        widest = max(batch.target_positions.shape[0] // batch.num_reqs, batch.num_query_per_req)
        self.proposer.propose(batch, self.stream, widest=widest)
        self.dev.synchronize()


def _input_kernel(control: str, dev: Device) -> dict[str, Any]:
    """K = 15 and all context rows of request 0 rejected: the position before its first row is taken for its last."""
    drafting = _Drafting(dev, "before", control, 15, seqs=2)
    requests = 1 if control == "one-request" else 2
    with _watch(dev) as watch:
        drafting.step(drafting.batch(requests, rejected=[4] + [0] * (requests - 1)))
    slots = drafting.proposer.buffers.query_slot_mapping[: drafting.config.num_query_per_req]
    return _effect(watch, corrupted=bool((slots >= 0).any()))


def _stale_tail(k: int) -> Callable[[str, Device], dict[str, Any]]:
    """Four requests, then three in the same buffers without a fill: what the fourth's slots say is written again."""

    def run(control: str, dev: Device) -> dict[str, Any]:
        drafting = _Drafting(dev, "before", control, k, fill_tail=False)
        blocks = drafting.blocks()
        many, few = (1, 1) if control == "one-request" else (4, 3)
        with _watch(dev) as watch:
            drafting.step(drafting.batch(many))
            blocks[1 + 16 * few :] = 7.0
            snapshot = drafting.proposer.kv.clone()
            drafting.step(drafting.batch(few, start=30))
        foreign = drafting.foreign(snapshot, few)
        return _effect(watch, corrupted=bool(foreign)) | {"foreign_blocks": foreign}

    return run


def _buffer_against_capture(control: str, dev: Device) -> dict[str, Any]:
    """max_num_seqs 64, K = 15: 1,024 query rows, graphs up to 512; 34 requests make 544 tokens."""
    requests = 1 if control == "one-request" else 34
    drafting = _Drafting(dev, "before", control, 15, seqs=64, largest_graph=16)
    with _watch(dev) as watch:
        snapshot = drafting.proposer.kv.clone()
        drafting.step(drafting.batch(requests))
    foreign = drafting.foreign(snapshot, requests)
    return _effect(watch, corrupted=bool(foreign)) | {"rows": requests * 16}


def _stale_block(control: str, dev: Device) -> dict[str, Any]:
    """The scheduler reserved K instead of K + 1 slots; the next column still names a block that request 1 has now."""
    drafting = _Drafting(dev, "before", control, 3, seqs=2)
    requests = 1 if control == "one-request" else 2
    batch = drafting.batch(requests, start=8)
    batch.num_blocks.fill_(3)
    drafting.table[0, 3] = drafting.table[1, 0] if requests == 2 else 33
    taken = int(batch.block_table[0, 3])
    with _watch(dev) as watch:
        drafting.blocks()[taken] = 7.0
        snapshot = drafting.proposer.kv.clone()
        drafting.step(batch)
    lost = bool((drafting.blocks()[taken] != snapshot.view_as(drafting.blocks())[taken]).any())
    return _effect(watch, corrupted=lost and requests == 2)


_PROPOSER: dict[str, Callable[[str, Device], dict[str, Any]]] = {
    "input-kernel": _input_kernel,
    "stale-graph-tail": _stale_tail(15),
    "stale-graph-tail-k3": _stale_tail(3),
    "buffer-1024-capture-512": _buffer_against_capture,
    "stale-block-id": _stale_block,
}


def _loop_config(control: str, device: str, **changes: Any) -> LoopConfig:
    """The loop under a control; on a GPU a forward must outlast what the host enqueues after it, about 0.2 ms."""
    sizes: dict[str, Any] = {"layers": 400} if device == "cuda" else {}
    graphs, speculative = control != "eager", control != "no-dflash"
    return LoopConfig(graphs, speculative, control == "one-request", **sizes, **changes)


def _gdn_lookup(control: str, device: str, seed: int) -> dict[str, Any]:
    """The count of row 0 is 0, whatever made it so: the lookup alone, without a race."""
    dev = _open(device, control, seed)
    loop = LookupLoop(dev, _loop_config(control, device), seed)
    loop.warm_up()
    with _watch(dev) as watch:
        loop.num_accepted[0] = 0
        dev.synchronize()
        loop.forward_again()
        dev.synchronize()
    return _effect(watch, corrupted=False)


def _chain(control: str, device: str, seed: int, transitions: int, **changes: Any) -> dict[str, Any]:
    """From the row move that meets a copy in flight, to the lookup: up to `transitions` row moves."""
    dev = _open(device, control, seed)
    loop = LookupLoop(dev, _loop_config(control, device, **changes), seed)
    with _watch(dev) as watch:
        loop.warm_up()
        for _ in range(transitions):
            loop.transition()
            if watch is not None and any(not r.mapped for r in watch.reports):
                break
    seen = {name: getattr(loop.tally, name) for name in ("transitions", "wrong_counts", "nan_rows")}
    return _effect(watch, corrupted=loop.tally.wrong_counts > 0) | seen


LINKS = {
    "before": {},
    "counts-on-device": {"counts": "device"},
    "recovered-in-vocabulary": {"recovered": "after"},
    "bounded-lookup": {"lookup": "after"},
    "after": {"counts": "device", "recovered": "after", "lookup": "after"},
}


def chain(link: str, device: str = "sim", seed: int = 0, transitions: int = 60) -> dict[str, Any]:
    """The chain with one link corrected (a key of LINKS), graphs on and several requests."""
    if link not in LINKS:
        raise BadInputError(f"no link {link!r}; known: {', '.join(LINKS)}")
    return _chain("graphs", device, seed, transitions, **LINKS[link])


def random_batch(rng: random.Random, requests: int, k: int, device: str = "cpu") -> DFlashBatch:
    """A batch of random request states, the bad ones among them: whole contexts rejected, stale and null ids, ends."""
    size, columns = 4, 32
    limit = size * columns
    contexts: list[list[int]] = []
    rejected, blocks = [], []
    for _ in range(requests):
        length = rng.randint(1, k + 1)
        first = rng.choice((rng.randint(0, limit - length), limit - length, rng.randint(0, 8)))
        contexts.append(list(range(first, first + length)))
        rejected.append(rng.choice((0, rng.randint(0, length), length)))
        needed, held = -(-(first + length + k + 1) // size), -(-(first + length) // size)
        blocks.append(min(columns, rng.choice((needed, needed, max(1, needed - 1), held))))
    table = torch.tensor([[rng.randint(1, 4000) for _ in range(columns)] for _ in range(requests)])
    for _ in range(requests // 4):
        table[rng.randrange(requests), rng.randrange(columns)] = NULL_ID
    return DFlashBatch.of(
        contexts,
        table.int(),
        num_rejected=rejected,
        num_blocks=blocks,
        next_token_ids=[rng.randint(0, 99) for _ in range(requests)],
        device=device,
        block_size=size,
        max_model_len=limit,
        num_speculative_tokens=k,
        mask_token_id=999,
    )


def random_states(
    arm: Arm, launches: int, requests: int = 64, k: int = 15, seed: int = 0, device: str = "sim"
) -> dict[str, Any]:
    """Many random request states to a launch; a launch faults when the detector reports or the reference disagrees.

    On CUDA the kernel runs alone and is compared with the reference, which the CPU computes.
    """
    rng = random.Random(seed)
    where = "cuda" if device == "cuda" else "cpu"
    faulty, witness = 0, ""
    for _ in range(launches):
        batch = random_batch(rng, requests, k, where)
        padded = requests * (k + 1) + 16
        wrong = _wrong_requests(arm, batch, padded)
        faulty += len(wrong)
        witness = witness or next(iter(wrong.values()), "")
    return {"states": launches * requests, "faults": faulty, "witness": witness, "seed": seed}


def _wrong_requests(arm: Arm, batch: DFlashBatch, padded: int) -> dict[int, str]:
    """Requests that were reported or came out different from the reference, each with the first reason."""
    r, k = batch.num_reqs, batch.num_speculative_tokens
    n, where = batch.target_positions.shape[0], str(batch.target_positions.device)
    out = DFlashInputs.empty(n, r, k, padded, device=where)
    found: dict[int, str] = {}
    with dflash_probes.batch_watch(batch) if where == "cpu" else nullcontext() as watch:
        dflash_inputs.launch(arm, batch, out)
    for report in watch.reports if watch else ():
        found.setdefault(report.program[0], str(report))
    expected = dflash_inputs.reference(batch, padded)
    for request in _differing(batch, out, expected):
        found.setdefault(request, "differs from the reference")
    return found


def _differing(batch: DFlashBatch, out: DFlashInputs, expected: DFlashInputs) -> list[int]:
    """Requests whose queries, context or length differ; -1 stands for the padded tail."""
    q, r = batch.num_query_per_req, batch.num_reqs
    loc = batch.query_start_loc.cpu()
    rows = torch.full((expected.input_ids.shape[0],), -1)
    rows[: r * q] = torch.arange(r).repeat_interleave(q)
    context = torch.arange(r).repeat_interleave(loc[1:] - loc[:-1])
    owners = {"seq_lens": torch.arange(r), "sample_indices": torch.arange(r).repeat_interleave(q - 1)}
    owners |= {"context_positions": context, "context_slot_mapping": context}
    wrong: set[int] = set()
    for name, value in vars(expected).items():
        differs = vars(out)[name].cpu() != value
        wrong |= set(owners.get(name, rows)[differs].tolist())
    return sorted(wrong)


def schedules(arm: Arm, guarded: bool = False) -> dict[str, Any]:
    """Every distinguishable schedule of three drafting steps whose counts the host stages in one pinned buffer.

    `guarded` waits for the copy before the buffer is refilled, as `synchronize_input_prep` does; without it a step may
    see the counts of a later one, and the input kernel has to stand that too. A run faults when the detector reports
    or a block of nobody changes.
    """
    total, bad = 0, []
    for choices, clean in devices.enumerate_schedules(lambda dev: _three_steps(dev, arm, guarded)):
        if isinstance(clean, BaseException):
            raise clean
        total += 1
        if not clean:
            bad.append(list(choices))
    return {"schedules": total, "faults": len(bad), "first_bad": bad[0] if bad else []}


def _three_steps(dev: Device, arm: Arm, guarded: bool) -> bool:
    """Two requests with K = 1, of which the second step rejects one's whole context; the host reads lengths back."""
    config = DFlashConfig(2, 1, num_cache_blocks=10, max_model_len=16, max_num_tokens=8)
    proposer = DFlashProposer(dev, config, arm)
    stream = dev.stream("main")
    proposer.capture([4], stream)
    staged = dev.host_buffer((2,), torch.int32, name="num_rejected")
    lengths = dev.host_buffer((2,), torch.int32, name="seq_lens")
    copied = dev.event("prepare_inputs_event")
    table = torch.tensor([[1, 2, 3, 4], [5, 6, 7, 8]], dtype=torch.int32)
    batch = DFlashBatch.of([[2, 3], [6, 7]], table, **config.batch_sizes)
    proposer.block_table.copy_(batch.block_table)
    with dflash_probes.batch_watch(batch) as watch:
        for rejected in ((0, 0), (0, 2), (1, 0)):
            if guarded:
                copied.synchronize()
            staged[...] = rejected
            dev.copy_async(batch.num_rejected, staged, stream=stream)
            copied.record(stream)
            proposer.propose(batch, stream, widest=2)
            dev.copy_async(lengths, proposer.buffers.seq_lens, stream=stream)
            lengths[...]
        dev.synchronize()
    nobody = proposer.kv.view(10, 4, -1)[[0, 9]]
    return not watch.reports and not bool(nobody.any())


def graph_replays(
    arm: Arm, replays: int, seed: int = 0, device: str = "cuda", k: int = 3, requests: int = 32
) -> dict[str, Any]:
    """Random states through the proposer with captured graphs; a replay faults when a foreign block changes."""
    dev = devices.open(device)
    rng = random.Random(seed)
    drafting = _Drafting(dev, arm, "graphs", k, seqs=requests)
    faults = 0
    for _ in range(replays):
        n = rng.randint(1, requests)
        rejected = [rng.choice((0, rng.randint(0, 4), 4)) for _ in range(n)]
        batch = drafting.batch(n, start=rng.randint(0, 50), rejected=rejected)
        snapshot = drafting.proposer.kv.clone()
        drafting.step(batch)
        faults += bool(drafting.foreign(snapshot, n))
    return {"replays": replays, "faults": faults, "seed": seed}


def lookup_replays(arm: Arm, replays: int, device: str = "cuda", seed: int = 0) -> dict[str, Any]:
    """Counts 0 … K + 2 through a captured lookup with a wild word before its row 0."""
    dev = devices.open(device)
    rng = random.Random(seed)
    loop = LookupLoop(dev, LoopConfig(lookup=arm, layers=0), seed)
    stale = 0
    with _watch(dev):
        loop.warm_up()
        for _ in range(replays):
            counts = [rng.randint(0, loop.columns + 1) for _ in range(loop.num_reqs)]
            loop.num_accepted.copy_(torch.tensor(counts, dtype=torch.int32))
            loop.out.fill_(float("nan"))
            loop.forward_again()
            dev.synchronize()
            stale += int(torch.isnan(loop.out).any())
    return {"replays": replays, "faults": stale, "seed": seed}


def anatomy(subject: str, rejected: list[int]) -> dict[str, Any]:
    """One launch of a subject's input kernel over two requests, with every access that left its extent.

    `subject` is `before`, `after` or `vllm==X`; for a release the V1 kernel runs.
    """
    kernel = dflash_probes.subject_of(subject, "sim", (V1,)).kernel
    batch = dflash_probes.batch([[10, 11, 12, 13], [40, 41, 42, 43]], rejected=rejected)
    written = kernel(batch, 8)
    return {
        "positions": batch.target_positions.tolist(),
        "query_start_loc": batch.query_start_loc.tolist(),
        "rejected": rejected,
        "query_slot_mapping": written["query_slot_mapping"],
        "query_positions": written["query_positions"],
        "reports": [{**vars(report), "text": str(report)} for report in written.reports],
    }


def copy_completion(device: str = "sim", seed: int = 0, transitions: int = 60) -> dict[str, Any]:
    """Traces of two row moves of the chain: the first whose count went astray, and the first whose did not."""
    dev = _open(device, "graphs", seed)
    loop = LookupLoop(dev, LoopConfig(), seed)
    found: dict[str, Any] = {}
    with _watch(dev):
        loop.warm_up()
        for _ in range(transitions):
            start, wrong = len(dev.trace), loop.tally.wrong_counts
            loop.transition()
            label = "astray" if loop.tally.wrong_counts > wrong else "right"
            found.setdefault(label, [vars(record) for record in dev.trace[start:]])
            if len(found) == 2:
                break
    return found


def price(device: str = "cuda", requests: int = 64, k: int = 15) -> dict[str, float]:
    """Median microseconds of each arm's input kernel, and the ratio, from one process."""
    rng = random.Random(0)
    batch = random_batch(rng, requests, k, "cuda")
    out = DFlashInputs.empty(batch.target_positions.shape[0], requests, k, requests * (k + 1), device="cuda")
    times: dict[str, list[float]] = {"before": [], "after": []}
    for _ in range(5):
        for arm, found in times.items():
            run = functools.partial(dflash_inputs.launch_for, arm, batch, out, k + 1)  # type: ignore[arg-type]
            found.append(1000 * float(triton.testing.do_bench_cudagraph(run, rep=50, return_mode="median")))
    before, after = (statistics.median(found) for found in times.values())
    return {"before_us": before, "after_us": after, "ratio": after / before}
