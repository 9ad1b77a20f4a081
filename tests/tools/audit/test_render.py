"""The forms of an audit: every cell has its witness, nothing foreign gets out of its place."""

import csv
import io
import json
import re
from dataclasses import replace

import pytest
from rich.console import Console

from specmortem import incident
from specmortem.exposure import Config
from specmortem.facts import Cause, Fix
from specmortem.report.html import check_self_contained
from specmortem.tools.audit import render
from specmortem.tools.audit.matrix import Audit, AuditRow, CauseFacts, facts_of
from specmortem.verdict import Evidence

NASTY = "<script>alert(1)</script> | `x` [y](javascript:z)"


def row(status="fault", subject="vllm==0.1.0", cause="v2-null-block", **fields):
    evidence = fields.pop("evidence", Evidence("input", "slots [0]", "slots [-1]", "kernel (k.py:3)", "why"))
    return AuditRow(
        subject, subject.partition("==")[2], cause, "dflash-oob", "a title", status, evidence, **fields
    )


FULL = Audit(
    (
        row(hashes={"f": "abc123"}, fixed="0.2.0", workarounds=("upgrade",), expected="affected"),
        row("clean", "vllm==0.2.0", same_code_as="vllm==0.3.0", expected="affected"),
        row(
            "not-judged",
            cause="batch-row-index",
            evidence=Evidence(reason=NASTY),
        ),
        row("not-present", "vllm==0.2.0", "batch-row-index", evidence=Evidence(reason="has no file")),
    ),
    judged=2,
    cached=2,
    bytes_moved=10,
    device="sim",
)
REACHED = Audit(
    (row(reach="no", reach_reason="needs the V2 runner; here: v1"), row(subject="vllm==0.2.0", reach="yes")),
    1,
    0,
    0,
    "sim",
    Config(unknown=("--odd",)),
)


def test_the_page_stands_alone_and_each_cell_links_to_its_witness():
    page = render.page(FULL)
    assert check_self_contained(page) == []
    links = re.findall(r'<td><a class="verdict [\w-]+" href="#([^"]+)"', page)
    assert len(links) == len(FULL.rows)
    assert all(page.count(f'id="{link}"') == 1 for link in links)
    assert "<script>" not in page and "&lt;script&gt;" in page
    assert render.today() in page and "same code as vllm==0.3.0" in page


def test_the_page_says_what_a_configuration_reaches():
    page = render.page(REACHED)
    assert "not reachable" in page and "needs the V2 runner; here: v1" in page
    assert "flags that were not read: --odd" in page


def test_markdown_escapes_and_lists_faults_with_what_to_do():
    text = render.markdown(FULL)
    table = [line for line in text.splitlines() if line.startswith("|")]
    assert [line.replace("\\|", "").count("|") for line in table] == [4] * 4
    assert "fixed in 0.2.0; upgrade" in text
    assert not re.search(r"(?<!\\)[<\[`]", text.partition("## Not judged")[2])


def test_csv_has_a_line_a_row():
    rows = list(csv.DictReader(io.StringIO(render.as_csv(FULL))))
    assert [r["status"] for r in rows] == ["fault", "clean", "not-judged", "not-present"]
    assert rows[0]["hashes"] == "f=abc123" and rows[0]["date"] == render.today()
    assert rows[1]["same_code_as"] == "vllm==0.3.0" and rows[2]["witness"] == NASTY


def test_csv_advises_on_faults_only():
    done = Audit((row(workarounds=("upgrade",)), row("clean", workarounds=("upgrade",))), 1, 0, 0, "sim")
    rows = list(csv.DictReader(io.StringIO(render.as_csv(done))))
    assert [r["workarounds"] for r in rows] == ["upgrade", ""]


def test_json_is_whole():
    data = json.loads(render.as_json(FULL))
    assert len(data["rows"]) == 4 and data["rows"][0]["advice"] == "fixed in 0.2.0; upgrade"
    assert data["rows"][1]["differs"] is True and data["rows"][0]["differs"] is False
    assert json.loads(render.as_json(REACHED))["config"]["unknown"] == ["--odd"]


def test_the_terminal_shows_verdict_body_witness_and_advice():
    console = Console(width=200, record=True, file=io.StringIO(), force_terminal=True)
    render.terminal(FULL, console, verbose=True)
    render.terminal(REACHED, console, verbose=True)
    text = console.export_text()
    assert "✗ fault" in text and "abc123" in text and "→ fixed in 0.2.0; upgrade" in text
    assert "✗ fault, not reachable" in text and "the incident file says: affected" in text


