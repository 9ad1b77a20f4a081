"""Kernels that two incidents share: a plain reference, the faulty form, the fixed form, and a launcher."""

from typing import Literal

from specmortem._interpreter import mend

mend()

Arm = Literal["before", "after"]
Backend = Literal["plain", "triton"]  # what computes a kernel: the plain reference, or Triton
