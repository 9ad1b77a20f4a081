from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from specmortem import device

from .behaviour import GPU, Behaviour, StalledBehaviour, warm_up

pytestmark = GPU


@pytest.fixture
def dev():
    opened = device.open("cuda")
    warm_up(opened)
    opened.trace.clear()
    opened._step = -1
    return opened


class TestCuda(Behaviour):
    pass


class TestStalled(StalledBehaviour):
    pass


def test_auto_prefers_cuda():
    assert device.open("auto").kind == "cuda"


def test_the_driver_is_named(dev):
    assert re.fullmatch(r"\d+(\.\d+)+", dev.info.driver)


def test_a_spin_lasts_about_as_long_as_asked(dev):
    dev.synchronize()
    start = time.perf_counter()
    dev.spin(20_000)
    dev.synchronize()
    assert 0.015 < time.perf_counter() - start < 0.1


def test_enqueues_do_not_wait_for_the_stream(dev):
    tensor, host = dev.zeros([4], torch.int32), dev.host_buffer([4], torch.int32)
    dev.spin(50_000)
    start = time.perf_counter()
    dev.copy_async(tensor, host)
    dev.launch(tensor.add_, 1)
    dev.copy_async(host, tensor)
    assert time.perf_counter() - start < 0.025
    dev.synchronize()
    assert host[:].tolist() == [1, 1, 1, 1]


def test_temporaries_of_queued_launches_are_not_reused_early(dev):
    total = dev.zeros([1], torch.int64)
    dev.spin(20_000)
    for value in range(100):
        dev.launch(torch.Tensor.add_, total, dev.tensor([value], torch.int64))
    dev.synchronize()
    assert total.item() == 4950


def test_compiled_triton_kernels_run_and_are_captured():
    program = Path(__file__).with_name("triton_program.py")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, str(program), "cuda"], env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["before", "[1,", "1,", "1]", "after", "[11,", "12,", "13]"]
