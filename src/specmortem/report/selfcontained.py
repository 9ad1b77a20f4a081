"""Whether a page stands alone: no script, no link element, nothing fetched from outside the file."""

from __future__ import annotations

import re
from html.parser import HTMLParser

FETCHING = frozenset(
    {"src", "href", "xlink:href", "srcset", "poster", "data", "background", "action", "formaction"}
)
NAVIGATION = frozenset({"a", "area"})
FORBIDDEN = frozenset({"script", "link", "iframe", "object", "embed", "base"})
CSS_REFERENCE = re.compile(r"""url\(\s*["']?([^"')]+)|@import\s+["']?([^"';\s]+)""", re.IGNORECASE)


def check_self_contained(html: str) -> list[str]:
    """What in the page would run or be fetched, one line each; empty for a page that stands alone.

    Links that a reader follows (`<a href>`) may point anywhere; everything else must be inside the page.
    """
    checker = _Checker()
    checker.feed(html)
    checker.close()
    return checker.problems


class _Checker(HTMLParser):
    """Collects what is not inside the page."""

    def __init__(self) -> None:
        super().__init__()
        self.problems: list[str] = []
        self._in_style = False

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._in_style = tag == "style"
        if tag in FORBIDDEN:
            self.problems.append(f"line {self.getpos()[0]}: <{tag}>")
        for name, value in attrs:
            self._check_attribute(tag, name, value or "")

    def handle_endtag(self, tag: str) -> None:
        self._in_style = False

    def handle_data(self, data: str) -> None:
        if self._in_style:
            self._check_css(data, "<style>")

    def _check_attribute(self, tag: str, name: str, value: str) -> None:
        if name.startswith("on"):
            self.problems.append(f"line {self.getpos()[0]}: <{tag} {name}> runs script")
        elif tag == "meta" and value.lower() == "refresh":
            self.problems.append(f"line {self.getpos()[0]}: <meta {name}={value}>")
        elif name in FETCHING and tag in NAVIGATION:
            self._check_link(tag, value)
        elif name in FETCHING and not _inside(value):
            self.problems.append(f"line {self.getpos()[0]}: <{tag} {name}={value[:80]}>")
        else:
            self._check_css(value, f"<{tag} {name}>")

    def _check_link(self, tag: str, value: str) -> None:
        if value.strip().lower().startswith("javascript:"):
            self.problems.append(f"line {self.getpos()[0]}: <{tag}> with a javascript: link")

    def _check_css(self, text: str, where: str) -> None:
        for url, imported in CSS_REFERENCE.findall(text):
            if imported or not _inside(url):
                self.problems.append(f"line {self.getpos()[0]}: {where} fetches {(url or imported)[:80]}")


def _inside(reference: str) -> bool:
    """Whether a reference stays in the page."""
    return reference.strip().startswith(("#", "data:")) or not reference.strip()
