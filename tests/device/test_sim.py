from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from specmortem import device
from specmortem.errors import BadInputError, UnavailableError

from .behaviour import Behaviour, StalledBehaviour, add, assign, buffer, content, double, ints

SCHEDULES = [("lazy", 0), ("immediate", 0), ("timed", 0), *(("random", seed) for seed in range(5))]


class TestEverySchedule(Behaviour):
    @pytest.fixture(params=SCHEDULES, ids=lambda p: f"{p[0]}-{p[1]}")
    def dev(self, request):
        schedule, seed = request.param
        return device.open("sim", schedule=schedule, seed=seed)


class TestStalled(StalledBehaviour):
    @pytest.fixture(params=["lazy", "timed"])
    def dev(self, request):
        return device.open("sim", schedule=request.param)


def test_unknown_kinds_are_refused():
    with pytest.raises(BadInputError, match="'tpu' is not one of sim, cuda, auto"):
        device.open("tpu")


@pytest.mark.skipif(torch.cuda.is_available(), reason="a CUDA device is there")
def test_cuda_says_why_it_is_missing_and_auto_does_without():
    with pytest.raises(UnavailableError, match="no CUDA device: torch .*open 'sim' or 'auto'"):
        device.open("cuda")
    assert device.open("auto").kind == "sim"


def test_empty_is_the_same_poison_each_time():
    dev = device.open("sim")
    first, second = (dev.empty([2], torch.int32) for _ in range(2))
    assert content(dev, first) == content(dev, second) == [0x7F7F7F7F] * 2
    assert content(dev, dev.empty([1], torch.bool)) == [True]


def test_the_trace_shows_when_queued_work_ran():
    dev = device.open("sim", schedule="lazy")
    tensor, host = ints(dev, 0), buffer(dev, 1)
    dev.copy_async(tensor, host, name="upload")
    host[0] = 2
    dev.synchronize()
    story = [(r.by, r.what, r.step) for r in dev.trace][1:]
    assert story == [
        ("host", "copy", 1),
        ("host", "write", 2),
        ("queue", "copy", 1),
        ("host", "synchronize", 3),
    ]


def test_observers_hear_executions():
    heard = []

    class Ear(device.Observer):
        def executed(self, stream, op):
            heard.append((stream.name, op.name))

    dev = device.open("sim", schedule="lazy")
    dev.observers.append(Ear())
    dev.launch(double, ints(dev, 1), stream=dev.stream("side"))
    assert heard == []
    dev.synchronize()
    assert heard == [("side", "double")]


def test_synchronize_runs_other_streams_only_through_waits():
    dev = device.open("sim", schedule="lazy")
    tensors, event = [ints(dev, 0) for _ in range(3)], dev.event()
    dev.launch(assign, tensors[0], 1)
    event.record()
    dev.launch(assign, tensors[1], 1)
    side = dev.stream("side")
    side.wait(event)
    dev.launch(assign, tensors[2], 1, stream=side)
    side.synchronize()
    assert [int(tensor) for tensor in tensors] == [1, 0, 1]


def test_an_operation_that_fails_raises_at_the_synchronize():
    def broken(tensor):
        raise ZeroDivisionError("in the kernel")

    dev = device.open("sim", schedule="lazy")
    dev.launch(broken, ints(dev, 1))
    with pytest.raises(ZeroDivisionError):
        dev.synchronize()
    dev.synchronize()


def test_tensors_of_queued_work_stay_alive():
    dev = device.open("sim", schedule="lazy")
    total = ints(dev, 0)

    def accumulate(into, value):
        into.add_(value)

    for value in range(20):
        dev.launch(accumulate, total, ints(dev, value))
    assert content(dev, total) == [190]


def test_polling_under_the_lazy_schedule_ends_in_an_error():
    dev = device.open("sim", schedule="lazy")
    event = dev.event("never")
    dev.launch(add, ints(dev, 1), 1)
    event.record()
    with pytest.raises(BadInputError, match="event 'never' was asked .* synchronize it, or bound the polls"):
        while not event.query():
            dev.host_time(1)


@pytest.mark.skipif(sys.platform != "linux", reason="Triton is a Linux package")
def test_triton_kernels_run_in_the_interpreter():
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    program = Path(__file__).with_name("triton_program.py")
    done = subprocess.run(
        [sys.executable, str(program), "sim"], env=environment, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["before", "[1,", "1,", "1]", "after", "[11,", "12,", "13]"]
