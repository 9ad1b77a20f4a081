"""Probes of incident `async-accepted-counts`; each runs in an isolated process.

A subject becomes a function from a transition (two steps of a batch) to the accepted counts that the device has for the
requests with drafts in the second step. The copy of the first step's counts is in flight when the second begins; every
distinguishable moment of its landing is tried, and each count is compared with the one that the request was given.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import cache, partial
from itertools import product
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch

from specmortem import upstream
from specmortem.device import Device, Immediate, SimDevice, enumerate_schedules
from specmortem.incidents.async_accepted_counts import INCIDENT
from specmortem.incidents.async_accepted_counts.engine.accepted_counts import AcceptedCounts, Mode, policy
from specmortem.incidents.async_accepted_counts.engine.graph_metadata import ROWS, GraphMetadata
from specmortem.incidents.async_accepted_counts.engine.input_batch import InputBatch, NewRequest
from specmortem.incidents.async_accepted_counts.released import (
    MAX_REQS,
    Counts,
    K,
    Landing,
    Phase,
    Role,
    Row,
    RunnerCode,
    Transition,
    UnfitError,
    counts_of,
    stand_ins,
)
from specmortem.upstream.vllm_files import ATTENTION_UTILS, CACHE, CACHE_MODES, GDN
from specmortem.verdict import Evidence, Verdict

PROBES = {probe.cause: probe for probe in INCIDENT.probes}
WINDOW = Transition(
    (
        Row("A", "decode", 4, leaves=True),
        Row("B", "decode", 2),
        Row("C", "decode", 3),
        Row("P", "first-draft"),
    ),
    ("Q",),
)
ACCEPTED = (4, 2, 3)
PER_REQUEST = (
    "spec_state_indices_tensor",
    "spec_sequence_masks",
    "spec_query_start_loc",
    "num_accepted_tokens",
)


@cache
def transitions(most_rows: int = 3) -> tuple[Transition, ...]:
    """The window of the incident, and every batch of so many rows, decodes first, with and without an arrival."""
    found = (t for size in range(1, most_rows + 1) for t in _of_size(size))
    return (WINDOW, *(t for t in found if t.right))


def _of_size(size: int) -> Iterator[Transition]:
    for decodes in range(size + 1):
        leaving = product((False, True), repeat=decodes)
        roles: Iterator[tuple[Role, ...]] = product(("first-draft", "prefill"), repeat=size - decodes)
        for leaves, rest, arrives in product(leaving, list(roles), (False, True)):
            rows = [Row("ABC"[i], "decode", ACCEPTED[i], gone) for i, gone in enumerate(leaves)]
            rows += [Row("ABC"[decodes + i], role) for i, role in enumerate(rest)]
            yield Transition(tuple(rows), ("Q",) * arrives)


Step = Callable[[Transition, Device], Counts]


@dataclass(frozen=True)
class Wrong:
    """A landing after which a request has another count than its own."""

    transition: Transition
    counts: Counts

    @property
    def victims(self) -> dict[str, int]:
        """The wrong counts."""
        right = self.transition.right
        return {name: count for name, count in self.counts.given.items() if count != right[name]}

    def roles(self) -> Iterator[Role]:
        """What the victims did in the first step."""
        return (row.role for row in self.transition.rows if row.name in self.victims)


@dataclass
class Tally:
    """Landings by phase, wrong and in all, and what went wrong."""

    landings: Counter[Phase] = field(default_factory=Counter)
    wrong: list[Wrong] = field(default_factory=list)

    def as_dict(self) -> dict[str, Any]:
        """JSON form: [wrong, all] by phase, wrong counts by role."""
        bad = Counter(each.counts.landing.phase for each in self.wrong)
        victims = Counter(role for each in self.wrong for role in each.roles())
        return {
            "landings": {phase: [bad[phase], count] for phase, count in sorted(self.landings.items())},
            "victims": dict(victims),
        }


def tally(step: Step, tried: tuple[Transition, ...]) -> Tally:
    """Run every transition under every distinguishable landing.

    Raises what the step raises.
    """
    found = Tally()
    for transition in tried:
        for interleaving in enumerate_schedules(partial(step, transition)):
            if isinstance(interleaving.outcome, Exception):
                raise interleaving.outcome
            found.landings[interleaving.outcome.landing.phase] += 1
            wrong = Wrong(transition, interleaving.outcome)
            if wrong.victims:
                found.wrong.append(wrong)
    return found


def judge(cause: str, subject: str, device: str = "sim") -> dict[str, Any]:
    """Run the probe of `cause`; a verdict as JSON. It needs no GPU: `device` changes nothing."""
    try:
        return _JUDGES[cause](subject).as_dict()
    except upstream.NotPresentError as error:
        told = str(error)
        named = told if told.startswith(subject) else f"{subject} does not have {told}"
        verdict = Verdict.not_judged(named, absent=told)
    except (UnfitError, upstream.LiftError, AttributeError, TypeError, ValueError, KeyError) as error:
        verdict = Verdict.not_judged(
            f"the probe does not fit {subject}: {type(error).__name__}: {error}", unfit=type(error).__name__
        )
    return verdict.as_dict()


def own_step(arm: str, mode: Mode) -> Step:
    """This package's engine parts under a policy: `before`, `after` or another name of `accepted_counts.POLICIES`."""
    chosen = policy(arm, mode)

    def step(transition: Transition, device: Device) -> Counts:
        landing = Landing()
        device.observers.append(landing)
        batch = InputBatch(device, MAX_REQS)
        counts = AcceptedCounts(device, batch, chosen, device.stream("main"))
        rows = transition.rows
        for number, row in enumerate(rows):
            batch.add_request(NewRequest(number))
            assert batch.row_of[number] == number, row
        counts.count(device.tensor([_sampled(row) for row in rows], dtype=torch.int32))
        counts.send(len(rows))
        batch.remember_rows()
        landing.second_step_begins()
        counts.before_row_moves()
        _move_rows(batch, transition)
        landing.rows_have_moved()
        counts.take()
        counts.correct([K if row.role == "decode" else 0 for row in rows], [0] * batch.num_reqs)
        if mode == "align":
            counts.upload_again()
        device.synchronize()
        given = counts.on_device[:, 0].tolist()
        numbers = {row.name: number for number, row in enumerate(rows)}
        return Counts({name: given[batch.row_of[numbers[name]]] for name in transition.right}, landing)

    return step


