from dataclasses import replace

import numpy as np
import pytest
import torch
from incidents.mtp_draft_loop.attention_reference import reference

from specmortem import device
from specmortem.errors import BadInputError
from specmortem.incidents.mtp_draft_loop.controls import ARMS, FIXED, arm_of
from specmortem.incidents.mtp_draft_loop.kernels import Geometry
from specmortem.incidents.mtp_draft_loop.proposer import DraftCase, MtpProposer

pytestmark = pytest.mark.usefixtures("interpreted")
GEOMETRY = Geometry(num_sms=5, num_qo_heads=1, num_kv_heads=1, head_dim=8)
LENS = [206, 290]
CASE = DraftCase(arm_of("before"), tuple(LENS), 3, GEOMETRY, max_model_len=320, load_tokens=256)


def proposed(arm="before", case=CASE, schedule="immediate", lens=LENS, known=False):
    dev = device.open("sim", schedule=schedule)
    chosen = arm_of(arm)
    geometry = replace(case.geometry, constant=chosen.constant)
    proposer = MtpProposer(dev, replace(case, arm=chosen, geometry=geometry, lens=tuple(lens)))
    tokens = dev.tensor([3, 5], torch.int64)
    lengths = dev.tensor(lens, torch.int32)
    proposer.propose(tokens, lengths, np.array(lens, dtype=np.int32) if known else None)
    calls = [(record.what, record.name) for record in dev.trace if record.by == "host"]
    dev.synchronize()
    return proposer, calls


def test_every_pass_plans_for_one_more_token_and_moves_the_lengths_on_the_device():
    proposer, _ = proposed()
    b = proposer.buffers
    assert b.seq_lens.tolist() == [n + 2 for n in LENS] and b.positions.tolist() == [n + 1 for n in LENS]
    assert {i: p.page_counts for i, p in proposer.plans.items()} == {1: (13, 19), 2: (13, 19)}


def test_the_last_pass_attends_over_all_keys_with_the_drafted_ones_in_place():
    proposer, _ = proposed()
    b = proposer.buffers
    expected = reference(b.q, b.kv, b.block_table, b.seq_lens, 16)
    torch.testing.assert_close(b.attention[2], expected.view(2, -1))
    assert b.draft_token_ids[2].tolist() == (b.attention[2] @ b.head).argmax(dim=1).tolist()
    assert b.input_ids.tolist() == b.draft_token_ids[1].tolist()


def test_plan_then_buffer_writes_then_synchronize_then_model():
    _, calls = proposed("stream-sync")
    names = [name or what for what, name in calls]
    start = names.index("row pointers")
    assert names[start : start + 11] == [
        "row pointers",
        "row pointers copy",
        "gather pages",
        "last pages",
        "last pages copy",
        "plan",
        "plan copy",
        "write input_ids",
        "write hidden_states",
        "synchronize",
        "model",
    ]


@pytest.mark.parametrize(("arm", "gathered"), [("before", True), ("no-page-kernel", False)])
def test_a_build_gathers_the_page_ids_of_the_lengths_that_it_plans_for(arm, gathered):
    proposer, calls = proposed(arm)
    b = proposer.buffers
    assert ([name for _, name in calls].count("gather pages") == 2) == gathered
    expected = [*b.block_table[0, :13].tolist(), *b.block_table[1, :19].tolist()]
    assert (b.page_indices[:32].tolist() == expected) == gathered
    assert (b.row_pointers.tolist(), b.last_pages.tolist()) == (
        ([0, 13, 32], [16, 4]) if gathered else ([0, 0, 0], [0, 0])
    )


def blocking(calls):
    return sum(name == "seq_lens to host" for _, name in calls)


@pytest.mark.parametrize(
    ("arm", "known", "reads"), [("before", False, 1), ("before", True, 0), ("reread-lengths", True, 2)]
)
def test_how_often_the_lengths_are_read_back(arm, known, reads):
    assert blocking(proposed(arm, known=known)[1]) == reads


@pytest.mark.parametrize("arm", [*FIXED, "stream-sync", "launch-blocking", "wrong-stream-sync"])
def test_arms_agree_when_nothing_races(arm):
    one, two = proposed("before")[0].buffers, proposed(arm)[0].buffers
    assert torch.equal(one.draft_token_ids, two.draft_token_ids) and torch.equal(one.attention, two.attention)


def test_graphs_give_the_same_drafts():
    one, two = proposed()[0].buffers, proposed(case=replace(CASE, graphs=True))[0].buffers
    assert torch.equal(one.draft_token_ids, two.draft_token_ids) and torch.equal(one.attention, two.attention)


def test_at_the_models_length_a_request_falls_back_to_position_zero_and_the_null_block():
    proposer, _ = proposed(case=replace(CASE, max_model_len=291))
    b = proposer.buffers
    assert b.seq_lens.tolist() == [208, 1] and b.positions.tolist() == [207, 0]
    proposer, _ = proposed(case=replace(CASE, max_model_len=290, num_speculative_tokens=2))
    assert proposer.buffers.seq_lens.tolist() == [207, 1] and proposer.buffers.slot_mapping.tolist()[1] == 0


def test_one_token_needs_no_plan_and_a_full_batch_runs():
    assert proposed(case=replace(CASE, num_speculative_tokens=1))[0].plans == {}
    dev = device.open("sim", schedule="immediate")
    lens = tuple(1 + n % 20 for n in range(64))
    case = DraftCase(
        arm_of("before"), lens, 2, GEOMETRY, max_model_len=32, load_tokens=256, float_workspace=1 << 17
    )
    proposer = MtpProposer(dev, case)
    proposer.propose(dev.tensor(list(range(64)), torch.int64), dev.tensor(lens, torch.int32))
    dev.synchronize()
    b = proposer.buffers
    expected = reference(b.q, b.kv, b.block_table, b.seq_lens, 16)
    torch.testing.assert_close(b.attention[1], expected.view(64, -1))


def test_constant_plans_have_equal_offsets():
    plans = proposed("constant-plan", lens=[206, 255])[0].plans
    assert plans[1].offsets == plans[2].offsets and plans[1].num_chunks != plans[2].num_chunks


@pytest.mark.parametrize(
    "call",
    [
        lambda: arm_of("after"),
        lambda: replace(CASE, lens=(1,) * 65),
        lambda: replace(CASE, lens=()),
        lambda: replace(CASE, num_speculative_tokens=7),
        lambda: replace(CASE, arm=ARMS["constant-plan"]),
    ],
)
def test_what_is_outside_the_study_is_refused(call):
    with pytest.raises(BadInputError):
        call()
