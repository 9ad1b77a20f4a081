"""Probes of incident `pp-align-copy`; each runs in an isolated process.

A subject becomes an `AlignWorker`: something that adds requests, prepares a step and takes in what a step sampled, over
the tables and states of a `Rig`. This package's arms, the released state class with its released kernels, and the plain
reference are driven by the same scenario on equal rigs; what the subject's rig holds afterwards is compared with the
reference's. Released code is `MambaHybridModelState` itself, on a stub of its base class: it binds the tables that it
binds in the engine, so that a tree with half of the fix is judged by what it does.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import triton
from triton.runtime import interpreter

from specmortem import upstream
from specmortem.detect import bounds
from specmortem.detect.hooks import Hook, hooked
from specmortem.incidents.pp_align_copy import fix
from specmortem.incidents.pp_align_copy import kernels as align_copy
from specmortem.incidents.pp_align_copy.kernels import (
    AFTER,
    BEFORE,
    AlignCounters,
    AlignStates,
    RecurrentState,
)
from specmortem.upstream.vllm_files import HYBRID, MAMBA, POSTCOPY
from specmortem.verdict import Evidence, Verdict

REAL_MODULES = ("vllm.triton_utils", "vllm.logger", "vllm.v1.worker.mamba_utils")
PRECOPY = "precopy_mamba_align_fused_kernel"
BLOCK_SIZE, K = 8, 2
SLOTS, COLUMNS, BLOCKS = 4, 5, 12
WIDTH, INNER, TEMPORAL, LAYERS = 3 + K, 72, 16, 2
WARP, WARPS = 32, 4
STATE_NAMES = [f"{kind}{layer}" for layer in range(LAYERS) for kind in ("conv", "temporal")]
TRITON = str(Path(triton.__file__).parent)


@dataclass
class Rig:
    """Tables and states of a small worker. Slot s owns the blocks of `rows[s]`; every state block is random."""

    rows: dict[int, list[int]]
    device: str = "cpu"
    columns: int = COLUMNS
    block_size: int = BLOCK_SIZE
    attention_block_size: int = BLOCK_SIZE
    persistent: torch.Tensor = field(init=False)  # int32 [slots, columns]
    gathered: torch.Tensor = field(init=False)  # int32 [slots, columns], row = batch index
    num_computed: torch.Tensor = field(init=False)  # int32 [slots]
    states: list[RecurrentState] = field(init=False)

    def __post_init__(self) -> None:
        """Fill tables and states; equal rigs hold equal numbers."""
        g = torch.Generator().manual_seed(0)
        self.persistent = torch.zeros(SLOTS, self.columns, dtype=torch.int32)
        for slot, blocks in self.rows.items():
            self.persistent[slot, : len(blocks)] = torch.tensor(blocks, dtype=torch.int32)
        self.persistent = self.persistent.to(self.device)
        self.gathered = torch.zeros_like(self.persistent)
        self.num_computed = torch.zeros(SLOTS, dtype=torch.int32, device=self.device)
        self.states = []
        for _ in range(LAYERS):
            conv = torch.rand(BLOCKS, WIDTH, INNER, generator=g).to(self.device)
            temporal = torch.rand(BLOCKS, TEMPORAL, generator=g).to(self.device)
            self.states += [RecurrentState(conv, conv_width=WIDTH), RecurrentState(temporal)]

    def owners(self) -> list[int]:
        """The slot of each block, -1: nobody."""
        owner = {block: slot for slot, blocks in self.rows.items() for block in blocks if block}
        return [owner.get(block, -1) for block in range(BLOCKS)]

    def vector(self, *values: int) -> torch.Tensor:
        """An int32 vector on the rig's device."""
        return torch.tensor(values, dtype=torch.int32, device=self.device)


