import mutate
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from specmortem.detect import bounds
from specmortem.errors import BadInputError
from specmortem.kernels import gated_delta_state as gd

pytestmark = pytest.mark.usefixtures("interpreted")
N, T, D, C = 3, 3, 8, 4


def inputs(seed=0):
    g = torch.Generator().manual_seed(seed)
    rand = lambda *shape: torch.rand(*shape, generator=g)  # noqa: E731
    vectors = [rand(N, T, D), rand(N, T, D) * 0.3, rand(N, T, D), -rand(N, T), rand(N, T)]
    indices = torch.arange(1, 1 + N * C, dtype=torch.int32).reshape(N, C)
    return vectors, rand(1 + N * C, D, D), indices


def run(arm, accepted, kernel=None, indices=None):
    vectors, states, own = inputs()
    indices = own if indices is None else indices
    out = torch.full((N, T, D), float("nan"))
    with bounds.watch() as watch:
        watch.rows(indices, of=bounds.program(0), name="state_indices")
        gd.launch(arm, *vectors, out, states, indices, torch.tensor(accepted, dtype=torch.int32), kernel)
    return out, states, watch.reports


def expected(accepted, indices=None):
    vectors, states, own = inputs()
    out = gd.reference(*vectors, states, own if indices is None else indices, torch.tensor(accepted))
    return out, states


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.integers(-2, C + 2), min_size=N, max_size=N))
def test_after_equals_the_reference_for_any_count(accepted):
    out, states, reports = run("after", accepted)
    want, want_states = expected(accepted)
    assert reports == []
    torch.testing.assert_close(out, want, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(states, want_states, atol=1e-5, rtol=1e-5)


def test_before_equals_the_reference_for_counts_in_range():
    out, _, reports = run("before", [1, 2, 4])
    assert reports == []
    torch.testing.assert_close(out, expected([1, 2, 4])[0], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(("accepted", "index"), [([0, 1, 1], -1), ([1, 0, 1], 3), ([1, 5, 1], 8)])
def test_before_leaves_its_row_for_counts_out_of_range(accepted, index):
    _, _, reports = run("before", accepted)
    assert reports[0].tensor == "state_indices" and reports[0].index == index


def test_null_state_gives_zeros_after_and_stale_rows_before():
    indices = inputs()[2].clone()
    indices[1] = 0
    assert torch.isnan(run("before", [1, 1, 1], indices=indices)[0][1]).all()
    assert (run("after", [1, 1, 1], indices=indices)[0][1] == 0).all()


@pytest.mark.parametrize(
    ("new", "accepted"),
    [("accepted <= C", [0, 1, 1]), ("accepted >= 1", [1, 1, 6]), ("(accepted >= 0)", [0, 1, 1])],
)
def test_detector_fires_when_one_side_of_the_bound_is_taken_out(new, accepted, tmp_path):
    module = mutate.mutant(gd, {"in_row = (accepted >= 1) & (accepted <= C)": f"in_row = {new}"}, tmp_path)
    assert run("after", accepted)[2] == []
    assert run("after", accepted, module.gated_delta_after)[2] != []


def test_shapes_that_do_not_fit_are_refused():
    vectors, states, indices = inputs()
    with pytest.raises(BadInputError, match="rows and columns"):
        gd.launch("after", *vectors, torch.zeros(N, T, D), states, indices[:, :2], torch.ones(N))
    with pytest.raises(BadInputError, match="states must be"):
        gd.launch("after", *vectors, torch.zeros(N, T, D), states[:, :4], indices, torch.ones(N))


@pytest.mark.parametrize("values", [4, 64])
def test_values_may_be_more_or_fewer_than_keys(values):
    (query, key, _, gate, beta), _, indices = inputs()
    g = torch.Generator().manual_seed(1)
    value, states = torch.rand(N, T, values, generator=g), torch.rand(1 + N * C, values, D, generator=g)
    want_states, counts = states.clone(), torch.tensor([1, 4, 2], dtype=torch.int32)
    want = gd.reference(query, key, value, gate, beta, want_states, indices, counts)
    out = torch.full((N, T, values), float("nan"))
    gd.launch("after", query, key, value, gate, beta, out, states, indices, counts)
    torch.testing.assert_close(out, want, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(states, want_states, atol=1e-5, rtol=1e-5)
