"""Hooks on Triton's interpreter: functions of a class or a module, replaced inside a block.

A detector that hears of the loads and stores of interpreted kernels hooks `interpreter.InterpreterBuilder`; nothing
else of this package patches it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import triton
from triton.runtime import interpreter

Hook = Callable[..., Any]
_SKIPPED = (str(Path(triton.__file__).parent), str(Path(__file__).parent))


@contextmanager
def hooked(target: Any, **hooks: Hook) -> Iterator[None]:
    """Call `hook(original, *arguments)` in place of the functions of those names; a method's first is its object."""
    originals = {name: getattr(target, name) for name in hooks}
    for name, hook in hooks.items():
        setattr(target, name, _in_place(hook, originals[name]))
    try:
        yield
    finally:
        for name, original in originals.items():
            setattr(target, name, original)


def _in_place(hook: Hook, original: Hook) -> Hook:
    def call(*args: Any, **kwargs: Any) -> Any:
        return hook(original, *args, **kwargs)

    return call


def dtype_of(pointers: Any) -> Any:
    """The numpy dtype of what the pointers of a load, a store or an atomic point to."""
    return interpreter._get_np_dtype(pointers.get_element_ty())


def kernel_frame() -> tuple[str, int]:
    """File and line of the innermost frame that is neither Triton's nor a detector's; empty when there is none."""
    frame = sys._getframe(1)
    while frame.f_back is not None:
        name = frame.f_code.co_filename
        if not name.startswith(_SKIPPED):
            return name, frame.f_lineno
        frame = frame.f_back
    return "", 0
