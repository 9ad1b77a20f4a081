"""Triage: from a crash log or a report to the known defect that it fits, or an honest "none of these".

`triage(paths)` reads logs and reports, splits what tells of several incidents, weighs the facts by the rules of
`rules.toml`, and returns a `TriageReport`. Nothing in here imports torch.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Iterable, Mapping

from specmortem.tools.triage import reader
from specmortem.tools.triage.cases import split
from specmortem.tools.triage.judge import INSUFFICIENT, NONE, Answer, judge
from specmortem.tools.triage.render import as_html, as_markdown, as_text, candidate_rows, headline, next_rows
from specmortem.tools.triage.report import TriageReport, report

__all__ = [
    "FORMATS",
    "INSUFFICIENT",
    "NONE",
    "Answer",
    "TriageReport",
    "candidate_rows",
    "headline",
    "next_rows",
    "triage",
    "triage_text",
]

FORMATS: Mapping[str, Callable[[TriageReport], str]] = types.MappingProxyType(
    {"text": as_text, "json": lambda r: r.as_json() + "\n", "markdown": as_markdown, "html": as_html}
)


def triage(paths: Iterable[str]) -> TriageReport:
    """The report on these files together; `-` is standard input.

    Raises UnavailableError for a file that cannot be read, BadInputError for a damaged archive.
    """
    return _report(reader.read(paths))


def triage_text(text: str, name: str = "text") -> TriageReport:
    """The report on a text."""
    return _report(reader.read_text(text, name))


def _report(segments: list[reader.Segment]) -> TriageReport:
    return report((case.where, judge(case.book)) for case in split(segments))
