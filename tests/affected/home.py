"""Homes of facts for tests: a copy of the repository's, or a small one, whose tables can be changed."""

import csv
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

from specmortem.affected.released import AUDIT, ON_GPU
from specmortem.verdict import DeviceInfo, Evidence, Results, Row

ROOT = Path(__file__).parents[2]
COLUMNS = ("date", "version", "cause", "status")
DAY = "2026-11-30"


def small(home: Path, *rows: tuple[str, str, str], gpu: tuple[tuple[str, str, str], ...] = ()) -> Path:
    """A home with these verdicts alone, as (release, cause, status); returns its folder of investigations."""
    (home / "data").mkdir(parents=True)
    (home / "investigations").mkdir()
    for name, verdicts in ((AUDIT, rows), (ON_GPU, gpu or (("0.24.0", "only-gpu", "clean"),))):
        lines = [",".join((DAY, *verdict)) for verdict in verdicts]
        (home / name).write_text("\n".join([",".join(COLUMNS), *lines, ""]))
    return home / "investigations"


def run(root: Path, *rows: tuple[str, str, str], incident: str = "toy") -> Path:
    """Put a run with these rows, as (release, cause, outcome), below a folder of investigations."""
    made = []
    for release, cause, outcome in rows:
        evidence, runs = Evidence(reason="none here"), int(outcome != "not-judged")
        faults = int(outcome == "fault")
        made.append(Row(cause, "release", f"vllm=={release}", outcome, runs, faults, 0, evidence))
    path = root / incident / "runs" / "sim" / "results.json"
    path.parent.mkdir(parents=True)
    Results(incident, DeviceInfo("sim", "simulated"), tuple(made), {"python": "3"}).save(path)
    return path


def copied(home: Path) -> Path:
    """Facts, tables and runs of the repository, without its pages and notebooks; returns the home."""
    kept = shutil.ignore_patterns("*.html", "*.ipynb", "*.gz", "serve", "engine*")
    shutil.copytree(ROOT / "investigations", home / "investigations", ignore=kept)
    (home / "data").mkdir()
    for name in (AUDIT, ON_GPU):
        shutil.copy(ROOT / name, home / name)
    return home


def flip_table(home: Path, release: str, cause: str, status: str, name: Path = AUDIT) -> None:
    """Another verdict of a cause on a release in a table of the audit."""
    lines = list(csv.DictReader((home / name).read_text().splitlines()))
    [line] = [each for each in lines if (each["version"], each["cause"]) == (release, cause)]
    assert line["status"] != status
    line["status"] = status
    with (home / name).open("w", newline="") as stream:
        writer = csv.DictWriter(stream, list(line))
        writer.writeheader()
        writer.writerows(lines)


def flip_runs(home: Path, release: str, cause: str, outcome: str) -> int:
    """The same in every run that has it; returns in how many rows."""
    count = 0
    for path in home.glob("investigations/*/runs/*/results.json"):
        data = json.loads(path.read_text())
        rows = [row for row in data["rows"] if (row["subject"], row["cause"]) == (f"vllm=={release}", cause)]
        for row in rows:
            row["outcome"], row["faults"] = outcome, row["runs"] if outcome == "fault" else 0
        path.write_text(json.dumps(data))
        count += len(rows)
    return count


def call(home: Path, code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run Python in a process of its own, with this home: what is computed is kept in a process."""
    told = {**os.environ, "SPECMORTEM_HOME": str(home)}
    return subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, env=told)
