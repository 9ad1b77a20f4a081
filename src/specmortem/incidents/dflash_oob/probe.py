"""Probes of incident `dflash-oob`; each runs in an isolated process.

A subject becomes one or more `InputKernel`s: a function from a batch to the arrays it writes. This package's arms and
the released V1 and V2 kernels get the same batches, in buffers poisoned with a number that no kernel computes.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch

from specmortem import upstream
from specmortem.detect import bounds
from specmortem.incident import probe_of
from specmortem.incidents.dflash_oob import kernels as dflash_inputs
from specmortem.incidents.dflash_oob.kernels import DFlashBatch, DFlashInputs
from specmortem.kernels import gated_delta_state, recovered_token
from specmortem.kernels.released_lookups import PLATFORM, gating_inputs
from specmortem.upstream.vllm_files import CONV, GATING, REJECTION, UTILS, V1, V2, V2_SPECULATOR
from specmortem.verdict import Evidence, Verdict

POISON = -77
BLOCK_SIZE, MAX_MODEL_LEN, K = 4, 64, 3
COLUMNS = MAX_MODEL_LEN // BLOCK_SIZE
STALE_BLOCK = 29


@dataclass(frozen=True)
class Written:
    """What a launch wrote, by the names of `DFlashInputs`, and what the detector said of it."""

    arrays: Mapping[str, torch.Tensor]
    reports: tuple[bounds.Report, ...]

    def __getitem__(self, name: str) -> list[int]:
        """An array as a list of integers."""
        return [int(x) for x in self.arrays[name].flatten()]


InputKernel = Callable[[DFlashBatch, int], Written]


@dataclass(frozen=True)
class Subject:
    """A subject's kernels; `hashes` names the bodies that are judged."""

    name: str
    device: str
    hashes: dict[str, str]
    kernels: dict[str, InputKernel]
    tree: Any = None


def judge(cause: str, subject: str, device: str = "sim") -> dict[str, Any]:
    """Run the probe of `cause`; a verdict as JSON."""
    probe = probe_of(cause)
    try:
        verdict = _JUDGES[cause](
            subject_of(subject, device, (*probe.functions, *(name for _, name in probe.also)))
        )
    except upstream.NotPresentError as error:
        verdict = Verdict.not_judged(str(error), absent=str(error))
    return verdict.as_dict()


def subject_of(name: str, device: str, functions: tuple[str, ...]) -> Subject:
    """The kernels of a subject that `functions` name.

    Raises upstream.NotPresentError when a released tree lacks one of them.
    """
    where = "cuda" if device == "cuda" else "cpu"
    if name in ("before", "after"):
        return Subject(name, where, {}, {name: _own(arm_of(name))})
    tree = upstream.resolve(name)
    hashes: dict[str, str] = {}
    kernels: dict[str, InputKernel] = {}
    if V1 in functions:
        lifted = upstream.lift(tree, UTILS, V1)
        kernels["v1"], hashes[V1] = _v1(lifted.function), lifted.body_hash
    if V2 in functions and tree.has(V2_SPECULATOR):
        kernel = "_prepare_dflash_inputs_kernel"
        kernels["v2"] = _v2(upstream.lift(tree, V2_SPECULATOR, V2).function)
        hashes[kernel] = upstream.body_hash(tree, V2_SPECULATOR, kernel)
    return Subject(name, where, hashes, kernels, tree)


def arm_of(subject: str) -> dflash_inputs.Arm:
    """The arm that a subject of this package names."""
    return "before" if subject == "before" else "after"


def batch(
    positions: list[list[int]],
    *,
    rejected: list[int] | None = None,
    num_blocks: list[int] | None = None,
    rows: list[list[int]] | None = None,
    device: str = "cpu",
) -> DFlashBatch:
    """A batch from each request's context positions; by default every row is allocated whole, with ids of its own."""
    r = len(positions)
    start_loc = [sum(len(p) for p in positions[:i]) for i in range(r + 1)]
    table = torch.arange(1, 1 + r * COLUMNS, dtype=torch.int32).reshape(r, COLUMNS)
    for request, row in enumerate(rows or []):
        table[request] = torch.tensor(row + [0] * (COLUMNS - len(row)), dtype=torch.int32)
    i32: dict[str, Any] = {"dtype": torch.int32, "device": device}
    return DFlashBatch(
        next_token_ids=torch.arange(11, 11 + r, **i32),
        target_positions=torch.tensor(sum(positions, []), device=device),
        query_start_loc=torch.tensor(start_loc, **i32),
        num_rejected=torch.tensor(rejected or [0] * r, **i32),
        block_table=table.to(device),
        num_blocks=torch.tensor(num_blocks or [COLUMNS] * r, **i32),
        block_size=BLOCK_SIZE,
        max_model_len=MAX_MODEL_LEN,
        num_speculative_tokens=K,
        mask_token_id=99,
    )


