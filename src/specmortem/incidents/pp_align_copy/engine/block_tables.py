"""Block tables in two forms: persistent, a row for each request slot, and gathered, a row for each row of the batch.

The gathered table is filled anew for every batch, and only as far as it must be: a row keeps the tail of what it held
before, padded rows are zeroed, rows beyond those are left alone. Its address never changes, as captured graphs need.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from specmortem.device import Device
from specmortem.errors import BadInputError


class BlockTables:
    """Both tables, int32 [max_num_reqs + 1, max_blocks]; the last row belongs to padding and holds null blocks."""

    def __init__(self, device: Device, max_num_reqs: int, max_blocks: int) -> None:
        self.device, self.max_num_reqs, self.max_blocks = device, max_num_reqs, max_blocks
        shape = (max_num_reqs + 1, max_blocks)
        self.persistent = device.zeros(shape, torch.int32, name="block_tables")
        self.gathered = device.zeros(shape, torch.int32, name="input_block_tables")
        self.num_blocks = [0] * (max_num_reqs + 1)

    def clear(self, slot: int) -> None:
        """A new request is in the slot; the ids in its row stay until they are overwritten."""
        self.num_blocks[slot] = 0

    def append(self, grown: Mapping[int, Sequence[int]]) -> None:
        """Append block ids to the rows of slots. Raises BadInputError when a row is too short for its blocks."""
        for slot, blocks in grown.items():
            start, stop = self.num_blocks[slot], self.num_blocks[slot] + len(blocks)
            if stop > self.max_blocks:
                raise BadInputError(
                    f"slot {slot} has {stop} blocks and a row only {self.max_blocks}; raise max_blocks"
                )
            self.num_blocks[slot] = stop
            self.device.launch(_write, self.persistent, slot, start, list(blocks), name="append blocks")

    def gather(self, slots: Sequence[int], padded: int = 0) -> None:
        """Row b becomes the row of slots[b]; rows from len(slots) to `padded` become zero."""
        if max(len(slots), padded) > self.max_num_reqs:
            raise BadInputError(
                f"a batch of {len(slots)} rows, padded to {padded}, in tables for {self.max_num_reqs} requests"
            )
        lengths = [self.num_blocks[slot] for slot in slots]
        self.device.launch(
            _gather, self.gathered, self.persistent, list(slots), lengths, padded, name="gather block tables"
        )


def _write(table: torch.Tensor, slot: int, start: int, blocks: list[int]) -> None:
    ids = torch.tensor(blocks, dtype=table.dtype)
    table[slot, start : start + len(blocks)] = ids.to(table.device)


def _gather(
    gathered: torch.Tensor, persistent: torch.Tensor, slots: list[int], lengths: list[int], padded: int
) -> None:
    for row, (slot, length) in enumerate(zip(slots, lengths, strict=True)):
        gathered[row, :length] = persistent[slot, :length]
    gathered[len(slots) : padded] = 0
