"""What each fix of `mtp-draft-loop` costs: the time of a step over `before` and over `stream-sync`, K = 2 to 6.

usage: python benchmarks/mtp_price.py OUT.json [--steps 25] [--rounds 5]   (needs a GPU)

All arms take turns in one process, over plans that lie alike, so that none faults. Measured twice: with forwards that
take the GPU longer than the host needs to enqueue one, as where the race is lost, and (under `short_forwards`) with
forwards of 1 ms, where the host is what limits a step. Exit code 1 when event or fresh costs more than 1 % of a step in
the first, 2 without a GPU.
"""

import datetime
import json
import sys
from pathlib import Path

import click
import torch
from rich.console import Console

from specmortem.experiments import mtp_loop
from specmortem.verdict import versions

LIMIT = 1.01


@click.command()
@click.argument("out", type=click.Path(path_type=Path))
@click.option("--steps", type=click.IntRange(1), default=25, show_default=True)
@click.option("--rounds", type=click.IntRange(1), default=5, show_default=True)
@click.option("--forward-us", type=click.FloatRange(1), default=3000.0, show_default=True)
def main(out: Path, steps: int, rounds: int, forward_us: float) -> None:
    """Measure, print, and write OUT."""
    console = Console()
    if not torch.cuda.is_available():
        click.echo("no CUDA device: run this on a GPU host", err=True)
        sys.exit(2)
    found = mtp_loop.price(forward_us=forward_us, steps=steps, rounds=rounds)
    short = mtp_loop.price(forward_us=1000.0, steps=steps, rounds=rounds)
    now = datetime.datetime.now(datetime.UTC).date().isoformat()
    measured = f"{now}, median of {rounds} rounds of {steps} steps an arm, arms in turn in one process"
    out.write_text(
        json.dumps(
            {
                "measured": measured,
                "versions": versions(("torch", "triton")),
                **found,
                "short_forwards": {"forward_us": short["forward_us"], "rows": short["rows"]},
            },
            indent=1,
        )
        + "\n"
    )
    worst = max(row["to_before"] for row in found["rows"] if row["arm"] in ("event", "fresh"))
    for row in found["rows"]:
        console.print(
            f"K {row['k']} {row['arm']:15} {row['step_us']:9.1f} us, {row['to_before']:.4f} of before, "
            f"{row['to_stream-sync']:.4f} of stream-sync"
        )
    console.print(f"event and fresh: at most {worst:.4f} of before, limit {LIMIT}")
    sys.exit(int(worst > LIMIT))


if __name__ == "__main__":
    main()