@contextmanager
def batch_watch(b: DFlashBatch, **options: Any) -> Iterator[bounds.Watch]:
    """A detector that knows whose row and whose positions are whose; `options` are those of `bounds.watch`."""
    with bounds.watch(**options) as watch:
        watch.rows(b.block_table, of=bounds.program(0), allocated=b.num_blocks, name="block_table")
        watch.segments(b.target_positions, b.query_start_loc, of=bounds.program(0), name="target_positions")
        yield watch


def watched(b: DFlashBatch) -> AbstractContextManager[bounds.Watch | None]:
    """The batch's detector, which lets through what a GPU would; nothing on a GPU."""
    return nullcontext() if b.target_positions.is_cuda else batch_watch(b, fill=POISON, perform_mapped=True)


def _reports(watch: bounds.Watch | None) -> tuple[bounds.Report, ...]:
    return tuple(watch.reports) if watch is not None else ()


def _own(arm: dflash_inputs.Arm) -> InputKernel:
    def run(b: DFlashBatch, padded: int) -> Written:
        out = DFlashInputs.empty(
            b.target_positions.shape[0], b.num_reqs, K, padded, str(b.target_positions.device), POISON
        )
        with watched(b) as watch:
            dflash_inputs.launch(arm, b, out)
        return Written({**vars(out), "sample_idx_mapping": torch.full((padded,), -1)}, _reports(watch))

    return run


def _v1(kernel: Any) -> InputKernel:
    """The released V1 kernel, launched with the grid and the arguments of `set_inputs_first_pass`."""

    def run(b: DFlashBatch, padded: int) -> Written:
        import triton

        n = b.target_positions.shape[0]
        out = DFlashInputs.empty(n, b.num_reqs, K, padded, str(b.target_positions.device), POISON)
        widest = int((b.query_start_loc[1:] - b.query_start_loc[:-1]).max()) + b.num_query_per_req
        block = min(256, triton.next_power_of_2(widest))
        with watched(b) as watch:
            kernel[(b.num_reqs, triton.cdiv(widest, block))](
                next_token_ids_ptr=b.next_token_ids,
                target_positions_ptr=b.target_positions,
                out_input_ids_ptr=out.input_ids,
                out_context_positions_ptr=out.context_positions,
                out_query_positions_ptr=out.query_positions,
                out_context_slot_mapping_ptr=out.context_slots,
                out_query_slot_mapping_ptr=out.query_slots,
                out_token_indices_ptr=out.sample_indices,
                block_table_ptr=b.block_table,
                block_table_stride=b.block_table.stride(0),
                query_start_loc_ptr=b.query_start_loc,
                num_rejected_tokens_ptr=b.num_rejected,
                parallel_drafting_token_id=b.mask_token_id,
                block_size=b.block_size,
                num_query_per_req=b.num_query_per_req,
                num_speculative_tokens=K,
                total_input_tokens=n,
                BLOCK_SIZE=block,
                HAS_NUM_REJECTED=True,
            )
        return Written(vars(out), _reports(watch))

    return run


