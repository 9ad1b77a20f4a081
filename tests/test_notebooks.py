"""Every notebook with its quick parameters, and the pages that come of it."""

import json
import re
from pathlib import Path

import nbformat
import pytest
from click.testing import CliRunner

from specmortem import facts
from specmortem.cli import main
from specmortem.report.html import check_self_contained
from specmortem.verdict import Results

ROOT = Path(__file__).parents[1]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
pytestmark = pytest.mark.notebook


@pytest.fixture(scope="module")
def out(tmp_path_factory):
    folder = tmp_path_factory.mktemp("out")
    done = CliRunner().invoke(main, ["run", "--all", "--device", "sim", "--quick", "--out", str(folder)])
    assert done.exit_code == 0, done.output
    return folder


def test_every_incident_has_its_notebook_and_every_notebook_its_incident():
    named = {facts.load(slug).notebook for slug in facts.all_slugs()} | {"00-overview.ipynb"}
    assert named == {path.name for path in NOTEBOOKS}


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_is_stripped_and_its_cells_are_short(path):
    cells = [c for c in nbformat.read(path, 4).cells if c.cell_type == "code"]
    assert not any(c.outputs or c.execution_count for c in cells)
    assert max(len(c.source.splitlines()) for c in cells) <= 15
    assert sum("parameters" in c.metadata.get("tags", []) for c in cells) == 1


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_finds_its_files_whatever_folder_its_kernel_starts_in(path):
    source = "\n".join(c.source for c in nbformat.read(path, 4).cells if c.cell_type == "code")
    assert "incident.find_root().parent" in source
    assert not re.findall(r"""Path\(["'](?:data|investigations|out)""", source)


@pytest.mark.parametrize("slug", facts.all_slugs())
def test_results_fit_the_schema_and_the_incident(out, slug):
    results = Results.load(out / slug / "results.json")
    known = {cause.id for cause in facts.load(slug).causes}
    assert {row.cause for row in results.rows} <= known
    assert results.where(subject="before", arm="before", outcome="fault")
    assert not results.where(subject="after", outcome="fault")


def test_pages_are_self_contained_and_linked_from_the_index(out):
    pages = sorted(out.glob("**/*.html"))
    assert len(pages) == len(facts.all_slugs()) + 2
    for page in pages:
        assert check_self_contained(page.read_text(encoding="utf-8")) == []
    index = (out / "index.html").read_text(encoding="utf-8")
    assert all(f"{slug}/postmortem.html" in index for slug in facts.all_slugs())


@pytest.mark.browser
def test_pages_open_in_a_browser_without_console_error_or_request(out, tmp_path):
    from report import test_browser as browser

    if browser.BROWSER is None and not browser.REQUIRED:
        pytest.skip("no chromium or google-chrome on PATH")
    for number, page in enumerate(sorted(out.glob("**/*.html"))):
        scratch = tmp_path / str(number)
        scratch.mkdir()
        assert browser.visit(page, scratch) == ([], [])


def test_executed_notebook_has_no_error_output(out):
    for path in out.glob("*/executed.ipynb"):
        outputs = [o for c in json.loads(path.read_text())["cells"] for o in c.get("outputs", [])]
        assert not [o for o in outputs if o["output_type"] == "error"]
