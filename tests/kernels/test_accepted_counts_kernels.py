import mutate
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from specmortem.detect import bounds
from specmortem.errors import BadInputError
from specmortem.kernels import accepted_counts as ac

pytestmark = pytest.mark.usefixtures("interpreted")
M, K = 6, 3
relaxed = settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


def i32(values):
    return torch.tensor(values, dtype=torch.int32)


@relaxed
@given(st.lists(st.lists(st.integers(-1, 12), min_size=1 + K, max_size=1 + K), min_size=1, max_size=M))
def test_count_equals_the_reference(ids):
    outs = [torch.full((len(ids),), -7, dtype=torch.int32) for _ in range(4)]
    ac.count_reference(i32(ids), 10, *outs[:2])
    ac.count_launch(i32(ids), 10, *outs[2:])
    assert torch.equal(outs[0], outs[2]) and torch.equal(outs[1], outs[3])


def test_counts_differ_where_an_id_is_outside_the_vocabulary():
    accepted, valid = torch.zeros(3, dtype=torch.int32), torch.zeros(3, dtype=torch.int32)
    ac.count_launch(i32([[7, 8, -1, -1], [10, -1, -1, -1], [1, 2, 3, 4]]), 10, accepted, valid)
    assert accepted.tolist() == [2, 1, 4] and valid.tolist() == [2, 0, 4]


@st.composite
def corrections(draw):
    lanes, rows = draw(st.integers(1, 5)), draw(st.integers(1, M))
    matrix = lambda n: i32([[draw(st.integers(0, 50)) for _ in range(lanes)] for _ in range(n)])  # noqa: E731
    vector = lambda n, low, high: i32([draw(st.integers(low, high)) for _ in range(n)])  # noqa: E731
    tensors = matrix(rows), matrix(M), matrix(rows), matrix(M)
    return (*tensors, vector(M, 0, K), vector(rows, -1, M - 1), vector(rows, 0, 99))


def corrected(run, tensors):
    mine = [tensor.clone() for tensor in tensors]
    run(*mine)
    return mine


@relaxed
@given(corrections())
def test_correction_equals_the_reference_and_stays_in_its_rows(tensors):
    with bounds.watch() as watch:
        got = corrected(ac.correct_launch, tensors)
    want = corrected(ac.correct_reference, tensors)
    assert watch.reports == []
    assert all(torch.equal(one, other) for one, other in zip(got, want, strict=True))


def correction(run):
    """Worked by hand: P without drafts, two rows with drafts, one new row."""
    accepted, out = i32([[4], [2], [9], [1]]), torch.zeros(4, 1, dtype=torch.int32)
    computed, valid = i32([[10], [20], [30], [40]]), i32([[4], [2], [3], [1]])
    run(accepted, computed, out, valid, i32([3, 3, 3, 0]), i32([3, 1, 2, -1]), i32([41, 99, 99, 0]))
    return accepted.ravel().tolist(), out.ravel().tolist()


@pytest.mark.parametrize("run", [ac.correct_reference, ac.correct_launch])
def test_only_rows_that_had_drafts_are_corrected(run):
    assert correction(run) == ([4, 2, 3, 1], [41, 22, 33, 0])


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("corrected = inside & known & (drafts > 0)", "corrected = inside & known"),
        ("drafted + source, mask=known, other=0", "drafted + row"),
        ("valid + source * L", "valid + row * L"),
        ("computed + source * L", "computed + row * L"),
    ],
)
def test_a_mutant_differs_from_the_reference(old, new, tmp_path):
    module = mutate.mutant(ac, {old: new}, tmp_path)
    assert any(
        not torch.equal(one, other)
        for seed in range(8)
        for tensors in [random_correction(seed)]
        for one, other in zip(
            corrected(module.correct_launch, tensors), corrected(ac.correct_reference, tensors), strict=True
        )
    )


def random_correction(seed):
    g = torch.Generator().manual_seed(seed)
    r = lambda low, high, *shape: torch.randint(low, high, shape, generator=g, dtype=torch.int32)  # noqa: E731
    return r(1, 5, 4, 2), r(0, 90, M, 2), r(0, 9, 4, 2), r(1, 5, M, 2), r(0, 2, M), r(-1, M, 4), r(0, 90, 4)


def test_shapes_that_do_not_fit_are_refused():
    tensors = list(random_correction(0))
    with pytest.raises(BadInputError, match="as many rows as drafted"):
        ac.correct_launch(*tensors[:4], i32([1, 1]), *tensors[5:])
    with pytest.raises(BadInputError, match="as many of previous"):
        ac.correct_launch(*tensors[:5], i32([1]), tensors[6])
    with pytest.raises(BadInputError, match="memory of their own"):
        ac.correct_launch(tensors[0], tensors[1], tensors[1][:4], *tensors[3:])
    with pytest.raises(BadInputError, match="both counts"):
        ac.count_launch(i32([[1, 2]]), 5, i32([0, 0]), i32([0]))
    with pytest.raises(BadInputError, match="valid must be contiguous int32"):
        ac.count_launch(i32([[1, 2]]), 5, i32([0]), torch.zeros(1))
