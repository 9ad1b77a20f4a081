"""Probes of incident `dflash-oob`; each runs in an isolated process.

A subject becomes one or more `InputKernel`s: a function from a batch to the arrays it writes. This package's arms and
the released V1 and V2 kernels get the same batches, in buffers poisoned with a number that no kernel computes.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from types import SimpleNamespace
from typing import Any, get_args

import torch
import triton

from specmortem import upstream
from specmortem.detect import bounds
from specmortem.incident import probe_of
from specmortem.incidents.dflash_oob import kernels as dflash_inputs
from specmortem.incidents.dflash_oob.kernels import DFlashBatch, DFlashInputs
from specmortem.kernels import Arm, causal_conv_update, gated_delta_state, recovered_token
from specmortem.kernels.released_lookups import PLATFORM, gating_inputs
from specmortem.upstream.vllm_files import CONV, GATING, REJECTION, UTILS, V1, V2, V2_SPECULATOR
from specmortem.verdict import Evidence, Verdict

POISON = -77
BLOCK_SIZE, MAX_MODEL_LEN, K = 4, 64, 3
COLUMNS = MAX_MODEL_LEN // BLOCK_SIZE
STALE_BLOCK = 29
ARMS: Mapping[str, Arm] = {name: name for name in get_args(Arm)}
Reports = tuple[bounds.Report, ...]


@dataclass(frozen=True)
class Written:
    """What a launch wrote, by the names of `DFlashInputs`, and what the detector reported."""

    arrays: Mapping[str, torch.Tensor]
    reports: Reports = ()

    def __getitem__(self, name: str) -> list[int]:
        """An array as a list of integers."""
        return [int(x) for x in self.arrays[name].flatten()]


InputKernel = Callable[[DFlashBatch, int], Written]


@dataclass(frozen=True)
class DFlashSubject:
    """A subject's kernels; `hashes` names the bodies that are judged."""

    name: str
    device: str
    hashes: dict[str, str]
    kernels: dict[str, InputKernel]
    tree: Any = None

    @property
    def arm(self) -> Arm | None:
        """The arm of this package that it names; None for released code."""
        return ARMS.get(self.name)

    @property
    def kernel(self) -> InputKernel:
        """The first of its kernels."""
        return next(iter(self.kernels.values()))

    def lift(self, path: str, name: str, hashed: str, **options: Any) -> Any:
        """A released function; `hashed` is the one whose body is the judged one."""
        lifted = upstream.lift(self.tree, path, name, **options).function
        self.hashes[hashed] = upstream.body_hash(self.tree, path, hashed)
        return lifted


def judge(cause: str, subject: str, device: str = "sim") -> dict[str, Any]:
    """Run the probe of `cause`; a verdict as JSON."""
    probe = probe_of(cause)
    functions = (*probe.functions, *(name for _, name in probe.also))
    try:
        verdict = _JUDGES[cause](subject_of(subject, device, functions))
    except upstream.NotPresentError as error:
        verdict = Verdict.not_judged(str(error), absent=str(error))
    return verdict.as_dict()


