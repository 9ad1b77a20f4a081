"""A check as text: on a terminal at most 25 lines for one affected incident, off it one line a finding."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator

from specmortem.affected.answers import EFFECTS, Answer, CauseAnswer, IncidentAnswer
from specmortem.affected.words import way_out
from specmortem.incident import get
from specmortem.report.terminal import CLEAN, FAULT, OPEN, Line, finding_line, write_lines
from specmortem.tools.check.report import Checked, CheckReport, date, title

WIDTH = 80
HEADS = {
    "affected": Line("✗ AFFECTED", FAULT),
    "unknown": Line("– unknown", OPEN),
    "not-affected": Line("✓", CLEAN),
}
ORDER: tuple[Answer, ...] = ("affected", "unknown", "not-affected")
HEAD = (
    "version", "model", "runner", "speculation", "drafts", "cache_mode", "async_scheduling", "pipeline",
    "draft_attention", "gpu",
)  # fmt: skip
MOST_CAUSES = 3
NAMES = {"speculation": "drafts by", "drafts": "drafts a step", "cache_mode": "mamba_cache_mode"}


def text(report: CheckReport) -> None:
    """Write it to standard output."""
    from rich.console import Console

    console = Console()
    lines = _terminal(report) if console.is_terminal else findings(report)
    write_lines(lines, console)


def findings(report: CheckReport) -> Iterator[str]:
    """A line for each incident and launch: subject, cause, answer, place, message; then the counts."""
    for each in report.checked:
        subject = each.subject or (f"vllm=={each.config.version}" if each.config.version else "vllm")
        for one in _ordered(each):
            causes = one.deciding or (None,)
            for cause in causes:
                name = f"{one.incident}/{cause.cause}" if cause else one.incident
                yield finding_line(subject, name, one.answer, each.name, _message(each, one, cause))
    yield counts(report)


def _message(each: Checked, one: IncidentAnswer, cause: CauseAnswer | None) -> str:
    if cause is None:
        return "no cause of it that this launch reaches faults here"
    told = f"{title(one.incident, cause.cause)}; {cause.why}"
    if one.answer == "unknown":
        return f"{told}; add {', '.join(each.missing)}" if each.missing else told
    return f"{told}; {way_out(each.advice)}"


def counts(report: CheckReport) -> str:
    """The last line."""
    answers = [one.answer for each in report.checked for one in each.answers.incidents]
    told = ", ".join(f"{answers.count(name)} {name.replace('-', ' ')}" for name in ORDER)
    launches = f" in {len(report.checked)} launches" if len(report.checked) > 1 else ""
    return f"{told}{launches}. Verdicts of {date()}."


def _ordered(each: Checked) -> list[IncidentAnswer]:
    return sorted(each.answers.incidents, key=lambda one: ORDER.index(one.answer))


def _terminal(report: CheckReport) -> Iterator[Line | str]:
    ordered = sorted(report.checked, key=lambda each: ORDER.index(each.answers.answer))
    for each in ordered:
        if len(ordered) > 1:
            yield Line(f"— {each.name}", "bold")
        yield from _launch(each)
    yield counts(report)


def _launch(each: Checked) -> Iterator[Line | str]:
    yield from _wrapped(_understood(each), "")
    for one in _ordered(each):
        if one.answer != "not-affected":
            yield from _incident(each, one)
    if clean := each.answers.named("not-affected"):
        yield from _wrapped(f"✓ not affected: {', '.join(one.incident for one in clean)}", "", CLEAN)
    if each.answers.answer == "affected":
        yield from _wrapped(f"→ {way_out(each.advice)}", "", "green")
        for command in each.ways:
            yield Line(f"  $ {command}")
    if each.missing:
        yield from _wrapped(f"to know more, add: {'; '.join(each.missing)}", "", OPEN)


def _understood(each: Checked) -> str:
    """The effective configuration; what nothing states is marked."""
    known, assumed = each.understood, set(each.assumed)
    words = [
        f"{NAMES.get(name, name)} {entry['value']}{'*' if name in assumed else ''}"
        for name, entry in known.items()
        if name in HEAD
    ]
    note = " (* default or derived)" if assumed else ""
    return f"{', '.join(words) or 'nothing is known of the launch'}{note}"


def _incident(each: Checked, one: IncidentAnswer) -> Iterator[Line]:
    head, causes = HEADS[one.answer], one.deciding
    names = ", ".join(cause.cause for cause in causes)
    yield from _wrapped(f"{head.text} {one.incident}: {names}", "", head.style)
    if one.answer == "unknown":
        return
    for cause in causes[:MOST_CAUSES]:
        told = f"{title(one.incident, cause.cause)}: {EFFECTS[cause.rule.effect]}"
        yield from _wrapped(f"{told}.{f' Needs {cause.rule.also}.' if cause.rule.also else ''}", "  ")
    if shown := get(one.incident).shown:
        yield from _wrapped(f"shown {shown}", "  ", "dim")


def _wrapped(words: str, indent: str, style: str = "") -> Iterator[Line]:
    for line in textwrap.wrap(words, WIDTH, initial_indent=indent, subsequent_indent=f"{indent}  "):
        yield Line(line, style)
