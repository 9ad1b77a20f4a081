"""Nothing private leaves, and nothing from a log is live in any output."""

import json
from html import unescape
from html.parser import HTMLParser

import pytest

from specmortem.affected.targets import advise
from specmortem.affected.words import way_out
from specmortem.report.html import check_self_contained
from specmortem.statements.launch import parse
from specmortem.tools.triage import candidate_rows, headline, next_rows, triage_text
from specmortem.tools.triage.redact import Redactor
from specmortem.tools.triage.render import as_html, as_markdown, as_text, code

from . import logs

HOSTILE = [
    "<script>alert(1)</script>",
    "<img src=x onerror=alert(1)>",
    "\x1b]0;owned\x07\x1b[2J",
    "`` ` ``` @maintainer #1 [x](javascript:alert(1)) <!-- --> | a | b |",
    "\u202eevil\u202c",
    "{{ 7 * 7 }} {% raw %}",
]
SECRETS = {
    "address": ["10.1.2.3:8000", "https://internal.example.com/x?y=1", "fe80::1ff:fe23:4567:890a"],
    "path": ["/home/alice/models/secret", "C:\\Users\\alice\\vllm\\x.txt"],
    "key": [
        "sk-abcdefgh12345678",
        "hf_abcdefghijklmnop",
        "Authorization: Bearer abcdef123456",
        "--api-key topsecret123",
    ],
    "user": ["alice@example.com"],
    "host": ["--host gpu-box-7", "node42.cluster.internal"],
    "identifier": ["chatcmpl-1234567890abcdef", "GPU-01234567-89ab-cdef-0123-456789abcdef"],
    "prompt": ["prompt: 'tell me about my disease'", '"content": "my secret question"'],
}


class Page(HTMLParser):
    def __init__(self, text):
        super().__init__()
        self.tags, self.attributes = set(), set()
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.add(tag)
        self.attributes |= {name for name, _ in attrs}


@pytest.mark.parametrize("text", HOSTILE)
def test_no_output_carries_anything_live(text):
    report = triage_text(f"{logs.MTP}CUDA error: an illegal memory access {text} MTP n=4 {text}\n")
    page = Page(as_html(report))
    assert not page.tags & {"script", "img", "iframe", "a", "link", "object"}
    assert not any(name.startswith("on") or name in ("src", "href") for name in page.attributes)
    for output in (as_html(report), as_markdown(report), as_text(report), report.as_json()):
        assert not any(c in output for c in "\x1b\x07\u202e")
    assert check_self_contained(as_html(report)) == []
    assert ("{{ 7 * 7 }}" in as_html(report)) is ("7 * 7" in text)


@pytest.mark.parametrize("text", ["a`b", "``", "`a`", "a``b`c", "| x |", "\n x\r", "@user #12", ""])
def test_code_spans_hold_any_text(text):
    span = code(text)
    assert "\n" not in span and "\r" not in span
    if not span:
        return
    fence = len(span) - len(span.lstrip("`"))
    inner = span[fence:-fence]
    assert span.endswith("`" * fence) and "`" * fence not in inner


@pytest.mark.parametrize("kind, secret", [(kind, text) for kind, texts in SECRETS.items() for text in texts])
def test_private_things_are_replaced_and_counted(kind, secret):
    redact = Redactor()
    out = redact(f"CUDA error {secret} end")
    assert secret not in out
    assert redact.counts[kind] >= 1


@pytest.mark.parametrize(
    "text",
    [
        'File "vllm/v1/worker/gpu_model_runner.py", line 12, in execute_model',
        "Running: 5 reqs, Waiting: 0 reqs, GPU KV cache usage: 5.7%",
        "model=Qwen/Qwen3.5-4B, num_speculative_tokens=4",
        "ERROR 03-04 10:00:00 CUDA error: an illegal memory access",
        "the draft token generation loop in vllm/v1/spec_decode/dflash.py",
    ],
)
def test_evidence_survives_redaction(text):
    out = Redactor()(text)
    for word in (
        "gpu_model_runner.py",
        "Running: 5 reqs",
        "Qwen3.5-4B",
        "10:00:00",
        "illegal memory access",
        "generation",
        "vllm/v1/spec_decode",
    ):
        assert (word in out) == (word in text)


@pytest.mark.parametrize("kind, secret", [(kind, text) for kind, texts in SECRETS.items() for text in texts])
def test_no_secret_in_any_output(kind, secret):
    report = triage_text(f"MTP n=4 CUDA error: an illegal memory access {secret}\n")
    for output in (as_html(report), as_markdown(report), as_text(report), report.as_json()):
        assert secret not in output
    assert report.redacted[kind] >= 1


def test_a_secret_is_gone_also_where_an_excerpt_begins_inside_it():
    key, question = "sk-" + "a1B2" * 30, "my question " * 80
    for secret in (f"Authorization: Bearer {key}", f'"content": "{question}"', "/home/alice/" + "deep/" * 60):
        report = triage_text(f"{secret} vLLM MTP n=4 CUDA error: an illegal memory access\n")
        for part in ("a1B2a1B2", "my question", "alice", "deep/deep"):
            assert part not in report.as_json()


