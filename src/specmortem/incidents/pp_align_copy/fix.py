"""Batch row or request slot: whose block ids a state copy reads. The `diff` of `before` and `after` is the fix.

A copy after sampling belongs to a step of pp_size steps ago. Since then other batches were gathered: row b of the
gathered table is the b-th request of the last of them. A request keeps its slot, `req_idx`, and its row of the
persistent table for as long as it runs. The table is bound once, on the host; its row is chosen in the kernel.
"""

from typing import Any, NamedTuple, Protocol

import torch
import triton
import triton.language as tl

from specmortem.errors import BadInputError


class StepTables(Protocol):
    """Both block tables, int32 [rows, columns]: a row a request slot, and a row a batch row."""

    persistent: torch.Tensor
    gathered: torch.Tensor


class Lookup(NamedTuple):
    """What the copy kernels are given: a table, and which of its rows belongs to a request."""

    table: torch.Tensor
    row: Any


@triton.jit
def batch_row(batch: tl.tensor, req_idx: tl.tensor) -> tl.tensor:
    return batch


@triton.jit
def request_slot(batch: tl.tensor, req_idx: tl.tensor) -> tl.tensor:
    return req_idx


def reference(tables: StepTables, req_idx: int) -> list[int]:
    """The block ids of the request in a slot."""
    return list(map(int, tables.persistent[req_idx]))


def before(tables: StepTables) -> Lookup:
    """Up to vLLM 0.31.0 (mamba_utils.py:479 and 613)."""
    return Lookup(tables.gathered, row=batch_row)


def after(tables: StepTables) -> Lookup:
    """Since vLLM 0.32.0 (mamba_utils.py:481 and 612, mamba_hybrid.py:175)."""
    return Lookup(tables.persistent, row=request_slot)


def row_only(tables: StepTables) -> Lookup:
    """Half of the fix: the kernels index by slot, into rows in batch order."""
    return Lookup(tables.gathered, row=request_slot)


def table_only(tables: StepTables) -> Lookup:
    """The other half: the persistent table, indexed by batch row."""
    return Lookup(tables.persistent, row=batch_row)


SUBJECTS = {fn.__name__.replace("_", "-"): fn for fn in (before, row_only, table_only, after)}


def lookup_of(subject: str, tables: StepTables) -> Lookup:
    """What a subject gives the kernels. Raises BadInputError for an unknown one."""
    if subject not in SUBJECTS:
        raise BadInputError(f"subject {subject!r} is not one of {', '.join(SUBJECTS)}")
    return SUBJECTS[subject](tables)
