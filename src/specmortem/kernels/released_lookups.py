"""Inputs for the released state lookups of gated delta layers, which two incidents launch."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

PLATFORM = SimpleNamespace(is_arch_support_pdl=lambda: False, is_cuda=lambda: False)


def gating_inputs(
    requests: int, tokens: int, heads: int = 1, dim: int = 8, device: str = "cpu"
) -> dict[str, Any]:
    """Inputs of the released gated delta kernel: one flat batch, with states and a table of state slots."""
    g = torch.Generator().manual_seed(0)

    def rand(*shape: int) -> torch.Tensor:
        return torch.rand(*shape, generator=g).to(device)

    total, columns = requests * tokens, tokens
    return {
        "A_log": rand(heads),
        "a": rand(total, heads),
        "b": rand(total, heads),
        "dt_bias": rand(heads),
        "q": rand(1, total, heads, dim),
        "k": rand(1, total, heads, dim),
        "v": rand(1, total, heads, dim),
        "initial_state": rand(1 + requests * columns, heads, dim, dim),
        "cu_seqlens": torch.arange(0, total + 1, tokens, dtype=torch.int32, device=device),
        "ssm_state_indices": torch.arange(
            1, 1 + requests * columns, dtype=torch.int32, device=device
        ).reshape(requests, columns),
        "use_qk_l2norm_in_kernel": True,
    }
