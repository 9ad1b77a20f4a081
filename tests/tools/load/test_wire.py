"""Requests as they go out, events as they come in, and addresses that are let through."""

import json
import shlex
from contextlib import suppress
from urllib.parse import quote

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specmortem.errors import BadInputError
from specmortem.tools.load import address
from specmortem.tools.load.prompts import WORDS, generate, is_right, read
from specmortem.tools.load.settings import SHAPES
from specmortem.tools.load.text import REMOVED, Cleaner, printable
from specmortem.tools.load.wire import Events, GarbageError, body, piece

from .servers import settings

LINES = st.text(st.characters(exclude_characters="\r\n", exclude_categories=["Cs"]))


@given(st.lists(LINES.filter(bool)), st.lists(st.integers(1, 30)), st.sampled_from(["\n", "\r\n"]))
def test_events_in_any_pieces(datas, cuts, end):
    sent = "".join(f": comment{end}event: x{end}data: {data}{end}{end}" for data in datas).encode()
    events, found = Events(), []
    for cut in [*cuts, len(sent)]:
        found += events.feed(sent[:cut])
        sent = sent[cut:]
    assert found == datas


@given(st.binary())
def test_any_bytes_are_events_or_garbage(data):
    with suppress(GarbageError):
        Events().feed(data)


def test_an_event_of_several_lines_and_an_incomplete_one():
    assert Events().feed(b"data: a\ndata:b\n\ndata: c\n") == ["a\nb"]


@pytest.mark.parametrize(
    "choice, text",
    [
        ({"delta": {"content": "a"}}, "a"),
        ({"delta": {"reasoning_content": "r", "reasoning": "r", "content": "a"}}, "ra"),
        ({"delta": {"reasoning": "r"}}, "r"),
        ({"delta": {"role": "assistant", "content": None}}, ""),
        ({"text": "a"}, "a"),
    ],
)
def test_pieces(choice, text):
    found = piece(json.dumps({"choices": [choice], "usage": {"completion_tokens": 3}}), "delta")
    assert (found.text, found.completion_tokens, found.finish_reason) == (text, 3, "")


@pytest.mark.parametrize(
    "data",
    ["", "3", "[]", "{}", '{"choices": 3}', '{"choices": []}', '{"choices": [3]}', "[" * 100_000]
    + ['{"choices": [{"text": "", "token_ids": [1, "2"]}]}']
    + ['{"choices": [{"delta": {"content": 3}}]}', '{"choices": [{"text": "a", "finish_reason": {}}]}'],
)
def test_garbage(data):
    with pytest.raises(GarbageError):
        piece(data, "delta")


@pytest.mark.parametrize("count", [-1, 1.5, "3", True, 10**12, None, [1]])
def test_counts_that_make_no_sense_are_none(count):
    data = {"choices": [{"text": "a"}], "usage": {"completion_tokens": count}}
    assert piece(json.dumps(data), "delta").completion_tokens is None


def test_bodies_are_ascii():
    made = settings("http://127.0.0.1:1")
    assert body(made, made.ask(1, 0), "m\ud800é").isascii()


@pytest.mark.parametrize(
    "url, base",
    [
        ("http://127.0.0.1:8000", "http://127.0.0.1:8000"),
        ("http://127.0.0.1:8000/v1/", "http://127.0.0.1:8000"),
        ("https://localhost/models/a/v1", "https://localhost/models/a"),
        ("http://[::1]:8000/", "http://[::1]:8000"),
        ("http://127.9.9.9", "http://127.9.9.9"),
    ],
)
def test_loopback_is_let_through(url, base):
    assert address.base_url(url) == base


@pytest.mark.parametrize(
    "url",
    ["http://example.org", "http://10.0.0.1:8000", "http://0.0.0.0:8000", "http://127.0.0.1.example.org"]
    + ["http://localhost.example.org", "http://2130706433", "http://[::ffff:10.0.0.1]", "http://[fe80::1]"],
)
def test_other_hosts_need_the_flag(url):
    with pytest.raises(BadInputError, match="--allow-host"):
        address.base_url(url)
    host = url.removeprefix("http://").removesuffix(":8000")
    assert address.base_url(url, [host]) == url
    with pytest.raises(BadInputError, match="--allow-host"):
        address.base_url(url, ["another.org"])


@pytest.mark.parametrize(
    "url",
    ["", "127.0.0.1:8000", "ftp://127.0.0.1", "http://", "http://127.0.0.1:x", "http://127.0.0.1/?a=b"]
    + ["http://127.0.0.1/#a", "http://user:pass@127.0.0.1", "http://[::1", "http://127.0.0.1/\x1b[2J"],
)
def test_addresses_that_are_refused(url):
    with pytest.raises(BadInputError) as caught:
        address.base_url(url, ["127.0.0.1"])
    assert str(caught.value).isprintable()
    assert "pass@" not in str(caught.value)


