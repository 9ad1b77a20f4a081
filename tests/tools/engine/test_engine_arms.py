"""Arms differ in one variable where they are compared, and say what is wrong with their file."""

from __future__ import annotations

import copy
import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tools.engine.engine_helpers import make, tables

from specmortem.errors import BadInputError, UnavailableError
from specmortem.incidents.mtp_draft_loop import layouts as mtp_layouts
from specmortem.incidents.mtp_draft_loop.kernels import Planner
from specmortem.tools.engine import arms, child
from specmortem.tools.engine.workload import SHAPES, RandomTokens, RecallPrompts, Workload, plan

COMMITTED = arms.with_arms()


def test_three_incidents_have_arms():
    assert COMMITTED == ["async-accepted-counts", "dflash-oob", "mtp-draft-loop"]


@pytest.mark.parametrize("slug", COMMITTED)
def test_committed_pairs_differ_in_exactly_one_variable(slug):
    found = arms.load(slug)
    assert found.incident == slug
    assert found.runs >= 5 and len(found.pairs) >= 3
    for pair in found.pairs:
        assert arms.differences(found.arm(pair.left), found.arm(pair.right)) == [pair.variable]


@pytest.mark.parametrize("slug", COMMITTED)
def test_committed_arms_are_compared_with_the_same_engine_without_speculation(slug):
    found = arms.load(slug)
    for arm in found.arms:
        if arm.reference:
            plain = found.arm(arm.reference)
            assert "speculative_config" not in plain.engine
            assert arms.differences(arm, plain) == ["engine.speculative_config"]


@pytest.mark.parametrize("slug", COMMITTED)
def test_committed_workloads_fit_the_engine(slug):
    for arm in arms.load(slug).arms:
        assert arm.workload.longest <= arm.engine["max_model_len"]


def test_the_layouts_of_mtp_draft_loop_still_fault_by_the_planner():
    from specmortem.incidents.mtp_draft_loop import layouts as mtp_layouts
    from specmortem.incidents.mtp_draft_loop.kernels import Geometry, Planner

    found = arms.load("mtp-draft-loop")
    arm, config = found.arm("before"), found.model.config
    geometry = Geometry(
        132,
        config["num_attention_heads"],
        config["num_key_value_heads"],
        config["head_dim"],
        arm.engine["block_size"],
    )
    rows, drafts = mtp_layouts.first_row_outside(geometry), 5
    for lengths in arm.workload.prompt_lengths:
        plans = [Planner(geometry).plan([n + i for n in lengths]) for i in range(drafts)]
        for later in range(2, drafts):
            assert mtp_layouts.consequence(plans[1], mtp_layouts.overwritten(plans, 1, later), rows) == "read"
        assert sum(lengths) <= arm.engine["max_num_batched_tokens"], "all prompts end in one step"
        assert len(lengths) <= arm.engine["max_num_seqs"]


def test_two_variables_in_a_pair_are_refused():
    data = tables(other={"at": 1})
    data["arms"][-1]["set"]["engine.max_num_seqs"] = 2
    with pytest.raises(
        BadInputError, match=r"sound and other differ in engine.max_num_seqs, env.FAKE_VLLM; compared"
    ):
        arms.parse(data)


def test_a_pair_without_a_difference_is_refused():
    with pytest.raises(BadInputError, match="differ in nothing"):
        arms.parse(tables(other={}))


