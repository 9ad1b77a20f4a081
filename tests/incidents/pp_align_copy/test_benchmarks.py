"""What the GPU benchmarks of `pp-align-copy` compute around their measurements."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from specmortem import upstream
from specmortem.errors import UnavailableError
from specmortem.upstream.vllm_files import MAMBA

BENCHMARKS = Path(__file__).resolve().parents[3] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))
import align_copy as benchmark  # noqa: E402
import memcheck  # noqa: E402

FAULTED = """========= Invalid __global__ read of size 16 bytes
=========     at precopy_kernel+0x4d0 in /some/where/align_copy.py:405
=========     by thread (0,0,0) in block (0,0,0)
========= Invalid __global__ read of size 4 bytes
=========     at precopy_kernel+0x5d0 in /some/where/align_copy.py:410
========= ERROR SUMMARY: 257 errors
"""


def test_memcheck_counts_and_names_the_first_line():
    assert memcheck.summary(FAULTED) == {
        "errors": 257,
        "first error": "Invalid __global__ read of size 16 bytes",
        "at": "precopy_kernel+0x4d0 in align_copy.py:405",
    }


def test_memcheck_without_errors_and_without_an_end():
    assert memcheck.summary("========= ERROR SUMMARY: 0 errors\n")["errors"] == 0
    told = memcheck.summary("killed")
    assert told["errors"] is None and told["first error"] == "no summary: killed"


@pytest.mark.parametrize(
    ("arm", "errors", "good"),
    [
        ("before", 3, True),
        ("before", 0, False),
        ("after", 0, True),
        ("after", 1, False),
        ("before", None, False),
        ("after", None, False),
    ],
)
def test_an_arm_is_as_stated(arm, errors, good):
    assert memcheck.as_stated({"arm": arm, "errors": errors}) is good


def sanitizer(folder, body):
    """A program in the place of compute-sanitizer."""
    script = folder / "compute-sanitizer"
    script.write_text(f"#!/bin/sh\n{body}\n")
    script.chmod(0o755)
    return memcheck.check(memcheck.Checked("k", "after", "json", "dumps(1)"))


def test_an_arm_after_that_fails_is_not_clean(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    summary = "echo '========= ERROR SUMMARY: 0 errors'"
    assert sanitizer(tmp_path, summary)["errors"] == 0
    failed = sanitizer(tmp_path, f"echo no such arm; {summary}; exit 1")
    assert failed["errors"] is None and "no such arm" in failed["first error"]
    assert sanitizer(tmp_path, 'shift 2; exec "$@"')["first error"] == "no summary: 1\n"


@pytest.mark.parametrize(
    "script",
    ["align_copy.py", "memcheck_align.py", "memcheck_dflash.py", "memcheck_mtp.py", "mtp_price.py"],
)
def test_without_a_gpu_a_benchmark_says_so_in_one_line(script, tmp_path):
    if torch.cuda.is_available() or shutil.which("compute-sanitizer"):
        pytest.skip("this machine has what the benchmark needs")
    command = [sys.executable, str(BENCHMARKS / script), str(tmp_path / "out.json")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert not list(tmp_path.iterdir())


def case(kind, dtype=torch.float32, **change):
    size = {"device": "cpu", "requests": 2, "layers": 2, "rotated_bytes": 3000, **change}
    return benchmark.Case(kind, dtype, 256, **size)


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("op", benchmark.OPS)
@pytest.mark.parametrize(("kind", "dtype"), benchmark.KINDS)
def test_every_contestant_copies_the_bytes_that_are_timed(kind, dtype, op):
    one = case(kind, dtype)
    assert one.rotations == 2
    assert one.is_right(one.own(op)) and one.is_right(one.block_copies())
    assert not one.is_right(lambda r: None)
    assert not one.is_right(lambda r: one.own(op)(0))


@pytest.mark.usefixtures("interpreted")
@pytest.mark.network
@pytest.mark.parametrize("op", benchmark.OPS)
def test_the_released_kernel_copies_the_same(op):
    try:
        tree = upstream.resolve("vllm==0.33.0")
        tree.fetch([MAMBA])
    except UnavailableError as error:
        pytest.skip(str(error))
    for kind, dtype in benchmark.KINDS:
        one = case(kind, dtype)
        assert one.is_right(one.released(op, tree))


def test_one_copy_moves_as_many_bytes_as_a_launch():
    one = case("conv", torch.bfloat16)
    one.pool.zero_()
    flat = one.pool.view(-1)
    flat[: one.launch_bytes] = 7
    one.one_copy(0)
    assert one.launch_bytes == 2 * 2 * 224
    assert int((flat == 7).sum()) == 2 * one.launch_bytes and int(flat[2 * one.launch_bytes - 1]) == 7


def test_rates_and_ratios():
    one = case("temporal")
    times = {"own": 2.0, "one_copy": 1.0, "block_copies": 4.0, "released": 3.0}
    row = benchmark.row("postcopy", one, times)
    assert (row["of_copy"], row["of_released"]) == (0.5, 1.5)
    assert row["copy_gb_per_s"] == round(2 * 1024 / 1000, 1)
    assert benchmark.row("postcopy", one, {**times, "block_copies": 0.5})["of_copy"] == 0.25
    del times["released"]
    assert benchmark.row("postcopy", one, times)["of_released"] is None


def test_criteria():
    good = {"op": "postcopy", "kind": "conv", "state_kib": 1024, "of_copy": 0.85, "of_released": None}
    assert benchmark.failures([good, {**good, "state_kib": 64, "of_copy": 0.1}]) == []
    found = benchmark.failures([{**good, "of_copy": 0.84}, {**good, "of_released": 0.97}])
    assert len(found) == 2 and "84.0% of the device-to-device copy" in found[0] and "0.97 times" in found[1]


def test_the_best_tuning_of_each_size():
    sweep = [{"kind": k, "state_kib": s, "us": u} for k in "ab" for s in (1, 2) for u in (3.0, 2.0, 4.0)]
    assert benchmark.best(sweep) == [{"kind": k, "state_kib": s, "us": 2.0} for k in "ab" for s in (1, 2)]
