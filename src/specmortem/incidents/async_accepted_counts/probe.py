"""Probes of incident `async-accepted-counts`; each runs in an isolated process.

A subject becomes a function from a transition (two steps of a batch) to the accepted counts that the device has for the
requests with drafts in the second step. The copy of the first step's counts is in flight when the second begins; every
distinguishable completion of it is tried, and each count is compared with the one that the request was given.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from itertools import chain, product
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch

from specmortem import upstream
from specmortem.device import Immediate, SimDevice
from specmortem.incidents.async_accepted_counts import INCIDENT
from specmortem.incidents.async_accepted_counts.engine.copy_completion import UnfitError
from specmortem.incidents.async_accepted_counts.engine.graph_metadata import ROWS, GraphMetadata
from specmortem.incidents.async_accepted_counts.engine.policies import Mode
from specmortem.incidents.async_accepted_counts.engine.transition import (
    EXAMPLE,
    Landing,
    Role,
    StepRow,
    Transition,
    by_phase,
    landings,
    own_step,
)
from specmortem.incidents.async_accepted_counts.released import K, RunnerCode, counts_of, stand_in
from specmortem.upstream.stand_ins import Stub
from specmortem.upstream.vllm_files import CACHE, CACHE_MODES, GDN
from specmortem.verdict import Evidence, Verdict

PROBES = {probe.cause: probe for probe in INCIDENT.probes}
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
    return (EXAMPLE, *(t for t in found if t.right))


def _of_size(size: int) -> Iterator[Transition]:
    for decodes in range(size + 1):
        leaving = product((False, True), repeat=decodes)
        roles: Iterator[tuple[Role, ...]] = product(("first-draft", "prefill"), repeat=size - decodes)
        for leaves, rest, arrives in product(leaving, list(roles), (False, True)):
            rows = [StepRow("ABC"[i], "decode", ACCEPTED[i], gone) for i, gone in enumerate(leaves)]
            rows += [StepRow("ABC"[decodes + i], role) for i, role in enumerate(rest)]
            yield Transition(tuple(rows), ("Q",) * arrives)


def judge(cause: str, subject: str, device: str = "sim") -> dict[str, Any]:
    """Run the probe of `cause`; a verdict as JSON. It needs no GPU: `device` changes nothing."""
    try:
        return _JUDGES[cause](subject).as_dict()
    except upstream.NotPresentError as error:
        absent = str(error)
        reason = absent if absent.startswith(subject) else f"{subject} does not have {absent}"
        return Verdict.not_judged(reason, absent=absent).as_dict()
    except (UnfitError, upstream.LiftError, AttributeError, TypeError, ValueError, KeyError) as error:
        kind = type(error).__name__
        return Verdict.not_judged(f"the probe does not fit {subject}: {kind}: {error}", unfit=kind).as_dict()


def _stale_count(mode: Mode, subject: str) -> Verdict:
    """Does a request with drafts end up with the count of another?

    A tree is judged in mode all too, beside mode none. This package's own parts are one program in the two.
    """
    detail: dict[str, Any] = {"transitions": len(transitions())}
    if subject in ("before", "after"):
        return _verdict(landings(own_step(subject, mode), transitions()), detail)
    code = RunnerCode(upstream.resolve(subject))
    verdict = _of_released(code, mode, detail | {"hashes": code.hashes, "lines": code.lines})
    return _with_mode_all(verdict, code) if mode == "none" else verdict


def _of_released(code: RunnerCode, mode: Mode, detail: dict[str, Any]) -> Verdict:
    return _verdict(landings(partial(counts_of, code, mode), transitions()), detail)


def _with_mode_all(of_none: Verdict, code: RunnerCode) -> Verdict:
    """The verdict in mode none, or in mode all where only that is wrong; what mode all gave is in the detail."""
    observed = of_none.evidence.observed
    if absent := _mode_all_is_absent(code):
        worse, in_all, found = of_none, "absent", {"absent": absent}
    else:
        of_all = _of_released(code, "all", {})
        worse = of_all if (of_none.outcome, of_all.outcome) == ("clean", "fault") else of_none
        in_all, found = of_all.evidence.observed, dict(of_all.evidence.detail)
    both = f"{observed}; mode all: {'the same' if in_all == observed else in_all}"
    detail = {**of_none.evidence.detail, "mode_all": found}
    return worse.replace(evidence=worse.evidence.replace(observed=both, detail=detail))


def _mode_all_is_absent(code: RunnerCode) -> str:
    """Why a tree is not judged in mode all; empty where it is."""
    try:
        return "" if code.offers("all") else f"{CACHE_MODES} of {CACHE} does not name it"
    except upstream.NotPresentError as error:
        return str(error)


def _verdict(found: Sequence[Landing], detail: dict[str, Any]) -> Verdict:
    wrong = [landing for landing in found if landing.victims]
    victims = Counter(chain.from_iterable(landing.roles for landing in wrong))
    detail |= {"landings": by_phase(found), "victims": dict(victims)}
    if not wrong:
        observed = f"every count is the request's own in {len(found)} landings"
        return Verdict("clean", Evidence(str(EXAMPLE), observed, detail=detail))
    first, right = wrong[0], wrong[0].transition.right
    given = ", ".join(f"{req_id} has {count}" for req_id, count in first.victims.items())
    observed = f"{given}; wrong in {len(wrong)} of {len(found)} landings"
    expected = ", ".join(f"{req_id} has {right[req_id]}" for req_id in first.victims)
    witness = f"{first.transition}; {first.copy}"
    return Verdict("fault", Evidence(witness, observed, expected, first.copy.queued_at, detail=detail))


class CapturedBatch(NamedTuple):
    """Requests, of which the last `padding` are empty, at K + 1 tokens each."""

    requests: int
    padding: int = 0

    def __str__(self) -> str:
        """As in a witness."""
        padded = f", {self.padding} of them padding" if self.padding else ""
        return f"{self.requests} requests{padded}, {self.requests * (K + 1)} tokens"


BATCHES = (CapturedBatch(72), CapturedBatch(2), CapturedBatch(4, padding=1))


RowsOf = Callable[[CapturedBatch], dict[str, int]]


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
        observed = f"{BATCHES[0].requests} rows of each"
        return Verdict("clean", Evidence(str(BATCHES[0]), observed, detail=detail))
    batch = wrong[0]
    observed = ", ".join(f"{count} of {name}" for name, count in shapes[batch].items())
    expected = f"{batch.requests} rows of each"
    return Verdict("fault", Evidence(str(batch), observed, expected, detail=detail))


def _own_rows(arm: str, batch: CapturedBatch) -> dict[str, int]:
    live = batch.requests - batch.padding
    indices = torch.arange(1, 1 + live * (K + 1), dtype=torch.int32).reshape(live, K + 1)
    graph = GraphMetadata(SimDevice(Immediate()), BATCHES[0].requests, K)
    built = graph.build(ROWS[arm], indices, torch.ones(live, dtype=torch.int32), batch.requests)
    return _sizes(dict(zip(PER_REQUEST, map(len, built), strict=True)))


class _BaseBuilder(Stub):
    """In place of the class that the released builder extends."""

    def __init__(self, kv_cache_spec: Any, layer_names: Any, vllm_config: Any, device: Any) -> None:
        super().__init__(kv_cache_spec=kv_cache_spec, vllm_config=vllm_config, device=device)

    def _init_reorder_batch_threshold(self, threshold: int, *_: Any, **__: Any) -> None:
        self.reorder_batch_threshold = threshold + K


def _metadata_builder(tree: upstream.Tree) -> tuple[Any, dict[str, str]]:
    """The released builder over a configuration for 72 requests, and the hash of its `build`."""
    given = {
        "AttentionMetadataBuilder": _BaseBuilder,
        "AttentionCGSupport": SimpleNamespace(UNIFORM_BATCH="uniform batch"),
        "_resolve_gdn_prefill_backend": lambda *_: (None, "triton"),
        "async_tensor_h2d": lambda tensor, device: tensor.to(device),
    }
    lifted = ("mamba_get_block_table_tensor", "NULL_BLOCK_ID", "PAD_SLOT_ID")
    stand_ins = upstream.StandIns(given, names=lifted, make=stand_in)
    spec = stand_ins["MambaSpec"](block_size=64, num_speculative_blocks=K, prefill_checkpoint_alignment=None)
    mode = SimpleNamespace(has_full_cudagraphs=lambda: True)
    config = SimpleNamespace(
        compilation_config=SimpleNamespace(cudagraph_mode=mode, max_cudagraph_capture_size=None),
        speculative_config=SimpleNamespace(num_speculative_tokens=K),
        scheduler_config=SimpleNamespace(max_num_seqs=BATCHES[0].requests),
        cache_config=SimpleNamespace(mamba_cache_mode="none"),
        use_v2_model_runner=False,
    )
    builder = upstream.lift(tree, GDN, "GDNAttentionMetadataBuilder", provide=stand_ins).function
    hashes = {"build": upstream.body_hash(tree, GDN, "GDNAttentionMetadataBuilder.build")}
    return builder(spec, ["layer0"], config, torch.device("cpu")), hashes


def _rows_built(builder: Any, batch: CapturedBatch) -> dict[str, int]:
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
    return _sizes({name: len(getattr(built, name)) for name in PER_REQUEST})


def _sizes(lengths: dict[str, int]) -> dict[str, int]:
    """Rows of each tensor that has one a request; the offsets have one more, which is not counted."""
    return {name: length - (name == "spec_query_start_loc") for name, length in lengths.items()}


_JUDGES: dict[str, Callable[[str], Verdict]] = {
    "stale-count-none": partial(_stale_count, "none"),
    "stale-count-align": partial(_stale_count, "align"),
    "graph-metadata-rows": _graph_metadata,
}