def test_a_reference_that_differs_in_something_else_is_refused():
    data = tables()
    data["arms"] += [
        {"name": "other", "reference": "plain", "set": {"engine.max_num_seqs": 2}},
    ]
    with pytest.raises(BadInputError, match="differ in engine.max_num_seqs, engine.speculative_config"):
        arms.parse(data)
    data["arms"][-1] = {"name": "other", "reference": "sound", "set": {"engine.max_num_seqs": 2}}
    with pytest.raises(BadInputError, match="its reference sound differs in engine.max_num_seqs, not in"):
        arms.parse(data)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda d: d.update(extra=1), "no key 'extra'"),
        (lambda d: d.pop("question"), "question is missing"),
        (lambda d: d.update(runs=4), "runs = 4; an arm needs at least 5"),
        (lambda d: d["model"].update(path="data"), r"give either path, a directory, or config"),
        (lambda d: d["model"].update(colour=1), r"\[model\]: .*colour"),
        (lambda d: d.update(runs="5"), "runs = '5'; give a whole number"),
        (lambda d: d.update(runs=True), "runs = True; give a whole number"),
        (lambda d: d.update(runs=5.5), "runs = 5.5; give a whole number"),
        (lambda d: d.update(seed="x"), "seed = 'x'; give a whole number"),
        (lambda d: d.update(notes="x"), "notes = 'x'; give a list"),
        (lambda d: d.update(question=3), "question = 3; give text"),
        (lambda d: d.update(run_timeout_s="x"), "run_timeout_s = 'x'; give a number"),
        (lambda d: d.update(run_timeout_s=0), "run_timeout_s = 0; give a number of seconds above 0"),
        (lambda d: d.update(start_timeout_s=float("inf")), "start_timeout_s = inf; give a number of seconds"),
        (lambda d: d.update(start_timeout_s=float("nan")), "start_timeout_s = nan; give a number of seconds"),
        (lambda d: d.update(workloads=[1]), r"workloads = \[1\]; give a table"),
        (lambda d: d.update(workloads={"a": 1}), r"\[workloads.a\] holds 1; give a table"),
        (lambda d: d.update(arms=[1]), r"\[\[arms\]\] holds 1; give a table"),
        (lambda d: d.update(arms={"a": 1}), "arms = .*; give a list"),
        (lambda d: d.update(pairs=[1]), r"\[\[pairs\]\] holds 1; give a table"),
        (lambda d: d.update(base=[1]), r"base = \[1\]; give a table"),
        (lambda d: d.update(model=[1]), r"model = \[1\]; give a table"),
        (lambda d: d["model"].update(config=[1]), r"\[model\]: config = \[1\]; give a table"),
        (lambda d: d.update(model={"path": 3}), r"\[model\]: path = 3; give text"),
        (lambda d: d["model"].update(tasks=3), r"\[model\]: tasks = 3; give text"),
        (lambda d: d["model"].update(vocab="x"), r"\[model\]: vocab = 'x'; give a whole number"),
        (lambda d: d["base"].update(engine=[1]), r"\[base\]: engine = \[1\]; give a table"),
        (lambda d: d["base"].update(env=[1]), r"\[base\]: env = \[1\]; give a table"),
        (lambda d: d["base"].update(workload=[1]), r"\[base\]: workload = \[1\]; give text"),
        (lambda d: d["arms"].append({"name": 3}), "name = 3; give text"),
        (lambda d: d["arms"].append({"name": "x", "set": 3}), "arm x: set = 3; give a table"),
        (lambda d: d["arms"].append({"name": "x", "set": {"engine": 3}}), "arm x: engine = 3; give a table"),
        (lambda d: d["arms"].append({"name": "x", "set": {"workload": [1]}}), r"no workload \[1\]"),
        (lambda d: d["arms"].append({"name": "x", "without": "vllm"}), "without = 'vllm'; give a list"),
        (lambda d: d["arms"].append({"name": "x", "reference": 3}), "arm x: reference = 3; give text"),
        (lambda d: d["pairs"].append({"left": 3, "right": "x"}), r"\[\[pairs\]\]: left = 3; give text"),
        (lambda d: d["base"]["engine"].update(max_model_len="x"), "max_model_len = 'x'; give a whole"),
        (lambda d: d["workloads"]["small"].update(shape=[1]), "workload small: "),
        (lambda d: d["workloads"]["small"].update(requests="x"), "requests = 'x' is of the wrong kind"),
        (lambda d: d["workloads"]["small"].update(temperature="x"), "temperature = 'x' is of the wrong"),
        (lambda d: d["workloads"]["small"].update(ignore_eos=1), "ignore_eos = 1 is of the wrong kind"),
        (lambda d: d["workloads"]["small"].update(concurrency=4), "concurrency = 4 is of the wrong kind"),
        (lambda d: d["workloads"]["small"].update(concurrency=[1.5]), "are whole numbers"),
        (lambda d: d["workloads"]["small"].update(prompt_tokens=[1.5, 2]), "are whole numbers"),
        (lambda d: d["workloads"]["small"].update(prompt_tokens=["a", "b"]), "workload small: "),
        (lambda d: d["workloads"]["small"].update(prompt_lengths=[1]), "workload small: "),
        (lambda d: d["base"].update(vllm="latest"), "vllm = 'latest'; give a release"),
        (lambda d: d["base"].update(gpu=1), r"\[base\]: no key 'gpu'"),
        (lambda d: d["base"].update(workload="big"), "no workload 'big'; known: small"),
        (lambda d: d["arms"].append({"name": "sound"}), "arm 'sound' is there twice"),
        (lambda d: d["arms"].append({"name": "A B"}), "arm 'A B': a name is of"),
        (lambda d: d["arms"].append({"name": "x", "note": 1}), "arm x: no key 'note'"),
        (
            lambda d: d["arms"].append({"name": "x", "without": ["engine.nothing"]}),
            "the base has no such key",
        ),
        (lambda d: d["arms"].append({"name": "x", "set": {"vllm.a": 1}}), "vllm is not a table"),
        (
            lambda d: d["pairs"].append({"left": "sound", "right": "none"}),
            "no arm 'none'; known: sound, plain",
        ),
        (lambda d: d["pairs"].append({"left": "sound", "middle": "x"}), r"\[\[pairs\]\]: no key 'middle'"),
        (
            lambda d: d["base"]["engine"].update(max_model_len=30),
            "up to 44 tokens do not fit max_model_len = 30",
        ),
        (lambda d: d["workloads"]["small"].update(shape="tall"), "no shape 'tall'"),
        (lambda d: d["workloads"]["small"].update(colour=1), "no field 'colour'"),
        (lambda d: d["workloads"]["small"].update(max_tokens=[9, 3]), "max_tokens 9 to 3"),
        (lambda d: d["workloads"]["small"].update(concurrency=[0]), "concurrency must lie between"),
        (lambda d: d["workloads"]["small"].update(abort_share=2), "abort_share lies in 0 to 1"),
        (lambda d: d["workloads"]["small"].update(gpu_delay_us=[1, 1], gpu_delay_steps=[1, 1]), "not both"),
        (lambda d: d["workloads"]["small"].update(prompt_tokens=7), "workload small: "),
        (lambda d: d["workloads"]["small"].update(draft_delay_us=[2, 1]), "draft_delay_us 2 to 1; expected"),
        (
            lambda d: d["workloads"]["small"].update(draft_delay_us=[-1, 1]),
            "draft_delay_us -1 to 1; expected",
        ),
        (lambda d: d["workloads"]["small"].update(draft_delay_us=[1]), "workload small: "),
        (lambda d: d["workloads"]["small"].update(draft_delay_us=["a", "b"]), "workload small: "),
    ],
)
def test_what_does_not_fit_is_named(change, said):
    data = copy.deepcopy(tables())
    change(data)
    with pytest.raises(BadInputError, match=said):
        arms.parse(data)


