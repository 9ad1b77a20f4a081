"""What released FlashInfer's arms can be asked without a GPU: typed refusals, layouts, the search for batches."""

import random
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from specmortem.detect.staging import simulated_cuda
from specmortem.errors import BadInputError, UnavailableError
from specmortem.incidents.mtp_draft_loop import flashinfer as real
from specmortem.incidents.mtp_draft_loop import layouts
from specmortem.incidents.mtp_draft_loop.kernels import Planner
from specmortem.isolation import Arm, run_arm

MODULE = "specmortem.incidents.mtp_draft_loop.flashinfer"
needs_absence = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device here")


@needs_absence
@pytest.mark.parametrize(
    ("function", "kwargs"),
    [
        ("overwritten_plan", {}),
        ("cross_check", {}),
        ("loop", {"arm": "before"}),
    ],
)
def test_without_a_gpu_every_arm_ends_with_a_typed_refusal(function, kwargs):
    with pytest.raises(UnavailableError, match="needs a CUDA device"):
        getattr(real, function)(**kwargs)


@needs_absence
def test_the_refusal_survives_the_process_boundary():
    ended = run_arm(Arm(f"{MODULE}:loop", {"arm": "unpinned"}, timeout_s=120))
    assert ended.kind == "python-error" and "needs a CUDA device" in ended.message


@needs_absence
def test_the_verdict_without_a_gpu_is_not_judged():
    verdict = real.verdict("flashinfer==0.6.11.post2")
    assert verdict.outcome == "not-judged" and verdict.evidence.detail["unavailable"]


def test_a_library_that_cannot_be_imported_is_unavailable(monkeypatch):
    monkeypatch.setattr(real.torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(
        real, "import_module", lambda name: (_ for _ in ()).throw(OSError("libcudart missing"))
    )
    real.library.cache_clear()
    with pytest.raises(UnavailableError, match="OSError: libcudart missing"):
        real.library()


def test_unknown_arms_are_refused_with_the_known_ones():
    with pytest.raises(BadInputError, match="sync-after-plan"):
        real.loop("after")


class Wrapper:
    def __init__(self, **private):
        vars(self).update(private)


def test_a_missing_private_name_is_told_with_those_that_are_there(monkeypatch):
    monkeypatch.setattr(real, "version", lambda: "9.9")
    with pytest.raises(UnavailableError, match=r"9\.9: .* has no _int_workspace_buffer; it has _int_buffer"):
        real.attribute(Wrapper(_int_buffer=1), real.BLOCK)
    with pytest.raises(UnavailableError, match="returns 2 numbers, not 15"):
        real.plan_info(Wrapper(_plan_info=[1, 2]))


def released(own):
    """What `layout` would say if the release agreed with this package's plan."""
    info = dict.fromkeys(real.INFO_NAMES, 0) | own.offsets
    info |= {"num_padded": own.num_padded, "total_num_rows": own.num_reqs, "split_kv": int(own.split)}
    info |= {"cta_tile_q": own.geometry.cta_tile_q, "s": own.s_offset if own.split else 0}
    found = real.arrays(np.concatenate([own.image, np.zeros(64, np.uint8)]), info)
    return {"lengths": list(own.page_counts), "info": info, "arrays": found}


def test_plans_are_compared_number_by_number_and_array_by_array():
    rng, planner = random.Random(1), Planner(real.geometry(132))
    plans = [planner.plan(real.random_lengths(rng)) for _ in range(60)]
    assert {plan.split for plan in plans} == {True, False}
    assert [told for plan in plans for told in real.planner_differences(plan, released(plan))] == []
    split = next(plan for plan in plans if plan.split)
    for name in ("merge_indptr", "o_indptr", "block_valid_mask", "s", "cta_tile_q"):
        changed = released(split)
        changed["info"][name] += 16
        assert any(name in told for told in real.planner_differences(split, changed))
    changed = released(split)
    changed["arrays"]["merge_indptr"][-1] += 1
    assert len(real.planner_differences(split, changed)) == 1


def test_kernels_of_the_worked_example_read_descending_indices():
    planner = Planner(real.geometry(132))
    own, other = (planner.plan([length + more for length in real.WORKED_EXAMPLE]) for more in (0, 1))
    block = np.zeros(other.nbytes, dtype=np.uint8)
    own.fill(block)  # what is between the arrays of the second plan stays from the first
    other.fill(block)
    read = real.arrays(block, released(own)["info"])["merge_indptr"]
    assert read == [15, 14, 39, 48, 0]


@pytest.mark.parametrize("k", [3, 4, 5])
def test_found_batches_walk_out_of_memory_at_the_last_plan(k):
    planner = Planner(real.geometry(132))
    found = real.faulting_batches(3, sms=132, k=k)
    assert len(found) == 3 and all(3 <= len(base) <= 6 for base in found)
    for base in found:
        plans = [planner.plan([length + j for length in base]) for j in (k - 2, k - 1)]
        block = layouts.overwritten(plans, 0, 1)
        assert layouts.consequence(plans[0], block, layouts.first_row_outside(planner.geometry)) == "read"


class SimulatedWrapper:
    """A decode wrapper with this package's planner, on the simulated device; `run` gives what its kernels read."""

    def __init__(self, workspace, layout, use_tensor_cores):
        assert layout == "NHD" and use_tensor_cores
        self._int_workspace_buffer = torch.zeros(1 << 13, dtype=torch.uint8, device=workspace.device)
        self._pin_memory_int_workspace_buffer = torch.zeros(1 << 13, dtype=torch.uint8, pin_memory=True)

    def plan(self, indptr, indices, last_page_len, *geometry, q_data_type, kv_data_type):
        pages = indptr.diff()
        assert len(indices) == indptr[-1] and geometry == (24, 4, real.HEAD_SIZE, 16)
        lengths = [int(x) for x in (pages - 1) * 16 + last_page_len]
        self.own = Planner(real.geometry()).plan(lengths)
        self._plan_info = list(released(self.own)["info"].values())
        self.own.fill(self._pin_memory_int_workspace_buffer.numpy())
        n = self.own.nbytes
        source = self._pin_memory_int_workspace_buffer[:n]
        self._int_workspace_buffer[:n].copy_(source, non_blocking=True)

    def run(self, query, cache):
        start = self.own.offsets["merge_indptr"]
        return self._int_workspace_buffer[start : start + 4 * len(query) + 4].clone()


@pytest.fixture
def simulated(monkeypatch):
    """The arms with a simulated library on the simulated device: nothing runs until the host waits."""
    library = SimpleNamespace(BatchDecodeWithPagedKVCacheWrapper=SimulatedWrapper)
    for target, name, value in (
        (real, "library", lambda: library),
        (real, "version", lambda: "0"),
        (real, "num_sms", lambda: 132),
        (real, "HEAD_SIZE", 8),
        (real, "WORKSPACE_BYTES", 1024),
    ):
        monkeypatch.setattr(target, name, value)
    with simulated_cuda("lazy") as watch:
        monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: None)
        yield watch


