"""A numpy array over a watched tensor's memory that tells of its reads and writes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from specmortem.device.memory import Region, array_region

Told = Callable[[Region, bool], None]

_WRITES_FIRST = (np.copyto, np.put, np.place, np.putmask, np.put_along_axis, np.fill_diagonal)


class WatchedArray(np.ndarray[Any, Any]):
    """Tells before indexing, ufuncs, numpy functions and the usual methods; a view of it tells too.

    What C code does with its memory (a memoryview, another library) is not heard.
    """

    _told: Told | None = None

    @classmethod
    def over(cls, array: npt.NDArray[Any], told: Told) -> Self:
        """The same memory; `told(region, write)` hears of every access."""
        watched = array.view(cls)
        watched._told = told
        return watched

    def __array_finalize__(self, obj: Any) -> None:
        self._told = getattr(obj, "_told", None)

    def _tell(self, region: Region, write: bool) -> None:
        if self._told is not None:
            self._told(region, write)

    def _tell_all(self, write: bool) -> npt.NDArray[Any]:
        plain = self.view(np.ndarray)
        self._tell(array_region(plain), write)
        return plain

    def _selected(self, index: Any) -> npt.NDArray[Any]:
        """The memory that an index names; all of it for a gather or a mask."""
        plain = self.view(np.ndarray)
        selected = plain[_plain(index)]
        if isinstance(selected, np.generic) and not isinstance(index, np.ndarray | list):
            selected = plain[(*(index if isinstance(index, tuple) else (index,)), ...)]
        return selected if np.may_share_memory(selected, plain) else plain

    def __getitem__(self, index: Any) -> Any:
        plain = self.view(np.ndarray)
        found = plain[_plain(index)]
        if isinstance(found, np.ndarray) and np.may_share_memory(found, plain):
            return super().__getitem__(_plain(index))
        self._tell(array_region(self._selected(index)), write=False)
        return plain[_plain(index)]

    def __setitem__(self, index: Any, value: Any) -> None:
        value = _read(value)
        self._tell(array_region(self._selected(index)), write=True)
        self.view(np.ndarray)[_plain(index)] = value

    def __iter__(self) -> Iterator[Any]:
        return (self[index] for index in range(len(self)))

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, out: Any = (), **kwargs: Any) -> Any:
        first = _written(inputs[0]) if method == "at" else _read(inputs[0])
        given = [first, *(_read(value) for value in inputs[1:])]
        if out:
            kwargs["out"] = tuple(_written(value) for value in out)
        result = getattr(ufunc, method)(*given, **kwargs)
        return out[0] if len(out) == 1 else result

    def __array_function__(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        target = kwargs.get("out")
        if func in _WRITES_FIRST:
            target, args = args[0], (_written(args[0]), *_read_in(args[1:]))
        else:
            args = _read_in(args)
        kwargs = {k: _written(v) if k == "out" else _read_in(v) for k, v in kwargs.items()}
        result = func(*args, **kwargs)
        return target if target is not None and result is not None else result


def _telling(name: str, write: bool) -> Callable[..., Any]:
    """A method of numpy's that reads or writes the whole array."""

    def method(self: WatchedArray, *args: Any, **kwargs: Any) -> Any:
        return getattr(self._tell_all(write), name)(*args, **kwargs)

    return method


for _name in ("tolist", "item", "copy", "astype", "tobytes"):
    setattr(WatchedArray, _name, _telling(_name, write=False))
for _name in ("fill", "sort"):
    setattr(WatchedArray, _name, _telling(_name, write=True))


def _plain(index: Any) -> Any:
    if isinstance(index, tuple):
        return tuple(_plain(part) for part in index)
    return _read(index)


def _read(value: Any) -> Any:
    return value._tell_all(write=False) if isinstance(value, WatchedArray) else value


def _written(value: Any) -> Any:
    return value._tell_all(write=True) if isinstance(value, WatchedArray) else value


def _read_in(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return type(value)(_read_in(part) for part in value)
    return _read(value)