def delayed(**engine):
    data = tables()
    data["arms"] = data["arms"][:1]
    data["base"]["engine"] |= {"enforce_eager": True, **engine}
    data["workloads"]["small"]["draft_delay_us"] = [3000, 3000.5]
    return data


def test_idle_work_in_front_of_draft_passes_is_told_to_the_child():
    found = arms.parse(delayed())
    work = found.arm("sound").workload
    assert work.draft_delay_us == (3000, 3000.5)
    assert plan(work, RandomTokens(64), 0, 0)[0]["draft_delay_us"] == [3000, 3000.5]
    assert found.arm("sound").config()["workload"]["draft_delay_us"] == [3000, 3000.5]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda e: e.update(enforce_eager=False), "that are Python calls; set engine.enforce_eager = true"),
        (lambda e: e.pop("enforce_eager"), "that are Python calls; set engine.enforce_eager = true"),
        (
            lambda e: e.update(speculative_config={"method": "mtp", "enforce_eager": False}),
            "that are Python calls; set engine.enforce_eager = true",
        ),
        (lambda e: e.pop("speculative_config"), "needs draft passes; set engine.speculative_config"),
        (
            lambda e: e.update(speculative_config={"method": "ngram"}),
            "a model that drafts; method ngram has none",
        ),
    ],
)
def test_idle_work_in_front_of_draft_passes_that_there_are_not_is_refused(change, said):
    data = delayed()
    change(data["base"]["engine"])
    with pytest.raises(BadInputError, match=f"arm sound: workload.draft_delay_us .*{said}.*, or give"):
        arms.parse(data)
    data["workloads"]["small"]["draft_delay_us"] = [0, 0]
    assert arms.parse(data).arm("sound").workload.draft_delay_us == (0, 0)


