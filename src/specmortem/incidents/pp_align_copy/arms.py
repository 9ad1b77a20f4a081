"""Arms of incident `pp-align-copy`: the late copies through another request's block ids, controls, random workloads.

Every function takes JSON-able arguments, runs in a process of its own and returns a dictionary. A subject is a key of
`fix.SUBJECTS`: `before`, `after`, and each half of the fix alone.
"""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from specmortem import device as devices
from specmortem.detect import bounds
from specmortem.device import Device
from specmortem.errors import BadInputError
from specmortem.incidents.pp_align_copy import fix
from specmortem.incidents.pp_align_copy.engine.decode_graphs import DecodeGraphs
from specmortem.incidents.pp_align_copy.engine.pipeline import DecidedAcceptance, RandomAcceptance
from specmortem.incidents.pp_align_copy.engine.ranks import run_ranks
from specmortem.incidents.pp_align_copy.engine.recurrent_model import (
    Carried,
    SpeakingPipeline,
    continued,
    fresh,
    read,
)
from specmortem.incidents.pp_align_copy.engine.scheduler import EngineConfig, Request
from specmortem.incidents.pp_align_copy.engine.tag_model import TagPipeline
from specmortem.incidents.pp_align_copy.engine.worker import Copied, Copies, Worker
from specmortem.incidents.pp_align_copy.kernels import Guards
from specmortem.verdict import DeviceKind

SMALL = EngineConfig(pp_size=2, num_speculative_tokens=2, block_size=8, max_num_seqs=4, max_model_len=96)
STAGGERED = (
    Request(1, tuple(range(10, 25)), 48, 0),
    Request(2, tuple(range(100, 113)), 48, 3),
    Request(3, tuple(range(200, 230)), 48, 9),
    Request(4, tuple(range(300, 305)), 48, 14),
)
LOCK_STEP = (Request(1, (1, 2, 3), 48, 0), Request(2, (4, 5, 6), 48, 0))
FIGURES = (
    *("faults", "copies", "wrong_copies", "missed_copies", "accepted_resets"),
    *("unsaved_ends", "wrong_starts", "nan_starts", "preemptions", "steps"),
)
CONTROLS = ("eager", "graphs", "launch-blocking", "pp1", "one-request", "one-seq", "mtp-off", "lock-step")
STATED = {name: "fault" if name in CONTROLS[:3] else "clean" for name in CONTROLS}
REPORTED = EngineConfig(
    pp_size=3,
    num_speculative_tokens=1,
    block_size=9776,
    max_num_seqs=2,
    max_num_batched_tokens=512,
    num_blocks=61,
    max_model_len=262_144,
)


def _controlled(control: str, config: EngineConfig) -> tuple[EngineConfig, Sequence[Request]]:
    """Settings and requests of a control; `eager`, `graphs` and `launch-blocking` differ in neither."""
    if control not in CONTROLS:
        raise BadInputError(f"control {control!r} is not one of {', '.join(CONTROLS)}")
    settings: dict[str, dict[str, int]] = {
        "pp1": {"pp_size": 1},
        "mtp-off": {"num_speculative_tokens": 0},
        "one-seq": {"max_num_seqs": 1},
    }
    requests = {"one-request": STAGGERED[:1], "lock-step": LOCK_STEP}
    return replace(config, **settings.get(control, {})), requests.get(control, STAGGERED)


def control(
    subject: str,
    control: str = "eager",
    device: str = "sim",
    pp_size: int = 2,
    width: int = 1024,
    seed: int = 0,
) -> dict[str, Any]:
    """Texts of a subject under a control, against what the model says when nobody copies.

    `effect`: `constant-token` where a text ends in one token for ever, `corruption` where a text differs or a copy went
    wrong, else `clean`.
    """
    config, requests = _controlled(control, replace(SMALL, pp_size=pp_size))
    dev = devices.open(device, schedule="immediate" if control == "launch-blocking" else "lazy")
    pipeline = SpeakingPipeline(dev, config, requests, subject, width, seed)
    if control == "graphs":
        for worker, model in zip(pipeline.workers, pipeline.models, strict=True):
            worker.graphs = DecodeGraphs(dev, config, model, worker.layout)
    return _account(pipeline.run(), width)


