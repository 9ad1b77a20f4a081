"""A result on a terminal and as a page that stands alone. What a server said was made printable when it was kept."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

from specmortem.report.terminal import CLEAN, FAULT, OPEN, Line, write_lines, write_table
from specmortem.tools.load.metrics import COLLAPSE_RULE
from specmortem.tools.load.outcome import UNREMARKABLE, Outcome, RequestRecord
from specmortem.tools.load.result import COMPLETE, Finding, Result
from specmortem.tools.load.signs import EARLY_RULE, LOOP_RULE

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from rich.console import Console

IDS_SHOWN = 6
ROUND_COLUMNS = ("round", "sent", "ok", "first text, s", "request, s", "longest, s", "tokens/s")
RoundFigures = tuple[int, int, int, float | None, float | None, float | None, float | None]


def rounds(result: Result) -> list[RoundFigures]:
    """`ROUND_COLUMNS` of each round, the warm-up as round 0.

    Seconds are those of whole answers, medians and the longest. The first text is None where answers are not
    streamed, tokens a second without counts.
    """
    numbers = sorted({record.round for record in result.requests})
    streamed = result.settings["shape"]["stream"]
    return [_round(number, [r for r in result.requests if r.round == number], streamed) for number in numbers]


def _round(number: int, records: Sequence[RequestRecord], streamed: bool) -> RoundFigures:
    ok = [r for r in records if r.outcome is Outcome.OK]
    span = max(r.started_s + r.seconds for r in records) - min(r.started_s for r in records)
    tokens = [r.completion_tokens for r in records if r.completion_tokens is not None]
    return (
        number,
        len(records),
        len(ok),
        _median([r.first_text_s for r in ok if r.first_text_s is not None and streamed]),
        _median([r.seconds for r in ok]),
        max((r.seconds for r in ok), default=None),
        sum(tokens) / span if tokens and span > 0 else None,
    )


def _median(values: list[float]) -> float | None:
    return median(values) if values else None


def headline(result: Result) -> str:
    """The result in one line."""
    bad = sum(count for outcome, count in result.counts.items() if outcome not in UNREMARKABLE)
    if result.clean:
        return f"clean: {len(result.requests)} requests, nothing detected"
    found = ", ".join(finding.kind for finding in result.findings) or "nothing"
    said = [f"detected: {found}; {bad} of {len(result.requests)} requests"]
    said += [] if result.status in COMPLETE else [result.status.meaning]
    said += ["not everything was judged"] if result.not_judged else []
    return "; ".join(said)


def ids(finding: Finding) -> str:
    """The first requests of a finding."""
    more = len(finding.requests) - IDS_SHOWN
    return ", ".join(finding.requests[:IDS_SHOWN]) + (f" and {more} more" if more > 0 else "")


def as_run(result: Result) -> str:
    """The figures of the shape as they were used."""
    shape = result.settings["shape"]
    each = f"{shape['requests']} requests a round, " if shape["requests"] else ""
    lengths = [
        str(low) if low == high else f"{low} to {high}"
        for low, high in (shape["prompt_tokens"], shape["max_tokens"])
    ]
    given = result.settings["prompts"]
    prompts = f"{given['count']} prompts of a file" if given else f"prompts of about {lengths[0]} tokens"
    return (
        f"{_at_once(shape['concurrency'])}, {each}{prompts}, answers of up to {lengths[1]}, "
        f"temperature {shape['temperature']:g}, {'streamed' if shape['stream'] else 'not streamed'}"
    )


def _at_once(figures: Sequence[int]) -> str:
    """One figure for rounds that are alike."""
    if len(set(figures)) == 1 and len(figures) > 1:
        return f"{figures[0]} at once in each of {len(figures)} rounds"
    return f"{', '.join(map(str, figures))} at once"


def number(value: float | None, digits: int = 2) -> str:
    """A figure, or a dash where there is none."""
    return "–" if value is None else f"{value:.{digits}f}"


def terminal(result: Result, console: Console | None = None) -> None:
    """Headline, findings, rounds, acceptance and notes."""
    settings = result.settings
    counted = ", ".join(f"{count} {outcome}" for outcome, count in result.counts.items())
    head: list[str | Line] = [
        Line(headline(result), f"bold {CLEAN}" if result.clean else FAULT),
        f"{settings['url']}  {result.model}  {settings['shape']['name']}, seed {settings['seed']}",
        f"sent {len(result.requests)} of {result.planned} planned: {counted or 'none'}",
    ]
    write_lines(head, console)
    if result.findings:
        found = [(Line(f.kind), f"{len(f.requests) or '–'}  {ids(f)}", Line(f.said)) for f in result.findings]
        write_table(("detected", "requests", "first seen"), found, console=console)
    write_table(ROUND_COLUMNS, map(_cells, rounds(result)), console=console)
    if o := result.acceptance.overall:
        told = f"acceptance {o.rate:.1%} of {o.draft_tokens} draft tokens, {o.length:.2f} tokens a step"
        write_lines([told], console)
    write_lines((Line(f"not judged: {reason}", OPEN) for reason in result.not_judged), console)
    write_lines((Line(f"note: {note}", OPEN) for note in result.notes), console)


def _cells(figures: RoundFigures) -> tuple[str, ...]:
    round_number, sent, ok, *seconds, tokens_per_s = figures
    return (
        str(round_number or "warm-up"),
        str(sent),
        str(ok),
        *map(number, seconds),
        number(tokens_per_s, 1),
    )


def page(result: Result) -> str:
    """A page with findings, rounds, figures and every request.

    Raises BadInputError when a text would make the page fetch or run something.
    """
    from markupsafe import Markup

    from specmortem.report.html import standalone

    return standalone(
        Path(__file__).parent,
        "load.html.j2",
        "the load",
        result=result,
        headline=headline(result),
        status=result.status.meaning,
        round_columns=ROUND_COLUMNS,
        rounds=list(map(_cells, rounds(result))),
        meaning={outcome.value: outcome.meaning for outcome in Outcome},
        rules=(LOOP_RULE, EARLY_RULE, COLLAPSE_RULE),
        figures=[(Markup(svg), alt) for svg, alt in _figures(result)],
        as_run=as_run(result),
        ids_shown=IDS_SHOWN,
        number=number,
    )


def _figures(result: Result) -> Iterator[tuple[str, str]]:
    """(SVG, what it shows) of the requests over time, and of acceptance where it was offered."""
    from specmortem.report.figures import svg

    drawn = [_requests_figure(result)] if result.requests else []
    drawn += [_acceptance_figure(result)] if result.acceptance.windows else []
    for made, told in drawn:
        document = svg(made)
        yield document[document.index("<svg") :], told


def _requests_figure(result: Result) -> tuple[Figure, str]:
    from specmortem.report.figures import FAULT, NEUTRAL, REQUEST_COLOURS, figure

    bad = sum(_kind(record) == "detected" for record in result.requests)
    title = f"{bad} of {len(result.requests)} requests did not end well" if bad else "All requests ended well"
    made, (ax,) = figure(1, 3.2, title)
    ordered = sorted(result.requests, key=lambda r: r.started_s)
    for label, colour in {"ok": REQUEST_COLOURS[0], "detected": FAULT, "interrupted": NEUTRAL}.items():
        rows = [(lane, r) for lane, r in enumerate(ordered) if _kind(r) == label]
        if rows:
            lanes, ends = [lane for lane, _ in rows], [r.started_s + r.seconds for _, r in rows]
            ax.hlines(lanes, [r.started_s for _, r in rows], ends, color=colour, linewidth=1.5)
            mark = "|" if label == "ok" else "x"
            ax.plot(ends, lanes, mark, color=colour, markersize=4)
            ax.plot([], [], f"{mark}-", color=colour, markersize=4, label=label)
    ax.set_xlabel("seconds since the start")
    ax.set_ylabel("request, by its start")
    ax.invert_yaxis()
    ax.legend(frameon=False, fontsize=8, loc="upper right")
    told = f"{len(ordered)} requests, each a line from its start to its end"
    return made, told + (f"; {bad} end with a cross" if bad else "")


def _kind(record: RequestRecord) -> str:
    return record.outcome.value if record.outcome in UNREMARKABLE else "detected"


def _acceptance_figure(result: Result) -> tuple[Figure, str]:
    from specmortem.report.figures import REQUEST_COLOURS, figure

    windows = result.acceptance.windows
    first, last = windows[0], windows[-1]
    made, (ax,) = figure(1, 2.6, f"Accepted draft tokens: {first.rate:.0%} at first, {last.rate:.0%} at last")
    middles = [(w.from_s + w.to_s) / 2 for w in windows]
    ax.plot(middles, [w.rate for w in windows], "o-", color="black", markersize=3, label="all positions")
    depth = max(len(w.per_position) for w in windows)
    for position in range(min(depth, len(REQUEST_COLOURS))):
        shares = [w.per_position[position] if position < len(w.per_position) else 0.0 for w in windows]
        colour = REQUEST_COLOURS[position]
        ax.plot(middles, shares, "--", color=colour, linewidth=1, label=f"position {position}")
    ax.set_xlim(0, result.seconds)
    ax.set_ylim(0, 1.05)
    ax.set_xlabel("seconds since the start")
    ax.set_ylabel("accepted")
    ax.legend(frameon=False, fontsize=8)
    told = f"from {first.rate:.1%} in the first window to {last.rate:.1%} in the last, by draft position"
    return made, told
