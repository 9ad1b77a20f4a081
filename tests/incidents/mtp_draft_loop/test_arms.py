import dataclasses
import json

import numpy as np
import pytest
import torch

from specmortem import device
from specmortem.errors import BadInputError
from specmortem.incidents.mtp_draft_loop import arms as loop
from specmortem.incidents.mtp_draft_loop import hypotheses, layouts
from specmortem.incidents.mtp_draft_loop.controls import FIXED
from specmortem.incidents.mtp_draft_loop.kernels import Planner
from specmortem.isolation import Arm, run_arms

pytestmark = pytest.mark.usefixtures("interpreted")
FAST = ("event", "fresh", "pageable", "reread-lengths", "stream-sync", "launch-blocking")


# Layouts


@pytest.mark.parametrize(
    ("geometry", "lens", "chunks", "consequence", "seen"),
    [
        (
            "rtx5090",
            [8859, 8736, 7224, 9301],
            [84, 85],
            "read",
            {
                "merge_indptr": [22, 22, 43, 61, 0],
                "o_indptr": [14, 15, 16, 17, 18],
                "kv_chunk_size": [19],
            },
        ),
        (
            "h200",
            list(layouts.WORKED_EXAMPLE),
            [64, 65],
            "read",
            {
                "merge_indptr": [15, 14, 39, 48, 0],
                "o_indptr": [7, 8, 9, 10, 11],
                "kv_chunk_size": [12],
            },
        ),
        ("h200", [25344], [66, 64], "write", {"o_indptr": [16843009, 16843009]}),
    ],
)
def test_worked_examples(geometry, lens, chunks, consequence, seen):
    found = layouts.example(geometry, lens)
    assert (found["chunks"], found["consequence"]) == (chunks, consequence)
    assert {name: found["seen"][name] for name in seen} == seen


def test_the_public_row_is_the_first_that_does_not_fit_the_default_workspace():
    assert layouts.first_row_outside(layouts.RTX_5090) == 33_621
    assert layouts.RTX_5090.max_chunks == 85 and layouts.H200.max_chunks == 66


def test_at_170_sms_more_fault_at_16_requests_than_at_4_and_than_at_3():
    rows = {row["batch"]: row for row in layouts.growth()["rows"]}
    assert rows[1]["read"] == rows[2]["read"] == 0
    assert rows[3]["read_rate"] < rows[4]["read_rate"] < rows[16]["read_rate"]
    assert layouts.search(batch=16, trials=40_000)["read_rate"] == pytest.approx(0.013, abs=0.002)


def test_132_sms_fault_from_three_requests_on():
    rows = {row["batch"]: row for row in layouts.growth("h200")["rows"]}
    assert rows[1]["read"] == rows[2]["read"] == 0
    assert all(rows[batch]["read"] > 0 for batch in (3, 4, 6, 12, 16, 24, 32, 48))


def test_one_long_request_can_store_outside():
    found = layouts.search(batch=1, low=20_000, high=60_000)
    assert found["read"] == 0 and found["write"] > 0
    plans = [Planner(layouts.RTX_5090).plan([found["witness"]["write"][0] + i]) for i in (0, 1)]
    assert layouts.consequence(plans[0], layouts.overwritten(plans, 0, 1), 33_621) == "write"


def test_all_chunk_counts_at_once_equal_the_planner():
    lens = np.random.default_rng(0).integers(1, 20_000, size=(60, 7))
    for geometry in layouts.GEOMETRIES.values():
        planner = Planner(geometry)
        expected = [planner.plan(row).num_chunks for row in lens]
        assert layouts.total_chunks(geometry, lens).tolist() == expected


class Seen:
    """A plan of which a request reads these indices, whatever is in the block."""

    split, arrays = True, {"merge_indptr": np.zeros(5, np.int32)}

    def __init__(self, indptr):
        self.indptr = np.array(indptr, dtype=np.int32)

    def seen_in(self, block):
        return {"merge_indptr": self.indptr}

    def is_in(self, block):
        return False


