import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from specmortem import device
from specmortem.errors import BadInputError
from specmortem.incidents.pp_align_copy.engine.block_tables import (
    BlockPool,
    BlockTables,
    RequestSlots,
    poison,
)
from specmortem.incidents.pp_align_copy.engine.scheduler import BatchRow, decodes_first
from specmortem.incidents.pp_align_copy.kernels import NULL_BLOCK


def test_first_slot_is_the_highest_and_the_last_freed_is_taken_next():
    slots = RequestSlots(4)
    assert [slots.take(name) for name in "ab"] == [3, 2]
    slots.release("a")
    assert slots.take("c") == 3 and slots.take("d") == 1


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 7)), max_size=60))
def test_slots_are_never_shared_and_tickets_expire_with_their_request(moves):
    slots, held = RequestSlots(4), {}
    tickets = []
    for take, name in moves:
        if take and name not in held and len(held) < 4:
            held[name] = slots.take(name)
            tickets.append((name, slots.ticket(name)))
        elif not take and name in held:
            assert slots.release(name) == held.pop(name)
            tickets = [(n, t) for n, t in tickets if n != name or not slots.valid(t)]
        assert len(set(held.values())) == len(held)
        assert {n for n, t in tickets if slots.valid(t)} == set(held)


def test_a_slot_too_many_and_an_unknown_request_are_refused():
    slots = RequestSlots(1)
    slots.take("a")
    for call in (lambda: slots.take("a"), lambda: slots.take("b"), lambda: slots.release("c")):
        with pytest.raises(BadInputError):
            call()


@given(
    st.integers(2, 20), st.lists(st.tuples(st.booleans(), st.integers(0, 3), st.integers(0, 6)), max_size=40)
)
def test_blocks_have_one_owner_and_none_is_lost(num_blocks, moves):
    pool, model = BlockPool(num_blocks), {}
    for take, owner, count in moves:
        if take:
            free = num_blocks - 1 - sum(len(b) for b in model.values())
            blocks = pool.take(owner, count)
            assert (blocks is None) == (count > free)
            model.setdefault(owner, []).extend(blocks or [])
        else:
            assert sorted(pool.release(owner)) == sorted(model.pop(owner, []))
        owned = [block for blocks in model.values() for block in blocks]
        assert len(set(owned)) == len(owned) and NULL_BLOCK not in owned
        assert all(list(pool.blocks_of(owner)) == blocks for owner, blocks in model.items())
        assert pool.num_free == num_blocks - 1 - len(owned)


def test_poison_fills_fresh_blocks_and_no_others():
    state = torch.zeros(4, 2)
    poison([state], [1, 3])
    assert torch.isnan(state).any(dim=1).tolist() == [False, True, False, True]


def row(name, num_tokens, decode):
    return BatchRow(name, 0, (0,) * num_tokens, decode, True)


def test_a_prefill_moves_after_decodes_that_came_later():
    rows = [row(1, 9, False), row(2, 3, True), row(3, 2, False), row(4, 3, True)]
    assert [r.req_id for r in decodes_first(rows, 2)] == [2, 4, 3, 1]


def test_gathered_rows_keep_a_stale_tail_and_padding_is_zeroed():
    tables = BlockTables(device.open("sim"), 3, 4)
    tables.append({2: [1, 2, 3], 1: [4]})
    tables.gather([2, 2, 2])
    tables.gather([1], padded=2)
    assert tables.gathered.tolist() == [[4, 2, 3, 0], [0, 0, 0, 0], [1, 2, 3, 0], [0, 0, 0, 0]]
    assert tables.persistent[2].tolist() == [1, 2, 3, 0]


def test_a_row_that_is_too_short_is_refused():
    tables = BlockTables(device.open("sim"), 1, 2)
    with pytest.raises(BadInputError, match="max_blocks"):
        tables.append({0: [1, 2, 3]})
