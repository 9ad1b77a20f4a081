"""Text of an engine, made fit to keep and to show: without places of this machine, and without terminal controls."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from specmortem.tools.load.text import printable

TEMPORARY = ("/tmp", "/var/tmp")
Places = Mapping[str, str]  # a path, and the word that stands for it


def known(more: Mapping[str | Path, str]) -> Places:
    """Those given, and the home and temporary folders; each also where its links lead."""
    named: dict[str | Path, str] = {
        **dict.fromkeys((*TEMPORARY, tempfile.gettempdir()), "TMP"),
        **more,
    }
    with suppress(RuntimeError):  # nobody's home is known
        named = {Path.home(): "HOME", **named}
    both = {str(form): word for place, word in named.items() for form in (place, Path(place).resolve())}
    return {place: word for place, word in both.items() if len(place) > 1}


def cleaned(text: str, places: Places) -> str:
    """The text with words in place of places, the longest place first, and escapes in place of controls."""
    if places:
        longest = sorted(places, key=len, reverse=True)
        pattern = rf"(?<![\w.-])(?:{'|'.join(map(re.escape, longest))})(?![\w-])"
        text = re.sub(pattern, lambda found: places[found.group()], text)
    return "\n".join(map(printable, text.split("\n")))


def cleaned_all(value: Any, places: Places) -> Any:
    """The same for every text in a JSON value."""
    if isinstance(value, str):
        return cleaned(value, places)
    if isinstance(value, Mapping):
        return {name: cleaned_all(each, places) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [cleaned_all(each, places) for each in value]
    return value