def test_a_workload_without_it_reads_as_results_that_are_older():
    older = SHAPES["churn"].as_dict()
    assert "draft_delay_us" not in older and "gpu_delay_us" in older
    assert Workload.from_dict(older) == SHAPES["churn"]


def test_arms_that_force_flashinfer_name_it_for_the_drafter_too():
    """Since vLLM 0.21.0 the drafter does not take the target's."""
    backends = {
        arm.name: (arm.engine["attention_backend"], arm.engine["speculative_config"]["attention_backend"])
        for arm in arms.load("mtp-draft-loop").arms
    }
    assert backends.pop("draft-flash-attention") == ("FLASHINFER", "FLASH_ATTN")
    assert set(backends.values()) == {("FLASHINFER", "FLASHINFER")}


@pytest.mark.parametrize(
    ("name", "step", "worst"),
    [("layouts", 1, {"read"}), ("layouts", 2, {"clean", "wrong-plan"}), ("by-two", 2, {"read"})],
)
def test_layouts_of_mtp_draft_loop_read_outside_where_lengths_grow_as_they_were_searched_for(
    name, step, worst
):
    """Whatever later plan the second draft pass meets; by two, those searched for one a pass stay inside memory."""
    geometry = replace(mtp_layouts.H200, page_size=64)
    planner, rows = Planner(geometry), mtp_layouts.first_row_outside(geometry)
    found = {arm.workload.name: arm.workload for arm in arms.load("mtp-draft-loop").arms}[name]
    seen = set()
    for lens in found.prompt_lengths:
        plans = [planner.plan([n + step * i for n in lens]) for i in range(5)]
        pairs = [(r, w) for r in range(1, 5) for w in range(r + 1, 5)]
        of = {
            (r, w): mtp_layouts.consequence(plans[r], mtp_layouts.overwritten(plans, r, w), rows)
            for r, w in pairs
        }
        seen |= {of[1, w] for w in (2, 3, 4)} if worst == {"read"} else set(of.values())
    assert seen == worst


def test_a_patch_is_one_variable_and_one_that_there_is():
    data = tables(after={})
    data["arms"][-1]["set"] = {"patch": "build-event"}
    found = arms.parse(data)
    assert [pair.variable for pair in found.pairs] == ["patch"]
    assert (
        found.arm("after").config()["patch"] == "build-event" and "patch" not in found.arm("sound").config()
    )
    data["arms"][-1]["set"] = {"patch": "build-events"}
    with pytest.raises(BadInputError, match=r"arm after: no patch 'build-events'; known: build-event$"):
        arms.parse(data)
    data["arms"][-1]["set"] = {"patch": 1}
    with pytest.raises(BadInputError, match="arm after: patch = 1; give text"):
        arms.parse(data)


def test_the_patches_of_arms_are_those_of_the_child():
    assert tuple(child.PATCHES) == arms.PATCHES


def test_only_one_arm_of_mtp_draft_loop_has_draft_passes_without_idle_work():
    delays = {arm.name: arm.workload.draft_delay_us for arm in arms.load("mtp-draft-loop").arms}
    assert delays.pop("no-added-delay") == (0, 0)
    assert len(set(delays.values())) == 1 and min(delays["before"]) > 0


def test_a_reference_for_sampled_answers_is_refused():
    data = tables()
    data["workloads"]["small"]["temperature"] = 0.7
    data["arms"][0]["reference"] = "plain"
    with pytest.raises(BadInputError, match="arm sound: sampled answers cannot be compared"):
        arms.parse(data)


@pytest.mark.parametrize("slug", COMMITTED)
def test_committed_arms_keep_what_the_autotuner_has_timed(slug):
    assert {arm.env["TRITON_CACHE_AUTOTUNING"] for arm in arms.load(slug).arms} == {"1"}


def test_committed_arms_that_force_flashinfer_do_not_autotune_it():
    for arm in arms.load("mtp-draft-loop").arms:
        assert arm.engine["enable_flashinfer_autotune"] is False


def test_a_file_is_named_in_its_error(tmp_path):
    file = tmp_path / "engine.toml"
    file.write_text("incident = 'x'\n")
    with pytest.raises(BadInputError, match=r"engine\.toml: question is missing"):
        arms.load(str(file))
    file.write_text("incident = \n")
    with pytest.raises(BadInputError, match="is not TOML"):
        arms.load(str(file))
    with pytest.raises(UnavailableError, match="incidents with engines: async-accepted-counts"):
        arms.load("pp-align-copy")


