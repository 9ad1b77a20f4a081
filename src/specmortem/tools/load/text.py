"""Text of a server, made harmless before it is kept or shown."""

from __future__ import annotations

import json
from dataclasses import dataclass
from urllib.parse import quote

REMOVED = "[API key]"
PARTIAL = 8
"""Characters of a key at the very end of a text, from which on they count as a key that was cut."""


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
        cleaned = self.without_key(text)
        return printable(cleaned[:limit]) + (" …" if len(cleaned) > limit else "")

    def ends(self, text: str, limit: int = 120) -> str:
        """Start and end of `text`, at most `limit` characters each."""
        cleaned = self.without_key(text)
        if len(cleaned) <= 2 * limit:
            return printable(cleaned)
        return f"{printable(cleaned[:limit])} … {printable(cleaned[-limit:])}"

    def without_key(self, text: str) -> str:
        """The whole of `text` without the API key, also where it ends within the key. Clean first, cut after."""
        if not self.key:
            return text
        forms = (self.key, json.dumps(self.key)[1:-1], quote(self.key, safe=""), quote(self.key))
        for form in dict.fromkeys(forms):
            text = text.replace(form, REMOVED)
            if begun := _begun(form, text):
                text = text[:-begun] + REMOVED
        return text


def _begun(key: str, text: str) -> int:
    """How many characters of the start of `key`, at least `PARTIAL`, `text` ends with; 0 for none."""
    lengths = range(min(len(key) - 1, len(text)), PARTIAL - 1, -1)
    return next((length for length in lengths if text.endswith(key[:length])), 0)
