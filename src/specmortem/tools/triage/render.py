"""A report for a terminal, as Markdown to paste upstream, and as a page. What comes from a log is always escaped."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from specmortem.tools.triage.judge import INSUFFICIENT, NONE
from specmortem.tools.triage.report import TriageReport

SHOWN = 3
ENVIRONMENT = (
    "engine", "version", "fork", "runner", "model", "gpu", "arch", "driver", "tp", "pp", "dp", "spec",
    "method", "k", "async", "graphs", "backend", "draft_backend", "loop_backend", "cache_mode",
    "prefix_cache", "block_size", "state_block", "kv_cache_dtype", "max_num_seqs", "max_model_len",
    "max_num_batched_tokens",
)  # fmt: skip
EVIDENCE = (
    "fault", "xid", "access", "kernel_dump", "kernel", "other_kernel", "symptom", "phase", "trigger",
    "concurrency", "running", "kv_usage", "acceptance_length", "mechanism", "messenger", "frame",
)  # fmt: skip
HEADLINES: Mapping[str, str] = {NONE: "none of these incidents", INSUFFICIENT: "not enough evidence"}


def headline(data: Mapping[str, Any]) -> str:
    """The answer in one line."""
    name = HEADLINES.get(data["answer"], data["answer"])
    if data["answer"] == INSUFFICIENT:
        return str(name)
    detail = data["because"] if data["answer"] == NONE else data["cause"]
    return f"{name}: {detail} ({data['confidence']} confidence)"


def as_text(report: TriageReport) -> str:
    """For a terminal: plain lines, no escapes from the log."""
    lines: list[str] = []
    for part in report.parts:
        if len(report.parts) > 1:
            lines += [f"=== {part['where']}", ""]
        lines += [*_text_part(part), ""]
    if report.redacted:
        lines.append(
            "redacted: " + ", ".join(f"{count} {kind}" for kind, count in sorted(report.redacted.items()))
        )
    return "\n".join(lines).rstrip() + "\n"


def _text_part(data: Mapping[str, Any]) -> list[str]:
    lines = [headline(data), *mitigation_lines(data), ""]
    for candidate in _shown(data):
        lines.append(f"{candidate['incident']} / {candidate['cause']}  score {candidate['score']:g}")
        lines += [f"  + {a['weight']:g}  {a['reason']}{_at(a)}" for a in candidate["for"]]
        lines += [f"  - {a['weight']:g}  {a['reason']}{_at(a)}" for a in candidate["against"]]
        lines += [f"  x    {a['reason']}{_at(a)}" for a in candidate["excluded_by"]]
    lines += [f"  0    {text}" for text in data["weighs_nothing"]]
    if data["next"]:
        lines += ["", "next:"]
        for entry in data["next"]:
            lines += [f"  {entry['does']}: {entry['command']}"]
            lines += [f"      {cause}: {told}" for cause, told in entry["separates"].items()]
    if data["collect"]:
        lines += ["", "collect:", *(f"  {text}" for text in data["collect"])]
    if data["links"]:
        lines += ["", *(f"{name}: {text}" for name, text in data["links"].items())]
    return lines


def mitigation_lines(data: Mapping[str, Any]) -> list[str]:
    """What to do about the launch that is stated, and what to know beside it; nothing where no incident fits."""
    found = data["mitigation"]
    told = (
        f"{'mitigation' if found['answer'] == 'affected' else 'no mitigation'}: {found['told']}"
        if found
        else ""
    )
    note = f"note: {found['note']}" if "note" in found else ""
    return [line for line in (told, note) if line]


def _shown(data: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The candidates that matter to a reader: those with something for them that nothing excludes."""
    alive = [c for c in data["candidates"] if not c["excluded_by"] and c["score"] > 0]
    return alive[:SHOWN]


def candidate_rows(report: TriageReport) -> list[dict[str, str]]:
    """The main answer's candidates as rows of a table, and what speaks for and against each, with file and line."""
    return [
        {
            "candidate": f"{c['incident']} / {c['cause']}",
            "score": f"{c['score']:g}",
            "for": _weighed(c["for"]),
            "against": _weighed(c["against"]),
        }
        for c in _shown(report.parts[0])
    ]


def next_rows(report: TriageReport) -> list[dict[str, str]]:
    """The main answer's next experiments as rows of a table, and what each candidate predicts of them."""
    return [
        {"next": entry["does"], "how": entry["command"], "predicted": _predicted(entry)}
        for entry in report.parts[0]["next"]
    ]


def _predicted(entry: Mapping[str, Any]) -> str:
    return "; ".join(f"{cause}: {told}" for cause, told in entry["separates"].items())


