"""What a tiny model knows: accuracy and margins on recall tasks, drafts accepted, and the memories it needs."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from specmortem.errors import BadInputError
from specmortem.tools.engine.tasks import RecallTask, stride_of, tasks
from specmortem.tools.engine.tiny_model import (
    Greedy,
    KeyValues,
    LinearState,
    State,
    TinyModel,
    greedy,
    in_type,
    speculate,
)

HELD_OUT = -1  # training draws no negative seeds
LENGTHS = (20, 60, 120, 200)
LONG = {1000: 8, 4000: 4, 8000: 2}  # tasks by prompt length
ANSWER = 64
DEPTH = 3


@dataclass(frozen=True)
class Recall:
    """How a model answered: tokens said and right, tasks without a wrong token, and logit margins of the tokens."""

    tasks: int
    exact: int
    tokens: int
    right: int
    least_margin: float
    first_percentile_margin: float

    @property
    def accuracy(self) -> float:
        """Share of tokens that are right."""
        return self.right / self.tokens


def recall(model: TinyModel, given: Sequence[RecallTask]) -> Recall:
    """Greedy answers to tasks of one prompt length and one answer length, compared with the right ones.

    Raises:
        BadInputError: the lengths differ, or no task is given.
    """
    prompts, answers = _tensors(model, given)
    return _compared(greedy(model, prompts, answers.shape[1]), answers)


def _compared(said: Greedy, answers: Tensor) -> Recall:
    right, margins = said.tokens == answers, said.margins
    low = float(torch.quantile(margins.flatten(), 0.01))
    exact = int(right.all(1).sum())
    return Recall(len(right), exact, right.numel(), int(right.sum()), float(margins.min()), low)


def _tensors(model: TinyModel, given: Sequence[RecallTask]) -> tuple[Tensor, Tensor]:
    if len({(len(task.prompt), len(task.answer)) for task in given}) != 1:
        raise BadInputError(
            "tasks of several lengths or none: give tasks with one prompt and one answer length"
        )
    device = model.lm_head.weight.device
    prompts = torch.tensor([task.prompt for task in given], device=device)
    return prompts, torch.tensor([task.answer for task in given], device=device)


@dataclass(frozen=True)
class RecallAcceptance:
    """Drafts proposed, steps by the number accepted in them, and requests whose text is not the greedy one."""

    proposed: int
    steps: dict[int, int]
    mismatches: int

    @property
    def rate(self) -> float:
        """Share of proposed drafts that were accepted."""
        return sum(count * steps for count, steps in self.steps.items()) / self.proposed


def acceptance(model: TinyModel, given: Sequence[RecallTask], depth: int = DEPTH) -> RecallAcceptance:
    """Answers by the model's own drafts, `depth` a step, one request after the other."""
    runs = [speculate(model, task.prompt, len(task.answer), depth) for task in given]
    prompts, answers = _tensors(model, given)
    plain = greedy(model, prompts, answers.shape[1]).tokens.tolist()
    wrong = sum(run.tokens != tokens for run, tokens in zip(runs, plain, strict=True))
    steps = Counter(count for run in runs for count in run.counts)
    return RecallAcceptance(depth * sum(len(run.counts) for run in runs), dict(sorted(steps.items())), wrong)


def rolled(state: State) -> State:
    """The states of a batch, each given to the next request."""
    layers = (type(layer)(*(part.roll(1, 0) for part in layer)) for layer in state.layers)
    return State(tuple(layers), state.tokens)


RECURRENT = LinearState._fields
Change = Callable[[State, State], State]  # of the state before the next token, and of that one token earlier
CHANGES: dict[str, Change] = {
    "none": lambda now, _: now,
    "recurrent state of another request": lambda now, _: now.with_parts(rolled(now), RECURRENT),
    "only its delta-rule part": lambda now, _: now.with_parts(rolled(now), ["ssm"]),
    "only its convolution part": lambda now, _: now.with_parts(rolled(now), ["conv"]),
    "recurrent state one token old": lambda now, before: now.with_parts(before, RECURRENT),
    "keys and values of another request": lambda now, _: now.with_parts(rolled(now), KeyValues._fields),
}


