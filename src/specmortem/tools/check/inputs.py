"""Files of any kind to text that states launches: logs of any size, service files, a model's own configuration."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specmortem.statements import sources
from specmortem.statements.engine_re import literals

READ_WHOLE = 4 << 20  # bytes; of what follows only lines that may state a launch are kept
KEPT_LATER = 4 << 20
SERVICE_BYTES = 1 << 20
MOST_NODES = 20_000
SERVICE = re.compile(r"(?m)^\s*-?\s*[\"']?(?:image|command|args|entrypoint|environment|env)[\"']?\s*:")
LATER = (
    "vllm serve", "api_server", "vllm/vllm-openai", "non-default args", "with config: model", "LLM engine (v",
    "API server version", "VLLM_USE_V2_MODEL_RUNNER", "attention backend", "Mamba cache mode", "V2 Model Runner",
)  # fmt: skip
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


@dataclass(frozen=True)
class Input:
    """A text that states launches, under the name that answers call it."""

    name: str
    text: str


def read(path: str) -> Input:
    """A file, or standard input for `-`, as text in which each command stands on one line.

    Raises UnavailableError when it cannot be read, BadInputError for a damaged archive or a folder.
    """
    name = "stdin" if path == sources.STANDARD_INPUT else path
    return Input(name, expanded("".join(_kept(path))))


def expanded(text: str) -> str:
    """The text with what service files and models' configurations state put in front of it."""
    if len(text) <= SERVICE_BYTES:
        if text.lstrip().startswith("{") and '"architectures"' in text:
            return "\n".join(_model(text)) or text
        if SERVICE.search(text):
            return "\n".join([*_services(text), _comments(text)])
    return text


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
    """A model's config.json, as the words that say the same."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return
    if not isinstance(found, dict) or not isinstance(found.get("architectures"), list):
        return
    nested = found.get("text_config")
    inner = nested if isinstance(nested, dict) else found
    layers = {str(kind) for key in ("layer_types", "layers_block_type") for kind in _list(inner.get(key))}
    yield f"model={next(map(str, found['architectures']), '')}"
    if layers & set(RECURRENT):
        yield "hybrid=true"
    own = found.get("speculators_config")
    yield f"own-drafter={'false' if own is None else 'true'}"
    if isinstance(own, dict):
        yield f"method={own.get('algorithm') or 'unnamed'}"


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _comments(text: str) -> str:
    """The service file itself for what it says beside commands, without lines that would be read as one."""
    commands = ("vllm serve", "api_server", "--")
    return "\n".join(line for line in text.splitlines() if not any(word in line for word in commands))


def _services(text: str) -> Iterator[str]:
    """The command line of each container in a compose or Kubernetes file; none where it is no YAML."""
    import yaml

    try:
        for document in yaml.safe_load_all(text):
            for container in _containers(document):
                yield " ".join(_line(container))
    except (yaml.YAMLError, RecursionError, ValueError, TypeError, OverflowError):
        return


def _containers(document: Any) -> Iterator[Mapping[Any, Any]]:
    """Mappings that start something; a document of more nodes than any service file has is cut off."""
    open_nodes, seen = [document], 0
    while open_nodes and seen < MOST_NODES:
        node = open_nodes.pop()
        seen += 1
        if isinstance(node, Mapping):
            if {"command", "args", "entrypoint"} & node.keys() or "vllm" in str(node.get("image", "")):
                yield node
            open_nodes.extend(node.values())
        elif isinstance(node, list):
            open_nodes.extend(node)


def _line(container: Mapping[Any, Any]) -> Iterator[str]:
    yield from _variables(container.get("environment") or container.get("env"))
    words = [word for key in ("entrypoint", "command", "args") for word in _words(container.get(key))]
    command = " ".join(words)
    if "vllm serve" not in command and "api_server" not in command:
        image = str(container.get("image", "")).rpartition("/")[2]
        tag = image.partition(":")[2]
        yield f"vllm/vllm-openai:{tag}" if tag else "vllm/vllm-openai"
    yield command


def _words(value: Any) -> list[str]:
    """Arguments as a shell has them; a string is one or several already."""
    if isinstance(value, str):
        return [" ".join(value.replace("\\\n", " ").split("\n"))]
    texts = [str(word) for word in value] if isinstance(value, list) else []
    return [text if " " in text and "serve" in text else shlex.quote(text) for text in texts]


def _variables(value: Any) -> Iterator[str]:
    pairs = value.items() if isinstance(value, Mapping) else ()
    for name, content in pairs:
        yield f"{name}={shlex.quote(str(content))}"
    for each in value if isinstance(value, list) else ():
        if isinstance(each, Mapping) and "name" in each:
            yield f"{each['name']}={shlex.quote(str(each.get('value', '$?')))}"
        elif isinstance(each, str) and "=" in each:
            yield each


def is_tree(text: str) -> bool:
    """Whether an argument names a vLLM rather than a file that tells of one."""
    return (
        text == "installed" or text.startswith(("vllm==", "tree:", "wheel:", "sdist:")) or Path(text).is_dir()
    )