@pytest.mark.parametrize(("descent", "found"), [(1, ""), (3, ""), (4, "read"), (48, "read")])
def test_a_descent_within_the_rounding_of_the_merge_merges_nothing(descent, found, monkeypatch):
    monkeypatch.setattr(layouts, "_stores_outside", lambda *_: False)
    plan = Seen([0, 5, 5, 5 + 48, 53 - descent])
    assert layouts.consequence(plan, np.zeros(16, np.uint8), 33_621) == (found or "wrong-plan")


def test_plans_padded_to_one_size_never_leave_memory():
    own = Planner(dataclasses.replace(layouts.H200, constant=True))
    plans = [own.plan([length + more for length in layouts.WORKED_EXAMPLE]) for more in (0, 1)]
    assert plans[0].offsets == plans[1].offsets
    assert layouts.consequence(plans[0], layouts.overwritten(plans, 0, 1), 33_621) == "wrong-plan"


def test_a_plan_in_its_own_block_is_clean():
    plan = Planner(layouts.H200).plan([5000, 6000])
    assert layouts.consequence(plan, plan.image, 1000) == "clean"


@pytest.mark.parametrize("kind", ["read", "write", "benign", "page"])
def test_a_found_layout_has_what_was_asked_for(kind):
    batch, low, high = (1, 20_000, 60_000) if kind == "write" else (4, 4000, 12_000)
    lens = layouts.find_layout(layouts.H200, batch, low, high, kind=kind, rows=33_621)
    plans = [Planner(layouts.H200).plan([n + i for n in lens]) for i in range(6)]
    consequences = {
        layouts.consequence(plans[2], layouts.overwritten(plans, 2, m), 33_621) for m in (3, 4, 5)
    }
    assert consequences == {kind if kind in ("read", "write") else "clean"}
    assert (plans[2].page_counts == plans[5].page_counts) == (kind == "benign")


def test_a_layout_is_found_for_lengths_that_grow_by_two():
    lens = layouts.find_layout(layouts.H200, 4, 4000, 12_000, first=1, last=4, rows=33_621, step=2)
    plans = [Planner(layouts.H200).plan([n + 2 * i for n in lens]) for i in range(5)]
    told = {layouts.consequence(plans[1], layouts.overwritten(plans, 1, m), 33_621) for m in (2, 3, 4)}
    assert told == {"read"}


# The loop under schedules


def test_the_contract_on_the_simulator():
    asked = [("before", {"k": k}) for k in range(1, 6)] + [(arm, {"k": 5}) for arm in FAST]
    asked += [("no-page-kernel", {"k": k}) for k in (3, 4)]
    ended = run_arms(
        [
            Arm("specmortem.incidents.mtp_draft_loop.arms:schedules", {"arm": arm, **more}, timeout_s=120)
            for arm, more in asked
        ]
    )
    found = {(end.value["arm"], end.value["k"]): end.value for end in ended}
    faults = {key: (value["faults"], value["schedules"]) for key, value in found.items()}
    assert [faults["before", k] for k in range(1, 6)] == [(0, 1), (0, 1), (1, 2), (3, 5), (9, 13)]
    assert [faults["no-page-kernel", k] for k in (3, 4)] == [(0, 1), (1, 2)]
    assert all(found[arm, 5]["effects"] == {"clean": found[arm, 5]["schedules"]} for arm in FAST)
    assert set(FIXED) <= set(FAST)


def test_waiting_for_another_stream_helps_nothing():
    assert loop.schedules("wrong-stream-sync", k=4)["faults"] == loop.schedules("before", k=4)["faults"] == 3


def test_a_constant_plan_is_read_wrong_without_leaving_memory():
    found = loop.schedules("constant-plan", k=4)
    assert found["faults"] == 0 and found["effects"] == {"clean": 2, "wrong-plan": 3}


