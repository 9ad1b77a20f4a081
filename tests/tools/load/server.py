"""An OpenAI-compatible server of its own process that misbehaves on cue: `python server.py CUES`.

CUES is JSON: `requests` maps the number of a completion request, in the order of arrival, to a behaviour below;
`default` is that of all others; `metrics`, `health` and `die_after` are told where they are read. The first line on
standard output is the port. `/seen` tells what arrived.
"""

import asyncio
import json
import os
import random
import re
import sys

CUES = json.loads(sys.argv[1])
SEEN = {"posts": [], "headers": [], "bodies": [], "health": 0, "scrapes": 0, "other": []}
WORDS = [
    a + b for a in ("ba", "ce", "di", "fo", "gu", "ha", "je", "ki") for b in ("l", "m", "n", "r", "st", "x")
]
SSE = {"Content-Type": "text/event-stream"}
JSON = {"Content-Type": "application/json"}


class Exchange:
    """One request and its answer."""

    def __init__(self, number, headers, data, writer):
        self.number, self.headers, self.data, self.writer = number, headers, data, writer
        self.stream = data.get("stream", False)

    async def head(self, status, headers):
        lines = [f"HTTP/1.1 {status} X", *(f"{k}: {v}" for k, v in headers.items()), "Connection: close"]
        await self.raw("\r\n".join(lines).encode("latin-1") + b"\r\n\r\n")

    async def raw(self, data):
        self.writer.write(data)
        await self.writer.drain()

    async def whole(self, status, body, headers=JSON):
        body = body if isinstance(body, bytes) else body.encode()
        await self.head(status, {**headers, "Content-Length": len(body)})
        await self.raw(body)

    async def begin(self, headers=SSE):
        await self.head(200, {**headers, "Transfer-Encoding": "chunked"})

    async def chunk(self, data):
        data = data if isinstance(data, bytes) else data.encode()
        await self.raw(b"%x\r\n%s\r\n" % (len(data), data))

    async def event(self, data):
        await self.chunk(f"data: {data if isinstance(data, str) else json.dumps(data)}\n\n")

    async def text(self, text, finish=None):
        choice = {"index": 0, "finish_reason": finish}
        choice |= {"delta": {"content": text}} if "messages" in self.data else {"text": text}
        await self.event({"choices": [choice]})

    async def end(self):
        await self.chunk(b"")

    @property
    def key(self):
        return key_of(self.headers)

    def recalled(self):
        prompt = self.data.get("prompt") or self.data["messages"][0]["content"]
        key = (re.search(r"the key (\S+) first", prompt) or re.search(r"(\S+):$", prompt))[1]
        return re.search(rf"^{re.escape(key)}: (\S+)$", prompt, re.MULTILINE)[1]

    def story(self, tokens):
        if isinstance(self.data.get("prompt"), list):
            return [self.data["prompt"][-1 - i % len(self.data["prompt"])] for i in range(tokens)]
        rng = random.Random(self.number)
        return [self.recalled(), *(rng.choice(WORDS) for _ in range(tokens - 1))]

    async def answer(self, words, *, finish="length", tokens=None, pause=0.0, sep=" ", usage=True):
        """A whole answer in the form that was asked for."""
        if isinstance(self.data.get("prompt"), list):
            return await self.answer_ids(words, finish)
        counted = {
            "usage": {"prompt_tokens": 7, "completion_tokens": len(words) if tokens is None else tokens}
        }
        if not self.stream:
            text = sep.join(words)
            choice = {"finish_reason": finish}
            choice |= {"message": {"content": text}} if "messages" in self.data else {"text": text}
            await asyncio.sleep(pause)
            return await self.whole(200, json.dumps({"choices": [choice], **(counted if usage else {})}))
        await self.begin()
        await self.chunk(": a comment\n\n")
        for word in words:
            await self.text(word + sep)
            await asyncio.sleep(pause)
        await self.text("", finish)
        if usage:
            await self.event({"choices": [], **counted})
        await self.event("[DONE]")
        return await self.end()

    async def answer_ids(self, ids, finish):
        """An answer of token ids without a text."""
        counted = {"usage": {"prompt_tokens": 7, "completion_tokens": len(ids)}}
        choice = {"text": "", "token_ids": ids, "finish_reason": finish}
        if not self.stream:
            return await self.whole(200, json.dumps({"choices": [choice], **counted}))
        await self.begin()
        for i in range(0, len(ids), 3):
            await self.event({"choices": [{**choice, "token_ids": ids[i : i + 3], "finish_reason": None}]})
        await self.event({"choices": [{**choice, "token_ids": []}]})
        await self.event({"choices": [], **counted})
        await self.event("[DONE]")
        return await self.end()


