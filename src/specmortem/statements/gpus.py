"""GPUs by the names that people give them."""

from __future__ import annotations

import re
from collections.abc import Mapping

NAMES: Mapping[str, int] = {
    r"\bRTX\s*PRO\s*\d{4}|\bRTX\s*50[5-9]0|\b5090\b": 120,
    r"\bGB10\b|\bDGX\s*Spark": 121,
    r"\bG?B300\b": 103,
    r"\bB100\b|\bG?B200\b": 100,
    r"\bG?H[12]00\b|\bH800\b|\bH20\b": 90,
    r"\bRTX\s*40[5-9]0|\bL40S?\b|\bL4\b|\bRTX\s*\d{4}\s*Ada": 89,
    r"\bRTX\s*30[5-9]0|\b3090\b|\bA40\b|\bA10G?\b|\b(?:RTX\s*)?A[456]000\b": 86,
    r"\bA[18]00\b|\bA30\b|\bGA100\b|\bCMP\s*170HX": 80,
}


def gpu_of(text: str) -> int | None:
    """Compute capability times ten of a GPU: `sm_90`, `9.0`, a name or, for a GeForce, its number; None if unknown."""
    digits = re.sub(r"^sm_?", "", text.lower()).replace(".", "")
    if re.fullmatch(r"[0-9]{2,3}", digits):
        return int(digits)
    named = ((gpu, pattern) for pattern, gpu in NAMES.items())
    return next((gpu for gpu, pattern in named if re.search(pattern, f"RTX {text}", re.IGNORECASE)), None)
