"""What a plain PyTorch call does to host memory, by the rules of `aten/src/ATen/native/cuda/Copy.cu`."""

# mypy: disallow-untyped-calls=False

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from specmortem.detect.hooks import Hook, hooked
from specmortem.detect.staging.arrays import WatchedArray
from specmortem.detect.staging.contents import Contents
from specmortem.detect.staging.order import Access
from specmortem.detect.staging.watch import StagingWatch
from specmortem.device import Op, Region
from specmortem.device.memory import tensor_region
from specmortem.errors import BadInputError

_NO_CONTENT = ("is_pinned", "set_", "record_stream", "resize_", "sym_size", "sym_stride", "sym_numel")


class TorchWatch(StagingWatch):
    """A watch over a plain PyTorch program."""

    interceptor: Interceptor

    def __init__(self) -> None:
        super().__init__()
        self._named: dict[int, tuple[str, torch.UntypedStorage]] = {}

    def name(self, tensor: torch.Tensor, name: str) -> torch.Tensor:
        """Call the tensor's memory `name`; returns the tensor."""
        storage = tensor.untyped_storage()
        self._named[storage.data_ptr()] = (name, storage)
        return tensor

    def copied(self, dst: torch.Tensor, src: torch.Tensor) -> None:
        """Declare a non-blocking copy that code other than torch has just enqueued in the current stream.

        Raises BadInputError unless exactly one end is a device tensor.
        """
        interceptor = self.interceptor
        if interceptor.on_device(dst) == interceptor.on_device(src):
            raise BadInputError("copied(dst, src): give one tensor of the device and one of the host")
        with interceptor.aside():
            interceptor.transfer(dst, src, True, lambda: None)

    def region(self, tensor: torch.Tensor) -> Region:
        """The bytes of a view, under the name of its memory."""
        default = (f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)} tensor", None)
        name, _ = self._named.get(tensor.untyped_storage().data_ptr(), default)
        return tensor_region(tensor, name)


