"""Cases a to h: the detector on released kernels, with inputs that are good, and bad in one way."""

import pytest
import torch
from incidents.pp_align_copy import align

from specmortem import upstream
from specmortem.detect import bounds
from specmortem.errors import UnavailableError
from specmortem.incidents.dflash_oob import probe as dflash_oob
from specmortem.upstream import vllm_files

pytestmark = [pytest.mark.network, pytest.mark.usefixtures("interpreted")]
MAMBA = "vllm/v1/worker/mamba_utils.py"
SILENT_RELEASES = ("0.20.1", "0.22.1", "0.24.0", "0.28.0", "0.33.0")


def released(version: str, paths: list[str]):
    try:
        tree = upstream.resolve(f"vllm=={version}")
        tree.fetch([p for p in paths if tree.has(p)])
    except UnavailableError as error:
        pytest.skip(str(error))
    return tree


@pytest.fixture(scope="module")
def v1():
    tree = released("0.33.0", [vllm_files.UTILS])
    return dflash_oob._v1(upstream.lift(tree, vllm_files.UTILS, vllm_files.V1).function)


@pytest.fixture(scope="module")
def mamba():
    tree = released("0.33.0", [MAMBA])
    names = ("precopy_mamba_align_fused_kernel", "postprocess_mamba_fused_kernel")
    return [upstream.lift(tree, MAMBA, name).function for name in names]


def test_case_a_good_dflash_inputs(v1):
    written = v1(dflash_oob.batch([[10, 11, 12, 13], [40, 41, 42, 43]], rejected=[1, 2]), 8)
    assert written.reports == ()
    assert written["query_positions"] == [13, 14, 15, 16, 42, 43, 44, 45]


def test_case_b_rejected_equals_context_of_request_0(v1):
    (report, *_) = v1(dflash_oob.batch([[10, 11, 12, 13], [40, 41, 42, 43]], rejected=[4, 0]), 8).reports
    assert (report.tensor, report.index) == ("target_positions", -1)


def test_case_c_rejected_equals_context_of_request_1_reads_request_0(v1):
    (report, *_) = v1(dflash_oob.batch([[10, 11, 12, 13], [40, 41, 42, 43]], rejected=[0, 4]), 8).reports
    assert report.lies == "target_positions[3] of request 0"


def test_case_d_negative_position_on_request_0(v1):
    (report, *_) = v1(dflash_oob.batch([[-100, -99, -98, -97], [40, 41, 42, 43]]), 8).reports
    assert report.tensor == "block_table" and report.index == -25


def test_case_d_negative_position_on_request_1_reads_request_0s_row(v1):
    (report, *_) = v1(dflash_oob.batch([[10, 11, 12, 13], [-9, -8, -7, -6]]), 8).reports
    assert "of request 0" in report.lies and report.extent.endswith("of request 1")


def test_case_e_clamp_hides_a_position_past_the_table(v1):
    assert v1(dflash_oob.batch([[996, 997, 998, 999], [40, 41, 42, 43]]), 8).reports == ()


def test_case_e_without_the_clamp_the_next_request_is_read(v1, tmp_path):
    text = (
        released("0.33.0", [vllm_files.UTILS])
        .fetch([vllm_files.UTILS])[vllm_files.UTILS]
        .read_text(encoding="utf-8")
    )
    clamp = "block_num = tl.minimum(block_num, block_table_stride - 1)"
    assert text.count(clamp) >= 1
    target = tmp_path / vllm_files.UTILS
    target.parent.mkdir(parents=True)
    target.write_text(text.replace(clamp, "block_num = block_num"))
    lifted = upstream.lift(upstream.resolve(f"tree:{tmp_path}"), vllm_files.UTILS, vllm_files.V1)
    unclamped = dflash_oob._v1(lifted.function)
    (report, *_) = unclamped(dflash_oob.batch([[60, 61, 62, 63], [40, 41, 42, 43]]), 8).reports
    assert report.lies == "block_table[16] of request 1"
    (report, *_) = unclamped(dflash_oob.batch([[996, 997, 998, 999]]), 4).reports
    assert report.lies.startswith("nothing")


def test_case_f_good_align_copies_are_silent(mamba):
    precopy, postprocess = mamba
    for run in (
        lambda b: align.precopy(precopy, b, [1, 0], [0, 1], [1, 2], [0, 1]),
        lambda b: align.postprocess(postprocess, b, [1, 0], [2, 2], [1, 1], [16, 17]),
    ):
        batch = align.AlignBatch()
        with bounds.watch() as watch:
            align.watch_align(watch, batch, bounds.mapped([1, 0]))
            run(batch)
        assert watch.reports == [] and watch.accesses > 40


def test_case_f_wrong_row_names_the_owner_of_the_row_and_of_the_block():
    tree = released("0.31.0", [MAMBA])
    kernel = upstream.lift(tree, MAMBA, "postprocess_mamba_fused_kernel").function
    batch = align.AlignBatch()
    with bounds.watch(perform_mapped=True) as watch:
        align.watch_align(watch, batch, bounds.mapped([1, 0]))
        align.postprocess(kernel, batch, [1, 0], [2, 2], [1, 1], [16, 17])
    lies = {(r.tensor, r.op, r.lies.split(" of ")[-1], r.program[0]) for r in watch.reports}
    assert ("block_table", "load", "request 1", 1) in lies
    assert ("conv", "store", "request 1", 1) in lies


