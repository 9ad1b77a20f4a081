"""A launch command, the head of a `vllm serve` log, key=value words or a report -> the launches that it states.

What is not known is listed. A text may state several launches: each command, each start that a log shows, each release
that is named. All of them count, so that a second one never hides the first. What only a sentence says may be of
another launch, such as the workaround that helped; it is kept apart (`Config.prose`) and rules nothing out.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import fields as fields_of
from dataclasses import replace
from itertools import islice, takewhile
from pathlib import Path
from typing import Any

from specmortem.errors import BadInputError, UnavailableError
from specmortem.exposure import Config
from specmortem.statements.config import version_of
from specmortem.statements.flags import Notes, literal, runner_of, words
from specmortem.statements.signs import all_signs, book_of, log_signs

MAX_BYTES = 4 << 20
MOST_LAUNCHES = 16
MOST_FLAGS = 60  # on lines of their own below a command
LONGEST_COMMAND = 20_000
COMMAND = re.compile(
    r"\bvllm\s+serve\b|\bvllm\.entrypoints\.\S*api_server\b|\bapi_server\.py\b|\bvllm/vllm-openai(?::\S+)?(?=\s+\S)"
)
# What may stand in front of a command on its line: prompts, variables, wrappers, the keys of service files.
FRONT = re.compile(
    r"(?:[$#>%|*•+`\"'\[-]|\d+[.)]|[A-Za-z_]\w*=\S*|[A-Z][A-Za-z]*=|\S*@\S*[$#:]|--?[\w-]+(?:[= ]\S+)?"
    r"|(?:sudo|exec|nohup|setsid|time|env|export|docker|podman|run|uv|uvx|srun|numactl|command|cmd|CMD|entrypoint"
    r"|ENTRYPOINT|ExecStart|RUN|bash|sh|python3?|torchrun|nsys|profile|args|set|then|do|and|&&|;)\b[:=]?|\S*/|-m|\s)+"
)
FOLLOWS = re.compile(r"\s*--?[A-Za-z]")
FLAG = re.compile(r"(?<!\S)--?[A-Za-z]")
CUT = re.compile(r"\.\.\.|…|<snip>|\bcut\b|\$[{(]?[A-Za-z_@*?]|(?<!\S)--config\b")
VARIABLE = re.compile(r"VLLM_USE_V2_MODEL_RUNNER[\"']?\s*[:=]\s*[\"']?(?:value:\s*[\"']?)?(\w+)")
STATES = re.compile(r"^\W*(?:--?[A-Za-z]|[A-Za-z_][\w /.()-]{0,40}[:=]|\{)")
LOGGED = re.compile(
    r"\b(?:INFO|WARNING|ERROR|DEBUG|CRITICAL) \d\d-\d\d \d\d:|\((?:EngineCore|APIServer|Worker|VllmWorker)"
)
TALK = re.compile(
    r"(?i)\b(?:help|work|fix|mend|stabl|clean|crash|fault|fail|avoid|gone|goes? away|disappear|resolv|instead|without"
    r"|with|try|tried|tests?\b|tested|after|before|when|if\b|never|only|longer|turn|disabl|reproduc|happen|occur|same"
    r"|still|also|but\b|not\b|no\b|none of|cannot|can't|don't|didn't|doesn't|we\b|i\b|ran\b|set\b)\w*"
)


def load(source: str) -> Config:
    """The first launch that says something of those that `load_all` reads."""
    return load_all(source)[0]


def load_all(source: str) -> list[Config]:
    """The launches that say something in a file, or on standard input for `-`; at least one.

    Raises UnavailableError when the file cannot be read, BadInputError when nothing in it is a configuration.
    """
    try:
        data = sys.stdin.buffer.read(MAX_BYTES) if source == "-" else Path(source).read_bytes()[:MAX_BYTES]
    except OSError as error:
        raise UnavailableError(f"cannot read {source}: {error.strerror or error}") from error
    found = [config for config in launches(data.decode("utf-8", "replace")) if says_anything(config)]
    if not found:
        raise BadInputError(
            f"{source}: no flag, log line or key=value word in it says how vLLM runs; give a launch command"
        )
    return found


def says_anything(config: Config) -> bool:
    """Whether anything of a configuration is known."""
    return config != Config(unknown=config.unknown)


def parse(text: str) -> Config:
    """The first launch that a text states."""
    return launches(text)[0]


def launches(text: str) -> list[Config]:
    """Every launch that a text states, at least one; `complete` ones are whole commands, or starts that a log shows."""
    text = re.sub(r"\\\s*\n", " ", text)
    lines = text.splitlines()
    whole = [*_starts(text), *(_command(line, rest) for line, rest in _commands(lines))]
    starts = whole or [_loose(lines)]
    shared = _lines(lines, whole=bool(whole))
    found = [fill(start, more) for start in starts for more in shared]
    found = [made for start in found for made in _runners(start, text)]
    return list(islice(_different(found), MOST_LAUNCHES))


def _different(found: Iterable[Config]) -> Iterator[Config]:
    """Each configuration once, whatever its sources."""
    seen: list[Config] = []
    for config in found:
        bare = replace(config, sources={})
        if bare not in seen:
            seen.append(bare)
            yield config


def fill(first: Config, second: Config) -> Config:
    """What the second one knows that the first does not."""
    empty = Config()
    names = [each.name for each in fields_of(Config) if each.name in second.sources]
    taken = [name for name in names if getattr(first, name) == getattr(empty, name)]
    return replace(
        first,
        **{name: getattr(second, name) for name in taken},
        sources={**first.sources, **{name: second.sources[name] for name in taken}},
        prose=first.prose | (second.prose & frozenset(taken)),
    )


def _commands(lines: Sequence[str]) -> Iterator[tuple[str, str]]:
    """(what stands before it, the command) for each command of `vllm serve`, its server, or its image.

    Where flags follow on lines of their own, as after a backslash that was lost, it may be meant with or without them.
    """
    for number, line in enumerate(lines):
        following = list(takewhile(FOLLOWS.match, lines[number + 1 : number + 1 + MOST_FLAGS]))
        if following and COMMAND.search(line):
            yield from _in_line(" ".join([line.rstrip("\\ "), *following]))
        yield from _in_line(line)


def _in_line(line: str) -> Iterator[tuple[str, str]]:
    for found in islice(COMMAND.finditer(line), MOST_LAUNCHES):
        rest = line[found.start() : found.start() + LONGEST_COMMAND]
        if FLAG.search(rest) or re.match(r"vllm\s+serve\s+[\w./-]*[\w/]", rest):
            yield line[: found.start()], rest


def _command(front: str, command: str) -> Config:
    """A command by its flags, the last of which count. One inside a sentence is not known to be the launch."""
    firm = len(front) < LONGEST_COMMAND and FRONT.fullmatch(f"{front} ") is not None
    closing = command.find("`")
    command = command[:closing] if "`" in front and closing > 0 else command
    notes = Notes(firm=firm)
    notes.words(words(front[-LONGEST_COMMAND:]))
    notes.unknown.clear()
    notes.words(words(command))
    found = notes.config()
    whole = firm and not found.unknown and CUT.search(command) is None
    return replace(found, launched=firm, complete=whole)


def _loose(lines: Sequence[str]) -> Config:
    """Flags and key=value words of lines that state them, and below them those of sentences."""
    stated, told = Notes(), Notes(firm=False)
    for line in lines:
        notes = stated if states(line) else told
        notes.words(words(line[:LONGEST_COMMAND]))
    first, second = stated.config(), told.config()
    return replace(fill(first, second), unknown=(*first.unknown, *second.unknown))


def states(line: str) -> bool:
    """Whether a line states settings, or is a log's, rather than a sentence about them."""
    if LOGGED.search(line[:400]):
        return True
    return STATES.match(line) is not None and TALK.search(line) is None


