"""The README's table of incidents is that of the verdicts."""

import importlib.util
import re

import pytest
from affected import home
from affected.first_screen import Cells

from specmortem.affected import matrix
from specmortem.incident import all_slugs

SPEC = importlib.util.spec_from_file_location("readme", home.ROOT / "docs" / "readme.py")
readme = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(readme)
PAGE = readme.PAGE.read_text(encoding="utf-8")


def test_the_table_is_that_of_the_verdicts():
    assert readme.written(PAGE) == PAGE, "run python docs/readme.py"


@pytest.mark.parametrize(("old", "new"), [("**0.", "**1."), ("safe over all", "safe, says nobody, over all")])
def test_a_table_that_says_something_else_is_written_again(old, new):
    assert old in PAGE
    other = PAGE.replace(old, new, 1)
    assert readme.written(other) == PAGE != other


@pytest.mark.parametrize("mark", [readme.BEGIN, readme.END])
def test_a_page_without_a_mark_is_refused(mark):
    with pytest.raises(ValueError, match="README.md has no <!-- written by docs/readme.py -->"):
        readme.written(PAGE.replace(mark, ""))


def test_every_incident_has_a_row_whose_links_lead_somewhere():
    rows = [line for line in readme.text().splitlines() if line.startswith("| [`")]
    assert [re.search(r"`([\w-]+)`", row)[1] for row in rows] == all_slugs()
    links = re.findall(r"\]\(([^)]+)\)", readme.text())
    assert len(links) > len(rows)
    assert [link for link in links if not (home.ROOT / link).is_file()] == []


def test_the_rows_agree_with_the_table_of_exposure():
    cells = Cells(home.ROOT / matrix.FILE)
    known = {each.shown: each.name for each in matrix.configurations()}
    for row in (line for line in readme.text().splitlines() if line.startswith("| [`")):
        slug = re.search(r"`([\w-]+)`", row)[1]
        _, _, affected, safe, _ = row.split("|")
        for told, release in zip(affected.strip().split("<br>"), safe.strip().split("<br>"), strict=True):
            launch, _, releases = told.rpartition(": ")
            name = known[re.sub(r" \(and \d+ alike\)$|`", "", launch)]
            assert cells.told(releases.strip("*")) == cells.having(name, slug, "affected")
            if " " not in release:
                assert cells.hit(name, release) == []
