"""Compose and Kubernetes files, and what `docker inspect` prints -> the command line of each container.

Values are read as text and never expanded: an alias stays one object however often a file names it, and a file of more
nodes than any service has is cut off.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator, Mapping
from typing import Any

from specmortem.statements.flags import RUNNER

MOST_BYTES = 1 << 20
MOST_OF_A_DOCUMENT = 1 << 18  # a YAML document; a JSON one is read fast
MOST_NODES = 20_000
MOST_MERGED, DEEPEST_MERGE = 10, 3
KEYS = r"(?:image|command|cmd|args|entrypoint|environment|env|containers)"
SERVICE = re.compile(rf"(?im)^[ \t]*(?:-[ \t]*)?[\"']?{KEYS}[\"']?\s*:")
SERVICE_JSON = re.compile(rf"(?i)\"{KEYS}\"\s*:")
ANY_VLLM = re.compile(r"vllm\s+serve|api_server")
VLLM_FLAGS = re.compile(
    r"(?<!\S)[\"']?--(?:model|speculative[-_]config|tensor[-_]parallel[-_]size|served[-_]model)"
)
REFERENCE = re.compile(r"\$\((\w+)\)|\$\{(\w+)\}|\$(\w+)")
NOT_A_COMMENT = re.compile(
    rf"serve|--|image\s*[\"']?:|{RUNNER}|^\s*-\s*[\"']?-\w|^\s*(?:[-{{[]\s*)?[\"']", re.IGNORECASE
)
OPEN = f"{RUNNER}='$?'"  # a variable whose value stands elsewhere


def containers(text: str) -> list[str]:
    """A text for each container that runs vLLM, with what the file says beside commands; none for any other file."""
    if len(text) > MOST_BYTES:
        return []
    is_json = text.lstrip()[:1] in ("{", "[") and SERVICE_JSON.search(text) is not None
    if not is_json and not SERVICE.search(text):
        return []
    documents = _json(text) if is_json else _yaml(text)
    commands = [told for document in documents for each in _nodes(document) if (told := _command(each))]
    beside = "" if is_json else comments(text)
    return [f"{command}\n{beside}" for command in dict.fromkeys(commands)]


def comments(text: str) -> str:
    """The file for what it says beside commands, without lines that would be read as one."""
    return "\n".join(line for line in text.splitlines() if not NOT_A_COMMENT.search(line))


def _json(text: str) -> Iterator[Any]:
    try:
        yield json.loads(text)
    except (ValueError, RecursionError):
        yield from _yaml(text)


def _yaml(text: str) -> Iterator[Any]:
    """Its documents that tell of vLLM; none from where it is no YAML."""
    import yaml

    for document in re.split(r"(?m)^---(?:\s.*)?$", text):
        if len(document) <= MOST_OF_A_DOCUMENT and (
            "vllm" in document.lower() or VLLM_FLAGS.search(document)
        ):
            try:
                yield yaml.load(document, Loader=yaml.BaseLoader)  # noqa: S506 - it makes nothing but texts
            except (yaml.YAMLError, RecursionError, ValueError):
                continue


def _nodes(document: Any) -> Iterator[Mapping[str, Any]]:
    """Its mappings, with keys in small letters and what they merge."""
    open_nodes, seen = [document], 0
    while open_nodes and seen < MOST_NODES:
        node = open_nodes.pop(0)
        seen += 1
        if isinstance(node, dict):
            yield {str(key).lower(): value for key, value in _merged(node).items()}
            open_nodes.extend(value for value in node.values() if isinstance(value, (dict, list)))
        elif isinstance(node, list):
            open_nodes.extend(value for value in node[:MOST_NODES] if isinstance(value, (dict, list)))


def _merged(node: Mapping[Any, Any], depth: int = 0) -> dict[Any, Any]:
    """A mapping with those that its `<<` names."""
    if "<<" not in node or depth > DEEPEST_MERGE:
        return dict(node)
    given = node["<<"] if isinstance(node["<<"], list) else [node["<<"]]
    found: dict[Any, Any] = {}
    for each in reversed(given[:MOST_MERGED]):
        found |= _merged(each, depth + 1) if isinstance(each, dict) else {}
    return found | {key: value for key, value in node.items() if key != "<<"}


def _command(node: Mapping[str, Any]) -> str:
    """What a container runs, on one line or a script's; empty for what is no container of vLLM."""
    if isinstance(node.get("config"), dict):  # what docker inspect prints around the container's own
        return ""
    image = _text(node.get("image"))
    variables, in_words = _variables(node)
    parts = [node.get(key) for key in ("entrypoint", "command", "cmd", "args")]
    words = [_referred(word, in_words) for part in parts for word in _words(part)]
    command = " ".join(_shown(word) for word in words)
    named = ANY_VLLM.search(command)
    if not named and not ("vllm" in image and words) and not VLLM_FLAGS.search(command):
        return ""
    told = image if "vllm" in image.lower() else ""
    shown = f"image: {_official(told)}" if named and told else ""
    start = "" if named else f"{_official(told)} "
    if "\n" in command:  # a script: its first line need not be the command
        return "\n".join([*(f"export {each}" for each in variables), f"{start}{command}", shown])
    return f"{' '.join([*variables, ''])}{start}{command}\n{shown}"


def _official(image: str) -> str:
    """The image under the name of vLLM's own, with its tag."""
    tag = image.partition("@")[0].rpartition("/")[2].partition(":")[2]
    return f"vllm/vllm-openai:{tag}" if tag else "vllm/vllm-openai"


def _text(value: Any) -> str:
    """A scalar as text; empty for what is none."""
    if isinstance(value, bool):
        return str(value).lower()
    return str(value) if isinstance(value, (str, int, float)) else ""


def _words(value: Any) -> list[str]:
    """Arguments; a string is one or several already, on one line."""
    if isinstance(value, (str, int, float)):
        return [" ".join(_text(value).replace("\\\n", " ").split("\n"))] if value != "" else []
    return [_text(word) for word in value] if isinstance(value, list) else []


def _shown(word: str) -> str:
    """A word as a shell is given it; a script, and a string of several words, stand as they are."""
    several = " " in word and (ANY_VLLM.search(word) or re.match(r"\s*-", word))
    return word if several and not re.match(r"\s*--?[\w-]+=", word) else shlex.quote(word)


def _variables(node: Mapping[str, Any]) -> tuple[list[str], Mapping[str, str]]:
    """Variables as NAME=VALUE words, and those that `$(NAME)` stands for in arguments."""
    found: dict[str, str] = {}
    given = node.get("environment") or node.get("env")
    listed = given if isinstance(given, list) else []
    for name, value in given.items() if isinstance(given, dict) else ():
        found[_text(name)] = _text(value) or "$?"
    for each in listed:
        if isinstance(each, dict) and "name" in each:
            found[_text(each["name"])] = _text(each.get("value")) or "$?"
        elif name := _text(each):
            key, equals, value = name.partition("=")
            found[key] = value if equals else "$?"
    elsewhere = any(node.get(key) for key in ("envfrom", "env_file")) and RUNNER not in found
    words = [f"{name}={shlex.quote(value)}" for name, value in found.items() if name.isidentifier()]
    kubernetes = any(isinstance(each, dict) for each in listed)
    known = {name: value for name, value in found.items() if value != "$?"} if kubernetes else {}
    return [*([OPEN] if elsewhere else []), *words], known


def _referred(word: str, known: Mapping[str, str]) -> str:
    return REFERENCE.sub(lambda found: known.get(found[1] or found[2] or found[3], found[0]), word)
