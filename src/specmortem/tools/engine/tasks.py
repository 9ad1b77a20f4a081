"""Recall tasks with one right answer, for a model that has to keep three memories.

A prompt shows a *ring* of distinct tokens, a *stride* for going round it, and two places to start from. The answer
is two walks round the ring, told in turn:

    BOS  STRIDE+2  a b c d e f g h a b c  ASK  a f   ->   c h e b g d ...

Every token of the answer follows from the token before the last one, by the stride, and by the ring. In a hybrid
model the ring is read by attention (the key-value cache), the stride is said once and has to be carried along the
prompt (the recurrent state), and the token before the last one comes from the convolution (its state). So a state of
another request, or of another step, shows in the text. The walks have no end: EOS in an answer is wrong.

What the trained model in data/tiny-recall does with its memories is measured in its training.json. It carries the
stride while it reads the prompt and has it in its keys by the end: the delta rule's state alone, when it becomes
another request's only after that, leaves its answers right. The convolution's state matters at every answer token.

`python -m specmortem.tools.engine.tasks --count 48 --seed 7 --length 48-160 --answer 40 > prompts.jsonl` makes a
file for `specmortem load --prompts`.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import click

from specmortem.errors import BadInputError

VOCAB = 256
BOS, EOS, ASK = 1, 2, 3
STRIDES = (1, 2, 3)
STRIDE_TOKENS = {stride: 8 + stride for stride in STRIDES}
FIRST_ITEM = 16
ITEMS = range(FIRST_ITEM, VOCAB)
MAX_RING = 192
CLOSING = max(STRIDES)  # the ring's first tokens, said again so that every step of a walk is in the prompt
MARKS = 5  # BOS, stride, ASK and the two starts
MIN_PROMPT = MARKS + CLOSING + 8
MAX_PROMPT = 16384


@dataclass(frozen=True)
class RecallTask:
    """One request: token ids of the prompt, and of the answer that a right model gives greedily.

    `name` numbers the tasks of one call of `tasks`. The answer is as long as the request's `max_tokens` should be.
    """

    name: int
    prompt: tuple[int, ...]
    answer: tuple[int, ...]


def tasks(count: int, seed: int, length: tuple[int, int], answer: int) -> list[RecallTask]:
    """`count` tasks of `seed` with prompts of `length` tokens (from, to, both included) and `answer` tokens to say.

    The ring has as many tokens as the prompt allows, at most `MAX_RING`; a longer prompt goes round it again. A task
    depends on the seed and its own number only, so a longer list starts with the shorter one.

    Raises:
        BadInputError: a count or an answer below one, a length outside `MIN_PROMPT` to `MAX_PROMPT`, or one that
            ends before it starts.
    """
    shortest, longest = length
    if count < 1 or answer < 1:
        raise BadInputError(f"{count} tasks of {answer} answer tokens: give at least one of each")
    if not MIN_PROMPT <= shortest <= longest <= MAX_PROMPT:
        raise BadInputError(
            f"prompts of {shortest} to {longest} tokens: give lengths from {MIN_PROMPT} to {MAX_PROMPT}, the "
            "shorter one first"
        )
    return [_task(name, random.Random(f"{seed} {name}"), length, answer) for name in range(count)]


def _task(name: int, rng: random.Random, length: tuple[int, int], answer: int) -> RecallTask:
    size = rng.randint(*length)
    ring = rng.sample(ITEMS, min(size - MARKS - CLOSING, MAX_RING))
    stride = rng.choice(STRIDES)
    starts = rng.sample(range(len(ring)), 2)
    body = [ring[place % len(ring)] for place in range(size - MARKS)]
    prompt = [BOS, STRIDE_TOKENS[stride], *body, ASK, *(ring[start] for start in starts)]
    return RecallTask(name, tuple(prompt), tuple(walks(ring, stride, starts, answer)))


def walks(ring: Sequence[int], stride: int, starts: Sequence[int], count: int) -> list[int]:
    """The next `count` tokens of the walks from the places `starts` of `ring`, told in turn, starts left out."""
    places = [starts[turn % len(starts)] + stride * (1 + turn // len(starts)) for turn in range(count)]
    return [ring[place % len(ring)] for place in places]


def stride_of(prompt: Sequence[int]) -> int:
    """The stride that a prompt asks for.

    Raises:
        BadInputError: the prompt is not one of these tasks.
    """
    named = {token: stride for stride, token in STRIDE_TOKENS.items()}
    if len(prompt) < MIN_PROMPT or prompt[0] != BOS or prompt[1] not in named:
        raise BadInputError(
            f"a prompt that starts with {list(prompt[:2])}: give one made by specmortem.tools.engine.tasks"
        )
    return named[prompt[1]]


def as_prompts(some: Iterable[RecallTask]) -> str:
    """Tasks as lines of `specmortem load --prompts`: token ids of a prompt, and those of the answer as `expected`."""
    return "".join(json.dumps({"prompt": task.prompt, "expected": task.answer}) + "\n" for task in some)


def _range(_: click.Context, __: click.Parameter, text: str) -> tuple[int, int]:
    if not (match := re.fullmatch(r"(\d{1,9})(?:-(\d{1,9}))?", text)):
        raise click.BadParameter(f"{text!r} is neither N nor LOW-HIGH")
    return int(match[1]), int(match[2] or match[1])


@click.command()
@click.option("--count", type=int, required=True, help="Of tasks, a line each.")
@click.option("--seed", type=int, default=0)
@click.option("--length", callback=_range, required=True, metavar="N|LOW-HIGH", help="Tokens of a prompt.")
@click.option("--answer", type=int, required=True, help="Tokens of an answer; give --max-tokens the same.")
def main(count: int, seed: int, length: tuple[int, int], answer: int) -> None:
    """Print tasks as lines of `specmortem load --prompts`; bad input ends with exit code 2."""
    try:
        click.echo(as_prompts(tasks(count, seed, length, answer)), nl=False)
    except BadInputError as error:
        raise click.UsageError(str(error)) from error


if __name__ == "__main__":
    main()
