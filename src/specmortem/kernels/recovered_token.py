"""The recovered token of a rejected draft: a blocked argmax over the vocabulary.

`before` gives the lanes behind the vocabulary a score of 0, as `sample_recovered_tokens_kernel`
(vllm/v1/sample/rejection_sampler.py:854 in 0.22.1) does up to 0.23.0: when every real score of the last block is NaN,
a comparison with NaN is false and a padding lane can win, so the id is vocab_size or more. `after` scores those lanes
-inf and clamps the id (0.24.0).

What NaN does in a maximum is a property of the GPU's compare; Triton's interpreter reduces with numpy, which treats NaN
differently, so this kernel is judged on a GPU only.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from specmortem.errors import BadInputError
from specmortem.kernels import Arm


def reference(scores: torch.Tensor) -> torch.Tensor:
    """Index of the largest score of each row of float32 [N, V], int32 [N]; a row of NaN gives some id below V."""
    return torch.nan_to_num(scores, nan=float("-inf")).argmax(dim=1).to(torch.int32)


@triton.jit
def recovered_token_before(scores, out, vocab_size, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    best = float("-inf")
    token = 0
    for start in range(0, vocab_size, BLOCK):
        lane = start + tl.arange(0, BLOCK)
        score = tl.load(scores + row * vocab_size + lane, mask=lane < vocab_size, other=0.0)
        value, at = tl.max(score, axis=0, return_indices=True)
        if value > best:
            best = value
            token = start + at
    tl.store(out + row, token)


@triton.jit
def recovered_token_after(scores, out, vocab_size, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    best = float("-inf")
    token = 0
    for start in range(0, vocab_size, BLOCK):
        lane = start + tl.arange(0, BLOCK)
        score = tl.load(scores + row * vocab_size + lane, mask=lane < vocab_size, other=float("-inf"))
        value, at = tl.max(score, axis=0, return_indices=True)
        if value > best:
            best = value
            token = start + at
    tl.store(out + row, tl.minimum(token, vocab_size - 1))


KERNELS = {"before": recovered_token_before, "after": recovered_token_after}


def launch(arm: Arm, scores: torch.Tensor, out: torch.Tensor, block: int = 8192) -> None:
    """Recovered ids int32 [N] of scores float32 [N, V]."""
    if scores.dim() != 2 or not scores.is_contiguous() or out.shape != scores.shape[:1]:
        raise BadInputError(
            f"scores must be contiguous [N, V] and out [N], not {tuple(scores.shape)}, {tuple(out.shape)}"
        )
    KERNELS[arm][(scores.shape[0],)](scores, out, scores.shape[1], BLOCK=block)