def test_a_model_with_random_weights_is_written_where_the_engine_finds_it(tmp_path):
    found = arms.parse(tables())
    folder = found.model.folder(tmp_path, tmp_path / "scratch")
    assert json.loads((folder / "config.json").read_text()) == {"vocab_size": 256, "eos_token_id": 2}


def test_a_model_that_is_not_there_is_named(tmp_path):
    with pytest.raises(UnavailableError, match="no model in data/none"):
        arms.ServedModel(path="data/none").folder(tmp_path, tmp_path)


def test_tasks_that_cannot_be_had_are_named():
    with pytest.raises(BadInputError, match=r"\[model\] tasks = 'nowhere:tasks'"):
        arms.ServedModel(path="x", tasks="nowhere:tasks").source()


RANGES = st.tuples(st.integers(1, 40), st.integers(0, 40)).map(lambda pair: (pair[0], sum(pair)))
WORKLOADS = st.builds(
    Workload,
    name=st.just("w"),
    source=st.just("a test"),
    concurrency=st.lists(st.integers(1, 6), min_size=1, max_size=3).map(tuple),
    prompt_tokens=RANGES,
    max_tokens=RANGES,
    requests=st.integers(0, 9),
    every=st.integers(0, 3),
    abort_share=st.floats(0, 1),
    abort_after=RANGES,
    shared_prompt=st.booleans(),
    draft_delay_us=st.sampled_from([(0.0, 0.0), (0.0, 10.0), (3000.0, 3000.0)]),
)


@given(WORKLOADS, st.integers(0, 5), st.sampled_from([RecallPrompts(make), RandomTokens(64)]))
def test_a_plan_holds_what_the_workload_says(workload, number, source):
    told, answers = plan(workload, source, 7, number)
    again, _ = plan(workload, source, 7, number)
    assert told == again
    requests = [request for part in told["rounds"] for request in part["requests"]]
    assert [part["concurrency"] for part in told["rounds"]] == list(workload.concurrency)
    assert len(requests) == workload.total == len(answers) == len({r["id"] for r in requests})
    low, high = workload.prompt_tokens
    for request in requests:
        assert low <= len(request["prompt"]) <= high
        assert workload.max_tokens[0] <= request["max_tokens"] <= workload.max_tokens[1]
        assert len(request["prompt"]) + request["max_tokens"] <= workload.longest
        answer = answers[request["id"]]
        assert answer is None if isinstance(source, RandomTokens) else len(answer) == request["max_tokens"]
    if workload.shared_prompt:
        assert all(len({tuple(r["prompt"]) for r in part["requests"]}) == 1 for part in told["rounds"])
    assert Workload.from_dict(json.loads(json.dumps(workload.as_dict()))) == workload


def test_another_seed_and_another_run_ask_for_something_else():
    workload = SHAPES["churn"]
    plans = [
        plan(workload, RecallPrompts(make), seed, number)[0] for seed, number in ((1, 0), (1, 1), (2, 0))
    ]
    prompts = [json.dumps(each["rounds"]) for each in plans]
    assert len(set(prompts)) == 3


def test_given_lengths_are_those_of_the_prompts():
    workload = Workload("w", "a test", (2, 3, 2), (1, 1), (4, 4), prompt_lengths=((30, 40), (10, 20, 50)))
    told, _ = plan(workload, RandomTokens(64), 0, 0)
    lengths = [[len(request["prompt"]) for request in part["requests"]] for part in told["rounds"]]
    assert lengths == [[30, 40], [10, 20, 50], [30, 40]]
    assert workload.longest == 54 and workload.total == 7


def test_every_shape_names_its_report():
    assert {shape.source.partition(":")[0].split(" ")[0] for shape in SHAPES.values()} == {
        "vllm#42603",
        "z-lab/dflash#146",
        "vllm#55951",
        "vllm#45100",
        "vllm#40756",
    }


def test_recall_prompts_come_with_their_answers():
    from specmortem.tools.engine import tasks

    workload = SHAPES["churn"]
    told, answers = plan(workload, RecallPrompts(tasks.tasks), 3, 0)
    first = told["rounds"][0]["requests"][0]
    assert first["prompt"][0] == tasks.BOS
    assert len(answers[first["id"]]) == first["max_tokens"]
