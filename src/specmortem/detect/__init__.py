"""Detectors: memory bounds of Triton kernels, and races between copies, kernels and the host."""
