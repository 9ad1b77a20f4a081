"""What is wrong with the tokens of one request. Every rule is stated where it stands."""

from __future__ import annotations

from collections.abc import Sequence

LOOP_RULE = (
    "an answer ends in a loop when a unit of 1 to 16 tokens stands at its end at least 4 times over at least 12 "
    "tokens, where the right answer of that length does not end so; a loop that it leaves again is not counted"
)
EARLY_RULE = "an early end is finish_reason stop before as many tokens as the right answer has"
LONGEST_UNIT, TIMES, LEAST = 16, 4, 12


def first_difference(tokens: Sequence[int], other: Sequence[int]) -> int | None:
    """Where two sequences first differ, as far as both go; None where they do not."""
    return next((i for i, (a, b) in enumerate(zip(tokens, other, strict=False)) if a != b), None)


def wrong_at(tokens: Sequence[int], answer: Sequence[int]) -> int | None:
    """The first token that is not the answer's, or that the answer does not have at all."""
    at = first_difference(tokens, answer)
    return len(answer) if at is None and len(tokens) > len(answer) else at


def loop_at_end(tokens: Sequence[int]) -> int:
    """Tokens of the shortest unit that loops at the end by `LOOP_RULE`; 0 for none."""
    for unit in range(1, LONGEST_UNIT + 1):
        run = unit
        while run < len(tokens) and tokens[-1 - run] == tokens[-1 - run + unit]:
            run += 1
        if run >= max(TIMES * unit, LEAST) and run <= len(tokens):
            return unit
    return 0


def ends_in_loop(tokens: Sequence[int], answer: Sequence[int]) -> bool:
    """Whether an answer ends in a loop that the right one does not have, by `LOOP_RULE`."""
    return bool(loop_at_end(tokens)) and not loop_at_end(answer[: len(tokens)])


def ends_early(tokens: Sequence[int], answer: Sequence[int], finish: str) -> bool:
    """Whether an answer ended before it should, by `EARLY_RULE`."""
    return finish == "stop" and len(tokens) < len(answer)
