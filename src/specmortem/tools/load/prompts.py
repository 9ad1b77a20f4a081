"""Prompts with an answer that can be checked: a list of keys and values made from a seed, or those of a file."""

from __future__ import annotations

import hashlib
import json
import random
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import msgspec

from specmortem.convert import Count, Text
from specmortem.errors import BadInputError, UnavailableError

Api = Literal["chat", "completions"]
# An estimate for the vocabularies of large models; the server's own count of each prompt is in its record.
TOKENS_PER_PAIR = 8
_WORDS = """
acorn amber apple arrow autumn bakery bamboo barrel basket beacon birch border bottle branch bridge
butter button cabin camel candle canyon carpet castle cedar cellar chapel cherry circle clover coast
copper coral corner cotton crystal desert dragon eagle ember engine falcon feather fiddle flame forest
garden garlic ginger glacier granite grape hammer harbor hazel honey island ivory jacket jungle kettle
ladder lagoon lemon lily linen lizard magnet maple marble meadow mirror monkey mountain needle nickel
olive onion orange orchard oyster paper pebble pepper pillow planet pocket prairie pumpkin quartz
rabbit raven ribbon river saddle sailor salmon
"""
WORDS = tuple(_WORDS.split())


LONGEST = len(WORDS) ** 2 * 3 // 4
"""Pairs in the longest list: three quarters of all keys there are."""


class Prompt(msgspec.Struct, frozen=True, rename={"text": "prompt"}):
    """A prompt, and what a right answer holds: text that stands in it, or the token ids it begins with.

    Token ids are for a server of a model without a tokenizer. `expected` is empty where nothing is known.
    """

    text: Text | Annotated[tuple[Count, ...], msgspec.Meta(min_length=1)]
    expected: str | tuple[Count, ...] = ""


@dataclass(frozen=True)
class PromptFile:
    """Prompts of a file, which `sha256` names."""

    path: str
    sha256: str
    prompts: tuple[Prompt, ...]


def read(path: Path) -> PromptFile:
    """Prompts of a file with one JSON object a line: `prompt`, and where known `expected`.

    Both are a text or a list of token ids. Raises BadInputError naming the line that is neither.
    """
    try:
        data = path.read_bytes()
    except OSError as error:
        raise UnavailableError(f"cannot read --prompts {path}: {error.strerror or error}") from error
    lines = [line for line in data.splitlines() if line.strip()]
    prompts = tuple(_prompt(line, f"--prompts {path}, line {number}") for number, line in enumerate(lines, 1))
    if not prompts:
        raise BadInputError(f"--prompts {path} holds no prompt; give one JSON object a line")
    return PromptFile(str(path), hashlib.sha256(data).hexdigest(), prompts)


def _prompt(line: bytes, where: str) -> Prompt:
    try:
        return msgspec.convert(json.loads(line), Prompt)
    except (ValueError, RecursionError, msgspec.ValidationError):
        raise BadInputError(
            f'{where}: expected {{"prompt": TEXT or [IDS], "expected": TEXT or [IDS]}}'
        ) from None


def generate(seed: int, name: str, tokens: int, api: Api) -> Prompt:
    """The prompt of a request: about `tokens` tokens, the same for the same arguments."""
    draw = random.Random(f"{seed}/{name}").random
    pairs = _pairs(max(1, tokens // TOKENS_PER_PAIR), draw)
    listed = "\n".join(f"{key}: {value}" for key, value in pairs.items())
    key = list(pairs)[int(draw() * len(pairs))]
    if api == "completions":
        return Prompt(f"{listed}\n{key}:", pairs[key])
    text = (
        f"A list of keys and values, one pair a line:\n\n{listed}\n\n"
        f"Write the value of the key {key} first, exactly as in the list. "
        "Then write a long and detailed story in which the pairs of the list appear one after the other."
    )
    return Prompt(text, pairs[key])


def _pairs(count: int, draw: Callable[[], float]) -> dict[str, str]:
    pairs: dict[str, str] = {}
    while len(pairs) < min(count, LONGEST):
        pairs.setdefault(_two_words(draw()), _two_words(draw()))
    return pairs


def _two_words(at: float) -> str:
    first, second = divmod(int(at * len(WORDS) ** 2), len(WORDS))
    return f"{WORDS[first]}-{WORDS[second]}"


def is_right(expected: str | tuple[int, ...], text: str, token_ids: tuple[int, ...] = ()) -> bool:
    """Whether an answer holds the text, as a word of its own, or goes along with the token ids to the shorter end."""
    if not isinstance(expected, str):
        both = min(len(expected), len(token_ids))
        return both > 0 and expected[:both] == token_ids[:both]
    return re.search(rf"(?<![\w-]){re.escape(expected)}(?![\w-])", text, re.IGNORECASE) is not None
