"""Loops and early ends: each rule fires at its bound and is silent below it."""

import random

import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from specmortem.tools.load.outcome import Outcome, RequestRecord
from specmortem.tools.load.prompts import WORDS, generate
from specmortem.tools.load.signs import WINDOW, early_among_peers, ends_early, find_loop


def prose(words, seed=0):
    rng = random.Random(seed)
    return " ".join(rng.choice(WORDS) for _ in range(words))


LOOPS = {
    "the report": "Supported Modules: It calls … * **Mo" + "duct" * 50,
    "short, at the end": prose(100) + "duct" * 12,
    "a token at the end": prose(100) + "!" * 48,
    "cut within the unit": prose(100) + "duct" * 12 + "du",
    "in the middle": prose(100) + "of the " * 30 + prose(100),
    "a sentence": prose(100) + (prose(5) + ". ") * 9,
    "a paragraph": prose(20) + (prose(60, 1) + "\n") * 5,
    "an empty line for ever": prose(100) + "\n" * 1000,
    "at the end of a long answer": prose(9000) + "duct" * 50,
}
HEALTHY = {
    "nothing": "",
    "prose": prose(2000),
    "seven times": prose(100) + "ductile " * 7,
    "eight times, but short": prose(50) + "na " * 8 + prose(50),
    "nine times, but short and not at the end": prose(50) + "ductile " * 9 + prose(50),
    "a ruler": prose(20) + "-" * 200 + prose(20),
    "a table": prose(20) + "\n|---|---|---|---|---|---|---|---|---|---|---|---|---|---|\n" + prose(20),
    "indented code": "\n".join(f"{' ' * 40}line_{i} = {i * i}" for i in range(60)),
    "a numbered list": "\n".join(f"{i}. the value of {WORDS[i]} is {i * 37}" for i in range(90)),
    "the prompt itself": generate(0, "1-000", 4000, "completions").text,
    "a paragraph thrice": prose(20) + (prose(60, 1) + "\n") * 3 + prose(20),
    "long before the end": "duct" * 100 + prose(WINDOW // 2),
}


@pytest.mark.parametrize("text", LOOPS.values(), ids=LOOPS)
def test_loops(text):
    loop = find_loop(text)
    assert loop is not None
    assert loop.unit * (loop.times - 1) in text


@pytest.mark.parametrize("text", HEALTHY.values(), ids=HEALTHY)
def test_healthy_texts(text):
    assert find_loop(text) is None


def test_the_unit_is_named():
    loop = find_loop(LOOPS["the report"])
    assert (loop.unit, loop.times, loop.characters) == ("duct", 50, 200)


@hypothesis_settings(deadline=None)
@given(
    st.text(max_size=300), st.text("abcdé𝄞", min_size=1, max_size=40), st.integers(8, 60), st.integers(0, 39)
)
def test_a_loop_at_the_end_is_found_after_any_text(before, unit, times, cut):
    times = max(times, -(-48 // len(unit)))
    assert find_loop(before + unit * times + unit[: cut % len(unit)]) is not None


@hypothesis_settings(deadline=None)
@given(st.text())
def test_any_text_is_taken(text):
    find_loop(text + "\ud800")


@pytest.mark.parametrize(
    "finish_reason, text, tokens, asked, early",
    [
        ("stop", "some text", 49, 50, True),
        ("stop", "some text", 50, 50, False),
        ("stop", "some text", 1, 0, False),
        ("length", "some text", 1, 50, False),
        ("stop", "", 1, 0, True),
        ("stop", "é" * 25, None, 50, False),
        ("stop", "é" * 24, None, 50, True),
    ],
)
def test_early_ends(finish_reason, text, tokens, asked, early):
    assert bool(ends_early(finish_reason, text, tokens, asked)) is early


def answers(*tokens, **more):
    return [
        RequestRecord(
            f"1-{i:03d}", 1, Outcome.OK, "", 0, 1, finish_reason="stop", completion_tokens=n, **more
        )
        for i, n in enumerate(tokens)
    ]


@pytest.mark.parametrize(
    "tokens, early",
    [
        ([10, *[100] * 8], ["1-000"]),
        ([11, *[100] * 8], []),
        ([10, *[100] * 7], []),
        ([6, *[63] * 8], []),
        ([6, *[64] * 8], ["1-000"]),
        ([5, *[100] * 6, 49, 49], ["1-000"]),
        ([5, *[100] * 5, 49, 49, 49], []),
        ([5, 5, *[100] * 9], ["1-000", "1-001"]),
    ],
    ids=["tenth", "more", "few peers", "short peers", "64", "three quarters alike", "unlike", "two"],
)
def test_early_among_peers(tokens, early):
    assert list(early_among_peers(answers(*tokens))) == early


def test_peers_are_whole_answers_of_the_load():
    warm = [RequestRecord(f"0-{i:03d}", 0, Outcome.OK, "", 0, 1, completion_tokens=100) for i in range(9)]
    cut = [RequestRecord(f"2-{i:03d}", 2, Outcome.CUT, "", 0, 1, completion_tokens=100) for i in range(9)]
    assert not early_among_peers([*answers(5), *warm, *cut])