def _weighed(arguments: Iterable[Mapping[str, Any]]) -> str:
    return "; ".join(f"{a['weight']:g}: {a['reason']}{_at(a)}" for a in arguments)


def _at(argument: Mapping[str, Any]) -> str:
    places = dict.fromkeys(map(_where, argument["facts"]))
    return f"  [{', '.join(places)}]" if places else ""


def code(text: str) -> str:
    """`text` as a code span, in which Markdown, HTML, mentions and issue numbers mean nothing."""
    text = text.replace("\r", " ").replace("\n", " ").strip()
    if not text:
        return ""
    fence = "`"
    while fence in text:
        fence += "`"
    pad = " " if text.startswith("`") or text.endswith("`") else ""
    return f"{fence}{pad}{text}{pad}{fence}"


def as_markdown(report: TriageReport) -> str:
    """Ready to paste into an upstream issue: environment, timeline, evidence, controls."""
    lines = [line for part in report.parts for line in _markdown_part(part)]
    counts = ", ".join(f"{count} × {kind}" for kind, count in sorted(report.redacted.items())) or "nothing"
    return "\n".join([*lines, f"Redacted before pasting: {counts}.", ""])


def _markdown_part(data: Mapping[str, Any]) -> list[str]:
    facts = data["facts"]
    lines = [f"### Triage of {code(data['where'])}", "", f"**{headline(data)}**", ""]
    for title, items in {
        "Environment": [
            f"{n}: {', '.join(code(f['value']) for f in facts[n])}" for n in ENVIRONMENT if n in facts
        ],
        "Timeline": [f"{code(f['time'])} {code(f['text'])}" for f in _timeline(facts)],
        "Evidence": [_evidence(n, f) for n in EVIDENCE for f in facts.get(n, ())[:4]],
        "Controls": [f"{n}: {f['value']}, {code(f['text'])}" for n, f in _controls(facts)],
        "Mitigation": map(_plain, mitigation_lines(data)),
        "Candidates": [_markdown_candidate(candidate) for candidate in _shown(data)],
        "Weighs nothing": map(_plain, data["weighs_nothing"]),
        "Next": [f"{n['does']}: {code(n['command'])}; {_predicted(n)}" for n in data["next"]],
        "Still to collect": map(_plain, data["collect"]),
        "See": [f"{name}: {code(text)}" for name, text in data["links"].items()],
    }.items():
        if shown := [f"- {item}" for item in items]:
            lines += [f"#### {title}", "", *shown, ""]
    return lines


def _plain(text: str) -> str:
    """Our own sentences hold brackets that Markdown would take for links."""
    return text.replace("[", "\\[").replace("<", "&lt;")


def _evidence(name: str, f: Mapping[str, Any]) -> str:
    return f"{name} {code(f['value'])} ({code(_where(f))}, seen {f['seen']}): {code(f['text'])}"


def _controls(facts: Mapping[str, list[dict[str, Any]]]) -> list[tuple[str, dict[str, Any]]]:
    """(what was changed, the statement of what happened then)."""
    named = [name for name in facts if name.startswith("control.")]
    return [(name.removeprefix("control."), f) for name in named for f in facts[name]]


def _markdown_candidate(candidate: Mapping[str, Any]) -> str:
    lines = [f"**{candidate['incident']} / {candidate['cause']}**, score {candidate['score']:g}"]
    for side in ("for", "against"):
        lines += [f"  - {side} ({a['weight']:g}): {a['reason']} ({a['source']})" for a in candidate[side]]
    return "\n".join(lines)


def _timeline(facts: Mapping[str, list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """What is dated, once for each line, in the order of the files."""
    dated = {(f["file"], f["line"]): f for stated in facts.values() for f in stated if f.get("time")}
    return [dated[place] for place in sorted(dated)][:20]


def _where(fact: Mapping[str, Any]) -> str:
    return f"{fact['file'].rsplit('/', 1)[-1]}:{fact['line']}"


def as_html(report: TriageReport) -> str:
    """A page of its own: no script, nothing fetched, everything from the log escaped."""
    from specmortem.report.html import standalone

    parts = [
        (part, headline(part), mitigation_lines(part), _shown(part), _timeline(part["facts"]))
        for part in report.parts
    ]
    return standalone(
        Path(__file__).parent,
        "triage.html.j2",
        "the triage",
        parts=parts,
        redacted=sorted(report.redacted.items()),
        environment_names=ENVIRONMENT,
        evidence_names=EVIDENCE,
        where=_where,
    )
