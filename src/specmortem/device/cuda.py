"""The CUDA device: torch's streams, events, graphs and pinned memory, on the current device."""

# mypy: disallow-untyped-calls=False

from __future__ import annotations

import shutil
import subprocess
import time
import warnings
from contextlib import suppress
from functools import cache
from weakref import WeakKeyDictionary

import torch

from specmortem.device.interface import Device
from specmortem.device.memory import Op
from specmortem.device.objects import Event, Graph, Place, Stream
from specmortem.errors import UnavailableError
from specmortem.verdict import DeviceInfo

_CALIBRATION_CYCLES = 20_000_000


class CudaDevice(Device):
    """Every stream, the default one too, is a non-blocking side stream of torch's pool."""

    kind = "cuda"
    torch_device = "cuda"

    def __init__(self) -> None:
        if reason := missing():
            raise UnavailableError(f"no CUDA device: {reason}; open 'sim' or 'auto' instead")
        self._opened = time.perf_counter()
        self._queues: dict[Stream, torch.cuda.Stream] = {}
        self._events: WeakKeyDictionary[Event, torch.cuda.Event] = WeakKeyDictionary()
        self._graphs: WeakKeyDictionary[Graph, torch.cuda.CUDAGraph] = WeakKeyDictionary()
        super().__init__(DeviceInfo("cuda", torch.cuda.get_device_name(), _driver()))
        _cycles_per_us(torch.cuda.current_device())

    def _open_stream(self, stream: Stream) -> None:
        self._queues[stream] = torch.cuda.Stream()

    def _host_memory(self, shape: tuple[int, ...], dtype: torch.dtype, pinned: bool) -> torch.Tensor:
        return torch.zeros(shape, dtype=dtype, pin_memory=pinned)

    def _empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="cuda")

    def _settle(self) -> None:
        torch.cuda.current_stream().synchronize()

    def _source(self, src: Place) -> torch.Tensor:
        """CUDA itself stages a pageable source at the call."""
        return src if isinstance(src, torch.Tensor) else src.backing

    def _spin(self, microseconds: float) -> None:
        torch.cuda._sleep(int(microseconds * _cycles_per_us(torch.cuda.current_device())))

    def _enqueue(self, stream: Stream, op: Op) -> None:
        queue = self._queues[stream]
        with torch.cuda.stream(queue):
            op.run()
        for tensor in op.tensors:
            if tensor.is_cuda:
                tensor.record_stream(queue)

    def _enqueue_record(self, event: Event, stream: Stream) -> None:
        self._events.setdefault(event, torch.cuda.Event()).record(self._queues[stream])

    def _enqueue_wait(self, stream: Stream, event: Event) -> None:
        if event in self._events:
            self._queues[stream].wait_event(self._events[event])

    def _enqueue_graph(self, graph: Graph, stream: Stream) -> None:
        with torch.cuda.stream(self._queues[stream]):
            self._graphs[graph].replay()

    def _begin_capture(self, graph: Graph) -> None:
        """Begin on the graph's own stream, without the device synchronize of `torch.cuda.graph`."""
        self._graphs[graph] = torch.cuda.CUDAGraph()
        with torch.cuda.stream(self._queues[graph.stream]):
            self._graphs[graph].capture_begin(capture_error_mode="thread_local")

    def _capture_op(self, graph: Graph, op: Op) -> None:
        with torch.cuda.stream(self._queues[graph.stream]):
            op.run()

    def _end_capture(self, graph: Graph, failed: bool) -> None:
        """End it; torch's warning about an empty graph is of no use here, nor its error after another."""
        with torch.cuda.stream(self._queues[graph.stream]), warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="The CUDA Graph is empty")
            with suppress(*([RuntimeError] if failed else [])):
                self._graphs[graph].capture_end()

    def _event_done(self, event: Event) -> bool:
        return event not in self._events or bool(self._events[event].query())

    def _block_on(self, target: Stream | Event | None) -> None:
        if target is None:
            torch.cuda.synchronize()
        elif isinstance(target, Stream):
            self._queues[target].synchronize()
        elif target in self._events:
            self._events[target].synchronize()

    def _elapse(self, microseconds: float) -> None:
        end = time.perf_counter() + microseconds / 1e6
        while time.perf_counter() < end:
            pass

    def _now(self) -> float | None:
        return (time.perf_counter() - self._opened) * 1e6


def missing() -> str:
    """Why there is no CUDA device; empty when there is one."""
    if torch.version.cuda is None:
        return f"torch {torch.__version__} is built without CUDA"
    if not torch.cuda.is_available():
        return f"torch {torch.__version__} (CUDA {torch.version.cuda}) sees no usable GPU and driver"
    return ""


@cache
def _cycles_per_us(index: int) -> float:
    """The rate of the spin kernel's clock on a GPU, which the first measurement wakes."""
    return max(_measured_rate() for _ in range(3))


def _measured_rate() -> float:
    queue, start, end = torch.cuda.Stream(), *(torch.cuda.Event(enable_timing=True) for _ in range(2))
    with torch.cuda.stream(queue):
        start.record(queue)
        torch.cuda._sleep(_CALIBRATION_CYCLES)
        end.record(queue)
    end.synchronize()
    milliseconds: float = start.elapsed_time(end)
    return _CALIBRATION_CYCLES / (1000 * milliseconds)


@cache
def _driver() -> str:
    """The driver's version by nvidia-smi; empty where it does not say."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return ""
    query = [tool, "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return ""
    return (done.stdout.split() or [""])[0]
