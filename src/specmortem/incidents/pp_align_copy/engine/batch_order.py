"""The order of requests in a batch: decodes first, so that a row moves whenever a prefill joins or leaves."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, TypeVar


class HasTokens(Protocol):
    """What the order looks at."""

    @property
    def decode(self) -> bool: ...  # noqa: D102

    @property
    def num_tokens(self) -> int: ...  # noqa: D102


T = TypeVar("T", bound=HasTokens)


def decodes_first(rows: Sequence[T], num_speculative_tokens: int) -> list[T]:
    """Decodes with drafts, then what is as short, then longer prefills; equals keep their order."""

    def rank(row: T) -> int:
        if row.decode and row.num_tokens == 1 + num_speculative_tokens:
            return 0
        return 1 if row.num_tokens <= 1 + num_speculative_tokens else 2

    return sorted(rows, key=rank)
