"""A stand-in for CUDA under a plain PyTorch program: device tensors are CPU tensors, streams simulated.

`torch.cuda`'s `Stream`, `Event`, `stream`, `current_stream`, `default_stream`, `synchronize` and
`is_available` are replaced inside the block, by attribute: a name imported from `torch.cuda` earlier is not.
Factories, `to`, `cuda`, `cpu`, `pin_memory` and `is_pinned` are understood; operations on device tensors are
queued, and the shapes of their outputs come from torch's meta kernels. There are no autograd and no CUDA
graphs; one device, one thread.
"""

# mypy: disallow-untyped-calls=False

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map_only

from specmortem import device as devices
from specmortem.detect.staging.order import Access
from specmortem.detect.staging.torch_calls import (
    Interceptor,
    TorchWatch,
    copy_ends,
    is_view,
    name_of,
    touched,
    waits,
)
from specmortem.device import HostBuffer, Op, Region, Schedule
from specmortem.device.schedules import named
from specmortem.errors import BadInputError

_COPY = torch.ops.aten.copy_.default
_INDEXED = (torch.ops.aten.index, torch.ops.aten.index_put, torch.ops.aten.index_put_)
_CUDA = torch.device("cuda", 0)


class SimTensor(torch.Tensor):
    """A device tensor of the stand-in."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return _CUDA

    @property
    def is_cuda(self) -> bool:  # type: ignore[override]
        return True

    @property
    def is_cpu(self) -> bool:  # type: ignore[override]
        return False

    def tolist(self) -> Any:
        return self.cpu().tolist()

    def numpy(self, *, force: bool = False) -> Any:
        if force:
            return self.cpu().numpy()
        raise TypeError("can't convert cuda:0 device type tensor to numpy; use Tensor.cpu() first")

    def __array__(self, *_: Any, **__: Any) -> Any:
        return self.numpy()


class SimStream:
    """`torch.cuda.Stream` of the stand-in."""

    def __init__(self, device: object = None, priority: int = 0, *, default: bool = False) -> None:
        self.carrier = _carrier()
        self.cuda_stream = 0 if default else self.carrier.next_stream()
        queues = self.carrier.device
        self.stream = queues.default_stream if default else queues.stream(f"{self.cuda_stream:#x}")

    def synchronize(self) -> None:
        self.carrier.contents.check()
        self.stream.synchronize()

    def query(self) -> bool:
        return self.record_event().query()

    def record_event(self, event: SimEvent | None = None) -> SimEvent:
        event = SimEvent() if event is None else event
        event.record(self)
        return event

    def wait_event(self, event: SimEvent) -> None:
        event.wait(self)

    def wait_stream(self, stream: SimStream) -> None:
        self.wait_event(stream.record_event())

    def __enter__(self) -> SimStream:
        self.carrier.entered.append(self)
        return self

    def __exit__(self, *_: object) -> None:
        self.carrier.entered.pop()


class SimEvent:
    """`torch.cuda.Event` of the stand-in; it keeps no time."""

    def __init__(
        self, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False
    ) -> None:
        self.carrier = _carrier()
        self.event = self.carrier.device.event()

    def record(self, stream: SimStream | None = None) -> None:
        self.event.record((stream or self.carrier.current()).stream)

    def wait(self, stream: SimStream | None = None) -> None:
        (stream or self.carrier.current()).stream.wait(self.event)

    def query(self) -> bool:
        self.carrier.contents.check()
        return self.event.query()

    def synchronize(self) -> None:
        self.carrier.contents.check()
        self.event.synchronize()


class Carrier(Interceptor):
    """Puts the work of the program into the queues of a simulated device, which tells the watch."""

    def __init__(self, watch: TorchWatch, device: devices.SimDevice) -> None:
        super().__init__(watch)
        self.device = device
        self.entered: list[SimStream] = []
        self._streams = 0
        self._pinned: dict[int, torch.UntypedStorage] = {}

    def current(self) -> SimStream:
        return self.entered[-1]

    def next_stream(self) -> int:
        """The number of a new stream."""
        self._streams += 1
        return self._streams

    def synchronize(self, device: object = None) -> None:
        self.contents.check()
        self.device.synchronize()

    # Operations

    def operate(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        ours = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, SimTensor)]
        reads, writes = touched(func, args, kwargs)
        if not ours:
            self.touch_all(reads, write=False)
            self.touch_all(writes, write=True)
            return func(*args, **kwargs)
        if func is _COPY and self.on_device(args[0]) != self.on_device(args[1]):
            dst, src, non_blocking = copy_ends(args, kwargs)
            self.copy(dst, src, non_blocking)
            return dst
        if func.overloadpacket in _INDEXED:
            args = (args[0], [self._uploaded(index) for index in args[1]], *args[2:])
            reads, writes = touched(func, args, kwargs)
        self._check_together(func, reads, writes)
        self.touch_all(reads, write=False)
        if is_view(func):
            return _wrapped(func(*_plain(args), **_plain(kwargs)))
        if waits(func, args):
            self.join_stream()
            if not writes:
                return _wrapped(func(*_plain(args), **_plain(kwargs)))
        return self._launch(func, args, kwargs, reads, writes)

    def _launch(
        self,
        func: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        reads: list[torch.Tensor],
        writes: list[torch.Tensor],
    ) -> Any:
        call = partial(func, *_baked(args), **_baked(kwargs))
        ours = [tensor for tensor in reads if isinstance(tensor, SimTensor)]
        if writes:
            self.launch(name_of(func), call, ours, writes)
            return writes[0] if len(writes) == 1 else tuple(writes)
        made = self._outputs(call)

        def run() -> None:
            for target, value in zip(_tensors(made), _tensors(call()), strict=True):
                target.copy_(value)

        self.launch(name_of(func), run, ours, _tensors(made))
        return _wrapped(made)

    @staticmethod
    def _outputs(call: partial[Any]) -> Any:
        """New tensors for the results of a queued operation."""

        def meta(tensor: torch.Tensor) -> torch.Tensor:
            return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")

        kwargs = {k: v for k, v in call.keywords.items() if k not in ("device", "pin_memory")}
        args, kwargs = tree_map_only(torch.Tensor, meta, (call.args, kwargs))
        try:
            result = call.func(*args, **kwargs)
        except NotImplementedError as error:
            raise BadInputError(
                f"simulated_cuda() cannot tell the output shapes of {call.func}: torch has no meta kernel for it"
            ) from error
        return tree_map_only(
            torch.Tensor, lambda t: torch.empty_strided(t.shape, t.stride(), dtype=t.dtype), result
        )

    def launch(
        self,
        name: str,
        run: Callable[[], object],
        reads: Sequence[torch.Tensor],
        writes: Sequence[torch.Tensor],
    ) -> None:
        """Put what reads and writes these device tensors into the current stream."""
        read, written = (tuple(map(self.watch.region, tensors)) for tensors in (reads, writes))
        self.enqueue(Op("launch", name, run, read, written, (*reads, *writes)))

    def queued(self, kernel: Any) -> Any:
        """A Triton kernel whose launches, `queued(kernel)[grid](...)`, go into the current stream.

        As nothing is declared, a launch reads and writes every tensor among its arguments.
        """
        return _Queued(self, kernel)

    def enqueue(self, op: Op) -> Access | None:
        def run() -> None:
            with self.aside(), _disable_current_modes():
                op.run()

        self.device._submit(replace(op, run=run), self.current().stream)
        return self.order.latest

    def _uploaded(self, index: torch.Tensor | None) -> torch.Tensor | None:
        """An index of a device tensor: torch copies one of the host to the device, and waits."""
        if index is None or self.on_device(index):
            return index
        made = torch.empty(index.shape, dtype=index.dtype).as_subclass(SimTensor)
        self.copy(made, index, non_blocking=False)
        return made

    def _check_together(self, func: Any, reads: list[torch.Tensor], writes: list[torch.Tensor]) -> None:
        for tensor in (*reads, *writes):
            if not isinstance(tensor, SimTensor) and tensor.ndim > 0:
                raise RuntimeError(
                    f"{func}: expected all tensors to be on the same device, found cuda:0 and cpu"
                )

    # Copies and host memory

    def copy(self, dst: torch.Tensor, src: torch.Tensor, non_blocking: bool) -> None:
        target, source = _plain(dst), _plain(src)
        self.transfer(dst, src, non_blocking, lambda: target.copy_(source))

    def staged(self, run: Callable[[], object], dst: torch.Tensor, src: torch.Tensor) -> Callable[[], object]:
        taken, target = src.clone(), _plain(dst)
        return lambda: target.copy_(taken)

    def join_stream(self) -> None:
        self.current().synchronize()

    def host(self, tensor: torch.Tensor, region: Region, write: bool) -> None:
        memory = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())
        buffer = HostBuffer(self.device, memory, self.is_pinned(tensor), region.name)
        self.device._host_access(buffer, region, write)

    def on_device(self, tensor: torch.Tensor) -> bool:
        return isinstance(tensor, SimTensor)

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        return tensor.untyped_storage().data_ptr() in self._pinned

    def pin(self, tensor: torch.Tensor) -> torch.Tensor:
        """Call this tensor's memory page-locked, and keep it until the block ends."""
        storage = tensor.untyped_storage()
        self._pinned[storage.data_ptr()] = storage
        return tensor


