"""Hold the rows of two runs against each other: what came, what went, and what has another outcome or count.

`python benchmarks/compare_runs.py OLD NEW`, each a folder with SLUG/results.json, or the investigations folder, of
which the run `--run` is taken. Exit code 1 where a row differs.
"""

from __future__ import annotations

import sys
from pathlib import Path

import click

from specmortem.verdict import Results, Row

Key = tuple[str, str, str]


def rows(folder: Path, run: str) -> dict[str, dict[Key, Row]]:
    """Rows by incident and (cause, arm, subject)."""
    found = {}
    for path in sorted([*folder.glob("*/results.json"), *folder.glob(f"*/runs/{run}/results.json")]):
        results = Results.load(path)
        found[results.incident] = {(row.cause, row.arm, row.subject): row for row in results.rows}
    return found


def difference(old: Row, new: Row) -> str:
    """What differs between two rows of one name; empty where nothing does."""
    told = []
    for field in ("outcome", "runs", "faults"):
        before, after = getattr(old, field), getattr(new, field)
        if before != after:
            told.append(f"{field} {before} -> {after}")
    return ", ".join(told)


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("old", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.argument("new", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option(
    "--run", default="sim", show_default=True, help="Which reference run, where a folder has runs/."
)
def main(old: Path, new: Path, run: str) -> None:
    """Compare the rows of two folders of runs."""
    before, after = rows(old, run), rows(new, run)
    differing = 0
    for slug in sorted(before.keys() | after.keys()):
        ours, theirs = before.get(slug, {}), after.get(slug, {})
        lines = [f"  gone: {'/'.join(key)}" for key in ours.keys() - theirs.keys()]
        lines += [f"  new: {'/'.join(key)}" for key in theirs.keys() - ours.keys()]
        shared = ours.keys() & theirs.keys()
        for key in sorted(shared):
            if told := difference(ours[key], theirs[key]):
                lines.append(f"  {'/'.join(key)}: {told}")
        click.echo(f"{slug}: {len(shared)} rows in both, {len(lines)} differ")
        for line in sorted(lines):
            click.echo(line)
        differing += len(lines)
    sys.exit(bool(differing))


if __name__ == "__main__":
    main()
