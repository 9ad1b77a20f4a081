"""Released vLLM code, from the package index."""

from __future__ import annotations

import inspect
import os
import subprocess
import sys
import textwrap

import pytest

from specmortem import upstream
from specmortem.errors import UnavailableError

pytestmark = pytest.mark.network

UTILS = "vllm/v1/spec_decode/utils.py"
SPECULATOR = "vllm/v1/worker/gpu/spec_decode/dflash/speculator.py"
CONV = "vllm/model_executor/layers/mamba/ops/causal_conv1d.py"
SAMPLER = "vllm/v1/sample/rejection_sampler.py"
MAMBA = "vllm/v1/worker/mamba_utils.py"
GATING = {
    "0.22.1": "vllm/model_executor/layers/fla/ops/fused_sigmoid_gating.py",
    "0.33.0": "vllm/third_party/flash_linear_attention/ops/fused_sigmoid_gating.py",
}
RECURRENT = "vllm/third_party/flash_linear_attention/ops/fused_recurrent.py"
PROBED = [
    UTILS,
    SPECULATOR,
    "vllm/v1/worker/gpu/cp_utils.py",
    GATING["0.33.0"],
    RECURRENT,
    CONV,
    SAMPLER,
    MAMBA,
    "vllm/v1/attention/backends/utils.py",
]


@pytest.fixture(scope="session")
def cache(package_index, tmp_path_factory):
    return tmp_path_factory.mktemp("releases")


@pytest.fixture
def release(cache):
    return lambda version: upstream.resolve(f"vllm=={version}", cache)


def test_the_probed_files_of_a_release_move_less_than_3_mb(tmp_path, release):
    tree = upstream.resolve("vllm==0.33.0", tmp_path)
    assert len(tree.fetch(PROBED)) == 9
    assert 100_000 < tree.bytes_moved < 3_000_000
    assert upstream.resolve("vllm==0.33.0", tmp_path).bytes_moved == 0


def test_an_unknown_release_names_the_known_ones(release):
    with pytest.raises(UnavailableError, match=r"no wheel of vllm 0\.0\.99 \(wheels there: .* to "):
        release("0.0.99")


def test_the_dflash_kernel_is_the_same_in_two_releases(release):
    lifted = [
        upstream.lift(release(v), UTILS, "copy_and_expand_dflash_inputs_kernel") for v in ("0.20.1", "0.33.0")
    ]
    assert lifted[0].body_hash == lifted[1].body_hash
    assert lifted[0].closure_hash == lifted[1].closure_hash
    assert [each.line for each in lifted] == [459, 640]
    for each in lifted:
        assert "block_table_stride" in inspect.signature(each.function.fn).parameters
        assert inspect.getsourcelines(each.function.fn)[1] == each.line - 1


@pytest.mark.parametrize(("version", "others"), [("0.24.0", set()), ("0.33.0", {"cp_local_slot"})])
def test_the_dflash_launcher_brings_what_it_needs_from_other_files(release, version, others):
    lifted = upstream.lift(release(version), SPECULATOR, "prepare_dflash_inputs")
    assert set(lifted.requires) == {"_prepare_dflash_inputs_kernel", "PAD_SLOT_ID"} | others
    assert lifted.namespace["PAD_SLOT_ID"] == -1
    assert lifted.missing == {}


@pytest.mark.parametrize("version", GATING)
def test_the_gated_delta_update_brings_its_kernel(release, version):
    tree = release(version)
    assert tree.first(GATING.values()) == GATING[version]
    lifted = upstream.lift(tree, GATING[version], "fused_sigmoid_gating_delta_rule_update")
    assert lifted.requires == ("fused_sigmoid_gating_delta_rule_update_kernel",)
    assert (lifted.stripped, lifted.missing) == ((), {})


def test_the_convolution_update_does_not_need_the_platform_to_be_lifted(release):
    lifted = upstream.lift(release("0.33.0"), CONV, "causal_conv1d_update")
    assert "_causal_conv1d_update_kernel" in lifted.requires
    assert list(lifted.missing) == ["current_platform"]


