"""The recorder for plain PyTorch programs, on the simulated stand-in and on CUDA.

Every program is written once and uses none of this package's classes.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest
import torch
from device.behaviour import GPU
from hypothesis import given
from hypothesis import strategies as st

from specmortem.detect import staging
from specmortem.detect.staging import recorder, simulated
from specmortem.detect.staging.arrays import WatchedArray
from specmortem.errors import BadInputError, UnavailableError

DEVICES = ["lazy", "immediate", "random", "timed", pytest.param("cuda", marks=GPU)]
on_every_device = pytest.mark.parametrize("where", DEVICES)


@contextmanager
def watching(where: str) -> Iterator[staging.TorchWatch]:
    """The stand-in under a schedule, or CUDA."""
    with staging.watch_torch() if where == "cuda" else staging.simulated_cuda(where, seed=3) as watched:
        yield watched


def races_of(program, where: str) -> list[staging.Race]:
    with watching(where) as watched:
        program(watched)
        torch.cuda.synchronize()
    return watched.races


def kinds_of(program, where: str) -> set[str]:
    return {race.kind for race in races_of(program, where)}


def line_of(site: str) -> str:
    file, line = site.rsplit(":", 1)
    with open(file) as source:  # noqa: PTH123
        return source.read().splitlines()[int(line) - 1].strip()


# The short program, and its corrected twins


def refill(arm: str):
    """Three plans through one staging buffer; `arm` is what orders them."""

    def program(watched) -> torch.Tensor:
        host = watched.name(torch.zeros(8, dtype=torch.int32, pin_memory=arm != "pageable"), "plan")
        plan = torch.zeros(8, dtype=torch.int32, device="cuda")
        copied, total = torch.cuda.Event(), torch.zeros(8, dtype=torch.int32, device="cuda")
        for value in (1, 2, 3):
            if arm == "event":
                copied.synchronize()
            if arm == "fresh":
                host = torch.zeros(8, dtype=torch.int32).pin_memory()
            host.fill_(value)
            plan.copy_(host, non_blocking=arm != "blocking")
            copied.record()
            total += plan
            wait(arm)
        return total

    return program


def wait(arm: str) -> None:
    if arm == "stream-sync":
        torch.cuda.current_stream().synchronize()
    if arm == "device-sync":
        torch.cuda.synchronize()
    if arm == "wrong-stream":
        torch.cuda.Stream().synchronize()
    if arm == "wrong-event":
        side = torch.cuda.Stream()
        side.record_event().synchronize()


@on_every_device
@pytest.mark.parametrize("arm", ["before", "wrong-stream", "wrong-event"])
def test_fires(arm, where):
    [race] = races_of(refill(arm), where)
    assert (race.kind, race.buffer, race.count) == ("source-overwritten", "plan", 2)
    assert line_of(race.first.site) == 'plan.copy_(host, non_blocking=arm != "blocking")'
    assert line_of(race.second.site) == "host.fill_(value)"
    assert race.first.stack[0].endswith(" in program")
    assert (race.start, race.stop) == (0, 32)
    assert "nothing orders the copy 'from plan' enqueued at test_staging_torch.py:" in race.edge


@on_every_device
@pytest.mark.parametrize("arm", ["event", "fresh", "pageable", "blocking", "stream-sync", "device-sync"])
def test_is_silent(arm, where):
    assert races_of(refill(arm), where) == []


@pytest.mark.parametrize("arm", ["before", "event", "fresh", "pageable", "blocking"])
def test_the_stand_in_computes_what_the_order_allows(arm):
    """Under the lazy schedule the race is seen in the values too; an ordered program gives 1 + 2 + 3."""
    totals = {}
    for schedule in ("lazy", "immediate"):
        with staging.simulated_cuda(schedule) as watched:
            totals[schedule] = refill(arm)(watched).cpu().tolist()
    assert totals == {"lazy": [9 if arm == "before" else 6] * 8, "immediate": [6] * 8}


# The ways to copy


@on_every_device
@pytest.mark.parametrize(
    "copy",
    [
        lambda host: host.to("cuda", non_blocking=True),
        lambda host: host.cuda(non_blocking=True),
        lambda host: host.to(torch.device("cuda"), torch.float32, non_blocking=True),
        lambda host: torch.empty(8, dtype=torch.int32, device="cuda").copy_(host, non_blocking=True),
        lambda host: torch.empty(8, dtype=torch.int64, device="cuda").copy_(host, non_blocking=True),
        lambda host: host[2:6].to("cuda", non_blocking=True),
    ],
)
def test_copies_that_read_when_they_execute(copy, where):
    def program(watched):
        host = torch.arange(8, dtype=torch.int32).pin_memory()
        copy(host)
        host[3] = 9

    [race] = races_of(program, where)
    assert (race.kind, race.start, race.stop) == ("source-overwritten", 12, 16)


@on_every_device
@pytest.mark.parametrize(
    "copy",
    [
        lambda host: host.to("cuda"),
        lambda host: host.cuda(),
        lambda host: torch.empty(8, dtype=torch.int32, device="cuda").copy_(host),
        lambda host: host.pin_memory().clone().to("cuda", non_blocking=True),
        lambda host: host[::2].to("cuda", non_blocking=True),
    ],
)
def test_copies_that_are_over_or_staged_at_the_call(copy, where):
    def program(watched):
        host = torch.arange(8, dtype=torch.int32).pin_memory()
        copy(host)
        host.fill_(9)

    assert races_of(program, where) == []


@on_every_device
def test_a_write_beside_the_copied_rows(where):
    def program(watched):
        host = torch.zeros(8, dtype=torch.int32).pin_memory()
        host[2:6].to("cuda", non_blocking=True)
        host[:2] = 1
        host[6:].add_(1)

    assert races_of(program, where) == []


@on_every_device
def test_pin_memory_of_pinned_memory_is_no_fresh_block(where):
    def program(watched):
        host = torch.zeros(8, dtype=torch.int32).pin_memory()
        host.pin_memory().to("cuda", non_blocking=True)
        host.fill_(1)

    assert kinds_of(program, where) == {"source-overwritten"}


# Destinations


def fetch(read, order=lambda: None):
    def program(watched):
        counts = torch.arange(8, dtype=torch.int32, device="cuda")
        host = torch.empty(8, dtype=torch.int32, pin_memory=True)
        host.copy_(counts, non_blocking=True)
        order()
        read(host)

    return program


READS = {
    "item": lambda host: host[3].item(),
    "tolist": lambda host: host.tolist(),
    "sum": lambda host: host.sum(),
    "clone": lambda host: host.clone(),
    "numpy": lambda host: host.numpy()[3],
    "numpy ufunc": lambda host: host.numpy() + 1,
    "numpy reduction": lambda host: host.numpy().max(),
    "numpy function": lambda host: np.concatenate([host.numpy(), host.numpy()]),
    "numpy loop": lambda host: list(host.numpy()),
}


@on_every_device
@pytest.mark.parametrize("read", READS)
def test_a_destination_read_before_the_copy(read, where):
    assert kinds_of(fetch(READS[read]), where) == {"destination-read"}


@on_every_device
@pytest.mark.parametrize("read", READS)
def test_a_destination_read_after_the_copy(read, where):
    assert races_of(fetch(READS[read], lambda: torch.cuda.current_stream().synchronize()), where) == []


@on_every_device
def test_a_view_of_a_destination_is_no_read(where):
    def program(watched):
        host = torch.empty(8, dtype=torch.int32, pin_memory=True)
        host.copy_(torch.arange(8, dtype=torch.int32, device="cuda"), non_blocking=True)
        views = host[1:3], host.view(2, 4).t(), host.numpy()[2:]
        torch.cuda.synchronize()
        return [view.sum() for view in views]

    assert races_of(program, where) == []


@on_every_device
def test_staging_a_source_reads_it(where):
    def program(watched):
        host = torch.zeros(8, dtype=torch.int32).pin_memory()
        host.copy_(torch.arange(8, dtype=torch.int32, device="cuda"), non_blocking=True)
        host[::2].to("cuda", non_blocking=True)

    assert kinds_of(program, where) == {"destination-read"}


@on_every_device
def test_a_copy_into_a_strided_view_is_over_at_return(where):
    def program(watched):
        host = torch.zeros(8, dtype=torch.int32).pin_memory()
        host[::2].copy_(torch.arange(4, dtype=torch.int32, device="cuda"), non_blocking=True)
        host.fill_(1)

    assert races_of(program, where) == []


@on_every_device
def test_to_cpu_without_blocking_gives_memory_that_is_not_ready(where):
    def early(watched):
        return torch.arange(8, device="cuda").to("cpu", non_blocking=True).sum()

    def late(watched):
        host, done = torch.arange(8, device="cuda").to("cpu", non_blocking=True), torch.cuda.Event()
        done.record()
        done.synchronize()
        return host.sum()

    assert kinds_of(early, where) == {"destination-read"}
    assert races_of(late, where) == []


@on_every_device
@pytest.mark.parametrize(
    "read", [lambda t: t.cpu().sum(), lambda t: t.to("cpu").sum(), lambda t: t.sum().item()]
)
def test_blocking_reads_of_device_memory(read, where):
    assert races_of(lambda watched: read(torch.arange(8, device="cuda")), where) == []


@on_every_device
@pytest.mark.parametrize("blocking", ["item", "cpu", "nonzero"])
def test_a_blocking_read_orders_the_copies_before_it(blocking, where):
    def program(watched):
        host = torch.ones(8, dtype=torch.int32).pin_memory()
        device = host.to("cuda", non_blocking=True)
        getattr(device[:1], blocking)()
        host.fill_(2)

    assert races_of(program, where) == []


@on_every_device
@pytest.mark.parametrize(
    ("use", "kinds"),
    [
        (lambda device, index: device[index], {"source-overwritten"}),
        (lambda device, index: device[index > 0], set()),
        (lambda device, index: device.index_put_((index,), index), {"source-overwritten"}),
        (lambda device, index: device.masked_fill_(index > 0, 5), {"source-overwritten"}),
        (lambda device, index: device.masked_select(index > 0), set()),
    ],
)
def test_operations_whose_result_the_host_needs_order(use, kinds, where):
    def program(watched):
        host = torch.ones(8, dtype=torch.int64).pin_memory()
        index = torch.arange(8, device="cuda")
        use(host.to("cuda", non_blocking=True), index)
        host.fill_(2)

    assert kinds_of(program, where) == kinds


@on_every_device
@pytest.mark.parametrize("wait", [False, True])
def test_rows_swapped_under_a_copy(wait, where):
    """Counts fly into an array whose rows the host swaps through numpy meanwhile."""

    def program(watched):
        counts = torch.tensor([4, 2, 3, 1], dtype=torch.int32, device="cuda")
        host = watched.name(torch.ones(4, dtype=torch.int32, pin_memory=True), "rows")
        rows, arrived = host.numpy(), torch.cuda.Event()
        host.copy_(counts, non_blocking=True)
        arrived.record()
        if wait:
            arrived.synchronize()
        rows[0], rows[3] = rows[3], rows[0]
        arrived.synchronize()

    found = kinds_of(program, where)
    assert found == (set() if wait else {"destination-read", "destination-overwritten"})


# Writes that torch does not dispatch


@on_every_device
@pytest.mark.parametrize("write", ["setitem", "ufunc", "copyto", "fill", "view"])
def test_writes_through_numpy_have_their_line(write, where):
    def program(watched):
        host = torch.zeros(8, dtype=torch.int32).pin_memory()
        array = host.numpy()
        host.to("cuda", non_blocking=True)
        if write == "setitem":
            array[2:4] = 1
        elif write == "ufunc":
            np.add(array, 1, out=array)
        elif write == "copyto":
            np.copyto(array, 1)
        elif write == "fill":
            array.fill(1)
        else:
            array[4:][1] = 1

    races = races_of(program, where)
    assert {race.kind for race in races} == {"source-overwritten"}
    assert {race.second.until for race in races} == {""}


@on_every_device
@pytest.mark.parametrize("end", ["sync", "event", "next copy", "end"])
def test_a_changed_source_is_found_by_content(end, where):
    """The array is from before the watch, so nothing tells of the write."""
    blocks = []

    def program(watched):
        host = blocks[-1]
        host.to("cuda", non_blocking=True)
        done = torch.cuda.Event()
        done.record()
        unheard(host)[2:4] = -1
        if end == "sync":
            torch.cuda.synchronize()
        elif end == "event":
            done.synchronize()
        elif end == "next copy":
            host.to("cuda", non_blocking=True)

    with watching(where) as watched:
        blocks.append(torch.zeros(8, dtype=torch.int32).pin_memory())
        program(watched)
    [race] = watched.races
    assert (race.kind, race.start, race.stop) == ("source-overwritten", 8, 16)
    assert line_of(race.first.site) == 'host.to("cuda", non_blocking=True)'
    assert race.second.until and "host write between test_staging_torch.py:" in race.edge
    assert "test_staging_torch.py:" in race.second.until


def unheard(host: torch.Tensor) -> np.ndarray:
    """Its memory as an array that tells nothing."""
    return np.asarray(host.numpy()).view(np.ndarray)


@on_every_device
def test_an_unheard_write_happened_after_the_last_look(where):
    def program(watched):
        host = torch.zeros(8, dtype=torch.int32).pin_memory()
        host.to("cuda", non_blocking=True)
        torch.cuda.Stream().synchronize()
        unheard(host)[0] = -1

    [race] = races_of(program, where)
    assert line_of(race.second.site) == "torch.cuda.Stream().synchronize()"


@on_every_device
def test_an_unheard_write_before_one_that_is_heard(where):
    def program(watched):
        host = torch.zeros(8, dtype=torch.int32).pin_memory()
        host.to("cuda", non_blocking=True)
        unheard(host)[0] = -1
        host[4:] = 1

    races = races_of(program, where)
    assert sorted((race.start, race.stop, bool(race.second.until)) for race in races) == [
        (0, 4, True),
        (16, 32, False),
    ]


@on_every_device
@pytest.mark.parametrize("waits", [False, True])
def test_a_declared_copy(waits, where):
    """A planner in C++ fills its own pinned workspace and copies it, as torch cannot see."""

    def program(watched):
        workspace = watched.name(torch.zeros(8, dtype=torch.int32).pin_memory(), "workspace")
        device = torch.zeros(8, dtype=torch.int32, device="cuda")
        for plan in (1, 2, 3):
            unheard(workspace)[:] = -plan
            watched.copied(device, workspace)
            if waits:
                torch.cuda.current_stream().synchronize()

    races = races_of(program, where)
    assert [(race.kind, race.buffer, race.count) for race in races] == (
        [] if waits else [("source-overwritten", "workspace", 2)]
    )


def test_a_declared_copy_is_between_host_and_device():
    with staging.simulated_cuda() as watched, pytest.raises(BadInputError, match="one tensor of the device"):
        watched.copied(torch.zeros(2), torch.zeros(2))


@on_every_device
def test_a_source_that_changes_after_the_wait_is_no_race(where):
    def program(watched):
        host = torch.zeros(8, dtype=torch.int32).pin_memory()
        host.to("cuda", non_blocking=True)
        torch.cuda.synchronize()
        unheard(host)[2:4] = 7

    assert races_of(program, where) == []


@on_every_device
def test_a_copy_into_the_source_behind_it_is_no_host_write(where):
    def program(watched):
        host = torch.zeros(8, dtype=torch.int32).pin_memory()
        device = host.to("cuda", non_blocking=True) + 1
        host.copy_(device, non_blocking=True)
        host.to("cuda", non_blocking=True)

    assert races_of(program, where) == []


@on_every_device
def test_a_copy_into_the_source_before_it_is_no_host_write(where):
    def program(watched):
        host, landed = torch.zeros(8, dtype=torch.int32).pin_memory(), torch.cuda.Event()
        host.copy_(torch.full([8], 3, dtype=torch.int32, device="cuda"), non_blocking=True)
        landed.record()
        host.to("cuda", non_blocking=True)
        landed.synchronize()

    with watching(where) as watched:
        program(watched)
    assert watched.races == []


# Streams and events


def across(order):
    """A copy on a side stream; `order(side)` before the source is written."""

    def program(watched):
        host, side = torch.zeros(8, dtype=torch.int32).pin_memory(), torch.cuda.Stream()
        with torch.cuda.stream(side):
            host.to("cuda", non_blocking=True)
        order(side)
        host.fill_(1)

    return program


def through_wait_stream(side) -> None:
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.current_stream().synchronize()


def through_wait_event(side) -> None:
    torch.cuda.current_stream().wait_event(side.record_event())
    torch.cuda.current_stream().synchronize()


def poll(side) -> None:
    done = side.record_event()
    for _ in range(10_000_000):
        if done.query():
            return
        torch.cuda.current_stream().synchronize()


@on_every_device
@pytest.mark.parametrize(
    "order",
    [
        lambda side: side.synchronize(),
        lambda side: side.record_event().synchronize(),
        lambda side: torch.cuda.synchronize(),
        through_wait_stream,
        through_wait_event,
    ],
)
def test_orders(order, where):
    assert races_of(across(order), where) == []


@on_every_device
@pytest.mark.parametrize(
    "order",
    [
        lambda side: None,
        lambda side: torch.cuda.current_stream().synchronize(),
        lambda side: side.wait_stream(torch.cuda.current_stream()),
        lambda side: torch.cuda.current_stream().wait_stream(side),
        lambda side: torch.cuda.Event().synchronize(),
    ],
)
def test_does_not_order(order, where):
    assert kinds_of(across(order), where) == {"source-overwritten"}


@pytest.mark.parametrize("where", ["immediate", "random", pytest.param("cuda", marks=GPU)])
def test_a_poll_that_ends_orders(where):
    assert races_of(across(poll), where) == []


def graph_program(waits: bool):
    def program(watched):
        host = torch.zeros(8, dtype=torch.int32).pin_memory()
        device, graph = torch.zeros(8, dtype=torch.int32, device="cuda"), torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            device.copy_(host, non_blocking=True)
        host.fill_(1)
        graph.replay()
        if waits:
            torch.cuda.synchronize()
        host.fill_(2)

    return program


@pytest.mark.parametrize("where", [pytest.param("cuda", marks=GPU)])
def test_a_replay_reads_its_source_anew(where):
    [race] = races_of(graph_program(waits=False), where)
    assert line_of(race.first.site) == "graph.replay()"
    assert line_of(race.second.site) == "host.fill_(2)"
    assert races_of(graph_program(waits=True), where) == []


# The recorder itself, with the stand-in in the place of CUDA


@contextmanager
def recorded_over_the_stand_in(schedule, monkeypatch) -> Iterator[staging.TorchWatch]:
    """Run `watch_torch()` against the stand-in, whose implicit waits it has to know by itself."""
    monkeypatch.setattr(recorder, "missing", lambda: "")
    monkeypatch.setattr(recorder.Recorder, "is_pinned", lambda _, tensor: simulated._active.is_pinned(tensor))
    monkeypatch.setattr(simulated.Carrier, "join_stream", lambda self: self.current().stream.synchronize())
    with staging.simulated_cuda(schedule), staging.watch_torch() as watched:
        yield watched


ORDERS = {
    "nothing": lambda done: None,
    "event": lambda done: done.synchronize(),
    "stream": lambda done: torch.cuda.current_stream().synchronize(),
    "device": lambda done: torch.cuda.synchronize(),
    "stream query": lambda done: torch.cuda.current_stream().query(),
    "other stream": lambda done: torch.cuda.Stream().synchronize(),
    "through a stream": lambda done: through_another(torch.cuda.Stream(), done),
    "wait for the wrong": lambda done: torch.cuda.Stream().wait_stream(torch.cuda.current_stream()),
}
ORDERING = {"event", "stream", "device", "through a stream"}


def through_another(side, done) -> None:
    side.wait_event(done)
    side.synchronize()


@pytest.mark.parametrize("schedule", ["lazy", "immediate"])
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("use", ["source", "destination", "content", "pageable", "blocking"])
def test_the_recorder_without_a_gpu(use, order, schedule, monkeypatch):
    with recorded_over_the_stand_in(schedule, monkeypatch) as watched:
        host = watched.name(torch.zeros(8, dtype=torch.int32, pin_memory=use != "pageable"), "host")
        device, done = torch.zeros(8, dtype=torch.int32, device="cuda"), torch.cuda.Event()
        ends = (host, device) if use == "destination" else (device, host)
        ends[0].copy_(ends[1], non_blocking=use != "blocking")
        done.record()
        if use == "content":
            unheard(host)[1] = -1
        ORDERS[order](done)
        if use == "destination":
            host.sum()
        elif use != "content":
            host.fill_(1)
    ordered = order in ORDERING or (order == "stream query" and schedule == "immediate")
    silent = use in ("pageable", "blocking") or (ordered and use != "content")
    assert [race.kind for race in watched.races] == ([] if silent else [KIND[use]])
    assert {race.buffer for race in watched.races} <= {"host"}


KIND = {
    "source": "source-overwritten",
    "content": "source-overwritten",
    "destination": "destination-read",
}


@pytest.mark.parametrize("schedule", ["lazy", "immediate"])
def test_the_recorder_knows_what_a_copy_up_changes(schedule, monkeypatch):
    with recorded_over_the_stand_in(schedule, monkeypatch) as watched:
        host, device = (
            torch.zeros(8, dtype=torch.int32, pin_memory=True),
            torch.ones(8, device="cuda").int(),
        )
        device.copy_(host, non_blocking=True)
        host.copy_(device + 1, non_blocking=True)
    assert watched.races == []


def test_the_recorder_looks_before_a_copy_up(monkeypatch):
    with recorded_over_the_stand_in("lazy", monkeypatch) as watched:
        host, device = torch.zeros(8, dtype=torch.int32, pin_memory=True), torch.ones(8, device="cuda").int()
        device.copy_(host, non_blocking=True)
        unheard(host)[1] = -1
        host.copy_(device, non_blocking=True)
    assert [(race.kind, race.start, race.stop) for race in watched.races] == [("source-overwritten", 4, 8)]


@pytest.mark.parametrize("use", [lambda device: device[0].item(), lambda device: device + 1])
def test_the_recorder_knows_what_waits(use, monkeypatch):
    with recorded_over_the_stand_in("immediate", monkeypatch) as watched:
        host, device = torch.zeros(8, dtype=torch.int32, pin_memory=True), torch.ones(8, device="cuda").int()
        device.copy_(host, non_blocking=True)
        scalar = isinstance(use(device), int)
        host.fill_(1)
    assert len(watched.races) == (0 if scalar else 1)


def test_arrays_are_not_heard_after_the_block(monkeypatch):
    with recorded_over_the_stand_in("lazy", monkeypatch) as watched:
        host, device = torch.zeros(8, dtype=torch.int32, pin_memory=True), torch.ones(8, device="cuda").int()
        array = host.numpy()
        device.copy_(host, non_blocking=True)
    array[0] = 1
    assert watched.races == []


def test_the_recorder_puts_everything_back(monkeypatch):
    names = ("record", "wait", "query", "synchronize")
    with staging.simulated_cuda():
        before = [getattr(torch.cuda.Event, name) for name in names], torch.cuda.synchronize
        monkeypatch.setattr(recorder, "missing", lambda: "")
        with staging.watch_torch():
            assert torch.cuda.Event.record is not before[0][0]
        assert ([getattr(torch.cuda.Event, name) for name in names], torch.cuda.synchronize) == before


# The stand-in


def test_the_stand_in_computes_like_torch():
    def program(place):
        torch.manual_seed(3)
        x = torch.rand(4, 5).to(place)
        y = torch.arange(5, device=x.device, dtype=torch.float32)
        z = (x * y).softmax(-1)[1:, ::2].t().contiguous()
        z[0].add_(1)
        order = torch.argsort(z.sum(1), descending=True)
        picked = z[order].view(-1)[picked_mask(x)]
        return picked.to(torch.float64).cpu(), bool((z > 0).all()), z.shape, torch.topk(z, 2).values.cpu()

    def picked_mask(x):
        return torch.ones(9, dtype=torch.bool, device=x.device)

    expected = program("cpu")
    for schedule in ("lazy", "immediate", "random", "timed"):
        with staging.simulated_cuda(schedule):
            found = program("cuda")
        assert torch.equal(found[0], expected[0]) and torch.equal(found[3], expected[3])
        assert found[1:3] == expected[1:3]


def test_device_tensors_look_like_those_of_cuda():
    with staging.simulated_cuda():
        x = torch.zeros(3, device="cuda")
        assert x.is_cuda and x.device == torch.device("cuda", 0) and (x + 1).is_cuda and x[1:].is_cuda
        assert torch.zeros_like(x).is_cuda and x.new_zeros(2).is_cuda and not x.cpu().is_cuda
        assert torch.zeros(3, pin_memory=True).is_pinned() and not torch.zeros(3).is_pinned()
        assert torch.cuda.is_available()
        with pytest.raises(RuntimeError, match="same device"):
            x + torch.zeros(3)


def test_numpy_refuses_a_device_tensor_as_on_cuda():
    with staging.simulated_cuda():
        x = torch.ones(2, device="cuda")
        assert not x.is_cpu and x.numpy(force=True).tolist() == x.tolist() == [1, 1]
        for convert in (x.numpy, lambda: np.asarray(x)):
            with pytest.raises(TypeError, match=r"use Tensor\.cpu\(\) first"):
                convert()


def test_an_index_of_the_host_is_uploaded_at_the_call():
    with staging.simulated_cuda("lazy") as watched:
        x, index = torch.arange(4, device="cuda"), torch.tensor([3, 1])
        picked = x[index]
        x[index] = -1
        index.zero_()
        assert picked.tolist() == [3, 1] and x.tolist() == [0, -1, 2, -1]
    assert watched.races == []


class AddKernel:
    """Launched like a Triton kernel: adds `amount` times the grid's size, and keeps count of its runs."""

    runs = 0

    def __getitem__(self, grid):
        def run(tensor, amount):
            self.runs += 1
            tensor.add_(amount * grid[0])

        return run


