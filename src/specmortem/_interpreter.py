"""One repair of Triton's interpreter, applied when a kernel of this package is imported.

Triton before 3.7 turns a scalar of the interpreter into an index with `int(array)` on an array of one element, which
numpy 2.5 refuses; loops over a loaded bound then end in a TypeError. Later releases squeeze the array first.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from triton.runtime import interpreter

_MARK = "_specmortem_squeezes"


def mend() -> None:
    """Make scalars of the interpreter usable as indices; does nothing where they are, or when it was done."""
    patch: Callable[..., None] = interpreter._patch_lang_tensor
    if getattr(patch, _MARK, False):
        return

    def patched(tensor: Any, scope: Any) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.squeeze()))

    setattr(patched, _MARK, True)
    interpreter._patch_lang_tensor = patched
