"""The interface that programs are written against: streams, events, host buffers, copies, launches, graphs.

`Device` checks arguments, keeps the trace and tells observers, alike on both devices; `sim` and `cuda` say
how work is queued. The rules are CUDA's:

- A stream is an in-order queue. Only events and synchronizes order queues among themselves and with the host.
- A copy from a pinned buffer reads it when the copy *executes*; from a pageable buffer, at the call.
- A copy into a pinned buffer writes it when the copy executes; into a pageable one, the call returns after
  that.
- The host's own reads and writes of a buffer happen at once, whatever is queued.
- A wait takes the event's latest record at the call; an event never recorded counts as complete.
- A graph keeps addresses and scalars as they were at capture, and reads memory anew at each replay.

Every stream is non-blocking, `default_stream` too: the legacy default stream, which waits for the others
implicitly, is not modelled. Neither are several streams in one capture, nor the freeing of memory under
queued work.
"""

# ruff: noqa: B027, for the steps that a kind of device may leave out

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch

from specmortem.device.memory import Op, Region, host_access, tensor_region
from specmortem.device.objects import Event, Graph, HostBuffer, Place, Stream, is_pageable
from specmortem.device.trace import Observer, TraceRecord, call_site
from specmortem.errors import BadInputError, SpecmortemError
from specmortem.verdict import DeviceInfo, DeviceKind

DEFAULT_DURATION_US = 3.0


class CaptureError(SpecmortemError):
    """A call that a capture does not allow, or the use of a graph that was not captured."""


