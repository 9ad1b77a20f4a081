"""What holds a request: its slot, blocks of a paged pool, and the tables that name these blocks by slot and by row.

A block that is handed out holds whatever was there: memory never written, or what an earlier owner left. The worst of
that is NaN, so fresh blocks are poisoned with it and a state that was never saved cannot go unnoticed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import NamedTuple

import torch

from specmortem.device import Device
from specmortem.errors import BadInputError

POISON = float("nan")


class Ticket(NamedTuple):
    """A slot as it was at one time: `generation` counts the requests that had left it before."""

    req_idx: int
    generation: int


class RequestSlots:
    """Slots 0 … num_slots - 1; the highest is taken first, so a slot is no batch row from the first request on."""

    def __init__(self, num_slots: int) -> None:
        self._free = list(range(num_slots))
        self._generations = [0] * num_slots
        self._of: dict[Hashable, int] = {}

    def take(self, req_id: Hashable) -> int:
        """A slot for a request. Raises BadInputError when it has one already or none is free."""
        if req_id in self._of:
            raise BadInputError(f"request {req_id!r} already has slot {self._of[req_id]}; release it first")
        if not self._free:
            raise BadInputError(f"request {req_id!r}: all {len(self._generations)} slots are taken")
        self._of[req_id] = self._free.pop()
        return self._of[req_id]

    def release(self, req_id: Hashable) -> int:
        """Give a request's slot back; tickets for it expire."""
        req_idx = self.of(req_id)
        del self._of[req_id]
        self._free.append(req_idx)
        self._generations[req_idx] += 1
        return req_idx

    def of(self, req_id: Hashable) -> int:
        """The slot of a request. Raises BadInputError when it has none."""
        if req_id not in self._of:
            raise BadInputError(f"request {req_id!r} has no slot; take one first")
        return self._of[req_id]

    def holder(self, req_idx: int) -> Hashable | None:
        """The request in a slot, or None."""
        return next((req_id for req_id, taken in self._of.items() if taken == req_idx), None)

    def ticket(self, req_id: Hashable) -> Ticket:
        """What to remember of a request's slot while its output is under way."""
        req_idx = self.of(req_id)
        return Ticket(req_idx, self._generations[req_idx])

    def valid(self, ticket: Ticket) -> bool:
        """Whether the slot still has the request that it had then."""
        return self._generations[ticket.req_idx] == ticket.generation


class BlockPool:
    """Blocks 1 … num_blocks - 1, handed out in the order in which they became free."""

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 2:
            raise BadInputError(f"num_blocks is {num_blocks}; give at least 2, block 0 is the null block")
        self._free = deque(range(1, num_blocks))
        self._of: dict[Hashable, list[int]] = {}

    @property
    def num_free(self) -> int:
        """Blocks without an owner, the null block not among them."""
        return len(self._free)

    def take(self, owner: Hashable, count: int) -> list[int] | None:
        """`count` blocks that now belong to `owner`, or None when there are not so many."""
        if count > len(self._free):
            return None
        blocks = [self._free.popleft() for _ in range(count)]
        self._of.setdefault(owner, []).extend(blocks)
        return blocks

    def release(self, owner: Hashable) -> list[int]:
        """Free all blocks of an owner."""
        blocks = self._of.pop(owner, [])
        self._free.extend(blocks)
        return blocks

    def blocks_of(self, owner: Hashable) -> Sequence[int]:
        """The blocks of an owner, in the order in which it took them."""
        return self._of.get(owner, ())


def poison(states: Iterable[torch.Tensor], blocks: Sequence[int]) -> None:
    """Fill blocks [block, ...] of every state with NaN."""
    index = torch.tensor(blocks)
    for state in states:
        state.index_fill_(0, index.to(state.device), POISON)


class BlockTables:
    """Persistent and gathered table, int32 [max_num_reqs + 1, max_blocks]; the last row is padding, null blocks.

    The persistent one has a row a request slot. The gathered one is filled for every batch, in batch order, and only as
    far as it must be: a row keeps the tail of what it held before, padded rows are zeroed, rows beyond those are left
    alone. Its address never changes, as captured graphs need. The methods are work of the device: launch them.
    """

    def __init__(self, device: Device, max_num_reqs: int, max_blocks: int) -> None:
        shape = (max_num_reqs + 1, max_blocks)
        self.persistent = device.zeros(shape, torch.int32, name="block_tables")
        self.gathered = device.zeros(shape, torch.int32, name="input_block_tables")
        self.num_blocks = [0] * (max_num_reqs + 1)

    def clear(self, req_idx: int) -> None:
        """A new request is in the slot; the ids in its row stay until they are overwritten."""
        self.num_blocks[req_idx] = 0

    def append(self, grown: Mapping[int, Sequence[int]]) -> None:
        """Append block ids to the rows of slots. Raises BadInputError when a row is too short for its blocks."""
        table = self.persistent
        for req_idx, blocks in grown.items():
            start, stop = self.num_blocks[req_idx], self.num_blocks[req_idx] + len(blocks)
            if stop > table.shape[1]:
                raise BadInputError(
                    f"slot {req_idx} has {stop} blocks and a row only {table.shape[1]}; raise max_blocks"
                )
            self.num_blocks[req_idx] = stop
            table[req_idx, start:stop] = torch.tensor(blocks, dtype=table.dtype, device=table.device)

    def gather(self, req_idxs: Sequence[int], padded: int = 0) -> None:
        """Row b becomes the row of req_idxs[b]; rows from len(req_idxs) to `padded` become zero.

        Raises BadInputError when the tables have fewer rows.
        """
        most = len(self.gathered) - 1
        if max(len(req_idxs), padded) > most:
            raise BadInputError(
                f"a batch of {len(req_idxs)} rows, padded to {padded}, in tables for {most} requests"
            )
        for row, req_idx in enumerate(req_idxs):
            length = self.num_blocks[req_idx]
            self.gathered[row, :length] = self.persistent[req_idx, :length]
        if padded > len(req_idxs):
            self.gathered[len(req_idxs) : padded] = 0
