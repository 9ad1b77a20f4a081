"""One request over HTTP, and how it ended. The only file that knows httpx.

Each request has a connection of its own, so that a kept one that the server closes cannot look like a crash. Nothing
is sent twice, no redirect is followed, no proxy or netrc of the environment is used, no cookie is kept, and no body
is decompressed.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable
from dataclasses import dataclass, field
from http.cookiejar import DefaultCookiePolicy
from time import monotonic
from typing import Any

import httpx

from specmortem import __version__
from specmortem.tools.load.outcome import Ask, Outcome
from specmortem.tools.load.settings import Settings
from specmortem.tools.load.text import Cleaner
from specmortem.tools.load.wire import DONE, PATHS, Events, GarbageError, Piece, body, piece

ERROR_BYTES = 4096
SMALL_BYTES, SMALL_S = 4 * 1024 * 1024, 5.0
FAILED = frozenset({"error", "abort"})


class NoAnswerError(Exception):
    """A small resource could not be read."""


class _EndedError(Exception):
    """The exchange is over, with this outcome."""

    def __init__(self, outcome: Outcome, reason: str) -> None:
        super().__init__(reason)
        self.outcome, self.reason = outcome, reason


@dataclass
class Reply:
    """What came back so far. Times are those of `time.monotonic`; `ended` is set when nothing more can come."""

    started: float
    ended: float = 0.0
    outcome: Outcome = Outcome.OK
    reason: str = ""
    status: int | None = None
    text: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str = ""
    done: bool = False
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    bytes: int = 0
    text_at: list[float] = field(default_factory=list)

    def take(self, part: Piece) -> None:
        """Add a piece. Token ids without a text are told as text. Raises when it says that the server failed."""
        if part.error:
            raise _EndedError(Outcome.SERVER_ERROR, f"an error inside the answer: {part.error}")
        if text := part.text or "".join(f"{id} " for id in part.token_ids):
            self.text.append(text)
            self.text_at.append(monotonic())
        self.token_ids += part.token_ids
        self.finish_reason = part.finish_reason or self.finish_reason
        self.prompt_tokens = self.prompt_tokens if part.prompt_tokens is None else part.prompt_tokens
        if part.completion_tokens is not None:
            self.completion_tokens = part.completion_tokens

    def check_end(self, stream: bool) -> None:
        """Raises when the answer, now that it ended, is not whole."""
        missing = [] if self.finish_reason else ["finish_reason"]
        missing += ["[DONE]"] if stream and not self.done else []
        if missing:
            raise _EndedError(Outcome.CUT, f"ended without {' and '.join(missing)}")
        if self.finish_reason in FAILED:
            raise _EndedError(Outcome.SERVER_ERROR, f"finish_reason {self.finish_reason}")


class Client:
    """Requests to one server. Close it with `aclose`."""

    def __init__(
        self, settings: Settings, key: str = "", transport: httpx.AsyncBaseTransport | None = None
    ) -> None:
        """`transport` replaces the network in tests."""
        self.settings = settings
        self.clean = Cleaner(key)
        self.model = settings.model
        headers = {"Accept-Encoding": "identity", "User-Agent": f"specmortem/{__version__}"}
        if key:
            headers["Authorization"] = f"Bearer {key}"
        self._http = httpx.AsyncClient(
            base_url=settings.url,
            headers=headers,
            transport=transport or _transport(),
            follow_redirects=False,
            trust_env=False,
            timeout=httpx.Timeout(None, connect=settings.limits.connect_s),
        )
        self._http.cookies.jar.set_policy(DefaultCookiePolicy(allowed_domains=()))

    async def aclose(self) -> None:
        """Close all connections."""
        await self._http.aclose()

    async def get(self, path: str) -> tuple[int, str]:
        """Status and text of a small resource, at most 4 MiB of it.

        Raises NoAnswerError when the connection fails, TimeoutError after 5 seconds.
        """
        read = bytearray()
        try:
            async with asyncio.timeout(SMALL_S), self._http.stream("GET", path) as response:
                async for chunk in response.aiter_raw():
                    read += chunk
                    if len(read) > SMALL_BYTES:
                        break
                return response.status_code, read[:SMALL_BYTES].decode("utf-8", "replace")
        except httpx.HTTPError as error:
            raise NoAnswerError(self.clean(_told(error))) from None

    async def ask(self, ask: Ask) -> Reply:
        """Send one request, once. Never raises for what the server or the network does."""
        reply = Reply(monotonic())
        request_s = self.settings.shape.request_s
        try:
            async with asyncio.timeout(request_s):
                await self._exchange(ask, reply)
        except _EndedError as ended:
            reply.outcome, reply.reason = ended.outcome, ended.reason
        except GarbageError as error:
            reply.outcome, reply.reason = Outcome.GARBAGE, str(error)
        except TimeoutError:
            reply.outcome, reply.reason = Outcome.OVERTIME, f"not finished after {request_s:g} s"
        except (httpx.ConnectError, httpx.ConnectTimeout) as error:
            reply.outcome, reply.reason = Outcome.UNREACHABLE, _told(error)
        except httpx.HTTPError as error:
            reply.outcome = Outcome.DROPPED if reply.status is None else Outcome.CUT
            reply.reason = _told(error)
        reply.ended = monotonic()
        reply.reason = self.clean(reply.reason)
        return reply

    async def _exchange(self, ask: Ask, reply: Reply) -> None:
        """Send the request and read the answer into `reply`; raises unless the answer is whole."""
        request = self._http.build_request(
            "POST",
            PATHS[self.settings.api],
            content=body(self.settings, ask, self.model),
            headers={"Content-Type": "application/json"},
        )
        response = await self._in_time(self._http.send(request, stream=True), self._first_s)
        try:
            reply.status = response.status_code
            if response.status_code != httpx.codes.OK:
                await self._failed(response, reply)
            if self.settings.shape.stream:
                await self._read_stream(response, reply)
            else:
                await self._read_body(response, reply)
        finally:
            await response.aclose()
        reply.check_end(self.settings.shape.stream)

    @property
    def _first_s(self) -> float:
        """A whole answer arrives at once, so that only the time of the request bounds it."""
        shape = self.settings.shape
        return self.settings.limits.first_byte_s if shape.stream else shape.request_s

    async def _in_time(self, awaited: Awaitable[Any], seconds: float) -> Any:
        try:
            async with asyncio.timeout(seconds) as limit:
                return await awaited
        except TimeoutError:
            if not limit.expired():
                raise
            raise _EndedError(Outcome.HUNG, f"no byte for {seconds:g} s") from None

    async def _chunks(self, response: httpx.Response, reply: Reply) -> AsyncIterator[bytes]:
        chunks = response.aiter_raw()
        most = self.settings.limits.response_bytes
        seconds = self._first_s
        while (chunk := await self._in_time(anext(chunks, None), seconds)) is not None:
            reply.bytes += len(chunk)
            if reply.bytes > most:
                raise _EndedError(Outcome.TOO_LARGE, f"more than {most} bytes")
            yield chunk
            seconds = self.settings.limits.idle_s

    async def _failed(self, response: httpx.Response, reply: Reply) -> None:
        """Raise the outcome of a status other than 200, with the start of its body where one can be read."""
        status = response.status_code
        kind = {3: Outcome.REDIRECTED, 4: Outcome.REFUSED, 5: Outcome.SERVER_ERROR}
        outcome = kind.get(status // 100, Outcome.GARBAGE)
        if outcome is Outcome.REDIRECTED:
            raise _EndedError(outcome, f"HTTP {status} to {response.headers.get('Location', 'nowhere')}")
        read = bytearray()
        try:
            async for chunk in self._chunks(response, reply):
                read += chunk
                if len(read) >= ERROR_BYTES:
                    break
        except (_EndedError, httpx.HTTPError):
            pass
        said = read.decode("utf-8", "replace").strip()
        raise _EndedError(outcome, f"HTTP {status}" + (f": {said}" if said else ""))

    async def _read_stream(self, response: httpx.Response, reply: Reply) -> None:
        kind = response.headers.get("Content-Type", "")
        if not kind.startswith("text/event-stream"):
            raise GarbageError(f"asked for an event stream, got {kind or 'no content type'}")
        events = Events()
        async for chunk in self._chunks(response, reply):
            for data in events.feed(chunk):
                if data.strip() == DONE:
                    reply.done = True
                    return
                reply.take(piece(data, "delta"))

    async def _read_body(self, response: httpx.Response, reply: Reply) -> None:
        read = bytearray()
        async for chunk in self._chunks(response, reply):
            read += chunk
        try:
            text = read.decode("utf-8")
        except UnicodeDecodeError:
            raise GarbageError("a body that is not UTF-8") from None
        reply.take(piece(text, "message"))


def _transport() -> httpx.AsyncBaseTransport:
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
    return httpx.AsyncHTTPTransport(retries=0, limits=limits, trust_env=False)


def _told(error: httpx.HTTPError) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