class OwnCopies:
    """This package's kernels, or with `plain` the reference.

    `state_idx` and `num_accepted`, int32 [slots], are the running column and the accepted count of each slot.
    """

    def __init__(self, rig: Rig, cause: str, arm: str, plain: bool = False) -> None:
        before = arm == "before"
        self.rig, self.plain = rig, plain
        self.guards = BEFORE[cause] if before else AFTER
        self.divisor = rig.attention_block_size if before else rig.block_size
        lookup = fix.before if cause == "batch-row-index" and before else fix.after
        self.states = AlignStates([lookup(rig).table], rig.states)
        self.counters = AlignCounters.empty(SLOTS, rig.device)
        self.counters = AlignCounters(**{**vars(self.counters), "num_computed": rig.num_computed})

        self.state_idx, self.num_accepted = self.counters.state_idx, self.counters.num_accepted

    def add(self, req_idx: int, num_computed: int) -> None:
        """A request starts in a slot."""
        self.state_idx[req_idx] = align_copy.seed_column(num_computed, self.divisor)
        self.num_accepted[req_idx] = 1

    def prepare(self, req_idx: int, num_tokens: int) -> None:
        """Before the forward of a step of one request; the rig has gathered its row."""
        mapping, loc = self.rig.vector(req_idx), self.rig.vector(0, num_tokens)
        if self.plain:
            align_copy.reference_preprocess(self.counters, mapping, loc, self.rig.block_size)
            align_copy.reference_precopy(self.states, self.counters, mapping)
        else:
            align_copy.preprocess(self.counters, mapping, loc, self.rig.block_size)
            align_copy.precopy(self.states, self.counters, mapping, self.guards)

    def consume(self, req_idx: int, sampled: int) -> None:
        """After sampling, perhaps steps later; the rig holds the advanced counts."""
        mapping = self.rig.vector(req_idx)
        self.num_accepted[req_idx] = sampled
        if self.plain:
            align_copy.reference_postcopy(self.states, self.counters, mapping, self.rig.block_size)
        else:
            align_copy.postcopy(self.states, self.counters, mapping, self.rig.block_size, self.guards)

    def addresses(self) -> list[torch.Tensor]:
        """The tensors of addresses that the kernels are given; a table's comes first."""
        return [self.states.descriptors]


class _BaseState:
    """In place of the class that the released state class extends."""

    def __init__(self, vllm_config: Any, model: Any, encoder_cache: Any, device: Any) -> None:
        self.vllm_config, self.model, self.device = vllm_config, model, device
        self.max_num_reqs = SLOTS

    def add_request(self, req_index: int, new_req_data: Any) -> None:
        pass


def get_conv_copy_spec() -> None:
    """Names the copy of a convolution window; never called."""


def get_temporal_copy_spec() -> None:
    """Names the copy of a temporal state; never called."""


def _stand_ins() -> upstream.StandIns:
    """A stand-in for every vLLM name that the two files import from elsewhere: nothing else is read or fetched."""
    return upstream.StandIns(
        {
            "DefaultModelState": _BaseState,
            "get_conv_copy_spec": get_conv_copy_spec,
            "get_temporal_copy_spec": get_temporal_copy_spec,
            "is_conv_state_dim_first": lambda: False,
            "gpu_sync_allowed": nullcontext,
        },
        modules=REAL_MODULES,
    )


