"""The pytest fixtures `bounds_watch` and `staging_watch`: a test fails on overruns or on races."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack
from typing import TYPE_CHECKING, TypeVar

import pytest

if TYPE_CHECKING:
    from specmortem.detect.bounds import Watch
    from specmortem.detect.staging import Race, StagingWatch, TorchWatch
    from specmortem.device import Device, Schedule

W = TypeVar("W", bound="StagingWatch")


@pytest.fixture
def bounds_watch() -> Iterator[Watch]:
    """A watch over every Triton launch of the test; reports left in `watch.reports` at the end fail it.

    Skips where kernels are not interpreted. A test that expects reports takes them: `reports = watch.take()`.
    """
    if os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("bounds_watch needs TRITON_INTERPRET=1 before triton is imported")
    from specmortem.detect import bounds

    with bounds.watch() as watch:
        yield watch
    if watch.reports:
        pytest.fail("\n".join(str(report) for report in watch.reports[:20]), pytrace=False)


class StagingWatches:
    """Opens the watches of one test; each returns a watch, whose `take()` removes expected races."""

    def __init__(self, stack: ExitStack) -> None:
        self._stack = stack
        self._watches: list[StagingWatch] = []

    def __call__(self, device: Device) -> StagingWatch:
        """Watch a device of `specmortem.device` until the test ends."""
        from specmortem.detect import staging

        return self._opened(self._stack.enter_context(staging.watch(device)))

    def torch(self) -> TorchWatch:
        """Watch plain PyTorch on CUDA until the test ends."""
        from specmortem.detect import staging

        return self._opened(self._stack.enter_context(staging.watch_torch()))

    def simulated_cuda(self, schedule: str | Schedule = "lazy", seed: int = 0) -> TorchWatch:
        """Give plain PyTorch a simulated CUDA device until the test ends, and watch it."""
        from specmortem.detect import staging

        return self._opened(self._stack.enter_context(staging.simulated_cuda(schedule, seed)))

    def races(self) -> list[Race]:
        """What all watches have seen and no `take()` has removed."""
        return [race for watch in self._watches for race in watch.races]

    def _opened(self, watch: W) -> W:
        self._watches.append(watch)
        return watch


@pytest.fixture
def staging_watch() -> Iterator[StagingWatches]:
    """`staging_watch(device)`, `.torch()`, `.simulated_cuda()` start a watch; a race left at the end fails.

    A test that expects races takes them: `races = watch.take()`.
    """
    with ExitStack() as stack:
        watches = StagingWatches(stack)
        yield watches
    if races := watches.races():
        pytest.fail("\n".join(str(race) for race in races[:20]), pytrace=False)