def _sampled(row: Row) -> list[int]:
    return [7] * row.accepted + [-1] * (1 + K - row.accepted)


def _move_rows(batch: InputBatch, transition: Transition) -> None:
    """Remove, add, condense, and swap until rows with drafts come first, chunks of prompts next, new requests last."""
    rows = transition.rows
    for number, row in enumerate(rows):
        if row.leaves:
            batch.remove_request(number)
    for number, _ in enumerate(transition.arrivals, len(rows)):
        batch.add_request(NewRequest(number))
    batch.condense()
    batch.reorder(lambda number: 2 if number >= len(rows) else int(rows[number].role == "prefill"))


def released_step(code: RunnerCode, mode: Mode) -> Step:
    """The methods of a tree."""
    return partial(counts_of, code, mode)


def _stale_count(mode: Mode, subject: str) -> Verdict:
    """Does a request with drafts end up with the count of another?

    A tree is judged in mode all too, beside mode none. This package's own parts are one program in the two.
    """
    detail: dict[str, Any] = {"transitions": len(transitions())}
    if subject in ("before", "after"):
        return _of_tally(tally(own_step(subject, mode), transitions()), detail)
    code = RunnerCode(upstream.resolve(subject))
    found = tally(released_step(code, mode), transitions())
    verdict = _of_tally(found, detail | {"hashes": code.hashes, "lines": code.lines})
    return _with_mode_all(verdict, code) if mode == "none" else verdict