class _Queued:
    def __init__(self, carrier: Carrier, kernel: Any) -> None:
        self._carrier, self._kernel = carrier, kernel

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        def launch(*args: Any, **kwargs: Any) -> None:
            name = getattr(self._kernel, "__name__", "kernel")
            run = partial(self._kernel[grid], *_plain(args), **_plain(kwargs))
            tensors = _tensors((args, kwargs))
            self._carrier.launch(name, run, tensors, tensors)

        return launch


class Placement(TorchFunctionMode):
    """Calls that name a device or page-locked memory, which torch itself would refuse without a GPU."""

    def __init__(self, carrier: Carrier) -> None:
        super().__init__()
        self.carrier = carrier
        self._handlers: dict[Any, Callable[..., Any]] = {
            torch.Tensor.to: self._to,
            torch.Tensor.cuda: lambda tensor, device=None, non_blocking=False: self._move(
                tensor, "cuda", non_blocking
            ),
            torch.Tensor.cpu: lambda tensor: self._move(tensor, "cpu", False),
            torch.Tensor.pin_memory: self._pin_memory,
            torch.Tensor.is_pinned: lambda tensor, device=None: carrier.is_pinned(tensor),
            torch.Tensor.record_stream: lambda tensor, stream: None,
        }

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if self.carrier._aside:
            return func(*args, **kwargs)
        if func in self._handlers:
            return self._handlers[func](*args, **kwargs)
        if _is_cuda(kwargs.get("device")):
            return func(*args, **{**kwargs, "device": "cpu"}).as_subclass(SimTensor)
        if kwargs.get("pin_memory"):
            return self.carrier.pin(func(*args, **{**kwargs, "pin_memory": False}))
        return func(*args, **kwargs)

    def _to(self, tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        names = ("device", "dtype", "non_blocking", "copy")
        if args and isinstance(args[0], torch.Tensor):
            args = (args[0].device, args[0].dtype, *args[1:])
        elif args and isinstance(args[0], torch.dtype):
            args = (None, *args)
        given = dict(zip(names, args, strict=False)) | kwargs
        device, dtype = given.get("device"), given.get("dtype") or tensor.dtype
        is_here = device is None or _is_cuda(device) == self.carrier.on_device(tensor)
        if is_here and dtype == tensor.dtype:
            return tensor.clone() if given.get("copy") else tensor
        if is_here or self.carrier.on_device(tensor):
            tensor = tensor.type(dtype)
        moved = tensor if is_here else self._move(tensor, device, bool(given.get("non_blocking")))
        return moved.type(dtype)

    def _move(self, tensor: torch.Tensor, device: object, non_blocking: bool) -> torch.Tensor:
        if _is_cuda(device) == self.carrier.on_device(tensor):
            return tensor
        with self.carrier.aside():
            made = torch.empty(tensor.shape, dtype=tensor.dtype)
            if _is_cuda(device):
                made = made.as_subclass(SimTensor)
            elif non_blocking:
                self.carrier.pin(made)
            self.carrier.copy(made, tensor, non_blocking)
        return made

    def _pin_memory(self, tensor: torch.Tensor, device: object = None) -> torch.Tensor:
        return tensor if self.carrier.is_pinned(tensor) else self.carrier.pin(tensor.clone())


def _is_cuda(device: Any) -> bool:
    if isinstance(device, int) and not isinstance(device, bool):
        return True
    return device is not None and torch.device(device).type == "cuda"


def _plain(value: Any) -> Any:
    return tree_map_only(SimTensor, lambda tensor: tensor.as_subclass(torch.Tensor), value)


def _tensors(value: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]


def _baked(value: Any) -> Any:
    """Device tensors by address, host scalars by value."""

    def bake(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.as_subclass(torch.Tensor) if isinstance(tensor, SimTensor) else tensor.clone()

    return tree_map_only(torch.Tensor, bake, value)


def _wrapped(value: Any) -> Any:
    return tree_map_only(torch.Tensor, lambda tensor: tensor.as_subclass(SimTensor), value)


_active: Carrier | None = None


def _carrier() -> Carrier:
    if _active is None:
        raise BadInputError("a stream or event of simulated_cuda() is made outside its block; move it inside")
    return _active


@contextmanager
def simulated_cuda(schedule: str | Schedule = "lazy", seed: int = 0) -> Iterator[TorchWatch]:
    """Run a plain PyTorch program on a simulated CUDA device inside the block, and watch it.

    `schedule` and `seed` are those of `device.open`. The races do not depend on the schedule, the values do.
    Races of device memory between streams are reported too. At the end everything queued has run. Raises
    BadInputError for an unknown schedule, inside another such block, and for an operation whose output
    shapes torch cannot infer.
    """
    global _active
    if _active is not None:
        raise BadInputError("staging.simulated_cuda() is open already; close it before opening another")
    dev = devices.SimDevice(named(schedule, seed))
    watch = TorchWatch()
    dev.observers.append(watch)
    _active = carrier = Carrier(watch, dev)
    try:
        carrier.entered.append(SimStream(default=True))
        with (
            mock.patch.multiple(torch.cuda, **_names(carrier)),
            carrier.patched(),
            carrier,
            Placement(carrier),
        ):
            yield watch
            carrier.contents.check()
            with carrier.aside():
                dev.synchronize()
    finally:
        _active = None


def _names(carrier: Carrier) -> dict[str, Any]:
    """What stands in for the names of `torch.cuda`."""
    return {
        "Stream": SimStream,
        "Event": SimEvent,
        "stream": lambda stream: nullcontext() if stream is None else stream,
        "current_stream": lambda device=None: carrier.current(),
        "default_stream": lambda device=None: carrier.entered[0],
        "synchronize": carrier.synchronize,
        "is_available": lambda: True,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
    }
