"""An engine with async scheduling: the host schedules step N + 1 before it has seen a token of step N.

The scheduler knows the outputs of steps up to N - 1 when it schedules step N + 1. A request that ended in step N by its
stop word has run one step too many by the time it leaves; one that is sure to reach its length is not scheduled again.
With `sync` scheduling the host reads a step's outputs before it schedules the next.

The runner keeps a step's tokens, drafts and counts on the device, and gathers them there by the rows of the step
before. What crosses to the host and back is the accepted count, the way its policy says.

State blocks: mode none has 1 + K blocks a request, and so has `all` here, whose counts go the same way. In mode align
the state lies in the running column of the request's blocks and the K after it; when the running column moves, the
host starts a copy, from the block that its accepted count names (`preprocess_mamba`,
vllm/v1/worker/mamba_utils.py:640-703 in 0.23.0). There is no prefix cache, so nothing is copied after a step.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch

from specmortem.device import Device, Event, HostBuffer
from specmortem.errors import BadInputError
from specmortem.incidents.async_accepted_counts.engine.accepted_counts import AcceptedCounts, Timing
from specmortem.incidents.async_accepted_counts.engine.input_batch import InputBatch, NewRequest
from specmortem.incidents.async_accepted_counts.engine.policies import Mode, Policy, Scheduling
from specmortem.incidents.async_accepted_counts.engine.word_model import VOCAB, RestoredState, WordModel


@dataclass(frozen=True)
class WordRequest:
    """What a client sends, and at which step. `req_id` counts from 0."""

    req_id: int
    prompt: tuple[int, ...]
    max_tokens: int
    arrives: int = 0


@dataclass(frozen=True)
class RunnerConfig:
    """Sizes, and how the engine is run. `block_size` counts the tokens of a state block in mode align."""

    mode: Mode = "none"
    scheduling: Scheduling = "async"
    max_num_seqs: int = 8
    num_speculative_tokens: int = 3
    block_size: int = 8
    max_tokens: int = 64
    timing: Timing = field(default_factory=Timing)

    @property
    def columns(self) -> int:
        """State blocks of a request."""
        k = self.num_speculative_tokens
        if self.mode != "align":
            return 1 + k
        return -(-(self.max_tokens + 2 * (1 + k)) // self.block_size) + k

    @property
    def num_blocks(self) -> int:
        """Enough for a full batch and as many requests whose last step is still unread; block 0 is nobody's."""
        return 1 + 2 * self.max_num_seqs * self.columns


class SchedulerOutput(NamedTuple):
    """Who leaves the batch, who comes, and the computed tokens of each that runs, exact with `sync` scheduling."""

    finished_req_ids: list[int]
    new_requests: list[NewRequest]
    num_computed_tokens: dict[int, int]


@dataclass
class _Admitted:
    """A request in the engine: its blocks, its output, and steps whose outputs are unread."""

    request: WordRequest
    blocks: list[int]
    output_token_ids: list[int] = field(default_factory=list)
    unread: int = 0

    @property
    def goes_on(self) -> bool:
        """Whether the unread steps may leave something to generate; each generates one token at least."""
        return len(self.output_token_ids) + self.unread < self.request.max_tokens

    @property
    def num_computed_tokens(self) -> int:
        """As far as the outputs are read."""
        generated = len(self.output_token_ids)
        return len(self.request.prompt) + generated - 1 if generated else 0


