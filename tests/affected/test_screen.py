"""What the first screen of each page says of releases and flags is what data/exposure.csv says."""

import re
import shlex

import pytest
from affected import home
from affected.first_screen import Cells, Screen, contradictions
from affected.test_targets import followed, read
from report import toy_repository as toy

from specmortem import facts
from specmortem.affected import matrix, screen
from specmortem.affected.answers import answer
from specmortem.affected.screen import Safest, exposure, safest
from specmortem.incident import all_slugs
from specmortem.report.html import RunRecord, index_page, page
from specmortem.report.summary import summarize

CELLS = Cells(home.ROOT / matrix.FILE)
LAUNCHES = matrix.configurations()


@pytest.fixture(scope="module")
def pages():
    """The page of each incident, with a notebook that says nothing."""
    return {
        slug: page(toy.notebook(), facts.load(slug), None, RunRecord(slug, "passed", "2026-12-01"))
        for slug in all_slugs()
    }


def found(text, slug):
    return contradictions(text, slug, CELLS, LAUNCHES)


@pytest.mark.parametrize("slug", all_slugs())
def test_no_field_of_a_first_screen_contradicts_the_table(pages, slug):
    read = Screen(pages[slug])
    assert len(read.rows) > 3
    assert {"Am I affected?", "Looks like"} <= {text for _, text in read.fields}
    assert found(pages[slug], slug) == []


@pytest.mark.parametrize("slug", all_slugs())
@pytest.mark.parametrize(
    ("old", "new"),
    [
        (r"0\.\d+\.\d+</span>", "0.20.1</span>"),
        ("<strong>0.29.0</strong>", "<strong>0.28.0</strong>"),
        ("<td>–</td>", "<td>0.33.0</td>"),
        (" alike</small>", "0 alike</small>"),
        ("One safe place.</strong> At vLLM 0.33.0", "One safe place.</strong> At vLLM 0.28.0"),
        (
            "launches reach no incident",
            "launches reach no incident as they are; 3 reach pp-align-copy, and more",
        ),
        (" 20 of 26", " 26 of 26"),
        ("check --vllm 0.", "check --vllm 1."),
        ('<p class="lead">', '<p class="lead">Clean from 0.24.0 on. '),
        ('<p class="lead">', '<p class="lead">It is gone with --enforce-eager. '),
        ("<dt>Who</dt><dd>", "<dt>Who</dt><dd>whoever sets VLLM_USE_V2_MODEL_RUNNER; "),
        ("<dt>Status</dt><dd>", "<dt>Status</dt><dd>mended in vllm 0.32.0, "),
        ('<pre class="symptom"><code>', '<pre class="symptom"><code>vLLM 0.22.1: '),
        ("Shown ", "Shown on 0.0.1 and "),
    ],
)
def test_a_planted_contradiction_is_seen(pages, slug, old, new):
    text = pages[slug]
    head, start, rest = text.partition('aria-label="Summary"')
    other, count = re.subn(old, new, rest, count=1)
    assert count
    assert found(head + start + other, slug) != []


@pytest.mark.parametrize(("name", "release"), [("hybrid-mtp", "0.24.0"), ("hybrid-dflash", "0.27.1")])
def test_a_table_with_another_verdict_contradicts_the_pages(pages, name, release):
    lines = (home.ROOT / matrix.FILE).read_text().splitlines(keepends=True)
    for slug in all_slugs():
        start = f"{lines[1].split(',')[0]},{release},{name},{slug},"
        other = [f"{start}affected,x\n" if line.startswith(start) else line for line in lines]
        told = [contradictions(pages[each], each, Cells("".join(other)), LAUNCHES) for each in all_slugs()]
        assert any(told), slug


@pytest.mark.parametrize("slug", all_slugs())
def test_every_line_is_safe_where_it_says_with_the_flags_it_names(slug):
    for line in exposure(slug).lines:
        one, target = line.line.configuration, line.target
        changed = read(followed(one.launch, target.flags), target.release, one.config.gpu)
        assert answer(changed).safe, (one.name, line.way_out)
        assert line.way_out.startswith(target.release)
        assert all(flag in line.way_out for flag in target.flags)


@pytest.mark.parametrize("slug", all_slugs())
def test_launches_that_are_alike_have_the_same_cells(slug):
    for line in exposure(slug).lines:
        for name in line.alike:
            assert CELLS.answers[name, slug] == CELLS.answers[line.line.configuration.name, slug]
            assert matrix.target(name).release == line.target.release


def test_the_index_says_the_same_and_no_more(pages):
    entries = [(RunRecord(slug, "passed", ""), summarize(facts.load(slug), None)) for slug in all_slugs()]
    index = index_page(entries)
    assert safest().text in index
    for slug in all_slugs():
        assert f"vLLM {exposure(slug).affected}" in index
        for line in exposure(slug).lines:
            assert line.releases("affected") in index


def test_an_incident_that_no_launch_reaches_has_no_lines():
    none = exposure("not-an-incident")
    assert (none.lines, none.affected, none.shown) == ((), "", "")
    assert none.safest == safest()


def test_a_launch_without_a_safe_place_is_not_given_one(monkeypatch):
    line = exposure(all_slugs()[0]).lines[0]
    assert screen.ScreenLine(line.line, None, ()).way_out == "none on record"


@pytest.mark.parametrize(
    ("others", "told"),
    [
        ((), "."),
        ((("a", "reach x"), ("b", "may reach y"), ("c", "reach x")), "; 2 reach x, 1 may reach y."),
    ],
)
def test_the_sentence_counts_what_is_reached_and_what_may_be(others, told):
    text = Safest("0.1.0", 3 - len(others), 3, others).text
    assert text.endswith(f"launches reach no incident as they are{told}")


def test_what_is_unknown_at_the_safest_release_is_not_called_reached():
    one = next(each for each in LAUNCHES if each.name == "hybrid-dflash")
    release = "0.30.0"
    assert CELLS.answers["hybrid-dflash", "pp-align-copy"][release] == "unknown"
    assert screen._reaches(one, release) == (one.shown, "reach dflash-oob")
    assert screen._reaches(one, "0.34.0")[1].startswith("may reach ")


def test_the_example_is_a_command_that_the_shell_reads(pages):
    for slug, text in pages.items():
        [example] = [text for tag, text in Screen(text).fields if text.startswith("specmortem check")]
        assert shlex.split(example)[-1] in [each.launch for each in LAUNCHES], slug
