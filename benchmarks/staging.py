"""What the staging recorder costs: the time of a step with it over the time without it.

usage: python benchmarks/staging.py OUT.json [--steps 200] [--repeats 7] [--device auto]

A step fills a staging buffer, copies it down and launches some kernels: over this package's device, and on a
GPU in plain PyTorch too, with 1 KiB and with 8 MiB, which the recorder copies. Plain and watched runs take
turns in one process. Exit code 1 when a watched run of an ordered program reports a race, or one of the
racing twin reports none; 2 when there is no such device.
"""

import datetime
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import torch
from rich.console import Console
from rich.table import Table

from specmortem import device
from specmortem.detect import staging
from specmortem.errors import SpecmortemError
from specmortem.verdict import versions, write_atomically

SMALL, WORKSPACE = 1 << 10, 8 << 20
LAUNCHES = 20


@dataclass(frozen=True)
class Program:
    """`run(kind, steps, ordered, watched)` gives its seconds and the number of races that it saw."""

    title: str
    run: Callable[[str, int, bool, bool], tuple[float, int]]


def timed(work: Callable[[], None], finish: Callable[[], None]) -> float:
    """Seconds, with all queued work."""
    finish()
    began = time.perf_counter()
    work()
    finish()
    return time.perf_counter() - began


def own_device(kind: str, steps: int, ordered: bool, watched: bool) -> tuple[float, int]:
    """Steps of a copy and some launches over this package's device."""
    dev = device.open(kind, schedule="immediate")
    host = dev.host_buffer([SMALL], torch.uint8, name="plan")
    plan, out = dev.zeros([SMALL], torch.uint8), dev.zeros([SMALL], torch.uint8)
    copied = dev.event()

    def work() -> None:
        for step in range(steps):
            if ordered:
                copied.synchronize()
            host[:] = step % 100
            dev.copy_async(plan, host)
            copied.record()
            for _ in range(LAUNCHES):
                dev.launch(torch.Tensor.add_, out, plan, reads=[plan], writes=[out])

    if not watched:
        return timed(work, dev.synchronize), 0
    with staging.watch(dev) as watch:
        seconds = timed(work, dev.synchronize)
    return seconds, len(watch.races)


def plain_torch(size: int, kind: str, steps: int, ordered: bool, watched: bool) -> tuple[float, int]:
    """The same with torch's own calls, on a GPU."""
    with staging.watch_torch() if watched else nullcontext() as watch:
        host = torch.zeros(size, dtype=torch.uint8, pin_memory=True)
        plan, out = (torch.zeros(size, dtype=torch.uint8, device=kind) for _ in range(2))
        copied = torch.cuda.Event()

        def work() -> None:
            for step in range(steps):
                if ordered:
                    copied.synchronize()
                host.fill_(step % 100)
                plan.copy_(host, non_blocking=True)
                copied.record()
                for _ in range(LAUNCHES):
                    out.add_(plan)

        seconds = timed(work, torch.cuda.synchronize)
    return seconds, len(watch.races) if watch else 0


PROGRAMS = {
    "device": Program(f"this package's device, 1 KiB, {LAUNCHES} launches", own_device),
    "torch": Program(
        f"plain PyTorch, 1 KiB, {LAUNCHES} launches", lambda *arguments: plain_torch(SMALL, *arguments)
    ),
    "torch-workspace": Program(
        f"plain PyTorch, 8 MiB, {LAUNCHES} launches", lambda *arguments: plain_torch(WORKSPACE, *arguments)
    ),
}


def price(program: Program, kind: str, steps: int, repeats: int) -> dict[str, Any]:
    """Median microseconds of a step, plain and watched, and what the watch saw."""
    program.run(kind, steps, True, False)
    plain, watched, races = [], [], 0
    for _ in range(repeats):
        plain.append(program.run(kind, steps, True, False)[0])
        seconds, seen = program.run(kind, steps, True, True)
        watched.append(seconds)
        races += seen
    _, racing = program.run(kind, steps, False, True)
    each = {
        name: 1e6 * statistics.median(runs) / steps for name, runs in (("plain", plain), ("watched", watched))
    }
    return {
        "inputs": program.title,
        **{f"{name}_us": round(value, 2) for name, value in each.items()},
        "ratio": round(each["watched"] / each["plain"], 2),
        "races_in_ordered": races,
        "races_in_racing": racing,
    }


def _show(result: dict[str, Any]) -> None:
    title = f"a step on {result['machine']['device']}, median of {result['repeats']} runs"
    table = Table("program", "plain us", "watched us", "ratio", title=title)
    for row in result["price"]:
        table.add_row(row["inputs"], *(str(row[cell]) for cell in ("plain_us", "watched_us", "ratio")))
    console = Console(width=None if sys.stdout.isatty() else 140)
    console.print(table)
    for criterion, met in result["acceptance"].items():
        console.print(f"{'[green]PASS' if met else '[red]FAIL'}[/]  {criterion}")


@click.command(help=(__doc__ or "").split("\n\n")[0])
@click.argument("out", type=click.Path(dir_okay=False, path_type=Path))
@click.option("--steps", default=200, show_default=True, type=click.IntRange(min=2))
@click.option("--repeats", default=7, show_default=True, type=click.IntRange(min=1))
@click.option(
    "--device", "kind", default="auto", show_default=True, type=click.Choice(["auto", "sim", "cuda"])
)
def main(out: Path, steps: int, repeats: int, kind: str) -> None:
    """Measure, show and write. Plain PyTorch is measured on a GPU only."""
    try:
        dev = device.open(kind)
    except SpecmortemError as error:
        click.echo(f"error: {error}", err=True)
        sys.exit(2)
    names = list(PROGRAMS) if dev.kind == "cuda" else ["device"]
    rows = [{"program": name, **price(PROGRAMS[name], dev.kind, steps, repeats)} for name in names]
    result = {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "machine": {
            "cores": os.cpu_count(),
            "system": platform.system(),
            "architecture": platform.machine(),
            "device": dev.info.name,
            "driver": dev.info.driver,
        },
        "versions": versions(("specmortem", "torch", "numpy")),
        "steps": steps,
        "repeats": repeats,
        "price": rows,
        "acceptance": {
            "no race in an ordered program": all(row["races_in_ordered"] == 0 for row in rows),
            "a race in every racing twin": all(row["races_in_racing"] > 0 for row in rows),
        },
    }
    _show(result)
    write_atomically(out, json.dumps(result, indent=1) + "\n")
    sys.exit(0 if all(result["acceptance"].values()) else 1)


if __name__ == "__main__":
    main()