async def ok(x):
    await x.answer(x.story(min(x.data["max_tokens"], 100)))


async def no_usage(x):
    await x.answer(x.story(20), usage=False)


async def slow(x):
    await x.answer(x.story(8), pause=0.02)


async def wait_for_scrapes(x):
    while SEEN["scrapes"] < 12:
        await asyncio.sleep(0.01)
    await ok(x)


async def status(x, code, body="it went wrong"):
    await x.whole(code, body)


async def echo_key(x):
    await x.whole(500, f"you sent {x.headers.get('authorization')}")


async def line_with_key(x):
    """The key from the 76th character of a line that is no field."""
    await x.begin()
    await x.chunk("<" * 75 + x.key + "\n\n")
    await x.end()


async def loop_with_key(x):
    """The key from the 56th character of the unit."""
    await x.answer(["".join(WORDS)[:55] + x.key] * 10, sep="")


async def long_loop_of_key(x):
    """So long that the last 16,384 characters begin within the key."""
    await x.answer([x.key] * 2000)


async def half_a_key(x):
    """Close within the key."""
    await x.begin()
    await x.text(f"you sent {x.key[:-3]}")


async def redirect(x):
    await x.head(307, {"Location": CUES["elsewhere"], "Content-Length": 0})


async def drop(x):
    """Close without a word."""


async def no_done(x):
    await x.begin()
    await x.text("some words", "stop")
    await x.end()


async def no_finish(x):
    if not x.stream:
        await x.whole(200, json.dumps({"choices": [{"message": {"content": "hm"}, "finish_reason": None}]}))
        return
    await x.begin()
    await x.text("some words")
    await x.event("[DONE]")
    await x.end()


async def half(x):
    """Close in the middle of a chunk, or of a body."""
    if not x.stream:
        await x.head(200, {**JSON, "Content-Length": 1000})
        await x.raw(b'{"choices": [')
        return
    await x.begin()
    await x.text("some words")
    await x.raw(b"ff\r\ndata: {")


async def hang(x):
    await asyncio.Event().wait()


async def hang_midway(x):
    await x.begin()
    await x.text("some words")
    await asyncio.Event().wait()


async def drip(x):
    """Never silent, never done."""
    await x.begin()
    while True:
        await x.chunk(": still here\n\n")
        await asyncio.sleep(0.05)


async def huge(x):
    await x.begin()
    while True:
        await x.text("many words " * 50)


async def huge_line(x):
    await x.begin()
    while True:
        await x.chunk("data: " + "x" * 4000)


async def loop(x):
    await x.answer(x.story(30) + ["Mo"] + ["duct"] * 60, sep="")


async def early(x):
    await x.answer(x.story(3), finish="stop")


async def empty(x):
    await x.answer([], finish="stop")


async def repetition(x):
    await x.answer(x.story(50), finish="repetition")


async def wrong(x):
    await x.answer([9, *x.story(60)[1:]] if x.data.get("prompt") else ["nonsense", *x.story(60)[1:]])


async def escapes(x):
    await x.whole(500, "\x1b[31mred\x1b]0;title\x07 \u202ebidi \x9b2J <script>alert(1)</script>")


async def escapes_in_text(x):
    await x.answer(["\x1b[2J<img src=x onerror=alert(1)>", *x.story(60), "\ud800"], finish="\x1b[31m")


