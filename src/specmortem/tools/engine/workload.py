"""What is sent to an engine, and before which of its steps: the load shapes of the reports, scaled to a tiny model.

A workload is made of rounds; a round begins when all requests of the one before have ended. Within a round time is
counted in engine steps: request i comes before step i * `every`, at most `concurrency` are in flight, and one that
is to be aborted is so a given number of steps after it was sent. The same seed gives the same plan.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from specmortem.convert import Value
from specmortem.errors import BadInputError

Number = int | float
Range = tuple[int, int]
Tokens = tuple[int, ...]
Answers = Mapping[str, Tokens | None]
Prompt = tuple[Tokens, Tokens | None]  # and the answer that a right model gives, where it is known
MOST_IN_FLIGHT = 1024
NO_DELAY = (0.0, 0.0)
TOLD = ("temperature", "ignore_eos", "gpu_delay_us", "gpu_delay_steps", "draft_delay_us")  # to the child
WARM_REQUESTS, WARM_PROMPT = 4, 256  # of requests before the first run
FIRST_PLAIN_TOKEN = 3  # above padding, BOS and EOS


class Workload(Value, frozen=True):
    """Requests in rounds; `source` is the report that the shape comes from.

    `concurrency` holds one figure a round; `requests` are those of a round, 0 for one each of its concurrency. Ranges
    are drawn from evenly, both ends included: tokens of prompts and answers, steps from sending to abort, and idle GPU
    work in place of a larger model's forward. `gpu_delay_us` and `gpu_delay_steps` put it in front of each step, in
    microseconds or in shares of the time that a step takes without it; what waits for the GPU while a step is
    prepared drains it. `draft_delay_us` puts it in front of each draft pass, also of the first one of a step.
    `prompt_lengths`, where given, are those of the requests of a round, round by round, from the start again where
    they end.
    """

    name: str
    source: str
    concurrency: tuple[int, ...]
    prompt_tokens: Range
    max_tokens: Range
    requests: int = 0
    every: int = 0
    abort_share: Number = 0.0
    abort_after: Range = (1, 1)
    shared_prompt: bool = False
    temperature: Number = 0.0
    ignore_eos: bool = False
    gpu_delay_us: tuple[Number, Number] = NO_DELAY
    gpu_delay_steps: tuple[Number, Number] = NO_DELAY
    prompt_lengths: tuple[Tokens, ...] = ()
    draft_delay_us: tuple[Number, Number] = NO_DELAY

    def __post_init__(self) -> None:
        """Raises BadInputError for a figure that makes no sense."""
        if not self.concurrency or not all(1 <= c <= MOST_IN_FLIGHT for c in self.concurrency):
            raise BadInputError(f"workload {self.name}: concurrency must lie between 1 and {MOST_IN_FLIGHT}")
        for name in ("prompt_tokens", "max_tokens", "abort_after"):
            self._check_range(name, least=1)
        for name in ("gpu_delay_us", "gpu_delay_steps", "draft_delay_us"):
            self._check_range(name, least=0)
        if self.gpu_delay_us[1] and self.gpu_delay_steps[1]:
            raise BadInputError(f"workload {self.name}: give gpu_delay_us or gpu_delay_steps, not both")
        if not 0 <= self.abort_share <= 1 or self.temperature < 0 or min(self.requests, self.every) < 0:
            raise BadInputError(
                f"workload {self.name}: abort_share lies in 0 to 1, and temperature, requests and every from 0 up"
            )
        if any(not lengths or min(lengths) < 1 for lengths in self.prompt_lengths):
            raise BadInputError(f"workload {self.name}: prompt_lengths are lists of lengths from 1 up")

    def _check_range(self, name: str, least: int) -> None:
        low, high = getattr(self, name)
        if not least <= low <= high:
            raise BadInputError(
                f"workload {self.name}: {name} {low} to {high}; expected two numbers from {least} up"
            )

    @property
    def longest(self) -> int:
        """Tokens that a request can have at most, prompt and answer together."""
        lengths = [length for part in self.prompt_lengths for length in part] or [self.prompt_tokens[1]]
        return max(lengths) + self.max_tokens[1]

    def in_round(self, number: int) -> int:
        """Requests of a round."""
        if self.prompt_lengths:
            return len(self.prompt_lengths[number % len(self.prompt_lengths)])
        return self.requests or self.concurrency[number]

    @property
    def total(self) -> int:
        """Requests of a run."""
        return sum(self.in_round(number) for number in range(len(self.concurrency)))

    def as_dict(self) -> dict[str, Any]:
        """JSON form; without `draft_delay_us` where it is 0, as in results that are older than it."""
        made = _listed(self)
        if self.draft_delay_us == NO_DELAY:
            del made["draft_delay_us"]
        return made

    @classmethod
    def from_dict(cls, data: Mapping[str, Any], source: str = "workload") -> Workload:
        """From a table whose `shape`, where given, names one of `SHAPES` to start from.

        Raises BadInputError for a field that is not one, or of the wrong kind.
        """
        given = {name: value for name, value in data.items() if name != "shape"}
        if unknown := sorted(set(given) - set(cls.__struct_fields__)):
            known = ", ".join(sorted(cls.__struct_fields__))
            raise BadInputError(f"{source}: no field {unknown[0]!r}; known: {known}")
        shape = data.get("shape")
        if isinstance(shape, str) and shape not in SHAPES:
            raise BadInputError(f"{source}: no shape {shape!r}; known: {', '.join(SHAPES)}")
        try:
            start = SHAPES[shape].as_dict() if shape is not None else {}
            return msgspec.convert({**start, **given}, cls)
        except (TypeError, msgspec.ValidationError) as error:
            if isinstance(error.__cause__, BadInputError):
                raise error.__cause__ from None
            raise BadInputError(f"{source} {data.get('name', '')}: {_wrong_kind(error, given)}") from error


def _listed(workload: Workload) -> dict[str, Any]:
    """All fields, as JSON has them."""
    made: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(workload))
    return made


def _wrong_kind(error: Exception, given: Mapping[str, Any]) -> str:
    """What is wrong with a table that msgspec or Python refuses."""
    message = str(error)
    if (found := re.search(r" - at `\$\.(\w+)", message)) is None:
        return message
    if message.startswith("Expected `int`,") and f"{found[0]}[" in message:
        return "counts of requests, tokens and steps are whole numbers"
    return f"{found[1]} = {given[found[1]]!r} is of the wrong kind"


SHAPES: Mapping[str, Workload] = {
    shape.name: shape
    for shape in (
        Workload(
            "long-rounds",
            "vllm#42603 (for vllm#40756): 64 at once, 5 rounds, prompts of about 4,000 tokens",
            concurrency=(64,) * 5,
            prompt_tokens=(768, 1024),
            max_tokens=(64, 128),
        ),
        Workload(
            "short-ramp",
            "z-lab/dflash#146: one short prompt, 16, 32 and 64 at once; crashed with 117 to 574 computed tokens",
            concurrency=(16, 32, 64),
            prompt_tokens=(48, 48),
            max_tokens=(96, 160),
            shared_prompt=True,
        ),
        Workload(
            "two-streams",
            "vllm#55951: two long mixed streams, one mostly in prefill while the other decodes; wrong from the 9th "
            "request on, tried with 100",
            concurrency=(2,),
            requests=100,
            prompt_tokens=(256, 2048),
            max_tokens=(24, 64),
        ),
        Workload(
            "churn",
            "vllm#45100: requests that leave while others take their rows and change from prefill to drafts",
            concurrency=(24,),
            requests=192,
            prompt_tokens=(32, 512),
            max_tokens=(12, 48),
            every=1,
            abort_share=0.25,
            abort_after=(3, 20),
        ),
        Workload(
            "bursts",
            "vllm#40756: 4 to 32 requests of 4,000 to 12,000 tokens whose prompts end in one step",
            concurrency=(4, 8, 16, 32),
            prompt_tokens=(4000, 12000),
            max_tokens=(8, 8),
            ignore_eos=True,
        ),
    )
}


@dataclass(frozen=True)
class RecallPrompts:
    """Prompts of a model that has tasks with known answers; `make` is `tasks.tasks` or a function like it.

    `make(count, seed, length, answer)` gives objects with `prompt` and `answer`.
    """

    make: Callable[[int, int, Range, int], Sequence[Any]]

    def prompts(self, count: int, seed: int, length: Range, answer: int) -> list[Prompt]:
        """Prompts with the tokens that a right model says."""
        return [(tuple(task.prompt), tuple(task.answer)) for task in self.make(count, seed, length, answer)]


@dataclass(frozen=True)
class RandomTokens:
    """Prompts of a model with random weights: any of `vocab` token ids, and nothing that would be right."""

    vocab: int

    def prompts(self, count: int, seed: int, length: Range, answer: int) -> list[Prompt]:
        """Prompts without an answer."""
        draw = random.Random(f"{seed}/prompts")
        sizes = [draw.randint(*length) for _ in range(count)]
        return [
            (tuple(draw.randrange(FIRST_PLAIN_TOKEN, self.vocab) for _ in range(size)), None)
            for size in sizes
        ]


Source = RecallPrompts | RandomTokens


def plan(workload: Workload, source: Source, seed: int, number: int) -> tuple[dict[str, Any], Answers]:
    """What the child is told of run `number`, and the right answers by request, cut to what is asked for."""
    rounds, answers = [], {}
    for index, concurrency in enumerate(workload.concurrency):
        requests = _round(workload, source, f"{seed}/{number}/{index}", index)
        for request in requests:
            answers[request["id"]] = request.pop("answer")
        rounds.append({"concurrency": concurrency, "requests": requests})
    fields = _listed(workload)
    told = {
        "run": number,
        "seed": _number(f"{seed}/{number}/delays"),
        **{name: fields[name] for name in TOLD},
        "rounds": rounds,
    }
    return told, answers


def warm_up(told: Mapping[str, Any]) -> dict[str, Any]:
    """Requests to send before the first run, from its plan: other prompts of the same kind.

    One comes a step, so that prompts meet drafts. They show nothing and are not counted.
    """
    requests = [
        {
            **request,
            "id": f"warm-{place:03d}",
            "at": place,
            "prompt": request["prompt"][: -WARM_PROMPT - 1 : -1],
            "abort_after": None,
        }
        for place, request in enumerate(told["rounds"][0]["requests"][:WARM_REQUESTS])
    ]
    rounds = [{"concurrency": len(requests), "requests": requests}]
    return {**told, "run": None, "ignore_eos": True, "rounds": rounds}


def _round(workload: Workload, source: Source, seed: str, index: int) -> list[dict[str, Any]]:
    draw, count = random.Random(seed), workload.in_round(index)
    prompts = _prompts(workload, source, _number(seed), index, count)
    made = []
    for place, (prompt, answer) in enumerate(prompts):
        most, aborted = draw.randint(*workload.max_tokens), draw.random() < workload.abort_share
        made.append(
            {
                "id": f"{index}-{place:03d}",
                "at": place * workload.every,
                "prompt": list(prompt),
                "max_tokens": most,
                "seed": draw.randrange(1 << 31),
                "abort_after": draw.randint(*workload.abort_after) if aborted else None,
                "answer": answer[:most] if answer is not None else None,
            }
        )
    return made


def _prompts(workload: Workload, source: Source, seed: int, index: int, count: int) -> list[Prompt]:
    most = workload.max_tokens[1]
    if workload.prompt_lengths:
        lengths = workload.prompt_lengths[index % len(workload.prompt_lengths)]
        return [source.prompts(1, seed + i, (n, n), most)[0] for i, n in enumerate(lengths)]
    if workload.shared_prompt:
        return source.prompts(1, seed, workload.prompt_tokens, most) * count
    return source.prompts(count, seed, workload.prompt_tokens, most)


def _number(text: str) -> int:
    return random.Random(text).randrange(1 << 31)
