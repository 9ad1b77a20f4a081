"""Speculative state of a gated delta net: which stored state does a request go on from?

With drafts in flight a recurrent layer keeps one state per position: request n owns the state slots
`state_indices[n, 0 … K]`, and the state after its i-th token of the last step lies in column i. How many of those
tokens were accepted is known later, so the next step looks its initial state up in column `num_accepted[n] - 1`.

`before` trusts the count, as the released kernels do (`fused_sigmoid_gating_delta_rule_update_kernel`,
vllm/model_executor/layers/fla/ops/fused_sigmoid_gating.py:103 in 0.22.1): a count of 0 reads the last column of the row
before, for row 0 the word before the tensor, and any positive number found there is taken for a state slot. `after`
uses a count only when 1 <= num_accepted <= K + 1 and gives zeros otherwise, so that no stale output row survives.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from specmortem.errors import BadInputError
from specmortem.kernels import Arm

__all__ = ["Arm", "gated_delta_after", "gated_delta_before", "launch", "reference"]


def reference(
    query: torch.Tensor,  # float32 [N, T, D]
    key: torch.Tensor,  # float32 [N, T, D]
    value: torch.Tensor,  # float32 [N, T, V]
    gate: torch.Tensor,  # float32 [N, T], log of the decay
    beta: torch.Tensor,  # float32 [N, T]
    states: torch.Tensor,  # float32 [P, V, D], row = value, column = key; updated in place
    state_indices: torch.Tensor,  # int32 [N, C], C = K + 1 columns
    num_accepted: torch.Tensor,  # int32 [N]
) -> torch.Tensor:
    """Outputs float32 [N, T, V] of the gated delta rule, token by token; the contract of `after`."""
    requests, tokens, _ = query.shape
    columns = state_indices.shape[1]
    out = torch.zeros_like(value)
    for n in range(requests):
        accepted = int(num_accepted[n])
        if not 1 <= accepted <= columns or int(state_indices[n, accepted - 1]) <= 0:
            continue
        state = states[int(state_indices[n, accepted - 1])].clone()
        for t in range(tokens):
            state = state * gate[n, t].exp()
            correction = (value[n, t] - state @ key[n, t]) * beta[n, t]
            state = state + torch.outer(correction, key[n, t])
            out[n, t] = state @ query[n, t]
            if int(state_indices[n, t]) > 0:
                states[int(state_indices[n, t])] = state
    return out


@triton.jit
def _delta_steps(
    query,
    key,
    value,
    gate,
    beta,
    out,
    states,
    indices,
    request,
    state,
    T,
    V: tl.constexpr,
    D: tl.constexpr,
    BV: tl.constexpr,
):
    """The recurrence over the T tokens of one request for BV values, from `state` [BV, D]."""
    d = tl.arange(0, D)
    v = tl.program_id(1) * BV + tl.arange(0, BV)
    tile = v[:, None] * D + d[None, :]
    for t in range(T):
        at = (request * T + t) * D + d
        at_value = (request * T + t) * V + v
        k = tl.load(key + at)
        state = state * tl.exp(tl.load(gate + request * T + t))
        beta_t = tl.load(beta + request * T + t)
        correction = (tl.load(value + at_value) - tl.sum(state * k[None, :], 1)) * beta_t
        state = state + correction[:, None] * k[None, :]
        tl.store(out + at_value, tl.sum(state * tl.load(query + at)[None, :], 1))
        kept = tl.load(indices + t).to(tl.int64)
        if kept > 0:
            tl.store(states + kept * V * D + tile, state)


@triton.jit
def gated_delta_before(
    query,
    key,
    value,
    gate,
    beta,
    out,
    states,
    state_indices,
    num_accepted,
    row_stride,
    T,
    C: tl.constexpr,
    V: tl.constexpr,
    D: tl.constexpr,
    BV: tl.constexpr,
):
    request = tl.program_id(0)
    d = tl.arange(0, D)
    v = tl.program_id(1) * BV + tl.arange(0, BV)
    indices = state_indices + request * row_stride
    column = tl.load(num_accepted + request).to(tl.int64) - 1
    index = tl.load(indices + column).to(tl.int64)
    if index <= 0:
        return
    state = tl.load(states + index * V * D + v[:, None] * D + d[None, :])
    _delta_steps(query, key, value, gate, beta, out, states, indices, request, state, T, V, D, BV)


@triton.jit
def gated_delta_after(
    query,
    key,
    value,
    gate,
    beta,
    out,
    states,
    state_indices,
    num_accepted,
    row_stride,
    T,
    C: tl.constexpr,
    V: tl.constexpr,
    D: tl.constexpr,
    BV: tl.constexpr,
):
    request = tl.program_id(0)
    d = tl.arange(0, D)
    v = tl.program_id(1) * BV + tl.arange(0, BV)
    indices = state_indices + request * row_stride
    accepted = tl.load(num_accepted + request).to(tl.int64)
    in_row = (accepted >= 1) & (accepted <= C)  # guard: accepted count
    index = tl.load(indices + accepted - 1, mask=in_row, other=0).to(tl.int64)
    if index <= 0:
        for t in range(T):
            tl.store(out + (request * T + t) * V + v, tl.zeros((BV,), tl.float32))
        return
    state = tl.load(states + index * V * D + v[:, None] * D + d[None, :])
    _delta_steps(query, key, value, gate, beta, out, states, indices, request, state, T, V, D, BV)


KERNELS = {"before": gated_delta_before, "after": gated_delta_after}


def launch(
    arm: Arm,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    gate: torch.Tensor,
    beta: torch.Tensor,
    out: torch.Tensor,
    states: torch.Tensor,
    state_indices: torch.Tensor,
    num_accepted: torch.Tensor,
    kernel: Any = None,
) -> None:
    """Update `states` in place and write `out`; shapes as in `reference`. D and V are powers of two.

    A program has 32 values of a request at most: values do not depend on each other. Raises BadInputError when shapes
    or strides do not fit.
    """
    requests, tokens, width = query.shape
    columns, values = state_indices.shape[1], value.shape[2]
    if key.shape != query.shape or value.shape[:2] != query.shape[:2] or out.shape != value.shape:
        raise BadInputError("query and key must be one shape [N, T, D], value and out one shape [N, T, V]")
    if states.shape[1:] != (values, width) or width & (width - 1) or values & (values - 1):
        raise BadInputError(f"states must be [P, {values}, {width}], and both of these powers of two")
    if state_indices.shape[0] < requests or num_accepted.shape[0] < requests or tokens > columns:
        raise BadInputError(
            f"{requests} requests of {tokens} tokens need as many rows and columns of state_indices"
        )
    if not all(t.is_contiguous() for t in (query, key, value, gate, beta, out, states)):
        raise BadInputError("gated_delta_state.launch needs contiguous tensors")
    block = min(values, 32)
    tensors = (query, key, value, gate, beta, out, states, state_indices, num_accepted)
    grid, row_stride = (requests, values // block), state_indices.stride(0)
    (kernel or KERNELS[arm])[grid](*tensors, row_stride, tokens, C=columns, V=values, D=width, BV=block)
