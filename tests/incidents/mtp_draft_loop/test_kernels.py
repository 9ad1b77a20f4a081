import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from incidents.mtp_draft_loop.attention_reference import reference, reference_merge, reference_partial
from mutate import mutant
from triton.runtime.errors import InterpreterError

from specmortem.detect import bounds
from specmortem.errors import BadInputError
from specmortem.incidents.mtp_draft_loop import kernels as split_attention
from specmortem.incidents.mtp_draft_loop.kernels import Geometry, Planner, chunk_pages

pytestmark = pytest.mark.usefixtures("interpreted")
SMALL = Geometry(num_sms=5, num_qo_heads=4, num_kv_heads=2, head_dim=8, page_size=32)
lengths = st.lists(st.integers(1, 40_000), min_size=1, max_size=64)
geometries = st.builds(
    lambda sms, group, kv, page, constant: Geometry(sms, group * kv, kv, 64, page, constant),
    st.integers(8, 170),
    st.integers(1, 16),
    st.sampled_from([1, 2, 4, 8]),
    st.sampled_from([1, 16, 32, 128]),
    st.booleans(),
)


@given(geometries, lengths)
@settings(deadline=None, max_examples=150)
def test_arrays_follow_each_other_aligned_and_tell_one_story(geometry, lens):
    plan = Planner(geometry).plan(lens)
    end = 0
    for name, start in plan.offsets.items():
        assert start % (1 if name == "kv_chunk_size" else 16) == 0 and end <= start < end + 16
        end = start + plan.arrays[name].nbytes
        if name.endswith("indices"):
            end = start + 4 * plan.num_padded
    assert plan.nbytes == end
    requests, tiles, indptr = (
        plan.arrays[name] for name in ("request_indices", "kv_tile_indices", "o_indptr")
    )
    assert (indptr[requests] + tiles == np.arange(plan.num_chunks)).all()
    assert (np.diff(indptr) * plan.chunk_tokens >= np.array(lens)).all()
    if plan.split:
        assert (plan.arrays["merge_indptr"] == indptr).all()
        assert plan.arrays["block_valid_mask"].sum() == plan.num_chunks
    seen = plan.seen_in(plan.image)
    assert all((seen[name] == plan.arrays[name]).all() for name in plan.arrays)


