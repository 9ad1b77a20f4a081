"""Figures of `async-accepted-counts`: an array with two writers, one flight of the copy, the window, the landings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch, Rectangle

from specmortem.report.figures import FAULT, NEUTRAL, QUIET, REQUEST_COLOURS, Record, cell, figure

GOOD, NOBODY = "#009E73", ""
COLOURS = {**dict(zip("ABCP", REQUEST_COLOURS, strict=True)), "Q": "#F0E442", NOBODY: QUIET}
STEP = 1.55  # from one state of the array to the next
COMPLETIONS = {
    "before": "the copy lands ahead of the row moves",
    "wrong": "the copy lands between adding and swapping",
    "after": "the copy lands after the row moves",
}


def array_moves(examples: Sequence[Record], title: str) -> Figure:
    """The array of the worked example, write by write, under three landings of the copy.

    `examples` is `arms.worked_example` of the policy before. A cell is coloured by the request whose count
    its value is; that follows from the recorded accesses.
    """
    shown = _compared(examples)
    made, axes = figure(len(shown), 2.2 * len(shown) + 0.7, title)
    for ax, (phase, one) in zip(axes, shown.items(), strict=True):
        ax.text(-1.0, 2.15, COMPLETIONS[phase], fontsize=10)
        _array(ax, one)
    _legend(axes[-1])
    return made


def _compared(examples: Sequence[Record]) -> dict[str, Record]:
    found = {one["phase"]: one for one in examples if one["got"] == one["own"]}
    wrong = next(one for one in examples if one["got"] != one["own"])
    return {"before": found["before"], "wrong": wrong, "after": found["after"]}


class _Array:
    """Values of four rows, and whose counts they are, followed through recorded accesses."""

    def __init__(self) -> None:
        self.owners = [NOBODY] * 4
        self._read: dict[int, str] = {}

    def follow(self, step: Record) -> tuple[str, set[int]]:
        """What a step did, and the rows that it wrote."""
        row = step["row"]
        if step["what"] == "copy lands":
            self.owners = list("ABCP")
            return "copy lands", {0, 1, 2, 3}
        if step["what"] == "read":
            self._read[row] = self.owners[row]
            return "", set()
        other = next((read for read in self._read if read != row), None)
        self.owners[row] = "Q" if other is None else self._read[other]
        return (f"host adds Q\n(row {row})" if other is None else f"host swaps\n(row {row})"), {row}


def _array(ax: Axes, one: Record) -> None:
    steps, array, x = one["history"], _Array(), STEP
    _column(ax, 0, "at first", steps[0]["before"], array.owners, set())
    gather = next(i for i, step in enumerate(steps) if step["what"] == "read" and step["row"] is None)
    for step, later in zip(steps[:gather], steps[1:], strict=False):
        what, written = array.follow(step)
        if written:
            _column(ax, x, what, later["before"], array.owners, written)
            x += STEP
    got, own = one["got"][0], one["own"][0]
    colour, verdict = (GOOD, "right") if got == own else (FAULT, f"its own is {own}")
    arrow = FancyArrowPatch(
        (x - 0.5, -2.6), (x + 0.3, -2.6), arrowstyle="-|>", mutation_scale=12, color=colour
    )
    ax.add_patch(arrow)
    ax.text(x + 0.4, -2.6, f"P gathers row 3:\n{got}, {verdict}", color=colour, fontsize=9, va="center")
    ax.set_xlim(-1.1, 6 * STEP + 2.3)
    ax.set_ylim(-3.9, 2.6)
    ax.axis("off")


def _column(
    ax: Axes, x: float, what: str, values: Sequence[int], owners: Sequence[str], written: set[int]
) -> None:
    for row, (value, owner) in enumerate(zip(values, owners, strict=True)):
        edge = "black" if row in written else "white"
        cell(ax, x, -row, str(value), COLOURS[owner], edge=edge)
        if x == 0:
            ax.text(-0.15, 0.4 - row, f"row {row}", ha="right", va="center", fontsize=9)
    colour = FAULT if what == "copy lands" else NEUTRAL
    weight = "bold" if what == "copy lands" else "normal"
    ax.text(x + 0.5, 0.95, what, ha="center", va="bottom", fontsize=8.5, color=colour, fontweight=weight)


def _legend(ax: Axes) -> None:
    for number, (name, colour) in enumerate(COLOURS.items()):
        x = number * 1.9
        ax.add_patch(Rectangle((x, -3.8), 0.5, 0.45, facecolor=colour, edgecolor="none"))
        ax.text(x + 0.6, -3.58, f"{name}'s count" if name else "old", va="center", fontsize=9)


def flights(recorded: Mapping[str, Record], title: str) -> Figure:
    """Host and stream of the worked example on the simulator's clock, one panel a host delay.

    `recorded` has records of `arms.flight` by label.
    """
    made, axes = figure(len(recorded), 1.75 * len(recorded) + 0.5, title)
    furthest = max(one["waited_until"] for one in recorded.values())
    for ax, (label, one) in zip(axes, recorded.items(), strict=True):
        _flight(ax, one)
        ax.text(0, 2.75, label, fontsize=10, va="bottom")
        ax.set_xlim(-60, furthest + 170)
        ax.set_ylim(-0.2, 3.3)
        ax.set_yticks([0.4, 1.75], ["stream", "host"])
    axes[-1].set_xlabel("microseconds from the start of the forward (simulated clock)")
    return made


def _flight(ax: Axes, one: Record) -> None:
    (start, end), landed, wait = one["forward"], one["copy"][1], one["waited_until"]
    ax.add_patch(Rectangle((start, 0), end - start, 0.8, facecolor=REQUEST_COLOURS[0], edgecolor="none"))
    ax.text((start + end) / 2, 0.4, "forward of step N", ha="center", va="center", fontsize=9, color="black")
    ax.plot([landed, landed], [0, 2.3], color=FAULT, linewidth=2)
    ax.text(landed + 5, 0.4, "counts land", color=FAULT, fontsize=9, va="center")
    added, swapped = one["host"][0][1], one["host"][1][1]
    ax.plot([added, swapped], [1.75, 1.75], color=NEUTRAL, linewidth=6, solid_capstyle="butt")
    for x, text, side in ((added, "adds Q ", "right"), (swapped, " swaps", "left")):
        ax.plot([x], [1.75], marker="o", color="black")
        ax.text(x, 1.95, text, fontsize=9, va="bottom", ha=side)
    right = one["got"] == one["own"]
    ax.plot([wait], [1.3], marker="v", color=GOOD if right else FAULT)
    shown = f"wait returns; P has {one['got']}"
    ax.text(wait + 8, 1.3, shown, fontsize=9, va="center", color=GOOD if right else FAULT)


def window(found: Mapping[str, Record], title: str, device: str) -> Figure:
    """Share of examples in which P got another's count, by the host's delay ahead of the row moves.

    `found` has the details of `arms.window` by arm.
    """
    made, (ax,) = figure(1, 3.2, title)
    for arm, colour, style in (("before", FAULT, "o-"), ("after", GOOD, "s--")):
        one = found[arm]
        share = [wrong / one["trials"] for wrong in one["wrong"]]
        ax.plot(one["delays_us"], share, style, color=colour, markersize=3.5, label=arm)
    ax.set_xlabel(f"host delay ahead of the row moves, microseconds ({device})")
    ax.set_ylabel("share with a wrong count")
    ax.set_ylim(-0.05, 1.05)
    ax.legend(frameon=False)
    return made
