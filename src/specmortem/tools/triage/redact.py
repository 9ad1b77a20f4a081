"""Nothing private leaves: hosts, addresses, users, paths, keys, identifiers and prompts are replaced and counted."""

from __future__ import annotations

import tomllib
from collections import Counter
from dataclasses import dataclass, field
from functools import cache
from importlib import resources
from typing import Any

from specmortem.statements.engine_re import compile_text
from specmortem.tools.triage.prefixes import clean

SOURCE_FILES = (".py", ".cpp", ".cu", ".cuh", ".h", ".so")
LONGEST_NAME = 60


@dataclass
class Redactor:
    """Replaces what is private, and counts it by kind."""

    counts: Counter[str] = field(default_factory=Counter)
    _done: dict[str, str] = field(default_factory=dict, repr=False)

    def __call__(self, text: str) -> str:
        """`text` on one line, without control characters and without anything private; a text counts once."""
        if text not in self._done:
            self._done[text] = self._replaced(text)
        return self._done[text]

    def _replaced(self, text: str) -> str:
        text = clean(text).replace("\n", " ").replace("\t", " ")
        for kind, pattern in _private():
            shown = self._path if kind == "path" else f"<{kind}>"
            text, count = pattern.subn(shown, text)
            if count:
                self.counts[kind] += count
        return text

    @staticmethod
    def _path(match: Any) -> str:
        """The name at the end of a path stays when it is a source file, which says what code ran."""
        name = match.group().replace("\\", "/").rstrip("/").rsplit("/", 1)[-1]
        kept = f"/{name}" if name.endswith(SOURCE_FILES) and len(name) < LONGEST_NAME else ""
        before = match.group(1) if match.re.groups else ""
        return f"{before}<path>{kept}"


@cache
def _private() -> list[tuple[str, Any]]:
    text = resources.files("specmortem.tools.triage").joinpath("redact.toml").read_text(encoding="utf-8")
    return [(entry["kind"], compile_text(entry["pattern"])) for entry in tomllib.loads(text)["private"]]