def _with_mode_all(of_none: Verdict, code: RunnerCode) -> Verdict:
    """The verdict in mode none, or in mode all where only that is wrong; what mode all gave is in the detail."""
    detail, told = dict(of_none.evidence.detail), of_none.evidence.observed
    try:
        offered = code.offers("all")
    except upstream.NotPresentError as error:
        return _told(of_none, f"{told}; mode all: absent", detail | {"mode_all": {"absent": str(error)}})
    if not offered:
        absent = {"absent": f"{CACHE_MODES} of {CACHE} does not name it"}
        return _told(of_none, f"{told}; mode all: absent", detail | {"mode_all": absent})
    of_all = _of_tally(tally(released_step(code, "all"), transitions()), {})
    in_all = of_all.evidence.observed
    worse = of_all if (of_none.outcome, of_all.outcome) == ("clean", "fault") else of_none
    told = f"{told}; mode all: {'the same' if in_all == told else in_all}"
    return _told(worse, told, detail | {"mode_all": of_all.evidence.detail})


def _told(verdict: Verdict, observed: str, detail: dict[str, Any]) -> Verdict:
    return replace(verdict, evidence=replace(verdict.evidence, observed=observed, detail=detail))


def _of_tally(found: Tally, detail: dict[str, Any]) -> Verdict:
    detail |= found.as_dict()
    total = sum(found.landings.values())
    if not found.wrong:
        told = f"every count is the request's own in {total} landings"
        return Verdict("clean", Evidence(str(WINDOW), told, detail=detail))
    first = found.wrong[0]
    right = first.transition.right
    observed = ", ".join(f"{name} has {count}" for name, count in first.victims.items())
    return Verdict(
        "fault",
        Evidence(
            f"{first.transition}; {first.counts.landing}",
            f"{observed}; wrong in {len(found.wrong)} of {total} landings",
            ", ".join(f"{name} has {right[name]}" for name in first.victims),
            first.counts.landing.queued_at,
            detail=detail,
        ),
    )


class Rows(NamedTuple):
    """A captured batch: requests, of which `padding` behind the others are empty, at K + 1 tokens each."""

    requests: int
    padding: int = 0

    def __str__(self) -> str:
        """As in a witness."""
        padded = f", {self.padding} of them padding" if self.padding else ""
        return f"{self.requests} requests{padded}, {self.requests * (K + 1)} tokens"


BATCHES = (Rows(72), Rows(2), Rows(4, padding=1))


RowsOf = Callable[[Rows], dict[str, int]]


def _graph_metadata(subject: str) -> Verdict:
    """How many rows does the metadata of a full graph have?"""
    detail: dict[str, Any] = {"note": "a contract of shapes; nothing is said of what the consumers read"}
    if subject in ("before", "after"):
        rows_of: RowsOf = partial(_own_rows, subject)
    else:
        builder, detail["hashes"] = _metadata_builder(upstream.resolve(subject))
        rows_of = partial(_rows_built, builder)
    shapes = {batch: rows_of(batch) for batch in BATCHES}
    detail["rows"] = {str(batch): rows for batch, rows in shapes.items()}
    wrong = [batch for batch, rows in shapes.items() if set(rows.values()) != {batch.requests}]
    if not wrong:
        told = f"{BATCHES[0].requests} rows of each"
        return Verdict("clean", Evidence(str(BATCHES[0]), told, detail=detail))
    batch = wrong[0]
    observed = ", ".join(f"{count} of {name}" for name, count in shapes[batch].items())
    expected = f"{batch.requests} rows of each"
    return Verdict("fault", Evidence(str(batch), observed, expected, detail=detail))