class Interceptor(TorchDispatchMode):
    """Hears every operation of the thread inside its block and tells the watch; subclasses carry them out."""

    def __init__(self, watch: TorchWatch) -> None:
        super().__init__()
        self.watch, self.order, self.contents = watch, watch.order, Contents(watch)
        watch.interceptor = self
        self._aside, self._over = False, False

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Calls inside are the detector's own."""
        before, self._aside = self._aside, True
        try:
            yield
        finally:
            self._aside = before

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if self._aside:
            return func(*args, **(kwargs or {}))
        with self.aside():
            return self.operate(func, args, kwargs or {})

    @contextmanager
    def patched(self) -> Iterator[None]:
        """`Tensor.numpy` and `Tensor.tolist`, which are no operations, tell too."""
        with hooked(torch.Tensor, numpy=self._numpy, tolist=self._tolist):
            try:
                yield
            finally:
                self._over = True

    def _numpy(self, numpy: Hook, tensor: torch.Tensor, **kwargs: Any) -> Any:
        with self.aside():
            array = numpy(tensor, **kwargs)
            if self.on_device(tensor) or not self.is_pinned(tensor):
                return array
        return WatchedArray.over(array, lambda region, write: self.touch(tensor, region, write))

    def _tolist(self, tolist: Hook, tensor: torch.Tensor) -> Any:
        self.touch_all([tensor], write=False)
        return tolist(tensor)

    def touch(self, tensor: torch.Tensor, region: Region, write: bool) -> None:
        """The host is about to read or write bytes of a host tensor; arrays may outlive the block."""
        if self._over:
            return
        with self.aside():
            name = self.watch.region(tensor).name
            if write:
                self.contents.check()
                self.contents.forget(region)
            self.host(tensor, replace(region, name=name), write)

    def touch_all(self, tensors: list[torch.Tensor], write: bool) -> None:
        """The host is about to read or write all of each host tensor among these."""
        for tensor in tensors:
            if not self.on_device(tensor):
                self.touch(tensor, self.watch.region(tensor), write)

    def transfer(
        self, dst: torch.Tensor, src: torch.Tensor, non_blocking: bool, run: Callable[[], object]
    ) -> None:
        """A copy between host and device on the current stream."""
        self.contents.check()
        down, read, written = self.on_device(dst), self.watch.region(src), self.watch.region(dst)
        name = f"from {read.name}" if down else f"to {written.name}"
        copy = Op("copy", name, run, (read,), (written,), (dst, src))
        if down:
            self._copy_down(copy, dst, src, non_blocking)
            return
        self.contents.forget(written)
        self.enqueue(copy)
        if not (non_blocking and self.is_pinned(dst) and dst.is_contiguous()):
            self.join_stream()

    def _copy_down(self, copy: Op, dst: torch.Tensor, src: torch.Tensor, non_blocking: bool) -> None:
        [region] = copy.reads
        if non_blocking and not (self.is_pinned(src) and _read_in_place(dst, src)):
            self.touch(src, region, write=False)
            self.enqueue(replace(copy, run=self.staged(copy.run, dst, src), reads=()))
            return
        quiet = not self.order.pending_write(region)
        access = self.enqueue(copy)
        if not non_blocking:
            self.join_stream()
        elif access is not None and quiet:
            self.contents.keep(access, region, src)

    # What a kind of device does

    @abstractmethod
    def operate(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Carry out an operation of the program and tell the watch."""

    @abstractmethod
    def on_device(self, tensor: torch.Tensor) -> bool: ...

    @abstractmethod
    def is_pinned(self, tensor: torch.Tensor) -> bool: ...

    @abstractmethod
    def host(self, tensor: torch.Tensor, region: Region, write: bool) -> None: ...

    @abstractmethod
    def enqueue(self, op: Op) -> Access | None:
        """Put work into the current stream; None when it will run by a graph's replay only."""

    def staged(self, run: Callable[[], object], dst: torch.Tensor, src: torch.Tensor) -> Callable[[], object]:
        """The same copy, its source taken now."""
        return run

    @abstractmethod
    def join_stream(self) -> None:
        """The host waits for the current stream."""


def touched(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """The tensors whose content an operation reads, and those that it writes; a view touches none."""
    reads: list[torch.Tensor] = []
    writes: list[torch.Tensor] = []
    name = name_of(func)
    if is_view(func) or name in _NO_CONTENT or name.startswith("new_") or name.endswith("_like"):
        return reads, writes
    named = list(zip(func._schema.arguments, args, strict=False))
    named += [
        (argument, kwargs[argument.name]) for argument in func._schema.arguments if argument.name in kwargs
    ]
    for argument, value in named:
        tensors = [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]
        written = argument.alias_info is not None and argument.alias_info.is_write
        (writes if written else reads).extend(tensors)
    return reads, writes


@cache
def is_view(func: Any) -> bool:
    """Whether its result is a view of an argument."""
    return any(r.alias_info is not None and not r.alias_info.is_write for r in func._schema.returns)


def waits(func: Any, args: tuple[Any, ...]) -> bool:
    """Whether the host needs the operation's result, so that on CUDA it waits for the current stream.

    Indexing counts the elements of a mask, and needs nothing of integer indices.
    """
    if name_of(func) in ("index", "index_put", "index_put_"):
        return any(mask.dtype in (torch.bool, torch.uint8) for mask in args[1] if mask is not None)
    tags = func.tags
    return torch.Tag.data_dependent_output in tags or torch.Tag.dynamic_output_shape in tags


def copy_ends(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor, bool]:
    """Destination, source and `non_blocking` of `aten.copy_`."""
    return args[0], args[1], bool(args[2] if len(args) > 2 else kwargs.get("non_blocking", False))


def name_of(func: Any) -> str:
    """An operation's name, without namespace and overload."""
    return str(func._schema.name).removeprefix("aten::")


def _read_in_place(dst: torch.Tensor, src: torch.Tensor) -> bool:
    """Whether a non-blocking copy reads its pinned source itself; else the call stages the source."""
    if src.shape == dst.shape and src.is_contiguous():
        return True
    dense = torch._debug_has_internal_overlap(src) == 0 and src.numel() * src.element_size() == _span(src)
    return bool(dense and src.dtype == dst.dtype and src.shape == dst.shape and src.stride() == dst.stride())


def _span(tensor: torch.Tensor) -> int:
    region = tensor_region(tensor)
    return region.stop - region.start
