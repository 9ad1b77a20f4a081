"""An audit as a table on a terminal, JSON, Markdown, CSV, or a page that stands alone."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specmortem.report.terminal import (
    MARKS,
    OPEN,
    Line,
    TableCell,
    escaped,
    markdown_table,
    write_lines,
    write_table,
)
from specmortem.tools.audit.matrix import Audit, AuditRow
from specmortem.verdict import versions

if TYPE_CHECKING:
    from rich.console import Console

REACHED: Mapping[str, str] = {"yes": "reached", "no": "not reachable", "unknown": "reach not known", "": ""}
COLUMNS = (
    "date", "subject", "version", "cause", "incident", "status", "witness", "hashes", "same_code_as",
    "fixed", "workarounds", "expected", "judged_on",
)  # fmt: skip


def today() -> str:
    """The date, as pages and tables show it."""
    return datetime.now(UTC).date().isoformat()


def told(row: AuditRow) -> str:
    """Status, and where a configuration was given whether it reaches the cause."""
    return str(MARKS[row.status]) + (f", {REACHED[row.reach]}" if row.reach and row.status == "fault" else "")


def terminal(audit: Audit, console: Console | None = None) -> None:
    """One table a subject; then what a configuration reaches, and flags that were not read."""
    columns = ("cause", "verdict", "body", "what was seen, and what to do")
    for subject, rows in by(audit, "subject").items():
        write_table(columns, map(_cells, rows), subject, console)
    write_lines((Line(note, OPEN) for note in notes(audit)), console)


def _cells(row: AuditRow) -> tuple[TableCell, ...]:
    seen = [Line(row.witness)]
    if row.advice:
        seen.append(Line(f"→ {row.advice}", "green"))
    if row.reach and row.status in ("fault", "not-judged"):
        seen.append(Line(f"{REACHED[row.reach]}: {row.reach_reason}", "dim"))
    if row.differs:
        seen.append(Line(f"the incident file says: {row.expected}", OPEN))
    bodies = [Line(body) for body in dict.fromkeys(row.hashes.values())]
    return row.cause, Line(told(row), MARKS[row.status].style), bodies, seen


def notes(audit: Audit) -> list[str]:
    """What a reader must know beside the rows."""
    found = []
    if audit.config and audit.config.unknown:
        found.append(f"flags that were not read: {', '.join(audit.config.unknown)}")
    if audit.config and not audit.config.complete:
        found.append(
            "no whole launch command was given: what it leaves out is not known, defaults are not assumed"
        )
    shared = sum(bool(row.same_code_as) for row in audit.rows)
    if shared:
        found.append(
            f"{shared} verdicts are those of another release with the same code; lines are those of that one"
        )
    return found


def by(audit: Audit, name: str) -> dict[str, list[AuditRow]]:
    """Rows by their `subject` or `cause`, in the order of the audit."""
    found: dict[str, list[AuditRow]] = {}
    for row in audit.rows:
        found.setdefault(getattr(row, name), []).append(row)
    return found


def as_json(audit: Audit) -> str:
    """Everything, for programs."""
    data = {
        "date": today(),
        "device": audit.device,
        "versions": versions(),
        "judged": audit.judged,
        "cached": audit.cached,
        "bytes_moved": audit.bytes_moved,
        "config": vars(audit.config) | {"sources": dict(audit.config.sources)} if audit.config else None,
        "notes": notes(audit),
        "rows": [row.as_dict() for row in audit.rows],
    }
    return json.dumps(data, indent=1, ensure_ascii=False)


def markdown(audit: Audit) -> str:
    """The matrix, and below it every fault with its witness."""
    table = [(cause, *map(told, rows)) for cause, rows in by(audit, "cause").items()]
    lines = [f"# Audit of {today()}", "", *markdown_table(("cause", *by(audit, "subject")), table, escaped)]
    faults = [row for row in audit.rows if row.status == "fault"]
    lines += ["", "## Faults", ""] if faults else []
    for row in faults:
        reach = f" {REACHED[row.reach].capitalize()}: {row.reach_reason}." if row.reach else ""
        lines.append(
            f"- **{row.cause}** on {row.subject}: {escaped(row.witness)}. {escaped(row.advice)}.{escaped(reach)}"
        )
    unjudged = [row for row in audit.rows if row.status == "not-judged"]
    lines += ["", "## Not judged", ""] if unjudged else []
    lines += [f"- {row.cause} on {row.subject}: {escaped(row.witness)}" for row in unjudged]
    return "\n".join([*lines, "", *notes(audit)]).rstrip() + "\n"


def as_csv(audit: Audit) -> str:
    """One line a row."""
    out = io.StringIO()
    writer = csv.DictWriter(out, COLUMNS, lineterminator="\n")
    writer.writeheader()
    date = today()
    for row in audit.rows:
        writer.writerow(_fields(row, date))
    return out.getvalue()


def _fields(row: AuditRow, date: str) -> dict[str, Any]:
    found = {name: getattr(row, name) for name in COLUMNS if hasattr(row, name)}
    return found | {
        "date": date,
        "hashes": " ".join(f"{name}={body}" for name, body in row.hashes.items()),
        "workarounds": "; ".join(row.workarounds) if row.status == "fault" else "",
        "judged_on": row.evidence.detail.get("judged_on", ""),
    }


def page(audit: Audit) -> str:
    """A page with the matrix, each cell linked to its witness.

    Raises BadInputError when a text would make the page fetch or run something.
    """
    from specmortem.report.html import standalone

    return standalone(
        Path(__file__).parent,
        "audit.html.j2",
        "the audit",
        date=today(),
        versions=versions(),
        device=audit.device,
        subjects=list(by(audit, "subject")),
        groups=_groups(audit),
        notes=notes(audit),
        reached=REACHED,
    )


def _groups(
    audit: Audit,
) -> list[tuple[str, list[tuple[str, str, list[AuditRow], list[tuple[str, list[AuditRow]]]]]]]:
    """(incident, [(cause, title, its rows, [(anchor, rows that share a witness)])]); `anchors` of rows are unique."""
    found: dict[str, list[tuple[str, str, list[AuditRow], list[tuple[str, list[AuditRow]]]]]] = {}
    for cause, rows in by(audit, "cause").items():
        shared: dict[tuple[str, str, str], list[AuditRow]] = {}
        for row in rows:
            shared.setdefault((row.status, row.witness, row.reach), []).append(row)
        parts = [(f"{cause}-{number}", same) for number, same in enumerate(shared.values(), 1)]
        found.setdefault(rows[0].incident, []).append((cause, rows[0].title, rows, parts))
    return list(found.items())
