"""Reading incident.toml: what is accepted, and what each refusal says."""

from pathlib import Path

import pytest

from specmortem import facts
from specmortem.errors import BadInputError, UnavailableError

GOOD = """
schema = 1
slug = "toy"
title = "Toy incident"
summary = "A toy broke."
grade = "reproduced"
status = "open"
notebook = "01-toy.ipynb"

[impact]
who = "everyone"
symptom = ["a crash", "a hang"]
log = "toy: bang"
mechanism = "A toy read past its row."

[environment]
gpu = "any"

[[timeline]]
date = 2026-01-02
what = "reported"
source = "toy#1"

[[hypotheses]]
id = "h1"
statement = "the copy is late"
verdict = "supported"
because = "the rows say so"
causes = ["late-copy"]

[[claims]]
id = "c1"
text = "the copy is late"
grade = "reproduced"
source = "toy#2"
cause = "late-copy"

[[causes]]
id = "late-copy"
title = "Late copy"
mechanism = "the host reads first"
needs = "cpu"
reached_by = "two requests"
fixed = { release = "0.24.0" }
affected = ">=0.20.1,<0.24"
workarounds = ["sync"]

[[workarounds]]
id = "sync"
action = "synchronize"
cost = "3 %"
verified_by = "this page"
grade = "reproduced"
source = "toy#3"

[[open_questions]]
question = "why?"
settles = "a run"
"""


def write(root: Path, text: str, slug: str = "toy") -> Path:
    folder = root / "investigations" / slug
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "incident.toml").write_text(text)
    return folder.parent


def refusal(root: Path, old: str, new: str) -> str:
    assert old in GOOD
    with pytest.raises(BadInputError) as caught:
        facts.load("toy", write(root, GOOD.replace(old, new, 1)))
    return str(caught.value)


def test_reads_every_table(tmp_path):
    toy = facts.load("toy", write(tmp_path, GOOD))
    assert toy.impact.who == ("everyone",)
    assert toy.impact.symptom == ("a crash", "a hang")
    assert toy.impact.notes == ()
    assert toy.environment == {"gpu": "any"}
    assert toy.timeline[0].date == "2026-01-02"
    assert toy.hypotheses[0].causes == ("late-copy",)
    assert toy.claims[0].cause == "late-copy"
    assert toy.cause("late-copy").fixed == facts.Fix("0.24.0")
    assert toy.workarounds[0].cost == "3 %"
    assert toy.open_questions[0].settles == "a run"


def test_affected_releases_follow_the_specifier(tmp_path):
    cause = facts.load("toy", write(tmp_path, GOOD)).cause("late-copy")
    assert cause.affects("0.22.1") is True
    assert cause.affects("0.24.0") is False


def test_affected_is_unknown_where_the_file_does_not_say(tmp_path):
    root = write(tmp_path, GOOD.replace('affected = ">=0.20.1,<0.24"\n', ""))
    assert facts.load("toy", root).cause("late-copy").affects("0.22.1") is None


def test_unknown_cause_lists_the_known_ones(tmp_path):
    with pytest.raises(BadInputError, match="no cause 'x'; it has: late-copy"):
        facts.load("toy", write(tmp_path, GOOD)).cause("x")


