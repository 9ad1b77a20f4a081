"""Exact statistics against published and counted values."""

from __future__ import annotations

from fractions import Fraction
from math import comb

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specmortem import statistics as exact
from specmortem.errors import BadInputError

# R's binom.test, to six digits.
KNOWN = [
    (0, 10, 0.0, 0.308498),
    (1, 10, 0.00252858, 0.445016),
    (5, 10, 0.187086, 0.812914),
    (10, 10, 0.691503, 1.0),
]
TRIALS = st.integers(1, 25)
COUNTS = TRIALS.flatmap(lambda n: st.tuples(st.integers(0, n), st.just(n)))


@pytest.mark.parametrize(("events", "trials", "low", "high"), KNOWN)
def test_intervals_are_the_published_ones(events, trials, low, high):
    assert exact.clopper_pearson(events, trials) == pytest.approx((low, high), rel=1e-5, abs=1e-9)


@given(COUNTS)
def test_the_ends_of_an_interval_leave_half_of_the_rest_in_each_tail(count):
    events, trials = count
    low, high = exact.clopper_pearson(events, trials)

    def tail(rate, ks):
        return sum(comb(trials, k) * rate**k * (1 - rate) ** (trials - k) for k in ks)

    assert low <= events / trials <= high
    if events > 0:
        assert tail(low, range(events, trials + 1)) == pytest.approx(0.025, rel=1e-6)
    if events < trials:
        assert tail(high, range(events + 1)) == pytest.approx(0.025, rel=1e-6)


@given(st.integers(1, 10_000))
def test_the_bound_of_a_zero_count_is_the_rate_that_shows_none_once_in_twenty(trials):
    bound = exact.zero_bound(trials)
    assert (1 - bound) ** trials == pytest.approx(0.05, rel=1e-6)
    assert bound <= 3 / trials


def test_there_is_one_bound_of_a_zero_count():
    from specmortem import study

    assert study.upper_bound(77, 0) == pytest.approx(exact.zero_bound(77), abs=1e-8)
    assert study.upper_bound(77, 1) is None


def test_holm_is_the_published_one():
    # R's p.adjust(c(0.01, 0.04, 0.03, 0.005), "holm")
    assert exact.holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert exact.holm([]) == []


@given(st.lists(st.floats(0, 1), min_size=1, max_size=8))
def test_holm_never_lowers_a_p_and_keeps_their_order(values):
    adjusted = exact.holm(values)
    assert all(p <= q <= 1 for p, q in zip(values, adjusted, strict=True))
    assert min(adjusted) == pytest.approx(min(1.0, len(values) * min(values)))
    pairs = sorted(zip(values, adjusted, strict=True))
    assert [q for _, q in pairs] == sorted(adjusted)


@pytest.mark.parametrize(
    ("counts", "p"),
    [
        ((3, 4, 1, 4), 0.485714),  # Fisher's tea
        ((8, 10, 1, 10), 0.00547749),
        ((5, 5, 0, 5), 0.00793651),
        ((0, 5, 0, 5), 1.0),
    ],
)
def test_fisher_is_the_published_one(counts, p):
    assert exact.fisher(*counts) == pytest.approx(p, rel=1e-5)


@given(COUNTS, COUNTS)
def test_fisher_is_the_sum_over_tables_at_most_as_probable(left, right):
    (a, n), (b, m) = left, right
    weights = [
        Fraction(comb(n, k) * comb(m, a + b - k), comb(n + m, a + b))
        for k in range(max(0, a + b - m), min(n, a + b) + 1)
    ]
    seen = Fraction(comb(n, a) * comb(m, b), comb(n + m, a + b))
    assert exact.fisher(a, n, b, m) == pytest.approx(float(sum(w for w in weights if w <= seen)), rel=1e-6)
    assert exact.fisher(a, n, b, m) == pytest.approx(exact.fisher(b, m, a, n), rel=1e-9)


def test_large_counts_do_not_overflow():
    low, high = exact.clopper_pearson(1200, 4000)
    assert 0.285 < low < 0.3 < high < 0.315
    assert exact.fisher(3, 4000, 30, 4000) < 1e-5


@pytest.mark.parametrize("counts", [(1, 0), (-1, 3), (4, 3)])
def test_counts_that_are_none_are_refused(counts):
    with pytest.raises(BadInputError, match="give counts, with at least one trial"):
        exact.clopper_pearson(*counts)
    with pytest.raises(BadInputError):
        exact.fisher(*counts, 1, 2)
