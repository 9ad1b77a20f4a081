"""What goes over the wire: request bodies, server-sent events, and the pieces of answers."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from specmortem.tools.load.outcome import Ask
from specmortem.tools.load.settings import Settings

PATHS: Mapping[str, str] = {"chat": "/v1/chat/completions", "completions": "/v1/completions"}
DONE = "[DONE]"
FIELDS = frozenset({"data", "event", "id", "retry", ""})
MOST_TOKENS = 10**9


class GarbageError(Exception):
    """The server sent what the protocol does not know."""


def body(settings: Settings, ask: Ask, model: str) -> bytes:
    """The JSON body of a request, in ASCII.

    `ignore_eos`, `min_tokens` and `return_token_ids` are vLLM's, the last for prompts of token ids, all only sent
    where they are needed.
    """
    shape = settings.shape
    data: dict[str, Any] = {"model": model, "max_tokens": ask.max_tokens, "temperature": shape.temperature}
    if settings.api == "chat":
        data["messages"] = [{"role": "user", "content": ask.prompt}]
    else:
        data["prompt"] = ask.prompt
        if not isinstance(ask.prompt, str):
            data["return_token_ids"] = True
    if shape.stream:
        data |= {"stream": True, "stream_options": {"include_usage": True}}
    if settings.ignore_eos:
        data["ignore_eos"] = True
    if settings.min_tokens:
        data["min_tokens"] = settings.min_tokens
    return json.dumps(data).encode("ascii")


@dataclass(frozen=True)
class Piece:
    """What one event, or a whole body, adds to an answer."""

    text: str = ""
    finish_reason: str = ""
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    error: str = ""
    token_ids: tuple[int, ...] = ()


def piece(data: str, of: str) -> Piece:
    """Read an event of a stream (`of` is `delta`) or a body (`message`).

    Raises GarbageError when it is no JSON object, or one without what an answer holds.
    """
    try:
        found = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise GarbageError(f"not JSON: {error}") from None
    if not isinstance(found, dict):
        raise GarbageError("JSON, but not an object")
    if found.get("error"):
        return Piece(error=json.dumps(found["error"], ensure_ascii=False))
    choices = found.get("choices")
    if not isinstance(choices, list) or (not choices and not found.get("usage")):
        raise GarbageError("an object without choices")
    said = _choice(choices[0], of) if choices else Piece()
    usage = found.get("usage")
    counts = usage if isinstance(usage, dict) else {}
    prompt, completion = (_count(counts.get(name)) for name in ("prompt_tokens", "completion_tokens"))
    return replace(said, prompt_tokens=prompt, completion_tokens=completion)


def _choice(choice: Any, of: str) -> Piece:
    if not isinstance(choice, dict):
        raise GarbageError("a choice that is not an object")
    inner = choice.get(of)
    if not isinstance(inner, dict):
        inner = {"content": choice.get("text")}
    # Reasoning comes before the answer; releases of vLLM call it by either name.
    parts = [inner.get(name) for name in ("reasoning_content", "reasoning", "content")]
    if any(part is not None and not isinstance(part, str) for part in parts):
        raise GarbageError("text that is not a string")
    reason = choice.get("finish_reason")
    if reason is not None and not isinstance(reason, str):
        raise GarbageError("a finish_reason that is not a string")
    ids = choice.get("token_ids")
    if not isinstance(ids, list | None) or not all(isinstance(id, int) for id in ids or ()):
        raise GarbageError("token_ids that are no list of integers")
    if parts[0] == parts[1]:
        parts[1] = None
    text = "".join(part for part in parts if part)
    return Piece(text, reason or "", token_ids=tuple(ids or ()))


def _count(value: Any) -> int | None:
    sane = isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= MOST_TOKENS
    return value if sane else None


class Events:
    """Server-sent events out of bytes that arrive in any pieces. Lines end with LF or CR LF."""

    def __init__(self) -> None:
        """Nothing read yet."""
        self._bytes = bytearray()
        self._searched = 0
        self._data: list[str] = []

    def feed(self, chunk: bytes) -> list[str]:
        """The data of the events that this chunk completes.

        Raises GarbageError for a line that is no field, or is not UTF-8.
        """
        self._bytes += chunk
        found: list[str] = []
        start = 0
        while (end := self._bytes.find(b"\n", max(start, self._searched))) >= 0:
            self._line(bytes(self._bytes[start:end]), found)
            start = end + 1
        del self._bytes[:start]
        self._searched = len(self._bytes)
        return found

    def _line(self, line: bytes, found: list[str]) -> None:
        try:
            text = line.removesuffix(b"\r").decode("utf-8")
        except UnicodeDecodeError:
            raise GarbageError("a line that is not UTF-8") from None
        if not text:
            if self._data:
                found.append("\n".join(self._data))
            self._data.clear()
            return
        name, colon, value = text.partition(":")
        if name not in FIELDS or not (name or colon):
            raise GarbageError(f"a line that is no event field: {text}")
        if name == "data":
            self._data.append(value.removeprefix(" "))