def _own_rows(arm: str, batch: Rows) -> dict[str, int]:
    """The same of this package's metadata."""
    live = batch.requests - batch.padding
    indices = torch.arange(1, 1 + live * (K + 1), dtype=torch.int32).reshape(live, K + 1)
    graph = GraphMetadata(SimDevice(Immediate()), BATCHES[0].requests, K)
    built = graph.build(ROWS[arm], indices, torch.ones(live, dtype=torch.int32), batch.requests)
    sizes = (
        built.state_indices.shape[0],
        built.masks.shape[0],
        built.query_start_loc.shape[0] - 1,
        built.num_accepted.shape[0],
    )
    return dict(zip(PER_REQUEST, sizes, strict=True))


class _BaseBuilder:
    """In place of the class that the released builder extends."""

    def __init__(self, kv_cache_spec: Any, layer_names: Any, vllm_config: Any, device: Any) -> None:
        self.kv_cache_spec, self.vllm_config, self.device = kv_cache_spec, vllm_config, device

    def __class_getitem__(cls, _: Any) -> type:
        return cls

    def _init_reorder_batch_threshold(self, threshold: int, *_: Any, **__: Any) -> None:
        self.reorder_batch_threshold = threshold + K


def _metadata_builder(tree: upstream.Tree) -> tuple[Any, dict[str, str]]:
    """The released builder over a configuration for 72 requests, and the hash of its `build`."""
    given = stand_ins(
        tree, [GDN, ATTENTION_UTILS], ("mamba_get_block_table_tensor", "NULL_BLOCK_ID", "PAD_SLOT_ID")
    )
    given |= {
        "AttentionMetadataBuilder": _BaseBuilder,
        "AttentionCGSupport": SimpleNamespace(UNIFORM_BATCH="uniform batch"),
        "_resolve_gdn_prefill_backend": lambda *_: (None, "triton"),
        "async_tensor_h2d": lambda tensor, device: tensor.to(device),
    }
    spec = given["MambaSpec"](block_size=64, num_speculative_blocks=K, prefill_checkpoint_alignment=None)
    config = SimpleNamespace(
        compilation_config=SimpleNamespace(
            cudagraph_mode=SimpleNamespace(has_full_cudagraphs=lambda: True), max_cudagraph_capture_size=None
        ),
        speculative_config=SimpleNamespace(num_speculative_tokens=K),
        scheduler_config=SimpleNamespace(max_num_seqs=BATCHES[0].requests),
        cache_config=SimpleNamespace(mamba_cache_mode="none"),
        use_v2_model_runner=False,
    )
    builder = upstream.lift(tree, GDN, "GDNAttentionMetadataBuilder", provide=given).function
    hashes = {"build": upstream.body_hash(tree, GDN, "GDNAttentionMetadataBuilder.build")}
    return builder(spec, ["layer0"], config, torch.device("cpu")), hashes


def _rows_built(builder: Any, batch: Rows) -> dict[str, int]:
    """Rows of each tensor that has one a request; the offsets have one more, which is not counted."""
    n, live = batch.requests, batch.requests - batch.padding
    loc = (torch.arange(n + 1).clamp(max=live) * (K + 1)).to(torch.int32)
    metadata = SimpleNamespace(
        num_reqs=n,
        num_actual_tokens=n * (K + 1),
        query_start_loc=loc,
        query_start_loc_cpu=loc,
        seq_lens=torch.full((n,), 32, dtype=torch.int32),
        block_table_tensor=torch.arange(1, 1 + n * (K + 1), dtype=torch.int32).reshape(n, K + 1),
        compute_num_computed_tokens=lambda: torch.full((n,), 28, dtype=torch.int32),
    )
    drafts = torch.tensor([K] * live + [-1] * batch.padding, dtype=torch.int32)
    built = builder.build(0, metadata, torch.ones(n, dtype=torch.int32), drafts)
    return {name: len(getattr(built, name)) - (name == "spec_query_start_loc") for name in PER_REQUEST}


_JUDGES: dict[str, Callable[[str], Verdict]] = {
    "stale-count-none": partial(_stale_count, "none"),
    "stale-count-align": partial(_stale_count, "align"),
    "graph-metadata-rows": _graph_metadata,
}