@pytest.mark.parametrize(
    ("path", "name", "requires"),
    [
        (CONV, "_causal_conv1d_update_kernel", set()),
        (SAMPLER, "sample_recovered_tokens_kernel", set()),
        (UTILS, "eagle_prepare_next_token_padded_kernel", set()),
        (MAMBA, "precopy_mamba_align_fused_kernel", {"_copy_mamba_state_block", "_memcpy_u64_tiled"}),
        (MAMBA, "postprocess_mamba_fused_kernel", {"_copy_mamba_state_block", "_memcpy_u64_tiled"}),
        (MAMBA, "preprocess_mamba_align_fused_kernel", set()),
    ],
)
def test_kernels_bring_the_kernels_that_they_call(release, path, name, requires):
    lifted = upstream.lift(release("0.33.0"), path, name)
    assert (set(lifted.requires), lifted.missing) == (requires, {})
    lines, first = inspect.getsourcelines(lifted.function.fn)
    assert (first, lines[1].startswith(f"def {name}(")) == (lifted.line - 1, True)


def test_a_kernel_that_an_older_release_lacks_is_told_apart(release):
    with pytest.raises(upstream.NotPresentError, match="does not define precopy_mamba_align_fused_kernel"):
        upstream.lift(release("0.20.1"), MAMBA, "precopy_mamba_align_fused_kernel")


def test_a_compiled_function_runs_without_its_compiler(release):
    import torch

    lifted = upstream.lift(release("0.33.0"), UTILS, "update_num_computed_tokens_for_batch_change")
    assert lifted.stripped == ("torch.compile",)
    computed, accepted = torch.tensor([10, 20]), torch.tensor([1, 1])
    drafted = torch.tensor([3, 3])
    lifted.function(
        computed, accepted, torch.tensor([1, -1]), torch.tensor([5, 2]), drafted, torch.tensor([7, 8])
    )
    assert (computed.tolist(), accepted.tolist()) == ([22, 8], [2, 1])


def test_a_runners_method_is_lifted_without_its_runner(release):
    name = "GPUModelRunner._update_states_after_model_execute"
    lifted = upstream.lift_method(release("0.33.0"), "vllm/v1/worker/gpu_model_runner.py", name)
    assert next(iter(inspect.signature(lifted.function).parameters)) == "self"


def test_released_kernels_run_in_the_interpreter(release, cache):
    release("0.33.0").fetch([UTILS, MAMBA])
    code = f"""
        import sys, torch
        from pathlib import Path
        from specmortem import upstream
        tree = upstream.resolve("vllm==0.33.0", Path(sys.argv[1]))
        kernel = upstream.lift(tree, "{UTILS}", "eagle_prepare_next_token_padded_kernel").function
        tokens = torch.tensor([[5, 6, -1], [7, -1, -1], [-1, -1, -1]])
        discard, backup = torch.tensor([False, True, False]), torch.tensor([91, 92, 93])
        following, count = torch.zeros(3, dtype=torch.int64), torch.zeros(3, dtype=torch.int64)
        kernel[(3,)](tokens, discard, backup, following, count, 50, 3, 3, 3, BLOCK_SIZE_TOKENS=4)
        print(following.tolist(), count.tolist())
        kernel = upstream.lift(tree, "{MAMBA}", "preprocess_mamba_align_fused_kernel").function
        state, accepted = torch.tensor([0, 2]), torch.tensor([3, 1])
        column, offset = torch.zeros(2, dtype=torch.int64), torch.zeros(2, dtype=torch.int64)
        rows, computed, starts = torch.tensor([1, 0]), torch.tensor([16, 40]), torch.tensor([0, 4, 8])
        sizes = dict(BLOCK_SIZE=4, MAMBA_BLOCK_SIZE=16)
        kernel[(1,)](rows, state, computed, starts, accepted, column, offset, 2, **sizes)
        print(state.tolist(), accepted.tolist(), column.tolist(), offset.tolist())
    """
    environment = {
        **os.environ,
        "TRITON_INTERPRET": "1",
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
    }
    command = [sys.executable, "-c", textwrap.dedent(code), str(cache)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.stdout == "[6, 92, 93] [2, 0, 0]\n[1, 2] [1, 1] [0, 2] [2, 0]\n", done.stderr
