"""Align copies: kernels against the reference, every guard by its mutant, the detector, and the order of a shift."""

from dataclasses import dataclass, replace

import mutate
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from specmortem.detect import bounds
from specmortem.errors import BadInputError
from specmortem.incidents.pp_align_copy import fix
from specmortem.incidents.pp_align_copy import kernels as align_copy
from specmortem.incidents.pp_align_copy.kernels import (
    AFTER,
    BEFORE,
    AlignCounters,
    AlignStates,
    Guards,
    RecurrentState,
    Tuning,
)
from specmortem.incidents.pp_align_copy.shift_orders import shift_orders

pytestmark = pytest.mark.usefixtures("interpreted")
BLOCK_SIZE, COLUMNS, WIDTH = 8, 5, 5
SMALL = Tuning(block=16)
TILED = Tuning(tiles=3, block=16)


@dataclass
class Case:
    """Requests in slots over a pool in which every block is random; slot s owns 1 + 5s … 5 + 5s."""

    slots: int = 3
    inner: int = 8
    dtype: torch.dtype = torch.float32
    null: tuple[int, int] | None = None
    padded: bool = False

    def __post_init__(self):
        table = torch.arange(1, 1 + self.slots * COLUMNS, dtype=torch.int32).reshape(self.slots, COLUMNS)
        if self.null:
            table[self.null] = 0
        self.tables = [table, table.flip(0).contiguous()]
        blocks = 1 + self.slots * COLUMNS
        shapes = [((WIDTH, self.inner), 0, WIDTH), ((2, self.inner), 0, 0), ((3, self.inner), 1, 0)]
        generator = torch.Generator().manual_seed(0)
        self.parts = []
        for shape, group, width in shapes:
            wide = (shape[0] + self.padded, *shape[1:])
            pool = torch.rand(blocks, *wide, generator=generator).to(self.dtype)
            self.parts.append(RecurrentState(pool[:, : shape[0]], group, width))
        self.states = AlignStates(self.tables, self.parts)
        self.counters = AlignCounters.empty(self.slots)

    def fill(self, **columns):
        for name, values in columns.items():
            getattr(self.counters, name)[:] = torch.tensor(values, dtype=torch.int32)
        return self

    def content(self):
        return [s.tensor.clone() for s in self.parts], {n: t.clone() for n, t in vars(self.counters).items()}


def same(left, right):
    counters = all(torch.equal(left[1][n], right[1][n]) for n in left[1] if n != "snapshot")
    return counters and all(torch.equal(a, b) for a, b in zip(left[0], right[0], strict=True))


def after_postcopy(fill, guards=AFTER, module=align_copy, tuning=SMALL, mapping=(0,), **case):
    c = Case(**case).fill(**fill)
    kernel = module.postcopy_kernel
    align_copy.postcopy(c.states, c.counters, torch.tensor(mapping), BLOCK_SIZE, guards, tuning, kernel)
    return c.content()


def expected_postcopy(fill, mapping=(0,), **case):
    c = Case(**case).fill(**fill)
    align_copy.reference_postcopy(c.states, c.counters, torch.tensor(mapping), BLOCK_SIZE)
    return c.content()


def after_precopy(fill, guards=AFTER, module=align_copy, mapping=(0,), **case):
    c = Case(**case).fill(**fill)
    align_copy.precopy(c.states, c.counters, torch.tensor(mapping), guards, SMALL, module.precopy_kernel)
    return c.content()


def expected_precopy(fill, mapping=(0,), **case):
    c = Case(**case).fill(**fill)
    align_copy.reference_precopy(c.states, c.counters, torch.tensor(mapping))
    return c.content()


ACROSS = {"state_idx": [1, 1, 1], "num_computed": [8, 17, 9], "num_accepted": [2, 3, 1]}
INSIDE = {"state_idx": [0, 0, 0], "num_computed": [8, 8, 8], "num_accepted": [3, 3, 3]}


