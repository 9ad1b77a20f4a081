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
            if not pattern.search(text):
                continue
            if kind == "path":
                text = self._paths(text, pattern)
                continue
            self.counts[kind] += sum(1 for _ in pattern.finditer(text))
            text = pattern.sub(f"<{kind}>", text)
        return text

    def _paths(self, text: str, pattern: Any) -> str:
        """The name at the end of a path stays when it is a source file, which says what code ran."""
        parts: list[str] = []
        at = 0
        for match in pattern.finditer(text):
            name = match.group().replace("\\", "/").rstrip("/").rsplit("/", 1)[-1]
            kept = name if name.endswith(SOURCE_FILES) and len(name) < LONGEST_NAME else ""
            before = match.group(1) if pattern.groups else ""
            parts += [text[at : match.start()], before, f"<path>/{kept}" if kept else "<path>"]
            at = match.end()
            self.counts["path"] += 1
        return "".join((*parts, text[at:]))


@cache
def _private() -> list[tuple[str, Any]]:
    text = resources.files("specmortem.tools.triage").joinpath("redact.toml").read_text(encoding="utf-8")
    return [(entry["kind"], compile_text(entry["pattern"])) for entry in tomllib.loads(text)["private"]]
