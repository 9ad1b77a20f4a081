"""A launch command, the head of a `vllm serve` log, or key=value words -> `Config`. What is not known is listed."""

from __future__ import annotations

import ast
import json
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from specmortem.errors import BadInputError, UnavailableError
from specmortem.exposure import NO_SPECULATION, Config, is_hybrid

MAX_BYTES = 4 << 20
COMMAND = re.compile(r"\bvllm\s+serve\b|\bapi_server\b|\bvllm\.entrypoints\b")
FLAG = re.compile(r"(?<!\S)--?[a-z]")
SHORT = frozenset({"tp", "pp", "sc", "cc", "ac"})
GPUS: Mapping[str, int] = {
    r"\bRTX\s*PRO\s*\d{4}|\bRTX\s*50[5-9]0|\b5090\b": 120,
    r"\bGB10\b|\bDGX\s*Spark": 121,
    r"\bG?B300\b": 103,
    r"\bB100\b|\bG?B200\b": 100,
    r"\bG?H[12]00\b|\bH800\b|\bH20\b": 90,
    r"\bRTX\s*40[5-9]0|\bL40S?\b|\bL4\b|\bRTX\s*\d{4}\s*Ada": 89,
    r"\bRTX\s*30[5-9]0|\b3090\b|\bA40\b|\bA10G?\b|\b(?:RTX\s*)?A[456]000\b": 86,
    r"\bA[18]00\b|\bA30\b|\bGA100\b|\bCMP\s*170HX": 80,
}


def gpu_of(text: str) -> int | None:
    """Compute capability times ten of a GPU: `sm_90`, `9.0`, a name or, for a GeForce, its number; None if unknown."""
    digits = re.sub(r"^sm_?", "", text.lower()).replace(".", "")
    if re.fullmatch(r"[0-9]{2,3}", digits):
        return int(digits)
    found = _named_gpu(text, re.IGNORECASE) or _named_gpu(f"RTX {text}", re.IGNORECASE)
    return found[0] if found else None


def _named_gpu(text: str, flags: re.RegexFlag = re.NOFLAG) -> tuple[int, str] | None:
    """What a name in the text stands for, and the name."""
    matches = ((gpu, re.search(pattern, text, flags)) for pattern, gpu in GPUS.items())
    return next(((gpu, match[0]) for gpu, match in matches if match), None)


