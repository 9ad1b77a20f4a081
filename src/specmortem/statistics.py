"""Exact statistics of counts: intervals of a rate, and the test of two rates. No approximation, no dependency."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cache

from specmortem.errors import BadInputError

LEVEL = 0.95
HALVINGS = 60


@cache
def clopper_pearson(events: int, trials: int, level: float = LEVEL) -> tuple[float, float]:
    """The interval of a rate that covers it with at least `level`, whatever it is (Clopper and Pearson, 1934).

    Raises BadInputError unless 0 <= events <= trials and trials > 0.
    """
    _check(events, trials)
    tail = (1 - level) / 2
    logs = [_log_choose(trials, k) for k in range(events + 1)]
    low = 0.0 if events == 0 else _root(lambda p: 1 - _at_most(logs[:-1], trials, p) - tail)
    high = 1.0 if events == trials else _root(lambda p: tail - _at_most(logs, trials, p))
    return low, high


def zero_bound(trials: int, level: float = LEVEL) -> float:
    """The rate below which, with confidence `level`, it lies when none of `trials` showed it; about 3 / trials.

    Raises BadInputError for no trials.
    """
    _check(0, trials)
    return float(1 - (1 - level) ** (1 / trials))


def fisher(first: int, of_first: int, second: int, of_second: int) -> float:
    """Two-sided p-value of Fisher's exact test that two rates are the same.

    The sum over all tables with the same margins that are at most as probable as the one seen.
    Raises BadInputError for counts that are no counts.
    """
    _check(first, of_first)
    _check(second, of_second)
    events, trials = first + second, of_first + of_second
    whole = _log_choose(trials, events)

    def weight(k: int) -> float:
        return math.exp(_log_choose(of_first, k) + _log_choose(of_second, events - k) - whole)

    seen = weight(first)
    tables = range(max(0, events - of_second), min(of_first, events) + 1)
    return min(1.0, math.fsum(w for k in tables if (w := weight(k)) <= seen * (1 + 1e-7)))


def _check(events: int, trials: int) -> None:
    if not (0 <= events <= trials and trials > 0):
        raise BadInputError(f"{events} events in {trials} trials: give counts, with at least one trial")


def holm(values: Sequence[float]) -> list[float]:
    """P-values of several tests, adjusted so that one of them is below a level by chance only that often (Holm, 1979).

    The order is kept.
    """
    adjusted, least = list(values), 0.0
    for rank, at in enumerate(sorted(range(len(values)), key=lambda at: values[at])):
        least = max(least, min(1.0, (len(values) - rank) * values[at]))
        adjusted[at] = least
    return adjusted


def _at_most(log_choose: Sequence[float], trials: int, rate: float) -> float:
    """P(X < len(log_choose)) of a binomial; `log_choose` holds the logarithms of its coefficients from 0 up."""
    if rate <= 0 or rate >= 1:
        return float(rate <= 0 or len(log_choose) > trials)
    logs = math.log(rate), math.log1p(-rate)
    return min(
        1.0, math.fsum(math.exp(c + k * logs[0] + (trials - k) * logs[1]) for k, c in enumerate(log_choose))
    )


def _log_choose(n: int, k: int) -> float:
    return math.lgamma(n + 1) - math.lgamma(k + 1) - math.lgamma(n - k + 1)


def _root(rising: Callable[[float], float]) -> float:
    """Where a rising function of a rate passes zero."""
    low, high = 0.0, 1.0
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        low, high = (middle, high) if rising(middle) < 0 else (low, middle)
    return (low + high) / 2
