"""Repairs of Triton's interpreter, applied when a kernel of this package is imported.

Triton before 3.7 turns a scalar of the interpreter into an index with `int(array)` on an array of one element, which
numpy 2.5 refuses; loops over a loaded bound then end in a TypeError. Later releases squeeze the array first.

The others change no result and take half of the time of a kernel away. Each launch, and each call of a device function
inside it, looks through `triton.language` for what to replace: it is looked up once, and a call inside a launch that
has replaced it already does nothing. Each + - * of integers is followed by eight operations that find out whether it
overflowed, for an assertion that is made in debug mode only: they are left out in any other. Shapes and types are made
anew for each value: they are made once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from triton import knobs
from triton.runtime import interpreter

_MARK = "_specmortem_mended"


def mend() -> None:
    """Apply them; does nothing where they were applied, and leaves what a release does not have as it is."""
    patch: Callable[..., None] = interpreter._patch_lang_tensor
    if getattr(patch, _MARK, False):
        return

    def patched(tensor: Any, scope: Any) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.squeeze()))

    setattr(patched, _MARK, True)
    interpreter._patch_lang_tensor = patched
    if hasattr(interpreter, "_LangPatchScope") and hasattr(interpreter, "_patch_lang"):
        interpreter._patch_builtin = _Builtins(interpreter._patch_builtin).patch
        _Replaced()
    if knobs.runtime.interpret:
        if hasattr(interpreter, "interpreter_semantic"):
            _check_overflow_in_debug_mode_only(interpreter.interpreter_semantic)
        _make_types_once(interpreter.tl.core)


def _check_overflow_in_debug_mode_only(semantic: Any) -> None:
    check = semantic.binary_op_sanitize_overflow_impl

    def checked(lhs: Any, rhs: Any, binary_op: Callable[..., Any]) -> None:
        if semantic.builder.options.debug:
            check(lhs, rhs, binary_op)

    semantic.binary_op_sanitize_overflow_impl = checked


def _make_types_once(core: Any) -> None:
    """Share the numpy dtype of equal types, and the shape of equal block types and tensors, which nothing changes."""
    numpy_dtype, make_block = interpreter._get_np_dtype, core.block_type.__init__
    make_tensor = core.tensor.__init__
    dtypes: dict[str, Any] = {}
    blocks: dict[Any, dict[str, Any]] = {}
    shapes: dict[tuple[int, ...], tuple[Any, Any]] = {}

    def kept_dtype(kind: Any) -> Any:
        scalar = kind.scalar
        if scalar.name not in dtypes:
            dtypes[scalar.name] = numpy_dtype(scalar)
        return dtypes[scalar.name]

    def block_type(self: Any, element_ty: Any, shape: Any) -> None:
        sizes = [getattr(size, "value", size) for size in shape]
        key = element_ty.name, type(shape), *sizes
        if not all(type(size) is int for size in sizes):  # what Triton may refuse
            make_block(self, element_ty, shape)
        elif key not in blocks:
            make_block(self, element_ty, shape)
            blocks[key] = dict(vars(self))
        else:
            vars(self).update(blocks[key], element_ty=element_ty)

    def tensor(self: Any, handle: Any, type: Any) -> None:
        shape = tuple(type.shape) if type.is_block() else ()
        if shape not in shapes:
            make_tensor(self, handle, type)
            shapes[shape] = self.shape, self.numel
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.shape, self.numel = shapes[shape]

    interpreter._get_np_dtype = kept_dtype
    core.block_type.__init__, core.tensor.__init__ = block_type, tensor


class _Builtins:
    """The functions of a package that the interpreter replaces, and by what.

    They are looked up at the first launch, when none is replaced yet.
    """

    def __init__(self, patch: Callable[..., None]) -> None:
        self._patch = patch
        self._of: dict[Any, list[tuple[Any, str, Any]]] = {}

    def patch(self, package: Any, builder: Any, scope: Any) -> None:
        """Replace them, as Triton's `_patch_builtin` does."""
        if package not in self._of:
            found: list[tuple[Any, str, Any]] = []
            self._patch(package, builder, _Listing(found))
            self._of[package] = found
        for owner, name, replacement in self._of[package]:
            scope.set_attr(owner, name, replacement)


class _Listing:
    """Takes the place of Triton's scope of replacements: lists them, and replaces nothing."""

    def __init__(self, found: list[tuple[Any, str, Any]]) -> None:
        self._found = found

    def set_attr(self, owner: Any, name: str, value: Any) -> None:
        """Note it."""
        self._found.append((owner, name, value))


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
        tl, core = interpreter.tl, interpreter.tl.core
        needed = {value for value in function.__globals__.values() if value is tl or value is core}
        if self._launches and needed and needed <= self._now:
            return interpreter._LangPatchScope()
        if self._launches:
            self._now |= needed
        return self._patch(function)