def _lines(lines: Sequence[str], *, whole: bool) -> list[Config]:
    """What log lines and reports say beside commands, once for each release that they name."""
    signs = log_signs() if whole else all_signs()
    stated, told = Notes(), Notes(firm=False)
    stated.lines("\n".join(line if states(line) else "" for line in lines), signs)
    told.lines("\n".join("" if states(line) else line for line in lines), signs)
    found = fill(stated.config(), told.config())
    if whole:
        found = replace(found, prose=frozenset())
    return [replace(found, version=release) for release in _releases(lines)] or [found]


def _releases(lines: Sequence[str]) -> list[str]:
    """Every release that is stated, or else named; none where the text names one at most."""
    book = book_of("\n".join(lines), all_signs())
    if "vllm-backport" in book.values("fork"):
        return []
    facts = [fact for fact in book.named("version") if version_of(fact.value)]
    firm = [fact for fact in facts if fact.rank] or facts
    found = list(dict.fromkeys(fact.value.removesuffix(".x").rstrip(".") for fact in firm))
    return found[:MOST_LAUNCHES] if len(found) > 1 else []


def _runners(config: Config, text: str) -> list[Config]:
    """The launch with what a variable on a line of its own says of the runner, once for each value given."""
    others = (line for line in text.splitlines() if "RUNNER" in line and not COMMAND.search(line))
    values = {made for line in others for word in VARIABLE.findall(line) if (made := runner_of(word))}
    if not values or config.runner is not None:
        return [config]
    told = {**config.sources, "runner": "VLLM_USE_V2_MODEL_RUNNER"}
    return [replace(config, runner=value, sources=told) for value in sorted(values)]


def _starts(text: str) -> Iterator[Config]:
    """One configuration for each start of an engine that a log shows."""
    current: list[Mapping[str, Any]] = []
    shown = re.compile(r"(?P<args>non-default args: )(\{.*\})|\bwith config: (model=.*)")
    for found in islice(shown.finditer(text), MOST_LAUNCHES):
        if found["args"] or len(current) > 1 or not current:
            yield from _start(current)
            current = []
        mapping = literal(found[2]) if found["args"] else dict(_engine_pairs(found[3]))
        current += [mapping] if isinstance(mapping, dict) else []
    yield from _start(current)


def _start(mappings: Sequence[Mapping[str, Any]]) -> Iterator[Config]:
    """Arguments that are not defaults, then the configuration that the engine made of them."""
    notes = Notes()
    for mapping in mappings:
        notes.mapping(
            {("model" if key == "model_tag" else key): value for key, value in mapping.items()}, "log"
        )
    if mappings:
        yield replace(notes.config(), launched=True, complete=True)


def _engine_pairs(line: str) -> Iterator[tuple[str, Any]]:
    """`speculative_config=SpeculativeConfig(method='mtp', ..., num_spec_tokens=4), tensor_parallel_size=1, ...`."""
    if "speculative_config=None" in line:
        yield "speculative_config", None
    if found := re.search(r"SpeculativeConfig\(method='(\w+)'.*?num_spec_tokens=(\d+)", line):
        yield from (("method", found[1]), ("num_spec_tokens", found[2]))
    if found := re.search(r"'cudagraph_mode': <\w+\.(\w+)", line):
        yield "cudagraph_mode", found[1]
    yield from re.findall(
        r"\b(model|tensor_parallel_size|pipeline_parallel_size|enforce_eager|kv_cache_dtype"
        r"|enable_prefix_caching)='?([^',\s]+)",
        line,
    )
