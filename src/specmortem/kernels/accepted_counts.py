"""Accepted counts on the device: counting the ids of a step, and giving the next step's rows their counts.

`count` looks at the sampled ids of each row, which are contiguous from the left: `accepted` counts what is not -1 (what
a hybrid model's states go by, `_update_states_after_model_execute`, vllm/v1/worker/gpu_model_runner.py:1495 in 0.23.0),
`valid` the ids of the vocabulary (what the drafter goes by).

`correct` runs in the next step, whose rows are in another order: a row that had drafts takes `valid` of its previous
row, every other row keeps what the host put there (`update_num_computed_tokens_for_batch_change`,
vllm/v1/spec_decode/utils.py:567 in 0.23.0, the same body up to 0.33.0). So the host's value matters for a row without
previous drafts, and for no other.

No cause of the incident touches these two; there is one form of each.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from specmortem.errors import BadInputError

REJECTED = -1


def count_reference(
    sampled: torch.Tensor,  # int32 [R, C]
    vocab_size: int,
    accepted: torch.Tensor,  # int32 [R], written
    valid: torch.Tensor,  # int32 [R], written
) -> None:
    """Both counts of each row."""
    accepted.copy_((sampled != REJECTED).sum(dim=1))
    valid.copy_(((sampled >= 0) & (sampled < vocab_size)).sum(dim=1))


@triton.jit
def count_kernel(sampled, accepted, valid, vocab_size, C: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    lane = tl.arange(0, BLOCK)
    ids = tl.load(sampled + row * C + lane, mask=lane < C, other=-1)
    tl.store(accepted + row, tl.sum((ids != -1).to(tl.int32), axis=0))
    tl.store(valid + row, tl.sum(((ids >= 0) & (ids < vocab_size)).to(tl.int32), axis=0))


def count_launch(sampled: torch.Tensor, vocab_size: int, accepted: torch.Tensor, valid: torch.Tensor) -> None:
    """Both counts of each row; shapes as in `count_reference`, all contiguous."""
    if sampled.dim() != 2 or accepted.shape != valid.shape or accepted.shape != sampled.shape[:1]:
        raise BadInputError(
            f"sampled is [R, C], both counts [R]; not {tuple(sampled.shape)}, {tuple(accepted.shape)}, "
            f"{tuple(valid.shape)}"
        )
    _check_int32(sampled=sampled, accepted=accepted, valid=valid)
    rows, columns = sampled.shape
    block = triton.next_power_of_2(columns)
    count_kernel[(rows,)](sampled, accepted, valid, vocab_size, C=columns, BLOCK=block, num_warps=1)


def correct_reference(
    accepted: torch.Tensor,  # int32 [N, L], the host's counts; updated in place
    computed: torch.Tensor,  # int32 [M, L], by previous row
    out_computed: torch.Tensor,  # int32 [N, L], written
    valid: torch.Tensor,  # int32 [M, L], by previous row
    drafted: torch.Tensor,  # int32 [M], drafts of each previous row
    previous: torch.Tensor,  # int32 [N], -1: new in the batch
    host_computed: torch.Tensor,  # int32 [N]
) -> None:
    """Counts and computed tokens of each row; L lanes are batches whose rows move alike, 1 in an engine."""
    source = previous.clamp(min=0).long()
    corrected = ((previous >= 0) & (drafted[source] > 0))[:, None]
    out_computed.copy_(torch.where(corrected, computed[source] + valid[source], host_computed[:, None]))
    accepted.copy_(torch.where(corrected, valid[source], accepted))


@triton.jit
def correct_kernel(
    accepted,
    computed,
    out_computed,
    valid,
    drafted,
    previous,
    host_computed,
    L: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0)
    lane = tl.arange(0, BLOCK)
    inside = lane < L
    source = tl.load(previous + row)
    known = source >= 0
    drafts = tl.load(drafted + source, mask=known, other=0)
    host = tl.load(host_computed + row)
    corrected = inside & known & (drafts > 0)
    count = tl.load(valid + source * L + lane, mask=corrected, other=0)
    before = tl.load(computed + source * L + lane, mask=corrected, other=0)
    tl.store(out_computed + row * L + lane, tl.where(corrected, before + count, host), mask=inside)
    tl.store(accepted + row * L + lane, count, mask=corrected)


def correct_launch(
    accepted: torch.Tensor,
    computed: torch.Tensor,
    out_computed: torch.Tensor,
    valid: torch.Tensor,
    drafted: torch.Tensor,
    previous: torch.Tensor,
    host_computed: torch.Tensor,
) -> None:
    """Shapes as in `correct_reference`; contiguous int32, and `out_computed` is no view of `computed`."""
    _check_int32(
        accepted=accepted,
        computed=computed,
        out_computed=out_computed,
        valid=valid,
        drafted=drafted,
        previous=previous,
        host_computed=host_computed,
    )
    rows, lanes = accepted.shape
    if not (out_computed.shape == accepted.shape and previous.shape == host_computed.shape == (rows,)):
        raise BadInputError(
            f"{rows} rows need as many of previous and host_computed, and out_computed [{rows}, {lanes}]"
        )
    if not (computed.shape == valid.shape == (drafted.shape[0], lanes)):
        raise BadInputError(
            f"computed and valid must be [{drafted.shape[0]}, {lanes}], as many rows as drafted"
        )
    if out_computed.data_ptr() == computed.data_ptr():
        raise BadInputError("out_computed is computed: rows move, so the new values need memory of their own")
    block = max(16, triton.next_power_of_2(lanes))
    correct_kernel[(rows,)](
        accepted, computed, out_computed, valid, drafted, previous, host_computed, L=lanes, BLOCK=block
    )


def _check_int32(**tensors: torch.Tensor) -> None:
    for name, tensor in tensors.items():
        if tensor.dtype != torch.int32 or not tensor.is_contiguous():
            raise BadInputError(f"{name} must be contiguous int32, not {tensor.dtype} {tensor.stride()}")
