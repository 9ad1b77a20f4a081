"""Plain PyTorch code on the simulated device: CUDA's order of copies, operations and host reads."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from specmortem import device
from specmortem.device.plain_torch import on_sim, queued
from specmortem.errors import BadInputError

CUDA = torch.device("cuda")


def machine(schedule="lazy"):
    return on_sim(device.open("sim", schedule=schedule))


def host(values, pinned):
    tensor = torch.zeros(len(values), dtype=torch.int32, pin_memory=pinned)
    tensor.numpy()[:] = values
    return tensor


@pytest.mark.parametrize(
    ("pinned", "non_blocking", "schedule", "sum_seen", "waits"),
    [
        (True, True, "lazy", 70, 0),
        (False, True, "lazy", 10, 0),
        (True, False, "lazy", 10, 1),
        (False, False, "lazy", 10, 1),
        (True, True, "immediate", 10, 0),
    ],
)
def test_a_source_is_read_when_its_copy_runs_or_at_the_call(pinned, non_blocking, schedule, sum_seen, waits):
    with machine(schedule) as m:
        source = host([4, 6], pinned)
        copied = source.to(CUDA, non_blocking=non_blocking)
        seen = copied.clone()
        assert m.waits == waits
        source.numpy()[:] = [30, 40]
        assert seen.sum().item() == sum_seen and m.waits == waits + 1


def test_copy_into_existing_memory_and_its_views():
    with machine():
        source, target = host([1, 2, 3], True), torch.zeros(4, dtype=torch.int32, device=CUDA)
        target[1:].copy_(source, non_blocking=True)
        target[0] = 9
        source[0] = 5
        assert target.tolist() == [9, 5, 2, 3]


def test_a_pinned_tensor_pins_itself_and_a_pageable_one_gets_new_memory():
    with machine():
        pinned, pageable = host([1], True), host([2], False)
        fresh = pageable.pin_memory()
        assert pinned.pin_memory() is pinned and pinned.is_pinned() and not pageable.is_pinned()
        assert fresh.is_pinned() and fresh.data_ptr() != pageable.data_ptr()


def test_a_copy_to_pinned_memory_lands_when_it_runs_and_to_pageable_memory_at_once():
    with machine() as m:
        values = torch.arange(3, device=CUDA) + 5
        pinned = torch.zeros(3, dtype=torch.int64, pin_memory=True)
        pinned.copy_(values, non_blocking=True)
        assert pinned.tolist() == [0, 0, 0] and m.waits == 0
        pageable = torch.zeros(3, dtype=torch.int64)
        pageable.copy_(values, non_blocking=True)
        assert pageable.tolist() == pinned.tolist() == [5, 6, 7] and m.waits == 1
        assert values.to("cpu", non_blocking=True).is_pinned() and m.waits == 1


def test_tensors_say_where_they_are():
    with machine():
        here, there = torch.zeros(2), torch.zeros(2, device="cuda")
        assert (here.device.type, there.device.type) == ("cpu", "cuda")
        assert there[:1].is_cuda and not there.is_cpu and here.is_cpu
        assert (
            (there + 1).is_cuda
            and torch.zeros_like(there).is_cuda
            and torch.zeros_like(here, device=CUDA).is_cuda
        )
        assert there.to(here).is_cpu and here.cuda().is_cuda and there.to(CUDA) is there


def test_the_host_waits_for_what_it_reads():
    with machine() as m:
        value = torch.ones(3, device=CUDA)
        reads = (
            lambda: bool(value.sum() > 1),
            value.tolist,
            value.cpu,
            value.sum().item,
            lambda: value[[0, 1]],
        )
        counts = []
        for read in reads:
            before = m.waits
            read()
            counts.append(m.waits - before)
        assert min(counts) >= 1
        with pytest.raises(TypeError, match="cpu"):
            value.numpy()


def test_mixed_places_are_refused_as_pytorch_does():
    with machine(), pytest.raises(BadInputError, match="move one of them"):
        torch.zeros(2, device=CUDA) + torch.zeros(2)


def test_kernels_are_queued():
    class Kernel:
        def __getitem__(self, grid):
            return lambda tensor, amount: tensor.add_(amount * grid[0])

    with machine() as m:
        value = torch.zeros(2, dtype=torch.int32, device=CUDA)
        queued(Kernel(), m)[(3,)](value, 2)
        with m.passed():
            assert value.tolist() == [0, 0]
        assert value.tolist() == [6, 6]


def test_outside_the_block_pytorch_is_itself():
    with machine():
        left = torch.ones(2, device=CUDA) * 3
    assert left.device.type == "cpu" and left.tolist() == [3, 3]


@given(st.lists(st.sampled_from(["add", "double", "slice", "gather", "fill", "cumsum"]), max_size=12))
def test_queued_programs_compute_what_pytorch_computes(steps):
    def program(where):
        value = torch.arange(1, 6, device=where)
        for step in steps:
            if step == "add":
                value += 1
            elif step == "double":
                value = value * 2 % 1009
            elif step == "slice":
                value[1:3] = value[2:4].clone()
            elif step == "gather":
                value = value[value % 5]
            elif step == "fill":
                value[:2].fill_(7)
            else:
                value = torch.cumsum(value, 0)
        return value.cpu()

    with machine():
        simulated = program(CUDA)
    assert simulated.tolist() == program("cpu").tolist()
