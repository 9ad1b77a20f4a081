"""What both devices do; the test modules run these classes with a fixture `dev`.

`Behaviour` holds under every schedule. `StalledBehaviour` needs a stream that `stall` keeps from running:
a spin on CUDA and under the timed schedule, nothing at all under the lazy one.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress

import numpy as np
import pytest
import torch

from specmortem import device
from specmortem.device import CaptureError, Device, HostBuffer, Stream
from specmortem.errors import BadInputError

GPU = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch.cuda.is_available() is False"),
]
STALL_US = 30_000
FORBIDDEN = ["device-sync", "stream-sync", "event-sync", "query", "record", "wait", "read", "write"]
FORBIDDEN += ["zeros", "host-buffer", "stream", "other-stream", "replay", "capture"]


def assign(tensor: torch.Tensor, value: int) -> None:
    tensor.fill_(value)


def add(tensor: torch.Tensor, value: int) -> None:
    tensor.add_(value)


def double(tensor: torch.Tensor) -> None:
    tensor.mul_(2)


def copy(dst: torch.Tensor, src: torch.Tensor) -> None:
    dst.copy_(src)


def add_first(tensor: torch.Tensor, values: list[int] | np.ndarray) -> None:
    tensor.add_(int(values[0]))


def ints(dev: Device, *values: int) -> torch.Tensor:
    return dev.tensor(list(values), torch.int32)


def buffer(dev: Device, *values: int, pinned: bool = True) -> HostBuffer:
    made = dev.host_buffer([len(values)], torch.int32, pinned=pinned, name="buffer")
    made[:] = values
    return made


def content(dev: Device, tensor: torch.Tensor) -> list[int]:
    """A tensor's values once everything has run."""
    dev.synchronize()
    host = dev.host_buffer(tensor.shape, tensor.dtype, pinned=False)
    dev.copy_async(host, tensor)
    return host[...].tolist()


def stall(dev: Device, stream: Stream | None = None) -> None:
    dev.spin(STALL_US, stream)


def warm_up(dev: Device) -> None:
    """Load every kernel that the tests launch: CUDA may wait for all streams when it loads one."""
    tensor, other = ints(dev, 1, 2), ints(dev, 0, 0)
    grid = dev.zeros([2, 3], torch.int32)
    assign(tensor, 1), add(tensor, 1), double(tensor), copy(other, tensor), copy(grid[:, 1], tensor)
    content(dev, grid[:, 1].contiguous()), content(dev, grid[:, 1])
    with dev.capture() as graph:
        dev.launch(double, tensor)
    graph.replay()
    dev.synchronize()


