"""A launch command, the head of a `vllm serve` log, or key=value words -> `Config`. What is not known is listed."""

from __future__ import annotations

import ast
import json
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from specmortem.errors import BadInputError, UnavailableError
from specmortem.exposure import NO_SPECULATION, Config, is_hybrid
from specmortem.statements.config import config
from specmortem.statements.derived import with_names
from specmortem.statements.gpus import gpu_of
from specmortem.statements.signs import all_signs, book_of, log_signs

MAX_BYTES = 4 << 20
COMMAND = re.compile(r"\bvllm\s+serve\b|\bapi_server\b|\bvllm\.entrypoints\b")
FLAG = re.compile(r"(?<!\S)--?[a-z]")
SHORT = frozenset({"tp", "pp", "sc", "cc", "ac"})
# Flags that decide something, by the field that they set. Short forms are vLLM's own; the last ones are of reports.
FLAGS: Mapping[str, tuple[str, ...]] = {
    "pipeline": ("pipeline-parallel-size", "pp"),
    "tensor": ("tensor-parallel-size", "tp"),
    "max_num_seqs": ("max-num-seqs", "max-seqs"),
    "block_size": ("block-size",),
    "drafts": ("num-speculative-tokens", "num-spec-tokens", "draft-tokens", "k"),
    "model": ("model",),
    "cache_mode": ("mamba-cache-mode", "cache-mode"),
    "kv_cache_dtype": ("kv-cache-dtype",),
    "draft_kv_cache_dtype": ("draft-kv-cache-dtype",),
    "attention": ("attention-backend",),
    "draft_attention": ("draft-attention-backend",),
    "cudagraphs": ("cudagraph-mode",),
    "speculation": ("method", "spec"),
    "runner": ("runner",),
    "version": ("version", "vllm"),
    "gpu": ("gpu", "arch"),
    "eager": ("enforce-eager", "eager"),
    "prefix_caching": ("enable-prefix-caching", "prefix-caching", "prefix-cache"),
    "async_scheduling": ("async-scheduling", "async"),
    "hybrid": ("hybrid",),
}
FIELD: Mapping[str, str] = {flag: field for field, flags in FLAGS.items() for flag in flags}
SWITCH_FIELDS = ("eager", "prefix_caching", "async_scheduling", "hybrid")
SWITCHES = frozenset(flag for field in SWITCH_FIELDS for flag in FLAGS[field])
NEUTRAL = frozenset(
    {
        "api-key", "served-model-name", "port", "host", "dtype", "trust-remote-code", "max-model-len",
        "gpu-memory-utilization", "max-num-batched-tokens", "enable-chunked-prefill", "language-model-only",
        "seed", "quantization", "tokenizer", "download-dir", "reasoning-parser", "tool-call-parser",
        "enable-auto-tool-choice", "disable-log-stats", "disable-log-requests", "load-format",
        "limit-mm-per-prompt", "chat-template", "uvicorn-log-level", "generation-config", "tokenizer-mode",
        "revision", "hf-overrides", "kv-cache-memory-bytes", "swap-space", "cpu-offload-gb",
        "enable-log-requests", "model-tag", "mode", "max-seq-len", "cuda-visible-devices", "cuda-device-order",
        "cuda-launch-blocking", "hf-home", "hf-token", "pytorch-cuda-alloc-conf", "pytorch-alloc-conf",
        "cudagraph-capture-sizes",
    }
)  # fmt: skip
V2_VARIABLE = "vllm-use-v2-model-runner"
RUNNERS: Mapping[bool | None, str] = {True: "v2", False: "v1", None: ""}
TRUE, FALSE = {"1", "true", "yes", "on", ""}, {"0", "false", "no", "off"}
JSON_FLAGS = ("speculative-config", "compilation-config", "attention-config", "sc", "cc", "ac")
# Inside speculative_config these mean what they mean outside; any other key is the drafter's.
SPECULATION = ("speculative-config", "sc")
SHARED = frozenset(
    {"method", "spec", "model", "num-speculative-tokens", "num-spec-tokens", "draft-tokens", "k"}
)