def test_kernels_of_the_stand_in_are_queued_and_watched():
    with staging.simulated_cuda("lazy") as watched:
        plain, side = AddKernel(), torch.cuda.Stream()
        kernel = watched.interceptor.queued(plain)
        x = watched.name(torch.zeros(2, dtype=torch.int32, device="cuda"), "x")
        kernel[(3,)](x, 2)
        assert plain.runs == 0
        assert x.tolist() == [6, 6] and plain.runs == 1 and watched.races == []
        kernel[(1,)](x, 1)
        with torch.cuda.stream(side):
            x.mul_(2)
    assert [(race.kind, race.buffer) for race in watched.races] == [("between-streams", "x")]


@given(st.lists(st.sampled_from(["add", "double", "slice", "gather", "fill", "cumsum"]), max_size=12))
def test_queued_programs_compute_what_torch_computes(steps):
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
        return value.cpu().tolist()

    with staging.simulated_cuda("lazy"):
        simulated = program("cuda")
    assert simulated == program("cpu")


def test_streams_race_on_device_memory_of_the_stand_in():
    def program(watched, waits=False):
        x, side = watched.name(torch.zeros(3, device="cuda"), "x"), torch.cuda.Stream()
        x.add_(1)
        if waits:
            side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            x.mul_(2)

    [race] = races_of(program, "immediate")
    assert (race.kind, race.buffer, race.second.name) == ("between-streams", "x", "mul_")
    assert races_of(lambda watched: program(watched, waits=True), "lazy") == []


