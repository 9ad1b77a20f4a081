import json
from pathlib import Path

import pytest

from specmortem.errors import BadInputError
from specmortem.experiments import dflash_oob as arms
from specmortem.experiments import dflash_study as study
from specmortem.isolation import Arm, Ended
from specmortem.verdict import Evidence, Row

pytestmark = pytest.mark.usefixtures("interpreted")
DATA = Path(__file__).parents[1] / "data"
ARM = Arm("specmortem.experiments.dflash_oob:control", {"arm": "before"})


def control_rows(effects):
    return [
        study._row(
            Ended(ARM, "value", {"effect": effects.get((c, k), "clean"), "why": ""}),
            study.CAUSE_OF[c],
            study._arm_name(c, k),
            "before",
            0,
        )
        for c, k in arms.cells()
    ]


def test_a_candidate_with_the_reported_pattern_is_consistent_and_others_are_refuted():
    effects = {
        ("count-to-lookup-chain", "graphs"): "illegal-address",
        ("input-kernel", "eager"): "illegal-address",
    }
    table = study.control_table(control_rows(effects))
    assert table.loc["count-to-lookup-chain", "verdict"] == "consistent"
    assert set(table["verdict"].drop(["count-to-lookup-chain", "reported"])) == {"refuted"}
    assert list(table.index) == [*arms.CANDIDATES, "reported"]


def test_silent_corruption_under_graphs_is_not_the_reported_crash():
    table = study.control_table(control_rows({("gdn-lookup", "graphs"): "corruption"}))
    assert table.loc["gdn-lookup", "verdict"] == "refuted"


@pytest.mark.parametrize("kind", ["illegal-address", "device-assert", "cuda-error"])
def test_a_process_that_died_of_the_gpu_is_a_fault_with_its_kind(kind):
    row = study._row(Ended(ARM, kind, message="CUDA error: x\nmore"), "c", "graphs", "before", 0)
    assert (row.outcome, row.evidence.detail["effect"], row.evidence.reason) == (
        "fault",
        kind,
        "CUDA error: x",
    )


@pytest.mark.parametrize("kind", ["timeout", "signal", "python-error", "out-of-memory"])
def test_a_process_that_ended_otherwise_is_not_judged(kind):
    row = study._row(Ended(ARM, kind, message="told"), "c", "graphs", "before", 0)
    assert (row.outcome, row.runs) == ("not-judged", 0) and "told" in row.evidence.reason


def test_parts_of_a_long_run_add_up_and_one_lost_part_spoils_it():
    good = [Ended(ARM, "value", {"states": 10, "faults": f, "witness": w}) for f, w in ((0, ""), (2, "seen"))]
    row = study._sum(good, "c", "random-states", "before", 0, "states")
    assert (row.runs, row.faults, row.evidence.witness) == (20, 2, "seen")
    spoiled = study._sum(
        [*good, Ended(ARM, "timeout", message="late")], "c", "random-states", "before", 0, "states"
    )
    assert spoiled.outcome == "not-judged"


def test_upper_bound_of_no_fault():
    assert study.upper_bound(2048, 0) == pytest.approx(1.462e-3, rel=1e-3)
    assert study.upper_bound(10_000, 0) == pytest.approx(2.995e-4, rel=1e-3)
    assert study.upper_bound(10, 1) is None and study.upper_bound(0, 0) is None


def test_crash_numbers_rule_out_padding_size_and_length():
    table = study.crash_table(json.loads((DATA / "dflash-oob-crashes.json").read_text()))
    assert table.loc["a padded graph's tail"].str.startswith("no").all()
    assert table.loc["a batch larger than the buffers"].str.startswith("no").all()
    assert table.loc["a position past the model length"].str.startswith("no").all()
    assert table.loc["a drafted token in a second block"].tolist()[0].startswith("no")


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


@pytest.mark.parametrize("call", [lambda: arms.control("x", "graphs"), lambda: arms.chain("x")])
def test_unknown_cells_and_links_are_refused(call):
    with pytest.raises(BadInputError):
        call()


@pytest.mark.parametrize("link", [link for link in arms.LINKS if link != "before"])
def test_each_link_alone_ends_the_illegal_address(link):
    effect = arms.chain(link, transitions=15)["effect"]
    assert effect == ("clean" if link in ("counts-on-device", "after") else "corruption")


def test_graph_and_lookup_replays_of_after_are_clean_on_the_simulator():
    assert arms.graph_replays("after", 3, device="sim", requests=4)["faults"] == 0
    assert arms.lookup_replays("after", 5, device="sim")["faults"] == 0


def test_lookup_replays_of_before_leave_stale_outputs():
    assert arms.lookup_replays("before", 5, device="sim")["faults"] > 0


def test_device_info_names_the_simulator():
    assert study.device_info("sim").kind == "sim"
