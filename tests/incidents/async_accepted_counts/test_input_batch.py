import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specmortem import device
from specmortem.errors import BadInputError
from specmortem.incidents.async_accepted_counts.engine.input_batch import NEW, InputBatch, NewRequest

ROWS, TOKENS, BLOCKS = 5, 6, 3


def batch(lanes=1):
    return InputBatch(device.open("sim"), ROWS, TOKENS, BLOCKS, lanes)


def request(name):
    return NewRequest(name, tuple(range(name % TOKENS)), name % 7, tuple(range(name, name + name % BLOCKS)))


def as_model(new, counts):
    blocks = (*new.blocks, *[0] * BLOCKS)[:BLOCKS]
    return (new.tokens, new.num_computed, blocks, tuple(counts))


def contents(batch):
    """Tokens, computed tokens, blocks and accepted counts of every request, whatever its row."""
    counts = batch.num_accepted[...]
    return {
        name: (
            tuple(batch.token_ids[row, : batch.num_tokens[row]].tolist()),
            int(batch.num_computed[row]),
            tuple(batch.blocks[row].tolist()),
            tuple(counts[row].tolist()),
        )
        for name, row in batch.row_of.items()
    }


operations = st.lists(
    st.one_of(
        st.just(("add",)),
        st.tuples(st.just("remove"), st.integers(0, 9)),
        st.just(("condense",)),
        st.tuples(st.just("swap"), st.integers(0, ROWS), st.integers(0, ROWS)),
        st.tuples(st.just("reorder"), st.integers(0, 7)),
        st.tuples(st.just("count"), st.integers(0, ROWS - 1), st.integers(1, 4)),
        st.just(("remember",)),
    ),
    max_size=40,
)


class Model:
    """What the batch should hold, by request, and where each request last was remembered."""

    def __init__(self):
        self.held, self.next, self.previous = {}, 1, {}

    def apply(self, batch, operation):
        kind, *values = operation
        getattr(self, kind)(batch, *values)

    def add(self, batch):
        if len(self.held) == ROWS:
            with pytest.raises(BadInputError, match="rows are taken"):
                batch.add_request(request(self.next))
            return
        holes = [row for row, name in enumerate(batch.req_ids) if name is None]
        row = batch.add_request(request(self.next))
        assert row == (holes[0] if holes else len(batch.req_ids) - 1)
        self.held[self.next] = as_model(request(self.next), [1, 1])
        self.next += 1

    def remove(self, batch, pick):
        names = sorted(self.held)
        if not names:
            assert batch.remove_request(self.next) is None
            return
        name = names[pick % len(names)]
        assert batch.remove_request(name) is not None
        del self.held[name]
        self.previous.pop(name, None)

    def condense(self, batch):
        moves = batch.condense()
        assert all(source > target for source, target in moves)
        assert None not in batch.req_ids

    def swap(self, batch, one, other):
        live = [row < len(batch.req_ids) and batch.req_ids[row] is not None for row in (one, other)]
        if not all(live):
            with pytest.raises(BadInputError, match="both hold a request"):
                batch.swap_states(one, other)
            return
        names = batch.req_ids[one], batch.req_ids[other]
        batch.swap_states(one, other)
        assert (batch.req_ids[other], batch.req_ids[one]) == names

    def reorder(self, batch, bits):
        region = lambda name: (name & bits) % 3  # noqa: E731
        if None in batch.req_ids:
            with pytest.raises(BadInputError, match="holes"):
                batch.reorder(region)
            return
        before = list(batch.req_ids)
        swaps = batch.reorder(region)
        regions = [region(name) for name in batch.req_ids]
        assert regions == sorted(regions)
        right = [row for row, name in enumerate(before) if region(name) == regions[row]]
        assert not {row for swap in swaps for row in swap} & set(right)

    def count(self, batch, row, value):
        if row < len(batch.req_ids) and (name := batch.req_ids[row]) is not None:
            batch.num_accepted[row] = [value, value + 1]
            self.held[name] = (*self.held[name][:3], (value, value + 1))

    def remember(self, batch):
        batch.remember_rows()
        self.previous = dict(batch.row_of)


@settings(max_examples=200, deadline=None)
@given(st.integers(0, ROWS), operations)
def test_rows_move_as_a_dictionary_says(requests, moves):
    real, model = batch(lanes=2), Model()
    for operation in [("add",)] * requests + moves:
        model.apply(real, operation)
        assert contents(real) == model.held
        assert {name: row for row, name in enumerate(real.req_ids) if name is not None} == real.row_of
        rows = [name for name in real.req_ids if name is not None]
        assert real.previous_rows() == [model.previous.get(name, NEW) for name in rows]


def test_rows_of_the_worked_example():
    real = batch()
    for name in (1, 2, 3, 4):
        real.add_request(request(name))
    real.remember_rows()
    real.remove_request(1)
    assert real.add_request(request(5)) == 0
    assert real.condense() == []
    assert real.reorder(lambda name: 3 if name == 5 else 0) == [(3, 0)]
    assert real.req_ids == [4, 2, 3, 5]
    assert real.previous_rows() == [3, 1, 2, NEW]


def test_a_swap_reads_the_second_row_first_and_writes_the_first_row_first():
    real = batch()
    for name in (1, 2, 3):
        real.add_request(request(name))
    size, seen = real.num_accepted.backing[0].nbytes, []

    class Noted(device.Observer):
        def host_accessed(self, buffer, region, write, site):
            row = (region.start - buffer.region.start) // size
            seen.append(("write" if write else "read", row))

    real.num_accepted.device.observers.append(Noted())
    real.swap_states(2, 0)
    assert seen == [("read", 0), ("read", 2), ("write", 2), ("write", 0)]


def test_a_cycle_of_rows_is_swapped_through_the_row_whose_request_comes_first():
    real = batch()
    for name in (1, 2, 3, 4):
        real.add_request(request(name))
    assert real.reorder({1: 1, 2: 2, 3: 2, 4: 0}.__getitem__) == [(3, 0), (3, 1)]
    assert real.req_ids == [4, 1, 3, 2]


def test_condense_moves_the_last_rows_down_and_leaves_their_content():
    real = batch()
    for name in (1, 2, 3, 4, 5):
        real.add_request(request(name))
    real.num_accepted[...] = [[1], [2], [3], [4], [5]]
    for name in (1, 3):
        real.remove_request(name)
    assert real.condense() == [(4, 0), (3, 2)]
    assert real.req_ids == [5, 2, 4]
    assert real.num_accepted[...].ravel().tolist() == [5, 2, 4, 4, 5]


def test_removing_writes_no_array():
    real = batch()
    real.add_request(request(3))
    before = real.num_accepted[...].tolist()
    steps = [record.what for record in real.num_accepted.device.trace]
    real.remove_request(3)
    assert [record.what for record in real.num_accepted.device.trace][len(steps) :] == []
    assert real.num_accepted[...].tolist() == before


def test_requests_that_do_not_fit_are_refused():
    with pytest.raises(BadInputError, match="max_num_reqs is 0"):
        InputBatch(device.open("sim"), 0)
    with pytest.raises(BadInputError, match="a row holds"):
        batch().add_request(NewRequest(1, tokens=tuple(range(TOKENS + 1))))
    real = batch()
    real.add_request(request(1))
    with pytest.raises(BadInputError, match="already"):
        real.add_request(request(1))
