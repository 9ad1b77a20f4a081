"""What to send: the load shapes of the reports, the limits, and the plan that follows from both."""

from __future__ import annotations

import random
import shlex
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from operator import attrgetter
from pathlib import Path
from typing import Any

from specmortem.errors import BadInputError
from specmortem.tools.load.outcome import Ask
from specmortem.tools.load.prompts import LONGEST, TOKENS_PER_PAIR, Api, Prompt, PromptFile, generate
from specmortem.tools.load.text import printable

Range = tuple[int, int]
MOST_CONCURRENT = 1024


@dataclass(frozen=True)
class Shape:
    """Requests in rounds; a round ends before the next begins.

    `concurrency` holds one figure a round; `requests` are those of a round, 0 for one each of its concurrency. Lengths
    are tokens, drawn evenly from first to last. `shared_prompt` sends the same prompt in all requests.
    """

    name: str
    source: str
    concurrency: tuple[int, ...]
    prompt_tokens: Range
    max_tokens: Range
    temperature: float
    request_s: float
    requests: int = 0
    pause_s: float = 0.0
    stream: bool = False
    shared_prompt: bool = False

    def __post_init__(self) -> None:
        """Raises BadInputError for a figure that makes no sense."""
        if not self.concurrency or not all(1 <= c <= MOST_CONCURRENT for c in self.concurrency):
            raise BadInputError(f"--concurrency must be between 1 and {MOST_CONCURRENT}")
        for option, (low, high) in {"prompt": self.prompt_tokens, "max": self.max_tokens}.items():
            if not 1 <= low <= high:
                raise BadInputError(f"--{option}-tokens {low}-{high}: expected N or LOW-HIGH, from 1 up")
        if self.prompt_tokens[1] > (most := LONGEST * TOKENS_PER_PAIR):
            raise BadInputError(f"--prompt-tokens: at most {most} can be made")

    def in_round(self, concurrency: int) -> int:
        """Requests of a round."""
        return self.requests or concurrency


SHAPES: Mapping[str, Shape] = {
    shape.name: shape
    for shape in (
        # The script's comment says ~4000 tokens; its sentence of 20 words, 80 times, is nearer 2000.
        Shape(
            "long-rounds",
            "vllm#42603 (fix proposed for vllm#40756): 64 at once, 5 rounds",
            concurrency=(64,) * 5,
            prompt_tokens=(4000, 4000),
            max_tokens=(8192, 8192),
            temperature=0.9,
            request_s=600,
            pause_s=3,
        ),
        Shape(
            "short-ramp",
            "z-lab/dflash#146: crashes at 16 and 32 at once; its server takes 64",
            concurrency=(16, 32, 64),
            prompt_tokens=(48, 48),
            max_tokens=(512, 512),
            temperature=0.7,
            request_s=300,
            shared_prompt=True,
        ),
        Shape(
            "two-streams",
            "Minachist/Qwen3.8-Flash-Next-INT4-Mixed-AutoRound#2 (vllm#55951): loops at the 9th and 12th request; "
            "the fixed build was tried with 100",
            concurrency=(2,),
            requests=100,
            prompt_tokens=(6000, 45000),
            max_tokens=(400, 900),
            temperature=0.7,
            request_s=600,
            stream=True,
        ),
    )
}


@dataclass(frozen=True)
class Limits:
    """Hard limits. Seconds; bytes are those of one response."""

    requests: int = 2000
    run_s: float = 3600.0
    response_bytes: int = 8 * 1024 * 1024
    first_byte_s: float = 300.0
    idle_s: float = 60.0
    connect_s: float = 10.0


# Options with a value, and what of the settings it is.
OPTIONS: Mapping[str, str] = {
    "--url": "url",
    "--shape": "shape.name",
    "--model": "model",
    "--api": "api",
    "--seed": "seed",
    "--concurrency": "shape.concurrency",
    "--rounds": "shape.concurrency",
    "--requests": "shape.requests",
    "--prompt-tokens": "shape.prompt_tokens",
    "--max-tokens": "shape.max_tokens",
    "--temperature": "shape.temperature",
    "--warm-up": "warm_up",
    "--min-tokens": "min_tokens",
    "--pause": "shape.pause_s",
    "--metrics-every": "metrics_s",
    "--health-every": "health_s",
    "--request-timeout": "shape.request_s",
    "--first-byte-timeout": "limits.first_byte_s",
    "--idle-timeout": "limits.idle_s",
    "--connect-timeout": "limits.connect_s",
    "--max-requests": "limits.requests",
    "--max-time": "limits.run_s",
    "--max-bytes": "limits.response_bytes",
    "--prompts": "prompts",
}


