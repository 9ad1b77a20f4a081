"""The scheduler of a pipeline: which requests run at step t, given the outputs of steps up to t - pp_size.

A decode needs the token sampled before it, and that comes back pp_size steps later: it is eligible again at
t + pp_size. A prefill chunk needs none, so one request may be prefilled on consecutive steps. Between two decodes of a
request other batches run, and each of them re-gathers the batch's tables.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from specmortem.errors import BadInputError
from specmortem.incidents.pp_align_copy.engine.block_tables import BlockPool

Drafter = Callable[[int, Sequence[int]], list[int]]
Sampled = Callable[[], Sequence[Sequence[int]]]


@dataclass(frozen=True)
class EngineConfig:
    """Sizes of a small engine; blocks are in tokens, `conv_width` is the kernel width of the convolution."""

    pp_size: int = 2
    num_speculative_tokens: int = 2
    block_size: int = 8
    max_num_seqs: int = 4
    max_num_batched_tokens: int = 16
    num_blocks: int = 64
    max_model_len: int = 96
    conv_width: int = 4

    def __post_init__(self) -> None:
        """Refuse sizes that no engine can have."""
        for name in ("pp_size", "block_size", "max_num_seqs", "conv_width"):
            if getattr(self, name) < 1:
                raise BadInputError(f"{name} is {getattr(self, name)}; give at least 1")
        if self.max_num_batched_tokens < 1 + self.num_speculative_tokens:
            raise BadInputError("max_num_batched_tokens must hold one decode: 1 + num_speculative_tokens")
        if self.num_blocks - 1 < self.max_blocks:
            raise BadInputError(
                f"num_blocks is {self.num_blocks}; one request may need {self.max_blocks} + 1"
            )

    @property
    def max_blocks(self) -> int:
        """Columns of a row: those of the longest request with a step in flight, and one for each draft."""
        return self.blocks_for(self.max_model_len + 1 + self.num_speculative_tokens)

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks of a request with that many tokens: its columns and one for the state after each draft."""
        return -(-num_tokens // self.block_size) + self.num_speculative_tokens


@dataclass(frozen=True)
class Request:
    """What a client sends, and at which step; `aborts` is the step at which it goes away."""

    req_id: int
    prompt: tuple[int, ...]
    max_tokens: int
    arrives: int = 0
    aborts: int | None = None


@dataclass(frozen=True)
class BatchRow:
    """One request in one batch. `start` is the number of tokens computed before; `samples` says it gets a token."""

    req_id: int
    start: int
    tokens: tuple[int, ...]
    decode: bool
    samples: bool

    @property
    def num_tokens(self) -> int:
        """Tokens of this row in the batch."""
        return len(self.tokens)


def decodes_first(rows: Sequence[BatchRow], num_speculative_tokens: int) -> list[BatchRow]:
    """Decodes with drafts, then what is as short, then longer prefills; equals keep their order.

    So a row moves whenever a prefill joins or leaves.
    """
    most = 1 + num_speculative_tokens
    return sorted(rows, key=lambda row: (row.num_tokens > most, not (row.decode and row.num_tokens == most)))


@dataclass(frozen=True)
class Batch:
    """What the scheduler tells the workers: requests that leave and come, blocks given out, and the rows in order."""

    step: int
    finished_req_ids: tuple[int, ...]
    new_req_ids: tuple[int, ...]
    blocks: dict[int, list[int]]
    rows: tuple[BatchRow, ...]


@dataclass(eq=False)
class _Running:
    request: Request
    known: list[int]
    computed: int = 0
    decoding: bool = False
    eligible: int = 0

    @property
    def outputs(self) -> int:
        return len(self.known) - len(self.request.prompt)


def no_drafts(req_id: int, known: Sequence[int]) -> list[int]:
    """A drafter that has nothing to say."""
    return []


@dataclass
class Scheduler:
    """Deterministic: the same requests and outputs give the same batches, on whichever rank it runs."""

    config: EngineConfig
    requests: Sequence[Request]
    drafter: Drafter = no_drafts
    finished: dict[int, list[int]] = field(default_factory=dict)
    preemptions: int = 0

    def __post_init__(self) -> None:
        """Everything waits; refuses requests that are too long for the engine."""
        self._aborted: set[int] = set()
        self.pool = BlockPool(self.config.num_blocks)
        self._step = -1
        self._running: list[_Running] = []
        self._waiting: deque[_Running] = deque()
        self._flight: deque[tuple[Batch, list[_Running], Sampled]] = deque()
        for request in sorted(self.requests, key=lambda request: (request.arrives, request.req_id)):
            self.add(request)

    @property
    def done(self) -> bool:
        """Whether no request is left."""
        return not self._running and not self._waiting

    def add(self, request: Request) -> None:
        """One more request. Raises BadInputError when it is too long for the engine."""
        if not request.prompt or len(request.prompt) + request.max_tokens > self.config.max_model_len:
            raise BadInputError(
                f"request {request.req_id}: give a prompt, and with its outputs at most "
                f"{self.config.max_model_len} tokens"
            )
        self._waiting.append(_Running(request, list(request.prompt)))

    def abort(self, req_id: int) -> None:
        """The client of a request goes away; it leaves with the next batch."""
        self._aborted.add(req_id)

    def schedule(self) -> Batch:
        """The batch of the next step."""
        self._step += 1
        self._finished_req_ids: list[int] = []
        self._new_req_ids: list[int] = []
        self._given: dict[int, list[int]] = {}
        if self._flight and self._flight[0][0].step <= self._step - self.config.pp_size:
            self._apply(*self._flight.popleft())
        self._abort()
        self._rows: list[tuple[BatchRow, _Running]] = []
        self._budget = self.config.max_num_batched_tokens
        self._schedule_running()
        self._admit()
        rows = decodes_first([row for row, _ in self._rows], self.config.num_speculative_tokens)
        return Batch(
            self._step, tuple(self._finished_req_ids), tuple(self._new_req_ids), self._given, tuple(rows)
        )

    def record(self, batch: Batch, sampled: Sampled) -> None:
        """Where the sampled tokens of each row of this batch will be; they are asked for pp_size steps later."""
        of = {row.req_id: running for row, running in self._rows}
        self._flight.append((batch, [of[row.req_id] for row in batch.rows], sampled))

    def _apply(self, batch: Batch, running: list[_Running], sampled: Sampled) -> None:
        for row, one, tokens in zip(batch.rows, running, sampled(), strict=True):
            if row.samples and one in self._running and one.eligible == self._step:
                one.computed = row.start + (len(tokens) if row.decode else row.num_tokens)
                one.known += tokens[: one.request.max_tokens - one.outputs]
                one.decoding = True
                if one.outputs >= one.request.max_tokens:
                    self._finish(one)

    def _finish(self, one: _Running) -> None:
        self.finished[one.request.req_id] = one.known[len(one.request.prompt) :]
        self._leave(one)

    def _leave(self, one: _Running) -> None:
        self._running.remove(one)
        self.pool.release(one.request.req_id)
        self._finished_req_ids.append(one.request.req_id)

    def _abort(self) -> None:
        for one in [one for one in self._running if self._is_gone(one.request)]:
            self._leave(one)
        self._waiting = deque(one for one in self._waiting if not self._is_gone(one.request))

    def _is_gone(self, request: Request) -> bool:
        return request.req_id in self._aborted or (
            request.aborts is not None and request.aborts <= self._step
        )

    def _schedule_running(self) -> None:
        for one in list(self._running):
            if one.eligible <= self._step and one in self._running:
                self._try(one)

    def _admit(self) -> None:
        while self._waiting and len(self._running) < self.config.max_num_seqs and self._budget > 0:
            one = self._waiting[0]
            if one.request.arrives > self._step or one.request.req_id in self._finished_req_ids:
                return
            needed = self.config.blocks_for(one.computed + self._num_tokens(one))
            if needed > self.pool.num_free:
                return
            self._running.append(self._waiting.popleft())
            self._new_req_ids.append(one.request.req_id)
            self._try(one)

    def _num_tokens(self, one: _Running) -> int:
        """A decode takes its token and drafts; a prefill chunk ends at the next block boundary at the latest."""
        if one.decoding:
            return 1 + self.config.num_speculative_tokens
        boundary = self.config.block_size - one.computed % self.config.block_size
        return min(len(one.known) - one.computed, self._budget, boundary)

    def _try(self, one: _Running) -> None:
        count = self._num_tokens(one)
        if 0 < count <= self._budget and self._grow(one, one.computed + count):
            self._add_row(one, count)

    def _grow(self, one: _Running, num_tokens: int) -> bool:
        """Blocks for that many tokens, taken from the request admitted last where none is free."""
        req_id = one.request.req_id
        missing = self.config.blocks_for(num_tokens) - len(self.pool.blocks_of(req_id))
        while (blocks := self.pool.take(req_id, max(0, missing))) is None:
            victim = self._running[-1]
            self._preempt(victim)
            if victim is one:
                return False
        if blocks:
            self._given[req_id] = blocks
        return True

    def _preempt(self, victim: _Running) -> None:
        """It loses its blocks, its slot and what is in flight, and starts again from all tokens known by now."""
        self._leave(victim)
        self.preemptions += 1
        req_id = victim.request.req_id
        self._given.pop(req_id, None)
        self._new_req_ids = [other for other in self._new_req_ids if other != req_id]
        for row, one in self._rows:
            if one is victim:
                self._budget += row.num_tokens
        self._rows = [(row, one) for row, one in self._rows if one is not victim]
        self._waiting.appendleft(_Running(victim.request, victim.known))

    def _add_row(self, one: _Running, count: int) -> None:
        tokens = one.known[one.computed : one.computed + count]
        if one.decoding:
            draft_token_ids = self.drafter(one.request.req_id, one.known) or [0] * (count - 1)
            tokens = [one.known[-1], *draft_token_ids[: count - 1]]
        samples = one.decoding or one.computed + count == len(one.known)
        row = BatchRow(one.request.req_id, one.computed, tuple(tokens), one.decoding, samples)
        one.computed += count
        one.eligible = self._step + (self.config.pp_size if samples else 1)
        self._budget -= count
        self._rows.append((row, one))