class Device(ABC):
    """What a program may do with a device; `open` gives one."""

    kind: DeviceKind
    torch_device: str

    def __init__(self, info: DeviceInfo) -> None:
        self.info = info
        self.trace: list[TraceRecord] = []
        self.observers: list[Observer] = []
        self._step = -1
        self._streams: dict[str, Stream] = {}
        self._names: dict[int, str] = {}
        self._capturing: Graph | None = None
        self.default_stream = self.stream("default")

    # Objects

    def stream(self, name: str) -> Stream:
        """The stream of that name, made at its first mention."""
        if name not in self._streams:
            self._refuse_in_capture("creating a stream")
            self._streams[name] = Stream(self, name)
            self._open_stream(self._streams[name])
        return self._streams[name]

    def event(self, name: str = "") -> Event:
        """A new event, not recorded yet."""
        return Event(self, name)

    def tensor(self, data: Any, dtype: torch.dtype | None = None, name: str = "") -> torch.Tensor:
        """A device tensor holding `data`, ready for every stream at return."""
        return self._allocate(lambda: torch.tensor(data, dtype=dtype, device=self.torch_device), name)

    def empty(self, shape: Sequence[int], dtype: torch.dtype, name: str = "") -> torch.Tensor:
        """A device tensor with no promised content."""
        return self._allocate(lambda: self._empty(tuple(shape), dtype), name)

    def zeros(self, shape: Sequence[int], dtype: torch.dtype, name: str = "") -> torch.Tensor:
        """A device tensor of zeros."""
        return self.full(shape, 0, dtype, name)

    def full(self, shape: Sequence[int], value: float, dtype: torch.dtype, name: str = "") -> torch.Tensor:
        """A device tensor of one value."""
        size = tuple(shape)
        return self._allocate(lambda: torch.full(size, value, dtype=dtype, device=self.torch_device), name)

    def host_buffer(
        self, shape: Sequence[int], dtype: torch.dtype, pinned: bool = True, name: str = ""
    ) -> HostBuffer:
        """Host memory of zeros, page-locked or pageable.

        Raises BadInputError for a dtype that numpy does not have.
        """
        self._refuse_in_capture("allocating host memory")
        backing = self._host_memory(tuple(shape), dtype, pinned)
        try:
            return HostBuffer(self, backing, pinned, name)
        except TypeError as error:
            raise BadInputError(
                f"host buffer {name!r}: numpy has no {dtype}; use an integer dtype"
            ) from error

    # Work

    def copy_async(
        self,
        dst: Place,
        src: Place,
        stream: Stream | None = None,
        *,
        name: str = "",
        duration_us: float = DEFAULT_DURATION_US,
    ) -> None:
        """Enqueue a copy; device tensors may be views.

        Raises BadInputError when shapes or dtypes differ or both ends are host buffers, CaptureError for a
        pageable buffer inside a capture.
        """
        self._check_copy(dst, src)
        if is_pageable(src):
            self._host_access(src, src.region, write=False)
        label = name or f"{self._name(dst)} <- {self._name(src)}"
        self._submit(self._copy_op(dst, src, label, duration_us), stream)
        if is_pageable(dst):
            self._synchronize(stream or self.default_stream)

    def launch(
        self,
        fn: Callable[..., object],
        *args: Any,
        stream: Stream | None = None,
        reads: Sequence[torch.Tensor] | None = None,
        writes: Sequence[torch.Tensor] | None = None,
        name: str = "",
        duration_us: float = DEFAULT_DURATION_US,
    ) -> None:
        """Enqueue `fn(*args)`, which launches torch operations or Triton kernels.

        Arguments are taken as they are at the call: scalars by value, containers and numpy arrays copied,
        tensors by address. All that varies must come through them, since CUDA calls `fn` now and the
        simulator when the queue gets there. `reads` and `writes` name the tensors touched; one left out means
        all tensors in `args`.
        """
        label = name or _function_name(fn)
        tensors: list[torch.Tensor] = []
        baked = [_baked(arg, tensors) for arg in args]
        read, written = (tensors if some is None else list(some) for some in (reads, writes))
        alive = (*tensors, *read, *written)
        self._check_on_device(alive, label)
        regions = self._regions(read)
        touched = regions, regions if written is read else self._regions(written)
        self._submit(Op("launch", label, partial(fn, *baked), *touched, alive, duration_us), stream)

    def spin(self, microseconds: float, stream: Stream | None = None) -> None:
        """Keep the stream busy for that long."""
        if microseconds < 0:
            raise BadInputError(f"spin of {microseconds} microseconds: give zero or more")
        run = partial(self._spin, microseconds)
        self._submit(Op("spin", f"spin {microseconds:g} us", run, duration_us=microseconds), stream)

    @contextmanager
    def capture(self, stream: Stream | None = None, name: str = "graph") -> Iterator[Graph]:
        """Record the launches and copies of the block into a graph; none of them runs.

        CUDA compiles nothing during a capture: call each kernel once before. Inside, host accesses,
        synchronizes, event calls, allocation, pageable copies and other streams raise CaptureError, and spoil
        the capture.
        """
        self._refuse_in_capture("another capture")
        graph = Graph(self, stream or self.default_stream, name)
        self._check_own(graph.stream)
        self._begin_capture(graph)
        self._capturing, failed = graph, True
        try:
            yield graph
            failed = False
        finally:
            self._capturing = None
            self._end_capture(graph, failed)
        if graph.refused:
            raise CaptureError(f"the capture of {name!r} was spoiled by {graph.refused}")
        graph.captured = True

    def synchronize(self) -> None:
        """Block the host until every stream has run everything."""
        self._synchronize(None)

    def host_time(self, microseconds: float) -> None:
        """The host does something else for that long."""
        self._host_call("host_time", name=f"{microseconds:g} us")
        self._elapse(microseconds)

    # What streams, events, graphs and host buffers call

    def _host_access(self, buffer: HostBuffer, region: Region, write: bool) -> None:
        what = "write" if write else "read"
        self._refuse_in_capture(f"a host {what} of {buffer.name!r}")
        self._before_access(host_access(what, region, write))
        self._host_call(what, name=buffer.name)
        self._tell(lambda observer, site: observer.host_accessed(buffer, region, write, site))

    def _record(self, event: Event, stream: Stream) -> None:
        self._refuse_in_capture(f"the record of event {event.name!r}")
        self._check_own(event, stream)
        self._host_call("record", stream.name, event.name)
        self._tell(lambda observer, site: observer.recorded(event, stream, site))
        self._enqueue_record(event, stream)

    def _wait(self, stream: Stream, event: Event) -> None:
        self._refuse_in_capture(f"a wait for event {event.name!r}")
        self._check_own(event, stream)
        self._host_call("wait", stream.name, event.name)
        self._tell(lambda observer, site: observer.waited(stream, event, site))
        self._enqueue_wait(stream, event)

    def _query(self, event: Event) -> bool:
        self._refuse_in_capture(f"a query of event {event.name!r}")
        done = self._event_done(event)
        self._host_call("query", name=event.name)
        self._tell(lambda observer, site: observer.queried(event, done, site))
        return done

    def _synchronize(self, target: Stream | Event | None) -> None:
        self._refuse_in_capture("a synchronize")
        self._block_on(target)
        self._host_call("synchronize", target.name if isinstance(target, Stream) else "", _event_name(target))
        self._tell(lambda observer, site: observer.synchronized(target, site))

    def _replay(self, graph: Graph, stream: Stream) -> None:
        self._refuse_in_capture(f"a replay of {graph.name!r}")
        self._check_own(graph, stream)
        if not graph.captured:
            raise CaptureError(
                f"graph {graph.name!r} holds no finished capture; replay it after its `with` block"
            )
        self._host_call("replay", stream.name, graph.name)
        self._tell(lambda observer, site: observer.replaying(stream, graph, site))
        for op in graph.ops:
            self._tell_enqueued(stream, op)
        self._enqueue_graph(graph, stream)

    # Shared steps

    def _submit(self, op: Op, stream: Stream | None) -> None:
        graph = self._capturing
        target = stream or (graph.stream if graph else self.default_stream)
        self._check_own(target)
        if graph is None:
            self._host_call(op.what, target.name, op.name)
            self._tell_enqueued(target, op)
            self._enqueue(target, op)
        else:
            if target is not graph.stream:
                self._refuse_in_capture(f"work for stream {target.name!r}")
            graph.ops.append(op)
            self._capture_op(graph, op)

    def _copy_op(self, dst: Place, src: Place, label: str, duration_us: float) -> Op:
        target, source = dst.backing if isinstance(dst, HostBuffer) else dst, self._source(src)
        reads = () if is_pageable(src) else self._regions([src])
        run = partial(target.copy_, source, non_blocking=True)
        return Op("copy", label, run, reads, self._regions([dst]), (target, source), duration_us)

    def _allocate(self, make: Callable[[], torch.Tensor], name: str) -> torch.Tensor:
        self._refuse_in_capture("allocating a tensor")
        tensor = make()
        self._settle()
        self._names[tensor.untyped_storage().data_ptr()] = name
        return tensor

    def _host_call(self, what: str, stream: str = "", name: str = "") -> None:
        self._step += 1
        now = self._now()
        self.trace.append(TraceRecord("host", what, stream, name, self._step, now, now))

    def _tell(self, say: Callable[[Observer, str], None]) -> None:
        if self.observers:
            site = call_site()
            for observer in self.observers:
                say(observer, site)

    def _tell_enqueued(self, stream: Stream, op: Op) -> None:
        self._tell(lambda observer, site: observer.enqueued(stream, op, site))

    def _name(self, place: Place) -> str:
        if isinstance(place, HostBuffer):
            return place.name or "host buffer"
        return self._names.get(place.untyped_storage().data_ptr()) or "tensor"

    def _regions(self, places: Sequence[Place]) -> tuple[Region, ...]:
        return tuple(
            p.region if isinstance(p, HostBuffer) else tensor_region(p, self._name(p)) for p in places
        )

    def _refuse_in_capture(self, what: str) -> None:
        if self._capturing is not None:
            self._capturing.refused = what
            raise CaptureError(f"{what} is not allowed while graph {self._capturing.name!r} is captured")

    def _check_own(self, *things: Stream | Event | Graph) -> None:
        for thing in things:
            if thing.device is not self:
                raise BadInputError(f"{thing!r} belongs to another device; make it with this one")

    def _check_copy(self, dst: Place, src: Place) -> None:
        what = f"copy of {self._name(src)} to {self._name(dst)}"
        if isinstance(dst, HostBuffer) and isinstance(src, HostBuffer):
            raise BadInputError(f"{what}: both are host buffers; assign with dst[...] = src[...]")
        if tuple(dst.shape) != tuple(src.shape):
            raise BadInputError(
                f"{what}: shapes {tuple(src.shape)} and {tuple(dst.shape)} differ; copy equal views"
            )
        if dst.dtype != src.dtype:
            raise BadInputError(f"{what}: {src.dtype} to {dst.dtype} is no plain copy; convert in a launch")
        if is_pageable(dst) or is_pageable(src):
            self._refuse_in_capture(f"the pageable {what}")
        self._check_on_device([end for end in (dst, src) if isinstance(end, torch.Tensor)], what)

    def _check_on_device(self, tensors: Sequence[torch.Tensor], what: str) -> None:
        for tensor in tensors:
            if tensor.device.type != self.torch_device:
                place = f"a tensor is on {tensor.device}, not on {self.torch_device}"
                raise BadInputError(f"{what}: {place}; make it with the device or copy_async it")

    # What a kind of device may do

    def _open_stream(self, stream: Stream) -> None:
        """A stream was made."""

    def _settle(self) -> None:
        """Finish what an allocation started."""

    def _spin(self, microseconds: float) -> None:
        """Keep the current stream busy."""

    def _begin_capture(self, graph: Graph) -> None:
        """The graph's operations come next."""

    def _capture_op(self, graph: Graph, op: Op) -> None:
        """One of them."""

    def _end_capture(self, graph: Graph, failed: bool) -> None:
        """There were all of them, or the block raised."""

    def _before_access(self, access: Op) -> None:
        """A point where queued work may run before the host reads or writes a buffer."""

    # What a kind of device does

    @abstractmethod
    def _host_memory(self, shape: tuple[int, ...], dtype: torch.dtype, pinned: bool) -> torch.Tensor:
        """Zeros in host memory."""

    @abstractmethod
    def _empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor: ...

    @abstractmethod
    def _source(self, src: Place) -> torch.Tensor:
        """What a copy reads: for a pageable buffer, its content at the call."""

    @abstractmethod
    def _enqueue(self, stream: Stream, op: Op) -> None: ...

    @abstractmethod
    def _enqueue_record(self, event: Event, stream: Stream) -> None: ...

    @abstractmethod
    def _enqueue_wait(self, stream: Stream, event: Event) -> None: ...

    @abstractmethod
    def _enqueue_graph(self, graph: Graph, stream: Stream) -> None: ...

    @abstractmethod
    def _event_done(self, event: Event) -> bool: ...

    @abstractmethod
    def _block_on(self, target: Stream | Event | None) -> None: ...

    @abstractmethod
    def _elapse(self, microseconds: float) -> None: ...

    @abstractmethod
    def _now(self) -> float | None:
        """Microseconds since the device was opened, where there is a clock."""


PLAIN = frozenset((int, float, bool, str, type(None)))


def _event_name(target: Stream | Event | None) -> str:
    return target.name if isinstance(target, Event) else ""


def _baked(value: Any, tensors: list[torch.Tensor]) -> Any:
    """`value` as it is now: containers and numpy arrays copied, tensors by address and added to `tensors`."""
    if isinstance(value, torch.Tensor):
        tensors.append(value)
    elif isinstance(value, HostBuffer):
        raise BadInputError(f"{value!r} cannot be an argument of a launch; copy_async it to a tensor")
    elif isinstance(value, np.ndarray):
        return value.copy()
    elif type(value) is dict:
        return {key: _baked(item, tensors) for key, item in value.items()}
    elif type(value) in (list, tuple):
        plain = PLAIN.issuperset(map(type, value))
        return value[:] if plain else type(value)(_baked(item, tensors) for item in value)
    return value


def _function_name(fn: Callable[..., object]) -> str:
    return getattr(fn, "__name__", type(fn).__name__)