def prefix_hits(subject: str, device: str = "sim", pp_size: int = 2, length: int = 8) -> dict[str, Any]:
    """Later requests that begin with tokens of an earlier one, and start from the state kept at a block's end.

    Each is compared with the same request computed from its first token. `hits` lists the wrong ones; damage that ended
    with the first request's last token would leave none.
    """
    config = replace(SMALL, pp_size=pp_size, num_blocks=256)
    pipeline = SpeakingPipeline(devices.open(device), config, STAGGERED, subject)
    worker, models = pipeline.workers[-1], pipeline.models
    kept: list[tuple[int, int, Carried]] = []

    def keep(req_id: int) -> None:
        """Each rank's state at the ends of whole blocks; the pool hands out no block twice."""
        for column in range(worker.num_computed(req_id) // config.block_size):
            block = worker.blocks[req_id][column]
            windows = [model.conv[block, : model.window].clone()[None] for model in models]
            states = [model.ssm[block].clone()[None] for model in models]
            kept.append((req_id, (column + 1) * config.block_size, Carried(windows, states)))

    worker.on_leave = keep
    outputs = pipeline.run().scheduler.finished
    wrong = []
    for req_id, end, carried in kept:
        known = [*STAGGERED[req_id - 1].prompt, *outputs[req_id]]
        _, right = read(models, fresh(models), known[:end])
        text, expected = (continued(models, at, known[end : end + 1], length) for at in (carried, right))
        if text != expected:
            wrong.append({"request": req_id, "prefix": end, "text": text, "expected": expected})
    line = "request {request}, first {prefix} tokens: {text} instead of {expected}"
    witness = line.format(**wrong[0]) if wrong else ""
    return {"prefixes": len(kept), "faults": len(wrong), "hits": wrong, "witness": witness}


def _effect(
    outputs: Mapping[Any, list[int]], expected: Mapping[Any, list[int]], width: int, *wrong: object
) -> tuple[str, list[Any], list[Any]]:
    """What a user sees, the texts that differ, and those that end in the last token of a vocabulary block."""
    differ = [req_id for req_id, text in sorted(outputs.items()) if text != expected[req_id]]
    stuck = [req_id for req_id in differ if set(outputs[req_id][-4:]) == {width - 1}]
    effect = "constant-token" if stuck else "corruption" if differ or any(wrong) else "clean"
    return effect, differ, stuck


def _account(run: SpeakingPipeline, width: int) -> dict[str, Any]:
    """What a user sees, and the copies that led to it."""
    outputs, wrong = run.scheduler.finished, run.wrong
    effect, differ, stuck = _effect(outputs, run.texts, width, wrong, run.missed)
    return {
        "effect": effect,
        "why": _row(wrong[0]) if wrong else f"{run.missed} copies not made" if run.missed else "",
        "texts_wrong": differ,
        "texts_stuck": stuck,
        "outputs": {str(req_id): text for req_id, text in outputs.items()},
        "expected": {str(req_id): text for req_id, text in run.texts.items()},
        "copies": len(run.copied),
        "wrong_copies": len(wrong),
        "missed_copies": run.missed,
        "first_wrong_step": wrong[0].step if wrong else None,
        "damage": _damage(wrong),
        "nan_rows": run.verifier.nan_rows,
        "steps": run.steps,
    }


def _damage(wrong: Sequence[Copied]) -> dict[str, int]:
    return dict(Counter(str(copied.damage) for copied in wrong))


def _row(copied: Copied) -> str:
    """One line about a copy."""
    move = copied.move
    of = f"request {copied.victim}" if copied.victim is not None else "nobody"
    return (
        f"step {copied.step}, rank {copied.rank}: the copy of request {copied.request} (slot {move.req_idx}) read row "
        f"{move.row} and went from block {move.src_block} to block {move.dst_block}, of {of} ({copied.damage})"
    )


def ranks(
    subject: str,
    world_size: int = 2,
    device: DeviceKind = "sim",
    requests: int = 0,
) -> dict[str, Any]:
    """The same with a process a rank; what each rank saw, and whether all of them ended with the same texts.

    `requests`: that many random requests, a new one every four steps, instead of the small case's four.
    """
    asked = _stream_of(requests) if requests else STAGGERED
    seen = run_ranks(world_size, subject, SMALL, asked, device, timeout_s=120 + requests)
    outputs, wrong = seen[0]["outputs"], [one["wrong"] for one in seen]
    effect, differ, stuck = _effect(outputs, seen[0]["expected"], 1024, *wrong)
    return {
        "effect": effect,
        "wrong_copies": wrong,
        "copies": [one["copies"] for one in seen],
        "first_wrong_step": [one["first_wrong_step"] for one in seen],
        "steps": [one["steps"] for one in seen],
        "agree": all(one["outputs"] == outputs for one in seen),
        "requests": len(outputs),
        "devices": [one["device"] for one in seen],
        "backend": seen[0]["backend"],
        "texts_wrong": differ if len(differ) < 20 else len(differ),
        "texts_stuck": stuck if len(stuck) < 20 else len(stuck),
    }


def _stream_of(requests: int, texts: int = 32) -> list[Request]:
    """A request every four steps; their prompts and lengths come round after `texts` of them."""
    rng = random.Random(0)
    asked = [
        (tuple(rng.randrange(1000) for _ in range(rng.randint(4, 40))), rng.randint(24, 48))
        for _ in range(texts)
    ]
    return [Request(n, *asked[n % texts], 4 * n) for n in range(1, requests + 1)]


def _immediate(device: str) -> Device:
    return devices.open(device, schedule="immediate")


def _witness(one: TagPipeline) -> str:
    """The first thing that went wrong; empty when nothing did."""
    if wrong := one.wrong:
        return _row(wrong[0])
    if one.model.wrong:
        start = one.model.wrong[0]
        return f"step {start.step}: request {start.request} went on from {start.found} after {start.start} tokens"
    if one.missed or one.unsaved:
        return f"{one.missed} copies not made, {one.unsaved} states at block ends not saved"
    return ""


def random_workload(seed: int, most: int = 8) -> tuple[EngineConfig, list[Request]]:
    """PP 1 to 4, 2 to `most` requests, arrivals, aborts, and half the time a pool that is too small for all."""
    rng = random.Random(seed)
    k, block = rng.choice((1, 1, 2, 3)), rng.choice((4, 8))
    config = EngineConfig(
        pp_size=rng.randint(1, 4),
        num_speculative_tokens=k,
        block_size=block,
        max_num_seqs=rng.randint(2, 4),
        max_num_batched_tokens=rng.choice((1 + k, 8 + k, 16)),
        num_blocks=128,
        max_model_len=5 * block,
    )
    if rng.random() < 0.5:
        config = replace(config, num_blocks=config.max_blocks + 1 + rng.randint(0, config.max_blocks))
    return config, [_random_request(rng, req_id, block) for req_id in range(1, 1 + rng.randint(2, most))]


def _random_request(rng: random.Random, req_id: int, block: int) -> Request:
    arrives = rng.randint(0, 12)
    aborts = arrives + rng.randint(1, 20) if rng.random() < 0.2 else None
    return Request(req_id, (0,) * rng.randint(1, 3 * block), rng.randint(2, 2 * block), arrives, aborts)


def random_workloads(
    subject: str, workloads: int, seed: int = 0, device: str = "sim", copies: Copies = "plain"
) -> dict[str, Any]:
    """Workloads `seed` … ; one faults when a copy, a start state or a state at a block's end is wrong."""
    torch.set_num_threads(1)
    found: Counter[str] = Counter()
    damage: Counter[str] = Counter()
    witness = ""
    for number in range(seed, seed + workloads):
        config, requests = random_workload(number)
        one = TagPipeline(
            _immediate(device), config, requests, subject, RandomAcceptance(number), copies
        ).run()
        said, wrong = _witness(one), one.wrong
        found.update(
            faults=bool(said),
            copies=len(one.copied),
            wrong_copies=len(wrong),
            missed_copies=one.missed,
            accepted_resets=sum(copied.in_place for copied in wrong),
            unsaved_ends=one.unsaved,
            wrong_starts=len(one.model.wrong),
            nan_starts=sum(start.found is None for start in one.model.wrong),
            preemptions=one.scheduler.preemptions,
            steps=one.steps,
        )
        damage.update(_damage(wrong))
        witness = witness or (said and f"workload {number}: {said}")
    return {"workloads": workloads, "seed": seed, "witness": witness, "damage": dict(damage), **found}


def same_as_reference(
    subject: str, workloads: int, seed: int = 0, device: str = "sim", most: int = 3
) -> dict[str, Any]:
    """Workloads through the plain reference and through the kernels, states and counters compared after each step."""
    steps = differences = copies = 0
    for number in range(seed, seed + workloads):
        config, requests = random_workload(number, most)
        case = (config, requests, subject)
        plain = TagPipeline(_immediate("sim"), *case, RandomAcceptance(number))
        kernels = TagPipeline(_immediate(device), *case, RandomAcceptance(number), "triton")
        while not plain.scheduler.done:
            plain.step()
            kernels.step()
            kernels.worker.device.synchronize()
            differences += not _equal(plain.worker, kernels.worker)
        steps += plain.steps
        copies += len(kernels.copied)
    return {"workloads": workloads, "faults": differences, "steps": steps, "copies": copies, "seed": seed}


def _equal(one: Worker, other: Worker) -> bool:
    counters = ((a, vars(other.counters)[n]) for n, a in vars(one.counters).items() if n != "snapshot")
    states = ((a.tensor, b.tensor) for a, b in zip(one.model.states, other.model.states, strict=True))
    return all(torch.equal(_host(a), _host(b)) for a, b in itertools.chain(counters, states))


def _host(tensor: torch.Tensor) -> torch.Tensor:
    """On the host, with a number for NaN, which equals nothing."""
    return torch.nan_to_num(tensor.cpu(), nan=-1.0)


def outside(subject: str, workloads: int, seed: int = 0, device: str = "sim") -> dict[str, Any]:
    """Workloads through kernels that check neither columns nor block ids; does an access leave its row or the pool?

    On the simulated device the bounds detector says so (a row ends with its own columns), on CUDA an illegal address
    would end the process.
    """
    bare = Guards(in_row=False, skip_null=False)
    wrong = copies = 0
    reports: list[bounds.Report] = []
    for number in range(seed, seed + workloads):
        config, requests = random_workload(number, 4)
        accepted = RandomAcceptance(number)
        one = TagPipeline(_immediate(device), config, requests, subject, accepted, "triton", bare)
        with nullcontext() if device == "cuda" else _watching(one.worker) as watch:
            one.run()
        reports += watch.reports if watch is not None else []
        copies, wrong = copies + len(one.copied), wrong + len(one.wrong)
    witness = str(reports[0]) if reports else ""
    figures = {"workloads": workloads, "faults": len(reports), "copies": copies, "wrong_copies": wrong}
    return {**figures, "seed": seed, "witness": witness}


@contextmanager
def _watching(worker: Worker) -> Iterator[bounds.Watch]:
    """Rows of the table that the copies read, and the pool of every address that they are given."""
    states = worker.states
    with bounds.watch() as watch:
        if worker.guards.row is fix.batch_row:
            watch.rows(states.tables[0], of=bounds.program(0), name="block_table", owner_name="batch row")
        watch.pointers(states.descriptors, *states.tables, *(state.tensor for state in states.states))
        yield watch


SMALLEST = EngineConfig(2, 1, 4, 2, 6, 32, 24)


def _small_cases(subject: str, decisions: int) -> Iterator[tuple[str, Callable[[Device], str]]]:
    """Two requests, PP = 2, K = 1, blocks of 4: every arrival, prompt length and abort, every pattern of acceptance.

    Each with its name, and a program that says on a device what went wrong first.
    """
    patterns = list(itertools.product((False, True), repeat=decisions))
    for arrives, prompt, aborts in itertools.product(range(4), (2, 5), (None, 7)):
        requests = [Request(1, (0,) * 3, 8, 0), Request(2, (0,) * prompt, 8, arrives, aborts)]
        for bits in patterns:
            name = f"arrival {arrives}, prompt {prompt}, accepted {[int(b) for b in bits]}"
            yield name, partial(_small_case, subject, requests, bits)


def _small_case(subject: str, requests: Sequence[Request], bits: Sequence[bool], dev: Device) -> str:
    """Drafts are accepted as the bits say, and all of them after these."""
    decisions = itertools.chain(bits, itertools.repeat(True))
    return _witness(TagPipeline(dev, SMALLEST, requests, subject, DecidedAcceptance(decisions)).run())


def every_small_case(subject: str, decisions: int = 6) -> dict[str, Any]:
    """Every small case once; see `_small_cases`."""
    torch.set_num_threads(1)
    found = [(name, program(_immediate("sim"))) for name, program in _small_cases(subject, decisions)]
    wrong = [f"{name}: {witness}" for name, witness in found if witness]
    return {"cases": len(found), "faults": len(wrong), "witness": wrong[0] if wrong else ""}


def interleavings(subject: str, decisions: int = 2) -> dict[str, Any]:
    """Small cases under every distinguishable schedule of the simulated device; `cases` says how many cases they are.

    A rank waits for its one stream before it looks at a result, so each case has one schedule; this is the check.
    """
    torch.set_num_threads(1)
    cases = explored = faults = 0
    witness = ""
    for name, program in _small_cases(subject, decisions):
        runs = devices.enumerate_schedules(program)
        found = [str(run.outcome) for run in runs if run.outcome]
        cases, explored, faults = cases + 1, explored + runs.explored, faults + len(found)
        witness = witness or (f"{name}: {found[0]}" if found else "")
    return {"interleavings": explored, "cases": cases, "faults": faults, "witness": witness}


def reported_workload(subject: str, seed: int = 0, requests: int = 24, rate: float = 0.8) -> dict[str, Any]:
    """Two streams of prompts of 6k to 45k tokens and 400 to 900 outputs, blocks of 9,776: rows only, no numbers.

    Runs up to the first request that goes on from a state that is not its own. `step` counts engine steps, `request`
    the requests in order of arrival; a key is None when nothing of the kind happened.
    """
    torch.set_num_threads(1)
    rng = random.Random(seed)
    asked = [
        Request(n, (0,) * rng.randint(6_000, 45_000), rng.randint(400, 900)) for n in range(1, requests + 1)
    ]
    one = TagPipeline(_immediate("sim"), REPORTED, asked, subject, RandomAcceptance(seed, rate))
    while not one.scheduler.done and not one.model.wrong:
        one.step()
    wrong = one.wrong
    first = {"step": wrong[0].step, "request": wrong[0].request, "why": _row(wrong[0])} if wrong else None
    return {
        "seed": seed,
        "steps": one.steps,
        "finished": len(one.scheduler.finished),
        "copies": len(one.copied),
        "wrong_copies": len(wrong),
        "damage": _damage(wrong),
        "first_wrong_copy": first,
        "first_damage": one.model.wrong[0]._asdict() if one.model.wrong else None,
        "accepted_resets": sum(copied.in_place for copied in wrong),
    }


def timeline(subject: str, steps: int = 30, seed: int = 0) -> list[dict[str, Any]]:
    """For a picture: step by step the batch, the owner of each entry of the gathered table, and the copies.

    `gathered` has a list a row: [block, owner] pairs, owner None for nobody.
    """
    one = TagPipeline(_immediate("sim"), SMALL, STAGGERED, subject, RandomAcceptance(seed))
    shown: list[dict[str, Any]] = []
    while len(shown) < steps and not one.scheduler.done:
        before = len(one.worker.copied)
        batch = one.step()
        owner = {block: req_id for req_id, blocks in one.worker.blocks.items() for block in blocks}
        table = one.worker.tables.gathered[: SMALL.max_num_seqs].tolist()
        shown.append(
            {
                "step": batch.step,
                "rows": [row.req_id for row in batch.rows],
                "decodes": sum(row.decode for row in batch.rows),
                "req_idxs": {str(req_id): one.worker.slots.of(req_id) for req_id in one.worker.blocks},
                "gathered": [[[block, owner.get(block)] for block in row] for row in table],
                "copies": [_drawn(copied) for copied in one.worker.copied[before:]],
            }
        )
    return shown


def _drawn(copied: Copied) -> dict[str, Any]:
    shown = ("request", "when", "damage", "victim", "in_place")
    return vars(copied.move) | {name: getattr(copied, name) for name in shown}
