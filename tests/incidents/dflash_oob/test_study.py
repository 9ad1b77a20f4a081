import json
from pathlib import Path

import pytest

from specmortem import study
from specmortem.errors import BadInputError
from specmortem.incidents.dflash_oob import arms
from specmortem.incidents.dflash_oob import study as dflash_study
from specmortem.isolation import Arm, ArmResult
from specmortem.tools.engine import arms as engine_arms
from specmortem.tools.engine import report as engines

pytestmark = pytest.mark.usefixtures("interpreted")
DATA = Path(__file__).parents[3] / "data"
ARM = Arm("specmortem.incidents.dflash_oob.arms:control", {"arm": "before"})


def control_rows(effects):
    return [
        study.row(
            ArmResult(ARM, "value", {"effect": effects.get((c, k), "clean"), "why": ""}),
            dflash_study.CAUSE_OF[c],
            dflash_study._arm_name(c, k),
            "before",
            0,
        )
        for c, k in arms.CELLS
    ]


def test_a_candidate_with_the_reported_pattern_is_consistent_and_others_are_refuted():
    effects = {
        ("count-to-lookup-chain", "graphs"): "illegal-address",
        ("input-kernel", "eager"): "illegal-address",
    }
    table = dflash_study.control_table(control_rows(effects))
    assert table.loc["count-to-lookup-chain", "verdict"] == "consistent"
    assert set(table["verdict"].drop(["count-to-lookup-chain", "reported"])) == {"refuted"}
    assert list(table.index) == [*arms.CANDIDATES, "reported"]


def test_silent_corruption_under_graphs_is_not_the_reported_crash():
    table = dflash_study.control_table(control_rows({("gdn-lookup", "graphs"): "corruption"}))
    assert table.loc["gdn-lookup", "verdict"] == "refuted"


def test_crash_numbers_rule_out_padding_size_and_length():
    table = dflash_study.crash_table(json.loads((DATA / "dflash-oob-crashes.json").read_text()))
    assert table.loc["a padded graph's tail"].str.startswith("no").all()
    assert table.loc["a batch larger than the buffers"].str.startswith("no").all()
    assert table.loc["a position past the model length"].str.startswith("no").all()
    assert table.loc["a drafted token in a second block"].tolist()[0].startswith("no")


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


def test_the_committed_whole_engines_are_what_the_notebook_says_of_them():
    found = engines.committed(DATA.parent / "investigations" / "dflash-oob")
    of = {arm.name: arm for arm in found.arms}
    assert list(of) == ["graphs", "eager", "launch-blocking", "plain"]
    assert all([run.outcome for run in arm.runs] == ["whole"] * 8 for arm in found.arms)
    assert set(engines.arms_table(found)["faults"]) == {"0 / 8 (below 31%)"}
    ends = {name: [start.kind for start in arm.starts] for name, arm in of.items() if len(arm.starts) > 1}
    assert ends == {"graphs": ["python-error", "value"], "plain": ["interrupted", "value"]}
    planned = engine_arms.load("dflash-oob")
    assert planned.runs == 20 and {arm.name for arm in planned.arms} - set(of) == {"no-async", "greedy"}
    assert "--runs 8" in found.command
