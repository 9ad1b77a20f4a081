"""Lines of shells, service files and reports -> the commands in them that start vLLM.

Each is what one process gets: it ends where a shell ends it, so that neither a comment nor the next command is taken
for flags of this one, and it is whole only if no word in it stands where `vllm serve` takes none.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice

from specmortem.statements.engine_re import compile_text
from specmortem.statements.flags import RUNNER, TOKEN

LONGEST_COMMAND = 20_000
MOST_IN_A_LINE = 65
IMAGE = r"\bvllm/vllm-openai(?:[:@]\S+)?(?=\s+\S)"
COMMAND = re.compile(rf"\bvllm\s+serve\b|\bvllm\.entrypoints\.\S*api_server\b|\bapi_server\.py\b|{IMAGE}")
# What may stand in front of a command on its line: prompts, variables, wrappers, the keys of service files.
FRONT = compile_text(
    r"(?:[$#>%|*•+`\"'\[-]|\d+[.)]|[A-Za-z_]\w*=\S*|[A-Z][A-Za-z]*=|\S*@\S*[$#:]|--?[\w-]+(?:[= ]\S+)?"
    r"|(?:source|\.)\s+\S*activate\b|conda\s+activate\s+\S+|cd\s+\S+"
    r"|(?:sudo|exec|nohup|setsid|time|env|export|docker|podman|run|uv|uvx|srun|numactl|command|cmd|CMD|entrypoint"
    r"|ENTRYPOINT|ExecStart|RUN|bash|sh|python3?|torchrun|nsys|profile|args|set|then|do|and|&&|;)\b[:=]?"
    r"|&|;|\S*/|-m|\s)+"
)
FLAG = re.compile(r"(?<!\S)--?[A-Za-z]")
POSITIONAL = re.compile(r"vllm\s+serve\s+[\w./-]*[\w/]|vllm/vllm-openai(?:[:@]\S+)?[ \t]+[\w.-]+/[\w./-]*\w")
END = re.compile(
    r"'[^']*'|\"(?:\\.|[^\"\\])*\"|\\.|(?P<end>&&|\|\||[;|]|[ \t]&(?=\s|$)|(?:^|(?<=\s))#)|.", re.DOTALL
)
REDIRECT = re.compile(r"(?<!\S)\d?>{1,2}&?[ \t]*\S+")
STRAY = re.compile(r"(?<=\s)[(\[\"'“*—–:]*(?P<word>[A-Za-z][A-Za-z'’]+)[.,:;!?)\"'”*]*(?=\s|$)")
EXPORT = re.compile(r"\bexport\s+(\w+=(?:\"[^\"]*\"|'[^']*'|[^\s;&]*))")
ENVIRONMENT = re.compile(r"(?<!\S)(?:-e|--env)(?:[= ]|(?=[A-Z]))[\"']?")
ELSEWHERE = re.compile(
    r"(?<!\S)--env-file\b|^\s*(?:EnvironmentFile\s*=|env_file\s*:|(?:-\s*)?envFrom\s*:)", re.M
)
PASSED_ON = re.compile(rf"{RUNNER}(?![\w=:\"'])")


@dataclass(frozen=True)
class ShellCommand:
    """One start of vLLM: `front` is what stands before it, `text` the command without what follows its end.

    `firm` says that it is a command rather than a word in a sentence, `whole` that nothing in it is out of place.
    """

    front: str
    text: str
    firm: bool
    whole: bool

    @property
    def variables(self) -> str:
        """What is in front, with the variables of a container as words of their own."""
        return ENVIRONMENT.sub(" ", self.front)

    @property
    def runner_elsewhere(self) -> bool:
        """Whether a file or the caller's environment may say which runner it is."""
        if re.search(rf"{RUNNER}=", self.front):
            return False
        return PASSED_ON.search(self.front) is not None or ELSEWHERE.search(self.front) is not None


def commands_in(line: str) -> Iterator[ShellCommand]:
    """Every command of `vllm serve`, its server, or its image, that has a flag or a model."""
    before = 0
    for found in islice(COMMAND.finditer(line), MOST_IN_A_LINE):
        start = found.start()
        rest = line[start : start + LONGEST_COMMAND]
        if start >= before and (FLAG.search(rest) or POSITIONAL.match(rest)):
            front, exported = line[before:start], " ".join(EXPORT.findall(line[:before]))
            quote = _open_quote(front[-LONGEST_COMMAND:])
            length = _length(rest, quote)
            yield _command(f"{exported} {front}", rest[:length], escaped=quote == '"')
            before = start + length


def without_end(line: str) -> Iterator[str]:
    """A line up to where each of its commands ends, without what ends it, as a comment behind a backslash."""
    starts = [found.start() for found in islice(COMMAND.finditer(line), MOST_IN_A_LINE)] or [0]
    for start in starts:
        yield line[: start + _end(line[start : start + LONGEST_COMMAND])].rstrip("\\ &")


def _command(front: str, text: str, *, escaped: bool) -> ShellCommand:
    firm = len(front) < LONGEST_COMMAND and FRONT.fullmatch(f"{front} ") is not None
    text = re.sub(r'\\(["\\$`])', r"\1", text) if escaped else text
    stray = _stray(text)
    return ShellCommand(front[-LONGEST_COMMAND:], text[:stray], firm, stray is None)


def _length(rest: str, quote: str) -> int:
    """How far the command goes: to the mark that closes what is around it, or to where a shell ends it."""
    closing = _closing(rest, quote) if quote else len(rest)
    return _end(rest[:closing])


def _open_quote(front: str) -> str:
    """The quotation mark or backtick that what is in front leaves open."""
    open_mark = ""
    for character in re.sub(r"\\.", "", front):
        if character in "'\"`":
            open_mark = "" if character == open_mark else open_mark or character
    return open_mark


def _closing(text: str, mark: str) -> int:
    found = re.search(rf"(?<!\\){mark}", text)
    return found.start() if found else len(text)


def _end(text: str) -> int:
    """Where a shell ends the command."""
    return next((found.start() for found in END.finditer(text) if found["end"]), len(text))


def _stray(text: str) -> int | None:
    """Where the first word stands that is neither a flag nor the value of one: prose that follows a command."""
    head = COMMAND.match(text)
    start = head.end() if head else 0
    if model := POSITIONAL.match(text):
        start = max(start, model.end())
    blank = REDIRECT.sub(_blanked, text)
    blank = TOKEN.sub(_blanked, blank[start:])
    found = STRAY.search(f" {blank}")
    return start + found.start() - 1 if found else None


def _blanked(found: re.Match[str]) -> str:
    return "\0" * len(found[0])
