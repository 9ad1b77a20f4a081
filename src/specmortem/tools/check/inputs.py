"""Files of any kind to text that states launches: logs of any size, service files, a model's own configuration."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specmortem.exposure import is_hybrid
from specmortem.exposure.config import DRAFTER_WORDS
from specmortem.statements import sources
from specmortem.statements.engine_re import literals
from specmortem.tools.check.services import containers

READ_WHOLE = 4 << 20  # bytes; of what follows only lines that may state a launch are kept
KEPT_LATER = 4 << 20
MODEL_BYTES = 1 << 20
LATER = (
    "vllm serve", "api_server", "vllm/vllm-openai", "non-default args", "with config: model", "LLM engine (v",
    "API server version", "VLLM_USE_V2_MODEL_RUNNER", "attention backend", "Mamba cache mode", "V2 Model Runner",
)  # fmt: skip
TERMINAL = re.compile(
    r"\x1b\][^\x07\x1b\n]*(?:\x07|\x1b\\)|(?:\x1b\[|\x9b)[0-?]*[ -/]*[@-~]|\x1b.?|[\u202a-\u202e\u2066-\u2069\ufeff]"
)
CONTROL = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f]")
RECURRENT = (
    "linear_attention",
    "mamba",
    "mamba2",
    "recurrent",
    "conv",
    "kda",
    "gated_deltanet",
    "short_conv",
)
ATTENTION = ("full_attention", "sliding_attention", "chunked_attention", "attention")


@dataclass(frozen=True)
class Input:
    """A text that states launches, under the name that answers call it."""

    name: str
    text: str


def read(path: str) -> list[Input]:
    """A file, or standard input for `-`, as texts in which each command stands on one line.

    Raises UnavailableError when it cannot be read, BadInputError for a damaged archive or a folder.
    """
    name = "stdin" if path == sources.STANDARD_INPUT else path
    return inputs(name, "".join(_kept(path)))


def inputs(name: str, text: str) -> list[Input]:
    """The text; one for each container of a service file; of a model's configuration what it says of a launch."""
    name, text = printable(name), printable(text)
    if len(text) <= MODEL_BYTES and text.lstrip().startswith("{") and '"architectures"' in text:
        return [Input(name, "\n".join(_model(text)) or text)]
    return [Input(name, each) for each in containers(text) or [text]]


def printable(text: str) -> str:
    """The text without what moves a cursor, colours or turns direction; NUL, as between arguments, is a space."""
    return CONTROL.sub(" ", TERMINAL.sub("", text))


def _kept(path: str) -> Iterator[str]:
    seen = later = 0
    pattern = literals(LATER)
    for chunk in sources.chunks(path):
        seen += len(chunk)
        if seen <= READ_WHOLE:
            yield chunk.decode("utf-8", "replace")
            continue
        for line in chunk.splitlines():
            if later < KEPT_LATER and pattern.search(line[: sources.LONGEST_LINE]):
                later += len(line)
                yield line[: sources.LONGEST_LINE].decode("utf-8", "replace") + "\n"


def _model(text: str) -> Iterator[str]:
    """A model's config.json, as the words that say the same.

    One that brings a drafter is served as the model that this drafts for. A drafter's own says nothing of the target.
    """
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return
    if not isinstance(found, dict) or not isinstance(found.get("architectures"), list):
        return
    name, own = next(map(str, found["architectures"][:1]), ""), found.get("speculators_config")
    if isinstance(own, dict):
        yield from _own_drafter(own)
    elif any(word in name.lower() for word in DRAFTER_WORDS):
        yield f"drafter={name}"
    else:
        yield from _target(found, name)


def _own_drafter(own: Mapping[str, Any]) -> Iterator[str]:
    """What the configuration of the library `speculators` says of its drafter and of the model that it drafts for."""
    yield "own-drafter=true"
    yield f"method={own.get('algorithm') or 'unnamed'}"
    proposals = [each for each in _list(own.get("proposal_methods")) if isinstance(each, dict)]
    if proposals and isinstance(drafts := proposals[0].get("speculative_tokens"), int):
        yield f"num-speculative-tokens={drafts}"
    verifier = own.get("verifier")
    if isinstance(verifier, dict) and isinstance(served := verifier.get("name_or_path"), str) and served:
        yield f"model={served}"


def _target(found: Mapping[str, Any], name: str) -> Iterator[str]:
    nested = found.get("text_config")
    inner = nested if isinstance(nested, dict) else found
    layers = {str(kind) for key in ("layer_types", "layers_block_type") for kind in _list(inner.get(key))}
    yield f"model={name}"
    if layers & set(RECURRENT):
        yield "hybrid=true"
    elif layers and layers <= set(ATTENTION):
        yield "hybrid=false"
    elif (hybrid := is_hybrid(name)) is not None:
        yield f"hybrid={str(hybrid).lower()}"
    yield "own-drafter=false"


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def is_tree(text: str) -> bool:
    """Whether an argument names a vLLM rather than a file that tells of one."""
    return (
        text == "installed" or text.startswith(("vllm==", "tree:", "wheel:", "sdist:")) or Path(text).is_dir()
    )
