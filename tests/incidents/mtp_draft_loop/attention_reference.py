"""Paged decode attention, whole and in the chunks of a plan, in plain torch: what the kernels are compared with."""

import torch
from torch import Tensor

from specmortem.incidents.mtp_draft_loop.kernels import LOG2_E, Plan


def reference(q: Tensor, kv: Tensor, block_table: Tensor, seq_lens: Tensor, page_size: int) -> Tensor:
    """Softmax attention of one query token a request, float32 [B, H, D]; zeros for an empty sequence.

    q [B, H, D]; kv [slots, 2, KVH, D] holds keys and values; block_table int32 [B, columns]; seq_lens int32
    [B].
    """
    out = torch.zeros_like(q)
    for r, length in enumerate(seq_lens.tolist()):
        if length:
            positions = torch.arange(length, device=kv.device)
            out[r] = _attended(q[r], kv, block_table[r], positions, page_size)[0]
    return out


def reference_partial(
    plan: Plan, q: Tensor, kv: Tensor, block_table: Tensor, seq_lens: Tensor
) -> tuple[Tensor, Tensor]:
    """Partial values [P, H, D] and base-2 log-sum-exps [P, H] of every chunk, in plain torch."""
    chunk, size = plan.chunk_tokens, plan.geometry.page_size
    values, sums = q.new_zeros(plan.num_chunks, *q.shape[1:]), q.new_zeros(plan.num_chunks, q.shape[1])
    pairs = zip(plan.arrays["request_indices"].tolist(), plan.arrays["kv_tile_indices"].tolist(), strict=True)
    for p, (r, tile) in enumerate(pairs):
        positions = torch.arange(tile * chunk, min((tile + 1) * chunk, int(seq_lens[r])))
        values[p], sums[p] = _attended(q[r], kv, block_table[r], positions, size)
    return values, sums


def _attended(q: Tensor, kv: Tensor, row: Tensor, positions: Tensor, page_size: int) -> tuple[Tensor, Tensor]:
    """Attention [H, D] of one query [H, D] over the keys at `positions`, and the base-2 log-sum-exps [H]."""
    slots = kv[row[positions // page_size].long() * page_size + positions % page_size]
    keys, values = (slots[:, i].repeat_interleave(q.shape[0] // kv.shape[2], dim=1) for i in (0, 1))
    scores = torch.einsum("hd,thd->ht", q, keys) / q.shape[1] ** 0.5
    out = torch.einsum("ht,thd->hd", torch.softmax(scores, dim=1), values)
    return out, torch.logsumexp(scores, dim=1) * LOG2_E


def reference_merge(values: Tensor, sums: Tensor, merge_indptr: list[int]) -> Tensor:
    """Merged rows [B, H, D] of partial values [P, H, D] with base-2 log-sum-exps [P, H]."""
    out = values.new_zeros(len(merge_indptr) - 1, *values.shape[1:])
    for r, (low, high) in enumerate(zip(merge_indptr[:-1], merge_indptr[1:], strict=True)):
        weights = torch.softmax(sums[low:high] / LOG2_E, dim=0)
        out[r] = (weights[..., None] * values[low:high]).sum(dim=0)
    return out
