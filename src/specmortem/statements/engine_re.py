"""Patterns over untrusted text: a linear-time engine, so that no line of a log can make matching slow."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import re2

MEMORY = 1 << 28


def _options() -> Any:
    options = re2.Options()
    options.max_mem = MEMORY
    options.log_errors = False
    return options


def compile_text(pattern: str) -> Any:
    """A pattern over `str`, or over `bytes` when it is only given bytes."""
    return re2.compile(pattern, _options())


def compile_bytes(pattern: str) -> Any:
    """A pattern over `bytes`."""
    return re2.compile(pattern.encode(), _options())


class PatternSet:
    """Which of many patterns occur in a text, in one pass over it."""

    def __init__(self, patterns: Sequence[str]) -> None:
        self._set = re2.Set.SearchSet(_options())
        for pattern in patterns:
            self._set.Add(pattern.encode())
        self._set.Compile()

    def indices(self, text: bytes) -> list[int]:
        """Positions, in the order given, of the patterns that occur in `text`."""
        return sorted(self._set.Match(text) or ())


def literals(words: Iterable[str]) -> Any:
    """A pattern over bytes that finds any of the words, in either case."""
    return compile_bytes("(?i)(" + "|".join(re2.escape(word) for word in words) + ")")
