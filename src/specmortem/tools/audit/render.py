"""An audit as a table on a terminal, JSON, Markdown, CSV, or a page that stands alone."""

from __future__ import annotations

import csv
import io
import json
from collections import Counter
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specmortem.affected.answers import on_release
from specmortem.affected.targets import advise
from specmortem.affected.words import way_out
from specmortem.exposure import Config
from specmortem.report.terminal import (
    MARKS,
    OPEN,
    Line,
    TableCell,
    escaped,
    finding_line,
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


def terminal(audit: Audit, console: Console | None = None, *, verbose: bool = False) -> None:
    """What is reached first; `verbose` adds faults that the launch cannot reach, what is clean, and hashes.

    On a terminal one table a subject, off it one line a verdict.
    """
    from rich.console import Console as RichConsole

    console = console or RichConsole()
    shown = [row for row in ordered(audit) if verbose or not _quiet(row, audit)]
    lost = lost_subjects(audit)
    shown = [row for row in shown if row.subject not in lost]
    write_lines(
        (finding_line(subject, "", str(MARKS["not-judged"]), "", reason) for subject, reason in lost.items()),
        console,
    )
    if console.is_terminal:
        for subject, rows in by(shown, "subject").items():
            columns = ("cause", "verdict", *(["body"] if verbose else []), "what was seen, and what to do")
            write_table(columns, (_cells(row, verbose) for row in rows), subject, console)
    else:
        write_lines(map(_finding, shown), console)
    write_lines((Line(note, OPEN) for note in [*notes(audit), *_way_out(audit), _counts(audit)]), console)


def ordered(audit: Audit) -> list[AuditRow]:
    """Rows in the order in which they matter: reached faults, what may be, what could not be judged, the rest."""
    return sorted(audit.rows, key=_rank)


def lost_subjects(audit: Audit) -> dict[str, str]:
    """Subjects that could not be had, with the reasons: none of their causes has a verdict."""
    found = {}
    for subject, rows in by(audit.rows, "subject").items():
        reasons = [row.evidence.reason for row in rows if row.unavailable]
        if reasons and all(row.status == "not-judged" for row in rows):
            found[subject] = "; ".join(dict.fromkeys(reasons))
    return found


def _rank(row: AuditRow) -> int:
    if row.status == "fault":
        return {"yes": 0, "": 0, "unknown": 1}.get(row.reach, 4)
    return {"not-judged": 2, "clean": 3}.get(row.status, 5)


def _quiet(row: AuditRow, audit: Audit) -> bool:
    """Whether a row says nothing that a launch, where one is given, has to do with."""
    return audit.config is not None and (row.reach == "no" or row.status in ("clean", "not-present"))


def _finding(row: AuditRow) -> str:
    message = "; ".join(filter(None, [row.witness, _reason(row) or row.advice]))
    return finding_line(row.subject, row.cause, told(row), row.evidence.place, message)


def _reason(row: AuditRow) -> str:
    return (
        f"{REACHED[row.reach]}: {row.reach_reason}"
        if row.reach and row.status in ("fault", "not-judged")
        else ""
    )


def _cells(row: AuditRow, verbose: bool) -> tuple[TableCell, ...]:
    seen = [Line(row.witness)]
    if reason := _reason(row):
        seen.append(Line(reason, "dim"))
    elif row.advice:
        seen.append(Line(f"→ {row.advice}", "green"))
    if row.differs:
        seen.append(Line(f"the incident file says: {row.expected}", OPEN))
    bodies = [Line(body) for body in dict.fromkeys(row.hashes.values())]
    return row.cause, Line(told(row), MARKS[row.status].style), *([bodies] if verbose else []), seen


def _way_out(audit: Audit) -> list[str]:
    """Where the launch is safe over all incidents, where one was given and something is reached."""
    if audit.config is None or not any(row.status == "fault" and row.reach == "yes" for row in audit.rows):
        return []
    versions = {row.version for row in audit.rows if row.version}
    found = {release: advise(on_release(audit.config, release)) for release in sorted(versions)}
    return [f"→ from {release}: {way_out(advice)}" for release, advice in found.items()]


def _counts(audit: Audit) -> str:
    """The last line."""
    counts = Counter(told(row).partition(" ")[2] for row in audit.rows)
    return ", ".join(f"{count} {name}" for name, count in sorted(counts.items())) or "no verdicts"


def notes(audit: Audit) -> list[str]:
    """What a reader must know beside the rows."""
    found = []
    if audit.config and audit.config.unknown:
        found.append(f"flags that were not read: {', '.join(audit.config.unknown)}")
    if audit.config and not audit.config.complete:
        found.append(
            "no whole launch command was given: what it leaves out is not known, defaults are not assumed"
        )
    if audit.launches > 1:
        found.append(
            f"{audit.launches} launches are stated, the first is judged; specmortem check judges all of them"
        )
    shared = sum(bool(row.same_code_as) for row in audit.rows)
    if shared:
        found.append(
            f"{shared} verdicts are those of another release with the same code; lines are those of that one"
        )
    return found


def by(rows: Iterable[AuditRow], name: str) -> dict[str, list[AuditRow]]:
    """Rows by their `subject` or `cause`, in their order."""
    found: dict[str, list[AuditRow]] = {}
    for row in rows:
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
        "config": _config(audit.config) if audit.config else None,
        "notes": notes(audit),
        "rows": [row.as_dict() for row in audit.rows],
    }
    return json.dumps(data, indent=1, ensure_ascii=False)


def _config(config: Config) -> dict[str, Any]:
    return vars(config) | {"sources": dict(config.sources), "prose": sorted(config.prose)}


def markdown(audit: Audit) -> str:
    """The matrix, and below it every fault with its witness."""
    table = [(cause, *map(told, rows)) for cause, rows in by(audit.rows, "cause").items()]
    lines = [
        f"# Audit of {today()}",
        "",
        *markdown_table(("cause", *by(audit.rows, "subject")), table, escaped),
    ]
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
        subjects=list(by(audit.rows, "subject")),
        groups=_groups(audit),
        notes=notes(audit),
        reached=REACHED,
    )


def _groups(
    audit: Audit,
) -> list[tuple[str, list[tuple[str, str, list[AuditRow], list[tuple[str, list[AuditRow]]]]]]]:
    """(incident, [(cause, title, its rows, [(anchor, rows that share a witness)])]); `anchors` of rows are unique."""
    found: dict[str, list[tuple[str, str, list[AuditRow], list[tuple[str, list[AuditRow]]]]]] = {}
    for cause, rows in by(audit.rows, "cause").items():
        shared: dict[tuple[str, str, str], list[AuditRow]] = {}
        for row in rows:
            shared.setdefault((row.status, row.witness, row.reach), []).append(row)
        parts = [(f"{cause}-{number}", same) for number, same in enumerate(shared.values(), 1)]
        found.setdefault(rows[0].incident, []).append((cause, rows[0].title, rows, parts))
    return list(found.items())
