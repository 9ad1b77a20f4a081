"""A model of the warps that shift a window inside its block: every order of their loads and stores."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from math import gcd, prod
from typing import Any

from specmortem.errors import BadInputError

WarpStep = tuple[int, str, int, int]
_Step = tuple[str, int, int]
_Grains = tuple[int, ...]


@dataclass(frozen=True)
class ShiftOrders:
    """Every order in which warps can take their loads and stores of one shift inside a block.

    `example` is one of the wrong orders: (warp, "load" or "store", first byte, bytes) a step.
    """

    orders: int
    wrong: int
    example: tuple[WarpStep, ...] = ()


def shift_orders(
    width: int, bias: int, token_bytes: int, *, warps: int = 4, warp_bytes: int = 512, ordered: bool = False
) -> ShiftOrders:
    """Enumerate the shift of a window [width, token_bytes] to the left by `bias` tokens.

    A warp moves `warp_bytes` with one load and one store and takes its own steps in order; warps do not wait for
    each other. `ordered` goes token by token, else the window is one run of bytes.
    Raises BadInputError when there is too much to enumerate.
    """
    if not 0 <= bias < width or min(token_bytes, warps, warp_bytes) < 1:
        raise BadInputError(f"a shift of {width} tokens of {token_bytes} bytes by {bias} is no shift")
    grain = gcd(token_bytes, warp_bytes)
    run = token_bytes if ordered else (width - bias) * token_bytes
    programs = _warp_steps(width - bias, bias * token_bytes, run, token_bytes, warps, warp_bytes)
    if (found := prod(len(p) + 1 for p in programs)) > 100_000:
        raise BadInputError(f"{found} states are too many to enumerate; use fewer warps or a smaller window")
    return _Orders(programs, width * token_bytes // grain, bias * token_bytes // grain, grain).count()


def _warp_steps(
    tokens: int, shift: int, run: int, token_bytes: int, warps: int, warp_bytes: int
) -> list[list[_Step]]:
    """For each warp its loads and stores (kind, first byte, bytes), over runs of `run` bytes."""
    programs: list[list[_Step]] = [[] for _ in range(warps)]
    for start in range(0, tokens * token_bytes, run):
        for number, at in enumerate(range(start, start + run, warp_bytes)):
            size = min(warp_bytes, start + run - at)
            programs[number % warps] += [("load", at + shift, size), ("store", at, size)]
    return programs


class _Orders:
    """Counts paths through (steps taken, memory, registers), each such state once."""

    def __init__(self, programs: list[list[_Step]], grains: int, shift: int, grain: int) -> None:
        self.programs, self.grain = programs, grain
        self.memory = tuple(range(grains))
        self.right = self.memory[shift:] + self.memory[grains - shift :]
        self.after = cache(self._after)

    def count(self) -> ShiftOrders:
        """All orders from the beginning."""
        return self.after((0,) * len(self.programs), self.memory, ((),) * len(self.programs))

    def _after(self, taken: _Grains, memory: _Grains, registers: tuple[_Grains, ...]) -> ShiftOrders:
        """All orders of the steps that are left; a leaf is one order."""
        orders = wrong = 0
        example: tuple[WarpStep, ...] = ()
        for warp, program in enumerate(self.programs):
            if taken[warp] == len(program):
                continue
            kind, first, size = program[taken[warp]]
            at, end = first // self.grain, (first + size) // self.grain
            held = memory[at:end] if kind == "load" else ()
            left = memory[:at] + registers[warp] + memory[end:] if kind == "store" else memory
            rest = self.after(_put(taken, warp, taken[warp] + 1), left, _put(registers, warp, held))
            orders, wrong = orders + rest.orders, wrong + rest.wrong
            if rest.wrong and not example:
                example = ((warp, kind, first, size), *rest.example)
        return ShiftOrders(orders, wrong, example) if orders else ShiftOrders(1, int(memory != self.right))


def _put(values: tuple[Any, ...], at: int, value: Any) -> tuple[Any, ...]:
    return (*values[:at], value, *values[at + 1 :])