def test_case_g_column_8399_of_123(mamba):
    batch = align.AlignBatch(columns=123)
    with bounds.watch() as watch:
        align.watch_align(watch, batch, bounds.mapped([1, 0]))
        align.precopy(mamba[0], batch, [1, 0], [8399, 1], [1, 2], [0, 1])
    first = watch.reports[0]
    assert (first.tensor, first.index, first.extent) == (
        "block_table",
        8399,
        "block_table[0, 123) of request 0",
    )


@pytest.mark.parametrize(
    ("accepted", "owner"), [([0, 1, 1], "nothing"), ([1, 0, 1], "of request 0"), ([1, 5, 1], "of request 2")]
)
def test_case_h_accepted_count_outside_its_row(accepted, owner):
    tree = released("0.33.0", [*vllm_files.GATING])
    run = dflash_oob._state_lookup(dflash_oob.DFlashSubject("vllm==0.33.0", "cpu", {}, {}, tree))
    (report, *_) = run(accepted)
    assert report.tensor == "ssm_state_indices" and owner in report.lies


def test_silent_on_released_kernels_with_good_inputs(record_property):
    launches = {}
    for version in SILENT_RELEASES:
        launches |= {f"{version}: {name}": run for name, run in good_launches(version)}
    reported = {name: reports for name, run in launches.items() if (reports := run())}
    record_property("silent_launches", sorted(launches))
    assert reported == {} and len(launches) >= 30


def good_launches(version: str):
    """(name, run) of launches believed correct; `run` returns the reports."""
    paths = [
        vllm_files.UTILS,
        vllm_files.V2_SPECULATOR,
        "vllm/v1/worker/gpu/cp_utils.py",
        vllm_files.CONV,
        MAMBA,
        *vllm_files.GATING,
    ]
    tree = released(version, paths)
    batches = {
        "three requests": dflash_oob.batch([[4, 5, 6], [20, 21, 22, 23], [0]], rejected=[1, 2, 0]),
        "no rejection": dflash_oob.batch([[10, 11], [40, 41, 42, 43]]),
    }
    runs = {vllm_files.V1: dflash_oob._v1(upstream.lift(tree, vllm_files.UTILS, vllm_files.V1).function)}
    if tree.has(vllm_files.V2_SPECULATOR):
        runs[vllm_files.V2] = dflash_oob._v2(
            upstream.lift(tree, vllm_files.V2_SPECULATOR, vllm_files.V2).function
        )
    for name, run in runs.items():
        for label, batch in batches.items():
            yield f"{name}, {label}", lambda run=run, batch=batch: list(run(batch, 16).reports)
    subject = dflash_oob.DFlashSubject(f"vllm=={version}", "cpu", {}, {}, tree)
    yield (
        "fused_sigmoid_gating_delta_rule_update",
        lambda: list(dflash_oob._state_lookup(subject)([1, 2, 4])),
    )
    yield "causal_conv1d_update", lambda: list(dflash_oob._conv_lookup(subject)([1, 2, 4]))
    yield "eagle_prepare_next_token_padded_kernel", lambda: next_token(tree)
    yield "eagle_prepare_inputs_padded_kernel", lambda: prepare_inputs(tree)
    if version in ("0.28.0", "0.33.0"):
        yield "postprocess_mamba_fused_kernel", lambda: postprocess(tree)


def next_token(tree):
    kernel = upstream.lift(tree, vllm_files.UTILS, "eagle_prepare_next_token_padded_kernel").function
    sampled = torch.tensor([[5, 6, -1, -1], [7, -1, -1, -1]], dtype=torch.int32)
    out = [torch.zeros(2, dtype=torch.int32) for _ in range(2)]
    with bounds.watch() as watch:
        watch.rows(sampled, of=bounds.program(0), name="sampled_token_ids")
        kernel[(2,)](
            sampled,
            torch.zeros(2, dtype=torch.bool),
            torch.zeros(2, dtype=torch.int32),
            *out,
            100,
            4,
            2,
            4,
            4,
        )
    assert out[0].tolist() == [6, 7] and out[1].tolist() == [2, 1]
    return watch.reports


def prepare_inputs(tree):
    kernel = upstream.lift(tree, vllm_files.UTILS, "eagle_prepare_inputs_padded_kernel").function
    counts = torch.tensor([3, 6], dtype=torch.int32), torch.tensor([2, 1], dtype=torch.int32)
    out = [torch.zeros(2, dtype=torch.int32) for _ in range(2)]
    with bounds.watch() as watch:
        kernel[(2,)](*counts, torch.tensor([0, 4, 8], dtype=torch.int32), *out, 2)
    assert out[1].tolist() == [2, 3]
    return watch.reports


def postprocess(tree):
    kernel = upstream.lift(tree, MAMBA, "postprocess_mamba_fused_kernel").function
    batch = align.AlignBatch()
    with bounds.watch() as watch:
        align.watch_align(watch, batch, bounds.mapped([0, 1]))
        align.postprocess(kernel, batch, [0, 1], [2, 2], [1, 1], [16, 17])
    return watch.reports
