import pytest
import torch

from specmortem.detect import bounds
from specmortem.errors import BadInputError
from specmortem.incidents.dflash_oob import draft_attention

pytestmark = pytest.mark.usefixtures("interpreted")


def reference(kv, block_table, seq_lens, block_size, num_query_per_req):
    """Mean of the rows of each request's sequence, float32 [R * Q, 8]; zeros for an empty sequence."""
    out = torch.zeros(seq_lens.shape[0] * num_query_per_req, draft_attention.HEAD_DIM)
    for r, length in enumerate(seq_lens.tolist()):
        position = torch.arange(length)
        blocks = block_table[r, position // block_size].long()
        rows = kv[blocks * block_size + position % block_size] * (blocks != 0)[:, None]
        if length:
            out[r * num_query_per_req : (r + 1) * num_query_per_req] = rows.sum(dim=0) / length
    return out


def test_attention_equals_the_reference_and_pads_with_zeros():
    kv = torch.rand(40, 8, generator=torch.Generator().manual_seed(0))
    table = torch.tensor([[1, 2, 0], [3, 0, 4]], dtype=torch.int32)
    lengths = torch.tensor([7, 12], dtype=torch.int32)
    out = torch.full((6, 8), float("nan"))
    with bounds.watch() as watch:
        draft_attention.attend(kv, table, lengths, out, 4, 2, 2)
    assert watch.reports == []
    torch.testing.assert_close(out[:4], reference(kv, table, lengths, 4, 2))
    assert (out[4:] == 0).all()


def test_a_negative_slot_writes_nothing():
    kv = torch.zeros(8, 8)
    i32 = torch.tensor([5, 6], dtype=torch.int32)
    draft_attention.write(kv, torch.tensor([-1, 3]), i32, torch.tensor([0, 9]))
    assert kv.abs().sum(dim=1).nonzero().flatten().tolist() == [3]


def test_a_wild_slot_is_reported():
    one = torch.tensor([1])
    with bounds.watch() as watch:
        draft_attention.write(torch.zeros(8, 8), torch.tensor([268435456]), one.int(), one)
    assert watch.reports[0].op == "store" and not watch.reports[0].mapped


def test_shapes_that_do_not_fit_are_refused():
    one = torch.tensor([1])
    with pytest.raises(BadInputError):
        draft_attention.write(torch.zeros(8, 4), one, one, one)
    with pytest.raises(BadInputError):
        draft_attention.attend(torch.zeros(8, 8), one[None], one, torch.zeros(2, 8), 4, 2, 1)
