import pytest
import torch

from specmortem.errors import BadInputError
from specmortem.kernels import recovered_token

pytestmark = pytest.mark.usefixtures("interpreted")


@pytest.mark.parametrize("arm", ["before", "after"])
@pytest.mark.parametrize("vocab", [64, 100, 300])
def test_both_arms_agree_with_the_reference_on_finite_scores(arm, vocab):
    scores = torch.rand(3, vocab, generator=torch.Generator().manual_seed(vocab))
    out = torch.full((3,), -77, dtype=torch.int32)
    recovered_token.launch(arm, scores, out, block=64)
    assert out.tolist() == recovered_token.reference(scores).tolist()


def test_before_prefers_padding_to_negative_scores_and_after_does_not():
    scores, out = torch.full((1, 100), -1.0), torch.zeros(1, dtype=torch.int32)
    recovered_token.launch("before", scores, out, block=64)
    assert int(out) >= 100
    recovered_token.launch("after", scores, out, block=64)
    assert int(out) < 100


def test_shapes_that_do_not_fit_are_refused():
    with pytest.raises(BadInputError):
        recovered_token.launch("after", torch.zeros(2, 8), torch.zeros(3))
