import pytest
import torch

from specmortem import device
from specmortem.errors import BadInputError
from specmortem.incidents.dflash_oob import arms as dflash_oob
from specmortem.incidents.dflash_oob import proposer as dflash

pytestmark = pytest.mark.usefixtures("interpreted")


@pytest.mark.parametrize(
    ("k", "aligned", "count", "first"),
    [
        (3, True, 79, (3, (12, 16))),
        (7, True, 16, (33, (264, 272))),
        (8, True, 12, (30, (270, 279))),
        (16, False, 28, (1, (17, 24))),
    ],
)
def test_padded_batches_by_number_of_drafts(k, aligned, count, first):
    found = dflash.padded_batches(256, k, aligned=aligned)
    assert len(found) == count and next(iter(found.items())) == first


@pytest.mark.parametrize("aligned", [True, False])
def test_fifteen_drafts_never_pad(aligned):
    assert dflash.padded_batches(64, 15, aligned=aligned) == {}


def test_sizes_of_the_reported_server():
    sizes = dflash.capture_sizes(64, 15)
    assert sizes[-1] == 512 and dflash.padded_size(512, sizes) == 512
    assert dflash.padded_size(7 * 16, sizes) == 112 and dflash.padded_size(33 * 16, sizes) is None


def test_capture_beyond_the_buffers_is_refused():
    proposer = dflash.DFlashProposer(device.open("sim"), dflash.DFlashConfig(2, 3), "after")
    with pytest.raises(BadInputError, match="exceeds the 8 query rows"):
        proposer.capture([16], device.open("sim").stream("main"))


@pytest.mark.parametrize("control", ["graphs", "eager", "launch-blocking"])
@pytest.mark.parametrize("arm", ["before", "after"])
def test_a_good_step_writes_the_requests_own_blocks_in_every_mode(control, arm):
    drafting = dflash_oob._Drafting(dflash_oob._open("sim", control), arm, control, 3)
    snapshot = drafting.proposer.kv.clone()
    drafting.step(drafting.batch(3))
    assert drafting.foreign(snapshot, 3) == []
    changed = (snapshot != drafting.proposer.kv).any(dim=1).reshape(-1, 4).any(dim=1)
    assert changed.nonzero().flatten().tolist() == [
        b for r in range(3) for b in (r * 16 + 3, r * 16 + 4, r * 16 + 5)
    ]


def test_graph_and_eager_steps_give_equal_outputs():
    outs = []
    for control in ("graphs", "eager"):
        drafting = dflash_oob._Drafting(dflash_oob._open("sim", control), "after", control, 3)
        drafting.step(drafting.batch(2))
        outs.append((drafting.proposer.out[:8].clone(), drafting.proposer.kv.clone()))
    assert torch.equal(outs[0][0], outs[1][0]) and torch.equal(outs[0][1], outs[1][1])


def test_after_needs_no_fill_from_the_host():
    drafting = dflash_oob._Drafting(dflash_oob._open("sim", "graphs"), "after", "graphs", 3, fill_tail=False)
    drafting.step(drafting.batch(4))
    drafting.blocks()[1 + 16 * 3 :] = 7.0
    snapshot = drafting.proposer.kv.clone()
    drafting.step(drafting.batch(3, start=30))
    assert drafting.foreign(snapshot, 3) == []