def _v2(prepare: Any) -> InputKernel:
    """The released V2 launcher; arguments that a release does not take are left out."""
    taken = inspect.signature(prepare).parameters

    def run(b: DFlashBatch, padded: int) -> Written:
        r, n, where = b.num_reqs, b.target_positions.shape[0], b.target_positions.device
        i32: dict[str, Any] = {"dtype": torch.int32, "device": where}
        i64: dict[str, Any] = {"dtype": torch.int64, "device": where}
        max_reqs = padded // b.num_query_per_req
        buffers = SimpleNamespace(
            input_ids=torch.full((padded,), POISON, **i32),
            positions=torch.full((padded,), POISON, **i64),
            query_start_loc=torch.full((max_reqs + 1,), POISON, **i32),
            seq_lens=torch.full((max_reqs,), POISON, **i32),
            is_padding=torch.zeros(padded, dtype=torch.bool, device=where),
        )
        lengths = b.query_start_loc[1:] - b.query_start_loc[:-1]
        input_batch = SimpleNamespace(
            num_reqs=r,
            positions=b.target_positions,
            query_start_loc=b.query_start_loc,
            idx_mapping=torch.arange(r, **i32),
            num_scheduled_tokens=lengths.cpu().numpy(),
        )
        samples = {
            name: torch.full((max_reqs * K,), POISON, **i64) for name in ("sample_indices", "sample_pos")
        }
        samples["sample_idx_mapping"] = torch.full((max_reqs * K,), POISON, **i32)
        out = {
            "query_slots": torch.full((padded,), POISON, **i64),
            "context_positions": torch.full((n,), POISON, **i64),
            "context_slots": torch.full((n,), POISON, **i64),
        }
        floats: dict[str, Any] = {"dtype": torch.float32, "device": where}
        offered = {
            "input_buffers": buffers,
            "query_slot_mapping": out["query_slots"],
            "context_positions": out["context_positions"],
            "context_slot_mapping": out["context_slots"],
            **samples,
            "temperature": torch.zeros(max_reqs, **floats),
            "seeds": torch.zeros(max_reqs, **i64),
            "input_batch": input_batch,
            "num_sampled": torch.ones(r, **i32),
            "num_rejected": b.num_rejected,
            "last_sampled": torch.nn.functional.pad(b.next_token_ids, (0, max_reqs - r)),
            "next_prefill_tokens": torch.zeros(max_reqs, **i32),
            "input_temperature": torch.zeros(max_reqs, **floats),
            "input_seeds": torch.zeros(max_reqs, **i64),
            "block_table": b.block_table,
            "block_size": b.block_size,
            "cp_rank": 0,
            "cp_size": 1,
            "cp_interleave": 1,
            "parallel_drafting_token_id": b.mask_token_id,
            "num_query_per_req": b.num_query_per_req,
            "num_speculative_steps": K,
            "max_num_reqs": max_reqs,
            "max_num_tokens": padded,
            "max_model_len": b.max_model_len,
        }
        unknown = [
            p.name for p in taken.values() if p.name not in offered and p.default is inspect.Parameter.empty
        ]
        if unknown:
            raise upstream.LiftError(
                f"prepare_dflash_inputs needs arguments this probe does not know: {unknown}"
            )
        with watched(b) as watch:
            prepare(**{name: value for name, value in offered.items() if name in taken})
        arrays = {
            **out,
            "input_ids": buffers.input_ids,
            "query_positions": buffers.positions,
            "seq_lens": buffers.seq_lens,
        }
        return Written({**arrays, **samples}, _reports(watch))

    return run


def _fault(
    s: Subject, witness: str, observed: object, expected: object, place: str = "", **detail: Any
) -> Verdict:
    evidence = Evidence(witness, str(observed), str(expected), place, detail={"hashes": s.hashes, **detail})
    return Verdict("fault", evidence)


def _clean(s: Subject, witness: str, observed: object, reports: tuple[bounds.Report, ...] = ()) -> Verdict:
    """Clean, unless the detector objects to an access that left the values right."""
    if reports:
        return _fault(s, witness, reports[0], f"an access inside {reports[0].extent}", reports[0].place)
    return Verdict("clean", Evidence(witness, str(observed), detail={"hashes": s.hashes}))


def _rejected_equals_context(s: Subject) -> Verdict:
    """All context rows of a request are rejected: request 0, then request 1."""
    seen: list[list[int]] = []
    for run, request in itertools.product(s.kernels.values(), (0, 1)):
        rejected = [4 if r == request else 0 for r in (0, 1)]
        written = run(batch([[10, 11, 12, 13], [40, 41, 42, 43]], rejected=rejected, device=s.device), 8)
        slots = written["query_slots"][4 * request : 4 * request + 4]
        witness = f"request {request} of 2: 4 context rows, all 4 rejected"
        if slots != [-1] * 4 or written.reports:
            observed = f"slots {slots}" + "".join(f"; {r}" for r in written.reports[:1])
            place = written.reports[0].place if written.reports else ""
            return _fault(s, witness, observed, "no slot for a request without a valid position", place)
        seen.append(slots)
    return _clean(
        s, "4 context rows, all rejected, in request 0 and in request 1", f"slots {seen[0]}, {seen[-1]}"
    )


