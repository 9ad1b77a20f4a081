"""Shared set-up: kernels are interpreted unless the run is meant for a GPU."""

import os

import pytest

pytest_plugins = ["pytester"]
if os.environ.get("SPECMORTEM_TEST_DEVICE") != "cuda":
    os.environ["TRITON_INTERPRET"] = "1"
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")


@pytest.fixture
def interpreted() -> None:
    """Skips where this run compiles its kernels for a GPU."""
    if os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("kernels are compiled for a GPU in this run; bounds are checked in the interpreter")
