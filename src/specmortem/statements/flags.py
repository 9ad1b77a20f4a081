"""Flags, key=value words and JSON of a launch -> fields of a `Config`, each with where it was said."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from importlib import resources
from typing import Any

from specmortem.exposure import NO_SPECULATION, UNNAMED, Config, Runner, is_hybrid
from specmortem.statements.config import config
from specmortem.statements.derived import with_names
from specmortem.statements.gpus import gpu_of
from specmortem.statements.signs import Signs, book_of

SHORT = frozenset({"tp", "pp", "sc", "cc", "ac", "o"})
# Flags that decide something, by the field that they set. Short forms are vLLM's own; the last ones are of reports.
FLAGS: Mapping[str, tuple[str, ...]] = {
    "pipeline": ("pipeline-parallel-size", "pp"),
    "tensor": ("tensor-parallel-size", "tp"),
    "max_num_seqs": ("max-num-seqs", "max-seqs"),
    "block_size": ("block-size",),
    "drafts": ("num-speculative-tokens", "num-spec-tokens", "draft-tokens", "spec-tokens", "k"),
    "model": ("model",),
    "cache_mode": ("mamba-cache-mode", "cache-mode"),
    "kv_cache_dtype": ("kv-cache-dtype",),
    "draft_kv_cache_dtype": ("draft-kv-cache-dtype",),
    "attention": ("attention-backend",),
    "draft_attention": ("draft-attention-backend",),
    "cudagraphs": ("cudagraph-mode",),
    "speculation": ("method", "spec-method", "spec"),
    "runner": ("runner",),
    "version": ("version", "vllm"),
    "gpu": ("gpu", "arch"),
    "eager": ("enforce-eager", "eager"),
    "prefix_caching": ("enable-prefix-caching", "prefix-caching", "prefix-cache"),
    "async_scheduling": ("async-scheduling", "async"),
    "hybrid": ("hybrid",),
    "own_drafter": ("own-drafter",),
}
FIELD: Mapping[str, str] = {flag: field for field, flags in FLAGS.items() for flag in flags}
SWITCH_FIELDS = ("eager", "prefix_caching", "async_scheduling", "hybrid", "own_drafter")
SWITCHES = frozenset(flag for field in SWITCH_FIELDS for flag in FLAGS[field])
# What is no flag of `vllm serve`, and decides nothing: keys of JSON flags, variables, words of reports.
NEUTRAL = frozenset(
    {
        "mode", "max-seq-len", "max-seqs", "cuda-visible-devices", "cuda-device-order", "cuda-launch-blocking",
        "hf-home", "hf-token", "pytorch-cuda-alloc-conf", "pytorch-alloc-conf", "disable-log-requests", "model-tag",
        "host", "port", "swap-space", "uvicorn-log-level", "cudagraph-capture-sizes",
    }
)  # fmt: skip
# Flags of vLLM's that change a default which is assumed here.
DECIDING = frozenset(
    {"optimization-level", "o", "config", "hf-config-path", "scheduler-cls", "performance-mode"}
)
V2_VARIABLE, RUNNER = "vllm-use-v2-model-runner", "VLLM_USE_V2_MODEL_RUNNER"
RUNNER_TYPES = frozenset({"runner", "task"})  # --runner of vLLM is generate or pooling
# Flags that make it draft, without saying how.
DRAFTER_FLAGS = frozenset({"spec-model", "speculative-model", "draft-model"})
# Variables and flags that decide something only with some values, by what these contain.
DECIDING_VALUES: Mapping[str, str] = {
    "hf-overrides": r"specul|layer|architect|mtp|block",
    "vllm-use-trtllm-attention": r"",
    "vllm-attention-backend": r"",
    "vllm-use-v1": r"^(?!1$)",
    "attention-config": r"trtllm",
    "ac": r"trtllm",
}
VARIABLES = frozenset({RUNNER, "VLLM_USE_TRTLLM_ATTENTION", "VLLM_ATTENTION_BACKEND", "VLLM_USE_V1"})
UNSET = ("none", "null", "auto")  # the default, said
RUNNERS: Mapping[bool | None, Runner | None] = {True: "v2", False: "v1", None: None}
TRUE, FALSE = {"1", "true", "yes", "on", ""}, {"0", "false", "no", "off"}
JSON_FLAGS = ("speculative-config", "compilation-config", "attention-config", "sc", "cc", "ac")
# Inside speculative_config these mean what they mean outside; any other key is the drafter's.
SPECULATION = ("speculative-config", "sc")
SHARED = frozenset(
    {
        "method",
        "spec",
        "spec-method",
        "spec-tokens",
        "model",
        "num-speculative-tokens",
        "num-spec-tokens",
        "draft-tokens",
        "k",
    }
)


class Notes:
    """Fields as they are found, and the flags that are not read; the last statement of a field counts, as in vLLM.

    `firm` says whether it counts against exposure too, or was only said in a sentence.
    """

    def __init__(self, *, firm: bool = True) -> None:
        self.fields: dict[str, Any] = {}
        self.sources: dict[str, str] = {}
        self.unknown: dict[str, None] = {}
        self.firm = firm
        self.speculates = ""

    def config(self) -> Config:
        """The fields as a configuration; a drafter whose method is not said is `unnamed`."""
        if self.speculates:
            self.fill("speculation", UNNAMED, self.speculates)
        prose = frozenset() if self.firm else frozenset(self.fields)
        return Config(**self.fields, sources=self.sources, unknown=tuple(self.unknown), prose=prose)

    def put(self, name: str, value: Any, source: str) -> None:
        """Set a field; one that cannot be read takes back what was there, since it comes later."""
        if value is None:
            self.fields.pop(name, None)
            self.sources.pop(name, None)
        else:
            self.fields[name], self.sources[name] = value, source

    def fill(self, name: str, value: Any, source: str) -> None:
        """Set a field that nothing has set."""
        if value is not None and name not in self.fields:
            self.put(name, value, source)

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
        elif key in RUNNER_TYPES and shown.startswith("-"):
            return
        elif key in DRAFTER_FLAGS:
            self.speculates = shown
        elif not self.known(key, value, shown) and _may_decide(key, value, shown):
            self.unknown[shown] = None

    def nested(self, head: str, rest: str, value: str, shown: str) -> None:
        """A flag whose value is JSON, or one key of it behind a dot."""
        if rest:
            self.flag(_inside(head, rest), value, shown)
            return
        loaded = literal(value)
        if head in SPECULATION:
            self.speculates = shown
        elif head in DECIDING_VALUES and _may_decide(head, value, shown):
            self.unknown[shown] = None
        if isinstance(loaded, dict):
            self.forget(head)
            self.mapping(loaded, shown, head)
        elif head in SPECULATION and loaded is None and value.strip() in ("None", "null"):
            self.put("speculation", NO_SPECULATION, shown)
            self.speculates = ""
        else:
            self.loose(value, shown, head)

    def forget(self, head: str) -> None:
        """Take back what an earlier JSON value of this flag said: the last one counts, as a whole."""
        flags = SPECULATION if head in SPECULATION else (head,)
        for name, source in list(self.sources.items()):
            if re.split(r"[:.]", source.lstrip("-").replace("_", "-"))[0] in flags:
                self.put(name, None, source)

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
                self.speculates = shown if name in SPECULATION and value else self.speculates
                self.mapping(value, name, name)
            elif name == "speculative-config" and value is None:
                self.put("speculation", NO_SPECULATION, shown)
            else:
                if name == "speculative-config":
                    self.speculates = shown
                known = self.known(name, str(value), shown if shown == "log" else f"{shown}: {key}")
                if not known and shown == "log" and value is not None and _decides(name, str(value)):
                    self.unknown[name] = None

    def known(self, key: str, value: str, source: str) -> bool:
        """Put down a field that decides something; False for any other key."""
        if key == V2_VARIABLE:
            key, value = "runner", runner_of(value) or ""
        flag = key.removeprefix("no-") if key.removeprefix("no-") in SWITCHES else key
        if flag not in FIELD:
            return False
        found = READERS.get(FIELD[flag], str)(value.strip().strip("\"'"))
        if found is None and source != "log" and value.strip().lower() not in UNSET:
            self.unknown[RUNNER if key == "runner" else source] = None
        self.put(FIELD[flag], found if flag == key or found is None else not found, source)
        return True

    def lines(self, text: str, signs: Signs) -> None:
        """What the lines of a text state by these signs, where nothing else has said it."""
        found = config(with_names(book_of(text, signs)), cite=lambda fact: f"“{fact.match}”")
        for name, source in found.sources.items():
            self.fill(name, getattr(found, name), source)
        mode = self.fields.get("cache_mode")
        if mode in ("align", "all") and is_hybrid(self.fields.get("model", "")) is None:
            self.fill("hybrid", True, f"mamba_cache_mode {mode}")


def runner_of(word: str) -> Runner | None:
    """The runner that a value of VLLM_USE_V2_MODEL_RUNNER asks for."""
    return RUNNERS[_switch(word)] if word.strip() else None


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
    "speculation": lambda value: value.lower() or None,
    "gpu": gpu_of,
    "version": lambda value: value.lstrip("v"),
}


def _may_decide(key: str, value: str, shown: str) -> bool:
    """Whether a flag or variable that is not read may change what is judged."""
    if key in DECIDING_VALUES:
        return _decides(key, value)
    return shown.startswith("-") and not _neutral(key)


def _decides(key: str, value: str) -> bool:
    """Whether it is known that this changes what is judged, though not how."""
    return (
        key in DECIDING - {"config"} or re.search(DECIDING_VALUES.get(key, "$^"), value.lower()) is not None
    )


def _neutral(key: str) -> bool:
    """Whether a flag of vLLM's decides nothing here, as what the drafter has of its own does not."""
    own = key.removeprefix("draft-")
    plain = own.removeprefix("no-").partition(".")[0]
    return plain in NEUTRAL or plain in flags_of_vllm() - DECIDING or (own != key and own in FIELD)