def _slots_probe(
    s: Subject, b: DFlashBatch, witness: str, bad: Callable[[int], bool], expected: str = "[-1, -1, -1, -1]"
) -> Verdict:
    """Fault when any kernel of the subject gives one of the four queries a slot that is `bad`."""
    observed = {}
    reports: tuple[bounds.Report, ...] = ()
    for name, run in s.kernels.items():
        written = run(b, 4)
        observed[name] = written["query_slots"][:4]
        reports += written.reports
        if any(bad(slot) for slot in observed[name]):
            place = written.reports[0].place if written.reports else ""
            return _fault(s, witness, f"slots {observed[name]}", expected, place)
    told = (
        observed.values() if len(observed) == 1 else (f"{name} {slots}" for name, slots in observed.items())
    )
    return _clean(s, witness, f"slots {', '.join(map(str, told))}", reports)


def _stale_block_id(s: Subject) -> Verdict:
    """The row ends after 3 blocks; behind it a block id of an earlier owner is left."""
    b = batch([[8, 9, 10, 11]], num_blocks=[3], rows=[[5, 6, 7, STALE_BLOCK]], device=s.device)
    witness = f"3 blocks allocated, column 3 holds the stale id {STALE_BLOCK}, queries at positions 12 to 15"
    stale = range(STALE_BLOCK * BLOCK_SIZE, (STALE_BLOCK + 1) * BLOCK_SIZE)
    return _slots_probe(s, b, witness, lambda slot: slot in stale, "no slot behind the allocated blocks")


def _null_block(s: Subject) -> Verdict:
    """The column that the queries fall into holds the null block."""
    b = batch([[8, 9, 10, 11]], rows=[[5, 6, 7, 0]], device=s.device)
    return _slots_probe(
        s, b, "column 3 holds block 0, queries at positions 12 to 15", lambda slot: 0 <= slot < BLOCK_SIZE
    )


def _rejected_context_slots(s: Subject) -> Verdict:
    """Two of four context rows are rejected."""
    b = batch([[10, 11, 12, 13]], rejected=[2], rows=[[1, 2, 7, 8, 9]], device=s.device)
    written = next(iter(s.kernels.values()))(b, 4)
    slots, expected = written["context_slots"], [30, 31, -1, -1]
    witness = "4 context rows at positions 10 to 13, the last 2 rejected"
    if slots != expected:
        return _fault(s, witness, f"slots {slots}", f"{expected}")
    return _clean(s, witness, f"slots {slots}", written.reports)


def _near_end(device: str) -> tuple[str, DFlashBatch]:
    last = MAX_MODEL_LEN - 1
    witness = f"max_model_len {MAX_MODEL_LEN}, context up to position {last}, {K + 1} queries behind it"
    return witness, batch([[last - 3, last - 2, last - 1, last]], device=device)


def _past_max_len(s: Subject) -> Verdict:
    """A request that fills max_model_len drafts on."""
    witness, b = _near_end(s.device)
    written = next(iter(s.kernels.values()))(b, 4)
    positions, seq_len = written["query_positions"][:4], written["seq_lens"][0]
    observed = f"positions {positions}, seq_len {seq_len}"
    if max(positions) >= MAX_MODEL_LEN or seq_len > MAX_MODEL_LEN:
        return _fault(
            s, witness, observed, f"positions below {MAX_MODEL_LEN}, seq_len at most {MAX_MODEL_LEN}"
        )
    return _clean(s, witness, observed, written.reports)


def _slot_past_max_len(s: Subject) -> Verdict:
    """As above; a token that has no place must not get the slot of one that has: the last block's, of 60 to 63."""
    witness, b = _near_end(s.device)
    return _slots_probe(s, b, witness, lambda slot: slot >= 0)