@st.composite
def workloads(draw):
    slots = draw(st.integers(1, 3))

    def vector(low, high):
        return draw(st.lists(st.integers(low, high), min_size=slots, max_size=slots))

    # Columns from -1 and past the row, counts before the first block: everything that `after` has to bear.
    fill = {
        "state_idx": vector(-1, COLUMNS),
        "num_computed": vector(0, 8 * (COLUMNS + 1)),
        "num_accepted": vector(1, 3),
        "src_col": vector(-1, COLUMNS),
        "src_off": vector(0, 2),
    }
    order = draw(st.permutations(range(slots)))
    mapping = [slot if draw(st.booleans()) else -1 for slot in order]
    case = {
        "slots": slots,
        "inner": draw(st.sampled_from([1, 3, 4, 8])),
        "dtype": draw(st.sampled_from([torch.float32, torch.bfloat16, torch.uint8])),
        "null": draw(st.none() | st.tuples(st.integers(0, slots - 1), st.integers(0, COLUMNS - 1))),
        "padded": draw(st.booleans()),
    }
    return fill, tuple(mapping), case


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(workloads())
def test_after_equals_the_reference(workload):
    fill, mapping, case = workload
    assert same(after_precopy(fill, mapping=mapping, **case), expected_precopy(fill, mapping, **case))
    for tuning in (SMALL, TILED):
        got = after_postcopy(fill, tuning=tuning, mapping=mapping, **case)
        assert same(got, expected_postcopy(fill, mapping, **case))


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(workloads(), st.lists(st.integers(1, 20), min_size=3, max_size=3))
def test_preprocess_equals_the_reference(workload, lengths):
    fill, mapping, case = workload
    loc = torch.tensor([0, *lengths[: len(mapping)]], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    ours, plain = Case(**case).fill(**fill), Case(**case).fill(**fill)
    align_copy.preprocess(ours.counters, torch.tensor(mapping), loc, BLOCK_SIZE)
    align_copy.reference_preprocess(plain.counters, torch.tensor(mapping), loc, BLOCK_SIZE)
    assert same(ours.content(), plain.content())


def test_worked_copy_across_a_boundary():
    c = Case().fill(**ACROSS)
    old = [s.tensor.clone() for s in c.parts]
    align_copy.postcopy(c.states, c.counters, torch.tensor([0]), BLOCK_SIZE, tuning=SMALL)
    conv, temporal, _ = (s.tensor for s in c.parts)
    assert torch.equal(conv[1], torch.cat([old[0][2][1:], old[0][1][-1:]]))
    assert torch.equal(temporal[1], old[1][3])
    assert c.counters.num_accepted[0] == 2


def test_worked_copy_inside_a_block_resets_the_accepted_count():
    c = Case().fill(**INSIDE)
    old = c.parts[0].tensor.clone()
    align_copy.postcopy(c.states, c.counters, torch.tensor([0]), BLOCK_SIZE, tuning=SMALL)
    assert torch.equal(c.parts[0].tensor[1], torch.cat([old[1][2:], old[1][-2:]]))
    assert c.counters.num_accepted.tolist() == [1, 3, 3]


@pytest.mark.parametrize("guard", ["row", "snapshot", "skip_null"])
def test_each_cause_switched_on_alone_gives_a_wrong_state(guard):
    """`ordered_shift` needs warps and `in_row` leaves the row: `shift_orders` and the detector show those."""
    cases = {
        "row": (ACROSS, {"mapping": (1, 0)}),
        "snapshot": (INSIDE, {}),
        "skip_null": (ACROSS, {"null": (0, 0)}),
    }
    fill, case = cases[guard]
    guards = replace(AFTER, **{guard: fix.batch_row if guard == "row" else False})
    assert guards in BEFORE.values()
    assert not same(after_postcopy(fill, guards, **case), expected_postcopy(fill, **case))


MUTANTS = {
    "row of postcopy": ("row = ROW(batch, req_idx)  # guard: row of postcopy", "row = batch"),
    "skip_null": ("usable = usable & (is_state | (not SKIP_NULL))  # guard: skip_null", "usable = usable"),
    "reset": ("(source == target) & (tl.program_id(1) == 0)", "(source != target) & (tl.program_id(1) == 0)"),
    "boundary": ("if aligned >= running:", "if aligned > running:"),
    "left shift": ("+ shift * unit\n", "\n"),
    "temporal column": ("from_col = tl.where(is_conv, src_col, src_col + bias)", "from_col = src_col"),
    "tail bytes": (
        "for start in range(words * 8 + tile * 2 * BLOCK, size,",
        "for start in range(size, size,",
    ),
    "body words": ("for start in range(tile * span, end, BLOCK)", "for start in range(0, 0, BLOCK)"),
    "tiles": ("range(tile * span, end, BLOCK)", "range(tile * span, tl.minimum(end, span), BLOCK)"),
    "end of a tile": ("tl.minimum((tile + 1) * span, words)", "words - span"),
    "one tile shifts": ("elif tile == 0:", "elif tile < 2:"),
}
CASES = (
    (ACROSS, {"mapping": (1, 0, 2)}),
    (ACROSS, {"mapping": (0, 1, 2), "null": (0, 0)}),
    (INSIDE, {"mapping": (2, 0)}),
    (INSIDE | {"num_accepted": [1, 1, 1], "state_idx": [1, 1, 1]}, {}),
    (ACROSS, {"mapping": (0,), "inner": 3, "dtype": torch.bfloat16}),
    (ACROSS, {"mapping": (0,), "inner": 64}),
)


@pytest.mark.parametrize("name", MUTANTS)
def test_the_cases_find_every_mutant(name, tmp_path):
    module = mutate.mutant(align_copy, dict([MUTANTS[name]]), tmp_path)
    found = [
        not same(after_postcopy(fill, module=module, tuning=TILED, **case), expected_postcopy(fill, **case))
        for fill, case in CASES
    ]
    assert any(found)
    assert all(
        same(after_postcopy(fill, tuning=TILED, **case), expected_postcopy(fill, **case))
        for fill, case in CASES
    )


def test_the_row_of_precopy_has_a_mutant_of_its_own(tmp_path):
    change = {"row = ROW(batch, req_idx)  # guard: row of precopy": "row = batch"}
    module = mutate.mutant(align_copy, change, tmp_path)
    fill = {"state_idx": [1, 2, 2], "src_col": [0, 1, 2], "src_off": [1, 2, 0]}
    expected = expected_precopy(fill, (1, 0))
    assert not same(after_precopy(fill, module=module, mapping=(1, 0)), expected)
    assert same(after_precopy(fill, mapping=(1, 0)), expected)


def watched_precopy(guards, src_col=(0, 1, -1), dst_col=(1, 2, -1), mapping=(1, 0)):
    c = Case().fill(state_idx=dst_col, src_col=src_col, src_off=[0, 1, 0])
    owners = [-1, *(slot for slot in range(3) for _ in range(COLUMNS))]
    of = bounds.mapped(mapping)
    with bounds.watch(perform_mapped=guards.row is fix.batch_row) as watch:
        for table, name in zip(c.tables, ("table0", "table1"), strict=True):
            watch.rows(table, of=of, name=name, owner_name="slot")
        for part, name in zip(c.parts, ("conv", "temporal", "other"), strict=True):
            owned = owners if part.group == 0 else [-1, *reversed([o for o in owners if o >= 0])]
            watch.blocks(part.tensor, owned, of=of, name=name, owner_name="slot")
        watch.pointers(c.states.descriptors, *c.tables, *(p.tensor for p in c.parts))
        align_copy.precopy(c.states, c.counters, torch.tensor(mapping), guards, SMALL)
    return watch.reports


def test_detector_names_the_other_requests_row_and_blocks():
    reports = watched_precopy(BEFORE["batch-row-index"])
    assert {(r.tensor, r.op) for r in reports} >= {
        ("table0", "load"),
        ("conv", "store"),
        ("temporal", "store"),
    }
    assert any(r.program[0] == 0 and r.lies.endswith("of slot 0") for r in reports if r.op == "store")


def test_detector_finds_the_column_past_the_row():
    first = watched_precopy(BEFORE["seed-column-divisor"], src_col=(8399, 1, -1), mapping=(0, 1))[0]
    assert (first.tensor, first.index, first.extent) == ("table0", 8399, "table0[0, 5) of slot 0")


@pytest.mark.parametrize("column", [1, 8399, COLUMNS, COLUMNS - 1])
def test_detector_is_silent_on_after(column):
    assert watched_precopy(AFTER, src_col=(0, column, -1)) == []


@dataclass
class TwoTables:
    persistent: torch.Tensor
    gathered: torch.Tensor


@pytest.mark.parametrize(
    ("subject", "right"),
    # `before` is right while the gathered rows are this batch's
    [("before", True), ("table-only", False), ("row-only", False), ("after", True)],
)
def test_both_halves_of_the_row_fix_are_needed(subject, right):
    """Slots are not batch rows: slots 1 and 0 are in batch rows 0 and 1."""
    mapping = torch.tensor([1, 0])
    c, plain = Case().fill(**ACROSS), Case().fill(**ACROSS)
    tables = []
    for table in c.tables:
        gathered = torch.zeros_like(table)
        gathered[:2] = table[mapping]
        tables.append(fix.SUBJECTS[subject](TwoTables(table, gathered)))
    states = AlignStates([lookup.table for lookup in tables], c.parts)
    align_copy.postcopy(states, c.counters, mapping, BLOCK_SIZE, Guards(row=tables[0].row), SMALL)
    align_copy.reference_postcopy(plain.states, plain.counters, mapping, BLOCK_SIZE)
    assert same(c.content(), plain.content()) == right


def test_a_late_lookup_finds_the_request_only_after():
    """The request in slot 3 was at row 0 of its batch; since then slot 2 was gathered into row 0."""
    tables = TwoTables(torch.arange(16).reshape(4, 4), torch.tensor([[8, 9, 10, 11], *[[0] * 4] * 3]))
    lookups = {subject: fix.lookup_of(subject, tables) for subject in fix.SUBJECTS}
    read = {subject: table[row.fn(0, 3)].tolist() for subject, (table, row) in lookups.items()}
    assert read["before"] == fix.reference(tables, 2)
    assert read["after"] == fix.reference(tables, 3)
    assert read["row-only"] == [0] * 4 and read["table-only"] == fix.reference(tables, 0)


def test_seed_column_counts_state_blocks():
    assert [align_copy.seed_column(134_400, size) for size in (4480, 16)] == [29, 8399]
    assert align_copy.seed_column(0, 4480) == -1


@pytest.mark.parametrize(("width", "bias", "token_bytes"), [(4, 1, 512), (5, 2, 192), (5, 1, 1024)])
def test_a_shift_as_one_copy_has_wrong_orders_and_token_by_token_has_none(width, bias, token_bytes):
    whole = shift_orders(width, bias, token_bytes)
    ordered = shift_orders(width, bias, token_bytes, ordered=True)
    assert 0 < whole.wrong < whole.orders and ordered.wrong == 0 < ordered.orders


def test_an_example_of_a_wrong_order_is_one():
    found = shift_orders(4, 1, 512)
    memory, registers = list(range(4)), {}
    for warp, kind, first, _ in found.example:
        if kind == "load":
            registers[warp] = memory[first // 512]
        else:
            memory[first // 512] = registers[warp]
    assert len(found.example) == 6 and memory != [1, 2, 3, 3]


@pytest.mark.parametrize(
    ("case", "orders", "wrong"),
    [
        ({"width": 3, "bias": 1, "token_bytes": 512, "warps": 2}, 6, 1),
        ({"width": 4, "bias": 1, "token_bytes": 512, "warps": 1}, 1, 0),
        ({"width": 4, "bias": 0, "token_bytes": 512}, 2520, 0),
    ],
)
def test_orders_are_counted(case, orders, wrong):
    found = shift_orders(**case)
    assert (found.orders, found.wrong) == (orders, wrong)


def test_a_shift_by_the_stride_of_all_warps_is_safe():
    assert shift_orders(4, 1, 2048).wrong == 0


def test_too_many_orders_are_refused():
    with pytest.raises(BadInputError, match="too many to enumerate"):
        shift_orders(64, 1, 4096)
    with pytest.raises(BadInputError, match="is no shift"):
        shift_orders(4, 4, 512)


def refused():
    table, pool = torch.zeros(2, 4, dtype=torch.int32), torch.zeros(3, 5, 8)
    state = RecurrentState(pool, 0, 5)
    good, batch = AlignStates([table], [state]), torch.tensor([0, 1])
    c = AlignCounters.empty(2)
    yield "contiguous blocks", lambda: RecurrentState(pool.transpose(1, 2))
    yield "conv state of width 4", lambda: RecurrentState(pool, 0, 4)
    yield "a table and a state", lambda: AlignStates([table], [])
    yield "int32", lambda: AlignStates([table.long()], [state])
    yield "one shape", lambda: AlignStates([table, table[:1]], [state])
    yield "state 0 is of group 1", lambda: AlignStates([table], [RecurrentState(pool, 1)])
    yield "num_accepted must be", lambda: AlignCounters(**{**vars(c), "num_accepted": torch.zeros(2)})
    yield "src_off has 3 slots", lambda: AlignCounters(**{**vars(c), "src_off": c.src_off.repeat(2)[:3]})
    yield "2 rows", lambda: align_copy.precopy(good, AlignCounters.empty(3), batch)
    yield "indexed by batch", lambda: align_copy.precopy(good, c, torch.arange(3), Guards(row=fix.batch_row))
    yield "empty", lambda: align_copy.precopy(good, c, batch[:0])
    yield "integer vector", lambda: align_copy.precopy(good, c, batch.float())
    yield r"query_start_loc must be \[3\]", lambda: align_copy.preprocess(c, batch, batch, 8)


@pytest.mark.parametrize(("message", "call"), list(refused()), ids=lambda x: x if isinstance(x, str) else "")
def test_bad_arguments_are_refused_by_name(message, call):
    with pytest.raises(BadInputError, match=message):
        call()
