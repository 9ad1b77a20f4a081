"""The recorder for plain PyTorch programs on CUDA, which use none of this package's classes."""

# mypy: disallow-untyped-calls=False

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from specmortem.detect.hooks import Hook, hooked
from specmortem.detect.staging.order import Access, Clock
from specmortem.detect.staging.torch_calls import Interceptor, TorchWatch, copy_ends, touched, waits
from specmortem.device import Op, Region
from specmortem.device.cuda import missing
from specmortem.errors import UnavailableError

_COPY, _TO_COPY = torch.ops.aten.copy_.default, torch.ops.aten._to_copy.default


class Recorder(Interceptor):
    """Runs every operation as it is and notes its order; only host memory is tracked."""

    def __init__(self, watch: TorchWatch) -> None:
        super().__init__(watch)
        self._capturing: list[Op] | None = None
        self._graphs: dict[int, list[Op]] = {}
        self._ends: dict[int, Clock] = {}

    def operate(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if func in (_COPY, _TO_COPY) and self._crosses(func, args, kwargs):
            return self._copy(func, args, kwargs)
        reads, writes = touched(func, args, kwargs)
        self.touch_all(reads, write=False)
        self.touch_all(writes, write=True)
        result = func(*args, **kwargs)
        if waits(func, args) and any(self.on_device(tensor) for tensor in (*reads, *writes)):
            self.join_stream()
        return result

    def _crosses(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether a copy is between host and device."""
        if func is _COPY:
            return self.on_device(args[0]) != self.on_device(args[1])
        target = kwargs.get("device")
        return target is not None and (torch.device(target).type == "cuda") != self.on_device(args[0])

    def _copy(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The contents are looked at before it runs, since a copy up changes them."""
        self.contents.check()
        if func is _COPY and not self.on_device(args[0]):
            self.contents.forget(self.watch.region(args[0]))
        result = func(*args, **kwargs)
        dst, src, non_blocking = self._ends_of_copy(func, args, kwargs, result)
        self.transfer(dst, src, non_blocking, lambda: None)
        return result

    @staticmethod
    def _ends_of_copy(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: torch.Tensor) -> Any:
        if func is _COPY:
            return copy_ends(args, kwargs)
        return result, args[0], bool(kwargs.get("non_blocking", False))

    def on_device(self, tensor: torch.Tensor) -> bool:
        return tensor.is_cuda

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        return tensor.is_pinned()

    def host(self, tensor: torch.Tensor, region: Region, write: bool) -> None:
        self.order.host(region, write, tensor)

    def enqueue(self, op: Op) -> Access | None:
        """Keep the host's side of a copy; a device tensor is not tracked, and not kept alive."""
        host = tuple(tensor for tensor in op.tensors if not self.on_device(tensor))
        if self.on_device(op.tensors[1]):
            kept = Op(op.what, op.name, writes=op.writes, tensors=host)
        else:
            kept = Op(op.what, op.name, reads=op.reads, tensors=host)
        if self._capturing is not None:
            self._capturing.append(kept)
            return None
        return self.order.enqueue(_stream_name(), kept)

    def join_stream(self) -> None:
        self.contents.check()
        self._stream_over()

    @contextmanager
    def patched(self) -> Iterator[None]:
        """The calls of `torch.cuda` that order streams and host."""
        graph = torch.cuda.CUDAGraph
        events = {how: self._waiting(partial(self._event_over, how)) for how in ("query", "synchronize")}
        streams = dict.fromkeys(events, self._waiting(self._stream_over))
        with (
            super().patched(),
            hooked(torch.cuda.Event, record=self._recorded, wait=self._waited, **events),
            hooked(torch.cuda.Stream, **streams),
            hooked(torch.cuda, synchronize=self._waiting(lambda *_: self.order.host_waited_all())),
            hooked(graph, capture_begin=self._begun, capture_end=self._ended, replay=self._replayed),
        ):
            yield

    def _event_over(self, how: str, event: Any) -> None:
        self.order.host_waited_event(_key(event), f"the {how} of an event")

    def _stream_over(self, stream: Any = None) -> None:
        self.order.host_waited_stream(_stream_name(stream))

    def _waiting(self, over: Callable[..., None]) -> Hook:
        """A hook of a synchronize or a query: unless that answers False, `over` says what the host knows by it."""

        def wait(original: Hook, *args: Any, **kwargs: Any) -> Any:
            self.contents.check()
            answer = original(*args, **kwargs)
            if answer is None or answer:
                over(*args)
            return answer

        return wait

    def _recorded(self, record: Hook, event: Any, stream: Any = None) -> None:
        record(event, stream)
        self.order.record(_key(event), _stream_name(stream))

    def _waited(self, wait: Hook, event: Any, stream: Any = None) -> None:
        wait(event, stream)
        self.order.wait(_stream_name(stream), _key(event))

    def _begun(self, begin: Hook, graph: Any, *args: Any, **kwargs: Any) -> None:
        begin(graph, *args, **kwargs)
        self._capturing = self._graphs[id(graph)] = []
        self._ends[id(graph)] = {}

    def _ended(self, end: Hook, graph: Any) -> None:
        self._capturing = None
        end(graph)

    def _replayed(self, replay: Hook, graph: Any) -> None:
        self.contents.check()
        replay(graph)
        stream = _stream_name()
        self.order.stream_follows(stream, self._ends.get(id(graph), {}))
        for copy in self._graphs.get(id(graph), []):
            self.order.enqueue(stream, copy)
        self._ends[id(graph)] = self.order.stream_end(stream)


class _Key:
    """Stands for a `torch.cuda.Event` and dies with it.

    No weak reference may be taken of the event itself: it inherits room for them from `torch.Event`, but does not clear
    them when it is freed, and a later garbage collection may end the process (torch 2.11.0, Python 3.12).
    """


def _key(event: Any) -> _Key:
    key: _Key = vars(event).setdefault("_specmortem_key", _Key())
    return key


def _stream_name(stream: Any = None) -> str:
    stream = torch.cuda.current_stream() if stream is None else stream
    return f"{stream.cuda_stream:#x}" if stream.cuda_stream else "default"


@contextmanager
def watch_torch() -> Iterator[TorchWatch]:
    """Watch a plain PyTorch program: its copies between host and GPU, its accesses to host memory.

    Heard are the torch operations of this thread, the events, streams, synchronizes and graphs of
    `torch.cuda`, and numpy arrays got from pinned tensors inside the block. A host write past torch (an array
    from before the block, C code) is found by content, when the source of a copy has changed before the
    program knows the copy to be over; a read past torch is not found. Copies that C++ code enqueues have to
    be declared with `watched.copied`; waits in C++ code and those of `torch.Event` and `torch.Stream` are not
    heard. Device memory is not tracked: `torch.cuda._sanitizer` does that. Host memory with queued copies
    stays alive until the program knows them to be over.

    Raises UnavailableError without a GPU; `simulated_cuda()` needs none.
    """
    if reason := missing():
        raise UnavailableError(f"no CUDA device: {reason}; use staging.simulated_cuda() instead")
    watch = TorchWatch()
    recorder = Recorder(watch)
    with recorder.patched(), recorder:
        yield watch
    recorder.contents.check()