class ReleasedState:
    """The state class of a release on its stand-ins, bound to a rig as the model runner binds it.

    It is driven like `OwnCopies`.
    """

    def __init__(self, rig: Rig, given: upstream.StandIns, state_class: Any) -> None:
        self.rig = rig
        spec = given["MambaSpec"](
            block_size=rig.block_size,
            num_speculative_blocks=K,
            mamba_cache_mode="align",
            mamba_type="gdn",
            shapes=((WIDTH, INNER), (TEMPORAL,)),
        )
        layers = [f"layer{i}" for i in range(LAYERS)]
        self.config = SimpleNamespace(
            kv_cache_groups=[SimpleNamespace(layer_names=layers, kv_cache_spec=spec)]
        )
        self.state = state_class(self._vllm_config(layers), self._model(), None, torch.device(rig.device))
        self.state_idx, self.num_accepted = (
            self.state._mamba_state_idx_gpu,
            self.state.num_accepted_tokens_gpu,
        )
        if hasattr(self.state, "initialize_kv_cache"):
            tables = SimpleNamespace(
                block_tables=[SimpleNamespace(gpu=rig.persistent)], input_block_tables=[rig.gathered]
            )
            self.state.initialize_kv_cache(self.config, tables)

    def _vllm_config(self, layers: list[str]) -> SimpleNamespace:
        rig = self.rig
        pairs = [[s.tensor for s in rig.states[2 * i : 2 * i + 2]] for i in range(LAYERS)]
        context = {name: SimpleNamespace(kv_cache=pair) for name, pair in zip(layers, pairs, strict=True)}
        return SimpleNamespace(
            cache_config=SimpleNamespace(
                mamba_cache_mode="align",
                block_size=rig.attention_block_size,
                mamba_block_size=rig.block_size,
                use_kda_recoverssm=False,
            ),
            compilation_config=SimpleNamespace(static_forward_context=context),
            speculative_config=None,
            num_speculative_tokens=K,
        )

    def _model(self) -> SimpleNamespace:
        functions = (get_conv_copy_spec, get_temporal_copy_spec)
        return SimpleNamespace(
            get_mamba_state_copy_func=lambda: functions,
            get_mamba_state_copy_funcs=lambda types: dict.fromkeys(types, functions),
        )

    def add(self, req_idx: int, num_computed: int) -> None:
        self.state.add_request(req_idx, SimpleNamespace(num_computed_tokens=num_computed))

    def prepare(self, req_idx: int, num_tokens: int) -> None:
        rig = self.rig
        batch = SimpleNamespace(
            num_reqs=1, idx_mapping=rig.vector(req_idx), query_start_loc=rig.vector(0, num_tokens)
        )
        self.state.preprocess_state(batch, (rig.gathered[:1],), self.config, rig.num_computed)

    def consume(self, req_idx: int, sampled: int) -> None:
        rig = self.rig
        self.state.postprocess_state(rig.vector(req_idx), rig.vector(sampled), rig.num_computed)

    def addresses(self) -> list[torch.Tensor]:
        context = self.state._mamba_ctx
        return [context.block_table_ptrs, context.state_base_addrs]


AlignWorker = OwnCopies | ReleasedState


@dataclass(frozen=True)
class AlignSubject:
    """A subject, and the hashes of the bodies that are judged."""

    name: str
    device: str
    cause: str
    hashes: dict[str, str]
    tree: upstream.Tree | None = None

    @cached_property
    def released(self) -> tuple[upstream.StandIns, Any]:
        """The state class of the release, after the stand-ins that it was lifted with."""
        assert self.tree is not None, "an arm of this package is not lifted"
        given = _stand_ins()
        return given, upstream.lift(self.tree, HYBRID, "MambaHybridModelState", provide=given).function

    def on(self, rig: Rig) -> AlignWorker:
        """The subject's worker over a rig."""
        return (
            OwnCopies(rig, self.cause, self.name) if self.tree is None else ReleasedState(rig, *self.released)
        )


def judge(cause: str, subject: str, device: str = "sim") -> dict[str, Any]:
    """Run the probe of `cause`; a verdict as JSON."""
    try:
        verdict = _JUDGES[cause](subject_of(cause, subject, device))
    except upstream.NotPresentError as error:
        verdict = Verdict.not_judged(f"the V2 runner has no align copies: {error}", absent=str(error))
    return verdict.as_dict()


def subject_of(cause: str, name: str, device: str) -> AlignSubject:
    """The subject of a name.

    Raises upstream.NotPresentError when a released tree has no align copies in this runner.
    """
    where = "cuda" if device == "cuda" else "cpu"
    if name in ("before", "after"):
        return AlignSubject(name, where, cause, {})
    tree = upstream.resolve(name)
    bodies = {kernel: upstream.body_hash(tree, MAMBA, kernel) for kernel in (PRECOPY, POSTCOPY)}
    return AlignSubject(name, where, cause, bodies, tree)


Scenario = Callable[[Rig, AlignWorker], None]