async def error_event(x):
    await x.begin()
    await x.text("some words")
    await x.event({"error": {"message": "EngineCore encountered an issue", "code": 500}})
    await x.event("[DONE]")
    await x.end()


async def garbage(x):
    await x.begin()
    await x.event("{not json")
    await x.end()


async def garbage_line(x):
    await x.begin()
    await x.chunk("<html>oops</html>\n\n")
    await x.end()


async def not_utf8(x):
    await x.begin()
    await x.chunk(b"data: \xff\xfe\n\n")
    await x.end()


async def deep(x):
    await x.begin()
    await x.event("[" * 100_000)
    await x.end()


async def not_a_stream(x):
    await x.whole(200, json.dumps({"choices": []}))


async def die(x):
    if x.stream:
        await x.begin()
        await x.text("some words")
    os._exit(1)


async def engine_dead(x):
    CUES["health"] = 503
    await x.whole(500, json.dumps({"error": "EngineDeadError"}))


NAMES = {name: made for name, made in globals().items() if asyncio.iscoroutinefunction(made)}


async def behave(name, x):
    if name.isdigit():
        await status(x, int(name))
    else:
        await NAMES[name](x)


def metrics():
    """200 drafts of 3 tokens a scrape. `collapse`: 60 %, then 10 % after 8 scrapes; `restart`: from 0 after 6."""
    kind, n = CUES.get("metrics"), SEEN["scrapes"]
    SEEN["scrapes"] += 1
    since = n - 6 if kind == "restart" and n >= 6 else n
    low = max(0, n - 8) if kind == "collapse" else n if kind == "nothing" else 0
    accepted = 360 * (since - low) + (60 * low if kind == "collapse" else 0)
    label = 'engine="0",model_name="a \\"b\\" {c}"'
    rows = [("drafts", 200 * since), ("draft_tokens", 600 * since), ("accepted_tokens", accepted)]
    lines = [f"vllm:spec_decode_num_{name}_total{{{label}}} {float(value)}" for name, value in rows]
    lines += [
        f'vllm:spec_decode_num_accepted_tokens_per_pos_total{{{label},position="{p}"}} {accepted / 3}'
        for p in range(3)
    ]
    lines += [f"vllm:spec_decode_num_drafts_created{{{label}}} 1.7e9", "python_info 1.0"]
    return "# HELP x y\n" + "\n".join(lines) + "\n"


def key_of(headers):
    return headers.get("authorization", "").removeprefix("Bearer ")


async def serve(reader, writer):
    try:
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
        request, *lines = head.strip().split("\r\n")
        method, path, _ = request.split(" ")
        headers = {k.lower(): v.strip() for k, _, v in (line.partition(":") for line in lines)}
        data = await reader.readexactly(int(headers.get("content-length", 0)))
        await reply(method, path, headers, data, writer)
    except (ConnectionError, asyncio.IncompleteReadError):
        pass
    finally:
        writer.close()


async def reply(method, path, headers, data, writer):
    x = Exchange(len(SEEN["posts"]), headers, json.loads(data) if data else {}, writer)
    if path == "/seen":
        await x.whole(200, json.dumps(SEEN))
    elif path == "/health":
        SEEN["health"] += 1
        await x.whole(CUES.get("health", 200), "")
    elif path == "/metrics" and CUES.get("metrics"):
        await x.whole(200, metrics(), {"Content-Type": "text/plain"})
    elif path == "/v1/models":
        model = CUES.get("model", "toy").replace("{key}", x.key)
        await x.whole(200, json.dumps({"data": [{"id": model}]}))
    elif method == "POST" and path in ("/v1/chat/completions", "/v1/completions"):
        SEEN["posts"].append(path)
        SEEN["headers"].append(headers)
        SEEN["bodies"].append(x.data)
        await behave(CUES.get("requests", {}).get(str(x.number), CUES.get("default", "ok")), x)
    else:
        SEEN["other"].append(path)
        await x.whole(404, "no such thing")


async def main():
    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(main())
