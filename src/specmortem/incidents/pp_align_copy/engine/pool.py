"""A paged pool of state blocks: block 0 is the null block, every other one has at most one owner.

A block that is handed out holds whatever was there: memory never written, or what an earlier owner left. The worst of
that is NaN, so fresh blocks are poisoned with it and a state that was never saved cannot go unnoticed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Iterable

import torch

from specmortem.errors import BadInputError

NULL_BLOCK = 0
POISON = float("nan")


class BlockPool:
    """Blocks 1 … num_blocks - 1, handed out in the order in which they became free."""

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 2:
            raise BadInputError(f"num_blocks is {num_blocks}; give at least 2, block 0 is the null block")
        self._free = deque(range(1, num_blocks))
        self._owner: dict[int, Hashable] = {}

    @property
    def num_free(self) -> int:
        """Blocks without an owner, the null block not among them."""
        return len(self._free)

    def take(self, owner: Hashable, count: int) -> list[int] | None:
        """`count` blocks that now belong to `owner`, or None when there are not so many."""
        if count > len(self._free):
            return None
        blocks = [self._free.popleft() for _ in range(count)]
        self._owner.update(dict.fromkeys(blocks, owner))
        return blocks

    def release(self, owner: Hashable) -> list[int]:
        """Free all blocks of an owner."""
        blocks = self.blocks_of(owner)
        for block in blocks:
            del self._owner[block]
        self._free.extend(blocks)
        return blocks

    def owner_of(self, block: int) -> Hashable | None:
        """Who owns a block; None for a free one and for the null block."""
        return self._owner.get(block)

    def blocks_of(self, owner: Hashable) -> list[int]:
        """The blocks of an owner, in the order in which it took them."""
        return [block for block, who in self._owner.items() if who == owner]


def poison(states: Iterable[torch.Tensor], blocks: list[int]) -> None:
    """Fill blocks [block, ...] of every state with NaN."""
    if blocks:
        for state in states:
            state[blocks] = POISON
