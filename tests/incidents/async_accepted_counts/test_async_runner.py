import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from specmortem import device
from specmortem.errors import BadInputError
from specmortem.incidents.async_accepted_counts.engine import word_model
from specmortem.incidents.async_accepted_counts.engine.async_runner import (
    AsyncRunner,
    AsyncScheduler,
    RunnerConfig,
    WordRequest,
    serve,
)
from specmortem.incidents.async_accepted_counts.engine.policies import policy

STOP = word_model.ID[word_model.STOP]


def model(run="plain", num_blocks=9):
    return word_model.WordModel(device.open("sim", schedule="immediate"), num_blocks, 3, run)


def i32(values):
    return torch.tensor(values, dtype=torch.int32)


def continued(one, prompt, most):
    """What the model says to a prompt, up to its stop or `most` words, from a state that nobody shares."""
    known = list(prompt)
    while len(known) < len(prompt) + most and STOP not in known[len(prompt) :]:
        state, _, query = one.read(i32(known))
        known.append(int((state @ query + one.bias).argmax()))
    return known[len(prompt) :]


def decoded(one, text, counts):
    """What the model says when each step accepts the next of `counts` of its four right drafts."""
    prompt, blocks = i32(text.prompt), i32([[1, 2, 3, 4]])
    said, coming, count = [int(one.prefill(prompt, torch.tensor(1)))], [*text.expected, *[STOP] * 8], 1
    for accepted in counts:
        tokens = i32([coming[len(said) - 1 : len(said) + 3]])
        answer = one.decode(tokens, blocks, i32([count]))[0].tolist()
        said += answer[:accepted]
        count = accepted
        if len(said) >= len(text.expected):
            break
    return said[: len(text.expected)]


def test_the_model_retells_every_story():
    one, rng = model(), random.Random(5)
    texts = [word_model.text(rng) for _ in range(40)]
    assert all(continued(one, text.prompt, 40) == text.expected for text in texts)
    assert word_model.words(texts[0].expected).endswith("<end>") and len(texts[0].expected) == 20


@settings(max_examples=15, deadline=None)
@given(st.integers(0, 999), st.lists(st.integers(1, 4), min_size=20, max_size=20))
def test_states_after_any_accepted_count_go_on_with_the_story(seed, counts):
    text = word_model.text(random.Random(seed))
    assert decoded(model(), text, counts) == text.expected


@pytest.mark.usefixtures("interpreted")
def test_kernels_say_what_the_references_say():
    text = word_model.text(random.Random(3))
    both = [model("plain"), model("triton")]
    assert [decoded(one, text, [4, 1, 3]) for one in both] == [text.expected[:9]] * 2
    for name in ("conv", "memory"):
        plain, triton = (getattr(one, name) for one in both)
        torch.testing.assert_close(plain, triton, atol=1e-4, rtol=1e-4)


def test_a_count_of_four_at_the_first_draft_forgets_the_prompt():
    text, owner = (word_model.text(random.Random(seed)) for seed in (3, 4))
    one, blocks = model(), i32([[1, 2, 3, 4]])
    decoded(one, owner, [4] * 5)
    right = int(one.prefill(i32(text.prompt), torch.tensor(1)))
    tokens = i32([text.expected[:4]])
    assert right == text.expected[0]
    assert one.decode(tokens, blocks, i32([4]))[0].tolist() != text.expected[1:5]
    assert one.decode(tokens, blocks, i32([1]))[0].tolist() != text.expected[1:5]  # lost for good


def test_a_short_opening_is_refused():
    with pytest.raises(BadInputError, match="opening 3"):
        word_model.text(random.Random(0), 3)


def requests(count=6, most=40):
    texts = [word_model.text(random.Random(100 + n)) for n in range(count)]
    return texts, [WordRequest(n, tuple(text.prompt), most) for n, text in enumerate(texts)]


def drafts(texts, right=True):
    table = torch.zeros(len(texts), 48, 3, dtype=torch.int32)
    for n, text in enumerate(texts):
        for said in range(48):
            coming = [*text.expected, *[STOP] * 60][said : said + 3]
            table[n, said] = i32(coming if right else [9, 9, 9])
    return table


def served(
    mode="none", scheduling="async", arm="after", right=True, run="plain", schedule="lazy", count=6, most=40
):
    config = RunnerConfig(mode=mode, scheduling=scheduling, max_num_seqs=3)
    dev = device.open("sim", schedule=schedule, seed=1)
    texts, asked = requests(count, most)
    one = word_model.WordModel(dev, config.num_blocks, 3, run)
    runner = AsyncRunner(dev, config, policy(arm, mode, scheduling), one, drafts(texts, right))
    said = serve(runner, AsyncScheduler(config, asked, STOP))
    return runner, [said[n] == text.expected[:most] for n, text in enumerate(texts)]


@pytest.mark.parametrize("schedule", ["lazy", "immediate", "random"])
@pytest.mark.parametrize("scheduling", ["async", "sync"])
@pytest.mark.parametrize("mode", ["none", "all", "align"])
def test_texts_are_right_after(mode, scheduling, schedule):
    runner, right = served(mode, scheduling, schedule=schedule)
    assert all(right) and runner.wrong == []


def test_right_drafts_save_steps_and_wrong_drafts_change_nothing():
    fast, right = served()
    slow, too = served(right=False)
    assert all(right) and all(too) and fast.steps < slow.steps / 2


def test_async_scheduling_takes_a_step_more_than_sync():
    assert served(count=1)[0].steps == served(count=1, scheduling="sync")[0].steps + 1


@pytest.mark.parametrize("most", [1, 2, 7])
@pytest.mark.parametrize("scheduling", ["async", "sync"])
def test_texts_end_at_their_length(most, scheduling):
    assert all(served(scheduling=scheduling, most=most)[1])


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("mode", ["none", "align"])
def test_kernels_serve_the_same_texts(mode):
    assert all(served(mode, run="triton", count=2, most=9)[1])


def test_too_few_steps_are_refused():
    config = RunnerConfig()
    dev = device.open("sim")
    texts, asked = requests(2)
    one = word_model.WordModel(dev, config.num_blocks, 3)
    runner = AsyncRunner(dev, config, policy("after", "none"), one, drafts(texts))
    with pytest.raises(BadInputError, match="2 steps were not enough"):
        serve(runner, AsyncScheduler(config, asked, STOP), most_steps=2)


def test_blocks_come_back_last_freed_first():
    config = RunnerConfig(max_num_seqs=1)
    scheduler = AsyncScheduler(config, [WordRequest(n, (1, 2), 1) for n in range(2)], STOP)
    first = scheduler.schedule().new_requests[0]
    scheduler.consume({0: [5]})
    assert scheduler.schedule().new_requests[0].blocks == first.blocks
    assert scheduler.outputs == {0: [5]} and not scheduler.done
