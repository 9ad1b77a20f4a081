import numpy as np
import pytest

from specmortem._interpreter import mend

pytestmark = pytest.mark.usefixtures("interpreted")


class Strict(np.ndarray):
    """An array that converts to a scalar only when it has no dimension, as numpy 2.5 has it."""

    def __int__(self):
        if self.ndim:
            raise TypeError("only 0-dimensional arrays can be converted to Python scalars")
        return super().__int__()


class Handle:
    data = np.array([3]).view(Strict)


class Scope:
    def set_attr(self, owner, name, value):
        setattr(owner, name, value)


def test_a_scalar_of_one_element_is_an_index_whatever_numpy_says():
    from triton.runtime import interpreter

    class Tensor:
        handle = Handle()

    mend()
    interpreter._patch_lang_tensor(Tensor, Scope())
    assert list(range(Tensor())) == [0, 1, 2]


def test_mending_twice_is_mending_once():
    from triton.runtime import interpreter

    mend()
    once = interpreter._patch_lang_tensor
    mend()
    assert interpreter._patch_lang_tensor is once
