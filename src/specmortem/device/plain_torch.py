"""Plain PyTorch code that speaks of CUDA, run on the simulated device: for released code, which knows nothing of ours.

Inside `on_sim(device)` a tensor made with `device="cuda"` lives on the CPU and is known by its storage; what touches
it becomes work of the device's default stream. The rules are PyTorch's on CUDA:

- An operation on a device tensor is enqueued, and so are the kernels that `queued` wraps.
- A copy between the host and the device with `non_blocking=True` is enqueued: a pinned source is read when it runs, a
  pageable one at the call. Without it, or into pageable memory, the host waits for the stream.
- `.cpu()`, `.item()`, `.tolist()` and the like make the host wait. `waits` counts them.
- `pin_memory()` of a pinned tensor is the tensor itself, else a new one.

Host tensors, and numpy arrays over them, are touched at once. Several streams, and `torch.cuda.Event`, are not
modelled: use the device's own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch._dynamo  # shape functions import it at their first call: a second, here once for all forks
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from specmortem.device.sim import SimDevice
from specmortem.errors import BadInputError

_aten = torch.ops.aten
_READS = (_aten._local_scalar_dense.default, _aten.equal.default, _aten.is_nonzero.default)
_INDEXED = (_aten.index, _aten.index_put_, _aten.index_put)
_DEVICE, _IS_CUDA, _IS_CPU = (
    vars(torch._C.TensorBase)[name].__get__ for name in ("device", "is_cuda", "is_cpu")
)


class Machine:
    """The memory that a plain program has allocated, over one simulated device."""

    def __init__(self, device: SimDevice) -> None:
        self.device = device
        self.waits = 0
        self._on_device: dict[int, torch.UntypedStorage] = {}
        self._pinned: dict[int, torch.UntypedStorage] = {}
        self._depth = 0

    @property
    def passing(self) -> bool:
        """Whether operations run as PyTorch's own now: queued work does."""
        return self._depth > 0

    def is_on_device(self, tensor: torch.Tensor) -> bool:
        """Whether the tensor is one of the device's."""
        return tensor.untyped_storage()._cdata in self._on_device

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        """Whether the tensor lies in page-locked memory."""
        return tensor.untyped_storage()._cdata in self._pinned

    def place(self, tensor: torch.Tensor) -> torch.Tensor:
        """Let the tensor's memory be the device's."""
        storage = tensor.untyped_storage()
        self._on_device[storage._cdata] = storage
        return tensor

    def pin(self, tensor: torch.Tensor) -> torch.Tensor:
        """Let the tensor's memory be page-locked."""
        storage = tensor.untyped_storage()
        self._pinned[storage._cdata] = storage
        return tensor

    def enqueue(self, run: Callable[[], object], name: str) -> None:
        """Put work into the default stream."""
        self.device.launch(partial(self._run, run), reads=(), writes=(), name=name)

    def wait(self) -> None:
        """The host waits for the device."""
        self.waits += 1
        with self.passed():
            self.device.synchronize()

    @contextmanager
    def passed(self) -> Iterator[None]:
        """Operations of the block run as PyTorch's own."""
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1

    def _run(self, run: Callable[[], object]) -> None:
        with self.passed():
            run()

    def copy(self, dst: torch.Tensor, src: torch.Tensor, non_blocking: bool) -> torch.Tensor:
        """What `dst.copy_(src, non_blocking)` does where at least one end is the device's."""
        crosses = self.is_on_device(dst) != self.is_on_device(src)
        host = src if self.is_on_device(dst) else dst
        staged = src.clone() if crosses and host is src and not self.is_pinned(src) else src
        self.enqueue(partial(dst.copy_, staged), "copy")
        if crosses and (not non_blocking or (host is dst and not self.is_pinned(dst))):
            self.wait()
        return dst

    def moved(
        self, tensor: torch.Tensor, to_device: bool, dtype: torch.dtype, non_blocking: bool, copy: bool
    ) -> torch.Tensor:
        """What `tensor.to(...)` gives."""
        if to_device == self.is_on_device(tensor):
            return tensor if dtype == tensor.dtype and not copy else tensor.to(dtype, copy=copy)
        with self.passed():
            out = torch.empty_like(tensor, dtype=dtype)
        if to_device:
            self.place(out)
        elif non_blocking:
            self.pin(out)
        return self.copy(out, tensor, non_blocking)


@contextmanager
def on_sim(device: SimDevice) -> Iterator[Machine]:
    """Run the block's plain PyTorch code on a simulated device; at the end its queued work is run."""
    machine = Machine(device)
    with _Operations(machine), _Calls(machine):
        yield machine
        machine.wait()


class queued:  # noqa: N801
    """A Triton kernel whose launches go into the queue: `queued(kernel, machine)[grid](...)`."""

    def __init__(self, kernel: Any, machine: Machine) -> None:
        self._kernel, self._machine = kernel, machine

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        """The launcher of a grid."""

        def launch(*args: Any, **kwargs: Any) -> None:
            run = partial(self._kernel[grid], *args, **kwargs)
            self._machine.enqueue(run, getattr(self._kernel, "__name__", "kernel"))

        return launch


def _tensors(*values: Any) -> list[torch.Tensor]:
    return [leaf for leaf in pytree.tree_leaves(values) if isinstance(leaf, torch.Tensor)]


