"""Write who is affected by each incident into README.md, from the same verdicts and rules as the pages.

`python docs/readme.py` writes what stands between the two marks; `tests/affected/test_readme.py` fails where the file
is older than the verdicts.
"""

from __future__ import annotations

import re
from pathlib import Path

from specmortem import facts
from specmortem.affected.screen import ScreenLine, exposure, safest
from specmortem.incident import all_slugs

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "README.md"
BEGIN, END = "<!-- written by docs/readme.py -->", "<!-- end -->"
REFERENCE = "cuda"
MOST_LINES = 2
FLAG = re.compile(r"--[a-z][\w-]+(?: \d+)?|VLLM_\w+=\d")
HEAD = ("| incident | affected vLLM, by launch | safe over all incidents |", "|---|---|---|")


def text() -> str:
    """The table of the incidents, and the sentence on the safest release, between the marks."""
    rows = [_row(slug) for slug in all_slugs()]
    return "\n".join([BEGIN, *HEAD, *rows, "", f"{safest().text} Verdicts of {exposure('').date}.", END])


def _row(slug: str) -> str:
    lines = exposure(slug).lines[:MOST_LINES]
    affected = "<br>".join(f"{_launch(line)}: **{line.releases('affected')}**" for line in lines)
    safe = "<br>".join(_safe(line) for line in lines)
    return f"| {_links(slug)}: {facts.load(slug).title} | {affected or 'none on record'} | {safe} |"


def _links(slug: str) -> str:
    """The reference page, and those of other runs on GPUs."""
    runs = sorted(
        path.parent.name for path in (ROOT / "investigations" / slug).glob("runs/*/postmortem.html")
    )
    others = [name for name in runs if name.startswith(f"{REFERENCE}-")]
    links = [f"[`{slug}`]({_page(slug, REFERENCE)})"] if REFERENCE in runs else [f"`{slug}`"]
    return ", ".join([*links, *(f"[{name}]({_page(slug, name)})" for name in others)])


def _page(slug: str, name: str) -> str:
    return f"investigations/{slug}/runs/{name}/postmortem.html"


def _launch(line: ScreenLine) -> str:
    more = f" (and {len(line.alike)} alike)" if line.alike else ""
    return FLAG.sub(r"`\g<0>`", line.line.configuration.shown) + more


def _safe(line: ScreenLine) -> str:
    if line.target is None:
        return line.way_out
    return " ".join([line.target.release, *(f"`{flag}`" for flag in line.target.flags)])


def written(page: str) -> str:
    """The page with the text between its marks. Raises ValueError for a page that lacks them."""
    head, begin, rest = page.partition(BEGIN)
    _, end, tail = rest.partition(END)
    if not (begin and end):
        raise ValueError(
            f"{PAGE.name} has no {BEGIN} and {END} below it; put them where the table shall stand"
        )
    return head + text() + tail


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
