"""What `specmortem run --all`, each notebook and the tests cost, over a fixed loop timed in the same process.

Seconds tell of a machine and of what else it does; their ratio to a loop of plain Python can be compared. CPU seconds
are those of all descendants, whatever session they are in and whoever was their parent.
"""

from __future__ import annotations

import ctypes
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from resource import RUSAGE_CHILDREN, getrusage
from statistics import median

import click

PR_SET_CHILD_SUBREAPER = 36
LOOP_STEPS = 20_000_000
ORPHANS_S = 30.0  # for what a command left running to end
PARTS = ("all", "notebooks", "tests")
BOOT = "import sys; from specmortem.cli import main; main(sys.argv[1:], prog_name='specmortem')"
PATHS = "import specmortem, sys; print(specmortem.__file__)"
Cost = dict[str, float]


class CannotMeasureError(click.ClickException):
    """Measuring is not possible here, or would leave something out."""

    exit_code = 2


def adopt_orphans() -> None:
    """Make this process the parent of descendants whose parent dies, so that their CPU time is counted here."""
    if sys.platform != "linux":
        raise CannotMeasureError("only Linux hands orphans over, without which their CPU time is lost")
    if ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        raise CannotMeasureError(os.strerror(ctypes.get_errno()))


def reap_orphans() -> None:
    """Wait for adopted processes, whose CPU time counts once they are waited for."""
    end = time.monotonic() + ORPHANS_S
    with suppress(ChildProcessError):
        while time.monotonic() < end:
            if os.waitpid(-1, os.WNOHANG)[0] == 0:
                time.sleep(0.05)
        raise CannotMeasureError(f"a process still runs {ORPHANS_S:.0f} s after its command; CPU is missing")


def loop() -> Cost:
    """CPU and wall seconds of the fixed loop."""
    wall, cpu, total = time.monotonic(), time.process_time(), 0
    for step in range(LOOP_STEPS):
        total += step & 7
    return {"cpu_s": time.process_time() - cpu, "wall_s": time.monotonic() - wall}