@dataclass(frozen=True)
class Settings:
    """One run: where to, what, and how much at most.

    `url` is a root that `address.base_url` let pass with `allow_host`; prompts of a file, taken in turn, stand in place
    of made ones.
    """

    url: str
    shape: Shape
    model: str = ""
    api: Api = "chat"
    warm_up: int = 1
    seed: int = 0
    check: bool = False
    ignore_eos: bool = False
    min_tokens: int = 0
    metrics_s: float = 2.0
    health_s: float = 2.0
    limits: Limits = field(default_factory=Limits)
    prompts: PromptFile | None = None
    allow_host: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        """Raises BadInputError when options contradict each other."""
        if self.check and not self.warm_up:
            raise BadInputError("--check needs a warm-up, which tells whether the model can recall at all")
        if self.min_tokens > self.shape.max_tokens[0]:
            raise BadInputError("--min-tokens is more than --max-tokens allows")
        given = self.prompts.prompts if self.prompts else ()
        if self.api == "chat" and not all(isinstance(prompt.text, str) for prompt in given):
            raise BadInputError("--prompts with token ids need --api completions")
        if self.check and not all(prompt.expected for prompt in given):
            raise BadInputError("--check needs `expected` on every line of --prompts")

    @property
    def planned(self) -> int:
        """Requests that the warm-up and the rounds hold together, before the limit."""
        return self.warm_up + sum(map(self.shape.in_round, self.shape.concurrency))

    def rounds(self) -> Iterator[tuple[int, int, Iterator[Ask]]]:
        """(round, concurrency, its requests), the warm-up as round 0, up to the limit on their count."""
        left = self.limits.requests
        plan = [(1, self.warm_up), *((c, self.shape.in_round(c)) for c in self.shape.concurrency)]
        for number, (concurrency, count) in enumerate(plan):
            count = min(count, left)
            left -= count
            if count:
                yield number, concurrency, (self.ask(number, index) for index in range(count))

    def ask(self, number: int, index: int) -> Ask:
        """A request of a round; the same for the same seed."""
        name = f"{number}-{index:03d}"
        draw = random.Random(f"{self.seed}/{name}/lengths").random
        prompt_tokens = _between(self.shape.prompt_tokens, draw())
        max_tokens = _between(self.shape.max_tokens, draw())
        prompt = self._given(number, index) or generate(
            self.seed, "shared" if self.shape.shared_prompt else name, prompt_tokens, self.api
        )
        return Ask(name, number, prompt.text, prompt.expected, max_tokens)

    def _given(self, number: int, index: int) -> Prompt | None:
        """The prompt of the file, whose lines all rounds go through in turn; None without a file."""
        if self.prompts is None:
            return None
        before = [self.warm_up, *map(self.shape.in_round, self.shape.concurrency)][:number]
        turn = 0 if self.shape.shared_prompt else sum(before) + index
        return self.prompts.prompts[turn % len(self.prompts.prompts)]

    def as_dict(self) -> dict[str, Any]:
        """JSON form; of prompts in a file their number, and the file's name and hash."""
        made = asdict(replace(self, prompts=None))
        if self.prompts:
            made["prompts"] = {
                "name": printable(Path(self.prompts.path).name),
                "sha256": self.prompts.sha256,
                "count": len(self.prompts.prompts),
            }
        return made

    def command(self, clean: Callable[[str], str] = printable) -> str:
        """The command line that makes this run again, without --api-key-env, each value made fit to keep by `clean`.

        Of an absolute path of --prompts only the file's name is told: run it in that folder.
        """
        shape = self.shape
        values = {option: attrgetter(place)(self) for option, place in OPTIONS.items()} | {
            "--concurrency": ",".join(map(str, shape.concurrency)),
            "--rounds": len(shape.concurrency),
            "--prompt-tokens": "{}-{}".format(*shape.prompt_tokens),
            "--max-tokens": "{}-{}".format(*shape.max_tokens),
            "--prompts": _without_folders(self.prompts.path) if self.prompts else "",
        }
        pairs = [(name, value) for name, value in values.items() if value != ""]
        pairs += [("--allow-host", host) for host in self.allow_host]
        flags = ["--stream" if shape.stream else "--no-stream"]
        flags += ["--check"] * self.check + ["--ignore-eos"] * self.ignore_eos
        words = [word for name, value in pairs for word in (name, clean(str(value)))]
        return shlex.join(["specmortem", "load", *words, *flags])


def _without_folders(path: str) -> str:
    """A path as it was given, or its last part where it is absolute and so of this machine alone."""
    return Path(path).name if Path(path).is_absolute() else path


def _between(bounds: Range, at: float) -> int:
    return bounds[0] + int(at * (bounds[1] - bounds[0] + 1))
