"""Symptoms that are counted rather than named: rejected drafts, and stretches of one repeated unit."""

from __future__ import annotations

from collections.abc import Iterator

from specmortem.statements.engine_re import compile_text
from specmortem.statements.facts import PROSE, STATED

LONGEST_UNIT = 12
FEWEST_REPEATS = 6
READ = 2_000  # characters of a line searched for a repeated unit

_RUN = compile_text(r"[\pL!]{24,}")
_ARROW = compile_text(
    r"(?i)accept\w*[^.;]{0,30}?(\d{1,3}(?:\.\d+)?) ?%? ?(?:->|→|to) ?(\d{1,3}(?:\.\d+)?) ?%"
)
_ACCEPTED = compile_text(r"Accepted: (\d{1,9}) tokens, Drafted: (\d{1,9}) tokens")


def measured(text: str) -> Iterator[tuple[str, str, int]]:
    """(fact, value, rank) of each."""
    if (match := _ACCEPTED.search(text)) and int(match.group(1)) == 0 and int(match.group(2)) >= 8:
        yield "symptom", "acceptance-collapse", STATED
    if match := _ARROW.search(text):
        before, after = float(match.group(1)), float(match.group(2))
        if after < before / 2:
            yield "symptom", "acceptance-collapse", PROSE
    for match in _RUN.finditer(text[:READ]):
        if unit := repeated_unit(match.group()):
            yield "symptom", "token-zero" if unit == "!" else "token-loop", STATED


def repeated_unit(text: str) -> str:
    """The short unit that fills a stretch of `text` at least six times over, or nothing."""
    for size in range(1, LONGEST_UNIT + 1):
        run = 0
        for a, b in zip(text, text[size:], strict=False):
            run = run + 1 if a == b else 0
            if run >= max(size * (FEWEST_REPEATS - 1), 16):
                return _unit(text, size)
    return ""


def _unit(text: str, size: int) -> str:
    """One period out of the middle of the text."""
    middle = len(text) // 2
    unit = text[middle : middle + size]
    return "!" if set(unit) == {"!"} else unit
