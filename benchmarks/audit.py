"""How long `specmortem audit` takes cold, warm and over a release already judged, in a folder, twice; what it moves."""

from __future__ import annotations

import json
import os
import platform
import shutil
import sys
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path

import click

from specmortem.verdict import versions, write_atomically

RELEASES = (
    "0.20.1", "0.20.2", "0.21.0", "0.22.0", "0.22.1", "0.23.0", "0.24.0", "0.25.1",
    "0.26.0", "0.27.1", "0.28.0", "0.29.0", "0.30.0", "0.31.0", "0.32.0",
)  # fmt: skip
TREE = "0.33.0"
LIMITS = {"cold_s": 120.0, "warm_s": 10.0, "tree_again_s": 2.0, "moved_mb": 50.0}
BOOT = "import sys; from specmortem.cli import main; main(sys.argv[1:], prog_name='specmortem')"


def measured(subjects: list[str], cache: Path) -> dict[str, float]:
    """One run of the command in a process of its own: seconds on the clock and of CPU, verdicts, megabytes."""
    out = cache / "out.json"
    began = time.monotonic()
    pid = os.posix_spawn(
        sys.executable,
        [sys.executable, "-c", BOOT, "audit", *subjects, "--format", "json"],
        os.environ | {"SPECMORTEM_CACHE": str(cache)},
        file_actions=[(os.POSIX_SPAWN_OPEN, 1, str(out), os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)],
    )
    _, status, used = os.wait4(pid, 0)
    seconds = time.monotonic() - began
    if os.waitstatus_to_exitcode(status) not in (0, 1, 3):
        sys.exit("the audit did not run; see its message")
    data = json.loads(out.read_text(encoding="utf-8"))
    return {
        "seconds": round(seconds, 2),
        "cpu_seconds": round(used.ru_utime + used.ru_stime, 2),
        "rows": len(data["rows"]),
        "judged": data["judged"],
        "moved_mb": round(data["bytes_moved"] / 1e6, 2),
        "load_1min_after": round(os.getloadavg()[0], 2),
    }


@click.command(help=__doc__)
@click.argument("out", default="data/audit-speed.json", type=click.Path(dir_okay=False, path_type=Path))
def main(out: Path) -> None:
    """Measure and write; exit code 1 when a limit is passed."""
    subjects = [f"vllm=={version}" for version in RELEASES]
    with tempfile.TemporaryDirectory() as folder:
        cache = Path(folder) / "cache"
        cache.mkdir()
        found = {"cold": measured(subjects, cache), "warm": measured(subjects, cache)}
        released = Path(folder) / "released"
        measured([f"vllm=={TREE}"], cache)
        shutil.copytree(cache / f"vllm-{TREE}", released)
        found["tree"] = measured([f"tree:{released}"], cache)
        found["tree_again"] = measured([f"tree:{released}"], cache)
    got = {
        "cold_s": found["cold"]["seconds"],
        "warm_s": found["warm"]["seconds"],
        "tree_again_s": found["tree_again"]["seconds"],
        "moved_mb": found["cold"]["moved_mb"],
    }
    within = {name: got[name] < limit for name, limit in LIMITS.items()}
    data = {
        "date": datetime.now(UTC).date().isoformat(),
        "cpus": os.cpu_count(),
        "machine": platform.machine(),
        "versions": versions(),
        "releases": RELEASES,
        "runs": found,
        "limits": LIMITS,
        "within": within,
    }
    write_atomically(out, json.dumps(data, indent=1) + "\n")
    print(json.dumps(data["runs"], indent=1), within)
    sys.exit(int(not all(within.values())))


if __name__ == "__main__":
    main()
