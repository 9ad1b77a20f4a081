"""The step of one rank, in the order of the engine.

1. Consume the sampled output that is due: accepted counts, then the copies that align a state with its block's end.
2. Free what left, place what came, append block ids, gather the batch's table.
3. Bookkeeping of columns, and the copies to a new running block.
4. The forward.
5. Hand on where this step's output will be found: the last rank consumes it at once, any other pp_size steps later.

Between 5 and the 1 that belongs to it, other batches were gathered; `fix` says what the copies read then.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Generic, Literal, NamedTuple, Protocol, TypeVar

import torch

from specmortem.device import Device
from specmortem.incidents.pp_align_copy import kernels as align_copy
from specmortem.incidents.pp_align_copy.engine.block_tables import BlockTables, RequestSlots, Ticket, poison
from specmortem.incidents.pp_align_copy.engine.scheduler import Batch, BatchRow, EngineConfig
from specmortem.incidents.pp_align_copy.fix import lookup_of
from specmortem.incidents.pp_align_copy.kernels import (
    AFTER,
    AlignCounters,
    AlignStates,
    Guards,
    RecurrentState,
    StateCopy,
)
from specmortem.kernels import Backend

T = TypeVar("T")
Copies = Backend
Damage = Literal["live-neighbour", "other-block", "stale-tail"]


class Ring(Generic[T]):
    """Outputs under way: what is pushed at step t is popped at the start of step t + size; None before that."""

    def __init__(self, size: int) -> None:
        self._entries: deque[T | None] = deque([None] * size)

    def pop(self) -> T | None:
        """The entry of `size` steps ago."""
        return self._entries.popleft()

    def push(self, entry: T) -> None:
        """The entry of this step."""
        self._entries.append(entry)


class Layout(NamedTuple):
    """Where the forward of a batch finds states: row b of `table` belongs to req_idxs[b]."""

    table: torch.Tensor  # int32 [rows, columns]
    req_idxs: torch.Tensor  # int64 [rows]
    counters: AlignCounters


class Model(Protocol):
    """The layers of one rank."""

    states: list[RecurrentState]

    def forward(self, batch: Batch, layout: Layout, hidden: torch.Tensor | None) -> torch.Tensor | None:
        """Advance the states by a batch; `hidden` comes from the rank before and goes to the next."""


class Graphs(Protocol):
    """Captured forwards; `padded` says how many rows the graph for a batch has, 0: none."""

    def padded(self, batch: Batch) -> int: ...  # noqa: D102

    def run(self, batch: Batch, req_idxs: Sequence[int], hidden: torch.Tensor | None) -> torch.Tensor: ...  # noqa: D102


@dataclass(frozen=True)
class Copied:
    """A copy that a rank made for a request, before (`pre`) or after (`post`) a forward.

    A wrong one touched a block outside its request's own row, and did `damage`: the running or speculative state of a
    live request (`victim`), another block of one, or (a stale tail) a block of nobody. `in_place` says that source and
    destination column were one, so that the accepted count went back to 1 for this copy.
    """

    step: int
    rank: int
    when: Literal["pre", "post"]
    request: int
    move: StateCopy
    in_place: bool
    damage: Damage | None = None
    victim: int | None = None


class _Pending(NamedTuple):
    """A step whose sampled counts are under way."""

    rows: tuple[BatchRow, ...]
    tickets: list[Ticket]
    counts: Callable[[], Sequence[int]]


class Worker:
    """One rank. `late` is true for all but the last; `guards` are those of the copy kernels, but for the row."""

    def __init__(
        self,
        device: Device,
        config: EngineConfig,
        model: Model,
        subject: str,
        *,
        rank: int = 0,
        late: bool = True,
        copies: Copies = "plain",
        guards: Guards = AFTER,
    ) -> None:
        self.device, self.config, self.model = device, config, model
        self.rank, self.late, self.copies = rank, late, copies
        self.slots = RequestSlots(config.max_num_seqs)
        self.tables = BlockTables(device, config.max_num_seqs, config.max_blocks)
        self.counters = AlignCounters.empty(config.max_num_seqs + 1, device.torch_device)
        self.counters.state_idx[config.max_num_seqs] = 0
        nobody = torch.empty(0, dtype=torch.int64, device=device.torch_device)
        self.layout = Layout(self.tables.gathered, nobody, self.counters)
        self.graphs: Graphs | None = None
        table, row = lookup_of(subject, self.tables)
        self.guards = replace(guards, row=row)
        self.states = AlignStates([table], model.states)
        self.blocks: dict[int, list[int]] = {}
        self.ring: Ring[_Pending] = Ring(config.pp_size if late else 0)
        self.intended = AlignStates([self.tables.persistent], model.states)
        self.copied: list[Copied] = []
        self.missed = 0
        self.on_leave: Callable[[int], None] = lambda req_id: None
        self._moves: list[StateCopy] = []
        self._wanted: list[StateCopy] = []
        self._hidden: torch.Tensor | None = None

    def num_computed(self, req_id: int) -> int:
        """Tokens of a request whose state is there, those of a step in flight among them."""
        return int(self.counters.num_computed[self.slots.of(req_id)])

    def begin(self, batch: Batch) -> None:
        """Everything before the forward."""
        entry = self.ring.pop() if self.late else None
        if entry is not None:
            self._consume(batch.step, entry)
        self._update(batch)
        if batch.rows:
            self._prepare(batch)

    def forward(self, batch: Batch, hidden: torch.Tensor | None) -> torch.Tensor | None:
        """The layers of this rank over the batch, from a graph where there is one for it."""
        req_idxs = [self.slots.of(row.req_id) for row in batch.rows]
        if self.graphs is not None and self.graphs.padded(batch):
            return self.graphs.run(batch, req_idxs, hidden)
        self.device.launch(self._forward, batch, req_idxs, hidden, name="forward")
        self.device.synchronize()
        return self._hidden

    def _forward(self, batch: Batch, req_idxs: list[int], hidden: torch.Tensor | None) -> None:
        index = torch.tensor(req_idxs, device=self.device.torch_device)
        self._hidden = self.model.forward(batch, self.layout._replace(req_idxs=index), hidden)

    def finish(self, batch: Batch, counts: Callable[[], Sequence[int]]) -> None:
        """Count the step's tokens as computed, and consume the sampled counts now or pp_size steps later."""
        rows = batch.rows
        entry = _Pending(rows, [self.slots.ticket(row.req_id) for row in rows], counts)
        if rows:
            req_idxs = [ticket.req_idx for ticket in entry.tickets]
            computed = [row.num_tokens for row in rows]
            self.device.launch(self._add, self.counters.num_computed, req_idxs, computed, name="advance")
        if self.late:
            self.ring.push(entry)
        else:
            self._consume(batch.step, entry)

    def _add(self, target: torch.Tensor, req_idxs: list[int], values: list[int]) -> None:
        where = target.device
        index = torch.tensor(req_idxs, device=where)
        target.index_add_(0, index, torch.tensor(values, dtype=target.dtype, device=where))

    def _consume(self, step: int, entry: _Pending) -> None:
        """Accepted counts of the rows that still have their request and needed a sample; copies for them."""
        live = [row.samples and self.slots.valid(t) for row, t in zip(entry.rows, entry.tickets, strict=True)]
        if not any(live):
            return
        counts = [max(1, count) for count in entry.counts()]
        req_idxs = [t.req_idx if alive else -1 for alive, t in zip(live, entry.tickets, strict=True)]
        rejected = [
            row.num_tokens - count if row.decode else 0 for row, count in zip(entry.rows, counts, strict=True)
        ]
        self.device.launch(self._postprocess, req_idxs, counts, rejected, name="postprocess")
        self._audit(step, "post")

    def _postprocess(self, req_idxs: list[int], counts: list[int], rejected: list[int]) -> None:
        """Scatter the counts to slots and copy. A batch row of -1 is nobody's."""
        where = self.device.torch_device
        live = [row for row, req_idx in enumerate(req_idxs) if req_idx >= 0]
        owners = [req_idxs[row] for row in live]
        taken = torch.tensor([counts[row] for row in live], dtype=torch.int32, device=where)
        self.counters.num_accepted[torch.tensor(owners, device=where)] = taken
        self._add(self.counters.num_computed, owners, [-rejected[row] for row in live])
        mapping = torch.tensor(req_idxs, dtype=torch.int32, device=where)
        post = (self.counters, mapping, self.config.block_size)
        self._wanted, _ = align_copy.plan_postcopy(self.intended, *post)
        self._moves, resets = align_copy.plan_postcopy(self.states, *post, self.guards.row)
        if self.copies == "plain":
            align_copy.perform(self.states, self._moves)
            self.counters.num_accepted[resets] = 1
        else:
            align_copy.postcopy(self.states, *post, self.guards)

    def _release(self, req_ids: Sequence[int]) -> None:
        """Free what the leaving hold. `on_leave` may look at states while no queued work changes them."""
        if req_ids:
            self.device.synchronize()
        for req_id in req_ids:
            self.on_leave(req_id)
            self.slots.release(req_id)
            del self.blocks[req_id]
        if req_ids:
            self.device.synchronize()

    def _update(self, batch: Batch) -> None:
        self._release(batch.finished_req_ids)
        for req_id in batch.new_req_ids:
            self.tables.clear(self.slots.take(req_id))
            self.blocks[req_id] = []
        if batch.new_req_ids:
            new = [self.slots.of(req_id) for req_id in batch.new_req_ids]
            self.device.launch(self._start, new, name="start")
        for req_id, blocks in batch.blocks.items():
            self.blocks[req_id] += blocks
        if batch.blocks:
            self.tables.append({self.slots.of(req_id): ids for req_id, ids in batch.blocks.items()})
            fresh = [block for ids in batch.blocks.values() for block in ids]
            tensors = [state.tensor for state in self.model.states]
            self.device.launch(poison, tensors, fresh, name="fresh blocks")

    def _start(self, req_idxs: list[int]) -> None:
        """No token computed, no running column, no drafts to accept."""
        self.counters.state_idx[req_idxs] = -1
        self.counters.num_computed[req_idxs] = 0
        self.counters.num_accepted[req_idxs] = 1

    def _prepare(self, batch: Batch) -> None:
        req_idxs = [self.slots.of(row.req_id) for row in batch.rows]
        padded = self.graphs.padded(batch) if self.graphs is not None else 0
        self.tables.gather(req_idxs, padded)
        starts = [0, *itertools.accumulate(row.num_tokens for row in batch.rows)]
        self.device.launch(self._preprocess, req_idxs, starts, name="preprocess")
        self._audit(batch.step, "pre")

    def _preprocess(self, req_idxs: list[int], starts: list[int]) -> None:
        where, size = self.device.torch_device, self.config.block_size
        mapping = torch.tensor(req_idxs, dtype=torch.int32, device=where)
        loc = torch.tensor(starts, dtype=torch.int32, device=where)
        plain = self.copies == "plain"
        bookkeeping = align_copy.reference_preprocess if plain else align_copy.preprocess
        bookkeeping(self.counters, mapping, loc, size)
        self._wanted = align_copy.plan_precopy(self.intended, self.counters, mapping)
        self._moves = align_copy.plan_precopy(self.states, self.counters, mapping, self.guards.row)
        if plain:
            align_copy.perform(self.states, self._moves)
        else:
            align_copy.precopy(self.states, self.counters, mapping, self.guards)

    def _audit(self, step: int, when: Literal["pre", "post"]) -> None:
        """Compare the copies just made with who owns which block, and with those that were wanted."""
        self.device.synchronize()
        made = {replace(move, row=0) for move in self._moves}
        self.missed += sum(replace(move, row=0) not in made for move in self._wanted)
        self.copied += [self._judged(step, when, move) for move in self._moves]

    def _judged(self, step: int, when: Literal["pre", "post"], move: StateCopy) -> Copied:
        req_id = self.slots.holder(move.req_idx)
        assert isinstance(req_id, int), "a copy is for a request that has its slot"
        in_place = when == "post" and move.dst_col == int(self.counters.state_idx[move.req_idx])
        foreign = [b for b in (move.dst_block, move.src_block) if b not in self.blocks[req_id]]
        damage, victim = self._hit(foreign[0]) if foreign else (None, None)
        return Copied(step, self.rank, when, req_id, move, in_place, damage, victim)

    def _hit(self, block: int) -> tuple[Damage, int | None]:
        """What a block holds, and whose it is."""
        victim = next((req_id for req_id, blocks in self.blocks.items() if block in blocks), None)
        if victim is None:
            return "stale-tail", None
        running = int(self.counters.state_idx[self.slots.of(victim)])
        column = self.blocks[victim].index(block)
        return "live-neighbour" if column >= running else "other-block", victim

    @property
    def wrong(self) -> list[Copied]:
        """Copies that touched a block of somebody else or of nobody."""
        return [copied for copied in self.copied if copied.damage is not None]
