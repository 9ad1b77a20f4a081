"""The draft loop of an MTP proposer: one token a pass, and a new plan before every pass but the first.

The order within a pass is that of vLLM's first model runner (vllm/v1/spec_decode/llm_base_proposer.py:682-820
in 0.27.1): positions and sequence lengths move on the GPU, the attention metadata is built, the drafted ids
and hidden states are written to the buffers that the model reads, the model runs, a token is sampled. To
plan, the host needs the sequence lengths. In an ordinary step it reads them from the GPU before the first
plan, which blocks until the stream has drained (vllm/v1/attention/backend.py:513-516), and adds 1 from then
on. In a step without speculative metadata (all requests are new) it knows them and does not block before the
first plan. A build enqueues three things before its plan (flashinfer.py:1265-1289 in 0.28.0): a copy of row
pointers, a kernel that gathers the page ids, and a copy of the lengths of the last pages. So not even the
first plan's copy meets an idle stream. Their host memory is a buffer of its own for every pass here, which
leaves cause `builder-staging-reuse` out.

The host's part of a pass, in each form that is compared, is in `fix`. The model is small: an embedding, split-KV
attention over a paged cache (`kernels`), a head, and a busy wait for what a real forward takes.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from specmortem.device import Device, Graph, HostBuffer, Stream
from specmortem.device.interface import DEFAULT_DURATION_US
from specmortem.errors import BadInputError
from specmortem.incidents.mtp_draft_loop import kernels
from specmortem.incidents.mtp_draft_loop.kernels import Array, Geometry, Plan, Planner
from specmortem.incidents.mtp_draft_loop.launches import plainly

MAX_BATCH = 64
MAX_TOKENS = 6
TOKEN_SETS = 3
NULL_BLOCK = 0
RANDOM_NUMBERS = 1_000_003  # a prime, so that repeats fall on other heads and slots


class DraftLoop(ABC):
    """What the host's part of a draft pass is made of, and where plans wait for their copy to the GPU.

    A page-locked buffer, a pageable one and an event, one of each for all plans; `block` is the device memory that
    plans are copied to, uint8. `plans[i]` is the plan that pass i of the last step was launched with.
    """

    def __init__(self, device: Device, block: Tensor) -> None:
        self.device, self.block = device, block
        self.stream, self.other = device.stream("main"), device.stream("other")
        self.staging = self.host_memory(block.numel())
        self.pageable = self.host_memory(block.numel(), pinned=False)
        self.copied = device.event("plan copied")
        self.plans: dict[int, Plan] = {}

    def host_memory(self, nbytes: int, pinned: bool = True) -> HostBuffer:
        """New memory for a plan; page-locked memory is not handed out again while a copy reads it."""
        return self.device.host_buffer([nbytes], torch.uint8, pinned, "plan")

    def copy(self, plan: Plan, buffer: HostBuffer) -> None:
        """Enqueue the copy of a plan from host memory to the block."""
        n = plan.nbytes
        self.device.copy_async(self.block[:n], buffer.rows(0, n), self.stream, name="plan copy")

    @abstractmethod
    def next_lengths(self) -> Array:
        """The lengths of this pass as the host counts them, int32 [B]: one more a request than in the pass before.

        Read from the GPU where it knows none.
        """

    @abstractmethod
    def read_lengths(self) -> Array:
        """The lengths of this pass from the GPU, int32 [B]: the host waits until the stream has drained."""

    @abstractmethod
    def plan(self, i: int, lengths: Array, pages: bool = True) -> Plan:
        """The plan of pass `i`; with `pages` the page ids of these lengths are enqueued first, as a build does."""

    @abstractmethod
    def write_inputs(self, stream: Stream | None = None) -> None:
        """Enqueue the two writes that were blamed, ids and hidden states, in the model's stream or another."""

    @abstractmethod
    def forward(self, i: int) -> None:
        """Enqueue the model, attention by the plan of pass `i`, and the next token of each request."""


@dataclass(frozen=True)
class LoopArm:
    """One form of the loop: `draft_pass(loop, i)` is the host's part of pass i, as in `fix`.

    `constant` pads plans as for CUDA graphs, `launch_blocking` is CUDA_LAUNCH_BLOCKING=1.
    """

    name: str
    draft_pass: Callable[[DraftLoop, int], None]
    constant: bool = False
    launch_blocking: bool = False


