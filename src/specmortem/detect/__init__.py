"""Detectors: memory bounds of Triton kernels, on a machine without a GPU."""