def _stale_tail(s: Subject) -> Verdict:
    """Two requests in buffers for four: what does a graph replayed at the padded size find behind them?"""
    b = batch([[8, 9, 10, 11], [12, 13, 14, 15]], device=s.device)
    written = next(iter(s.kernels.values()))(b, 16)
    tail = written["query_slots"][8:16]
    samples = written["sample_idx_mapping"][2 * K : 4 * K]
    untouched = [name for name in ("input_ids", "query_positions") if POISON in written[name][8:16]]
    observed = f"slots {tail}, sample_idx_mapping {samples}, not written: {', '.join(untouched) or 'nothing'}"
    witness = "2 requests, buffers padded for 4"
    if any(x != -1 for x in tail) or any(x >= 0 for x in samples):
        return _fault(s, witness, observed, "padded rows have slot -1 and no sample row of a live request")
    return _clean(s, witness, observed, written.reports)


def _lookup_launcher(s: Subject) -> Callable[[list[int]], tuple[bounds.Report, ...]]:
    """Run the recurrent lookup of a subject with these counts, K = 3, and return what the detector says."""
    heads, dim = 1, 8
    if s.name in ("before", "after"):
        inputs = gating_inputs(3, 4, heads, dim)
        q, k, v = (inputs[n].reshape(3, 4, dim).contiguous() for n in "qkv")
        gate, beta = -inputs["a"].reshape(3, 4), inputs["b"].reshape(3, 4)
        out = torch.zeros_like(q)
        indices, states = (
            inputs["ssm_state_indices"],
            inputs["initial_state"].reshape(-1, dim, dim).contiguous(),
        )

        def own(accepted: list[int]) -> tuple[bounds.Report, ...]:
            with bounds.watch() as watch:
                watch.rows(indices, of=bounds.program(0), name="state_indices")
                gated_delta_state.launch(
                    arm_of(s.name),
                    q,
                    k,
                    v,
                    gate,
                    beta,
                    out,
                    states,
                    indices,
                    torch.tensor(accepted, dtype=torch.int32),
                )
            return tuple(watch.reports)

        return own
    path = s.tree.first(list(GATING))
    lifted = upstream.lift(s.tree, path, "fused_sigmoid_gating_delta_rule_update")
    s.hashes["fused_sigmoid_gating_delta_rule_update_kernel"] = upstream.body_hash(
        s.tree, path, "fused_sigmoid_gating_delta_rule_update_kernel"
    )

    def released(accepted: list[int]) -> tuple[bounds.Report, ...]:
        inputs = gating_inputs(3, 4, heads, dim)
        with bounds.watch() as watch:
            watch.rows(
                inputs["ssm_state_indices"], of=bounds.program(2, divided_by=heads), name="ssm_state_indices"
            )
            lifted.function(**inputs, num_accepted_tokens=torch.tensor(accepted, dtype=torch.int32))
        return tuple(watch.reports)

    return released


def _conv_launcher(s: Subject) -> Callable[[list[int]], tuple[bounds.Report, ...]]:
    """Run the convolution window of a subject with these counts, width 4, K = 3."""
    width, dim, requests = 4, 8, 3
    length = width - 1 + K
    if s.name in ("before", "after"):

        def own(accepted: list[int]) -> tuple[bounds.Report, ...]:
            pool = torch.rand(1 + requests, length, dim)
            out = torch.zeros(requests, width - 1, dim)
            lines = torch.arange(1, 1 + requests, dtype=torch.int32)
            with bounds.watch() as watch:
                watch.blocks(pool, [-1, *range(requests)], of=bounds.program(0), name="conv_states")
                gated_delta_state.conv_launch(
                    arm_of(s.name),
                    pool,
                    lines,
                    torch.tensor(accepted, dtype=torch.int32),
                    out,
                    width,
                )
            return tuple(watch.reports)

        return own
    lifted = upstream.lift(s.tree, CONV, "causal_conv1d_update", provide={"current_platform": PLATFORM})
    s.hashes["_causal_conv1d_update_kernel"] = upstream.body_hash(
        s.tree, CONV, "_causal_conv1d_update_kernel"
    )
    taken = inspect.signature(lifted.function).parameters

    def released(accepted: list[int]) -> tuple[bounds.Report, ...]:
        pool = torch.rand(1 + requests, length, dim)
        offered = {
            "x": torch.rand(requests * (K + 1), dim),
            "conv_state": pool.transpose(1, 2),
            "weight": torch.rand(dim, width),
            "bias": None,
            "activation": "silu",
            "conv_state_indices": torch.arange(1, 1 + requests, dtype=torch.int32),
            "num_accepted_tokens": torch.tensor(accepted, dtype=torch.int32),
            "query_start_loc": torch.arange(0, requests * (K + 1) + 1, K + 1, dtype=torch.int32),
            "max_query_len": K + 1,
        }
        with bounds.watch() as watch:
            watch.blocks(pool, [-1, *range(requests)], of=bounds.program(0), name="conv_state")
            lifted.function(**{name: value for name, value in offered.items() if name in taken})
        return tuple(watch.reports)

    return released


