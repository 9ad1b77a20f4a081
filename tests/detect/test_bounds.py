from pathlib import Path

import numpy as np
import pytest
import torch
import triton
import triton.language as tl

from specmortem.detect import bounds
from specmortem.errors import BadInputError, UnavailableError

pytestmark = pytest.mark.usefixtures("interpreted")


@triton.jit
def copy_shifted(source, target, shift, n, BLOCK: tl.constexpr):
    lane = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(target + lane, tl.load(source + lane + shift, mask=lane < n, other=-5), mask=lane < n)


@triton.jit
def copy_row(table, target, row_stride, columns, BLOCK: tl.constexpr):
    row, lane = tl.program_id(0), tl.arange(0, BLOCK)
    value = tl.load(table + row * row_stride + lane, mask=lane < columns, other=0)
    tl.store(target + row * BLOCK + lane, value, mask=lane < columns)


@triton.jit
def follow(addresses, out, offset):
    program = tl.program_id(0)
    address = tl.load(addresses + program) + offset * 4
    tl.store(out + program, tl.load(address.to(tl.pointer_type(tl.int32))))


@triton.jit
def count(counter, lane):
    tl.atomic_add(counter + lane, 1)


@triton.jit
def exchange(counter, lane):
    tl.atomic_cas(counter + lane, 0, 7)


@triton.jit
def load_through_helper(source, out):
    tl.store(out, _helper(source, 4))


@triton.jit
def _helper(source, at):
    return tl.load(source + at)


@triton.jit
def block_pointer_copy(source, target, size, BLOCK: tl.constexpr):
    read = tl.make_block_ptr(source, (size,), (1,), (0,), (BLOCK,), (0,))
    write = tl.make_block_ptr(target, (size,), (1,), (0,), (BLOCK,), (0,))
    tl.store(write, tl.load(read, boundary_check=(0,)), boundary_check=(0,))


def arange(*shape):
    return torch.arange(int(np.prod(shape)), dtype=torch.int32).reshape(shape)


def copied(source, shift, target=None, declare=None, **options):
    """The watch of a kernel that copies 8 elements from `shift` on."""
    target = torch.zeros(8, dtype=torch.int32) if target is None else target
    with bounds.watch(**options) as watch:
        if declare is not None:
            declare(watch)
        copy_shifted[(1,)](source, target, shift, 8, BLOCK=8)
    return watch


def copied_rows(columns, table=None, **rows):
    """Reports of a kernel whose program r copies that many columns of row r, with `rows` declared."""
    table = arange(3, 4) if table is None else table
    with bounds.watch() as watch:
        if rows:
            watch.rows(table, name="block_table", **rows)
        copy_row[(3,)](table, torch.zeros(3, 8, dtype=torch.int32), table.stride(0), columns, BLOCK=8)
    return watch.reports


def test_access_inside_is_silent_and_performed():
    source, target = arange(8), torch.zeros(8, dtype=torch.int32)
    watch = copied(source, 0, target)
    assert watch.faults == 0 and watch.launches == 1
    assert target.tolist() == source.tolist()


def test_load_past_the_end_names_tensor_index_lane_and_line():
    (report,) = copied(arange(8), 3).reports
    assert (report.kernel, report.op, report.tensor) == ("copy_shifted", "load", "source")
    assert (report.index, report.lane, report.lanes, report.program) == (8, 5, 3, (0, 0, 0))
    lines = Path(__file__).read_text(encoding="utf-8").splitlines()
    assert report.file == __file__ and "tl.load(source + lane + shift" in lines[report.line - 1]


def test_faulting_lanes_are_not_performed_and_the_others_are():
    target = torch.zeros(8, dtype=torch.int32)
    copied(arange(8), 3, target)
    assert target.tolist() == [3, 4, 5, 6, 7, -5, -5, -5]


def test_store_past_the_end_leaves_memory_alone():
    backing = torch.full((16,), 9, dtype=torch.int32)
    assert [r.op for r in copied(arange(16), 0, backing[:4]).reports] == ["store"]
    assert backing.tolist() == [0, 1, 2, 3] + [9] * 12


def test_view_of_a_larger_storage_is_the_extent_not_the_storage():
    (report,) = copied(arange(16)[4:12], 1).reports
    assert report.index == 8 and report.mapped and "same storage" in report.lies


def test_negative_index_is_reported_from_the_start_of_the_tensor():
    report = copied(arange(8), -2).reports[0]
    assert (report.index, report.lanes) == (-2, 2)


