"""Where an answer leads: its postmortem, an audit with the facts filled in, and the probe of its cause."""

from __future__ import annotations

import re
import shlex

from specmortem import incident
from specmortem.statements.config import settings
from specmortem.tools.triage.judge import INSUFFICIENT, NONE, Answer

_SAFE = re.compile(r"[\w.+-]{1,60}(?:/[\w.+-]{1,60})?")


def links(answer: Answer) -> dict[str, str]:
    """Postmortem page, audit command and probe command; what does not apply is left out."""
    if answer.answer in (NONE, INSUFFICIENT):
        return {"audit": audit_command(answer)} if "method" in answer.book else {}
    found = {"postmortem": postmortem(answer.answer), "audit": audit_command(answer)}
    if probe := probe_command(answer):
        found["probe"] = probe
    return found


def postmortem(slug: str) -> str:
    """The committed page of a reference run where there is one, else the incident's folder."""
    one = incident.get(slug)
    shown = str(one.folder or f"investigations/{slug}")
    for backend in ("cuda", "cpu", "sim"):
        if (one.home / (page := f"runs/{backend}/postmortem.html")).exists():
            return f"{shown}/{page}"
    return f"{shown}/"


def subject(answer: Answer) -> str:
    """The release that the log names, when it is a plain one."""
    version = answer.book.value("version")
    return f"vllm=={version}" if re.fullmatch(r"\d+\.\d+\.\d+(?:\.post\d+)?", version) else ""


def audit_command(answer: Answer) -> str:
    """`specmortem audit` for this release, incident and configuration."""
    stated = {name: value for name, value in settings(answer.book).items() if _SAFE.fullmatch(value)}
    words = ["specmortem", "audit", subject(answer) or "installed"]
    if answer.answer not in (NONE, INSUFFICIENT):
        words += ["--incident", answer.answer]
    command = shlex.join([*words, "--config", "-"] if stated else words)
    if not stated:
        return command
    given = " ".join(f"{name}={value}" for name, value in stated.items())
    return f"echo {shlex.quote(given)} | {command}"


def probe_command(answer: Answer) -> str:
    """`specmortem probe` of the likeliest cause of the incident that has a probe."""
    known = incident.causes()
    causes = [
        c.cause for c in answer.candidates if c.incident == answer.answer and c.alive and c.cause in known
    ]
    if not causes:
        return ""
    words = ["specmortem", "probe", causes[0]]
    return shlex.join([*words, "--subject", subject(answer)] if subject(answer) else words)