@given(geometries, lengths)
@settings(deadline=None, max_examples=150)
def test_a_chunk_is_the_smallest_that_fits(geometry, lens):
    pages = np.array(Planner(geometry).pages(lens))
    split, chunk = chunk_pages(geometry, pages)

    def total(size):
        return int((-(-pages // size)).sum())

    assert chunk >= geometry.min_chunk_pages
    assert total(chunk) <= geometry.max_chunks or chunk >= pages.max()
    assert chunk == geometry.min_chunk_pages or total(chunk - 1) > geometry.max_chunks
    assert split == (geometry.constant or chunk < pages.max())


@given(geometries, lengths, st.integers(0, 5))
@settings(deadline=None, max_examples=50)
def test_only_a_constant_plan_keeps_its_offsets(geometry, lens, more):
    planner = Planner(geometry)
    one, two = planner.plan(lens), planner.plan([n + more for n in lens])
    if geometry.constant or (one.num_chunks, one.split) == (two.num_chunks, two.split):
        assert one.offsets == two.offsets


def batch(lens, geometry=SMALL, seed=0):
    """Random queries and a paged cache with a permuted block table."""
    generator = torch.Generator().manual_seed(seed)
    columns = -(-max(lens) // geometry.page_size)
    count = len(lens) * columns
    table = (torch.randperm(count, generator=generator) + 1).int().reshape(len(lens), columns)
    kv = torch.randn(
        (count + 1) * geometry.page_size, 2, geometry.num_kv_heads, geometry.head_dim, generator=generator
    )
    q = torch.randn(len(lens), geometry.num_qo_heads, geometry.head_dim, generator=generator)
    return q, kv, table, torch.tensor(lens, dtype=torch.int32)


def workspaces(plan, block, floats=1 << 14):
    ints = torch.zeros(4096, dtype=torch.uint8)
    ints[: plan.nbytes] = torch.from_numpy(block[: plan.nbytes])
    return ints, torch.zeros(floats)


def attend(plan, inputs, room, kernels=split_attention):
    out = torch.full_like(inputs[0], float("nan"))
    kernels.partial(plan, *inputs, *room, out, tokens=64)
    kernels.merge(plan, *room, out)
    return out


@given(st.lists(st.integers(1, 400), min_size=1, max_size=4), st.booleans(), st.integers(0, 99))
@settings(deadline=None, max_examples=15)
def test_partial_and_merge_equal_the_references(lens, constant, seed):
    geometry = Geometry(5, 4, 2, 8, 32, constant)
    plan = Planner(geometry).plan(lens)
    inputs = batch(lens, geometry, seed)
    room = workspaces(plan, plan.image)
    with bounds.watch() as watch:
        out = attend(plan, inputs, room)
    assert watch.reports == []
    torch.testing.assert_close(out, reference(*inputs, geometry.page_size))
    if plan.split:
        values, sums = reference_partial(plan, *inputs)
        rows = room[1][: values.numel()].view_as(values)
        torch.testing.assert_close(rows, values)
        merged = reference_merge(values, sums, plan.arrays["merge_indptr"].tolist())
        torch.testing.assert_close(out, merged)


def test_a_chunk_behind_the_sequence_adds_nothing():
    plan = Planner(SMALL).plan([300, 290])
    inputs = batch([300, 290])
    inputs[3][0] = 40
    out = attend(plan, inputs, workspaces(plan, plan.image))
    torch.testing.assert_close(out, reference(*inputs, 32))


def walking():
    """A plan whose merge_indptr descends, and inputs for it: the worked case in small."""
    geometry = Geometry(num_sms=5, num_qo_heads=1, num_kv_heads=1, head_dim=8)
    planner, lens = Planner(geometry), [208, 407, 492, 416]
    plan, later = planner.plan(lens), planner.plan([n + 1 for n in lens])
    block = np.zeros(4096, dtype=np.uint8)
    plan.fill(block)
    later.fill(block)
    return plan, batch(lens, geometry), workspaces(plan, block)


def test_a_descending_merge_indptr_walks_out_of_the_workspace_and_is_ended():
    plan, inputs, room = walking()
    indptr = plan.seen_in(room[0].numpy())["merge_indptr"]
    assert (np.diff(indptr) < 0).any()
    with bounds.watch(limit=1, stop=True) as watch, pytest.raises(InterpreterError) as caught:
        attend(plan, inputs, room)
    assert isinstance(caught.value.__cause__, bounds.LimitReachedError)
    report = watch.reports[0]
    assert (report.kernel, report.op, report.tensor) == ("merge_kernel", "load", "values")
    assert report.index == room[1].numel()


def test_without_unsigned_counts_the_same_plan_only_gives_wrong_numbers(tmp_path):
    signed = mutant(split_attention, {"count = (high - low) & 0xFFFFFFFF": "count = high - low"}, tmp_path)
    plan, inputs, room = walking()
    with bounds.watch() as watch:
        out = attend(plan, inputs, room, signed)
    assert watch.reports == []
    assert not torch.allclose(out, reference(*inputs, 16))


def test_a_row_of_mask_bytes_stores_out_of_the_workspace():
    plan = Planner(SMALL).plan([300, 290])
    block = plan.image.copy()
    start = plan.offsets["o_indptr"]
    block[start : start + plan.arrays["o_indptr"].nbytes] = 1
    with bounds.watch(limit=1, stop=True) as watch, pytest.raises(InterpreterError):
        attend(plan, batch([300, 290]), workspaces(plan, block))
    assert (watch.reports[0].kernel, watch.reports[0].op) == ("partial_kernel", "store")


def test_what_lies_between_the_arrays_stays():
    planner = Planner(Geometry(5, 1, 1, 8))
    plan = planner.plan([208, 407, 492, 417])
    block = np.full(plan.nbytes + 9, 7, dtype=np.uint8)
    plan.fill(block)
    used = np.zeros(len(block), dtype=bool)
    for name, at in plan.offsets.items():
        used[at : at + plan.arrays[name].nbytes] = True
        assert (block[at : at + plan.arrays[name].nbytes] == plan.arrays[name].view(np.uint8)).all()
    assert (block[~used] == 7).all()


@pytest.mark.parametrize("pages", [(2, 3), (0, 1), (2, 1100)])
def test_page_ids_are_gathered_one_request_after_the_other_and_none_behind_the_table(pages):
    columns = 1050
    table = torch.arange(1, 1 + 2 * columns, dtype=torch.int32).reshape(2, columns)
    pointers = torch.tensor([0, *np.cumsum(pages)], dtype=torch.int32)
    found = torch.full([sum(pages) + 1], -1, dtype=torch.int32)
    split_attention.gather_pages(table, pointers, found)
    padded = torch.nn.functional.pad(table, (0, 100))
    expected = torch.cat([row[:count] for row, count in zip(padded, pages, strict=True)])
    assert found.tolist() == [*expected.tolist(), -1]


@pytest.mark.parametrize(
    "call",
    [
        lambda: Geometry(5, 3, 2, 8),
        lambda: Geometry(5, 65, 1, 8),
        lambda: Geometry(0, 1, 1, 8),
        lambda: Geometry(1, 4, 4, 8),
        lambda: Planner(SMALL).plan([]),
        lambda: Planner(SMALL).plan([5, -40]),
        lambda: Planner(SMALL).plan([300]).fill(np.zeros(4, dtype=np.uint8)),
    ],
)
def test_what_cannot_be_planned_is_refused(call):
    with pytest.raises(BadInputError):
        call()


def test_shapes_and_rooms_that_do_not_fit_are_refused():
    plan = Planner(SMALL).plan([300, 290])
    q, kv, table, lens = batch([300, 290])
    room = workspaces(plan, plan.image)
    out = torch.zeros_like(q)
    for bad in (
        lambda: split_attention.partial(plan, q[:1], kv, table, lens, *room, out),
        lambda: split_attention.partial(plan, q, kv, table[:1], lens, *room, out),
        lambda: split_attention.partial(plan, q, kv[:, :1], table, lens, *room, out),
        lambda: split_attention.partial(plan, q, kv, table, lens, room[0], room[1][:64], out),
    ):
        with pytest.raises(BadInputError):
            bad()
