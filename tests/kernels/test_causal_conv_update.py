import mutate
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from specmortem.detect import bounds
from specmortem.errors import BadInputError
from specmortem.kernels import causal_conv_update as conv

pytestmark = pytest.mark.usefixtures("interpreted")
N, D, W, K = 3, 8, 4, 3
L = W - 1 + K


def inputs(tokens, seed=0):
    g = torch.Generator().manual_seed(seed)
    rand = lambda *shape: torch.rand(*shape, generator=g)  # noqa: E731
    return rand(N, tokens, D), rand(W, D), rand(N + 1, L, D)


def both(accepted, tokens=1 + K, lines=(1, 2, 3), launch=conv.launch, arm="after"):
    x, weight, pool = inputs(tokens)
    owner = torch.tensor(lines, dtype=torch.int32)
    counts = torch.tensor(accepted, dtype=torch.int32)
    mine, out = pool.clone(), torch.full_like(x, float("nan"))
    with bounds.watch() as watch:
        watch.blocks(mine, [-1, 0, 1, 2], of=bounds.program(0), name="conv_states")
        launch(arm, x, weight, mine, owner, counts, out)
    want = conv.reference(x, weight, pool, owner, counts)
    return out, want, mine, pool, watch.reports


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(st.integers(-2, K + 3), min_size=N, max_size=N),
    st.integers(1, 1 + K),
    st.sampled_from([(1, 2, 3), (1, 0, 3), (-1, 2, 3)]),
)
def test_kernel_equals_the_reference(accepted, tokens, lines):
    out, want, mine, pool, reports = both(accepted, tokens, lines)
    assert reports == []
    torch.testing.assert_close(out, want, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(mine, pool)


@pytest.mark.parametrize("accepted", [[1, 2, 4], [4, 4, 1]])
def test_before_equals_the_reference_for_counts_in_range(accepted):
    out, want, mine, pool, reports = both(accepted, arm="before")
    assert reports == []
    torch.testing.assert_close(out, want, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(mine, pool)


@pytest.mark.parametrize("accepted", [[1, 0, 1], [1, 1, 5]])
def test_before_reads_a_neighbours_line(accepted):
    assert both(accepted, arm="before")[4] != []


@pytest.mark.parametrize("accepted", [1, 2, 3, 4])
def test_the_next_window_is_the_last_accepted_tokens(accepted):
    x, weight, pool = inputs(1 + K)
    lines, ones = torch.tensor([1, 2, 3]), torch.ones(N, dtype=torch.int32)
    history = torch.cat([pool[1, : W - 1], x[0, :accepted]])
    conv.reference(x, weight, pool, lines, ones)
    following = torch.zeros(N, 1, D)
    got = conv.reference(following, weight, pool, lines, torch.full((N,), accepted))[0, 0]
    torch.testing.assert_close(got, (weight[:-1] * history[1 - W :]).sum(dim=0))


def test_a_prompt_s_line_read_at_another_count_holds_tokens_it_never_had():
    _, weight, pool = inputs(1)
    pool[1, W - 1 :] = 100.0  # what the line's previous owner left behind the window
    x = torch.zeros(1, 1, D)
    right = conv.reference(x, weight, pool.clone(), torch.tensor([1]), torch.tensor([1]))
    wrong = conv.reference(x, weight, pool.clone(), torch.tensor([1]), torch.tensor([4]))
    assert right.max() < 10 and wrong.min() > 10


@pytest.mark.parametrize(
    ("guard", "accepted"), [("(offset <= L - W + 1)", [1, 0, 1]), ("(offset >= 0)", [1, 6, 1])]
)
def test_detector_fires_when_one_side_of_the_bound_is_taken_out(guard, accepted, tmp_path):
    old = "in_line = (line > 0) & (offset >= 0) & (offset <= L - W + 1)"
    module = mutate.mutant(conv, {old: f"in_line = (line > 0) & {guard}"}, tmp_path)
    assert both(accepted)[4] == []
    assert both(accepted, launch=module.launch)[4] != []


def test_shapes_that_do_not_fit_are_refused():
    x, weight, pool = inputs(1 + K)
    rows = torch.ones(N, dtype=torch.int32)
    with pytest.raises(BadInputError, match="channels"):
        conv.launch("after", x, weight[:, :4], pool, rows, rows, torch.empty_like(x))
    with pytest.raises(BadInputError, match="a line of 5 holds 3 tokens"):
        conv.launch("after", x, weight, pool[:, :5].contiguous(), rows, rows, torch.empty_like(x))
    with pytest.raises(BadInputError, match="as many lines"):
        conv.launch("after", x, weight, pool, rows[:1], rows, torch.empty_like(x))
    with pytest.raises(BadInputError, match="contiguous"):
        conv.launch(
            "after", x, weight, pool, torch.ones(2 * N, dtype=torch.int32)[::2], rows, torch.empty_like(x)
        )
