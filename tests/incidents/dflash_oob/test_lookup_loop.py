import pytest

from specmortem import device
from specmortem.detect import bounds
from specmortem.incidents.dflash_oob import arms as dflash_oob
from specmortem.incidents.dflash_oob.lookup_loop import LookupLoop, LoopConfig

pytestmark = pytest.mark.usefixtures("interpreted")


def run(schedule="timed", transitions=25, **changes):
    loop = LookupLoop(device.open("sim", schedule=schedule, seed=0), LoopConfig(layers=40, **changes), seed=0)
    with bounds.watch(perform_mapped=True) as watch:
        loop.warm_up()
        for _ in range(transitions):
            loop.transition()
    return loop.tally, [r for r in watch.reports if not r.mapped]


def test_chain_reaches_a_wild_address_with_graphs_and_row_moves():
    tally, wild = run()
    assert tally.wrong_counts > 0 and tally.zero_counts > 0 and tally.nan_rows > 0
    assert wild[0].tensor == "states" and wild[0].kernel == "gated_delta_before"


@pytest.mark.parametrize(
    "control", [{"schedule": "immediate"}, {"graphs": False}, {"one_request": True}, {"speculative": False}]
)
def test_chain_does_not_start_under_a_control(control):
    tally, wild = run(transitions=12, **control)
    assert (tally.transitions, tally.wrong_counts, wild) == (12, 0, [])


def test_counts_kept_on_the_device_stop_the_chain_at_its_first_link():
    tally, wild = run(counts="device")
    assert tally.wrong_counts == 0 and tally.nan_rows == 0 and wild == []


def test_ids_kept_in_the_vocabulary_stop_it_at_the_second():
    tally, wild = run(recovered="after")
    assert tally.wrong_counts > 0 and tally.nan_rows > 0 and tally.zero_counts == 0 and wild == []


def test_a_bounded_lookup_stops_it_at_the_third():
    tally, wild = run(lookup="after")
    assert tally.zero_counts > 0 and wild == []


def test_another_word_before_the_row_makes_the_same_fault_silent():
    tally, wild = run(canary=0)
    assert tally.zero_counts > 0 and wild == []


@pytest.mark.parametrize("control", dflash_oob.CONTROLS)
def test_chain_matches_the_reported_pattern_cell_by_cell(control):
    cell = dflash_oob.control("count-to-lookup-chain", control, transitions=25)
    assert cell["effect"] == dflash_oob.REPORTED[control]


@pytest.mark.parametrize(
    ("candidate", "control", "effect"),
    [
        ("input-kernel", "eager", "illegal-address"),
        ("stale-graph-tail", "graphs", "clean"),
        ("stale-graph-tail-k3", "launch-blocking", "corruption"),
        ("stale-graph-tail-k3", "eager", "clean"),
        ("stale-block-id", "eager", "corruption"),
        ("stale-block-id", "one-request", "clean"),
        ("gdn-lookup", "launch-blocking", "illegal-address"),
    ],
)
def test_other_candidates_do_not_match(candidate, control, effect):
    assert dflash_oob.control(candidate, control)["effect"] == effect


def test_after_is_clean_under_every_schedule_and_before_under_some():
    before, after = dflash_oob.schedules("before"), dflash_oob.schedules("after")
    assert before["schedules"] == after["schedules"] > 20
    assert 0 < before["faults"] < before["schedules"] and after["faults"] == 0


def test_waiting_for_the_copy_leaves_fewer_schedules_and_the_same_fault():
    before, after = dflash_oob.schedules("before", guarded=True), dflash_oob.schedules("after", guarded=True)
    assert before["schedules"] < dflash_oob.schedules("before")["schedules"]
    assert before["faults"] == before["schedules"] and after["faults"] == 0


@pytest.mark.parametrize("candidate", dflash_oob.CANDIDATES)
def test_without_dflash_the_target_loop_runs_and_is_clean(candidate):
    cell = dflash_oob.control(candidate, "no-dflash", transitions=3)
    assert (cell["effect"], cell["transitions"]) == ("clean", 3)
