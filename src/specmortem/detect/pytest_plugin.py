"""The pytest fixture `bounds_watch`: a kernel test fails when a launch leaves the bounds of its tensors."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from specmortem.detect.bounds import Watch


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