class _Calls(TorchFunctionMode):
    """What PyTorch decides before it dispatches: places of new tensors, moves, pinning, reads by the host."""

    def __init__(self, machine: Machine) -> None:
        super().__init__()
        self.machine = machine

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        machine, first = self.machine, args[0] if args else None
        if machine.passing or func is torch.Tensor.__repr__:
            return func(*args, **kwargs)
        if isinstance(first, torch.Tensor):
            answer = self._of_tensor(func, first, args[1:], kwargs)
            if answer is not NotImplemented:
                return answer
        return self._made(func, args, kwargs)

    def _of_tensor(self, func: Any, tensor: torch.Tensor, rest: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        machine, name = self.machine, getattr(func, "__name__", "")
        if name in ("is_pinned", "pin_memory"):
            return self._pinning(name, tensor)
        if name in ("to", "cpu", "cuda"):
            return self._move(name, tensor, rest, kwargs)
        on_device = machine.is_on_device(tensor)
        if func == _DEVICE:
            return torch.device("cuda" if on_device else "cpu")
        if func in (_IS_CUDA, _IS_CPU):
            return on_device == (func == _IS_CUDA)
        if on_device and func in (torch.Tensor.numpy, torch.Tensor.__array__):
            raise TypeError("can't convert a device tensor to numpy; use Tensor.cpu() first")
        if on_device and func is torch.Tensor.tolist:
            machine.wait()
        if on_device and func is torch.Tensor.__setitem__ and isinstance(rest[1], bool | int | float):
            return machine.enqueue(partial(func, tensor, *rest), "fill")
        return NotImplemented

    def _pinning(self, name: str, tensor: torch.Tensor) -> Any:
        machine = self.machine
        if name == "is_pinned":
            return machine.is_pinned(tensor)
        if machine.is_on_device(tensor):
            raise RuntimeError("only host tensors can be pinned")
        return tensor if machine.is_pinned(tensor) else machine.pin(tensor.clone())

    def _move(self, name: str, tensor: torch.Tensor, rest: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        copy = bool(kwargs.pop("copy", False))
        if name != "to":
            return self.machine.moved(
                tensor, name == "cuda", tensor.dtype, bool(kwargs.get("non_blocking")), False
            )
        if rest and isinstance(rest[0], torch.Tensor):
            rest = (rest[0].device, rest[0].dtype, *rest[1:])
        device, dtype, non_blocking, _ = torch._C._nn._parse_to(*rest, **kwargs)
        to_device = self.machine.is_on_device(tensor) if device is None else device.type != "cpu"
        return self.machine.moved(tensor, to_device, dtype or tensor.dtype, non_blocking, copy)

    def _made(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Factories: `device=` and `pin_memory=` say where the result lies."""
        device, pinned = kwargs.get("device"), bool(kwargs.pop("pin_memory", False))
        if device is None and not pinned:
            return func(*args, **kwargs)
        on_device = device is not None and torch.device(device).type == "cuda"
        kwargs["device"] = "cpu"
        with self.machine.passed():
            made = func(*args, **kwargs)
        return self.machine.place(made) if on_device else self.machine.pin(made) if pinned else made


class _Operations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Operations: at once on host tensors, views at once everywhere, all else of the device into the queue."""

    def __init__(self, machine: Machine) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.machine = machine

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs, machine = dict(kwargs or {}), self.machine
        tensors = _tensors(args, kwargs)
        on_device = [tensor for tensor in tensors if machine.is_on_device(tensor)]
        if machine.passing or not on_device:
            return func(*args, **kwargs)
        if func is _aten.copy_.default:
            return machine.copy(args[0], args[1], bool(args[2]) if len(args) > 2 else False)
        if func in _READS:
            machine.wait()
            return func(*args, **kwargs)
        if func.is_view:
            return func(*args, **kwargs)
        if any(tensor.dim() for tensor in tensors if not machine.is_on_device(tensor)):
            if func.overloadpacket in _INDEXED:
                args = pytree.tree_map_only(torch.Tensor, self._uploaded, args)
                return self.__torch_dispatch__(func, types, args, kwargs)
            raise BadInputError(f"{func}: one tensor is on the device, another on the host; move one of them")
        if func._schema.is_mutable:
            return self._in_place(func, args, kwargs)
        return self._fresh(func, args, kwargs)

    def _uploaded(self, tensor: torch.Tensor) -> torch.Tensor:
        """A host index of a device tensor: PyTorch copies it to the device and waits."""
        if self.machine.is_on_device(tensor):
            return tensor
        return self.machine.moved(tensor, True, tensor.dtype, False, False)

    def _in_place(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        self.machine.enqueue(partial(func, *args, **kwargs), str(func))
        written = [
            args[i] if i < len(args) else kwargs[a.name]
            for i, a in enumerate(func._schema.arguments)
            if a.alias_info is not None and a.alias_info.is_write and (i < len(args) or a.name in kwargs)
        ]
        return written[0] if len(written) == 1 else tuple(written)

    def _fresh(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """A new tensor of the shape that PyTorch's shape functions give, filled when the queue gets there."""
        shapes = func(*pytree.tree_map_only(torch.Tensor, _shape, args), **_on_meta(kwargs))
        outs = pytree.tree_map_only(torch.Tensor, self._empty, shapes)
        flat = _tensors(outs)
        if not flat:
            raise BadInputError(f"{func} of a device tensor gives no tensor; it is not simulated")

        def run() -> None:
            for out, value in zip(flat, _tensors(func(*args, **kwargs)), strict=True):
                out.copy_(value)

        self.machine.enqueue(run, str(func))
        return outs

    def _empty(self, shape: torch.Tensor) -> torch.Tensor:
        made = torch.empty_strided(shape.size(), shape.stride(), dtype=shape.dtype)
        return self.machine.place(made)


def _shape(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device="meta")


def _on_meta(kwargs: dict[str, Any]) -> dict[str, Any]:
    """Keyword arguments for a call that computes shapes only."""
    moved = pytree.tree_map_only(torch.Tensor, _shape, kwargs)
    if moved.get("device") is not None:
        moved["device"] = torch.device("meta")
    return dict(moved)
