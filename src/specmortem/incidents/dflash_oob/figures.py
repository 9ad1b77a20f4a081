"""Figures of incident `dflash-oob`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch, Rectangle

from specmortem.report.figures import (
    FAULT,
    NEUTRAL,
    QUIET,
    REQUEST_COLOURS,
    Record,
    cell,
    figure,
    request_colour,
)


def anchors(cases: Mapping[str, Mapping[str, Any]], title: str) -> Figure:
    """The positions array of each case, the anchor that each request needs, and the one that the kernel read."""
    made, axes = figure(len(cases), 1.7 * len(cases) + 0.3, title)
    for ax, (label, case) in zip(axes, cases.items(), strict=True):
        _positions(ax, case)
        for report in case["reports"]:
            if report["tensor"] == "target_positions" and report["op"] == "load":
                _wrong_read(ax, report)
        ax.text(-1, 1.75, label, ha="left", va="bottom")
        ax.set_xlim(-1.4, len(case["positions"]) + 3.2)
        ax.set_ylim(-0.5, 2.2)
        ax.axis("off")
    return made


def _positions(ax: Axes, case: Mapping[str, Any]) -> None:
    starts = case["query_start_loc"]
    for request, (first, end) in enumerate(zip(starts, starts[1:], strict=False)):
        valid = end - case["rejected"][request]
        for row in range(first, end):
            colour = request_colour(request) if row < valid else QUIET
            cell(ax, row, 0, str(case["positions"][row]), colour, edge=request_colour(request))
        note = f"request {request}" + (", all rejected" if valid == first else "")
        ax.text((first + end) / 2, -0.08, note, ha="center", va="top", fontsize=9)
    cell(ax, -1, 0, "?", "white", edge=NEUTRAL)
    slots = case["query_slot_mapping"]
    ax.text(starts[-1] + 0.2, 0.4, f"slots {slots[0]} … / {slots[4]} …", va="center", fontsize=9)


def _wrong_read(ax: Axes, report: Mapping[str, Any]) -> None:
    start, read = report["index"] + 1.8, report["index"] + 0.5
    style: dict[str, Any] = {"arrowstyle": "-|>", "mutation_scale": 14, "color": FAULT, "linewidth": 2}
    ax.add_patch(FancyArrowPatch((start, 1.3), (read, 0.82), **style))
    place = f"request {report['program'][0]} reads [{report['index']}], line {report['line']}"
    ax.text(start + 0.1, 1.2, place, color=FAULT, fontsize=9, va="bottom")


def padded_batches(counts: Mapping[int, int], reported: int, title: str) -> Figure:
    """How many batch sizes are padded to a captured size, by number of drafts."""
    made, (ax,) = figure(1, 2.6, title)
    colours = [FAULT if k == reported else REQUEST_COLOURS[0] for k in counts]
    bars = ax.bar([str(k) for k in counts], list(counts.values()), color=colours)
    ax.bar_label(bars, fontsize=8)
    ax.set_xlabel("speculative tokens K")
    for label in ax.get_xticklabels():
        if label.get_text() == str(reported):
            label.set_color(FAULT)
            label.set_fontweight("bold")
    ax.set_ylabel("padded batch sizes")
    return made


def copy_completion(traces: Mapping[str, Sequence[Record]], title: str) -> Figure:
    """Host and stream of one row move each: when the counts landed, between which host operations."""
    made, axes = figure(len(traces), 1.9 * len(traces) + 0.4, title)
    furthest = max(_row_move(ax, trace) for ax, trace in zip(axes, traces.values(), strict=True))
    labels = {"right": "landed before the moves: right", "astray": "landed between the moves: astray"}
    for ax, name in zip(axes, traces, strict=True):
        ax.set_xlim(-15, furthest + 130)
        ax.text(0, 2.35, labels.get(name, name), fontsize=10, va="bottom")
        ax.set_ylim(-0.3, 2.9)
    axes[-1].set_xlabel("microseconds on the simulated clock")
    return made


def _row_move(ax: Axes, trace: Sequence[Record]) -> float:
    """Draw one row move; returns its last moment."""
    counts = "num_accepted_tokens_cpu"
    zero = next(r["start_us"] for r in trace if r["what"] == "replay")

    def ended(what: str, named: Callable[[str], bool]) -> float:
        of_queue = (r for r in trace if r["by"] == "queue" and r["what"] == what)
        return float(next(r["end_us"] for r in of_queue if named(r["name"])) - zero)

    copied = ended("copy", lambda name: name.startswith(counts))
    until = ended("record", lambda name: "graph" in name)
    touches = ("read", "write")
    touched = [r for r in trace if r["by"] == "host" and r["name"] == counts and r["what"] in touches]
    _span(ax, 0, 0, until, "forward, one captured graph", REQUEST_COLOURS[0])
    ax.axvline(copied, ymax=0.8, color=FAULT, linewidth=2)
    ax.text(copied, 1.02, " counts land", color=FAULT, fontsize=9, ha="right", va="bottom")
    added, swapped = (float(r["start_us"] - zero) for r in touched[:2])
    _host_moves(ax, added, swapped)
    return max(swapped, until)


def _host_moves(ax: Axes, added: float, swapped: float) -> None:
    ax.plot([added, swapped], [1.5, 1.5], color=NEUTRAL, linewidth=6, solid_capstyle="butt")
    for x, text, align in ((added, "write 1 for Q ", "right"), (swapped, " swap rows 0 and 3", "left")):
        ax.plot([x], [1.5], marker="o", color="black")
        ax.text(x, 1.72, text, fontsize=9, va="bottom", ha=align)
    ax.set_yticks([0.4, 1.5], ["stream", "host"])


def _span(ax: Axes, x: float, y: float, width: float, text: str, colour: str) -> None:
    ax.add_patch(Rectangle((x, y), width, 0.8, facecolor=colour, edgecolor="none"))
    ax.text(x + width / 2, y + 0.4, text, ha="center", va="center", fontsize=9, color="black")