class AsyncScheduler:
    """Admits at most one request a step; blocks freed last are given out first, and hold what was in them."""

    def __init__(self, config: RunnerConfig, requests: Sequence[WordRequest], stop: int) -> None:
        self.config, self.stop = config, stop
        self._waiting = deque(sorted(requests, key=lambda r: (r.arrives, r.req_id)))
        self._admitted: dict[int, _Admitted] = {}
        self._batch: list[int] = []
        self._free = list(range(config.num_blocks - 1, 0, -1))
        self.outputs: dict[int, list[int]] = {}
        self.step = 0

    @property
    def done(self) -> bool:
        """Nothing runs and nothing waits."""
        return not (self._waiting or self._admitted)

    def schedule(self) -> SchedulerOutput:
        """The next step."""
        stay = [i for i in self._batch if i in self._admitted and self._admitted[i].goes_on]
        finished = [req_id for req_id in self._batch if req_id not in stay]
        new = self._admit() if len(stay) < self.config.max_num_seqs else []
        self._batch = [*stay, *(request.req_id for request in new)]
        for req_id in self._batch:
            self._admitted[req_id].unread += 1
        self.step += 1
        computed = {req_id: self._admitted[req_id].num_computed_tokens for req_id in self._batch}
        return SchedulerOutput(finished, new, computed)

    def _admit(self) -> list[NewRequest]:
        columns = self.config.columns
        if not self._waiting or self._waiting[0].arrives > self.step or len(self._free) < columns:
            return []
        request = self._waiting.popleft()
        blocks = [self._free.pop() for _ in range(columns)]
        self._admitted[request.req_id] = _Admitted(request, blocks)
        return [NewRequest(request.req_id, request.prompt, 0, tuple(blocks))]

    def consume(self, outputs: Mapping[int, Sequence[int]]) -> None:
        """Tokens that a step gave each of its requests; those of one that has ended are dropped."""
        for req_id, tokens in outputs.items():
            one = self._admitted.get(req_id)
            if one is not None:
                one.unread -= 1
                self._append(one, tokens)

    def _append(self, one: _Admitted, tokens: Sequence[int]) -> None:
        for token in tokens:
            one.output_token_ids.append(token)
            if token == self.stop or len(one.output_token_ids) == one.request.max_tokens:
                self.outputs[one.request.req_id] = one.output_token_ids
                self._free += reversed(one.blocks)
                del self._admitted[one.request.req_id]
                return


class Output(NamedTuple):
    """A step's tokens, and the counts that its rows started from, on their way into private pinned buffers.

    `decodes` says which rows looked a state up; `copied` are requests whose state went to another column first (mode
    align), so that their count had to be 1.
    """

    step: int
    req_ids: list[int]
    decodes: list[bool]
    copied: list[int]
    tokens: HostBuffer
    starts: HostBuffer
    arrived: Event

    def read(self) -> dict[int, list[int]]:
        """Wait, and give the tokens of each request."""
        self.arrived.synchronize()
        rows = self.tokens[: len(self.req_ids)]
        return {req_id: row[row >= 0].tolist() for req_id, row in zip(self.req_ids, rows, strict=True)}

    def accepted(self) -> dict[int, tuple[int, bool]]:
        """How many tokens each request got, and whether it had drafts; waits."""
        tokens, decodes = self.read(), zip(self.req_ids, self.decodes, strict=True)
        return {req_id: (len(tokens[req_id]), decode) for req_id, decode in decodes}


class WrongCount(NamedTuple):
    """A decode that looked its state up, or had it copied, by another count than its request had accepted."""

    step: int
    request: int
    first_draft: bool
    got: int
    own: int


class _Place(NamedTuple):
    """Mode align: a request's running column, and its computed tokens before the step."""

    column: int
    computed: int