@dataclass(frozen=True)
class Aftermath:
    """What a scenario left behind on a subject: blocks that differ from the reference's, and counts."""

    wrong: tuple[str, ...]
    accepted: tuple[list[int], list[int]]

    @property
    def is_right(self) -> bool:
        """States and accepted counts are the reference's."""
        return not self.wrong and self.accepted[0] == self.accepted[1]

    def __str__(self) -> str:
        """One line for a table."""
        lines = list(self.wrong)
        if self.accepted[0] != self.accepted[1]:
            lines.append(f"accepted counts {self.accepted[0]} instead of {self.accepted[1]}")
        return "; ".join(lines) or "every block and every count as in the reference"


def run(s: AlignSubject, rows: dict[int, list[int]], scenario: Scenario) -> Aftermath:
    """The scenario on the subject and on the reference, and how the two differ."""
    rig, expected = Rig(rows, s.device), Rig(rows, s.device)
    worker, plain = s.on(rig), OwnCopies(expected, s.cause, "after", plain=True)
    scenario(rig, worker)
    scenario(expected, plain)
    return Aftermath(
        tuple(differences(rig, expected)), (worker.num_accepted.tolist(), plain.num_accepted.tolist())
    )


def differences(rig: Rig, expected: Rig) -> Iterator[str]:
    """Each block that is not as it should be, with its owner."""
    owners = rig.owners()
    for block in range(BLOCKS):
        names = [
            name
            for name, a, b in zip(STATE_NAMES, rig.states, expected.states, strict=True)
            if not torch.equal(a.tensor[block], b.tensor[block])
        ]
        if names:
            owner = f"of slot {owners[block]}" if owners[block] >= 0 else "of nobody"
            yield f"block {block} {owner} wrong in {', '.join(names)}"


def _verdict(
    s: AlignSubject,
    is_right: bool,
    witness: str,
    observed: str,
    expected: str,
    place: str = "",
    **detail: Any,
) -> Verdict:
    detail = {"hashes": s.hashes, **detail}
    if is_right:
        return Verdict("clean", Evidence(witness, observed, detail=detail))
    return Verdict("fault", Evidence(witness, observed, expected, place, detail=detail))


A, B = 3, 2
ROWS = {A: [1, 2, 3, 4, 5], B: [6, 7, 8, 9, 10]}


@contextmanager
def watched(rig: Rig, worker: AlignWorker, req_idx: int) -> Iterator[list[bounds.Report]]:
    """What a detector that knows whose block is whose reports; nothing on a GPU, and nothing of the reference."""
    if rig.device == "cuda" or (isinstance(worker, OwnCopies) and worker.plain):
        yield []
        return
    of = bounds.mapped([req_idx])
    with bounds.watch(perform_mapped=True) as watch:
        watch.rows(rig.persistent, of=of, name="block_table", owner_name="slot")
        watch.rows(rig.gathered, of=bounds.program(0), name="gathered_block_table", owner_name="batch row")
        for name, state in zip(STATE_NAMES, rig.states, strict=True):
            watch.blocks(state.tensor, rig.owners(), of=of, name=name, owner_name="slot")
        for addresses in worker.addresses():
            watch.pointers(addresses, rig.persistent, rig.gathered, *(state.tensor for state in rig.states))
        yield watch.reports


def step(rig: Rig, worker: AlignWorker, req_idx: int, num_tokens: int = 3) -> None:
    """Everything before the forward of a batch with one request."""
    rig.gathered[0] = rig.persistent[req_idx]
    worker.prepare(req_idx, num_tokens)


def _crossing(between: Sequence[int], reports: list[bounds.Report]) -> Scenario:
    """A step of A accepts 2 of 3 tokens over a block boundary; `between` runs before that is consumed."""

    def scenario(rig: Rig, worker: AlignWorker) -> None:
        worker.add(A, 6)
        worker.add(B, 12)
        rig.num_computed[A], rig.num_computed[B] = 6, 12
        for req_idx in (A, *between):
            step(rig, worker, req_idx)
        rig.num_computed[A] = 8
        with watched(rig, worker, A) as found:
            worker.consume(A, 2)
        reports.extend(found)

    return scenario