def test_without_speculative_metadata_three_tokens_are_enough():
    found = loop.schedules("before", k=3, metadata=False)
    assert (found["faults"], found["schedules"]) == (1, 2)
    assert loop.schedules("event", k=3, metadata=False)["effects"] == {"clean": 1}


def test_three_tokens_fault_when_the_page_ids_of_the_first_build_are_late():
    found = loop.schedules("before", k=3)
    assert found["effects"] == {"clean": 1, "illegal-address": 1}
    assert found["witness"]["illegal-address"]["read_plans"] == {"1": {"2": 1}}


def test_two_steps_of_two_drafts_are_safe_only_if_the_host_waits_between_them():
    free, waits = (loop.two_steps(target_waits) for target_waits in (False, True))
    assert free["effects"] == {"clean": 1, "illegal-address": 1} and waits["effects"] == {"clean": 1}
    assert "merge_kernel" in free["witness"]["illegal-address"]["why"] and waits["witness"] == {}


def test_a_model_replayed_from_graphs_races_as_the_eager_one():
    eager, graphs = (loop.schedules("before", k=3, graphs=graphs) for graphs in (False, True))
    assert graphs["graphs"] and graphs["effects"] == eager["effects"]


@pytest.mark.parametrize(("busy", "values"), [(False, {0}), (True, {0, 1})])
def test_prompt_runs_a_copy_into_an_idle_stream_and_leaves_one_behind_work(busy, values):
    def program(dev):
        target, buffer = dev.zeros([1], torch.int32), dev.host_buffer([1], torch.int32)
        if busy:
            dev.spin(5)
        dev.copy_async(target, buffer)
        buffer[0] = 1
        dev.synchronize()
        return int(target[0])

    found = device.enumerate_schedules(program, schedule=device.PromptCopies)
    assert {one.outcome for one in found} == values


# Steps


def test_steps_names_the_plan_that_was_read_instead():
    found = loop.steps("before", metadata=False, k=3)
    assert found["effect"] == "illegal-address" and "values[" in found["why"]
    assert found["read_plans"] == {"1": {"2": 1}}
    json.dumps(found)


@pytest.mark.parametrize("arm", ["event", "reread-lengths"])
def test_fixed_steps_are_equal_to_the_reference_bit_for_bit(arm):
    found = loop.steps(arm, k=3, steps=4, schedule="random", seed=1)
    assert (found["effect"], found["steps"], found["forwards"]) == ("clean", 4, 8)


def test_one_bit_of_one_output_is_a_mismatch():
    case = loop.case("event", k=2, layout="benign")
    right = loop.golden(device.open("sim", schedule="immediate"), case, 1)
    right[0].attention.view(torch.int32)[1, 0, 0] ^= 1
    found = loop.run(device.open("sim"), case, right)
    assert (found["effect"], found["mismatched_steps"]) == ("wrong-result", 1)


def test_launch_blocking_hides_it():
    assert loop.steps("launch-blocking", k=4)["effect"] == "clean"


def test_the_state_after_a_lost_race_faults_without_a_race():
    found, own = loop.overtaken(), loop.overtaken(later=0)
    assert found["effect"] == "illegal-address" and "merge_kernel" in found["why"]
    assert own == {"effect": "clean", "why": ""}


# The clock


def test_which_plans_race_is_as_derived():
    found = loop.k_split((1.2, 1.4, 1.6, 2.1))
    assert all(row["measured"] == row["derived"] for row in found["rows"])
    assert [found["threshold"][str(k)] for k in (1, 2, 3)] == [None] * 3
    assert [found["threshold"][str(k)] for k in (4, 5, 6)] == pytest.approx([2, 1.5, 4 / 3], abs=0.02)
    assert found["pages_threshold"] == pytest.approx(1, abs=0.02)


