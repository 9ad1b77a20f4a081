"""The small parts of an engine that the incidents need."""

from typing import Literal

Run = Literal["plain", "triton"]  # what computes a kernel: the plain reference, or Triton