def subject_of(name: str, device: str, functions: tuple[str, ...]) -> DFlashSubject:
    """The kernels of a subject that `functions` name.

    Raises upstream.NotPresentError when a released tree lacks one of them.
    """
    where = "cuda" if device == "cuda" else "cpu"
    if arm := ARMS.get(name):
        return DFlashSubject(name, where, {}, {name: _own(arm)})
    subject = DFlashSubject(name, where, {}, {}, upstream.resolve(name))
    if V1 in functions:
        subject.kernels["v1"] = _v1(subject.lift(UTILS, V1, V1))
    if V2 in functions and subject.tree.has(V2_SPECULATOR):
        subject.kernels["v2"] = _v2(subject.lift(V2_SPECULATOR, V2, "_prepare_dflash_inputs_kernel"))
    return subject


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
    table = torch.arange(1, 1 + r * COLUMNS, dtype=torch.int32).reshape(r, COLUMNS)
    for request, row in enumerate(rows or []):
        table[request] = torch.tensor(row + [0] * (COLUMNS - len(row)), dtype=torch.int32)
    return DFlashBatch.of(
        positions,
        table,
        num_rejected=rejected,
        num_blocks=num_blocks,
        next_token_ids=list(range(11, 11 + r)),
        device=device,
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


def _written(b: DFlashBatch, arrays: Mapping[str, torch.Tensor], launch: Callable[[], object]) -> Written:
    """What a launch that writes these arrays wrote; watched, and let through what a GPU would, but on a GPU."""
    if b.target_positions.is_cuda:
        launch()
        return Written(arrays)
    with batch_watch(b, fill=POISON, perform_mapped=True) as watch:
        launch()
    return Written(arrays, tuple(watch.reports))


def _poisoned(b: DFlashBatch, num_reqs: int, padded: int) -> DFlashInputs:
    sizes = (b.target_positions.shape[0], num_reqs, b.num_speculative_tokens, padded)
    return DFlashInputs.empty(*sizes, device=str(b.target_positions.device), poison=POISON)


def _own(arm: Arm) -> InputKernel:
    def run(b: DFlashBatch, padded: int) -> Written:
        out = _poisoned(b, b.num_reqs, padded)
        arrays = {**vars(out), "sample_idx_mapping": torch.full((padded,), -1)}
        return _written(b, arrays, lambda: dflash_inputs.launch(arm, b, out))

    return run


def _v1(kernel: Any) -> InputKernel:
    """The released V1 kernel, launched with the grid and the arguments of `set_inputs_first_pass`."""

    def run(b: DFlashBatch, padded: int) -> Written:
        out = _poisoned(b, b.num_reqs, padded)
        widest = int((b.query_start_loc[1:] - b.query_start_loc[:-1]).max()) + b.num_query_per_req
        block = min(256, triton.next_power_of_2(widest))
        launch = partial(kernel[(b.num_reqs, triton.cdiv(widest, block))], **_v1_arguments(b, out, block))
        return _written(b, vars(out), launch)

    return run


def _v1_arguments(b: DFlashBatch, out: DFlashInputs, block: int) -> dict[str, Any]:
    return {
        "next_token_ids_ptr": b.next_token_ids,
        "target_positions_ptr": b.target_positions,
        "out_input_ids_ptr": out.input_ids,
        "out_context_positions_ptr": out.context_positions,
        "out_query_positions_ptr": out.query_positions,
        "out_context_slot_mapping_ptr": out.context_slot_mapping,
        "out_query_slot_mapping_ptr": out.query_slot_mapping,
        "out_token_indices_ptr": out.sample_indices,
        "block_table_ptr": b.block_table,
        "block_table_stride": b.block_table.stride(0),
        "query_start_loc_ptr": b.query_start_loc,
        "num_rejected_tokens_ptr": b.num_rejected,
        "parallel_drafting_token_id": b.mask_token_id,
        "block_size": b.block_size,
        "num_query_per_req": b.num_query_per_req,
        "num_speculative_tokens": b.num_speculative_tokens,
        "total_input_tokens": b.target_positions.shape[0],
        "BLOCK_SIZE": block,
        "HAS_NUM_REJECTED": True,
    }


def _v2(prepare: Any) -> InputKernel:
    """The released V2 launcher; arguments that a release does not take are left out."""

    def run(b: DFlashBatch, padded: int) -> Written:
        out = _poisoned(b, padded // b.num_query_per_req, padded)
        out = replace(out, sample_indices=out.sample_indices.long())
        samples = {
            "sample_indices": out.sample_indices,
            "sample_pos": out.sample_indices.clone(),
            "sample_idx_mapping": out.sample_indices.int(),
        }
        offered = _v2_batch(b) | _v2_buffers(b, out) | samples
        return _written(b, {**vars(out), **samples}, partial(prepare, **_taken(prepare, offered)))

    return run


def _v2_batch(b: DFlashBatch) -> dict[str, Any]:
    """What a V2 launcher reads of the batch."""
    lengths = b.query_start_loc[1:] - b.query_start_loc[:-1]
    return {
        "input_batch": SimpleNamespace(
            num_reqs=b.num_reqs,
            positions=b.target_positions,
            query_start_loc=b.query_start_loc,
            idx_mapping=torch.arange(b.num_reqs, dtype=torch.int32, device=lengths.device),
            num_scheduled_tokens=lengths.cpu().numpy(),
        ),
        "num_sampled": torch.ones_like(b.num_rejected),
        "num_rejected": b.num_rejected,
        "block_table": b.block_table,
        "block_size": b.block_size,
        "cp_rank": 0,
        "cp_size": 1,
        "cp_interleave": 1,
        "parallel_drafting_token_id": b.mask_token_id,
        "num_query_per_req": b.num_query_per_req,
        "num_speculative_steps": b.num_speculative_tokens,
        "max_model_len": b.max_model_len,
    }


def _v2_buffers(b: DFlashBatch, out: DFlashInputs) -> dict[str, Any]:
    """What it writes, and the state of all requests that the server may hold."""
    max_reqs, padded = out.seq_lens.shape[0], out.input_ids.shape[0]
    floats, longs = torch.zeros_like(out.seq_lens, dtype=torch.float32), torch.zeros_like(out.seq_lens).long()
    return {
        "input_buffers": SimpleNamespace(
            input_ids=out.input_ids,
            positions=out.query_positions,
            query_start_loc=out.seq_lens.new_full((max_reqs + 1,), POISON),
            seq_lens=out.seq_lens,
            is_padding=torch.zeros_like(out.input_ids, dtype=torch.bool),
        ),
        "query_slot_mapping": out.query_slot_mapping,
        "context_positions": out.context_positions,
        "context_slot_mapping": out.context_slot_mapping,
        "last_sampled": torch.nn.functional.pad(b.next_token_ids, (0, max_reqs - b.num_reqs)),
        "next_prefill_tokens": torch.zeros_like(out.seq_lens),
        "temperature": floats,
        "input_temperature": floats.clone(),
        "seeds": longs,
        "input_seeds": longs.clone(),
        "max_num_reqs": max_reqs,
        "max_num_tokens": padded,
    }


def _taken(function: Any, offered: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments that a release's function takes.

    Raises upstream.LiftError when it needs one that is not offered.
    """
    parameters = inspect.signature(function).parameters.values()
    unknown = [p.name for p in parameters if p.name not in offered and p.default is inspect.Parameter.empty]
    if unknown:
        raise upstream.LiftError(f"{function.__name__} needs arguments this probe does not know: {unknown}")
    return {p.name: offered[p.name] for p in parameters if p.name in offered}


def _verdict(
    s: DFlashSubject,
    witness: str,
    observed: object,
    expected: object = "",
    place: str = "",
    reports: Reports = (),
) -> Verdict:
    """A fault where something else was `expected`, or where the detector objects to an access that does no harm."""
    if not expected and reports:
        first = reports[0]
        return _verdict(s, witness, first, f"an access inside {first.extent}", first.place)
    evidence = Evidence(witness, str(observed), str(expected), place, detail={"hashes": s.hashes})
    return Verdict("fault" if expected else "clean", evidence)


def _rejected_equals_context(s: DFlashSubject) -> Verdict:
    """All context rows of a request are rejected: request 0, then request 1."""
    for request, rejected in enumerate(([4, 0], [0, 4])):
        for run in s.kernels.values():
            written = run(batch([[10, 11, 12, 13], [40, 41, 42, 43]], rejected=rejected, device=s.device), 8)
            slots = written["query_slot_mapping"][4 * request : 4 * request + 4]
            if slots != [-1] * 4 or written.reports:
                witness = f"request {request} of 2: 4 context rows, all 4 rejected"
                observed = f"slots {slots}" + "".join(f"; {r}" for r in written.reports[:1])
                expected = "no slot for a request without a valid position"
                return _verdict(s, witness, observed, expected, _place(written.reports))
    witness = "4 context rows, all rejected, in request 0 and in request 1"
    return _verdict(s, witness, f"slots {[-1] * 4}, {[-1] * 4}")


def _place(reports: Reports) -> str:
    return reports[0].place if reports else ""


def _slots_probe(
    s: DFlashSubject,
    b: DFlashBatch,
    witness: str,
    bad: Callable[[int], bool],
    expected: str = "[-1, -1, -1, -1]",
) -> Verdict:
    """Fault when any kernel of the subject gives one of the four queries a slot that is `bad`."""
    observed = {}
    reports: Reports = ()
    for name, run in s.kernels.items():
        written = run(b, 4)
        observed[name] = written["query_slot_mapping"][:4]
        reports += written.reports
        if any(bad(slot) for slot in observed[name]):
            return _verdict(s, witness, f"slots {observed[name]}", expected, _place(written.reports))
    several = len(observed) > 1
    slots = ", ".join(f"{name} {found}" if several else str(found) for name, found in observed.items())
    return _verdict(s, witness, f"slots {slots}", reports=reports)


def _stale_block_id(s: DFlashSubject) -> Verdict:
    """The row ends after 3 blocks; the next column still has a block id of an earlier owner."""
    b = batch([[8, 9, 10, 11]], num_blocks=[3], rows=[[5, 6, 7, STALE_BLOCK]], device=s.device)
    witness = f"3 blocks allocated, column 3 holds the stale id {STALE_BLOCK}, queries at positions 12 to 15"
    stale = range(STALE_BLOCK * BLOCK_SIZE, (STALE_BLOCK + 1) * BLOCK_SIZE)
    return _slots_probe(s, b, witness, lambda slot: slot in stale, "no slot behind the allocated blocks")


def _null_block(s: DFlashSubject) -> Verdict:
    """The column that the queries fall into holds the null block."""
    b = batch([[8, 9, 10, 11]], rows=[[5, 6, 7, 0]], device=s.device)
    witness = "column 3 holds block 0, queries at positions 12 to 15"
    return _slots_probe(s, b, witness, lambda slot: 0 <= slot < BLOCK_SIZE)


def _rejected_context_slots(s: DFlashSubject) -> Verdict:
    """Two of four context rows are rejected."""
    b = batch([[10, 11, 12, 13]], rejected=[2], rows=[[1, 2, 7, 8, 9]], device=s.device)
    written = s.kernel(b, 4)
    slots, right = written["context_slot_mapping"], [30, 31, -1, -1]
    witness = "4 context rows at positions 10 to 13, the last 2 rejected"
    return _verdict(s, witness, f"slots {slots}", "" if slots == right else right, reports=written.reports)


def _near_end(device: str) -> tuple[str, DFlashBatch]:
    last = MAX_MODEL_LEN - 1
    witness = f"max_model_len {MAX_MODEL_LEN}, context up to position {last}, {K + 1} queries behind it"
    return witness, batch([[last - 3, last - 2, last - 1, last]], device=device)


def _past_max_len(s: DFlashSubject) -> Verdict:
    """A request that fills max_model_len drafts on."""
    witness, b = _near_end(s.device)
    written = s.kernel(b, 4)
    positions, seq_len = written["query_positions"][:4], written["seq_lens"][0]
    observed = f"positions {positions}, seq_len {seq_len}"
    past = max(positions) >= MAX_MODEL_LEN or seq_len > MAX_MODEL_LEN
    expected = f"positions below {MAX_MODEL_LEN}, seq_len at most {MAX_MODEL_LEN}"
    return _verdict(s, witness, observed, expected if past else "", reports=written.reports)


def _slot_past_max_len(s: DFlashSubject) -> Verdict:
    """As above; a token that has no place must not get the slot of one that has: the last block's, of 60 to 63."""
    witness, b = _near_end(s.device)
    return _slots_probe(s, b, witness, lambda slot: slot >= 0)


def _stale_tail(s: DFlashSubject) -> Verdict:
    """Two requests in buffers for four: what does a graph replayed at the padded size find in the rest?"""
    written = s.kernel(batch([[8, 9, 10, 11], [12, 13, 14, 15]], device=s.device), 16)
    tail = written["query_slot_mapping"][8:16]
    samples = written["sample_idx_mapping"][2 * K : 4 * K]
    untouched = [name for name in ("input_ids", "query_positions") if POISON in written[name][8:16]]
    observed = f"slots {tail}, sample_idx_mapping {samples}, not written: {', '.join(untouched) or 'nothing'}"
    stale = any(x != -1 for x in tail) or any(x >= 0 for x in samples)
    expected = "padded rows have slot -1 and no sample row of a live request" if stale else ""
    return _verdict(s, "2 requests, buffers padded for 4", observed, expected, reports=written.reports)


Lookup = Callable[[list[int]], Reports]  # accepted counts of three requests, K = 3


def _counts(accepted: list[int]) -> torch.Tensor:
    return torch.tensor(accepted, dtype=torch.int32)


def _state_lookup(s: DFlashSubject) -> Lookup:
    """The recurrent lookup of a subject, watched."""
    if s.arm is not None:
        return partial(_states_watched, "state_indices", 0, partial(_own_states, s.arm))
    name = "fused_sigmoid_gating_delta_rule_update"
    update = s.lift(s.tree.first(list(GATING)), name, f"{name}_kernel")
    return partial(_states_watched, "ssm_state_indices", 2, update)


def _states_watched(name: str, axis: int, launch: Callable[..., object], accepted: list[int]) -> Reports:
    """A launch whose program `axis` tells the request, each of which has a row of state slots."""
    inputs = gating_inputs(3, K + 1)
    with bounds.watch() as watch:
        watch.rows(inputs["ssm_state_indices"], of=bounds.program(axis), name=name)
        launch(**inputs, num_accepted_tokens=_counts(accepted))
    return tuple(watch.reports)


def _own_states(arm: Arm, **inputs: torch.Tensor) -> None:
    q, k, v = (inputs[name].reshape(3, K + 1, -1).contiguous() for name in "qkv")
    gate, beta = -inputs["a"].reshape(3, K + 1), inputs["b"].reshape(3, K + 1)
    states, out = inputs["initial_state"].squeeze(1).contiguous(), torch.zeros_like(q)
    indices, accepted = inputs["ssm_state_indices"], inputs["num_accepted_tokens"]
    gated_delta_state.launch(arm, q, k, v, gate, beta, out, states, indices, accepted)


WIDTH, CHANNELS = 4, 8


def _conv_lookup(s: DFlashSubject) -> Lookup:
    """The convolution window of a subject, watched."""
    if s.arm is not None:
        return partial(_conv_watched, "conv_states", partial(_own_conv, s.arm))
    options = {"provide": {"current_platform": PLATFORM}}
    update = s.lift(CONV, "causal_conv1d_update", "_causal_conv1d_update_kernel", **options)
    return partial(_conv_watched, "conv_state", partial(_released_conv, update))


def _conv_watched(
    name: str, launch: Callable[[torch.Tensor, torch.Tensor], None], accepted: list[int]
) -> Reports:
    """A launch over a pool in which line 1 + n is request n's."""
    pool = torch.rand(4, WIDTH - 1 + K, CHANNELS)
    with bounds.watch() as watch:
        watch.blocks(pool, [-1, 0, 1, 2], of=bounds.program(0), name=name)
        launch(pool, _counts(accepted))
    return tuple(watch.reports)


def _own_conv(arm: Arm, pool: torch.Tensor, accepted: torch.Tensor) -> None:
    x, weight = torch.rand(3, K + 1, CHANNELS), torch.rand(WIDTH, CHANNELS)
    causal_conv_update.launch(arm, x, weight, pool, _counts([1, 2, 3]), accepted, torch.zeros_like(x))


def _released_conv(update: Any, pool: torch.Tensor, accepted: torch.Tensor) -> None:
    offered = {
        "x": torch.rand(3 * (K + 1), CHANNELS),
        "conv_state": pool.transpose(1, 2),
        "weight": torch.rand(CHANNELS, WIDTH),
        "bias": None,
        "activation": "silu",
        "conv_state_indices": _counts([1, 2, 3]),
        "num_accepted_tokens": accepted,
        "query_start_loc": torch.arange(0, 3 * (K + 1) + 1, K + 1, dtype=torch.int32),
        "max_query_len": K + 1,
    }
    update(**_taken(update, offered))


def _unbounded_accepted(s: DFlashSubject) -> Verdict:
    """Counts of 0 and K + 2 beside counts in range, in the recurrent lookup and in the convolution."""
    found: dict[str, tuple[list[int], bounds.Report]] = {}
    for part, lookup in (("recurrent state", _state_lookup(s)), ("convolution", _conv_lookup(s))):
        if lookup([1, 2, K + 1]):
            return Verdict.not_judged(
                f"the {part} of {s.name} is reported on counts in range; the probe does not fit it"
            )
        for accepted in ([0, 1, 1], [1, 0, 1], [1, K + 2, 1]):
            if reports := lookup(accepted):
                found.setdefault(part, (accepted, reports[0]))
    if not found:
        witness = f"num_accepted_tokens 0 and {K + 2} beside 1, K = {K}"
        return _verdict(s, witness, "every access inside its own row")
    accepted, first = next(iter(found.values()))
    parts = [
        f"{part}: {r.op} of {r.tensor}[{r.index}], there lies {r.lies}" for part, (_, r) in found.items()
    ]
    witness = f"num_accepted_tokens {accepted}, K = {K}"
    return _verdict(s, witness, "; ".join(parts), f"inside {first.extent}", first.place)


def _recovered_token(s: DFlashSubject) -> Verdict:
    """Rows of NaN over vocabularies that are not a multiple of the block; needs a GPU."""
    vocabularies = (1000, 151936 + 1, 248320)
    ids = {v: _recover(s, torch.full((1, v), float("nan"), device=s.device)) for v in vocabularies}
    witness = f"a row of NaN over {list(ids)} tokens, blocks of 8192"
    outside = any(not 0 <= token < vocab for vocab, token in ids.items())
    expected = "an id below the vocabulary size" if outside else ""
    return _verdict(s, witness, f"recovered id by vocabulary: {ids}", expected)


def _recover(s: DFlashSubject, scores: torch.Tensor) -> int:
    out = torch.full((1,), POISON, dtype=torch.int32, device=s.device)
    if s.arm is not None:
        recovered_token.launch(s.arm, scores, out)
        return int(out[0])
    name, vocab, one = "sample_recovered_tokens_kernel", scores.shape[1], torch.ones_like(out)
    kernel = s.lift(REJECTION, name, name)
    constants = {"BLOCK_SIZE": 8192, "NO_DRAFT_PROBS": True, "USE_FP64_GUMBEL": False}
    taken = {key: value for key, value in constants.items() if key in inspect.signature(kernel.fn).parameters}
    noise = torch.rand(1, vocab, device=s.device) + 0.5
    kernel[(1, 1)](out, one, torch.zeros_like(one), None, scores, noise, vocab, **taken)
    return int(out[0])


_JUDGES: dict[str, Callable[[DFlashSubject], Verdict]] = {
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