@pytest.mark.parametrize("shift", [2**40, -(2**40), 2**44, -(2**44)])
def test_offset_far_beyond_memory_keeps_its_origin(shift):
    report = copied(arange(8), shift).reports[0]
    assert report.tensor == "source" and report.index == shift
    assert not report.mapped


def test_pointer_derived_from_one_tensor_that_lands_in_another_is_a_fault():
    backing = arange(16)
    a, b = backing[:8], backing[8:]
    (report,) = copied(a, 4, declare=lambda watch: watch.tensor(b, "b")).reports
    assert report.tensor == "source" and report.lies == "b[0]"


def test_row_overrun_names_the_owner_of_the_next_row():
    reports = copied_rows(5, of=bounds.program(0))
    assert [r.lies for r in reports[:2]] == [f"block_table[{i}] of request {r}" for i, r in ((4, 1), (8, 2))]
    assert "nothing" in reports[2].lies
    assert reports[0].extent == "block_table[0, 4) of request 0"


def test_rows_are_silent_when_each_program_keeps_to_its_own():
    assert not copied_rows(4, of=bounds.program(0))


def test_allocated_prefix_of_a_row_is_the_extent():
    (report,) = copied_rows(4, of=bounds.program(0), allocated=[4, 2, 4])
    assert report.program == (1, 0, 0) and report.index == 6 and report.lanes == 2
    assert report.lies == "the unallocated tail of the row of request 1 in block_table"


def test_mapped_owner_follows_the_index_mapping():
    assert [(r.program[0], r.lies) for r in copied_rows(4, of=bounds.mapped([0, 2, 1]))] == [
        (1, "block_table[4] of request 1"),
        (2, "block_table[8] of request 2"),
    ]


def test_padding_between_rows_of_a_strided_table_is_outside():
    reports = copied_rows(5, arange(3, 8)[:, :4])
    assert [r.index for r in reports] == [4, 12, 20]
    assert reports[0].lies == "padding of table"


def test_strided_table_is_silent_inside_its_rows():
    assert not copied_rows(4, arange(3, 8)[:, :4])


def test_live_prefix_of_a_padded_buffer():
    source = arange(16)
    report = copied(source, 0, declare=lambda watch: watch.live(source, 6, name="slot_mapping")).reports[0]
    assert report.index == 6 and report.lies == "padding of slot_mapping"


def test_address_from_a_table_reaches_its_target():
    a, b, out = arange(4) + 10, arange(4) + 20, torch.zeros(2, dtype=torch.int32)
    table = torch.tensor([a.data_ptr(), b.data_ptr()])
    with bounds.watch() as watch:
        watch.pointers(table, a, b)
        follow[(2,)](table, out, 3)
    assert not watch.reports and out.tolist() == [13, 23]


def test_address_from_a_table_that_overruns_its_target_is_a_fault_even_in_a_neighbour():
    backing = arange(8)
    a, b = backing[:4], backing[4:]
    table = torch.tensor([a.data_ptr(), b.data_ptr()])
    with bounds.watch() as watch:
        watch.tensor(a, "a")
        watch.tensor(b, "b")
        watch.pointers(table, a, b)
        follow[(2,)](table, torch.zeros(2, dtype=torch.int32), 4)
    assert [(r.tensor, r.lies) for r in watch.reports] == [
        ("a", "b[0]"),
        ("b", "nothing that was passed to the kernel"),
    ]


def test_address_of_nothing_watched_is_a_fault():
    hidden = arange(4)
    with bounds.watch() as watch:
        follow[(1,)](torch.tensor([hidden.data_ptr()]), torch.zeros(1, dtype=torch.int32), 0)
    assert watch.reports[0].tensor == "an address of unknown origin"


@pytest.mark.parametrize("kernel", [count, exchange])
def test_atomic_outside_is_reported_and_not_performed(kernel):
    backing = torch.zeros(8, dtype=torch.int32)
    with bounds.watch() as watch:
        kernel[(1,)](backing[:4], 4)
        kernel[(1,)](backing[:4], 3)
    assert [(r.op, r.index) for r in watch.reports] == [("atomic", 4)]
    assert backing[4] == 0 and backing[3] != 0


