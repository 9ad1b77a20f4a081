"""A pipeline of ranks in one process: deterministic, any number of ranks.

Each step the scheduler makes a batch, every rank runs it in turn, and the last one samples. The sampled tokens reach
the scheduler and the ranks before the last pp_size steps later.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Self

import torch

from specmortem.device import Device
from specmortem.errors import BadInputError
from specmortem.incidents.pp_align_copy.engine.scheduler import (
    Batch,
    BatchRow,
    Drafter,
    EngineConfig,
    Request,
    Sampled,
    Scheduler,
    no_drafts,
)
from specmortem.incidents.pp_align_copy.engine.worker import Copied, Copies, Model, Worker
from specmortem.incidents.pp_align_copy.kernels import AFTER, Guards

# Tokens of each row from what the last rank gives; an empty list where the row needs none.
Sampler = Callable[[Batch, torch.Tensor | None], list[list[int]]]


class DecidedAcceptance:
    """Tokens that mean nothing: one, and one for each draft up to the first that the next decision refuses."""

    def __init__(self, decisions: Iterator[bool]) -> None:
        self.decisions = decisions

    def __call__(self, batch: Batch, hidden: torch.Tensor | None) -> list[list[int]]:
        """One token, and one for each accepted draft."""
        return [self._row(row) if row.samples else [] for row in batch.rows]

    def _row(self, row: BatchRow) -> list[int]:
        count = 1
        while row.decode and count < row.num_tokens and next(self.decisions):
            count += 1
        return [0] * count


class RandomAcceptance(DecidedAcceptance):
    """Each draft is accepted with probability `rate`, by a seeded coin."""

    def __init__(self, seed: int, rate: float = 0.6) -> None:
        coin = random.Random(seed)
        super().__init__(coin.random() < rate for _ in itertools.count())


class Pipeline:
    """Ranks, a scheduler and a sampler; the ranks that have a model run: all of them where models pass anything on."""

    def __init__(
        self,
        device: Device,
        config: EngineConfig,
        requests: Sequence[Request],
        *,
        subject: str,
        models: Mapping[int, Model],
        sampler: Sampler,
        drafter: Drafter = no_drafts,
        copies: Copies = "plain",
        guards: Guards = AFTER,
    ) -> None:
        self.config, self.sampler, self.steps = config, sampler, 0
        self.scheduler = Scheduler(config, requests, drafter)
        self.workers = [
            Worker(device, config, model, subject, rank=rank, copies=copies, guards=guards)
            for rank, model in models.items()
        ]

    def step(self) -> Batch:
        """One step of the whole pipeline."""
        batch, hidden = self.scheduler.schedule(), None
        for worker in self.workers:
            worker.begin(batch)
            if batch.rows:
                hidden = self._forward(worker, batch, hidden)
        sampled = self._sampled(batch, hidden)
        for worker in self.workers:
            worker.finish(batch, sampled)
        self.scheduler.record(batch, sampled)
        self.steps += 1
        return batch

    def _forward(self, worker: Worker, batch: Batch, hidden: torch.Tensor | None) -> torch.Tensor | None:
        return worker.forward(batch, hidden)

    def _sampled(self, batch: Batch, hidden: torch.Tensor | None) -> Sampled:
        """Where the tokens of each row will be."""
        tokens = self.sampler(batch, hidden)
        return lambda: tokens

    def run(self, max_steps: int = 2000) -> Self:
        """Steps until no request is left. Raises BadInputError when `max_steps` do not do."""
        while not self.scheduler.done:
            if self.steps >= max_steps:
                raise BadInputError(f"the workload is not done after {max_steps} steps; raise max_steps")
            self.step()
        return self

    @property
    def copied(self) -> list[Copied]:
        """Copies of all ranks, in order."""
        copied = [copied for worker in self.workers for copied in worker.copied]
        return sorted(copied, key=lambda c: (c.step, c.when == "pre", c.rank))

    @property
    def wrong(self) -> list[Copied]:
        """Copies that touched a block of somebody else or of nobody."""
        return [copied for copied in self.copied if copied.damage is not None]

    @property
    def missed(self) -> int:
        """How many wanted copies were not made."""
        return sum(worker.missed for worker in self.workers)