def _unbounded_accepted(s: Subject) -> Verdict:
    """Counts of 0 and K + 2 beside counts in range, in the recurrent lookup and in the convolution."""
    found: dict[str, tuple[list[int], bounds.Report]] = {}
    for part, launcher in (("recurrent state", _lookup_launcher), ("convolution", _conv_launcher)):
        run = launcher(s)
        if run([1, 2, K + 1]):
            return Verdict.not_judged(
                f"the {part} of {s.name} is reported on counts in range; the probe does not fit it"
            )
        for accepted in ([0, 1, 1], [1, 0, 1], [1, K + 2, 1]):
            reports = run(accepted)
            if reports:
                found.setdefault(part, (accepted, reports[0]))
    if not found:
        return _clean(
            s, f"num_accepted_tokens 0 and {K + 2} beside 1, K = {K}", "every access inside its own row"
        )
    accepted, first = next(iter(found.values()))
    told = [f"{part}: {r.op} of {r.tensor}[{r.index}], there lies {r.lies}" for part, (_, r) in found.items()]
    return _fault(
        s, f"num_accepted_tokens {accepted}, K = {K}", "; ".join(told), f"inside {first.extent}", first.place
    )


def _recovered_token(s: Subject) -> Verdict:
    """Rows of NaN over vocabularies that are not a multiple of the block; needs a GPU."""
    observed = {}
    for vocab in (1000, 151936 + 1, 248320):
        scores = torch.full((1, vocab), float("nan"), device=s.device)
        observed[vocab] = _recover(s, scores)
    witness = f"a row of NaN over {list(observed)} tokens, blocks of 8192"
    outside = {v: t for v, t in observed.items() if not 0 <= t < v}
    if outside:
        return _fault(
            s, witness, f"recovered id by vocabulary: {observed}", "an id below the vocabulary size"
        )
    return _clean(s, witness, f"recovered id by vocabulary: {observed}")


def _recover(s: Subject, scores: torch.Tensor) -> int:
    out = torch.full((1,), POISON, dtype=torch.int32, device=s.device)
    if s.name in ("before", "after"):
        recovered_token.launch(arm_of(s.name), scores, out)
        return int(out[0])
    lifted = upstream.lift(s.tree, REJECTION, "sample_recovered_tokens_kernel")
    s.hashes["sample_recovered_tokens_kernel"] = lifted.body_hash
    vocab = scores.shape[1]
    constants = {"BLOCK_SIZE": 8192, "NO_DRAFT_PROBS": True, "USE_FP64_GUMBEL": False}
    names = inspect.signature(lifted.function.fn).parameters
    lifted.function[(1, 1)](
        out,
        torch.ones(1, dtype=torch.int32, device=s.device),
        torch.zeros(1, dtype=torch.int32, device=s.device),
        None,
        scores,
        torch.rand(1, vocab, device=s.device) + 0.5,
        vocab,
        **{name: value for name, value in constants.items() if name in names},
    )
    return int(out[0])


_JUDGES: dict[str, Callable[[Subject], Verdict]] = {
    "v1-rejected-equals-context": _rejected_equals_context,
    "stale-block-id": _stale_block_id,
    "v2-null-block": _null_block,
    "v2-rejected-context-slots": _rejected_context_slots,
    "v2-past-max-len": _past_max_len,
    "v2-slot-past-max-len": _slot_past_max_len,
    "v2-stale-tail": _stale_tail,
    "gdn-unbounded-accepted": _unbounded_accepted,
    "recovered-token-out-of-vocab": _recovered_token,
}