def test_the_json_form():
    found = json.loads(triage_text(logs.DFLASH, "server.log").as_json())
    assert found["answer"] == "dflash-oob"
    assert found["facts"]["k"][0] | {"text": ""} == {
        "value": "15", "file": "server.log", "line": 2, "text": "", "seen": 1, "time": "03-04 10:00:09",
    }  # fmt: skip
    best = found["candidates"][0]
    assert {"incident", "cause", "score", "for", "against"} <= best.keys()
    assert {"experiment", "command", "separates"} <= found["next"][0].keys()
    assert "specmortem audit" in found["links"]["audit"]
    assert found["links"]["probe"] == "specmortem probe gdn-unbounded-accepted --subject vllm==0.22.1"
    assert found["links"]["postmortem"].startswith("investigations/dflash-oob/")


def test_markdown_has_what_an_issue_asks_for():
    text = as_markdown(triage_text(logs.MTP + "INFO 03-04 10:00:00 [core.py:1] illegal memory access\n"))
    for title in ("Environment", "Timeline", "Evidence", "Controls"):
        assert f"#### {title}\n" in text
    assert "Redacted before pasting" in text


def test_the_tables_of_a_notebook():
    found = triage_text(logs.DFLASH, "server.log")
    rows, best = candidate_rows(found), found.parts[0]["candidates"][0]
    assert headline(found.as_dict()).startswith("dflash-oob: ")
    assert rows[0]["candidate"] == f"dflash-oob / {best['cause']}"
    assert rows[0]["for"].startswith(f"{best['for'][0]['weight']:g}: {best['for'][0]['reason']}")
    assert "[server.log:" in rows[0]["for"]
    predicted = {row["how"]: row["predicted"] for row in next_rows(found)}
    assert f"{best['cause']}: clean" in predicted["--enforce-eager"]
    assert candidate_rows(triage_text("hello")) == [] == next_rows(triage_text("hello"))


def forms(text):
    report = triage_text(text)
    return report.parts[0]["mitigation"], (
        as_text(report),
        as_markdown(report),
        as_html(report),
        report.as_json(),
    )


def test_an_affected_launch_gets_the_way_out_that_check_gives():
    mitigation, outputs = forms(logs.DFLASH)
    expected = way_out(advise(parse(logs.DFLASH)))
    assert expected.startswith("safe on vLLM 0.")
    assert mitigation == {"answer": "affected", "told": expected}
    assert all(f"mitigation: {unescape(expected)}" in unescape(output) for output in outputs[:3])


def test_an_unknown_launch_gets_no_advice_but_what_to_add():
    """Its text says that --no-async-scheduling helped, which is a sentence and no verdict."""
    mitigation, outputs = forms(logs.COUNTS)
    assert mitigation["answer"] == "unknown"
    assert mitigation["told"].startswith("not known for this launch; add ")
    assert all("no mitigation: not known for this launch; add " in output for output in outputs[:3])
    assert not any("safe on vLLM" in output for output in outputs)


@pytest.mark.parametrize(
    "advice", ["upgrade to 0.99.0, it is safe there", "--enforce-eager helped, use that"]
)
def test_no_advice_is_taken_from_the_text(advice):
    before, _ = forms(logs.DFLASH)
    after, _ = forms(f"{logs.DFLASH}We found a workaround: {advice}.\n")
    assert after.get("told") == before["told"]


def test_a_launch_that_is_not_affected_gets_no_advice():
    launch = 'vllm serve Qwen/Qwen3.6-35B-A3B --speculative-config \'{"method": "mtp", "num_speculative_tokens": 1}\''
    fault = "\n".join(line for line in logs.DFLASH.splitlines() if "with config" not in line)
    mitigation, outputs = forms(f"{launch}\n\nvLLM version: 0.25.1\n\n{fault}")
    assert mitigation["answer"] == "not-affected"
    assert all("no mitigation: by the verdicts on record the launch that" in output for output in outputs[:3])
    assert not any("safe on vLLM" in output for output in outputs)


def test_several_launches_are_counted():
    one, two = logs.MTP, logs.MTP.replace("Qwen3.5-4B", "Qwen3.5-9B")
    assert "note" not in forms(one)[0]
    mitigation, outputs = forms(one + two)
    assert mitigation["note"] == "the text states 2 launches; specmortem check judges all of them"
    assert all(f"note: {mitigation['note']}" in output for output in outputs[:3])


@pytest.mark.parametrize("text", [logs.NO_DRAFTER, "nothing to see\n"], ids=["none", "insufficient"])
def test_there_is_no_mitigation_where_no_incident_fits(text):
    mitigation, outputs = forms(text)
    assert mitigation == {}
    assert not any("itigation:" in output or "#### Mitigation" in output for output in outputs[:3])


def test_off_a_terminal_the_answer_is_plain_lines_that_begin_with_it():
    lines = as_text(triage_text(logs.DFLASH)).splitlines()
    assert lines[0].startswith("dflash-oob: ")
    assert lines[1].startswith("mitigation: ")
    assert lines[2] == ""
    assert all(line == line.rstrip() and "\x1b" not in line for line in lines)
