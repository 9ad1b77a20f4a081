"""Tables and diffs of the postmortems."""

from __future__ import annotations

import difflib
import inspect
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pandas as pd
from IPython.display import HTML

from specmortem import facts
from specmortem.report.terminal import MARKS
from specmortem.verdict import Evidence, Results, Row, read_json

DATE = re.compile(r"\d{4}-\d{2}-\d{2}")
CELL = re.compile(r"(?<=<td>)[^<]+")
LONG = re.compile(r"\S{32,}")  # a command's argument, a path
JOINT = re.compile(r"(?<=[,/=:_{}(.])(?=.)")


def shown(table: pd.DataFrame | Iterable[Mapping[str, Any]]) -> HTML:
    """A table for a page: every text whole, outcomes marked, the index as a plain first column.

    Long words may break at their joints, so that one command does not squeeze the other columns.
    """
    frame = table if isinstance(table, pd.DataFrame) else pd.DataFrame(list(table))
    named = frame.index.name is not None
    with pd.option_context("display.max_colwidth", None):
        html = marked(frame.reset_index() if named else frame).to_html(index=False, border=0, na_rep="")
    breakable = CELL.sub(lambda cell: LONG.sub(lambda word: JOINT.sub("<wbr>", word[0]), cell[0]), html)
    return HTML(breakable)  # type: ignore[no-untyped-call]


def marked(table: pd.DataFrame) -> pd.DataFrame:
    """Outcomes and effects with a symbol beside the word, so that colour is never the only carrier."""
    return table.map(lambda value: _marked(value) if isinstance(value, str) else value)


def _marked(text: str) -> str:
    """An outcome with its symbol; a date that does not break at its hyphens."""
    return (
        text.replace("-", "\N{NON-BREAKING HYPHEN}") if DATE.fullmatch(text) else str(MARKS.get(text, text))
    )


def rows_table(rows: Iterable[Row]) -> pd.DataFrame:
    """Result rows with their one-line evidence."""
    data = [
        {
            "cause": r.cause,
            "arm": r.arm,
            "subject": r.subject,
            "outcome": r.outcome,
            "faults / runs": f"{r.faults:,} / {r.runs:,}",
            "evidence": _told(r.evidence),
        }
        for r in rows
    ]
    return pd.DataFrame(data)


def _told(evidence: Evidence) -> str:
    """One line: what was observed, with its reason where that says more than an effect's name."""
    if evidence.observed in MARKS and evidence.reason:
        return f"{MARKS[evidence.observed]}: {evidence.reason}"
    return evidence.observed or evidence.witness or evidence.reason


def latest_results(slug: str, results_dir: Path, root: Path | None = None) -> Path | None:
    """The results of this run, else those of a committed reference run, a GPU's first; None when there are none."""
    fresh = results_dir / slug / "results.json"
    committed = sorted(((root or facts.find_root()) / slug / "runs").glob("*/results.json"))
    return fresh if fresh.exists() else next(iter(committed), None)


def committed_rows(slug: str, run: str = "cuda", root: Path | None = None) -> tuple[Row, ...]:
    """Rows of a committed reference run, `investigations/SLUG/runs/RUN`; none where there is no such run."""
    path = (root or facts.find_root()) / slug / "runs" / run / "results.json"
    return Results.load(path).rows if path.exists() else ()


def memcheck_table(slug: str, root: Path | None = None) -> HTML:
    """What compute-sanitizer said in the committed GPU run, or that there is none."""
    path = (root or facts.find_root()) / slug / "runs" / "cuda" / "memcheck.json"
    if not path.exists():
        return HTML("<p>not yet run on a GPU</p>")  # type: ignore[no-untyped-call]
    return shown(read_json(path, "benchmarks/memcheck_*.py"))


def release_matrix(results: Iterable[Results]) -> pd.DataFrame:
    """Causes x released subjects, each cell the outcome; empty when no release was judged."""
    data = [(r.cause, r.subject, r.outcome) for found in results for r in found.rows if "==" in r.subject]
    table = pd.DataFrame(data, columns=["cause", "subject", "outcome"])
    wide = table.pivot_table(index="cause", columns="subject", values="outcome", aggfunc="first")
    return wide.fillna("not run").rename_axis(None, axis=1)


def source_diff(before: Any, after: Any, context: int = 1) -> str:
    """Unified diff of two kernels' sources, names and signatures left out."""
    old, new = (_body(kernel) for kernel in (before, after))
    return "\n".join(list(difflib.unified_diff(old, new, lineterm="", n=context))[2:])


def _body(kernel: Any) -> list[str]:
    """Lines of a kernel after its signature."""
    lines = inspect.getsource(getattr(kernel, "fn", kernel)).splitlines()
    return lines[next(i for i, line in enumerate(lines) if line.rstrip() == "):") + 1 :]