def test_the_second_plan_is_found_in_a_buffer_that_is_reused(simulated):
    found = real.overwritten_plan()
    assert (found["effect"], found["holds"], found["stalled"]) == ("overwritten", ["B"], True)
    assert found["kernels_of_the_first_plan_read"]["merge_indptr"] == [15, 14, 39, 48, 0]
    verdict = real.verdict("flashinfer==0")
    assert verdict.outcome == "fault" and "[15, 14, 39, 48, 0]" in verdict.evidence.observed
    assert real.verdict("flashinfer==1").outcome == "not-judged"


def test_the_first_plan_is_found_in_a_pageable_buffer(simulated, monkeypatch):
    pinned = real.DecodeAttention.wrapper
    monkeypatch.setattr(real.DecodeAttention, "wrapper", lambda self: pinned(self, pinned=False))
    assert real.overwritten_plan()["effect"] == "clean"


@pytest.mark.parametrize(
    ("arm", "effect"),
    [
        ("before", "corruption"),
        ("sync-after-plan", "clean"),
        ("fresh-wrapper", "clean"),
        ("unpinned", "clean"),
    ],
)
def test_only_the_arm_before_reads_other_plans(simulated, arm, effect):
    found = real.loop(arm, steps=4, batches=2)
    assert found["effect"] == effect and found["forwards"] == 16
    assert found["wrong_outputs"] == (4 * 3 if arm == "before" else 0)


def test_the_planner_agrees_with_itself_through_the_library(simulated):
    found = real.cross_check(batches=20)
    assert (found["effect"], found["differences"]) == ("equal", 0) and 0 < found["split"] < 20
    attention = real.DecodeAttention(1000, 2)
    one = real._laid_out(attention, attention.wrapper(), [40, 7000])
    assert one["lengths"] == [40, 7000] and one["arrays"]["merge_indptr"][-1] == one["info"]["num_padded"]