def test_every_grade_has_a_meaning():
    assert set(facts.GRADE_MEANING) == set(facts.Grade.__args__)


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ('source = "toy#2"\n', "", "[[claims]] 'c1': source is missing"),
        (
            'source = "toy#2"',
            'source = " "',
            "[[claims]] 'c1': source must be text that is not empty, got ''",
        ),
        (
            'grade = "reproduced"\nsource = "toy#2"',
            'source = "toy#2"',
            "[[claims]] 'c1': grade is missing",
        ),
        (
            'grade = "reproduced"\nstatus',
            'grade = "proved"\nstatus',
            "top level: grade 'proved' is not one of",
        ),
        (
            'verdict = "supported"',
            'verdict = "yes"',
            "[[hypotheses]] 'h1': verdict 'yes' is not one of supported",
        ),
        (
            'cost = "3 %"',
            'costs = "3 %"',
            "[[workarounds]] 'sync': unknown key 'costs'; known: id, action, cost",
        ),
        ('who = "everyone"', 'whom = "everyone"', "[impact]: unknown key 'whom'"),
        ('log = "toy: bang"\n', "", "[impact]: log is missing"),
        ('log = "toy: bang"', 'log = "0.24.0 is clean"', "[impact]: log: '0.24.0' says who is affected"),
        ('"A toy broke."', '"Run with --enforce-eager."', "summary: '--enforce-eager' says who is affected"),
        ('gpu = "any"', "gpu = 1", "[environment]: gpu must be text"),
        ('title = "Toy incident"', "titel = 1", "top level: unknown key 'titel'"),
        (
            'causes = ["late-copy"]',
            'causes = ["l"]',
            "[[hypotheses]] 'h1': causes: 'l' is not defined; defined: late",
        ),
        ('cause = "late-copy"\n\n', 'cause = "l"\n\n', "[[claims]] 'c1': cause: 'l' is not defined"),
        (
            'workarounds = ["sync"]',
            'workarounds = ["s"]',
            "[[causes]] 'late-copy': workarounds: 's' is not defined",
        ),
        (
            'affected = ">=0.20.1,<0.24"',
            'affected = "new"',
            "[[causes]] 'late-copy': affected 'new' is not a version",
        ),
        ('release = "0.24.0"', 'rel = "0.24.0"', "[fixed]: unknown key 'rel'"),
        ('needs = "cpu"', 'needs = "tpu"', "[[causes]] 'late-copy': needs 'tpu' is not one of cpu, gpu"),
        ('slug = "toy"', 'slug = "tiy"', "slug 'tiy' differs from its folder 'toy'"),
        ("schema = 1", "schema = 2", "schema 2 is not one of 1"),
        ("[environment]", "[environment", "is not TOML"),
        ("[[open_questions]]", "[open_questions]", "[open_questions] must be a list"),
        ('[environment]\ngpu = "any"', "[environment.gpu]", "[environment]: [gpu] must be text"),
        ("[[timeline]]\ndate = 2026-01-02\n", "[[timeline]]\n", "[[timeline]] entry 1: date is missing"),
    ],
)
def test_refuses_naming_the_file_the_table_and_the_entry(tmp_path, old, new, says):
    message = refusal(tmp_path, old, new)
    assert says in message
    assert "toy/incident.toml" in message


def test_refuses_an_id_that_stands_twice(tmp_path):
    again = GOOD + '\n[[claims]]\nid = "c1"\ntext = "t"\ngrade = "open"\nsource = "s"\n'
    with pytest.raises(BadInputError, match=r"\[\[claims\]\] 'c1': the id stands twice"):
        facts.load("toy", write(tmp_path, again))


def test_unknown_slug_lists_the_known_ones(tmp_path):
    write(tmp_path, GOOD)
    root = write(tmp_path, GOOD, slug="other")
    with pytest.raises(BadInputError, match="no incident 'tooy'; known: other, toy"):
        facts.load("tooy", root)


def test_all_slugs_are_the_folders_with_a_file(tmp_path):
    root = write(tmp_path, GOOD)
    (root / "empty").mkdir()
    assert facts.all_slugs(root) == ["toy"]


def test_the_root_is_found_from_a_folder_below_it(tmp_path, monkeypatch):
    monkeypatch.delenv("SPECMORTEM_HOME", raising=False)
    root = write(tmp_path, GOOD)
    below = tmp_path / "a" / "b"
    below.mkdir(parents=True)
    assert facts.find_root(below) == root


def test_the_home_variable_wins_over_the_working_directory(tmp_path, monkeypatch):
    here = write(tmp_path / "here", GOOD)
    there = write(tmp_path / "there", GOOD)
    monkeypatch.chdir(here.parent)
    monkeypatch.setenv("SPECMORTEM_HOME", str(there.parent))
    assert facts.find_root() == there


def test_a_home_without_incidents_is_an_error(tmp_path, monkeypatch):
    monkeypatch.setenv("SPECMORTEM_HOME", str(tmp_path))
    with pytest.raises(UnavailableError, match="SPECMORTEM_HOME=.* holds no investigations"):
        facts.find_root()


def test_no_root_anywhere_says_how_to_give_one(tmp_path, monkeypatch):
    monkeypatch.delenv("SPECMORTEM_HOME", raising=False)
    monkeypatch.setattr(facts, "__file__", str(tmp_path / "lib" / "specmortem" / "facts.py"))
    with pytest.raises(UnavailableError, match="set SPECMORTEM_HOME"):
        facts.find_root(tmp_path)