@pytest.mark.parametrize(
    ("pages", "pairs"), [(0.4, [(3, 4)]), (0.6, [(2, 3), (3, 4)]), (1.1, [(1, 2), (2, 3), (3, 4)])]
)
def test_page_ids_that_take_their_time_make_earlier_copies_late(pages, pairs):
    found = loop.overwrites(loop._timed_step(5, 1.0, True, pages=pages).trace)
    assert [(j, j + 1) for j, _ in found] == pairs == loop.derived_pairs(5, 1.0, pages=pages)


def test_timeline_marks_the_copies_that_carried_a_later_plan():
    before, event = loop.timeline("before"), loop.timeline("event")
    assert [copy["carried"] for copy in before["copies"]] == [1, 4, 4, 4]
    assert [copy["carried"] for copy in event["copies"]] == [1, 2, 3, 4]
    assert len(event["blocks"]) > len(before["blocks"])
    assert all(copy["start_us"] >= copy["issued_us"] for copy in before["copies"])
    assert [copy["carried"] for copy in loop.timeline("fresh")["copies"]] == [1, 2, 3, 4]


def test_a_price_is_the_median_of_the_ratios_of_single_rounds(monkeypatch):
    told = {
        "before": [9.0, 100.0, 200.0, 100.0],
        "event": [9.0, 101.0, 204.0, 103.0],
        "stream-sync": [9.0, 200.0, 250.0, 200.0],
    }
    times, turns = {arm: iter(found) for arm, found in told.items()}, []

    def turn(dev, one, steps, target_us):
        turns.append(one.case.arm.name)
        return next(times[one.case.arm.name])

    monkeypatch.setattr(loop, "_time", turn)
    rows = {row["arm"]: row for row in loop.price("sim", list(told), [2], steps=1, rounds=3)["rows"]}
    assert [row["step_us"] for row in rows.values()] == [100.0, 103.0, 200.0]
    assert rows["before"]["to_before"] == 1 and rows["before"]["to_before_95"] == [1, 1]
    assert rows["event"]["to_before"] == pytest.approx(1.02)
    assert rows["event"]["to_before_95"] == pytest.approx([1.01, 1.03])
    assert rows["before"]["to_stream-sync"] == 0.5
    rounds = [tuple(turns[n : n + 3]) for n in range(0, len(turns), 3)]
    assert all(set(each) == set(told) for each in rounds) and len(set(rounds)) > 1


@pytest.mark.parametrize(("count", "first"), [(1, 0), (5, 0), (6, 0), (8, 0), (9, 1), (15, 3), (31, 9)])
def test_the_interval_of_a_median_is_that_of_the_sign_test(count, first):
    values = [float(n) for n in range(count)]
    assert loop.median_interval(values[::-1]) == [first, count - 1 - first]


def test_a_step_that_is_priced_does_all_of_its_work():
    dev = device.open("sim", schedule="timed")
    one = loop.RepeatedDrafts(dev, loop.case("event", k=3, layout="benign", forward_us=500.0), [])
    assert loop._time(dev, one, 1, 2000.0) > 0
    spun = [
        record.end_us - record.start_us
        for record in dev.trace
        if record.what == "spin" and record.by == "queue"
    ]
    assert spun == [2000.0, 500.0, 500.0] and len(one.proposer.plans) == 2


# Hypotheses


@pytest.mark.parametrize("name", hypotheses.own_arms())
def test_each_hypothesis_is_refuted_by_its_rows(name):
    found = hypotheses.hypothesis(name)
    assert found["verdict"] == "refuted" and len(found["rows"]) >= 2
    json.dumps(found)


@pytest.mark.parametrize(
    "call",
    [
        lambda: loop.case("x"),
        lambda: loop.case("before", batch=2, lens=[300]),
        lambda: hypotheses.hypothesis("x"),
        lambda: layouts.search("x"),
        lambda: layouts.find_layout(layouts.SMALL, 1, 16, 20, rows=10, trials=5),
    ],
)
def test_bad_input_is_refused(call):
    with pytest.raises(BadInputError):
        call()