def _batch_row_index(s: AlignSubject) -> Verdict:
    """The result of a step is consumed after another request's step was gathered into the same row."""
    reports: list[bounds.Report] = []
    at_once = run(s, ROWS, _crossing([], []))
    late = run(s, ROWS, _crossing([B], reports))
    witness = (
        f"slot {A} in batch row 0 accepts 2 of 3 tokens over a boundary of {BLOCK_SIZE}; consumed after slot {B} "
        "was gathered into row 0"
    )
    expected = f"block 1 of slot {A} written, nothing of slot {B}"
    place = reports[0].place if reports else ""
    return _verdict(s, late.is_right, witness, str(late), expected, place, consumed_at_once=str(at_once))


def _inside_one_block(rig: Rig, worker: AlignWorker) -> None:
    """Slot 0 in row 0 accepts 3 of 3 tokens that end on the boundary of its running block."""
    worker.add(0, 5)
    rig.num_computed[0] = 5
    step(rig, worker, 0)
    rig.num_computed[0] = 8
    worker.consume(0, 3)


ONE_ROW = {0: [1, 2, 3, 4, 5]}
INSIDE = f"3 of 3 tokens accepted up to a boundary of {BLOCK_SIZE}: source and destination are one block, shift by 2"


def _accepted_in_place(s: AlignSubject) -> Verdict:
    """The count is reset by the first state's program; the others still need it."""
    end = run(s, ONE_ROW, _inside_one_block)
    witness = f"{INSIDE}, {2 * LAYERS} states"
    return _verdict(s, end.is_right, witness, str(end), "every state is copied")


def _overlapping_shift(s: AlignSubject) -> Verdict:
    """Which lanes load what lanes of another warp store?"""
    rig = Rig(ONE_ROW, s.device)
    worker = s.on(rig)
    with lanes() as log:
        _inside_one_block(rig, worker)
    races = [race for state in rig.states for race in log.races(state.tensor)]
    witness = f"{INSIDE}; {WARPS} warps of {WARP} lanes"
    if not races:
        return _verdict(s, True, witness, f"no such byte in {log.accesses} accesses", "")
    expected = "no byte is loaded by one warp and stored by another without a barrier between"
    return _verdict(s, False, witness, str(races[0]), expected, races[0].place, bytes=len(races))


@dataclass(frozen=True)
class WarpRace:
    """A byte of a block that two warps of one program reach in no order."""

    place: str
    byte: int
    loaded_by: int
    stored_by: int

    def __str__(self) -> str:
        """One line for a table."""
        return f"byte {self.byte} of the state is loaded by warp {self.loaded_by} and stored by warp {self.stored_by}"