def load(source: str) -> Config:
    """The configuration in a file, or on standard input for `-`.

    Raises UnavailableError when the file cannot be read, BadInputError when nothing in it is a configuration.
    """
    try:
        data = sys.stdin.buffer.read(MAX_BYTES) if source == "-" else Path(source).read_bytes()[:MAX_BYTES]
    except OSError as error:
        raise UnavailableError(f"cannot read {source}: {error.strerror or error}") from error
    found = parse(data.decode("utf-8", "replace"))
    if found == Config(unknown=found.unknown):
        raise BadInputError(
            f"{source}: no flag, log line or key=value word in it says how vLLM runs; give a launch command"
        )
    return found


def parse(text: str) -> Config:
    """What a text says of a configuration; the first statement of a field counts.

    A whole launch command, or a log that prints the arguments, makes the configuration `complete`.
    """
    notes = _Notes()
    text = re.sub(r"\\\s*\n", " ", text)
    commands = [line for line in text.splitlines() if COMMAND.search(line) and FLAG.search(line)]
    logged = list(_logged(text))
    for found in logged:
        notes.mapping(found, "log")
    for shown, value in _words("\n".join(commands) or ("" if logged else text)):
        notes.flag(shown.lstrip("-"), value, shown)
    whole = bool(commands or logged)
    notes.sentences(text, whole=whole)
    cut = re.search(r"\.\.\.|\bcut\b", "\n".join(commands))
    fields, unknown = notes.fields, tuple(notes.unknown)
    return Config(**fields, sources=notes.sources, unknown=unknown, complete=whole and not cut)


class _Notes:
    """Fields as they are found, and the flags that are not read."""

    def __init__(self) -> None:
        self.fields: dict[str, Any] = {}
        self.sources: dict[str, str] = {}
        self.unknown: dict[str, None] = {}

    def put(self, name: str, value: Any, source: str) -> None:
        if value is not None and name not in self.fields:
            self.fields[name], self.sources[name] = value, source

    def flag(self, name: str, value: str, shown: str) -> None:
        """One flag by its name without dashes."""
        key = name.replace("_", "-").lower()
        head, _, rest = key.partition(".")
        if head in JSON_FLAGS:
            self.nested(head, rest, value, shown)
        elif not self.known(key, value, shown) and not _neutral(key):
            self.unknown[shown] = None

    def nested(self, head: str, rest: str, value: str, shown: str) -> None:
        """A flag whose value is JSON, or one key of it behind a dot."""
        if rest:
            self.flag(_inside(head, rest), value, shown)
            return
        loaded = _literal(value)
        if isinstance(loaded, dict):
            self.mapping(loaded, shown, head)
        elif head in SPECULATION and loaded is None and value.strip() in ("None", "null"):
            self.put("speculation", NO_SPECULATION, shown)
        else:
            self.loose(value, shown, head)

    def loose(self, value: str, shown: str, head: str) -> None:
        """JSON that was cut or redacted: its readable pairs."""
        pairs = re.findall(r"[\"']?(\w+)[\"']?\s*[:=]\s*[\"']?([\w./+-]+)", value)
        if not pairs:
            self.unknown[f"{shown} {value}"[:80]] = None
        for key, text in pairs:
            name = _inside(head, key.replace("_", "-").lower())
            self.flag("draft-" + key if key == "model" else name, text, f"{shown}: {key}")

    def mapping(self, found: Mapping[str, Any], shown: str, head: str = "") -> None:
        """Keys of a JSON value; a model in it is the drafter's."""
        for key, value in found.items():
            name = _inside(head, str(key).replace("_", "-").lower())
            if name == "model" and shown != "log":
                continue
            if isinstance(value, dict):
                self.mapping(value, name, name)
            elif name == "speculative-config" and value is None:
                self.put("speculation", NO_SPECULATION, shown)
            else:
                self.known(name, str(value), shown if shown == "log" else f"{shown}: {key}")

    def known(self, key: str, value: str, source: str) -> bool:
        """Put down a field that decides something; False for any other key."""
        if key == V2_VARIABLE:
            key, value = "runner", RUNNERS[_switch(value)]
        flag = key.removeprefix("no-") if key.removeprefix("no-") in SWITCHES else key
        if flag not in FIELD:
            return False
        found = READERS.get(FIELD[flag], str)(value.strip().strip("\"'"))
        self.put(FIELD[flag], found if flag == key or found is None else not found, source)
        return True

    def sentences(self, text: str, *, whole: bool) -> None:
        """Lines of a log, and, where no whole command says it, what a report states in words."""
        book = with_names(book_of(text, log_signs() if whole else all_signs()))
        found = config(book, cite=lambda fact: f"“{fact.match}”")
        for name, source in found.sources.items():
            self.put(name, getattr(found, name), source)
        mode = self.fields.get("cache_mode")
        if mode in ("align", "all") and is_hybrid(self.fields.get("model", "")) is None:
            self.put("hybrid", True, f"mamba_cache_mode {mode}")


