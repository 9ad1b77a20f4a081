"""Recall tasks: their shape, and an oracle that reads the ring back from the prompt."""

import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specmortem.errors import BadInputError
from specmortem.tools.engine.tasks import (
    ASK,
    BOS,
    EOS,
    ITEMS,
    MAX_PROMPT,
    MAX_RING,
    MIN_PROMPT,
    STRIDES,
    as_prompts,
    main,
    stride_of,
    tasks,
)
from specmortem.tools.load import prompts

lengths = st.tuples(st.integers(MIN_PROMPT, 400), st.integers(0, 100)).map(lambda pair: (pair[0], sum(pair)))


def read_answer(prompt: tuple[int, ...], count: int) -> list[int]:
    """The answer found in the prompt's own text: the stride-th token after the first showing of the one before last."""
    stride, body, said = stride_of(prompt), prompt[2:-3], list(prompt[-2:])
    for _ in range(count):
        said.append(body[body.index(said[-2]) + stride])
    return said[2:]


@given(seed=st.integers(), length=lengths, answer=st.integers(1, 80))
def test_the_answer_can_be_read_from_the_prompt_alone(seed, length, answer):
    for task in tasks(3, seed, length, answer):
        assert list(task.answer) == read_answer(task.prompt, answer)
        assert length[0] <= len(task.prompt) <= length[1]


@given(seed=st.integers(), length=lengths)
def test_a_prompt_shows_a_ring_of_distinct_items_and_asks_once(seed, length):
    (task,) = tasks(1, seed, length, 4)
    body = task.prompt[2:-3]
    size = min(len(task.prompt) - 8, MAX_RING)
    assert len(set(body)) == size and all(token in ITEMS for token in body)
    assert all(body[i] == body[i - size] for i in range(size, len(body)))
    assert task.prompt[0] == BOS and task.prompt.count(ASK) == 1 and task.prompt[-3] == ASK
    assert task.prompt[-2] != task.prompt[-1]
    assert EOS not in task.prompt + task.answer


def test_a_longer_list_starts_with_the_shorter_one():
    assert tasks(9, 5, (20, 60), 8)[:4] == tasks(4, 5, (20, 60), 8)
    assert [task.name for task in tasks(4, 5, (20, 60), 8)] == [0, 1, 2, 3]


def test_seeds_give_different_tasks_and_all_strides():
    some = tasks(60, 0, (20, 60), 8)
    assert {stride_of(task.prompt) for task in some} == set(STRIDES)
    assert not {task.prompt for task in some} & {task.prompt for task in tasks(60, 1, (20, 60), 8)}


def test_a_long_prompt_goes_round_its_ring():
    (task,) = tasks(1, 0, (5000, 5000), 8)
    assert len(task.prompt) == 5000 and len(set(task.prompt[2:-3])) == MAX_RING


@pytest.mark.parametrize(
    ("count", "length", "answer"),
    [(0, (20, 30), 4), (1, (20, 30), 0), (1, (30, 20), 4), (1, (4, 20), 4), (1, (20, MAX_PROMPT + 1), 4)],
)
def test_bad_requests_are_refused(count, length, answer):
    with pytest.raises(BadInputError):
        tasks(count, 0, length, answer)


@pytest.mark.parametrize("prompt", [(), (BOS,), tuple(range(30))])
def test_the_stride_of_another_prompt_is_refused(prompt):
    with pytest.raises(BadInputError):
        stride_of(prompt)


@given(seed=st.integers(), length=lengths, answer=st.integers(1, 80))
def test_lines_are_prompts_of_the_load_client_and_hold_the_tasks(tmp_path_factory, seed, length, answer):
    some = tasks(3, seed, length, answer)
    (file := tmp_path_factory.getbasetemp() / "prompts.jsonl").write_text(as_prompts(some))
    read = prompts.read(file).prompts
    assert [(prompt.text, prompt.expected) for prompt in read] == [
        (task.prompt, task.answer) for task in some
    ]


@pytest.mark.parametrize("length, bounds", [("48-160", (48, 160)), ("60", (60, 60))])
def test_the_module_prints_the_tasks_it_is_asked_for(length, bounds):
    words = ["--count", "5", "--seed", "7", "--length", length, "--answer", "40"]
    command = [sys.executable, "-W", "error", "-m", "specmortem.tools.engine.tasks", *words]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout == as_prompts(tasks(5, 7, bounds, 40))


@pytest.mark.parametrize(
    "changed, said",
    [
        ({"--length": "long"}, "'long' is neither N nor LOW-HIGH"),
        ({"--length": "160-48"}, "prompts of 160 to 48 tokens"),
        ({"--count": "0"}, "0 tasks of 40 answer tokens"),
    ],
)
def test_bad_input_to_the_module_ends_with_two(capsys, changed, said):
    words = {"--count": "5", "--length": "48-160", "--answer": "40"} | changed
    with pytest.raises(SystemExit, match="2"):
        main([word for pair in words.items() for word in pair])
    told = capsys.readouterr()
    assert said in told.err and not told.out
