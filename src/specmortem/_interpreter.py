"""Two repairs of Triton's interpreter, applied when a kernel of this package is imported.

Triton before 3.7 turns a scalar of the interpreter into an index with `int(array)` on an array of one element, which
numpy 2.5 refuses; loops over a loaded bound then end in a TypeError. Later releases squeeze the array first.

Each launch, and each call of a device function inside it, looks through `triton.language` for what to replace. What it
finds is always the same: it is looked up once, and a call inside a launch that has replaced it already does nothing.
That is a quarter of the time of a kernel that calls functions.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from triton.runtime import interpreter

_MARK = "_specmortem_mended"


def mend() -> None:
    """Apply both; does nothing where they were applied, and leaves what a release does not have as it is."""
    patch: Callable[..., None] = interpreter._patch_lang_tensor
    if getattr(patch, _MARK, False):
        return

    def patched(tensor: Any, scope: Any) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.squeeze()))

    setattr(patched, _MARK, True)
    interpreter._patch_lang_tensor = patched
    if hasattr(interpreter, "_LangPatchScope") and hasattr(interpreter, "_patch_lang"):
        interpreter._patch_builtin = _Builtins().patch
        _Replaced()


class _Builtins:
    """The functions of a package that the interpreter replaces, looked up at the first launch, when none is yet."""

    def __init__(self) -> None:
        self._of: dict[Any, list[tuple[str, Any]]] = {}

    def patch(self, package: Any, builder: Any, scope: Any) -> None:
        """Replace them, as Triton's `_patch_builtin` does."""
        if package not in self._of:
            members = inspect.getmembers(package)
            self._of[package] = [(n, m) for n, m in members if interpreter.tl.core.is_builtin(m)]
        for name, member in self._of[package]:
            interpreter._patch_attr(package, name, member, builder, scope)


class _Replaced:
    """Which modules are replaced now. Triton gives back what a launch replaced, and never what a call inside it did."""

    def __init__(self) -> None:
        self._patch, self._execute = interpreter._patch_lang, interpreter.GridExecutor.__call__
        self._launches = 0
        self._now: set[Any] = set()
        interpreter._patch_lang = self.patch
        interpreter.GridExecutor.__call__ = lambda *args, **kwargs: self.launch(*args, **kwargs)

    def launch(self, *args: Any, **kwargs: Any) -> Any:
        """Triton's `GridExecutor.__call__`; what it replaces, it gives back."""
        before, self._now = self._now, set(self._now) if self._launches else set()
        self._launches += 1
        try:
            return self._execute(*args, **kwargs)
        finally:
            self._launches -= 1
            self._now = before

    def patch(self, function: Any) -> Any:
        """Triton's `_patch_lang`, which does nothing inside a launch that has replaced the same modules already."""
        tl = interpreter.tl
        needed = {v for v in function.__globals__.values() if inspect.ismodule(v) and v in (tl, tl.core)}
        if self._launches and needed and needed <= self._now:
            return interpreter._LangPatchScope()
        if self._launches:
            self._now |= needed
        return self._patch(function)
