import pytest

from specmortem import study
from specmortem.isolation import Arm, ArmResult
from specmortem.verdict import Evidence, Row

ARM = Arm("specmortem.incidents.dflash_oob.arms:control", {"arm": "before"})


@pytest.mark.parametrize("kind", ["illegal-address", "device-assert", "cuda-error"])
def test_a_process_that_died_of_the_gpu_is_a_fault_with_its_kind(kind):
    row = study.row(ArmResult(ARM, kind, message="CUDA error: x\nmore"), "c", "graphs", "before", 0)
    assert (row.outcome, row.evidence.detail["effect"], row.evidence.reason) == (
        "fault",
        kind,
        "CUDA error: x",
    )


@pytest.mark.parametrize("kind", ["timeout", "signal", "python-error", "out-of-memory"])
def test_a_process_that_ended_otherwise_is_not_judged(kind):
    row = study.row(ArmResult(ARM, kind, message="told"), "c", "graphs", "before", 0)
    assert (row.outcome, row.runs) == ("not-judged", 0) and "told" in row.evidence.reason


def test_parts_of_a_long_run_add_up_and_one_lost_part_spoils_it():
    good = [
        ArmResult(ARM, "value", {"states": 10, "faults": f, "witness": w}) for f, w in ((0, ""), (2, "seen"))
    ]
    row = study.total(good, "c", "random-states", "before", 0, "states")
    assert (row.runs, row.faults, row.evidence.witness) == (20, 2, "seen")
    spoiled = study.total(
        [*good, ArmResult(ARM, "timeout", message="late")], "c", "random-states", "before", 0, "states"
    )
    assert spoiled.outcome == "not-judged"


def test_upper_bound_of_no_fault():
    assert study.upper_bound(2048, 0) == pytest.approx(1.462e-3, rel=1e-3)
    assert study.upper_bound(10_000, 0) == pytest.approx(2.995e-4, rel=1e-3)
    assert study.upper_bound(10, 1) is None and study.upper_bound(0, 0) is None


def test_equal_bodies_are_grouped():
    rows = [
        Row("c", "released", f"vllm=={v}", "fault", 1, 1, None, Evidence(detail={"hashes": {"f": h}}))
        for v, h in (("0.1", "aa"), ("0.2", "aa"), ("0.3", "bb"))
    ]
    assert study.body_table(rows).to_dict("list") == {
        "function": ["f", "f"],
        "body": ["aa", "bb"],
        "releases": ["0.1, 0.2", "0.3"],
    }


def test_device_info_names_the_simulator():
    assert study.device_info("sim").kind == "sim"
