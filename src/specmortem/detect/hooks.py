"""Functions of a class or a module, replaced inside a block: how detectors hear of what Triton and torch do."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

Hook = Callable[..., Any]


@contextmanager
def hooked(target: Any, **hooks: Hook) -> Iterator[None]:
    """Call `hook(original, *arguments)` in place of the functions of those names; a method's first is its object."""
    with ExitStack() as stack:
        for name, hook in hooks.items():
            replaced = _in_place(hook, getattr(target, name))
            stack.enter_context(mock.patch.object(target, name, replaced))
        yield


def _in_place(hook: Hook, original: Hook) -> Hook:
    def call(*args: Any, **kwargs: Any) -> Any:
        return hook(original, *args, **kwargs)

    return call
