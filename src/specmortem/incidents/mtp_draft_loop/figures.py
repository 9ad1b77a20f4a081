"""Figures of `mtp-draft-loop`: host, copy and kernels over time, layouts that fault, the reports' throughput, price."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from specmortem.report.figures import (
    FAULT,
    NEUTRAL,
    QUIET,
    REQUEST_COLOURS,
    STYLE,
    Record,
    figure,
    request_colour,
)

LANES = {"host": 2.2, "copy": 1.1, "kernels": 0.0}
FORWARD = "spin"
NOTE = 9


def timeline(records: Mapping[str, Record], title: str) -> Figure:
    """Host, plan copies and forwards of one step, by arm; colour is the plan, red a plan that is not the pass's own.

    `records` maps a label to a record of `arms.timeline`.
    """
    made, axes = figure(len(records), 2.6 * len(records) + 0.5, title)
    end = max(kernel["end_us"] for record in records.values() for kernel in record["kernels"])
    for ax, (label, record) in zip(axes, records.items(), strict=True):
        _fills(ax, record)
        _copies(ax, record)
        _forwards(ax, record)
        ax.text(0, 3.6, label, fontsize=10, va="bottom")
        ax.set_xlim(-0.01 * end, 1.01 * end)
        ax.set_ylim(-0.2, 4.3)
        ax.set_yticks([y + 0.4 for y in LANES.values()], list(LANES))
    axes[-1].set_xlabel("microseconds on the simulated clock")
    return made


def _fills(ax: Axes, record: Record) -> None:
    y = LANES["host"] + 0.4
    last = max(write["at_us"] for write in record["writes"])
    ax.plot([0, last], [y, y], color=QUIET, linewidth=5, solid_capstyle="butt", zorder=0)
    for block in record["blocks"][:-1]:
        ax.plot([block["until_us"]] * 2, [y - 0.35, y + 0.35], color=NEUTRAL, linewidth=2, zorder=1)
    for write in record["writes"]:
        ax.plot([write["at_us"]], [y], "o", color=request_colour(write["plan"] - 1), markersize=9)
        ax.text(write["at_us"], y + 0.32, f"plan {write['plan']}", fontsize=NOTE, va="bottom")


def _copies(ax: Axes, record: Record) -> None:
    top, y = LANES["host"] + 0.4, LANES["copy"] + 0.4
    for copy in record["copies"]:
        wrong = copy["carried"] != copy["plan"]
        line = FAULT if wrong else NEUTRAL
        ax.plot([copy["issued_us"], copy["start_us"]], [top, y], ":", color=line, linewidth=1.4, zorder=1)
        colour, edge = request_colour(copy["carried"] - 1), FAULT if wrong else "white"
        ax.plot(
            [copy["start_us"]], [y], "s", color=colour, markersize=11, markeredgecolor=edge, markeredgewidth=2
        )
        note = f"copy {copy['plan']}" + (f" carries plan {copy['carried']}" if wrong else "")
        ax.annotate(
            note,
            (copy["start_us"], y),
            (8, 0),
            textcoords="offset points",
            fontsize=NOTE,
            va="center",
            color=FAULT if wrong else "black",
        )


def _forwards(ax: Axes, record: Record) -> None:
    """The pass after copy j is the j-th forward: it reads what that copy carried."""
    spans = [kernel for kernel in record["kernels"] if _is_forward(kernel)]
    for copy, span in zip(record["copies"], spans, strict=True):
        wrong = copy["carried"] != copy["plan"]
        width = span["end_us"] - span["start_us"]
        colour, edge = request_colour(copy["carried"] - 1), FAULT if wrong else "none"
        box = Rectangle(
            (span["start_us"], LANES["kernels"]), width, 0.8, facecolor=colour, edgecolor=edge, linewidth=2.5
        )
        ax.add_patch(box)
        text = f"forward {copy['plan']}" + (f"\nreads plan {copy['carried']}" if wrong else "")
        middle = span["start_us"] + width / 2
        ax.text(middle, 0.4, text, ha="center", va="center", fontsize=NOTE, color="black")


def _is_forward(kernel: Record) -> bool:
    return str(kernel["name"]).startswith(FORWARD) and kernel["end_us"] > kernel["start_us"]


def growth(records: Mapping[str, Sequence[Record]], title: str) -> Figure:
    """Share of batches whose layout faults when each request grows by a token, by batch size.

    `records` maps a label to rows of `layouts.growth`; bars are two standard errors.
    """
    made, (ax,) = figure(1, 3.3, title)
    for number, (label, rows) in enumerate(records.items()):
        batches = [row["batch"] for row in rows]
        rates = [100 * row["read_rate"] for row in rows]
        errors = [200 * (row["read_rate"] * (1 - row["read_rate"]) / row["trials"]) ** 0.5 for row in rows]
        ax.errorbar(
            batches, rates, yerr=errors, marker="o", capsize=3, color=REQUEST_COLOURS[number], label=label
        )
    ax.set_xscale("log", base=2)
    ax.set_xticks(batches, [str(batch) for batch in batches])
    ax.minorticks_off()
    ax.set_ylim(bottom=0)
    ax.set_xlabel("requests in the batch")
    ax.set_ylabel("% of batches")
    ax.legend(frameon=False, loc="upper left", fontsize=NOTE)
    return made


def throughput(data: pd.DataFrame, title: str) -> Figure:
    """The two validators' tables: one panel each, one line a measure that counts tokens per second."""
    import matplotlib

    with matplotlib.rc_context(STYLE):  # type: ignore[arg-type]
        made = Figure(figsize=(8, 3.0), layout="constrained")
        axes = made.subplots(1, 2)
    made.suptitle(title, x=0.01, ha="left", fontsize=11, fontweight="bold")
    measures = {1: "throughput", 2: "decode"}
    for ax, (validator, measure) in zip(axes, measures.items(), strict=True):
        rows = data[(data["validator"] == validator) & (data["measure"] == measure)]
        bars = ax.bar([str(k) for k in rows["drafts"]], rows["value"], color=REQUEST_COLOURS[0])
        ax.bar_label(bars, labels=[f"{value:g}" for value in rows["value"]], fontsize=NOTE)
        first = rows.iloc[0]
        ax.set_title(f"{first['hardware']}, vLLM {first['vllm']}", fontsize=NOTE, fontweight="normal")
        ax.set_xlabel("drafts K, all with the synchronize")
        ax.set_ylabel(f"{measure}, {first['unit']}")
        ax.margins(y=0.14)
    return made


def price(found: Mapping[str, Any], title: str) -> Figure:
    """The time of a step over that of `before` for each arm, by number of drafts."""
    made, (ax,) = figure(1, 3.2, title)
    frame = pd.DataFrame(found["rows"])
    arms = [arm for arm in dict.fromkeys(frame["arm"]) if arm != "before"]
    markers = ("o", "s", "^", "D", "v", "P")
    for number, arm in enumerate(arms):
        rows = frame[frame["arm"] == arm]
        colour = FAULT if arm == "stream-sync" else (*REQUEST_COLOURS, NEUTRAL)[number % 5]
        ax.plot(rows["k"], rows["to_before"], marker=markers[number % 6], color=colour, label=arm)
    ax.axhline(1.0, color=NEUTRAL, linewidth=1, linestyle="--")
    ax.set_xticks(sorted(set(frame["k"])))
    ax.set_xlabel("drafts K")
    ax.set_ylabel("time of a step / before")
    ax.legend(frameon=False, fontsize=NOTE)
    return made
