"""Signs: patterns that state a fact where they occur, read from `signs.toml`, and looked for in one pass."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources
from itertools import islice
from typing import Any, Literal

from specmortem.convert import Text, Value, build
from specmortem.errors import BadInputError
from specmortem.statements.engine_re import PatternSet, compile_bytes, compile_text
from specmortem.statements.facts import PROSE, STATED, Fact, FactBook

SCHEMA = 1
MATCHES_A_LINE = 6
NEAR = 60  # characters in front of a match in which a negation is looked for
_CLAUSE_ENDS = ".;:!?|"
_NEGATION = compile_text(
    r"(?i)(?:\b(?:no|not|never|without|neither|nor|cannot|can't|isn't|wasn't|didn't|don't|doesn't|zero)\b"
    r"|\brul(?:es?|ed|ing) out\b|\bexclud\w+|\binstead of\b|\bthe absence of\b)"
    r"(?:[ /-]+[\w+/,'()-]+){0,4}[ (,/-]*$"
)
_DENIED_AFTER = compile_text(
    r"(?i)^[\w ]{0,12}(?:=|: ?| is | was )\s*"
    r"(?:false|no|none|0|off|absent|unlikely|ruled out|not required|not needed)\b"
    r"|^ (?:off|disabled)\b|^ not (?:required|needed|involved|used)"
)
_MACRO = re.compile(r"@(flag|on|off)\(([\w-]+)\)")
_MACROS: Mapping[str, str] = {
    "flag": r"""(?i)(?:^|[^\w-]|--?)["']?{}["']?(?:\s*[=:]\s*|\s+)["'\\]*""",
    "on": r"""(?i)--(?:enable-)?{}(?:\s*=\s*true)?(?:$|[\s,;`'"\\)])""",
    "off": r"(?i)--no-(?:enable-)?{0}\b|--disable-{0}\b",
}


class FactSign(Value, frozen=True):
    """`pattern` states `fact` = `value`, or its first group where `value` is empty; see the head of `signs.toml`.

    What lies within its match and would state one of the facts in `hides` states nothing. `log` says that vLLM prints
    it, or that it heads a report, so that it counts beside a whole launch command.
    """

    fact: Text
    pattern: Text
    words: tuple[str, ...]
    value: str = ""
    stated: bool = False
    firm: bool = False
    denied: str = ""
    convert: Literal["", "method", "backend", "graphs", "arch", "percent"] = ""
    hides: tuple[str, ...] = ()
    log: bool = False

    @property
    def rank(self) -> int:
        """How firm what it states is."""
        return STATED if self.stated else PROSE


class ControlSign(Value, frozen=True):
    """`pattern` tells of the configuration `subject`, which somebody tried."""

    subject: Text
    pattern: Text


class SignFile(Value, frozen=True):
    """`signs.toml`: the signs, and what tells of controls and of what came of them."""

    schema: int
    control_words: tuple[str, ...]
    signs: tuple[FactSign, ...]
    controls: tuple[ControlSign, ...]
    outcomes: Mapping[str, str]


@dataclass(frozen=True)
class Found:
    """A sign in a text, and where."""

    sign: FactSign
    value: str
    start: int
    end: int

    def hidden_by(self, other: Found) -> bool:
        """Whether the other one, around it, says that this is no such fact."""
        return self.sign.fact in other.sign.hides and other.start <= self.start and self.end <= other.end


class Signs:
    """Many signs, looked for in one pass."""

    def __init__(self, signs: Sequence[FactSign]) -> None:
        self.signs = tuple(signs)
        patterns = [expanded(sign.pattern) for sign in self.signs]
        self._set = PatternSet(patterns)
        self._patterns: list[Any] = [compile_bytes(pattern) for pattern in patterns]

    def find(self, text: str) -> Iterator[Found]:
        """What the signs state in `text`, negated mentions aside."""
        found = list(self._all(text))
        hiding = [each for each in found if each.sign.hides]
        return (each for each in found if not any(each.hidden_by(other) for other in hiding))

    def _all(self, text: str) -> Iterator[Found]:
        data = text.encode("utf-8", "replace")
        ascii_only = len(data) == len(text)
        for index in self._set.indices(data):
            sign = self.signs[index]
            for match in islice(self._patterns[index].finditer(data), MATCHES_A_LINE):
                start, end = match.span()
                if not ascii_only:
                    start, end = len(_decoded(data[:start])), len(_decoded(data[:end]))
                if value := _value(sign, match, text, start, end):
                    yield Found(sign, value, start, end)


def _decoded(data: bytes) -> str:
    return data.decode("utf-8", "replace")


def _value(sign: FactSign, match: Any, text: str, start: int, end: int) -> str:
    """What a match states; empty when it is denied."""
    value = sign.value or _decoded(next((group for group in match.groups() if group), b""))
    if not sign.firm and negated(text, start, end):
        value = sign.denied
    return CONVERTERS[sign.convert](value) if sign.convert and value else value


def negated(text: str, start: int, end: int) -> bool:
    """Whether the clause around text[start:end] denies it."""
    before = text[max(0, start - NEAR) : start]
    cut = max(before.rfind(mark) for mark in _CLAUSE_ENDS)
    if _NEGATION.search(before[cut + 1 :]):
        return True
    return _DENIED_AFTER.search(text[end : end + NEAR]) is not None


@cache
def data() -> SignFile:
    """`signs.toml`. Raises BadInputError for a schema that is not known, and for what has another form."""
    found = tomllib.loads(
        resources.files("specmortem.statements").joinpath("signs.toml").read_text(encoding="utf-8")
    )
    if found.get("schema") != SCHEMA:
        raise BadInputError(f"signs.toml: schema {found.get('schema')!r} is not {SCHEMA}")
    return build(SignFile, found, lambda path: f"signs.toml: {'/'.join(map(str, path))}")


@cache
def all_signs() -> Signs:
    """Every sign of `signs.toml`."""
    return Signs(data().signs)


@cache
def log_signs() -> Signs:
    """Those that count beside a whole launch command."""
    return Signs([sign for sign in all_signs().signs if sign.log])


def book_of(text: str, signs: Signs) -> FactBook:
    """What the lines of a text state by these signs."""
    book = FactBook()
    for number, line in enumerate(text.splitlines(), 1):
        for found in signs.find(line):
            match = line[found.start : found.end].strip()
            book.add(Fact(found.sign.fact, found.value, "", number, line, found.sign.rank, match=match))
    return book


def expanded(pattern: str) -> str:
    """The pattern with @flag, @on and @off replaced; a hyphen in a name also stands for an underscore."""
    return _MACRO.sub(lambda m: _MACROS[m[1]].format(m[2].replace("-", "[-_]")), pattern)


def method(text: str) -> str:
    """One word for the drafters that run the same loop; empty for a word that is no drafter."""
    word = text.lower().strip("[]").replace("_", "-")
    if word.endswith("mtp") or word == "nextn":
        return "mtp"
    known = ("dflash", "eagle3", "eagle", "ngram", "medusa", "suffix", "draft-model")
    return next((name for name in known if word.startswith(name)), "")


def backend(text: str) -> str:
    """FLASH_ATTN, FLASHINFER, TRITON_ATTN and their like as one lower-case word."""
    word = text.lower().replace("_", "").replace("-", "")
    known = {
        "flashinfer": "flashinfer",
        "flashattn": "flash-attn",
        "triton": "triton",
        "flashmla": "flashmla",
    }
    return next((name for start, name in known.items() if word.startswith(start)), word[:24])


def graphs(text: str) -> str:
    """The CUDA graph mode as one lower-case word; none is `eager`."""
    return "eager" if text.upper() == "NONE" else text.lower().replace("_", "-")


def arch(text: str) -> str:
    """sm_90 for SM90, sm90 and sm_90."""
    return "sm_" + text.lower().removeprefix("sm").removeprefix("_")


def percent(text: str) -> str:
    """A share as a percentage with one decimal."""
    return f"{float(text) * 100:.1f}"


CONVERTERS: Mapping[str, Callable[[str], str]] = {
    "method": method,
    "backend": backend,
    "graphs": graphs,
    "arch": arch,
    "percent": percent,
}