@pytest.mark.parametrize("key", ["", " a", "a\nb", "é"])
def test_keys_that_are_refused(monkeypatch, key):
    monkeypatch.setenv("TOY_KEY", key)
    with pytest.raises(BadInputError) as caught:
        address.api_key("TOY_KEY")
    assert not key or key not in str(caught.value)


@given(st.text() | st.characters(codec=None).map(lambda c: c * 3))
def test_what_is_kept_is_printable(text):
    assert printable(text).isprintable()
    assert Cleaner().ends(text).isprintable()


@pytest.mark.parametrize("clean", [Cleaner("sk-key"), Cleaner("sk-key").ends])
@pytest.mark.parametrize("before", [0, 118, 197])
def test_a_key_is_removed_before_text_is_cut(clean, before):
    assert "sk-" not in clean("x" * before + "sk-key" + "y" * 500)


@pytest.mark.parametrize("before", [0, 118, 197, 500])
def test_a_key_that_the_text_ends_within_is_removed(before):
    clean = Cleaner("sk-a-long-key")
    assert clean.without_key("x" * before + "sk-a-long-ke") == "x" * before + "[API key]"
    assert clean.without_key("x" * before + "sk-a-lo") == "x" * before + "sk-a-lo", "too little to tell"
    assert clean.without_key("sk-a-long-ke" + "x") == "sk-a-long-kex", "not at the end"


@given(st.text("sk-ey/\"'%2Fa", min_size=1, max_size=30), st.text(max_size=50), st.text(max_size=50))
def test_no_form_of_a_key_is_kept(key, before, after):
    for form in (key, json.dumps(key)[1:-1], quote(key), quote(key, safe="")):
        cleaned = Cleaner(key).without_key(before + form + after)
        assert key not in cleaned.replace(REMOVED, "\0")


def test_the_command_is_cleaned_before_it_is_quoted():
    made = settings("http://127.0.0.1:1", model="a sk'key \x1b[2J")
    told = made.command(Cleaner("sk'key"))
    assert shlex.split(told)[shlex.split(told).index("--model") + 1] == "a [API key] \\x1b[2J"
    assert shlex.split(made.command(Cleaner("max")))[-3:] == shlex.split(made.command())[-3:], (
        "no option is hit"
    )


def test_a_line_that_is_no_field_is_told_whole():
    with pytest.raises(GarbageError, match="<html>y{300}"):
        Events().feed(b"<html>" + b"y" * 300 + b"\n")


@pytest.mark.parametrize("api", ["chat", "completions"])
def test_prompts_come_from_their_seed(api):
    made = generate(3, "1-002", 800, api)
    assert made == generate(3, "1-002", 800, api)
    assert made != generate(4, "1-002", 800, api) and made != generate(3, "1-003", 800, api)
    assert made.text.count("\n") >= 100 and is_right(made.expected, made.text)


def test_right_answers_are_whole_words():
    assert is_right("amber-river", "It is Amber-River.")
    assert not is_right("amber-river", "amber-rivers") and not is_right("amber-river", "old-amber-river")
    assert len(set(WORDS)) == len(WORDS)


def test_right_token_ids_go_along_to_the_shorter_end():
    assert is_right((1, 2, 3), "", (1, 2, 3, 4)) and is_right((1, 2, 3), "", (1, 2))
    assert not is_right((1, 2, 3), "", (1, 3)) and not is_right((1, 2, 3), "", ())


def test_shapes_are_those_of_the_reports():
    planned = {
        name: settings("http://127.0.0.1:1", shape=vars(shape)).planned for name, shape in SHAPES.items()
    }
    assert planned == {"long-rounds": 1 + 5 * 64, "short-ramp": 1 + 16 + 32 + 64, "two-streams": 1 + 100}
    lengths = [
        len(settings("http://127.0.0.1:1", shape=vars(SHAPES["two-streams"])).ask(1, i).prompt)
        for i in range(9)
    ]
    assert max(lengths) > 2 * min(lengths)
    short = settings("http://127.0.0.1:1", shape=vars(SHAPES["short-ramp"]))
    assert short.ask(1, 0).prompt == short.ask(3, 9).prompt


def test_rounds_go_through_the_lines_of_a_file_in_turn(tmp_path):
    (file := tmp_path / "prompts.jsonl").write_text("\n".join(json.dumps({"prompt": text}) for text in "abc"))
    made = settings("http://127.0.0.1:1", shape={"concurrency": (2, 2), "requests": 2}, prompts=read(file))
    assert [[ask.prompt for ask in asks] for _, _, asks in made.rounds()] == [["a"], ["b", "c"], ["a", "b"]]


def test_the_limit_on_requests_cuts_the_plan():
    made = settings(
        "http://127.0.0.1:1", shape={"concurrency": (2, 2), "requests": 4}, limits={"requests": 6}
    )
    assert [(n, c, len(list(asks))) for n, c, asks in made.rounds()] == [(0, 1, 1), (1, 2, 4), (2, 2, 1)]
