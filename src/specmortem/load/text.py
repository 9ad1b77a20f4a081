"""Text of a server, made harmless before it is kept or shown."""

from __future__ import annotations

import json
from dataclasses import dataclass
from urllib.parse import quote

REMOVED = "[API key]"


def printable(text: str) -> str:
    """`text` with everything that a terminal could act on as its escape: controls, bidi marks, lone surrogates."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text)


@dataclass(frozen=True)
class Cleaner:
    """Makes text fit to keep: without the API key, printable, short."""

    key: str = ""

    def __call__(self, text: str, limit: int = 200) -> str:
        """At most `limit` characters of the start of `text`, and a mark where something is left out."""
        cleaned = self._without_key(text)
        return printable(cleaned[:limit]) + (" …" if len(cleaned) > limit else "")

    def ends(self, text: str, limit: int = 120) -> str:
        """Start and end of `text`, at most `limit` characters each."""
        cleaned = self._without_key(text)
        if len(cleaned) <= 2 * limit:
            return printable(cleaned)
        return f"{printable(cleaned[:limit])} … {printable(cleaned[-limit:])}"

    def _without_key(self, text: str) -> str:
        if not self.key:
            return text
        for form in (self.key, json.dumps(self.key)[1:-1], quote(self.key, safe="")):
            text = text.replace(form, REMOVED)
        return text
