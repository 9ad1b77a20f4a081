"""Launches of Triton's interpreter, which are most of an experiment's time, computed once for equal arguments.

The schedules of one experiment repeat most launches of each other, and those of the reference.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from functools import partial
from hashlib import blake2b
from typing import Any

import torch
from torch import Tensor

from specmortem.incidents.mtp_draft_loop.kernels import Array, Plan

Launch = Callable[..., None]


def plainly(launch: Launch, *args: Any) -> None:
    """The launch itself."""
    launch(*args)


class KnownLaunches:
    """`plainly` on the CPU, but a launch whose arguments equal those of an earlier one has its effects anew.

    Launches must depend on nothing but their arguments, which are compared bit for bit. An exception is an effect,
    like what is written before it.
    """

    def __init__(self) -> None:
        self._effects: dict[tuple[Hashable, ...], tuple[dict[int, Tensor], Exception | None]] = {}

    def __call__(self, launch: Launch, *args: Any, **named: Any) -> None:
        """Compute the launch, or repeat what it did. Raises what it raises."""
        values, error = (*args, *named.values()), None
        before = _contents(values)
        key = (launch, *named, *before)
        if key not in self._effects:
            try:
                launch(*args, **named)
            except Exception as raised:
                error = raised
            after = enumerate(zip(values, before, _contents(values), strict=True))
            self._effects[key] = {i: value.clone() for i, (value, old, new) in after if new != old}, error
        written, error = self._effects[key]
        for i, content in written.items():
            values[i].copy_(content)
        if error:
            raise error.with_traceback(None)


class KnownKernel:
    """A Triton kernel whose equal launches are computed once; none of its arguments may hold addresses of memory."""

    def __init__(self, kernel: Any) -> None:
        self.kernel, self.known = kernel, KnownLaunches()
        self.__name__ = kernel.__name__

    def __getitem__(self, grid: tuple[int, ...]) -> Launch:
        """The kernel on a grid."""
        return partial(self.known, self._launch, grid)

    def _launch(self, grid: tuple[int, ...], *args: Any, **named: Any) -> None:
        self.kernel[grid](*args, **named)


def _contents(args: tuple[Any, ...]) -> list[Hashable]:
    """What a launch can learn of each argument.

    Of a block of plans (uint8) only that it holds the launch's own plan, if it does: all indices are then inside the
    arrays of the plan, and what lies between them is not read.
    """
    plan = next((arg for arg in args if isinstance(arg, Plan)), None)
    return [_content(arg, plan) if isinstance(arg, Tensor) else arg for arg in args]


def _content(tensor: Tensor, plan: Plan | None) -> Hashable:
    array: Array = tensor.numpy()
    if plan is not None and tensor.dtype == torch.uint8 and plan.is_in(array):
        return True
    return tensor.shape, blake2b(array.tobytes()).digest()
