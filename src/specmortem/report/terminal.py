"""How commands say things: one look for outcomes, one table for terminals, pipes and Markdown, one line a finding.

On a terminal a table fits the width and its cells wrap. Off it a row is one line, nothing is cut or wrapped, and there
are no colours. `rich` is imported where it is used, so that help is instant.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress

GAP = "  "
ABSENT = "-"


@dataclass(frozen=True)
class Mark:
    """How an outcome is shown: its symbol, so that colour is never the only carrier, its word, and a style of rich."""

    symbol: str
    word: str
    style: str = ""

    def __str__(self) -> str:
        return f"{self.symbol} {self.word}"


FAULT, CLEAN, OPEN = "bold red", "blue", "yellow"
MARKS: Mapping[str, Mark] = MappingProxyType(
    {
        "fault": Mark("✗", "fault", FAULT),
        "clean": Mark("✓", "clean", CLEAN),
        "not-judged": Mark("–", "not judged", OPEN),
        "not-present": Mark("·", "not present", "dim"),
        "not-run": Mark("·", "not run"),
        "controls-only": Mark("·", "controls only"),
        "illegal-address": Mark("✗", "illegal address", FAULT),
        "corruption": Mark("✗", "silent corruption", FAULT),
        "constant-token": Mark("✗", "constant token", FAULT),
        "consistent": Mark("✓", "consistent", CLEAN),
        "refuted": Mark("✗", "refuted"),
    }
)
STYLES: Mapping[str, str] = MappingProxyType(
    {outcome: mark.style for outcome, mark in MARKS.items()}
    | {"passed": CLEAN, "ok": CLEAN, "failed": FAULT, "could-not-run": FAULT, "missing": OPEN}
)


class Line(NamedTuple):
    """A line of a cell, with a style of rich."""

    text: str
    style: str = ""


TableCell = str | Line | Sequence[Line]


def write_table(
    columns: Sequence[str],
    rows: Iterable[Sequence[TableCell]],
    title: str = "",
    console: Console | None = None,
) -> None:
    """Write a table to standard output, or to `console`; a cell that is an outcome's name has its colour."""
    console = console or _console()
    cells = [[_lines(cell) for cell in row] for row in rows]
    if not console.is_terminal:
        write_lines([*([title] if title else []), *_aligned(columns, cells)], console)
        return
    from rich.table import Table
    from rich.text import Text

    table = Table(*columns, title=title or None, box=None, pad_edge=False, title_justify="left")
    for row in cells:
        table.add_row(*(Text("\n").join(Text(*line) for line in lines) for lines in row))
    console.print(table)


def write_lines(lines: Iterable[str | Line], console: Console | None = None) -> None:
    """Write lines to standard output, or to `console`, none of them wrapped or cut."""
    from rich.text import Text

    console = console or _console()
    for line in lines:
        console.print(Text(*_lines(line)[0]), soft_wrap=True)


def finding_line(subject: str, cause: str, verdict: str, place: str, message: str) -> str:
    """One finding for programs: five fields between colons, each on one line, `-` where there is nothing to say."""
    return ": ".join(_one_line(field) or ABSENT for field in (subject, cause, verdict, place, message))


def markdown_table(
    columns: Sequence[str], rows: Iterable[Sequence[object]], escape: Callable[[str], str] | None = None
) -> list[str]:
    """The lines of a Markdown table; without `escape` the bars in cells are escaped, and nothing else."""
    made = escape or (lambda text: text.replace("|", "\\|"))
    lines = [columns, ["---"] * len(columns), *rows]
    return [f"| {' | '.join(made(_one_line(str(cell))) for cell in cells)} |" for cells in lines]


def escaped(text: str) -> str:
    """A text in which nothing is Markdown."""
    for character in "\\|*_<>`[]":
        text = text.replace(character, f"\\{character}")
    return text


@contextmanager
def progress(*more: str) -> Iterator[Progress]:
    """Bars on stderr where that is a terminal; `more` are further columns, as templates of their tasks' fields."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    texts = map(TextColumn, more)
    with Progress(*columns, *texts, console=console, disable=not console.is_terminal, transient=True) as bars:
        yield bars


def _console() -> Console:
    from rich.console import Console

    return Console()


def _lines(cell: TableCell) -> Sequence[Line]:
    if isinstance(cell, str):
        return [Line(cell, STYLES.get(cell, ""))]
    return [cell] if isinstance(cell, Line) else cell


def _aligned(columns: Sequence[str], rows: Sequence[Sequence[Sequence[Line]]]) -> Iterator[str]:
    """A line a row, its columns aligned."""
    texts = [[GAP.join(_one_line(line.text) for line in lines) for lines in row] for row in rows]
    table = [list(columns), *texts]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    for row in table:
        yield GAP.join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip()


def _one_line(text: str) -> str:
    return " ".join(text.split())
