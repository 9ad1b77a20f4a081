"""Pages in a real browser: nothing on the console, nothing on the network."""

import json
import os
import shutil
import subprocess
from html import escape
from pathlib import Path

import pytest
from nbformat import v4
from report import toy_repository as toy

from specmortem import facts as fact_files
from specmortem.report import html
from specmortem.report.html import RunRecord
from specmortem.report.summary import summarize

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
REQUIRED = bool(os.environ.get("SPECMORTEM_REQUIRE_BROWSER"))
pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(BROWSER is None and not REQUIRED, reason="no chromium or google-chrome on PATH"),
]
FLAGS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--enable-logging=stderr",
    "--hide-scrollbars",
    "--host-resolver-rules=MAP * ~NOTFOUND",
)
COMMITTED = sorted(Path(__file__).parents[2].glob("investigations/*/runs/*/postmortem.html"))
RUN = RunRecord("toy", "passed", "2026-01-02 03:04 UTC")


def open_page(page: Path, scratch: Path, *flags: str) -> subprocess.CompletedProcess[str]:
    """Load a page in a fresh profile, without any name resolution; stdout is the document afterwards."""
    arguments = (*FLAGS, *flags, f"--user-data-dir={scratch / 'profile'}", "--dump-dom", page.as_uri())
    done = subprocess.run([BROWSER, *arguments], capture_output=True, text=True, timeout=120)
    assert "</html>" in done.stdout, done.stderr
    return done


def visit(page: Path, scratch: Path) -> tuple[list[str], list[str]]:
    """Open a page; returns its console messages and the URLs that it requested beyond its own file."""
    log = scratch / "net.json"
    done = open_page(page, scratch, f"--log-net-log={log}")
    return [line for line in done.stderr.splitlines() if "CONSOLE" in line], requested(log)


def requested(log: Path) -> list[str]:
    """URLs that pages requested; a browser's own requests have no origin as their initiator."""
    data = json.loads(log.read_text())
    start = data["constants"]["logEventTypes"]["URL_REQUEST_START_JOB"]
    jobs = [event["params"] for event in data["events"] if event["type"] == start and "params" in event]
    return sorted({job["url"] for job in jobs if "url" in job and job.get("initiator") != "not an origin"})


@pytest.fixture
def facts(tmp_path):
    return fact_files.load("toy", toy.repository(tmp_path))


def test_a_postmortem_is_silent_and_stays_offline(facts, tmp_path):
    page = tmp_path / "page.html"
    page.write_text(html.page(toy.notebook("f(x)"), facts, None, RUN), encoding="utf-8")
    assert visit(page, tmp_path) == ([], [])


def test_the_index_is_silent_and_stays_offline(facts, tmp_path):
    page = tmp_path / "index.html"
    page.write_text(html.index_page([(RUN, summarize(facts, None))]), encoding="utf-8")
    assert visit(page, tmp_path) == ([], [])


@pytest.mark.parametrize("page", COMMITTED, ids=lambda page: "/".join(page.parts[-4:-1]))
def test_a_committed_page_is_silent_and_stays_offline(page, tmp_path):
    assert visit(page, tmp_path) == ([], [])


def test_the_visit_notices_a_request_and_a_console_error(tmp_path):
    page = tmp_path / "bad.html"
    page.write_text("<html><img src='http://specmortem.invalid/a.png'><script>throw 1</script></html>")
    console, urls = visit(page, tmp_path)
    assert any("Uncaught 1" in line for line in console)
    assert urls == ["http://specmortem.invalid/a.png"]


def test_no_page_is_wider_than_a_phone(facts, tmp_path):
    wide = v4.new_output("stream", name="stdout", text="x" * 400)
    table = v4.new_output(
        "display_data", data={"text/html": f"<table><tr>{'<td>wide</td>' * 99}</tr></table>"}
    )
    svg = v4.new_output(
        "display_data", data={"image/svg+xml": '<svg viewBox="0 0 900 9" width="900pt"></svg>'}
    )
    notebook = toy.notebook("y = " + "x" * 300)
    notebook.cells.append(v4.new_code_cell("z", outputs=[wide, table, svg], metadata={"tags": ["show-code"]}))
    inner = escape(html.page(notebook, facts, None, RUN))
    page = tmp_path / "frame.html"
    measure = "document.title = f.contentDocument.documentElement.scrollWidth + ' pixels'"
    page.write_text(
        f'<html><iframe id="f" style="width:360px;height:640px;border:0" srcdoc="{inner}" onload="{measure}">'
        "</iframe></html>",
        encoding="utf-8",
    )
    assert "<title>360 pixels</title>" in open_page(page, tmp_path).stdout
