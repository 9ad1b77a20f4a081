"""Races over staging memory: copies and kernels against the host that touches the same bytes.

A copy from pinned memory reads its source when it executes, and one into pinned memory writes when it
executes. What the host does to those bytes in between has to be ordered by an event or a synchronize. The
detector needs the calls only, so it reports a missing order also when the bad interleaving does not occur:

    dev = device.open("sim")
    with staging.watch(dev) as watched:
        run_the_program(dev)
    for race in watched.races:
        print(race)                     # both lines, the bytes, the missing edge

- `watch(device)`: a program over this package's devices, simulated or CUDA;
- `watch_torch()`: a plain PyTorch program on CUDA;
- `simulated_cuda()`: a plain PyTorch program on a machine without a GPU;
- `confirm(program)`: an interleaving in which the values differ.

The pytest fixture `staging_watch` fails a test in which a race was seen.
"""

from __future__ import annotations

from specmortem.detect.staging.recorder import watch_torch
from specmortem.detect.staging.report import Race, Touch
from specmortem.detect.staging.simulated import simulated_cuda
from specmortem.detect.staging.torch_calls import TorchWatch
from specmortem.detect.staging.watch import Confirmation, StagingWatch, confirm, watch

__all__ = [
    "Confirmation",
    "Race",
    "StagingWatch",
    "TorchWatch",
    "Touch",
    "confirm",
    "simulated_cuda",
    "watch",
    "watch_torch",
]
