"""Figures of `pp-align-copy`: table rows over time, one late copy, kinds of damage, texts, the reported workload."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch, Rectangle

from specmortem.report.figures import FAULT, NEUTRAL, QUIET, REQUEST_COLOURS, Record, cell, figure

GOOD = "#009E73"


def _colour(request: int | None) -> str:
    """The colour of a request, numbered from 1; white for nobody."""
    return "white" if request is None else REQUEST_COLOURS[(request - 1) % len(REQUEST_COLOURS)]


def rows_over_time(timeline: Sequence[Record], pp_size: int, steps: int, title: str) -> Figure:
    """Who sits in which batch row, step by step, and the row that each late copy reads when it is made.

    `timeline` is `arms.timeline`; a copy before step t belongs to the batch of step t - pp_size and reads the table of
    step t - 1.
    """
    shown = timeline[:steps]
    made, (ax,) = figure(1, 3.4, title)
    height = max(len(step["rows"]) for step in shown)
    for step in shown:
        for row, request in enumerate(step["rows"]):
            cell(ax, step["step"], -row, str(request), _colour(request))
    for step in shown:
        for copy in _late(step):
            _late_arrow(ax, step["step"], copy, shown[step["step"] - pp_size])
    ax.set_xlim(-0.2, steps + 0.2)
    ax.set_ylim(-height + 0.6, 2.4)
    ax.set_xticks([s + 0.5 for s in range(0, steps, 2)], [str(s) for s in range(0, steps, 2)])
    ax.set_yticks([0.4 - row for row in range(height)], [f"row {row}" for row in range(height)])
    ax.set_xlabel("engine step (number in a cell: the request in that row of the gathered table)")
    for y, colour, text in ((2.0, FAULT, "late copy, wrong owner"), (1.6, NEUTRAL, "late copy, right owner")):
        ax.plot([0.1, 1.0], [y, y], color=colour, linewidth=2)
        ax.text(1.2, y, text, va="center", fontsize=9)
    return made


def _late(step: Record) -> list[Record]:
    """The copies after sampling, one a request: that of its first state."""
    first = {copy["request"]: copy for copy in reversed(step["copies"]) if copy["when"] == "post"}
    return list(first.values())


def _late_arrow(ax: Axes, step: int, copy: Record, origin: Record) -> None:
    source = origin["rows"].index(copy["request"])
    wrong = copy["damage"] is not None
    start, end = (origin["step"] + 0.5, 0.8 - source), (step - 0.5, 0.8 - copy["row"])
    _arrow(ax, start, end, FAULT if wrong else NEUTRAL, bend=-0.45, size=11, width=2 if wrong else 1.2)


def _arrow(
    ax: Axes, start: tuple[float, float], end: tuple[float, float], colour: str, **look: float
) -> None:
    arrow = FancyArrowPatch(
        start,
        end,
        arrowstyle="-|>",
        connectionstyle=f"arc3,rad={look['bend']}",
        mutation_scale=look["size"],
        color=colour,
        linewidth=look["width"],
    )
    ax.add_patch(arrow)


def late_copy(timeline: Sequence[Record], pp_size: int, title: str) -> Figure:
    """The first wrong copy: the table that its batch was gathered into, the one that it reads, and the right one."""
    at = next(step["step"] for step in timeline if any(copy["damage"] for copy in step["copies"]))
    copy = next(c for c in timeline[at]["copies"] if c["damage"])
    origin, last = timeline[at - pp_size], timeline[at - 1]
    persistent = {slot: _row_of(timeline[at], int(name)) for name, slot in timeline[at]["req_idxs"].items()}
    columns = 1 + max(copy["src_col"], copy["dst_col"], 3)
    made, axes = figure(3, 5.6, title)
    labelled = {
        f"step {origin['step']}: gathered table of the batch that was sampled": _gathered(origin, columns),
        f"step {at}: what the late copy reads, the table of step {last['step']}": _gathered(last, columns),
        "the persistent table, a row a request slot: what it should read": _slots(persistent, columns),
    }
    for ax, (label, rows) in zip(axes, labelled.items(), strict=True):
        _table(ax, label, rows)
    _copy_arrow(axes[1], copy["row"], copy, FAULT)
    _copy_arrow(axes[2], sorted(persistent).index(copy["req_idx"]), copy, GOOD)
    return made


def _row_of(step: Record, request: int) -> list[tuple[int, int | None]]:
    rows = [row for row in step["gathered"] if row[0][1] == request]
    return rows[0] if rows else []


def _gathered(step: Record, columns: int) -> list[tuple[str, list[Any]]]:
    return [(f"row {n}", step["gathered"][n][:columns]) for n in range(2)]


def _slots(rows: Mapping[int, list[Any]], columns: int) -> list[tuple[str, list[Any]]]:
    return [(f"slot {slot}", rows[slot][:columns]) for slot in sorted(rows)]


def _table(ax: Axes, label: str, rows: list[tuple[str, list[Any]]]) -> None:
    for number, (name, entries) in enumerate(rows):
        ax.text(-0.15, 0.4 - number, name, ha="right", va="center", fontsize=9)
        for column, (block, owner) in enumerate(entries):
            text = f"{block} of {owner}" if owner is not None else str(block)
            cell(ax, column, -number, text, _colour(owner), edge=NEUTRAL if owner is None else "white")
    ax.text(0, 1.75, label, fontsize=10)
    ax.set_xlim(-1.0, 6.4)
    ax.set_ylim(-len(rows) + 0.7, 2.3)
    ax.axis("off")


def _copy_arrow(ax: Axes, row: int, copy: Record, colour: str) -> None:
    start, end = (copy["src_col"] + 0.5, 0.82 - row), (copy["dst_col"] + 0.5, 0.82 - row)
    _arrow(ax, start, end, colour, bend=0.4, size=14, width=2.2)
    owner = "wrong" if colour == FAULT else "right"
    note = f"{owner}: column {copy['src_col']} to {copy['dst_col']} for request {copy['request']}"
    ax.text(4.2, 0.4 - row, note, color=colour, fontsize=9, va="center")


def damage(counts: Mapping[str, int], title: str, unit: str) -> Figure:
    """How often each kind of damage was counted."""
    made, (ax,) = figure(1, 0.45 * len(counts) + 1.0, title)
    bars = ax.barh(list(counts), list(counts.values()), color=[FAULT] * len(counts))
    ax.bar_label(bars, labels=[f"{n:,}" for n in counts.values()], padding=4, fontsize=9)
    ax.invert_yaxis()
    ax.set_xlabel(unit)
    ax.margins(x=0.12)
    return made


def texts(
    before: Record, expected: Mapping[str, list[int]], stuck: int, title: str, most: int = 48
) -> Figure:
    """Outputs token by token: as without speculation and copies, different, or the constant token."""
    made, (ax,) = figure(1, 0.42 * len(before) + 1.5, title)
    for number, (request, tokens) in enumerate(sorted(before.items())):
        for at, token in enumerate(tokens[:most]):
            right = at < len(expected[request]) and token == expected[request][at]
            colour = REQUEST_COLOURS[0] if right else FAULT if token == stuck else REQUEST_COLOURS[1]
            ax.add_patch(Rectangle((at, -number), 0.92, 0.8, facecolor=colour, edgecolor="none"))
    ax.set_xlim(0, most)
    ax.set_ylim(-len(before) + 0.8, 1.9)
    ax.set_yticks([0.4 - n for n in range(len(before))], [f"request {name}" for name in sorted(before)])
    ax.set_xlabel("output token")
    marks = (
        (REQUEST_COLOURS[0], "as expected"),
        (REQUEST_COLOURS[1], "different"),
        (FAULT, f"token {stuck}"),
    )
    for number, (colour, text) in enumerate(marks):
        ax.add_patch(Rectangle((number * 9, 1.3), 0.92, 0.5, facecolor=colour, edgecolor="none"))
        ax.text(number * 9 + 1.3, 1.55, text, va="center", fontsize=9)
    return made


def first_wrong(found: Sequence[Record], reported: tuple[int, int], most: int, title: str) -> Figure:
    """For each seed of the reported workload the request at which the first wrong copy was made."""
    made, (ax,) = figure(1, 3.0, title)
    for number, one in enumerate(found):
        wrong = one["first_wrong_copy"]
        request = wrong["request"] if wrong else most
        ax.plot([0, request], [number, number], color=QUIET, linewidth=2, zorder=1)
        if wrong:
            ax.plot([request], [number], "o", color=FAULT, zorder=2)
            ax.text(request + 0.5, number, f"step {wrong['step']:,}", va="center", fontsize=9)
        else:
            ax.text(request + 0.5, number, "none", va="center", fontsize=9, color=GOOD)
    for request, side in zip(reported, ("right", "left"), strict=True):
        ax.axvline(request, color=REQUEST_COLOURS[3], linestyle="--", linewidth=1.2, zorder=0)
        ax.text(request, len(found) - 0.4, f" reported: {request}th ", fontsize=9, ha=side, color="#A65185")
    ax.set_yticks(range(len(found)), [f"seed {one['seed']}" for one in found])
    ax.set_ylim(-0.6, len(found))
    ax.set_xlim(0, most + 6)
    ax.set_xlabel("requests served until the first wrong copy")
    return made