@dataclass(frozen=True)
class DraftCase:
    """One configuration of the loop and its batch: sequence lengths `lens`, and `num_speculative_tokens` a request.

    Durations of a pass are `forward_us` of busy wait on the GPU and `host_us` of the host's own time; `pages_us` is
    what gathering page ids takes on the simulator's clock. Without `attend` no Triton kernel runs: no attention, and
    an empty launch where page ids are gathered. `metadata` says whether a step has speculative metadata. `launch`
    calls the functions that launch Triton kernels.

    Raises BadInputError outside 1 to 64 requests and 1 to 6 tokens, or for a geometry of another `constant`.
    """

    arm: LoopArm
    lens: tuple[int, ...]
    num_speculative_tokens: int
    geometry: Geometry
    max_model_len: int
    seed: int = 0
    metadata: bool = True
    forward_us: float = 0.0
    host_us: float = 0.0
    pages_us: float = DEFAULT_DURATION_US
    vocab: int = 64
    plan_capacity: int = 1 << 16
    float_workspace: int = 1 << 16
    load_tokens: int = 32
    load_rows: int = 8
    attend: bool = True
    graphs: bool = False
    observe: bool = False
    launch: Callable[..., None] = plainly

    def __post_init__(self) -> None:
        """Refuse what is outside the study."""
        if not 1 <= self.batch <= MAX_BATCH:
            raise BadInputError(f"batch {self.batch}: give 1 to {MAX_BATCH} requests")
        if not 1 <= self.num_speculative_tokens <= MAX_TOKENS:
            raise BadInputError(f"{self.num_speculative_tokens} speculative tokens: give 1 to {MAX_TOKENS}")
        if self.geometry.constant != self.arm.constant:
            raise BadInputError(
                f"arm {self.arm.name!r} needs a geometry with constant={self.arm.constant}; replace() it"
            )

    @property
    def batch(self) -> int:
        """Requests."""
        return len(self.lens)

    @property
    def num_columns(self) -> int:
        """Columns of a block table row."""
        return -(-self.max_model_len // self.geometry.page_size)

    @property
    def known_lengths(self) -> npt.NDArray[np.int32] | None:
        """The host's lengths in a step without speculative metadata."""
        return None if self.metadata else np.array(self.lens, dtype=np.int32)

    def tokens(self) -> npt.NDArray[np.int64]:
        """The target's last tokens, by step: int64 [TOKEN_SETS, B]."""
        rng = np.random.default_rng(self.seed + 1)
        return rng.integers(0, self.vocab, size=(TOKEN_SETS, self.batch))


class Buffers:
    """All device memory of a proposer. B requests, K tokens, H query heads, D head size."""

    def __init__(self, device: Device, case: DraftCase) -> None:
        b, k, g = case.batch, case.num_speculative_tokens, case.geometry
        width = g.num_qo_heads * g.head_dim
        rng = np.random.default_rng(case.seed)
        num_slots = (1 + b * case.num_columns) * g.page_size

        def random(*shape: int) -> Tensor:
            numbers = rng.standard_normal(min(math.prod(shape), RANDOM_NUMBERS), dtype=np.float32)
            return device.tensor(np.resize(numbers, shape))

        f32, i32, i64, u8 = torch.float32, torch.int32, torch.int64, torch.uint8
        self.embedding = random(case.vocab, width)
        self.head = random(width, case.vocab)
        self.kv = random(num_slots, 2, g.num_kv_heads, g.head_dim)
        blocks = np.arange(1, 1 + b * case.num_columns, dtype=np.int32)
        self.block_table = device.tensor(rng.permutation(blocks).reshape(b, -1), name="block_table")
        self.row_pointers = device.zeros([b + 1], i32, "row_pointers")
        self.page_indices = device.zeros([b * (case.num_columns + 1)], i32, "page_indices")
        self.last_pages = device.zeros([b], i32, "last_pages")
        self.positions = device.zeros([b], i64, "positions")
        self.seq_lens = device.zeros([b], i32, "seq_lens")
        self.slot_mapping = device.zeros([b], i64, "slot mapping")
        self.input_ids = device.zeros([b], i64, "input_ids")
        self.hidden_states = device.zeros([b, width], f32, "hidden_states")
        self.q = device.zeros([b, g.num_qo_heads, g.head_dim], f32, "q")
        self.out = device.zeros([b, g.num_qo_heads, g.head_dim], f32, "out")
        self.next_ids = device.zeros([b], i64, "next_ids")
        self.next_hidden = device.zeros([b, width], f32, "next_hidden")
        self.ints = device.zeros([case.plan_capacity], u8, "int workspace")
        self.floats = device.zeros([case.float_workspace // 4], f32, "float workspace")
        self.draft_token_ids = device.zeros([k, b], i64, "draft token ids")
        self.attention = device.zeros([k, b, width], f32, "attention")
        self.seen_ids = device.zeros([k, b], i64, "seen ids")
        self.seen_plans = device.zeros([k, case.plan_capacity if case.observe else 0], u8, "seen plans")


class MtpProposer(DraftLoop):
    """Drafts K tokens a request, in one arm."""

    def __init__(self, device: Device, case: DraftCase) -> None:
        self.case, self.buffers = case, Buffers(device, case)
        super().__init__(device, self.buffers.ints)
        self.planner = Planner(case.geometry)
        self.host_lengths = device.host_buffer([case.batch], torch.int32, pinned=False, name="seq_lens")
        self.page_staging = [self._page_staging() for _ in range(case.num_speculative_tokens - 1)]
        self._lengths: Array | None = None
        self._graphs: dict[str, Graph] = {}
        if case.graphs:
            self._capture()

    def propose(
        self,
        token_ids: Tensor,
        lengths: Tensor,
        known_lengths: npt.NDArray[np.int32] | None = None,
    ) -> None:
        """Enqueue one drafting step; nothing is waited for but what the arm waits for.

        `token_ids` int64 [B] and `lengths` int32 [B] are on the device: the target's last token of each
        request and its sequence length with it. `known_lengths` is the host's copy in a step without
        speculative metadata, else None.
        """
        b, c = self.buffers, self.case
        moved = (b.positions, b.seq_lens, b.slot_mapping)
        self._lengths = None if known_lengths is None else known_lengths.astype(np.int32)
        self._first_pass(token_ids, lengths)
        for i in range(1, c.num_speculative_tokens):
            self._launch("advance", _advance, (b.block_table,), moved, c.max_model_len, c.geometry.page_size)
            c.arm.draft_pass(self, i)
            if c.host_us:
                self.device.host_time(c.host_us)

    def _first_pass(self, token_ids: Tensor, lengths: Tensor) -> None:
        """The pass over the target's tokens; it has a wrapper of its own, so here it is the head alone."""
        b = self.buffers
        reads, writes = (token_ids, lengths, b.embedding), (b.positions, b.seq_lens, b.out)
        self._launch("first pass", _first, reads, writes)
        self._run("sample", self._sample)
        self._launch("keep drafts", _keep, (b.next_ids,), (b.draft_token_ids[0],))

    def next_lengths(self) -> Array:
        if self._lengths is None:
            return self.read_lengths()
        self._lengths = self._lengths + 1
        return self._lengths

    def read_lengths(self) -> Array:
        """The blocking read: into pageable memory, so the call returns when the stream has drained."""
        self.device.copy_async(self.host_lengths, self.buffers.seq_lens, self.stream, name="seq_lens to host")
        lengths: Array = self.host_lengths[:]
        self._lengths = lengths
        return lengths

    def plan(self, i: int, lengths: Array, pages: bool = True) -> Plan:
        if pages:
            self._send_pages(i, lengths)
        self.plans[i] = self.planner.plan(lengths)
        return self.plans[i]

    def _page_staging(self) -> tuple[HostBuffer, HostBuffer]:
        """Page-locked memory of one pass: row pointers, and lengths of last pages."""
        b = self.case.batch
        pointers = self.device.host_buffer([b + 1], torch.int32, name="row pointers")
        return pointers, self.device.host_buffer([b], torch.int32, name="last pages")

    def _send_pages(self, i: int, lengths: npt.NDArray[np.int32]) -> None:
        """What stands in the stream between the lengths and the plan of a build."""
        b, c = self.buffers, self.case
        size = c.geometry.page_size
        pages = -(-lengths // size)
        pointers, last = self.page_staging[i - 1]
        pointers[1:] = np.cumsum(pages)
        self.device.copy_async(b.row_pointers, pointers, self.stream, name="row pointers copy")
        self.device.launch(
            c.launch,
            kernels.gather_pages if c.attend else _gather_nothing,
            *(b.block_table, b.row_pointers, b.page_indices),
            stream=self.stream,
            reads=(b.block_table, b.row_pointers),
            writes=(b.page_indices,),
            name="gather pages",
            duration_us=c.pages_us,
        )
        last[:] = lengths - size * np.maximum(pages - 1, 0)
        self.device.copy_async(b.last_pages, last, self.stream, name="last pages copy")

    def write_inputs(self, stream: Stream | None = None) -> None:
        b = self.buffers
        self._launch("write input_ids", _keep, (b.next_ids,), (b.input_ids,), stream=stream)
        self._launch("write hidden_states", _keep, (b.next_hidden,), (b.hidden_states,), stream=stream)

    def forward(self, i: int) -> None:
        b, c = self.buffers, self.case
        self._run("model", self._model)
        self.device.spin(c.forward_us, self.stream)
        if c.observe:
            self._launch("observe plan", _keep, (b.ints,), (b.seen_plans[i],))
            self._launch("observe input_ids", _keep, (b.input_ids,), (b.seen_ids[i],))
        if c.attend:
            self.attend(self.plans[i])
        self._run("sample", self._sample)
        reads, writes = (b.next_ids, b.out.view(c.batch, -1)), (b.draft_token_ids[i], b.attention[i])
        self._launch("keep results", _keep_two, reads, writes)

    def attend(self, plan: Plan) -> None:
        """Enqueue attention with the launch arguments of a plan; what it computes is what the int workspace says."""
        b, c = self.buffers, self.case
        inputs = (b.q, b.kv, b.block_table, b.seq_lens)
        self.device.launch(
            c.launch,
            kernels.partial,
            *(plan, *inputs, b.ints, b.floats, b.out, c.load_tokens),
            stream=self.stream,
            reads=(*inputs, b.ints),
            writes=(b.floats, b.out),
            name="partial attention",
        )
        if plan.split:
            self.device.launch(
                c.launch,
                kernels.merge,
                *(plan, b.ints, b.floats, b.out, c.load_rows),
                stream=self.stream,
                reads=(b.ints, b.floats),
                writes=(b.out,),
                name="merge",
            )

    def _model(self) -> None:
        """Queries, keys and values of the drafted tokens, and NaN where attention is to write."""
        b = self.buffers
        reads = (b.input_ids, b.hidden_states, b.embedding, b.slot_mapping, b.positions)
        self._launch("model", _embed, reads, (b.q, b.kv, b.out))

    def _sample(self) -> None:
        """The next hidden states and the most likely token of each."""
        b = self.buffers
        self._launch("sample", _argmax, (b.out, b.head), (b.next_hidden, b.next_ids))

    def _capture(self) -> None:
        """Capture what stays the same in every pass; attention's offsets change, so it stays outside."""
        for name, piece in (("model", self._model), ("sample", self._sample)):
            piece()
            self.stream.synchronize()
            with self.device.capture(self.stream, name) as graph:
                piece()
            self._graphs[name] = graph

    def _run(self, name: str, piece: Callable[[], None]) -> None:
        if name in self._graphs:
            self._graphs[name].replay(self.stream)
        else:
            piece()

    def _launch(
        self,
        name: str,
        fn: Callable[..., None],
        reads: tuple[Tensor, ...],
        writes: tuple[Tensor, ...],
        *scalars: Any,
        stream: Stream | None = None,
    ) -> None:
        """Enqueue `fn(*reads, *writes, *scalars)`; what is written may be read too."""
        both = reads + writes
        self.device.launch(
            fn, *both, *scalars, stream=stream or self.stream, reads=both, writes=writes, name=name
        )


def _gather_nothing(block_table: Tensor, row_pointers: Tensor, page_indices: Tensor) -> None:
    """In place of `kernels.gather_pages`."""


def _first(
    token_ids: Tensor, lengths: Tensor, embedding: Tensor, positions: Tensor, seq_lens: Tensor, out: Tensor
) -> None:
    seq_lens.copy_(lengths)
    positions.copy_(lengths - 1)
    out.copy_(embedding[token_ids].view_as(out))


def _keep(source: Tensor, target: Tensor) -> None:
    target.copy_(source)


def _keep_two(one: Tensor, two: Tensor, to_one: Tensor, to_two: Tensor) -> None:
    to_one.copy_(one)
    to_two.copy_(two)


def _advance(
    block_table: Tensor,
    positions: Tensor,
    seq_lens: Tensor,
    slot_mapping: Tensor,
    max_model_len: int,
    page_size: int,
) -> None:
    """One token on; at max_model_len: position 0, length 1 and a slot of the null block."""
    positions.add_(1)
    seq_lens.add_(1)
    over = positions >= max_model_len
    positions.masked_fill_(over, 0)
    seq_lens.masked_fill_(over, 1)
    blocks = block_table.gather(1, (positions // page_size)[:, None])[:, 0]
    slot_mapping.copy_((blocks * page_size + positions % page_size).masked_fill(over, NULL_BLOCK))


def _embed(
    input_ids: Tensor,
    hidden_states: Tensor,
    embedding: Tensor,
    slot_mapping: Tensor,
    positions: Tensor,
    q: Tensor,
    kv: Tensor,
    out: Tensor,
) -> None:
    out.fill_(float("nan"))
    rows = embedding[input_ids]
    q.copy_((rows + 0.5 * hidden_states).view_as(q))
    width = kv.shape[2] * kv.shape[3]
    keys = rows[:, :width] + 0.001 * positions[:, None]
    kv[slot_mapping] = torch.stack([keys, rows[:, -width:]], dim=1).view(-1, *kv.shape[1:])


def _argmax(out: Tensor, head: Tensor, next_hidden: Tensor, next_ids: Tensor) -> None:
    hidden = out.view_as(next_hidden)
    next_ids.copy_((hidden @ head).argmax(dim=1))
    next_hidden.copy_(hidden)