class Behaviour:
    def test_launches_of_one_stream_run_in_order(self, dev):
        tensor = ints(dev, 1)
        dev.launch(double, tensor)
        dev.launch(add, tensor, 5)
        dev.launch(double, tensor)
        assert content(dev, tensor) == [14]

    def test_new_tensors_hold_what_was_asked_for(self, dev):
        assert content(dev, dev.zeros([2], torch.int32)) == [0, 0]
        assert content(dev, dev.full([2], 7, torch.int64)) == [7, 7]
        assert content(dev, dev.tensor([[1, 2]], torch.int16)) == [[1, 2]]
        assert dev.empty([3, 2], torch.float32).shape == (3, 2)

    def test_tensors_live_on_the_torch_device(self, dev):
        assert dev.zeros([1], torch.int32).device.type == dev.torch_device

    def test_device_info_names_the_device(self, dev):
        assert dev.info.kind == dev.kind
        assert dev.info.name

    def test_a_new_host_buffer_is_zero(self, dev):
        assert dev.host_buffer([3], torch.int32)[:].tolist() == [0, 0, 0]

    def test_a_host_read_is_a_copy(self, dev):
        host = buffer(dev, 1, 2)
        before = host[:]
        host[0] = 9
        assert before.tolist() == [1, 2]

    def test_host_indices_are_numpys(self, dev):
        host = dev.host_buffer([2, 3], torch.int32)
        host[1, 2], host[0], host[:, 0], host[host[:] == 0] = 5, 1, [7, 8], 3
        assert host[...].tolist() == [[7, 1, 1], [8, 3, 5]]
        assert host[[1, 0], [2, 0]].tolist() == [5, 7]
        assert host[1, 2] == 5

    def test_copies_go_down_across_and_up(self, dev):
        source, target = buffer(dev, 1, 2, 3), buffer(dev, 0, 0, 0)
        first, second = ints(dev, 0, 0, 0), ints(dev, 0, 0, 0)
        dev.copy_async(first, source)
        dev.copy_async(second, first)
        dev.copy_async(target, second)
        dev.synchronize()
        assert target[:].tolist() == [1, 2, 3]

    def test_stream_synchronize_completes_its_copies(self, dev):
        tensor, host, stream = ints(dev, 4), buffer(dev, 0), dev.stream("side")
        dev.copy_async(host, tensor, stream)
        stream.synchronize()
        assert host[0] == 4

    def test_event_synchronize_completes_what_was_recorded(self, dev):
        tensor, host, event = ints(dev, 4), buffer(dev, 0), dev.event()
        dev.copy_async(host, tensor)
        event.record()
        event.synchronize()
        assert host[0] == 4

    def test_a_pageable_copy_takes_its_source_at_the_call(self, dev):
        tensor, host = ints(dev, 0), buffer(dev, 1, pinned=False)
        dev.copy_async(tensor, host)
        host[0] = 2
        assert content(dev, tensor) == [1]

    def test_a_copy_into_pageable_memory_is_done_at_return(self, dev):
        tensor, host = ints(dev, 1), buffer(dev, 0, pinned=False)
        dev.launch(add, tensor, 4)
        dev.copy_async(host, tensor)
        assert host[0] == 5

    def test_an_event_never_recorded_is_complete(self, dev):
        event, tensor = dev.event(), ints(dev, 1)
        dev.default_stream.wait(event)
        event.synchronize()
        dev.launch(double, tensor)
        assert event.query()
        assert content(dev, tensor) == [2]

    def test_query_is_true_after_synchronize(self, dev):
        event = dev.event()
        dev.spin(100)
        event.record()
        dev.synchronize()
        assert event.query()

    def test_a_wait_orders_two_streams(self, dev):
        tensor, event, other = ints(dev, 1), dev.event(), dev.stream("other")
        dev.spin(2000)
        dev.launch(add, tensor, 4)
        event.record()
        other.wait(event)
        dev.launch(double, tensor, stream=other)
        assert content(dev, tensor) == [10]

    def test_a_wait_chain_orders_three_streams(self, dev):
        tensor, events = ints(dev, 1), [dev.event(), dev.event()]
        streams = [dev.default_stream, dev.stream("second"), dev.stream("third")]
        dev.spin(2000)
        for index, stream in enumerate(streams):
            if index:
                stream.wait(events[index - 1])
            dev.launch(add, tensor, 1, stream=stream)
            dev.launch(double, tensor, stream=stream)
            if index < 2:
                events[index].record(stream)
        streams[2].synchronize()
        assert content(dev, tensor) == [22]

    def test_a_stream_is_known_by_its_name(self, dev):
        assert dev.stream("side") is dev.stream("side")
        assert dev.stream("side") is not dev.default_stream

    def test_scalars_are_taken_at_the_launch(self, dev):
        tensor = ints(dev, 0)
        for value in (1, 20):
            dev.launch(add, tensor, value)
        assert content(dev, tensor) == [21]

    @pytest.mark.parametrize("container", [list, np.array])
    def test_containers_are_taken_at_the_launch(self, dev, container):
        tensor, values = ints(dev, 0), container([3])
        dev.launch(add_first, tensor, values)
        values[0] = 50
        assert content(dev, tensor) == [3]

    def test_copies_between_views_touch_nothing_else(self, dev):
        tensor, host = dev.zeros([2, 3], torch.int32), buffer(dev, 5, 6)
        dev.copy_async(tensor[:, 1], host)
        assert content(dev, tensor) == [[0, 5, 0], [0, 6, 0]]

    def test_a_strided_view_can_be_copied_up(self, dev):
        tensor, host = dev.tensor([[1, 2], [3, 4]], torch.int32), buffer(dev, 0, 0)
        dev.copy_async(host, tensor[:, 1])
        dev.synchronize()
        assert host[:].tolist() == [2, 4]

    def test_rows_of_a_buffer_share_its_memory(self, dev):
        tensor, host = ints(dev, 0, 0), buffer(dev, 1, 2, 3)
        dev.copy_async(tensor, host.rows(1, 3))
        dev.copy_async(host.rows(0, 2), tensor)
        dev.synchronize()
        assert host[:].tolist() == [2, 3, 3]

    def test_rows_outside_a_buffer_are_refused(self, dev):
        with pytest.raises(BadInputError, match=r"rows 1:3 .*'buffer' of 2 rows"):
            buffer(dev, 1, 2).rows(1, 3)

    def test_empty_copies_do_nothing(self, dev):
        tensor, host = ints(dev, 1), buffer(dev, 1)
        dev.copy_async(tensor[:0], host.rows(0, 0))
        dev.copy_async(host.rows(0, 0), tensor[:0])
        assert content(dev, tensor) == [1]

    def test_single_values_can_be_copied(self, dev):
        tensor, host = dev.tensor(3, torch.int32), dev.host_buffer([], torch.int32)
        dev.copy_async(host, tensor)
        dev.synchronize()
        assert host[()] == 3

    def test_a_copy_that_converts_is_refused(self, dev):
        with pytest.raises(BadInputError, match=r"torch.int32 to torch.int64 .* convert in a launch"):
            dev.copy_async(dev.zeros([1], torch.int64), buffer(dev, 1))

    def test_a_copy_that_broadcasts_is_refused(self, dev):
        with pytest.raises(BadInputError, match=r"shapes \(1,\) and \(2,\) differ"):
            dev.copy_async(ints(dev, 0, 0), buffer(dev, 1))

    def test_a_copy_between_host_buffers_is_refused(self, dev):
        with pytest.raises(BadInputError, match="both are host buffers"):
            dev.copy_async(buffer(dev, 1), buffer(dev, 1))

    def test_a_host_buffer_is_no_launch_argument(self, dev):
        with pytest.raises(BadInputError, match="cannot be an argument of a launch"):
            dev.launch(double, buffer(dev, 1))

    def test_a_host_buffer_needs_a_numpy_dtype(self, dev):
        with pytest.raises(BadInputError, match="numpy has no torch.bfloat16"):
            dev.host_buffer([1], torch.bfloat16, name="half")

    def test_a_negative_spin_is_refused(self, dev):
        with pytest.raises(BadInputError, match="give zero or more"):
            dev.spin(-1)

    def test_a_tensor_of_elsewhere_is_refused(self, dev):
        with pytest.raises(BadInputError, match="a tensor is on meta"):
            dev.launch(double, torch.zeros(1, device="meta"))

    def test_things_of_another_device_are_refused(self, dev):
        foreign = device.open("sim")
        for call in (
            lambda: dev.launch(double, ints(dev, 1), stream=foreign.stream("x")),
            lambda: dev.event().record(foreign.stream("x")),
            lambda: dev.default_stream.wait(foreign.event()),
        ):
            with pytest.raises(BadInputError, match="belongs to another device"):
                call()

    def test_a_capture_runs_nothing(self, dev):
        tensor = ints(dev, 1)
        with dev.capture():
            dev.launch(double, tensor)
        assert content(dev, tensor) == [1]

    def test_each_replay_runs_the_whole_graph_in_order(self, dev):
        tensor = ints(dev, 1)
        with dev.capture() as graph:
            dev.launch(add, tensor, 1)
            dev.launch(double, tensor)
        graph.replay()
        graph.replay()
        assert content(dev, tensor) == [10]

    def test_replays_keep_their_place_in_the_stream(self, dev):
        tensor = ints(dev, 1)
        with dev.capture() as graph:
            dev.launch(double, tensor)
        dev.launch(add, tensor, 1)
        graph.replay()
        dev.launch(add, tensor, 1)
        assert content(dev, tensor) == [5]

    def test_a_graph_keeps_scalars(self, dev):
        tensor, step = ints(dev, 0), 1
        with dev.capture() as graph:
            dev.launch(add, tensor, step)
        step = 100
        graph.replay()
        assert content(dev, tensor) == [step // 100]

    def test_a_graph_keeps_addresses(self, dev):
        source, target = ints(dev, 1), ints(dev, 0)
        with dev.capture() as graph:
            dev.launch(copy, target, source)
        old, source = source, ints(dev, 2)
        graph.replay()
        assert content(dev, target) == [1]
        dev.launch(assign, old, 3)
        graph.replay()
        assert content(dev, target) == [3]

    def test_a_replay_reads_memory_anew(self, dev):
        host, tensor, back = buffer(dev, 1), ints(dev, 0), buffer(dev, 0)
        with dev.capture() as graph:
            dev.copy_async(tensor, host)
            dev.launch(double, tensor)
            dev.copy_async(back, tensor)
        for value in (3, 4):
            host[0] = value
            graph.replay()
            dev.synchronize()
            assert back[0] == 2 * value

    def test_a_graph_can_hold_a_spin(self, dev):
        tensor = ints(dev, 1)
        with dev.capture() as graph:
            dev.spin(100)
            dev.launch(double, tensor)
        graph.replay()
        assert content(dev, tensor) == [2]

    def test_a_graph_captured_in_one_stream_replays_in_another(self, dev):
        tensor, side, other = ints(dev, 1), dev.stream("side"), dev.stream("other")
        with dev.capture(side) as graph:
            dev.launch(double, tensor)
        graph.replay(other)
        other.synchronize()
        assert content(dev, tensor) == [2]

    def test_replays_of_one_graph_in_two_streams_do_not_overlap(self, dev):
        tensor = ints(dev, 0)
        with dev.capture() as graph:
            dev.launch(double, tensor)
            dev.spin(500)
            dev.launch(add, tensor, 1)
        for name in ("left", "right"):
            graph.replay(dev.stream(name))
        assert content(dev, tensor) == [3]

    @pytest.mark.parametrize(
        "call",
        [
            lambda dev, host, event, graph: dev.synchronize(),
            lambda dev, host, event, graph: dev.default_stream.synchronize(),
            lambda dev, host, event, graph: event.synchronize(),
            lambda dev, host, event, graph: event.query(),
            lambda dev, host, event, graph: event.record(),
            lambda dev, host, event, graph: dev.default_stream.wait(event),
            lambda dev, host, event, graph: host[0],
            lambda dev, host, event, graph: host.__setitem__(0, 1),
            lambda dev, host, event, graph: dev.zeros([1], torch.int32),
            lambda dev, host, event, graph: dev.host_buffer([1], torch.int32),
            lambda dev, host, event, graph: dev.stream("new"),
            lambda dev, host, event, graph: dev.spin(1, dev.stream("side")),
            lambda dev, host, event, graph: graph.replay(),
            lambda dev, host, event, graph: dev.capture().__enter__(),
        ],
        ids=FORBIDDEN,
    )
    def test_a_capture_forbids(self, dev, call: Callable[..., object]):
        host, event = buffer(dev, 0), dev.event()
        dev.stream("side")
        with dev.capture() as graph:
            pass
        refused = pytest.raises(CaptureError, match="not allowed while graph 'broken' is captured")
        with refused, dev.capture(name="broken"):
            call(dev, host, event, graph)
        assert content(dev, ints(dev, 1)) == [1]

    @pytest.mark.parametrize("down", [True, False])
    def test_a_capture_forbids_pageable_copies(self, dev, down):
        ends = [ints(dev, 0), buffer(dev, 0, pinned=False)]
        with pytest.raises(CaptureError, match="the pageable copy of"), dev.capture():
            dev.copy_async(*(ends if down else ends[::-1]))

    def test_a_spoiled_capture_ends_in_an_error(self, dev):
        spoiled = pytest.raises(CaptureError, match="the capture of 'broken' was spoiled by a synchronize")
        with spoiled, dev.capture(name="broken") as graph, suppress(CaptureError):
            dev.synchronize()
        with pytest.raises(CaptureError, match="'broken' holds no finished capture"):
            graph.replay()

    def test_an_error_in_a_capture_leaves_the_device_usable(self, dev):
        tensor = ints(dev, 1)
        with pytest.raises(KeyError), dev.capture():
            dev.launch(double, tensor)
            raise KeyError("of the program")
        with dev.capture() as graph:
            dev.launch(add, tensor, 1)
        graph.replay()
        assert content(dev, tensor) == [2]

    def test_the_trace_holds_host_calls_in_order(self, dev):
        tensor = dev.zeros([1], torch.int32, name="counts")
        host = dev.host_buffer([1], torch.int32, name="staging")
        host[0] = 1
        dev.copy_async(tensor, host, dev.stream("side"))
        dev.launch(double, tensor)
        dev.synchronize()
        calls = [(r.what, r.stream, r.name) for r in dev.trace if r.by == "host"]
        assert calls == [
            ("write", "", "staging"),
            ("copy", "side", "counts <- staging"),
            ("launch", "default", "double"),
            ("synchronize", "", ""),
        ]
        assert [r.step for r in dev.trace if r.by == "host"] == [0, 1, 2, 3]

    def test_observers_hear_every_call_and_its_place(self, dev):
        heard = []

        class Ear(device.Observer):
            def enqueued(self, stream, op, site):
                heard.append((op.what, stream.name, site))

            def host_accessed(self, buffer, region, write, site):
                heard.append(("write" if write else "read", region.stop - region.start, site))

            def recorded(self, event, stream, site):
                heard.append(("record", stream.name, site))

            def waited(self, stream, event, site):
                heard.append(("wait", stream.name, site))

            def synchronized(self, target, site):
                heard.append(("synchronize", target, site))

            def queried(self, event, done, site):
                heard.append(("query", done, site))

        tensor, host, event, side = ints(dev, 1, 2), buffer(dev, 1, 2), dev.event(), dev.stream("side")
        with dev.capture() as graph:
            dev.launch(double, tensor)
        dev.observers.append(Ear())
        host[1] = 2
        dev.copy_async(tensor, host)
        event.record()
        side.wait(event)
        graph.replay(side)
        dev.synchronize()
        event.query()
        assert [(what, detail) for what, detail, _ in heard] == [
            ("write", 4),
            ("copy", "default"),
            ("record", "default"),
            ("wait", "side"),
            ("launch", "side"),
            ("synchronize", None),
            ("query", True),
        ]
        assert all(__file__ in site for _, _, site in heard)

    def test_observers_see_which_bytes_a_copy_touches(self, dev):
        ops = []

        class Ear(device.Observer):
            def enqueued(self, stream, op, site):
                ops.append(op)

        tensor, host = dev.zeros([4], torch.int32, name="pool"), buffer(dev, 1, 2)
        dev.observers.append(Ear())
        dev.copy_async(tensor[1:3], host)
        start = tensor.data_ptr() + 4
        assert ops[0].writes == (device.Region(start, start + 8, "pool"),)
        assert ops[0].reads == (host.region,)


class StalledBehaviour:
    def test_a_pinned_copy_reads_its_source_when_it_executes(self, dev):
        tensor, host = ints(dev, 0), buffer(dev, 1)
        stall(dev)
        dev.copy_async(tensor, host)
        host[0] = 2
        assert content(dev, tensor) == [2]

    def test_a_pageable_copy_does_not(self, dev):
        tensor, host = ints(dev, 0), buffer(dev, 1, pinned=False)
        stall(dev)
        dev.copy_async(tensor, host)
        host[0] = 2
        assert content(dev, tensor) == [1]

    def test_a_refilled_staging_buffer_serves_both_queued_copies(self, dev):
        tensor, host, seen = ints(dev, 0), buffer(dev, 0), [ints(dev, 0), ints(dev, 0)]
        stall(dev)
        for plan, snapshot in enumerate(seen, start=1):
            host[0] = plan
            dev.copy_async(tensor, host)
            dev.copy_async(snapshot, tensor)
        assert [content(dev, snapshot) for snapshot in seen] == [[2], [2]]

    def test_an_event_keeps_a_staging_buffer_from_its_refill(self, dev):
        tensor, host, event, seen = ints(dev, 0), buffer(dev, 0), dev.event(), [ints(dev, 0), ints(dev, 0)]
        stall(dev)
        for plan, snapshot in enumerate(seen, start=1):
            event.synchronize()
            host[0] = plan
            dev.copy_async(tensor, host)
            event.record()
            dev.copy_async(snapshot, tensor)
        assert [content(dev, snapshot) for snapshot in seen] == [[1], [2]]

    def test_a_copy_up_lands_when_the_stream_gets_there(self, dev):
        tensor, host = ints(dev, 4), buffer(dev, 0)
        stall(dev)
        dev.copy_async(host, tensor)
        assert host[0] == 0
        dev.synchronize()
        assert host[0] == 4

    def test_a_copy_up_overwrites_what_the_host_wrote_meanwhile(self, dev):
        tensor, host = ints(dev, 4, 2), buffer(dev, 0, 0)
        stall(dev)
        dev.copy_async(host, tensor)
        host[0] = 1
        dev.synchronize()
        assert host[:].tolist() == [4, 2]

    def test_scalars_of_a_queued_launch_do_not_change(self, dev):
        tensor, value = ints(dev, 0), 1
        stall(dev)
        dev.launch(add, tensor, value)
        value = 100
        assert content(dev, tensor) == [value // 100]

    def test_query_is_false_until_the_stream_gets_there(self, dev):
        event = dev.event()
        stall(dev)
        event.record()
        assert not event.query()
        event.synchronize()
        assert event.query()

    def test_a_new_record_moves_the_event(self, dev):
        event = dev.event()
        event.record()
        event.synchronize()
        stall(dev)
        event.record()
        assert not event.query()
        dev.synchronize()

    def test_synchronizing_one_stream_leaves_another_alone(self, dev):
        tensor, side, event = ints(dev, 1), dev.stream("side"), dev.event()
        stall(dev)
        event.record()
        dev.launch(double, tensor, stream=side)
        side.synchronize()
        assert not event.query()
        dev.synchronize()

    def test_synchronizing_an_event_leaves_what_follows_it(self, dev):
        first, second = dev.event(), dev.event()
        first.record()
        stall(dev)
        second.record()
        first.synchronize()
        assert not second.query()
        dev.synchronize()

    def test_a_copy_into_pageable_memory_drains_its_stream_only(self, dev):
        tensor, host, side, event = (
            ints(dev, 3),
            buffer(dev, 0, pinned=False),
            dev.stream("side"),
            dev.event(),
        )
        stall(dev, side)
        event.record(side)
        dev.copy_async(host, tensor)
        assert host[0] == 3
        assert not event.query()
        dev.synchronize()

    def test_streams_without_events_are_not_ordered(self, dev):
        source, target, side = ints(dev, 1), ints(dev, 0), dev.stream("side")
        stall(dev)
        dev.launch(assign, source, 2)
        dev.copy_async(target, source, side)
        side.synchronize()
        assert content(dev, target) == [1]

    def test_a_wait_holds_a_stream_behind_another(self, dev):
        side, first, second = dev.stream("side"), dev.event(), dev.event()
        stall(dev)
        first.record()
        side.wait(first)
        second.record(side)
        assert not second.query()
        side.synchronize()
        assert first.query()

    def test_a_wait_keeps_to_the_record_it_saw(self, dev):
        side, event, reached = dev.stream("side"), dev.event(), dev.event()
        event.record()
        side.wait(event)
        stall(dev)
        event.record()
        reached.record(side)
        side.synchronize()
        assert reached.query()
        assert not event.query()
        dev.synchronize()

    def test_a_wait_before_the_record_holds_nothing(self, dev):
        side, event, reached = dev.stream("side"), dev.event(), dev.event()
        side.wait(event)
        stall(dev)
        event.record()
        reached.record(side)
        side.synchronize()
        assert reached.query()
        assert not event.query()
        dev.synchronize()

    def test_a_replay_reads_its_staging_buffer_when_it_executes(self, dev):
        tensor, host = ints(dev, 0), buffer(dev, 0)
        with dev.capture() as graph:
            dev.copy_async(tensor, host)
        host[0] = 1
        stall(dev)
        graph.replay()
        host[0] = 2
        assert content(dev, tensor) == [2]

    def test_a_replay_waits_for_the_previous_one_in_another_stream(self, dev):
        tensor, side, event = ints(dev, 0), dev.stream("side"), dev.event()
        with dev.capture() as graph:
            dev.launch(add, tensor, 1)
        stall(dev)
        graph.replay()
        graph.replay(side)
        event.record(side)
        assert not event.query()
        assert content(dev, tensor) == [2]