@cache
def flags_of_vllm() -> frozenset[str]:
    """Flags that some release from 0.19.1 on knows, without dashes."""
    text = resources.files("specmortem.statements").joinpath("flags.txt").read_text(encoding="utf-8")
    return frozenset(text.split())


def _inside(head: str, key: str) -> str:
    """A key inside a JSON flag, under the name that it has outside."""
    if head in SPECULATION and key not in SHARED and not key.startswith("draft-"):
        return f"draft-{key}"
    return "attention-backend" if (head, key) in (("attention-config", "backend"), ("ac", "backend")) else key


def literal(text: str) -> Any:
    """A JSON or Python literal; None where it is neither."""
    for read in (json.loads, ast.literal_eval):
        try:
            return read(text)
        except (ValueError, SyntaxError, MemoryError, RecursionError):
            continue
    return None


TOKEN = re.compile(
    r"(?<![\w/.-])(?P<name>--[A-Za-z][\w.-]*|-[a-z]{1,2}\b[\w.]*|[A-Za-z_][\w-]*(?==))(?:=|(?<=\w)[ \t]+(?![-\\]))?"
    r"(?P<value>'[^'\n]*'|\"(?:\\.|[^\"\\\n])*\"|\{[^}\n]*\}|[^\s'\",;()]*)"
)

# The model of `vllm serve MODEL`, or after its image.
SERVED = re.compile(
    r"\bvllm\s+serve[ =]+(?!-)[\"']?([^\s<\"'`]+)|\bvllm/vllm-openai(?:[:@]\S+)?[ \t]+(?!-)([\w.-]*/[\w./-]*\w)"
)


def words(text: str) -> Iterator[tuple[str, str]]:
    """(flag or key as written, value) of every flag and key=value word; a flag without a value has an empty one."""
    if found := SERVED.search(text):
        yield "--model", found[1] or found[2]
    for found in TOKEN.finditer(text):
        name, value = found["name"], _unquoted(found["value"])
        bare = name.lstrip("-")
        if len(name) - len(bare) == 1 and bare.partition(".")[0] not in SHORT:
            continue
        is_switch = bare.removeprefix("no-").replace("_", "-").lower() in SWITCHES
        yield name, "" if is_switch and _switch(value) is None else value


def _unquoted(value: str) -> str:
    """A word as a program gets it."""
    if value.startswith('"'):
        value = re.sub(r'\\(["\\$`])', r"\1", value)
    return value.strip("'\"")