def test_device_function_reports_its_own_line_under_the_kernels_name():
    with bounds.watch() as watch:
        load_through_helper[(1,)](arange(4), torch.zeros(1, dtype=torch.int32))
    (report,) = watch.reports
    lines = Path(__file__).read_text(encoding="utf-8").splitlines()
    assert report.kernel == "load_through_helper" and "return tl.load(source + at)" in lines[report.line - 1]


@pytest.mark.filterwarnings("ignore:tl.make_block_ptr is deprecated:UserWarning")
def test_block_pointers_are_checked():
    source, target = arange(8), torch.zeros(8, dtype=torch.int32)
    with bounds.watch() as watch:
        block_pointer_copy[(1,)](source, target, 8, BLOCK=8)
    assert not watch.reports and target.tolist() == source.tolist()
    with bounds.watch() as watch:
        block_pointer_copy[(1,)](source[:4], target, 8, BLOCK=8)
    assert watch.reports[0].tensor == "source" and watch.reports[0].index == 4


def test_perform_mapped_does_what_a_gpu_would():
    target = torch.zeros(8, dtype=torch.int32)
    watch = copied(arange(16)[:8], 4, target, perform_mapped=True)
    assert watch.faults == 1 and target.tolist() == list(range(4, 12))


def test_every_launch_is_judged_even_of_equal_shapes():
    source, target = arange(8), torch.zeros(8, dtype=torch.int32)
    with bounds.watch() as watch:
        for shift in (0, 1, 0, 1):
            copy_shifted[(1,)](source, target, shift, 8, BLOCK=8)
    assert watch.faults == 2 and watch.launches == 4


def test_empty_tensor_allows_no_access():
    report = copied(torch.empty(0, dtype=torch.int32), 0).reports[0]
    assert report.tensor == "source" and report.lanes == 8


def test_hooks_are_gone_after_the_block():
    from triton.runtime import interpreter

    before = interpreter.InterpreterBuilder.create_masked_load
    with bounds.watch():
        assert interpreter.InterpreterBuilder.create_masked_load is not before
    assert interpreter.InterpreterBuilder.create_masked_load is before
    assert bounds._active is None


def test_hooks_are_gone_after_an_error():
    from triton.runtime import interpreter

    before = interpreter._implicit_cvt
    with pytest.raises(RuntimeError, match="inside"), bounds.watch():
        raise RuntimeError("inside")
    assert interpreter._implicit_cvt is before and bounds._active is None


def test_two_watches_at_once_are_refused():
    with bounds.watch(), pytest.raises(BadInputError, match="open already"), bounds.watch():
        pass


def test_a_watch_without_the_interpreter_is_refused(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    with pytest.raises(BadInputError, match="TRITON_INTERPRET=1"), bounds.watch():
        pass


def test_an_interpreter_of_another_form_is_refused(monkeypatch):
    from triton.runtime import interpreter

    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_masked_store", lambda self, ptrs: None)
    assert "create_masked_store" in bounds.unsupported()
    with pytest.raises(UnavailableError, match="create_masked_store"), bounds.watch():
        pass


def test_hooks_fit_the_installed_triton():
    assert bounds.unsupported() == ""


@pytest.mark.parametrize(
    "declare",
    [
        lambda w: w.rows(torch.zeros(4), of=bounds.program(0)),
        lambda w: w.rows(torch.zeros(2, 4), of=bounds.program(0), allocated=[5, 1]),
        lambda w: w.segments(torch.zeros(4), [0, 3, 2], of=bounds.program(0)),
        lambda w: w.live(torch.zeros(4), 5),
        lambda w: w.blocks(torch.zeros(4, 2), [0, 1], of=bounds.program(0)),
        lambda w: w.pointers(torch.zeros(4), torch.zeros(1)),
    ],
)
def test_declarations_that_do_not_fit_are_refused(declare):
    with bounds.watch() as watch, pytest.raises(BadInputError):
        declare(watch)


def test_fixture_fails_a_test_that_overruns(pytester):
    pytester.makepyfile(
        """
        import torch, triton, triton.language as tl

        @triton.jit
        def overrun(x):
            tl.store(x + 4, 1.0)

        def test_overrun(bounds_watch):
            overrun[(1,)](torch.zeros(4))

        def test_inside(bounds_watch):
            overrun[(1,)](torch.zeros(5))
        """
    )
    result = pytester.runpytest_subprocess("-p", "no:cacheprovider")
    result.assert_outcomes(passed=2, errors=1)
    result.stdout.fnmatch_lines(["*store at overrun*x[[]4]*"])