class LaneLog:
    """Which lane of which program loaded and stored which bytes, between barriers.

    Lane i belongs to warp i / 32 modulo the number of warps, as a blocked layout of one element a thread has it.
    """

    def __init__(self) -> None:
        self.accesses = 0
        self._phases: list[dict[str, list[tuple[Any, Any, str]]]] = []

    def phase(self) -> None:
        """Another program, or the other side of a barrier: ordered with what comes before, or not compared."""
        self._phases.append({"load": [], "store": []})

    def add(self, kind: str, addresses: Any, mask: Any, size: int, place: str) -> None:
        """One load or store of all lanes."""
        lanes = np.flatnonzero(mask)
        if addresses.size > 1 and lanes.size:
            self.accesses += 1
            at = addresses.ravel()[lanes].astype(np.int64)
            span = (at[:, None] + np.arange(size)).ravel()
            warp = np.repeat(lanes // WARP % WARPS, size)
            self._phases[-1][kind].append((span, warp, place))

    def races(self, tensor: torch.Tensor) -> list[WarpRace]:
        """Bytes of a tensor that one warp loads and another stores in the same phase."""
        low = tensor.data_ptr()
        high = low + tensor.untyped_storage().nbytes()
        found: dict[int, WarpRace] = {}
        for kinds in self._phases:
            loaded = {int(a): int(w) for at, warp, _ in kinds["load"] for a, w in zip(at, warp, strict=True)}
            for at, warp, place in kinds["store"]:
                for address, w in zip(at.tolist(), warp.tolist(), strict=True):
                    if low <= address < high and loaded.get(address, w) != w:
                        found.setdefault(address, WarpRace(place, address - low, loaded[address], w))
        return list(found.values())


@contextmanager
def lanes() -> Iterator[LaneLog]:
    """Log the loads and stores of every kernel that is interpreted inside the block."""
    log = LaneLog()

    def load(original: Hook, builder: Any, ptrs: Any, mask: Any, *rest: Any) -> Any:
        log.add(
            "load", ptrs.data, mask.data, interpreter._get_np_dtype(ptrs.get_element_ty()).itemsize, _place()
        )
        return original(builder, ptrs, mask, *rest)

    def store(original: Hook, builder: Any, ptrs: Any, value: Any, mask: Any, *rest: Any) -> Any:
        log.add(
            "store", ptrs.data, mask.data, interpreter._get_np_dtype(ptrs.get_element_ty()).itemsize, _place()
        )
        return original(builder, ptrs, value, mask, *rest)

    def ordering(original: Hook, *given: Any) -> Any:
        log.phase()
        return original(*given)

    with hooked(
        interpreter.InterpreterBuilder,
        create_masked_load=load,
        create_masked_store=store,
        create_barrier=ordering,
        set_grid_idx=ordering,
    ):
        yield log


def _place() -> str:
    """File and line of the kernel that is interpreted now; called by a hook, which `hooked` calls for Triton."""
    frame = sys._getframe(3)
    while frame.f_back and frame.f_code.co_filename.startswith(TRITON):
        frame = frame.f_back
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"


def _seed_column(s: AlignSubject) -> Verdict:
    """A request that starts with a cached prefix, where the attention blocks are smaller than the state blocks."""
    rig = Rig(ONE_ROW, s.device, columns=123, block_size=4480, attention_block_size=16)
    worker, computed = s.on(rig), 134_400
    rig.num_computed[0] = computed
    rig.gathered[0] = rig.persistent[0]
    worker.add(0, computed)
    column, expected = int(worker.state_idx[0]), align_copy.seed_column(computed, rig.block_size)
    witness = (
        f"{computed} computed tokens, state blocks of {rig.block_size}, attention blocks of 16, 123 columns"
    )
    if column == expected:
        return _verdict(s, True, witness, f"column {column}", "")
    report = _first_report(rig, worker)
    observed = f"column {column}" + (f"; {report}" if report else "")
    place = report.place if report else ""
    return _verdict(s, False, witness, observed, f"column {expected}", place)


def _first_report(rig: Rig, worker: AlignWorker) -> bounds.Report | None:
    """What the detector says of the next step; None on a GPU, where it would be an illegal address."""
    if rig.device == "cuda":
        return None
    step(rig, worker, 1)  # binds the tables and copies nothing
    with watched(rig, worker, 0) as reports:
        step(rig, worker, 0)
    return reports[0] if reports else None


def _null_block(s: AlignSubject) -> Verdict:
    """Column 0 is the null block: once as the source of a precopy, once as the destination of a postcopy."""
    rows = {0: [0, 2, 3, 4, 5]}

    def from_null(rig: Rig, worker: AlignWorker) -> None:
        worker.add(0, 8)
        rig.num_computed[0] = 8
        step(rig, worker, 0)

    def to_null(rig: Rig, worker: AlignWorker) -> None:
        worker.add(0, 9)
        rig.num_computed[0] = 6
        step(rig, worker, 0)
        rig.num_computed[0] = 8
        worker.consume(0, 2)

    source, target = run(s, rows, from_null), run(s, rows, to_null)
    end = Aftermath((*source.wrong, *target.wrong), target.accepted)
    witness = "column 0 of the row holds block 0: as source before the forward, as destination after sampling"
    return _verdict(s, end.is_right, witness, str(end), "no state read from block 0, none written to it")


_JUDGES: dict[str, Callable[[AlignSubject], Verdict]] = {
    "batch-row-index": _batch_row_index,
    "accepted-written-in-place": _accepted_in_place,
    "overlapping-shift": _overlapping_shift,
    "seed-column-divisor": _seed_column,
    "null-block-copied": _null_block,
}
