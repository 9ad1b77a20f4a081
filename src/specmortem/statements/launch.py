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
from specmortem.exposure import Config, Runner
from specmortem.statements.config import version_of
from specmortem.statements.flags import RUNNER, VARIABLES, Notes, literal, runner_of, words
from specmortem.statements.shell import (
    COMMAND,
    ELSEWHERE,
    LONGEST_COMMAND,
    ShellCommand,
    commands_in,
    without_end,
)
from specmortem.statements.signs import all_signs, book_of, log_signs

MAX_BYTES = 4 << 20
MOST_LAUNCHES = 65  # one more than are judged: what states more is refused, and none of it dropped
MOST_STARTS = 5000  # of engines in a log that restarts
LONGEST_HEADING = 80
MOST_FLAGS = 60  # on lines of their own below a command
FOLLOWS = re.compile(r"\s*--?[A-Za-z]")
CUT = re.compile(r"\.\.\.|…|<snip>|\bcut\b|\$[{(]?[A-Za-z_@*?]|(?<!\S)--config\b")
VARIABLE = re.compile(rf"{RUNNER}[\"']?\s*[:=]\s*[\"']?(?:value:\s*[\"']?)?([\w$]+)|^\s*ENV {RUNNER} (\w+)")
DRAFTER = re.compile(r"SpeculativeConfig\([^)]*\)")
ENV_LINE = re.compile(rf"^\s*ENV {RUNNER} \w")
STATES = re.compile(r"^\W*(?:--?[A-Za-z]|[A-Za-z_][\w /.()-]{0,40}[:=]|\{)")
LOGGED = re.compile(
    r"\b(?:INFO|WARNING|ERROR|DEBUG|CRITICAL) \d\d-\d\d \d\d:|\((?:EngineCore|APIServer|Worker|VllmWorker)"
)
TALK = re.compile(
    r"(?i)\b(?:help|work|fix|mend|stabl|clean|crash|fault|fail|avoid|gone|goes? away|disappear|resolv|instead|without"
    r"|with|try|tried|tests?\b|tested|after|before|when|if\b|never|only|longer|turn|disabl|reproduc|happen|occur|same"
    r"|still|also|fine|good|ok\b|okay|well\b|happy|stopp|but\b|not\b|no\b|none of|cannot|can't|don't|didn't|doesn't"
    r"|we\b|i\b|ran\b|set\b)\w*"
)
# Words of a sentence that a heading does not have.
SENTENCE = re.compile(
    r"(?i)\b(?:the|an?|it|its|of|is|are|was|were|this|that|my|our|all|any|nothing|shows?|seems?)\b"
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
    whole = [*_starts(text), *map(_command, _commands(lines))]
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


def _commands(lines: Sequence[str]) -> Iterator[ShellCommand]:
    """Each command of `vllm serve`, its server, or its image.

    Where flags follow on lines of their own, as after a backslash that was lost, it may be meant with or without them.
    """
    for number, line in enumerate(lines):
        following = list(takewhile(FOLLOWS.match, lines[number + 1 : number + 1 + MOST_FLAGS]))
        if following and COMMAND.search(line):
            yield from commands_in(" ".join([line.rstrip("\\ "), *following]))
            below = " ".join(rest for each in following for rest in without_end(each))
            yield from (made for head in without_end(line) for made in commands_in(f"{head} {below}"))
        yield from commands_in(line)


def _command(command: ShellCommand) -> Config:
    """A command by its flags, the last of which count. One inside a sentence is not known to be the launch."""
    notes = Notes(firm=command.firm)
    notes.words(words(command.variables))
    of_variables = {RUNNER} if command.runner_elsewhere else VARIABLES & notes.unknown.keys()
    notes.unknown = dict.fromkeys(sorted(of_variables))
    notes.words(words(command.text))
    found = notes.config()
    whole = command.firm and command.whole and not found.unknown and CUT.search(command.text) is None
    return replace(found, launched=True, complete=whole)


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


def is_heading(line: str) -> bool:
    """Whether a line names things, as `vLLM 0.28.0, H100` above a command, and says nothing of them."""
    bare = len(line) <= LONGEST_HEADING and not line.rstrip().endswith(".")
    return bare and TALK.search(line) is None and SENTENCE.search(line) is None


def _apart(line: str, *, whole: bool) -> tuple[str, str]:
    """What of a line states settings, and what may be a sentence, as one before or behind a command."""
    if COMMAND.search(line):
        return " ".join(command.text for command in commands_in(line) if command.firm), line
    return (line, "") if states(line) or (whole and is_heading(line)) else ("", line)


def _lines(lines: Sequence[str], *, whole: bool) -> list[Config]:
    """What log lines and reports say beside commands, once for each release that they name."""
    signs = log_signs() if whole else all_signs()
    stated, told = Notes(), Notes(firm=False)
    parts = [_apart(line, whole=whole) for line in lines]
    stated.lines("\n".join(part for part, _ in parts), signs)
    told.lines("\n".join(part for _, part in parts), signs)
    found = fill(stated.config(), told.config())
    if whole:  # of another release a launch is made
        found = replace(found, prose=found.prose - {"version"})
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
    """The launch with what variables on lines of their own say of the runner.

    Each value that is given counts. What only a sentence says may be of another launch, and a file of variables, or a
    value that cannot be read, leaves it open.
    """
    if config.runner is not None:
        return [config]
    others = [line for line in text.splitlines() if not COMMAND.search(line)]
    elsewhere = any(ELSEWHERE.search(line) for line in others)
    given = [
        (runner_of(first or second), states(line) or ENV_LINE.match(line) is not None)
        for line in others
        if RUNNER in line
        for first, second in VARIABLE.findall(line)
    ]
    firm = {runner for runner, stated in given if stated}
    open_ = None in firm or (elsewhere and not firm)
    unread = tuple(dict.fromkeys((*config.unknown, RUNNER)))
    start = replace(config, complete=False, unknown=unread) if open_ else config
    made = [_with_runner(start, runner, stated) for runner, stated in given if runner]
    return [*([] if firm - {None} else [start]), *made]


def _with_runner(config: Config, runner: Runner, stated: bool) -> Config:
    sources = {**config.sources, "runner": RUNNER}
    prose = config.prose if stated else config.prose | {"runner"}
    return replace(config, runner=runner, sources=sources, prose=prose)


def _starts(text: str) -> Iterator[Config]:
    """One configuration for each start of an engine that a log shows."""
    current: list[tuple[bool, Mapping[str, Any]]] = []
    shown = re.compile(r"(?P<args>non-default args: )(\{.*\})|\bwith config: (model=.*)")
    for found in islice(shown.finditer(text), MOST_STARTS):
        if found["args"] or len(current) > 1 or not current:
            yield from _start(current)
            current = []
        mapping = literal(found[2]) if found["args"] else dict(_engine_pairs(found[3]))
        current += [(bool(found["args"]), mapping)] if isinstance(mapping, dict) else []
    yield from _start(current)


def _start(mappings: Sequence[tuple[bool, Mapping[str, Any]]]) -> Iterator[Config]:
    """Arguments that are not defaults, then the configuration that the engine made of them.

    Only with the arguments all is known: the engine's own line leaves out scheduling, cache mode and block size.
    """
    notes = Notes()
    for _, mapping in mappings:
        notes.mapping(
            {("model" if key == "model_tag" else key): value for key, value in mapping.items()}, "log"
        )
    if mappings:
        whole = not notes.unknown and any(arguments for arguments, _ in mappings)
        yield replace(notes.config(), launched=True, complete=whole)


def _engine_pairs(line: str) -> Iterator[tuple[str, Any]]:
    """`speculative_config=SpeculativeConfig(method='mtp', ..., num_spec_tokens=4), tensor_parallel_size=1, ...`."""
    if "speculative_config=None" in line:
        yield "speculative_config", None
    if found := re.search(r"SpeculativeConfig\(method='(\w+)'.*?num_spec_tokens=(\d+)", line):
        yield from (("method", found[1]), ("num_spec_tokens", found[2]))
    if found := re.search(r"'cudagraph_mode': <\w+\.(\w+)", line):
        yield "cudagraph_mode", found[1]
    own = DRAFTER.sub("", line)  # a model in it is the drafter's
    yield from re.findall(
        r"\b(model|tensor_parallel_size|pipeline_parallel_size|enforce_eager|kv_cache_dtype"
        r"|enable_prefix_caching)='?([^',\s]+)",
        own,
    )