class AsyncRunner:
    """The worker's side. `drafts` is int32 [requests, most tokens + 1, K]: the drafts after n output tokens.

    `wrong` fills as outputs are collected.
    """

    def __init__(
        self, device: Device, config: RunnerConfig, policy: Policy, model: WordModel, drafts: torch.Tensor
    ) -> None:
        self.device, self.config, self.model = device, config, model
        self.stream = device.stream("main")
        rows, k = config.max_num_seqs, config.num_speculative_tokens
        self.batch = InputBatch(device, rows, config.max_tokens, config.columns)
        self.counts = AcceptedCounts(
            device,
            self.batch,
            policy,
            self.stream,
            {"blocks": (rows, 1 + k), "rows": (rows, 4), "prompts": (rows, config.max_tokens)},
            run=model.run,
            vocab_size=VOCAB,
            scheduling=config.scheduling,
        )
        self.inputs = self.counts.uploads
        self.tokens = device.zeros((rows, 1 + k), torch.int32, name="tokens")
        self.sampled = device.full((rows, 1 + k), -1, torch.int32, name="sampled")
        self.drafts = device.zeros((rows, k), torch.int32, name="drafts")
        self.counts_used = device.zeros((rows, 1), torch.int32, name="counts in use")
        self.table = drafts.to(device.torch_device)
        self._rings = [self._ring(rows, 1 + k) for _ in range(3)]
        self._last: Output | None = None
        self._before: dict[int, tuple[int, bool]] = {}
        self._places: dict[int, _Place] = {}
        self.steps = 0
        self.wrong: list[WrongCount] = []
        device.launch(model.warm_up, stream=self.stream, name="warm up")
        device.synchronize()

    def _ring(self, rows: int, columns: int) -> tuple[HostBuffer, HostBuffer, Event]:
        """Where a step's tokens and counts go, and the event of both."""
        tokens = self.device.host_buffer((rows, columns), torch.int32, name="output tokens")
        starts = self.device.host_buffer((rows, 1), torch.int32, name="counts in use (host)")
        return tokens, starts, self.device.event("output")

    def step(self, scheduled: SchedulerOutput) -> Output:
        """Enqueue a step and give where its tokens will be."""
        new = {request.req_id for request in scheduled.new_requests}
        self.counts.move_rows(scheduled.finished_req_ids, scheduled.new_requests, timing=self.config.timing)
        order = self.batch.order
        decodes = [req_id not in new for req_id in order]
        copied = self._bring_counts(scheduled, order, decodes)
        lengths = self._upload(order, decodes)
        if self.config.timing.forward_us:
            self.device.spin(self.config.timing.forward_us, self.stream)
        self._forward(sum(decodes), lengths)
        return self._send(order, decodes, copied)

    def collect(self, output: Output) -> dict[int, list[int]]:
        """The tokens of a step, and its wrong counts into `wrong`; call it once for each step, in order."""
        tokens = output.read()
        starts = output.starts[: len(output.req_ids)].ravel().tolist()
        for req_id, decode, got in zip(output.req_ids, output.decodes, starts, strict=True):
            count, drafted = self._before.get(req_id, (1, False))
            own = 1 if req_id in output.copied else count
            if decode and got != own:
                self.wrong.append(WrongCount(output.step, req_id, not drafted, got, own))
        self._before = output.accepted()
        return tokens

    def _bring_counts(
        self, scheduled: SchedulerOutput, order: Sequence[int], decodes: Sequence[bool]
    ) -> list[int]:
        """Counts into place; gives the requests whose state was copied to another column first."""
        computed = [scheduled.num_computed_tokens[req_id] for req_id in order]
        if self.config.scheduling == "async":
            known = self.batch.previous_row_of
            computed = [int(self.batch.num_tokens[r]) if n in known else 0 for r, n in enumerate(order)]
        self.counts.take()
        self.counts.correct(computed)
        if self.config.mode != "align":
            return []
        copied = self._copy_states(order, decodes)
        self.counts.upload_again()
        return copied

    def _copy_states(self, order: Sequence[int], decodes: Sequence[bool]) -> list[int]:
        """Every state to its request's running column, by the host's count, which is 1 from then on.

        How many tokens are computed the host knows exactly by now: it has read the tokens of the step before, from a
        buffer that is no row's (`deferred_state_corrections_fn`, gpu_model_runner.py:4163 in 0.23.0, reads one too).
        """
        accepted = {} if self._last is None else self._last.accepted()
        places = {}
        copies: dict[int, RestoredState] = {}
        for row, (req_id, decode) in enumerate(zip(order, decodes, strict=True)):
            places[req_id] = self._next_place(req_id, row, decode, accepted)
            if decode and places[req_id].column != self._places[req_id].column:
                copies[req_id] = self._copy(req_id, row, places[req_id].column, accepted[req_id])
        self._places = places
        todo, states = list(copies.values()), (self.model.conv, self.model.memory)
        self.device.launch(
            self.model.copy_states, todo, stream=self.stream, reads=states, writes=states, name="copy states"
        )
        return list(copies)

    def _next_place(
        self, req_id: int, row: int, decode: bool, accepted: Mapping[int, tuple[int, bool]]
    ) -> _Place:
        """Where the step's first token is written, and how many are computed before it."""
        length, size = int(self.batch.num_tokens[row]), self.config.block_size
        if not decode:
            return _Place((length - 1) // size, 0)
        count, drafted = accepted[req_id]
        computed = self._places[req_id].computed + count if drafted else length
        return _Place((computed + self.config.num_speculative_tokens) // size, computed)

    def _copy(self, req_id: int, row: int, target: int, accepted: tuple[int, bool]) -> RestoredState:
        (own, drafted), column, blocks = accepted, self._places[req_id].column, self.batch.blocks[row]
        got = int(self.batch.num_accepted[row, 0])
        self.batch.num_accepted[row, 0] = 1
        if got != own:
            self.wrong.append(WrongCount(self.steps, req_id, not drafted, got, own))
        return RestoredState(int(blocks[column]), int(blocks[column + got - 1]), int(blocks[target]), got - 1)

    def _upload(self, order: Sequence[int], decodes: Sequence[bool]) -> list[int]:
        """The step's other inputs; gives the lengths of the prompts among them."""
        columns = [self._places[req_id].column if self._places else 0 for req_id in order]
        width, prompts = 1 + self.config.num_speculative_tokens, self.batch.num_tokens
        table = [self.batch.blocks[row, c : c + width] for row, c in enumerate(columns)]
        previous = self.batch.previous_rows()
        rows = zip(order, prompts[: len(order)].tolist(), previous, decodes, strict=True)
        self.inputs.put("blocks", np.array(table, np.int32).reshape(-1, width))
        self.inputs.put("rows", np.array(list(rows), np.int32).reshape(-1, 4))
        first = sum(decodes)
        self.inputs.put("prompts", self.batch.token_ids[first : len(order)])
        self.inputs.seal()
        return [int(length) for length in prompts[first : len(order)]]

    def _forward(self, decodes: int, lengths: list[int]) -> None:
        read = (self.inputs["blocks"], self.inputs["rows"], self.inputs["prompts"], self.drafts)
        counts = (self.counts.on_device, self.counts.valid)
        written = (self.tokens, self.sampled, self.counts_used, self.model.conv, self.model.memory)
        self.device.launch(
            self._layers,
            decodes,
            lengths,
            stream=self.stream,
            reads=(*read, *counts, *written),
            writes=written,
            name="forward",
        )

    def _layers(self, decodes: int, lengths: list[int]) -> None:
        """The layer over all rows, and the ids: -1 after the first draft that the model does not say."""
        self.counts_used.copy_(self.counts.on_device)
        if decodes:
            self._decode(decodes)
        for number, length in enumerate(lengths):
            row, prompt = decodes + number, self.inputs["prompts"][number, :length]
            token = self.model.prefill(prompt, self.inputs["blocks"][row, 0].long())
            self.sampled[row] = -1
            self.sampled[row, :1] = token.int()[None]

    def _decode(self, decodes: int) -> None:
        """Tokens and drafts come from the rows of the step before."""
        previous = self.inputs["rows"][:decodes, 2].long()
        last = self.counts.valid[previous].long() - 1
        self.tokens[:decodes, 1:] = self.drafts[previous]
        self.tokens[:decodes, :1] = self.sampled[previous].gather(1, last)
        tokens, blocks = self.tokens[:decodes], self.inputs["blocks"][:decodes]
        answers = self.model.decode(tokens, blocks, self.counts.on_device[:decodes, 0].contiguous())
        right = (tokens[:, 1:] == answers[:, :-1]).long().cumprod(dim=1).sum(dim=1, keepdim=True)
        step = torch.arange(answers.shape[1], device=answers.device)
        self.sampled[:decodes] = torch.where(step <= right, answers, -1).int()

    def _send(self, order: list[int], decodes: list[bool], copied: list[int]) -> Output:
        """Counts, drafts for the next step, and the tokens to the host."""
        rows = len(order)
        tokens, starts, arrived = self._rings[self.steps % len(self._rings)]
        self.counts.count(self.sampled[:rows])
        self.counts.send([self.config.num_speculative_tokens * decode for decode in decodes])
        computed = self.counts.computed[:rows, 0]
        read = (self.inputs["rows"], computed, self.counts.valid, self.table)
        self.device.launch(
            self._draft, computed, stream=self.stream, reads=read, writes=(self.drafts,), name="draft"
        )
        for buffer, tensor in ((tokens, self.sampled), (starts, self.counts_used)):
            if rows:
                self.device.copy_async(buffer.rows(0, rows), tensor[:rows], self.stream)
        arrived.record(self.stream)
        self._last = Output(self.steps, order, decodes, copied, tokens, starts, arrived)
        self.steps += 1
        return self._last

    def _draft(self, computed: torch.Tensor) -> None:
        """Drafts by the number of a request's output tokens: a stand-in for a draft head that knows the text."""
        rows = len(computed)
        request, prompt, _, decode = self.inputs["rows"][:rows].long().unbind(dim=1)
        generated = computed + self.counts.valid[:rows, 0] + 1 - prompt
        generated = torch.where(decode > 0, generated, 1).clamp(0, self.table.shape[1] - 1)
        self.drafts[:rows] = self.table[request, generated]


def serve(runner: AsyncRunner, scheduler: AsyncScheduler, most_steps: int = 5000) -> dict[int, list[int]]:
    """Steps until every request has ended; gives the output token ids of each.

    Raises BadInputError when that takes more than `most_steps`.
    """
    unread: Output | None = None
    while not scheduler.done:
        if runner.steps == most_steps:
            raise BadInputError(f"{most_steps} steps were not enough; raise most_steps or lower the requests")
        output = runner.step(scheduler.schedule())
        if unread is not None:
            scheduler.consume(runner.collect(unread))
        unread = output
        if runner.config.scheduling == "sync":
            scheduler.consume(runner.collect(output))
            unread = None
    runner.device.synchronize()
    return scheduler.outputs