def _switch(value: str) -> bool | None:
    word = value.strip().lower()
    return True if word in TRUE else False if word in FALSE else None


def _count(value: str) -> int | None:
    """A plain number of up to nine digits."""
    return int(value) if re.fullmatch(r"[0-9]{1,9}", value) else None


def _backend(text: str) -> str | None:
    """A backend's name; `auto`, and a JSON null, name none."""
    name = text.upper().rpartition(".")[2]
    return None if name in ("AUTO", "NONE", "NULL", "") else name


# How the value of a field is read; None for a value that the field cannot hold.
READERS: Mapping[str, Callable[[str], Any]] = {
    **dict.fromkeys(("pipeline", "tensor", "max_num_seqs", "block_size", "drafts"), _count),
    **dict.fromkeys(SWITCH_FIELDS, _switch),
    "cache_mode": lambda value: value if value in ("none", "align", "all") else None,
    "runner": lambda value: {"v1": "v1", "v2": "v2"}.get(value.lower()),
    "attention": _backend,
    "draft_attention": _backend,
    "cudagraphs": lambda value: value.upper().rpartition(".")[2].partition(":")[0],
    "speculation": str.lower,
    "gpu": gpu_of,
    "version": lambda value: value.lstrip("v"),
}


def _neutral(key: str) -> bool:
    """Whether a flag decides nothing here, as what the drafter has of its own does not."""
    own = key.removeprefix("draft-")
    return own in NEUTRAL or (own != key and own in FIELD)


def _inside(head: str, key: str) -> str:
    """A key inside a JSON flag, under the name that it has outside."""
    if head in SPECULATION and key not in SHARED and not key.startswith("draft-"):
        return f"draft-{key}"
    return "attention-backend" if (head, key) in (("attention-config", "backend"), ("ac", "backend")) else key


def _literal(text: str) -> Any:
    """A JSON or Python literal; None where it is neither."""
    for read in (json.loads, ast.literal_eval):
        try:
            return read(text)
        except (ValueError, SyntaxError, MemoryError, RecursionError):
            continue
    return None


def _logged(text: str) -> Iterator[dict[str, Any]]:
    """The mappings that a log prints: arguments that are not defaults, and the engine's configuration."""
    for found in re.finditer(r"non-default args: (\{.*\})", text):
        if isinstance(loaded := _literal(found[1]), dict):
            yield {("model" if k == "model_tag" else k): v for k, v in loaded.items()}
    for found in re.finditer(r"with config: (model=.*)", text):
        yield dict(_engine_pairs(found[1]))


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


TOKEN = re.compile(
    r"(?<![\w/.-])(?P<name>--[A-Za-z][\w.-]*|-[a-z]{1,2}\b[\w.]*|[A-Za-z_][\w-]*(?==))(?:=|(?<=\w)[ \t]+(?![-\\]))?"
    r"(?P<value>'[^'\n]*'|\"[^\"\n]*\"|\{[^}\n]*\}|[^\s'\",;()]*)"
)


def _words(text: str) -> Iterator[tuple[str, str]]:
    """(flag or key as written, value) of every flag and key=value word; a flag without a value has an empty one."""
    if found := re.search(r"\bvllm\s+serve[ =]+(?!-)([^\s<]\S*)", text):
        yield "--model", found[1]
    for found in TOKEN.finditer(text):
        name, value = found["name"], found["value"].strip("'\"")
        bare = name.lstrip("-")
        if len(name) - len(bare) == 1 and bare.partition(".")[0] not in SHORT:
            continue
        is_switch = bare.removeprefix("no-").replace("_", "-").lower() in SWITCHES
        yield name, "" if is_switch and _switch(value) is None else value
