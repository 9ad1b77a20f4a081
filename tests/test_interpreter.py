import numpy as np
import pytest
import torch
import triton
import triton.language as tl

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


@triton.jit
def doubled(value):  # type: ignore[no-untyped-def]
    return value * 2


@triton.jit
def doubling(source, target, size: tl.constexpr):  # type: ignore[no-untyped-def]
    zeros = tl.zeros(
        (size,), tl.float32
    )  # a function of triton's own, which sees another module than this one
    lanes = tl.arange(0, size)
    tl.store(target + lanes, doubled(tl.load(source + lanes)) + zeros)


def test_launches_that_call_functions_replace_the_language_and_give_it_back():
    mend()
    source, target = torch.arange(4, dtype=torch.float32), torch.zeros(4)
    before = tl.load, tl.tensor.__add__
    for _ in range(3):
        doubling[(1,)](source, target, 4)
        assert target.tolist() == [0, 2, 4, 6]
        assert (tl.load, tl.tensor.__add__) == before


@triton.jit
def failing(target):  # type: ignore[no-untyped-def]
    tl.store(target, doubled(no_such_name))  # noqa: F821


def test_a_launch_that_fails_gives_the_language_back_and_the_next_one_works():
    mend()
    before, target = tl.load, torch.zeros(4)
    with pytest.raises(Exception, match="no_such_name"):
        failing[(1,)](target)
    assert tl.load is before
    doubling[(1,)](torch.ones(4), target, 4)
    assert target.tolist() == [2] * 4


@triton.jit
def adding(values, other):  # type: ignore[no-untyped-def]
    tl.store(values, tl.load(values) + other)


def test_overflow_is_an_error_in_debug_mode_and_wraps_in_any_other(monkeypatch):
    from triton.runtime import interpreter

    mend()
    largest = torch.tensor([2**31 - 1], dtype=torch.int32)
    adding[(1,)](largest, 1)
    assert largest.tolist() == [-(2**31)]
    debugging = interpreter.InterpreterOptions(debug=True)
    monkeypatch.setattr(interpreter.interpreter_builder, "options", debugging)
    adding[(1,)](largest, 1)
    with pytest.raises(Exception, match="int32 overflow detected for operation add"):
        adding[(1,)](torch.tensor([2**31 - 1], dtype=torch.int32), 1)


@pytest.mark.parametrize(
    ("shape", "error"),
    [
        ([3], ValueError),
        ([], TypeError),
        ([np.int64(4)], (AttributeError, TypeError)),
        ((4,), AssertionError),
    ],
)
def test_what_triton_refuses_as_a_shape_is_refused_after_a_like_one_was_taken(shape, error):
    mend()
    for _ in range(2):
        kind = tl.block_type(tl.int32, [4])
        assert (kind.element_ty, list(kind.shape), kind.numel, kind.name) == (
            tl.int32,
            [4],
            4,
            "<['4'], int32>",
        )
        with pytest.raises(error):
            tl.block_type(tl.int32, shape)


def test_pointers_to_one_type_in_two_memories_stay_apart():
    mend()
    shared, of_the_device = (tl.pointer_type(tl.int32, address_space=space) for space in (3, 1))
    kinds = [tl.block_type(pointer, [8]) for pointer in (shared, of_the_device)]
    assert [kind.element_ty for kind in kinds] == [shared, of_the_device] and kinds[0] != kinds[1]


def test_values_of_one_shape_have_their_own_types():
    mend()
    whole, real = (tl.tensor(None, tl.block_type(kind, [2, 4])) for kind in (tl.int32, tl.float32))
    assert whole.shape == real.shape == tl.tuple([2, 4]) and whole.numel == real.numel == 8
    assert (whole.dtype, real.dtype, tl.tensor(None, tl.int8).numel) == (tl.int32, tl.float32, 1)