def test_what_is_out_of_reach_and_hashes_are_told_only_when_asked_for():
    def told(audit, **options):
        console = Console(width=200, record=True, file=io.StringIO(), force_terminal=True)
        render.terminal(audit, console, **options)
        return console.export_text()

    assert "abc123" not in told(FULL) and "needs the V2 runner" not in told(REACHED)
    assert "1 fault, not reachable, 1 fault, reached" in told(REACHED)
    assert "needs the V2 runner" in told(REACHED, verbose=True)


def test_off_a_terminal_a_verdict_is_one_line_with_its_cause_whole_and_what_is_reached_comes_first():
    console = Console(width=40, file=(out := io.StringIO()))
    render.terminal(REACHED, console, verbose=True)
    lines = out.getvalue().splitlines()
    assert lines[0].startswith("vllm==0.2.0: v2-null-block: ✗ fault, reached: kernel (k.py:3): ")
    assert lines[1].startswith("vllm==0.1.0: v2-null-block: ✗ fault, not reachable: ")


def test_lines_of_another_release_are_marked():
    told = row(same_code_as="vllm==0.3.0").witness
    assert told == "slots [0] (kernel (k.py:3)) [lines of vllm==0.3.0, the same code]"
    assert row(same_code_as="vllm==0.3.0", evidence=Evidence(observed="slots")).witness == "slots"


def test_a_place_is_printed_once():
    twice = Evidence(observed="load at kernel (k.py:3), lane 0: outside", place="kernel (k.py:3)")
    assert row(evidence=twice).witness == twice.observed


@pytest.mark.parametrize(
    ("version", "expected"),
    [("0.1.9", "affected"), ("0.2.0", "not affected"), ("", ""), ("not-a-version", "")],
)
def test_what_the_incident_file_says_of_a_release(version, expected):
    cause = Cause("c", "t", "m", "cpu", "r", Fix("0.2.0"), "<0.2.0")
    assert CauseFacts(cause).expected(version) == expected


def test_a_cause_whose_incident_file_is_missing_has_no_facts(tmp_path):
    facts = facts_of(incident.probe_of("v2-null-block"), tmp_path)
    assert (facts.fixed, facts.workarounds, facts.expected("0.24.0")) == ("", (), "")
    assert row().advice == ""


def test_facts_come_from_the_incident_file():
    facts = facts_of(incident.probe_of("v2-null-block"))
    assert facts.fixed == "0.28.0" and facts.expected("0.27.1") == "affected"
    assert any("0.28.0" in action for action in facts.workarounds)


def told(audit, **options):
    console = Console(file=io.StringIO(), width=80)
    render.terminal(audit, console, **options)
    return console.file.getvalue().splitlines()


GONE = Evidence(reason="no such wheel", detail={"unavailable": True})


def test_a_subject_that_could_not_be_had_is_one_line_and_not_one_a_cause():
    lost = [
        row("not-judged", "vllm==9.9", cause, evidence=GONE, unavailable=True)
        for cause in ("a-cause", "b-cause")
    ]
    other = row("not-judged", "vllm==9.9", "c-cause", evidence=Evidence(reason="needs a GPU"))
    lines = told(Audit((*lost, other, row("clean")), 1, 0, 0, "sim"))
    assert [line for line in lines if "9.9" in line] == ["vllm==9.9: -: – not judged: -: no such wheel"]
    assert any(line.startswith("vllm==0.1.0: v2-null-block: ✓ clean") for line in lines)


def test_a_subject_with_a_verdict_is_not_lost():
    rows = (row("not-judged", cause="a-cause", evidence=GONE, unavailable=True), row("clean"))
    assert render.lost_subjects(Audit(rows, 1, 0, 0, "sim")) == {}
    assert sum(": a-cause: " in line for line in told(Audit(rows, 1, 0, 0, "sim"))) == 1


def test_several_launches_are_named_where_the_first_is_judged():
    note = "3 launches are stated, the first is judged; specmortem check judges all of them"
    audit = replace(REACHED, launches=3)
    assert note in told(audit) and note in render.markdown(audit) and note in render.page(audit)
    assert note in json.loads(render.as_json(audit))["notes"]
    assert not any("launches are stated" in line for line in told(REACHED))