def test_torch_is_as_before_after_the_block():
    before = {
        name: getattr(torch.cuda, name) for name in ("Stream", "Event", "synchronize", "current_stream")
    }
    with pytest.raises(ZeroDivisionError), staging.simulated_cuda():
        raise ZeroDivisionError
    assert before == {name: getattr(torch.cuda, name) for name in before}
    assert type(torch.zeros(3).numpy()) is np.ndarray
    assert "numpy" not in vars(torch.Tensor) and "tolist" not in vars(torch.Tensor)


def test_bad_schedules_are_refused():
    with pytest.raises(BadInputError, match="schedule"), staging.simulated_cuda("sometimes"):
        pass


def test_one_stand_in_at_a_time():
    with staging.simulated_cuda():
        second = staging.simulated_cuda()
        with pytest.raises(BadInputError, match="open already"), second:
            pass
    with staging.simulated_cuda() as watched:
        assert watched.races == []


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_watch_torch_needs_a_gpu():
    with pytest.raises(UnavailableError, match="simulated_cuda"), staging.watch_torch():
        pass


# Arrays


def test_arrays_tell_before_every_access():
    told = []
    plain = np.arange(12, dtype=np.int32).reshape(3, 4)
    start = plain.__array_interface__["data"][0]

    def tell(region, write):
        told.append((region.start - start, region.stop - start, write))

    def told_by(access):
        told.clear()
        access()
        return told[:]

    array = WatchedArray.over(plain, tell)
    assert told_by(lambda: array[1, 2]) == [(24, 28, False)]
    assert told_by(lambda: array[1]) == []
    assert told_by(lambda: array[1][3]) == [(28, 32, False)]
    assert told_by(lambda: array[[0, 2]]) == [(0, 48, False)]
    assert told_by(lambda: array.__setitem__((0, slice(1, 3)), 5)) == [(4, 12, True)]
    assert told_by(lambda: array.__setitem__([0], array[2])) == [(32, 48, False), (0, 48, True)]
    assert told_by(lambda: array[0].__iadd__(1)) == [(0, 16, False), (0, 16, True)]
    assert told_by(lambda: array.sum()) == [(0, 48, False)]
    assert told_by(lambda: np.add.at(array, [0], 1)) == [(0, 48, True)]
    assert told_by(lambda: np.cumsum(plain[0], out=array[1]))[-1] == (16, 32, True)
    assert told_by(lambda: np.copyto(array[2], array[0])) == [(32, 48, True), (0, 16, False)]
    for read in ("tolist", "copy", "tobytes"):
        assert told_by(getattr(array, read)) == [(0, 48, False)]
    assert told_by(lambda: array.astype(np.int64)) == [(0, 48, False)]
    assert told_by(lambda: array[0, :1].item()) == [(0, 4, False)]
    assert told_by(lambda: array[2].sort()) == [(32, 48, True)]
    assert told_by(lambda: array[2].fill(0)) == [(32, 48, True)]
    assert plain[2].tolist() == [0, 0, 0, 0]


@on_every_device
def test_events_may_die_inside_the_block(where):
    """A collection behind them finds nothing that points at what is gone."""

    def program(watched) -> None:
        host = torch.zeros(8, dtype=torch.int32, pin_memory=True)
        for _ in range(200):
            host.to("cuda", non_blocking=True)
            event = torch.cuda.Event()
            event.record()
            event.synchronize()
        del event
        gc.collect()
        host.fill_(1)

    assert races_of(program, where) == []