@torch.no_grad()
def after_change(model: TinyModel, given: Sequence[RecallTask], at: int, change: Change) -> Recall:
    """How answers go on when the state is changed after `at` of their tokens, or `-at` tokens before their prompts end.

    Only what follows the change is counted; what went before is the right text.

    Raises:
        BadInputError: `at` is in neither the answer nor the prompt, or the tasks differ in length.
    """
    prompts, answers = _tensors(model, given)
    said, cut = max(at, 0), prompts.shape[1] + at
    if not 2 < cut < prompts.shape[1] + answers.shape[1]:
        raise BadInputError(
            f"a change after {at} tokens: give {3 - prompts.shape[1]} to {answers.shape[1] - 1} for these tasks"
        )
    known = torch.cat([prompts, answers[:, :said]], 1)
    _, before = model(known[:, : cut - 2])
    _, now = model(known[:, cut - 2 : cut - 1], before)
    after = greedy(model, known[:, cut - 1 :], answers.shape[1] - said, change(now, before))
    return _compared(after, answers[:, said:])


def alternating(count: int, seed: int, length: int, answer: int) -> list[RecallTask]:
    """`count` tasks, at least two, in which each asks for another stride than the ones beside it, ends included."""
    chosen: list[RecallTask] = []
    for task in tasks(40 * count, seed, (length, length), answer):
        beside = chosen[-1:] + (chosen[:1] if len(chosen) == count - 1 else [])
        if len(chosen) < count and stride_of(task.prompt) not in [stride_of(one.prompt) for one in beside]:
            chosen.append(task)
    return chosen


def measure(model: TinyModel, count: int = 64) -> dict[str, Any]:
    """Held-out recall by prompt length in three precisions, drafts accepted, and what a wrong state does.

    bfloat16 rounds weights and activations; `bfloat16 state` also the recurrent state after every token, which is
    what an engine does unless `mamba_ssm_cache_dtype` says float32.
    """
    halved = in_type(copy.deepcopy(model), torch.bfloat16)
    rounded = copy.deepcopy(halved)
    rounded.keep_state_in(torch.bfloat16)
    models = {"float32": model, "bfloat16": halved, "bfloat16 state": rounded}
    prompts: dict[int, Any] = {}
    for length in LENGTHS:
        given = tasks(count, HELD_OUT, (length, length), ANSWER)
        drafts = acceptance(model, given[: max(1, count // 8)])
        prompts[length] = {name: _row(recall(one, given)) for name, one in models.items()} | {
            "drafts_proposed": drafts.proposed,
            "drafts_accepted": round(drafts.rate, 4),
            "steps_by_accepted": drafts.steps,
        }
    for length, few in LONG.items():
        found = recall(model, tasks(few, HELD_OUT, (length, length), ANSWER))
        prompts[length] = {"float32": _row(found)}
    report: dict[str, Any] = {"answer_tokens": ANSWER, "draft_depth": DEPTH, "prompts": prompts}
    others = alternating(count, HELD_OUT, LENGTHS[1], ANSWER)
    for when, at in {"in the answer": ANSWER // 4, "in the prompt": -LENGTHS[1] // 2}.items():
        after = {name: after_change(model, others, at, change) for name, change in CHANGES.items()}
        report[f"after a change {when}"] = {
            name: {"token_accuracy": round(one.accuracy, 4), "exact_tasks": one.exact, "tasks": one.tasks}
            for name, one in after.items()
        }
    return report


def _row(result: Recall) -> dict[str, float]:
    return {
        "tasks": result.tasks,
        "exact_tasks": result.exact,
        "token_accuracy": round(result.accuracy, 5),
        "least_margin": round(result.least_margin, 3),
        "first_percentile_margin": round(result.first_percentile_margin, 3),
    }
