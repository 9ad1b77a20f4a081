"""Tables for terminals, pipes and Markdown: nothing is lost, a row is a line where no terminal wraps it."""

import io
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from specmortem.report.terminal import (
    MARKS,
    Line,
    escaped,
    finding_line,
    markdown_table,
    write_lines,
    write_table,
)

WORDS = st.text(st.characters(codec="utf-8", categories=("L", "N", "P", "S", "Zs")), max_size=60)


def written(columns, rows, title="", **console):
    out = io.StringIO()
    write_table(columns, rows, title, Console(file=out, **console))
    return out.getvalue()


def test_off_a_terminal_a_row_is_a_line_and_no_word_is_cut():
    long = "word " * 200 + "end"
    rows = [
        ("a-cause-with-a-long-name", "fault", [Line(long), Line("→ upgrade\nsoon", "green")]),
        ("b", "clean", ""),
    ]
    text = written(("cause", "verdict", "seen"), rows, "a title", width=40)
    title, head, first, second = text.splitlines()
    assert (title, head.split(), second.split()) == ("a title", ["cause", "verdict", "seen"], ["b", "clean"])
    assert first.startswith("a-cause-with-a-long-name  fault") and first.endswith("end  → upgrade soon")
    assert "\x1b" not in text


def test_columns_are_aligned_off_a_terminal():
    lines = written(("x", "y"), [("1", "22"), ("333", "4")]).splitlines()
    assert {line.index(word) for line, word in zip(lines, ("y", "22", "4"), strict=True)} == {5}


def test_on_a_terminal_outcomes_are_coloured_and_cells_wrap():
    text = written(("cause", "verdict"), [("word " * 20, "fault")], force_terminal=True, width=40)
    assert "\x1b[1;31m" in text
    assert max(len(re.sub(r"\x1b\[[0-9;]*m", "", line)) for line in text.splitlines()) <= 40


@given(st.lists(st.tuples(WORDS, WORDS), max_size=5))
def test_a_table_holds_every_cell(rows):
    lines = written(("left", "right"), rows, width=20).split("\n")
    assert len(lines) == len(rows) + 2
    for line, row in zip(lines[1:], rows, strict=False):
        assert line.split() == " ".join(row).split()


def test_brackets_in_a_text_are_no_markup():
    out = io.StringIO()
    write_lines(["[red]x[/red]", Line("[/]", "bold")], Console(file=out))
    assert out.getvalue() == "[red]x[/red]\n[/]\n"


def test_a_finding_is_one_line_of_five_fields():
    assert (
        finding_line("vllm==1", "a-cause", "fault", "", "two\nlines")
        == "vllm==1: a-cause: fault: -: two lines"
    )


@pytest.mark.parametrize("escape", [None, escaped])
def test_a_markdown_table_holds_any_text(escape):
    lines = markdown_table(("a", "b"), [("x | y", "one\ntwo"), ("`[z](u)`", 3)], escape)
    assert all(len(re.findall(r"(?<!\\)\|", line)) == 3 for line in lines)
    assert lines[1] == "| --- | --- |"


def test_every_outcome_has_a_symbol_beside_its_word():
    assert str(MARKS["fault"]) == "✗ fault" and all(mark.symbol and mark.word for mark in MARKS.values())
