"""The committed checkpoint knows its tasks, drafts well, and loses the thread with a wrong state."""

import json
from pathlib import Path

import pytest
import torch

from specmortem.errors import BadInputError
from specmortem.tools.engine import recall
from specmortem.tools.engine.tasks import RecallTask, stride_of, tasks
from specmortem.tools.engine.tiny_model import TinyConfig, TinyModel, load

CHECKPOINT = Path(__file__).parents[3] / "data" / "tiny-recall"
LIMIT = 8_000_000  # bytes, of all files together


@pytest.fixture(scope="module")
def model() -> TinyModel:
    pytest.importorskip("safetensors")
    return load(CHECKPOINT)


@pytest.fixture
def untrained() -> TinyModel:
    torch.manual_seed(0)
    return TinyModel(
        TinyConfig(hidden_size=32, head_dim=16, linear_key_head_dim=8, linear_value_head_dim=8)
    ).eval()


def test_the_checkpoint_is_small_and_says_how_it_was_made():
    assert sum(path.stat().st_size for path in CHECKPOINT.iterdir()) < LIMIT
    log = json.loads((CHECKPOINT / "training.json").read_text())
    assert log["steps_done"] == log["plan"]["steps"] + log["plan"]["stumble_steps"] and log["curve"]
    assert TinyConfig.from_json(json.loads((CHECKPOINT / "config.json").read_text())) == TinyConfig()
    rows = [row for row in log["held_out"]["prompts"].values() if "drafts_accepted" in row]
    assert len(rows) == len(recall.LENGTHS)
    worst = min(row["float32"]["token_accuracy"] for row in rows)
    assert worst > 0.99
    rates = [row["drafts_accepted"] for row in rows]
    assert min(rates) > 0.7 and max(rates) < 0.9


@pytest.mark.parametrize("length", [20, 60, 200])
def test_held_out_tasks_are_answered(model, length):
    result = recall.recall(model, tasks(8, -7, (length, length), 24))
    assert result.tokens == 8 * 24
    assert result.accuracy > 0.99


def test_the_answers_stay_right_in_half_precision():
    pytest.importorskip("safetensors")
    half = load(CHECKPOINT, torch.bfloat16)
    half.keep_state_in(torch.bfloat16)
    assert recall.recall(half, tasks(8, -7, (60, 60), 24)).accuracy > 0.98


def test_most_drafts_are_accepted_and_every_count_comes_up(model):
    result = recall.acceptance(model, tasks(6, -7, (60, 60), 48), 3)
    assert result.mismatches == 0 and result.proposed == 3 * sum(result.steps.values())
    assert 0.6 < result.rate < 0.95
    assert sorted(result.steps) == [0, 1, 2, 3]


@pytest.mark.parametrize("at", [8, -30], ids=["in the answer", "in the prompt"])
@pytest.mark.parametrize("name", [name for name in recall.CHANGES if name != "none"])
def test_a_wrong_state_breaks_the_answer(model, name, at):
    some = recall.alternating(8, -7, 60, 32)
    assert recall.after_change(model, some, at, recall.CHANGES["none"]).accuracy == 1
    after = recall.after_change(model, some, at, recall.CHANGES[name])
    if (name, at) == ("only its delta-rule part", 8):
        assert after.exact == after.tasks  # by then the stride is in the keys
    elif at < 0 and name in ("only its convolution part", "recurrent state one token old"):
        assert after.exact < after.tasks  # those whose walks come by the place of the change
    else:
        assert after.exact <= 1 and after.accuracy < 0.7


def test_neighbors_ask_for_other_strides():
    for count in (2, 3, 7, 8):
        strides = [stride_of(task.prompt) for task in recall.alternating(count, 0, 30, 4)]
        assert len(strides) == count
        assert all(strides[i] != strides[i - 1] for i in range(count))


def test_right_and_exact_are_counted(untrained):
    some = tasks(3, 0, (20, 20), 6)
    prompts = torch.tensor([task.prompt for task in some])
    said = recall.greedy(untrained, prompts, 6).tokens.tolist()
    twisted = [
        RecallTask(0, some[0].prompt, tuple(said[0])),
        RecallTask(1, some[1].prompt, (0, *said[1][1:])),
    ]
    result = recall.recall(untrained, twisted)
    assert (result.tasks, result.exact, result.tokens, result.right) == (2, 1, 12, 11)
    assert 0 <= result.least_margin <= result.first_percentile_margin


def test_tasks_of_several_lengths_are_refused(untrained):
    with pytest.raises(BadInputError, match="several lengths"):
        recall.recall(untrained, [*tasks(1, 0, (20, 20), 4), *tasks(1, 0, (21, 21), 4)])
    for at in (4, -18):
        with pytest.raises(BadInputError, match=f"change after {at} tokens: give -17 to 3"):
            recall.after_change(untrained, tasks(2, 0, (20, 20), 4), at, recall.CHANGES["none"])


@pytest.mark.parametrize("at", [-17, -1, 0, 1, 3])
def test_no_change_changes_nothing(untrained, at):
    some = tasks(3, 0, (20, 20), 4)
    prompts = torch.tensor([task.prompt for task in some])
    said = recall.greedy(untrained, prompts, 4).tokens.tolist()
    own = [
        RecallTask(i, task.prompt, tuple(tokens))
        for i, (task, tokens) in enumerate(zip(some, said, strict=True))
    ]
    result = recall.after_change(untrained, own, at, recall.CHANGES["none"])
    assert (result.exact, result.tokens) == (3, 3 * (4 - max(at, 0)))


def test_each_change_touches_what_it_names(untrained):
    some = torch.tensor([task.prompt for task in tasks(2, 0, (20, 20), 4)])
    with torch.no_grad():
        _, before = untrained(some[:, :-2])
        _, now = untrained(some[:, -2:-1], before)
    other = recall.rolled(now)

    def parts(state):
        return {"conv": state.layers[0].conv, "ssm": state.layers[0].ssm, "keys": state.layers[2].keys}

    expected = {
        "none": {},
        "recurrent state of another request": {"conv": other, "ssm": other},
        "only its delta-rule part": {"ssm": other},
        "only its convolution part": {"conv": other},
        "recurrent state one token old": {"conv": before, "ssm": before},
        "keys and values of another request": {"keys": other},
    }
    for name, change in recall.CHANGES.items():
        after = parts(change(now, before))
        for part, value in after.items():
            assert torch.equal(value, parts(expected[name].get(part, now))[part]), (name, part)
