"""The step of one rank, in the order of the engine.

1. Consume the sampled output that is due: accepted counts, then the copies that align a state with its block's end.
2. Free what left, place what came, append block ids, gather the batch's table.
3. Bookkeeping of columns, and the copies to a new running block.
4. The layers.
5. Hand on where this step's output will be found: the last rank consumes it at once, any other pp_size steps later.

Between 5 and the 1 that belongs to it, other batches were gathered; `fix` says what the copies read then.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol

import torch

from specmortem.device import Device
from specmortem.incidents.pp_align_copy import kernels as align_copy
from specmortem.incidents.pp_align_copy.engine.block_tables import BlockTables, RequestSlots, Ticket, poison
from specmortem.incidents.pp_align_copy.engine.scheduler import Batch, BatchRow, EngineConfig, Sampled
from specmortem.incidents.pp_align_copy.fix import after, lookup_of
from specmortem.incidents.pp_align_copy.kernels import (
    AFTER,
    AlignCounters,
    AlignStates,
    Guards,
    RecurrentState,
    StateCopy,
)
from specmortem.kernels import Backend

if TYPE_CHECKING:
    from specmortem.incidents.pp_align_copy.engine.decode_graphs import DecodeGraphs

Copies = Backend
Damage = Literal["live-neighbour", "other-block", "stale-tail"]
When = Literal["pre", "post"]


class Layout(NamedTuple):
    """Where the forward of a batch finds states: row b of `table` belongs to req_idxs[b]."""

    table: torch.Tensor  # int32 [rows, columns]
    req_idxs: torch.Tensor  # int32 or int64 [rows]
    counters: AlignCounters


class Model(Protocol):
    """The layers of one rank."""

    states: list[RecurrentState]

    def forward(self, batch: Batch, layout: Layout, hidden: torch.Tensor | None) -> torch.Tensor | None:
        """Advance the states by a batch; `hidden` comes from the rank before and goes to the next."""


@dataclass(frozen=True)
class Copied:
    """A copy that a rank made for a request, before (`pre`) or after (`post`) a forward.

    A wrong one touched a block outside its request's own row, and did `damage`: the running or speculative state of a
    live request (`victim`), another block of one, or (a stale tail) a block of nobody. `in_place` says that source and
    destination column were one, so that the accepted count went back to 1 for this copy.
    """

    step: int
    rank: int
    when: When
    request: int
    move: StateCopy
    in_place: bool
    damage: Damage | None = None
    victim: int | None = None


class _Pending(NamedTuple):
    """A step whose sampled tokens are under way."""

    rows: tuple[BatchRow, ...]
    tickets: list[Ticket]
    sampled: Sampled


class Worker:
    """One rank; all but the last are `late`. `guards` are those of the copy kernels, but for the row."""

    def __init__(
        self,
        device: Device,
        config: EngineConfig,
        model: Model,
        subject: str,
        *,
        rank: int = 0,
        copies: Copies = "plain",
        guards: Guards = AFTER,
    ) -> None:
        self.device, self.config, self.model = device, config, model
        self.rank, self.late, self.copies = rank, rank < config.pp_size - 1, copies
        self.slots = RequestSlots(config.max_num_seqs)
        self.tables = BlockTables(device, config.max_num_seqs, config.max_blocks)
        self.counters = AlignCounters.empty(config.max_num_seqs + 1, device.torch_device)
        self.counters.state_idx[config.max_num_seqs] = 0
        self.layout = Layout(self.tables.gathered, self._int32([]), self.counters)
        self.graphs: DecodeGraphs | None = None
        (table, row), right = lookup_of(subject, self.tables), after(self.tables)
        self.guards = replace(guards, row=row)
        self.states = AlignStates([table], model.states)
        is_right = table is right.table and row is right.row
        self.intended = self.states if is_right else AlignStates([right.table], model.states)
        self.blocks: dict[int, list[int]] = {}
        self.copied: list[Copied] = []
        self.missed = 0
        self.on_leave: Callable[[int], None] = lambda req_id: None
        self._due: deque[_Pending | None] = deque(
            [None] * config.pp_size
        )  # of pp_size steps ago, … of the last
        self._moves: list[StateCopy] = []
        self._wanted: list[StateCopy] = []
        self._hidden: torch.Tensor | None = None

    def _int32(self, values: Sequence[int] | Sequence[Sequence[int]]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=self.device.torch_device)

    def num_computed(self, req_id: int) -> int:
        """Tokens of a request whose state is there, those of a step in flight among them."""
        return int(self.counters.num_computed[self.slots.of(req_id)])

    def begin(self, batch: Batch) -> None:
        """Take in what is due, free what left, and note what came."""
        due = self._due.popleft() if self.late else None
        if due is not None:
            self._consume(batch.step, due)
        self._release(batch.finished_req_ids)
        for req_id in batch.new_req_ids:
            self.slots.take(req_id)
            self.blocks[req_id] = []
        for req_id, blocks in batch.blocks.items():
            self.blocks[req_id] += blocks

    def forward(self, batch: Batch, hidden: torch.Tensor | None) -> torch.Tensor | None:
        """The copies before the layers, and the layers of this rank, from a graph where there is one for the batch."""
        new, req_idxs = (
            [self.slots.of(req_id) for req_id in req_ids]
            for req_ids in (batch.new_req_ids, [row.req_id for row in batch.rows])
        )
        grown = {self.slots.of(req_id): blocks for req_id, blocks in batch.blocks.items()}
        placed = (new, grown, req_idxs, [row.num_tokens for row in batch.rows])
        if self.graphs is not None and (padded := self.graphs.padded(batch)):
            self.device.launch(self._prepare, *placed, padded, name="prepare")
            self._hidden = self.graphs.run(batch, req_idxs, hidden)
        else:
            self.device.launch(self._forward, batch, hidden, *placed, name="forward")
            self.device.synchronize()
        self._audit(batch.step, "pre")
        return self._hidden

    def _forward(self, batch: Batch, hidden: torch.Tensor | None, *placed: Any) -> None:
        self._prepare(*placed)
        self._hidden = self.model.forward(batch, self.layout, hidden)

    def finish(self, batch: Batch, sampled: Sampled) -> None:
        """Take in the step's sampled tokens, now or pp_size steps later."""
        entry = _Pending(batch.rows, [self.slots.ticket(row.req_id) for row in batch.rows], sampled)
        if self.late:
            self._due.append(entry)
        else:
            self._consume(batch.step, entry)

    def _consume(self, step: int, entry: _Pending) -> None:
        """Accepted counts of the rows that still have their request and needed a sample; copies for them."""
        live = [row.samples and self.slots.valid(t) for row, t in zip(entry.rows, entry.tickets, strict=True)]
        if not any(live):
            return
        counts = [max(1, len(tokens)) for tokens in entry.sampled()]
        rejected = [
            row.num_tokens - count if row.decode else 0 for row, count in zip(entry.rows, counts, strict=True)
        ]
        req_idxs = [t.req_idx if alive else -1 for alive, t in zip(live, entry.tickets, strict=True)]
        self.device.launch(self._postprocess, req_idxs, counts, rejected, name="postprocess")
        self.device.synchronize()
        self._audit(step, "post")

    def _postprocess(self, req_idxs: list[int], counts: list[int], rejected: list[int]) -> None:
        """Scatter the counts to slots and copy. A batch row of -1 is nobody's."""
        mapping, taken, less = self._int32([req_idxs, counts, rejected]).unbind()
        owners = mapping
        if min(req_idxs) < 0:
            live = mapping >= 0
            owners, taken, less = mapping[live], taken[live], less[live]
        self.counters.num_accepted.index_copy_(0, owners.long(), taken)
        self.counters.num_computed.index_add_(0, owners, less, alpha=-1)
        post = (self.counters, mapping, self.config.block_size)
        self._moves, resets = align_copy.plan_postcopy(self.states, *post, self.guards.row)
        self._wanted = self._moves
        if self.intended is not self.states:
            self._wanted, _ = align_copy.plan_postcopy(self.intended, *post)
        if self.copies == "plain":
            align_copy.perform(self.states, self._moves)
            if resets:
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

    def _prepare(
        self,
        new: list[int],
        grown: dict[int, list[int]],
        req_idxs: list[int],
        lengths: list[int],
        padded: int = 0,
    ) -> None:
        """Place what came, gather the batch's table, and do the bookkeeping and the copies before the forward.

        The `lengths` of the rows count as computed from here on.
        """
        self._start(new)
        self.tables.append(grown)
        if grown:
            poison((state.tensor for state in self.model.states), [*itertools.chain(*grown.values())])
        self.tables.gather(req_idxs, padded)
        mapping, computed = self._int32([req_idxs, lengths]).unbind()
        self.layout = self.layout._replace(req_idxs=mapping)
        self._preprocess(mapping, self._int32([0, *itertools.accumulate(lengths)]))
        self.counters.num_computed.index_add_(0, mapping, computed)

    def _start(self, req_idxs: list[int]) -> None:
        """No block, no token computed, no running column, no drafts to accept."""
        for req_idx in req_idxs:
            self.tables.clear(req_idx)
            self.counters.state_idx[req_idx] = -1
            self.counters.num_computed[req_idx] = 0
            self.counters.num_accepted[req_idx] = 1

    def _preprocess(self, mapping: torch.Tensor, query_start_loc: torch.Tensor) -> None:
        plain, size = self.copies == "plain", self.config.block_size
        bookkeeping = align_copy.reference_preprocess if plain else align_copy.preprocess
        bookkeeping(self.counters, mapping, query_start_loc, size)
        self._moves = align_copy.plan_precopy(self.states, self.counters, mapping, self.guards.row)
        self._wanted = self._moves
        if self.intended is not self.states:
            self._wanted = align_copy.plan_precopy(self.intended, self.counters, mapping)
        if plain:
            align_copy.perform(self.states, self._moves)
        else:
            align_copy.precopy(self.states, self.counters, mapping, self.guards)

    def _audit(self, step: int, when: When) -> None:
        """Compare the copies just made with who owns which block, and with those that were wanted."""
        made = set(self._moves)
        self.missed += sum(move not in made for move in self._wanted)
        self.copied += [self._judged(step, when, move) for move in self._moves]

    def _judged(self, step: int, when: When, move: StateCopy) -> Copied:
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
