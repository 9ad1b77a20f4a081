"""Causal convolution over the tokens of a decode, with the history of every draft in one line a request.

A line keeps the W - 1 tokens ahead of the step's first, and room for K more. A step of T tokens finds its window
`num_accepted - 1` tokens into the line, convolves, and leaves its window and tokens there, less the oldest: what the
next step needs, whatever it will have accepted (`_causal_conv1d_update_kernel`,
vllm/model_executor/layers/mamba/ops/causal_conv1d.py:749 in 0.23.0).

A count of K + 1 or less finds a window inside the line, right or not: with another row's count it holds tokens that
this request never had. `before` trusts the count, as the released kernel does: 0 starts in the line before, K + 2 ends
in the one after. `after` gives zeros for a count outside and leaves the line alone.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from specmortem.errors import BadInputError
from specmortem.kernels import Arm


def reference(
    x: torch.Tensor,  # float32 [N, T, D]
    weight: torch.Tensor,  # float32 [W, D], the newest token's last
    conv_states: torch.Tensor,  # float32 [P, L, D], L = W - 1 + K; updated in place
    lines: torch.Tensor,  # int32 [N], 0 is nobody's
    num_accepted: torch.Tensor,  # int32 [N]
) -> torch.Tensor:
    """Outputs float32 [N, T, D]; zeros without a line or with a count out of range; the contract of `after`."""
    requests, tokens, _ = x.shape
    width, length = weight.shape[0], conv_states.shape[1]
    out = torch.zeros_like(x)
    for n, (line, count) in enumerate(zip(lines.tolist(), num_accepted.tolist(), strict=False)):
        if n == requests or line <= 0 or not 1 <= count <= length - width + 2:
            continue
        inputs = torch.cat([conv_states[line, count - 1 : count + width - 2], x[n]])
        for t in range(tokens):
            out[n, t] = (weight * inputs[t : t + width]).sum(dim=0)
        conv_states[line, : width + tokens - 2] = inputs[1:]
    return out


@triton.jit
def _convolve(
    x,
    weight,
    conv_states,
    out,
    line,
    offset,
    in_line,
    T,
    L: tl.constexpr,
    W: tl.constexpr,
    D: tl.constexpr,
    BD: tl.constexpr,
):
    """Outputs of a request, its window `offset` tokens into its line; then the line as the next step needs it."""
    request = tl.program_id(0)
    d = tl.program_id(1) * BD + tl.arange(0, BD)
    base = conv_states + line * L * D + d
    tokens = x + request * T * D + d
    for t in range(T):
        total = tl.zeros((BD,), tl.float32)
        for w in tl.static_range(W):
            at = t + w
            old = tl.load(base + (offset + at) * D, mask=in_line & (at < W - 1) & (d < D), other=0.0)
            new = tl.load(tokens + (at - W + 1) * D, mask=in_line & (at >= W - 1) & (d < D), other=0.0)
            total += tl.load(weight + w * D + d) * (old + new)
        tl.store(out + (request * T + t) * D + d, total)
    tl.debug_barrier()
    for i in range(W - 2):
        moved = tl.load(base + (offset + 1 + i) * D, mask=in_line & (d < D), other=0.0)
        tl.store(base + i * D, moved, mask=in_line & (d < D))
    tl.debug_barrier()
    for t in range(T):
        token = tl.load(tokens + t * D, mask=in_line & (d < D), other=0.0)
        tl.store(base + (W - 2 + t) * D, token, mask=in_line & (d < D))


@triton.jit
def causal_conv_before(
    x,
    weight,
    conv_states,
    lines,
    num_accepted,
    out,
    T,
    L: tl.constexpr,
    W: tl.constexpr,
    D: tl.constexpr,
    BD: tl.constexpr,
):
    line = tl.load(lines + tl.program_id(0)).to(tl.int64)
    offset = tl.load(num_accepted + tl.program_id(0)).to(tl.int64) - 1
    in_line = line > 0
    _convolve(x, weight, conv_states, out, line, offset, in_line, T, L, W, D, BD)


@triton.jit
def causal_conv_after(
    x,
    weight,
    conv_states,
    lines,
    num_accepted,
    out,
    T,
    L: tl.constexpr,
    W: tl.constexpr,
    D: tl.constexpr,
    BD: tl.constexpr,
):
    line = tl.load(lines + tl.program_id(0)).to(tl.int64)
    offset = tl.load(num_accepted + tl.program_id(0)).to(tl.int64) - 1
    in_line = (line > 0) & (offset >= 0) & (offset <= L - W + 1)  # guard: accepted count
    _convolve(x, weight, conv_states, out, line, offset, in_line, T, L, W, D, BD)


KERNELS = {"before": causal_conv_before, "after": causal_conv_after}


def launch(
    arm: Arm,
    x: torch.Tensor,
    weight: torch.Tensor,
    conv_states: torch.Tensor,
    lines: torch.Tensor,
    num_accepted: torch.Tensor,
    out: torch.Tensor,
) -> None:
    """Write `out` and update `conv_states`; shapes as in `reference`, all contiguous, D a power of two.

    Every channel is one thread's from load to store, so a line may be shifted in place. Raises BadInputError when
    shapes or strides do not fit.
    """
    requests, tokens, channels = x.shape
    width, length = weight.shape[0], conv_states.shape[1]
    if out.shape != x.shape or weight.shape[1] != channels or conv_states.shape[2] != channels:
        raise BadInputError(f"out must be {tuple(x.shape)}, weight and conv_states of {channels} channels")
    if channels & (channels - 1) or tokens > length - width + 2 or width < 2:
        raise BadInputError(
            f"{tokens} tokens, width {width}, {channels} channels: a line of {length} holds "
            f"{length - width + 2} tokens, the width is 2 or more, and channels are a power of two"
        )
    if lines.shape[0] < requests or num_accepted.shape[0] < requests:
        raise BadInputError(f"{requests} requests need as many lines and counts")
    tensors = (x, weight, conv_states, lines, num_accepted, out)
    if not all(t.is_contiguous() for t in tensors):
        raise BadInputError("causal_conv_update.launch needs contiguous tensors")
    block = min(channels, 128)
    KERNELS[arm][(requests, channels // block)](*tensors, tokens, L=length, W=width, D=channels, BD=block)