def command_cost(command: Sequence[str], cwd: Path, variables: Mapping[str, str], log: Path) -> Cost:
    """CPU seconds of a command with all its descendants, wall seconds and exit code; its output is added to `log`."""
    before, began = getrusage(RUSAGE_CHILDREN), time.monotonic()
    with log.open("ab") as output:
        done = subprocess.run(command, cwd=cwd, env=variables, stdout=output, stderr=output, check=False)
    wall = time.monotonic() - began
    reap_orphans()
    after = getrusage(RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return {"cpu_s": cpu, "wall_s": wall, "exit_code": done.returncode}


def one_round(measure: Callable[[], Cost]) -> Cost:
    """A measurement between two loops, and its ratio to their mean CPU seconds.

    Wall seconds are divided by the loop's CPU seconds too: by its own wall seconds, a busy machine would look quick.
    """
    loops = [loop()]
    cost = measure()
    loops.append(loop())
    unit = sum(each["cpu_s"] for each in loops) / 2
    loads = {"loop_cpu_s": unit, "loop_wall_s": sum(each["wall_s"] for each in loops) / 2}
    return {**cost, **loads, "cpu_loops": cost["cpu_s"] / unit, "wall_loops": cost["wall_s"] / unit}


def measured(name: str, rounds: int, measure: Callable[[], Cost]) -> dict[str, object]:
    """All rounds of a measurement and their medians."""
    found = []
    for number in range(rounds):
        found.append(one_round(measure))
        last = found[-1]
        click.echo(
            f"{name} {number + 1}/{rounds}: {last['cpu_s']:.1f} CPU s, {last['wall_s']:.1f} s, "
            f"{last['cpu_loops']:.1f} and {last['wall_loops']:.1f} loops, exit {last['exit_code']:.0f}",
            err=True,
        )
    figures = ("cpu_s", "wall_s", "loop_cpu_s", "loop_wall_s", "cpu_loops", "wall_loops")
    medians = {figure: round(median(one[figure] for one in found), 3) for figure in figures}
    rows = [{key: round(value, 3) for key, value in one.items()} for one in found]
    return {"median": medians, "rounds": rows}


def surroundings(checkout: Path) -> dict[str, str]:
    """The environment in which the code and the facts of a checkout are used, whatever is installed."""
    elsewhere = ("SPECMORTEM_HOME", "PYTHONPATH")
    inherited = {name: value for name, value in os.environ.items() if name not in elsewhere}
    return {**inherited, "PYTHONPATH": str(checkout / "src")}


def check_checkout(checkout: Path, python: Path) -> None:
    """Raises CannotMeasureError unless that interpreter imports the package from that checkout."""
    command = [str(python), "-c", PATHS]
    done = subprocess.run(command, env=surroundings(checkout), capture_output=True, text=True, check=False)
    if not Path(done.stdout.strip()).is_relative_to(checkout / "src"):
        said = (done.stdout or done.stderr).strip().splitlines()[-1:]
        raise CannotMeasureError(f"{python} does not import specmortem from {checkout}: {' '.join(said)}")


def commit(checkout: Path) -> str:
    """The commit of a checkout, with `+` when files differ from it; empty where git does not tell."""
    command = ["git", "-C", str(checkout), "describe", "--always", "--exclude=*", "--dirty=+"]
    with suppress(OSError):
        return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
    return ""


def slugs_of(checkout: Path) -> list[str]:
    """All that `--all` runs: the incidents of a checkout, then the overview, which reads their results."""
    found = sorted(path.parent.name for path in (checkout / "investigations").glob("*/incident.toml"))
    return [*found, "overview"]


def plan(
    checkout: Path,
    python: Path,
    parts: Sequence[str],
    slugs: Sequence[str],
    quick: bool,
    workers: int,
    out: Path,
) -> dict[str, list[str]]:
    """The command of each measurement."""
    options = ["--device", "sim", "--out", str(out), *(["--quick"] if quick else [])]
    run = [str(python), "-c", BOOT, "run", *options]
    suite = [
        str(python),
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        *(["-n", str(workers)] if workers else []),
    ]
    commands = {"all": [*run, "--all"]} if "all" in parts else {}
    if "notebooks" in parts:
        commands |= {slug: [*run, slug] for slug in slugs or slugs_of(checkout)}
    return commands | ({"tests": suite} if "tests" in parts else {})


@click.command(help=__doc__)
@click.argument("out", type=click.Path(dir_okay=False, path_type=Path), metavar="OUT.json")
@click.option(
    "--checkout",
    type=click.Path(exists=True, file_okay=False, resolve_path=True, path_type=Path),
    default=Path(__file__).parents[1],
    help="Measure this one.  [default: the one of this script]",
)
@click.option(
    "--python",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    default=Path(sys.executable),
    help="The interpreter to measure with.  [default: this one]",
)
@click.option("--part", "parts", multiple=True, type=click.Choice(PARTS), default=PARTS, show_default=True)
@click.option("--slug", "slugs", multiple=True, help="Only these notebooks, not each of them.")
@click.option("--rounds", type=click.IntRange(min=1), default=3, show_default=True)
@click.option(
    "--workers", type=click.IntRange(min=0), default=2, show_default=True, help="Of the tests; 0: none."
)
@click.option("--quick", is_flag=True, help="Notebooks with fewer runs.")
def main(
    out: Path,
    checkout: Path,
    python: Path,
    parts: tuple[str, ...],
    slugs: tuple[str, ...],
    rounds: int,
    workers: int,
    quick: bool,
) -> None:
    """Measure and write; exit code 1 when a command fails, 2 when the checkout cannot be measured."""
    python = python.absolute()
    checkout = checkout.resolve()
    check_checkout(checkout, python)
    adopt_orphans()
    variables = surroundings(checkout)
    found: dict[str, dict[str, object]] = {}
    with tempfile.TemporaryDirectory() as folder:
        log = out.with_suffix(".log")
        for name, command in plan(checkout, python, parts, slugs, quick, workers, Path(folder)).items():
            found[name] = measured(
                name, rounds, lambda command=command: command_cost(command, checkout, variables, log)
            )
            out.write_text(json.dumps(report(checkout, python, quick, workers, found), indent=1) + "\n")
    failed = any(one["exit_code"] for each in found.values() for one in each["rounds"])
    sys.exit(int(failed))


def report(
    checkout: Path, python: Path, quick: bool, workers: int, found: Mapping[str, Mapping[str, object]]
) -> dict[str, object]:
    """What is written to OUT."""
    return {
        "date": datetime.now(UTC).date().isoformat(),
        "commit": commit(checkout),
        "python": platform.python_version() if python == Path(sys.executable) else str(python),
        "cpus": os.cpu_count(),
        "machine": platform.machine(),
        "loop_steps": LOOP_STEPS,
        "quick": quick,
        "workers": workers,
        "measured": found,
    }


if __name__ == "__main__":
    main()
