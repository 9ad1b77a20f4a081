"""Figures of the postmortems: SVG, one colour a request throughout, readable in both colour schemes and in print."""

from __future__ import annotations

import io
from collections.abc import Mapping
from typing import Any

import matplotlib
from IPython.display import SVG, display
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

# Okabe and Ito's palette, distinguishable with any colour vision.
REQUEST_COLOURS = ("#56B4E9", "#E69F00", "#009E73", "#CC79A7")
FAULT, NEUTRAL, QUIET = "#D55E00", "#999999", "#DDDDDD"
STYLE = {
    "svg.fonttype": "none",
    "svg.hashsalt": "specmortem",
    "font.family": "sans-serif",
    "font.size": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlesize": 11,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
}
Record = Mapping[str, Any]


def show(figure: Figure, alt: str) -> None:
    """Display a figure as SVG with its text alternative."""
    display(SVG(svg(figure, Title=alt)), metadata={"image/svg+xml": {"alt": alt}})  # type: ignore[no-untyped-call]


def svg(figure: Figure, **metadata: str) -> str:
    """A figure as an SVG document, the same for the same figure."""
    buffer = io.StringIO()
    with matplotlib.rc_context(STYLE):  # type: ignore[arg-type]
        figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None, **metadata})
    return buffer.getvalue()


def figure(rows: int, height: float, title: str) -> tuple[Figure, list[Axes]]:
    """A figure 8 inches wide with one axes a row."""
    with matplotlib.rc_context(STYLE):  # type: ignore[arg-type]
        made = Figure(figsize=(8, height), layout="constrained")
        axes = made.subplots(rows, 1, squeeze=False)[:, 0].tolist()
        axes[0].set_title(title)
    return made, axes


def request_colour(request: int) -> str:
    """The colour of a request on every figure of a page."""
    return REQUEST_COLOURS[request % len(REQUEST_COLOURS)]


def cell(
    axes: Axes, x: float, y: float, text: str, colour: str, *, edge: str = "white", width: float = 1.0
) -> None:
    """One labelled element of an array."""
    axes.add_patch(Rectangle((x, y), width, 0.8, facecolor=colour, edgecolor=edge, linewidth=1.5))
    axes.text(x + width / 2, y + 0.4, text, ha="center", va="center", color="black")
