"""The persistent batch: one row a request, in numpy arrays and one pinned array, and the four ways in which rows move.

A step removes what finished or was not scheduled, adds what came (into the lowest hole, or after the last row), closes
the holes that are left (`condense`), and swaps rows until decodes come first (`reorder`); vLLM's order of these is in
`_update_states`, vllm/v1/worker/gpu_model_runner.py:1436-1445 in 0.23.0, and the moves themselves in
gpu_input_batch.py:335, 510, 566 and 683.

Every move touches every per-row array, `num_accepted` too. That one is page-locked because the device copies the
accepted counts of a step into it, in the row order which that step had.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from specmortem.device import Device, HostBuffer
from specmortem.errors import BadInputError

NEW = -1
Array = npt.NDArray[np.int32]
RowPair = tuple[int, int]  # from, to; or one, other


@dataclass(frozen=True)
class NewRequest:
    """What a request brings into the batch: known tokens, how many of them are computed, and its state blocks."""

    req_id: int
    tokens: tuple[int, ...] = ()
    num_computed: int = 0
    blocks: tuple[int, ...] = ()


class InputBatch:
    """Rows 0 … num_reqs - 1 after `condense`; until then some may be holes.

    `num_accepted` is a pinned int32 buffer [max_num_reqs, lanes], ones at first. More than one lane stands for that
    many batches whose rows move alike; the engine has one.
    """

    def __init__(
        self, device: Device, max_num_reqs: int, max_tokens: int = 1, max_blocks: int = 1, lanes: int = 1
    ) -> None:
        for name, value in (("max_num_reqs", max_num_reqs), ("max_tokens", max_tokens), ("lanes", lanes)):
            if value < 1:
                raise BadInputError(f"{name} is {value}; give at least 1")
        self.max_num_reqs, self.lanes = max_num_reqs, lanes
        self.req_ids: list[int | None] = []
        self.row_of: dict[int, int] = {}
        self.previous_row_of: dict[int, int] = {}
        self.token_ids: Array = np.zeros((max_num_reqs, max_tokens), np.int32)
        self.num_tokens: Array = np.zeros(max_num_reqs, np.int32)
        self.num_computed: Array = np.zeros(max_num_reqs, np.int32)
        self.blocks: Array = np.zeros((max_num_reqs, max_blocks), np.int32)
        self.num_accepted: HostBuffer = device.host_buffer(
            (max_num_reqs, lanes), torch.int32, pinned=True, name="num_accepted_tokens_cpu"
        )
        self.num_accepted[...] = 1
        self._columns: list[Any] = [self.token_ids, self.num_tokens, self.num_computed, self.blocks]
        self._columns.append(self.num_accepted)
        self._holes: list[int] = []

    @property
    def num_reqs(self) -> int:
        """Requests in the batch; holes do not count."""
        return len(self.row_of)

    @property
    def order(self) -> list[int]:
        """The requests, row by row; holes are left out."""
        return [req_id for req_id in self.req_ids if req_id is not None]

    def add_request(self, request: NewRequest) -> int:
        """Put a request into the lowest hole or after the last row, with an accepted count of 1; gives its row.

        Raises BadInputError when it is in the batch already, when the batch is full, and when it does not fit a row.
        """
        self._check_new(request)
        if self._holes:
            row = self._holes.pop(0)
            self.req_ids[row] = request.req_id
        else:
            row = len(self.req_ids)
            self.req_ids.append(request.req_id)
        self.row_of[request.req_id] = row
        self.token_ids[row, : len(request.tokens)] = request.tokens
        self.num_tokens[row] = len(request.tokens)
        self.num_computed[row] = request.num_computed
        self.blocks[row] = 0
        self.blocks[row, : len(request.blocks)] = request.blocks
        self.num_accepted[row] = 1
        return row

    def _check_new(self, request: NewRequest) -> None:
        if request.req_id in self.row_of:
            raise BadInputError(f"request {request.req_id} is in the batch already; remove it first")
        if self.num_reqs == self.max_num_reqs:
            raise BadInputError(f"request {request.req_id}: all {self.max_num_reqs} rows are taken")
        if len(request.tokens) > self.token_ids.shape[1] or len(request.blocks) > self.blocks.shape[1]:
            raise BadInputError(
                f"request {request.req_id} has {len(request.tokens)} tokens and {len(request.blocks)} blocks; "
                f"a row holds {self.token_ids.shape[1]} and {self.blocks.shape[1]}"
            )

    def remove_request(self, req_id: int) -> int | None:
        """Leave a hole where the request was; gives its row, None when it is not in the batch. No array is written."""
        row = self.row_of.pop(req_id, None)
        if row is None:
            return None
        self.previous_row_of.pop(req_id, None)
        self.req_ids[row] = None
        self._holes = sorted([*self._holes, row])
        return row

    def condense(self) -> list[RowPair]:
        """Move the last rows down into the holes; gives (from, to) of each. The source rows keep their content."""
        moves = []
        self._drop_last_holes()
        while self._holes:
            hole, last = self._holes.pop(0), len(self.req_ids) - 1
            self._move(last, hole)
            moves.append((last, hole))
            self._drop_last_holes()
        return moves

    def _drop_last_holes(self) -> None:
        while self.req_ids and self.req_ids[-1] is None:
            self.req_ids.pop()
        self._holes = [hole for hole in self._holes if hole < len(self.req_ids)]

    def _move(self, source: int, target: int) -> None:
        req_id = self.req_ids[source]
        assert req_id is not None, "condense moves live rows"
        self.req_ids[target], self.req_ids[source] = req_id, None
        self.row_of[req_id] = target
        for column in self._columns:
            column[target] = column[source]

    def swap_states(self, one: int, other: int) -> None:
        """Exchange two live rows. Raises BadInputError for a hole.

        Of each array row `other` is read first, then row `one`; row `one` is written first, then row `other`, as in
        gpu_input_batch.py:661-664 in 0.23.0. While a copy is landing, the order decides who gets what.
        """
        moved = [self.req_ids[row] if 0 <= row < len(self.req_ids) else None for row in (one, other)]
        if moved[0] is None or moved[1] is None:
            raise BadInputError(
                f"rows {one} and {other} do not both hold a request; condense before rows are swapped"
            )
        self.req_ids[one], self.req_ids[other] = moved[1], moved[0]
        self.row_of[moved[0]], self.row_of[moved[1]] = other, one
        for column in self._columns:
            up, down = column[other].copy(), column[one].copy()
            column[one] = up
            column[other] = down

    def reorder(self, region: Callable[[int], int]) -> list[RowPair]:
        """Swap rows until the regions of their requests ascend; gives the swaps. Rows that are right stay.

        Each swap brings the request of its first row to its second, which is its place; the first row is swapped
        until its own has come. Same swaps as in vllm/v1/attention/backends/utils.py:662-681 in 0.23.0.
        """
        if self._holes:
            raise BadInputError(f"rows {self._holes} are holes; condense before the batch is reordered")
        regions = [region(req_id) for req_id in self.order]
        misplaced = [row for row, wanted in enumerate(sorted(regions)) if regions[row] != wanted]
        by_region = sorted(misplaced, key=regions.__getitem__)
        place_of = dict(zip(by_region, misplaced, strict=True))
        swaps = []
        for row in by_region:
            while (place := place_of[row]) != row:
                self.swap_states(row, place)
                swaps.append((row, place))
                place_of[row], place_of[place] = place_of[place], place
        return swaps

    def remember_rows(self) -> None:
        """The rows as they are now become the previous ones: what the device holds of this step has this order."""
        self.previous_row_of = dict(self.row_of)

    def previous_rows(self) -> list[int]:
        """For each row, the row that its request had in the step before; NEW when it had none."""
        return [self.previous_row_of.get(req_id, NEW) for req_id in self.order]
