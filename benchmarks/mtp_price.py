"""What each fix of `mtp-draft-loop` costs: the time of a step over `before` and over `stream-sync`, K = 2 to 6.

usage: python benchmarks/mtp_price.py OUT.json [--steps 5] [--rounds 31]   (needs a GPU)

All arms take turns in one process, in rounds, over plans that lie alike, so that none faults. Measured twice: with
forwards that take the GPU longer than the host needs to enqueue one, as where the race is lost, and (under
`short_forwards`) with forwards of 1 ms, where the host is what limits a step. OUT is written after the first and again
after the second. Exit code 1 when event or fresh costs more than 1 % of a step in the first, 2 without a GPU or without
the folder of OUT.
"""

import datetime
import json
import sys
from pathlib import Path
from typing import Any

import click
import torch
from rich.console import Console

from specmortem.incidents.mtp_draft_loop import arms as mtp_loop
from specmortem.verdict import versions

LIMIT = 1.01
SHORT_US = 1000.0


@click.command()
@click.argument("out", type=click.Path(path_type=Path))
@click.option("--steps", type=click.IntRange(1), default=5, show_default=True)
@click.option("--rounds", type=click.IntRange(1), default=31, show_default=True)
@click.option("--forward-us", type=click.FloatRange(1), default=3000.0, show_default=True)
@click.option("--short/--no-short", default=True, show_default=True, help="Measure forwards of 1 ms, too.")
def main(out: Path, steps: int, rounds: int, forward_us: float, short: bool) -> None:
    """Measure, print, and write OUT."""
    if reason := refusal(out):
        click.echo(reason, err=True)
        sys.exit(2)
    now = datetime.datetime.now(datetime.UTC).date().isoformat()
    measured = f"{now}, median of {rounds} rounds of {steps} steps an arm, arms in turn in one process"
    found = mtp_loop.price(forward_us=forward_us, steps=steps, rounds=rounds)
    told = {"measured": measured, "versions": versions(("torch", "triton")), **found}
    out.write_text(json.dumps(told, indent=1) + "\n")
    worst = shown(found)
    if short:
        second = mtp_loop.price(forward_us=SHORT_US, steps=steps, rounds=rounds)
        told |= {"short_forwards": {"forward_us": second["forward_us"], "rows": second["rows"]}}
        out.write_text(json.dumps(told, indent=1) + "\n")
    sys.exit(int(worst > LIMIT))


def refusal(out: Path) -> str:
    """Why nothing can be measured or written; empty when both can."""
    if not out.parent.is_dir():
        return f"{out.parent} is no folder: make it, or give another OUT"
    return "" if torch.cuda.is_available() else "no CUDA device: run this on a GPU host"


def shown(found: dict[str, Any]) -> float:
    """Print the rows; the most that event or fresh took, over before."""
    console = Console()
    for row in found["rows"]:
        low, high = row["to_before_95"]
        console.print(
            f"K {row['k']} {row['arm']:15} {row['step_us']:9.1f} us, {row['to_before']:.4f} of before "
            f"({low:.4f} to {high:.4f}), {row['to_stream-sync']:.4f} of stream-sync"
        )
    worst = max(row["to_before"] for row in found["rows"] if row["arm"] in ("event", "fresh"))
    console.print(f"event and fresh: at most {worst:.4f} of before, limit {LIMIT}")
    return float(worst)


if __name__ == "__main__":
    main()