# Flags that decide something: the field, and how a value is read. Short forms are vLLM's own.
NUMBERS: Mapping[str, str] = {
    "pipeline-parallel-size": "pipeline",
    "pp": "pipeline",
    "tensor-parallel-size": "tensor",
    "tp": "tensor",
    "max-num-seqs": "max_num_seqs",
    "max-seqs": "max_num_seqs",
    "block-size": "block_size",
    "num-speculative-tokens": "drafts",
    "num-spec-tokens": "drafts",
    "draft-tokens": "drafts",
    "k": "drafts",
}
WORDS: Mapping[str, str] = {
    "model": "model",
    "mamba-cache-mode": "cache_mode",
    "cache-mode": "cache_mode",
    "kv-cache-dtype": "kv_cache_dtype",
    "draft-kv-cache-dtype": "draft_kv_cache_dtype",
    "attention-backend": "attention",
    "draft-attention-backend": "draft_attention",
    "cudagraph-mode": "cudagraphs",
    "method": "speculation",
    "spec": "speculation",
    "runner": "runner",
    "version": "version",
    "vllm": "version",
    "gpu": "gpu",
    "arch": "gpu",
}
SWITCHES: Mapping[str, str] = {
    "enforce-eager": "eager",
    "eager": "eager",
    "enable-prefix-caching": "prefix_caching",
    "prefix-caching": "prefix_caching",
    "prefix-cache": "prefix_caching",
    "async-scheduling": "async_scheduling",
    "async": "async_scheduling",
    "hybrid": "hybrid",
}
NEUTRAL = frozenset(
    {
        "api-key",
        "served-model-name",
        "port",
        "host",
        "dtype",
        "trust-remote-code",
        "max-model-len",
        "gpu-memory-utilization",
        "max-num-batched-tokens",
        "enable-chunked-prefill",
        "language-model-only",
        "seed",
        "quantization",
        "tokenizer",
        "download-dir",
        "reasoning-parser",
        "tool-call-parser",
        "enable-auto-tool-choice",
        "disable-log-stats",
        "disable-log-requests",
        "load-format",
        "limit-mm-per-prompt",
        "chat-template",
        "uvicorn-log-level",
        "generation-config",
        "tokenizer-mode",
        "revision",
        "hf-overrides",
        "kv-cache-memory-bytes",
        "swap-space",
        "cpu-offload-gb",
        "enable-log-requests",
        "model-tag",
        "mode",
        "max-seq-len",
        "cuda-visible-devices",
        "cuda-device-order",
        "cuda-launch-blocking",
        "hf-home",
        "hf-token",
        "pytorch-cuda-alloc-conf",
        "pytorch-alloc-conf",
        "cudagraph-capture-sizes",
    }
)
TRUE, FALSE = {"1", "true", "yes", "on", ""}, {"0", "false", "no", "off"}
RUNNERS: Mapping[bool | None, str | None] = {True: "v2", False: "v1", None: None}
JSON_FLAGS = ("speculative-config", "compilation-config", "attention-config", "sc", "cc", "ac")
# Inside speculative_config these mean what they mean outside; any other key is the drafter's.
SPECULATION = ("speculative-config", "sc")
SHARED = frozenset(
    {"method", "spec", "model", "num-speculative-tokens", "num-spec-tokens", "draft-tokens", "k"}
)
# What vLLM prints where no backend is named; its last such line is the drafter's, which is loaded after the target.
CHOSEN = r"Using (\w+) attention backend out of"
# Lines of a log: (pattern, field, value), or the field that the first group gives.
LOG_LINES: tuple[tuple[str, str, Any], ...] = (
    (r"Using V2 Model Runner", "runner", "v2"),
    (r"Asynchronous scheduling is enabled", "async_scheduling", True),
    (r"Asynchronous scheduling is disabled", "async_scheduling", False),
    (r"Mamba cache mode is set to '(none|align|all)'", "cache_mode", None),
    (r"Initializing a V1 LLM engine \(v([^)\s]+)\)", "version", None),
    (r"\bvLLM(?: API server version)?[: ]+v?(\d+\.\d+\.\d+[\w.+]*)", "version", None),
    (r"Resolved architecture: (\w+)", "model", None),
    (r"Using AttentionBackendEnum\.(\w+) backend", "attention", None),
    (CHOSEN, "attention", None),
    (r"\b(?:sm_?|SM)(\d{2,3})\b", "gpu", None),
)
# What a report states in words, beside or instead of flags.
STATEMENTS: tuple[tuple[str, str, Any], ...] = (
    (r"\bV2 (?:GPU )?(?:model )?runner\b", "runner", "v2"),
    (r"\bV1 (?:GPU )?(?:model )?runner\b|\bvLLM [\w.]+, V1$", "runner", "v1"),
    (r"(?<!no )(?<!without )\bprefix caching\b(?! (?:is )?(?:off|disabled))", "prefix_caching", True),
    (
        r"\bprefix caching (?:is )?(?:off|disabled)\b|\b(?:no|without) prefix caching\b",
        "prefix_caching",
        False,
    ),
    (r"\basync(?:hronous scheduling)? on\b|\bwith async scheduling\b", "async_scheduling", True),
    (r"\basync(?:hronous scheduling)? off\b", "async_scheduling", False),
    (r"\bmamba[-_ ]cache[-_ ]mode[= ](align|all|none)\b|\((?:mamba )?(align)\)", "cache_mode", None),
    (r"cudagraph_mode[\"']?\s*[:= ]\s*[\"']?([A-Z_]+)", "cudagraphs", None),
    (r"\bmethod[\"']?\s*[:= ]\s*[\"']?(\w*mtp|dflash\d?|eagle3?)\b", "speculation", None),
    (r"\bMTP\b", "speculation", "mtp"),
    (r"\bDFlash", "speculation", "dflash"),
    (r"\bEAGLE", "speculation", "eagle"),
    (r"num_spec(?:ulative)?_tokens[\"']?\s*[:= ]\s*(\d+)", "drafts", None),
    (r"\bMTP (?:n ?= ?)?(\d+)\b|\b(\d+) (?:speculative|draft) tokens", "drafts", None),
    (r"\bFlash[Ii]nfer attention\b|\battention back ?end flashinfer\b", "attention", "FLASHINFER"),
    (r"\bTP ?= ?(\d+)", "tensor", None),
    (r"\bPP ?= ?(\d+)", "pipeline", None),
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
    notes.words(_words("\n".join(commands) or ("" if logged else text)))
    notes.sentences(text, whole=bool(commands or logged))
    cut = re.search(r"\.\.\.|\bcut\b", "\n".join(commands))
    return replace(notes.config(), complete=bool(commands or logged) and not cut)


class _Notes:
    """Fields as they are found, and the flags that are not read."""

    def __init__(self) -> None:
        self.fields: dict[str, Any] = {}
        self.sources: dict[str, str] = {}
        self.unknown: dict[str, None] = {}

    def config(self) -> Config:
        return Config(**self.fields, sources=self.sources, unknown=tuple(self.unknown))

    def put(self, name: str, value: Any, source: str) -> None:
        if value is not None and name not in self.fields:
            self.fields[name], self.sources[name] = value, source

    def words(self, pairs: Iterator[tuple[str, str]]) -> None:
        """Flags and key=value words, in the order of the text."""
        for shown, value in pairs:
            self.flag(shown.lstrip("-"), value, shown)

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
        negated = key.startswith("no-") and key[3:] in SWITCHES
        if negated or key in SWITCHES:
            switch = _switch(value)
            name = SWITCHES[key[3:] if negated else key]
            self.put(name, None if switch is None else switch is not negated, source)
        elif key == "vllm-use-v2-model-runner":
            self.put("runner", RUNNERS[_switch(value)], source)
        elif key in NUMBERS:
            self.put(NUMBERS[key], _count(value), source)
        elif key in WORDS:
            self.put(WORDS[key], _word(WORDS[key], value), source)
        else:
            return False
        return True

    def sentences(self, text: str, *, whole: bool) -> None:
        """Lines of a log, and, where no whole command says it, what a report states in words."""
        for pattern, name, value in LOG_LINES + (() if whole else STATEMENTS):
            if found := re.search(pattern, text, re.MULTILINE):
                given = value if value is not None else _word(name, next(g for g in found.groups() if g))
                self.put(name, given, f"“{found[0]}”")
        if own := re.findall(CHOSEN, text):
            self.put("draft_attention", _word("draft_attention", own[-1]), f"“Using {own[-1]} … out of”")
        if named := _named_gpu(text):
            self.put("gpu", *named)
        if found := re.search(r"^Model: (?!see flags)(\S+)|\b(Qwen3\.[5-9]-[\w.-]+)", text, re.MULTILINE):
            self.put("model", found[1] or found[2], "its model")
        if (
            self.fields.get("cache_mode") in ("align", "all")
            and is_hybrid(self.fields.get("model", "")) is None
        ):
            self.put("hybrid", True, f"mamba_cache_mode {self.fields['cache_mode']}")


def _switch(value: str) -> bool | None:
    word = value.strip().lower()
    return True if word in TRUE else False if word in FALSE else None


def _count(value: str) -> int | None:
    """A plain number of up to nine digits."""
    return int(value) if re.fullmatch(r"[0-9]{1,9}", value) else None


def _word(name: str, value: str) -> Any:
    """A value as its field holds it; None for one that the field cannot hold."""
    value = value.strip().strip("\"'")
    readers: Mapping[str, Callable[[str], Any]] = {
        "cache_mode": lambda v: v if v in ("none", "align", "all") else None,
        "runner": lambda v: v.lower() if v.lower() in ("v1", "v2") else None,
        "attention": _backend,
        "draft_attention": _backend,
        "cudagraphs": lambda v: v.upper().rpartition(".")[2].partition(":")[0],
        "speculation": lambda v: v.lower(),
        "gpu": gpu_of,
        "drafts": _count,
        "tensor": _count,
        "pipeline": _count,
        "version": lambda v: v.lstrip("v"),
    }
    return readers.get(name, str)(value)


def _backend(text: str) -> str | None:
    """A backend's name; `auto`, and a JSON null, name none."""
    name = text.upper().rpartition(".")[2]
    return None if name in ("AUTO", "NONE", "NULL", "") else name


def _neutral(key: str) -> bool:
    """Whether a flag decides nothing here, as what the drafter has of its own does not."""
    own = key.removeprefix("draft-")
    return own in NEUTRAL or (own != key and (own in NUMBERS or own in WORDS or own in SWITCHES))


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
