"""An engine with async scheduling: the host plans step N + 1 before it has seen a token of step N.

The scheduler knows the outputs of steps up to N - 1 when it plans step N + 1. A request that ended in step N by its
stop word has run one step too many by the time it leaves; one that is sure to reach its length is not scheduled again.
With `sync` scheduling the host reads a step's outputs before it plans the next.

The runner keeps a step's tokens, drafts and counts on the device, and gathers them there by the rows of the step
before. What crosses to the host and back is the accepted count, the way its policy says.

State blocks: mode none has 1 + K blocks a request, and so has `all` here, whose counts go the same way. In mode align
the state lies in the running column of the request's blocks and the K behind it; when the running column moves, the
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
from specmortem.incidents.async_accepted_counts.engine.accepted_counts import (
    AcceptedCounts,
    Mode,
    Policy,
    Scheduling,
)
from specmortem.incidents.async_accepted_counts.engine.count_loop import DECODE, PREFILL, Timing
from specmortem.incidents.async_accepted_counts.engine.input_batch import InputBatch, NewRequest
from specmortem.incidents.async_accepted_counts.engine.uploads import Uploads
from specmortem.incidents.async_accepted_counts.engine.word_model import VOCAB, WordModel


@dataclass(frozen=True)
class WordRequest:
    """What a client sends, and at which step. `name` counts from 0."""

    name: int
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


class Plan(NamedTuple):
    """Who leaves the batch, who comes, and the computed tokens of each that runs, exact with `sync` scheduling."""

    leaves: list[int]
    comes: list[NewRequest]
    computed: dict[int, int]


@dataclass
class _Running:
    """A request that was admitted: its blocks, what it said, and steps whose outputs are unread."""

    request: WordRequest
    blocks: list[int]
    said: list[int] = field(default_factory=list)
    unread: int = 0


class AsyncScheduler:
    """Admits at most one request a step; blocks freed last are given out first, and hold what was in them."""

    def __init__(self, config: RunnerConfig, requests: Sequence[WordRequest], stop: int) -> None:
        self.config, self.stop = config, stop
        self._waiting = deque(sorted(requests, key=lambda r: (r.arrives, r.name)))
        self._running: dict[int, _Running] = {}
        self._batch: list[int] = []
        self._free = list(range(config.num_blocks - 1, 0, -1))
        self.texts: dict[int, list[int]] = {}
        self.step = 0

    @property
    def done(self) -> bool:
        """Nothing runs and nothing waits."""
        return not (self._waiting or self._running)

    def plan(self) -> Plan:
        """The next step."""
        stay = [name for name in self._batch if name in self._running and self._goes_on(name)]
        leaves = [name for name in self._batch if name not in stay]
        comes = self._admitted() if len(stay) < self.config.max_num_seqs else []
        self._batch = [*stay, *(new.name for new in comes)]
        for name in self._batch:
            self._running[name].unread += 1
        self.step += 1
        return Plan(leaves, comes, {name: self._computed(name) for name in self._batch})

    def _goes_on(self, name: int) -> bool:
        """Whether the steps that are unread may leave something to say; each says one token at least."""
        one = self._running[name]
        return len(one.said) + one.unread < one.request.max_tokens

    def _computed(self, name: int) -> int:
        one = self._running[name]
        return len(one.request.prompt) + len(one.said) - 1 if one.said else 0

    def _admitted(self) -> list[NewRequest]:
        columns = self.config.columns
        if not self._waiting or self._waiting[0].arrives > self.step or len(self._free) < columns:
            return []
        request = self._waiting.popleft()
        blocks = [self._free.pop() for _ in range(columns)]
        self._running[request.name] = _Running(request, blocks)
        return [NewRequest(request.name, request.prompt, 0, tuple(blocks))]

    def consume(self, outputs: Mapping[int, Sequence[int]]) -> None:
        """Tokens that a step gave each of its requests; those of one that has ended are dropped."""
        for name, tokens in outputs.items():
            one = self._running.get(name)
            if one is not None:
                one.unread -= 1
                self._say(one, tokens)

    def _say(self, one: _Running, tokens: Sequence[int]) -> None:
        for token in tokens:
            one.said.append(token)
            if token == self.stop or len(one.said) == one.request.max_tokens:
                self.texts[one.request.name] = one.said
                self._free += reversed(one.blocks)
                del self._running[one.request.name]
                return


class Output(NamedTuple):
    """A step's tokens, and the counts that its rows started from, on their way into private pinned buffers.

    `decodes` says which rows looked a state up; `copied` are requests whose state went to another column first (mode
    align), so that their count had to be 1.
    """

    step: int
    names: list[int]
    decodes: list[bool]
    copied: list[int]
    tokens: HostBuffer
    starts: HostBuffer
    arrived: Event

    def read(self) -> dict[int, list[int]]:
        """Wait, and give the tokens of each request."""
        self.arrived.synchronize()
        rows = self.tokens[: len(self.names)]
        return {name: row[row >= 0].tolist() for name, row in zip(self.names, rows, strict=True)}

    def told(self) -> dict[int, tuple[int, bool]]:
        """How many tokens each request got, and whether it had drafts; waits."""
        tokens, decodes = self.read(), zip(self.names, self.decodes, strict=True)
        return {name: (len(tokens[name]), decode) for name, decode in decodes}


class WrongStart(NamedTuple):
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
    """The worker's side. `drafts` is int32 [requests, most words + 1, K]: what is drafted when a request has said n.

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
            run=model.run,
            vocab_size=VOCAB,
            scheduling=config.scheduling,
        )
        shapes = {"blocks": (rows, 1 + k), "rows": (rows, 4), "prompts": (rows, config.max_tokens)}
        self.inputs = Uploads(device, self.stream, shapes)
        self.tokens = device.zeros((rows, 1 + k), torch.int32, name="tokens")
        self.sampled = device.full((rows, 1 + k), -1, torch.int32, name="sampled")
        self.drafts = device.zeros((rows, k), torch.int32, name="drafts")
        self.in_use = device.zeros((rows, 1), torch.int32, name="counts in use")
        self.table = drafts.to(device.torch_device)
        self._rings = [
            (
                self._buffer("output tokens", 1 + k),
                self._buffer("counts in use (host)", 1),
                device.event("output"),
            )
            for _ in range(3)
        ]
        self._drafted: list[int] = []
        self._last: Output | None = None
        self._before: dict[int, tuple[int, bool]] = {}
        self._places: dict[int, _Place] = {}
        self.steps = 0
        self.wrong: list[WrongStart] = []
        device.launch(model.warm_up, stream=self.stream, name="warm up")
        device.synchronize()

    def _buffer(self, name: str, columns: int) -> HostBuffer:
        return self.device.host_buffer((self.config.max_num_seqs, columns), torch.int32, name=name)

    def step(self, plan: Plan) -> Output:
        """Enqueue a step and give where its tokens will be."""
        self.counts.before_row_moves()
        self.inputs.wait()
        came = {new.name for new in plan.comes}
        self._move_rows(plan, came)
        order = self.batch.order
        decodes = [name not in came for name in order]
        copied = self._bring_counts(plan, order, decodes)
        lengths = self._upload(order, decodes)
        if self.config.timing.forward_us:
            self.device.spin(self.config.timing.forward_us, self.stream)
        self._forward(sum(decodes), lengths)
        return self._send(order, decodes, copied)

    def collect(self, output: Output) -> dict[int, list[int]]:
        """The tokens of a step, and its wrong counts into `wrong`; call it once for each step, in order."""
        tokens = output.read()
        starts = output.starts[: len(output.names)].ravel().tolist()
        for name, decode, got in zip(output.names, output.decodes, starts, strict=True):
            count, drafted = self._before.get(name, (1, False))
            own = 1 if name in output.copied else count
            if decode and got != own:
                self.wrong.append(WrongStart(output.step, name, not drafted, got, own))
        self._before = output.told()
        return tokens

    def _move_rows(self, plan: Plan, came: set[int]) -> None:
        self.device.host_time(self.config.timing.before_us)
        for name in plan.leaves:
            self.batch.remove_request(name)
        for new in plan.comes:
            self.batch.add_request(new)
        self.batch.condense()
        self.device.host_time(self.config.timing.between_us)
        self.batch.reorder(lambda name: PREFILL if name in came else DECODE)

    def _bring_counts(self, plan: Plan, order: Sequence[int], decodes: Sequence[bool]) -> list[int]:
        """Counts into place; gives the requests whose state was copied to another column first."""
        computed = [plan.computed[name] for name in order]
        if self.config.scheduling == "async":
            known = self.batch.previous_row_of
            computed = [int(self.batch.num_tokens[r]) if n in known else 0 for r, n in enumerate(order)]
        self.counts.take()
        self.counts.correct(self._drafted, computed)
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
        told = {} if self._last is None else self._last.told()
        places = {}
        copies: dict[int, tuple[int, int, int, int]] = {}
        for row, (name, decode) in enumerate(zip(order, decodes, strict=True)):
            places[name] = self._next_place(name, row, decode, told)
            if decode and places[name].column != self._places[name].column:
                copies[name] = self._copy(name, row, places[name].column, told[name])
        self._places = places
        states = (self.model.conv, self.model.memory)
        self.device.launch(
            self.model.copy_states,
            list(copies.values()),
            stream=self.stream,
            reads=states,
            writes=states,
            name="copy states",
        )
        return list(copies)

    def _next_place(self, name: int, row: int, decode: bool, told: Mapping[int, tuple[int, bool]]) -> _Place:
        """Where the step's first token is written, and how many are computed before it."""
        length, size = int(self.batch.num_tokens[row]), self.config.block_size
        if not decode:
            return _Place((length - 1) // size, 0)
        accepted, drafted = told[name]
        computed = self._places[name].computed + accepted if drafted else length
        return _Place((computed + self.config.num_speculative_tokens) // size, computed)

    def _copy(self, name: int, row: int, target: int, told: tuple[int, bool]) -> tuple[int, int, int, int]:
        """Line, state block, target block and shift of one copy."""
        (own, drafted), column, blocks = told, self._places[name].column, self.batch.blocks[row]
        got = int(self.batch.num_accepted[row, 0])
        self.batch.num_accepted[row, 0] = 1
        if got != own:
            self.wrong.append(WrongStart(self.steps, name, not drafted, got, own))
        return int(blocks[column]), int(blocks[column + got - 1]), int(blocks[target]), got - 1

    def _upload(self, order: Sequence[int], decodes: Sequence[bool]) -> list[int]:
        """The step's other inputs; gives the lengths of the prompts among them."""
        columns = [self._places[name].column if self._places else 0 for name in order]
        width, prompts = 1 + self.config.num_speculative_tokens, self.batch.num_tokens
        table = [self.batch.blocks[row, c : c + width] for row, c in enumerate(columns)]
        previous = self.batch.previous_rows()
        facts = zip(order, prompts[: len(order)].tolist(), previous, decodes, strict=True)
        self.inputs.put("blocks", np.array(table, np.int32).reshape(-1, width))
        self.inputs.put("rows", np.array(list(facts), np.int32).reshape(-1, 4))
        first = sum(decodes)
        self.inputs.put("prompts", self.batch.token_ids[first : len(order)])
        self.counts.uploads.seal()
        self.inputs.seal()
        return [int(length) for length in prompts[first : len(order)]]

    def _forward(self, decodes: int, lengths: list[int]) -> None:
        read = (self.inputs["blocks"], self.inputs["rows"], self.inputs["prompts"], self.drafts)
        counts = (self.counts.on_device, self.counts.valid)
        written = (self.tokens, self.sampled, self.in_use, self.model.conv, self.model.memory)
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
        """Tokens by the rows of the step before, the layer, and the ids: -1 behind the first draft that is not said."""
        rows = self.inputs["rows"]
        self.in_use.copy_(self.counts.on_device)
        if decodes:
            previous = rows[:decodes, 2].long()
            last = self.counts.valid[previous].long() - 1
            self.tokens[:decodes, 1:] = self.drafts[previous]
            self.tokens[:decodes, :1] = self.sampled[previous].gather(1, last)
            tokens, blocks = self.tokens[:decodes], self.inputs["blocks"][:decodes]
            said = self.model.decode(tokens, blocks, self.counts.on_device[:decodes, 0].contiguous())
            right = (tokens[:, 1:] == said[:, :-1]).long().cumprod(dim=1).sum(dim=1, keepdim=True)
            step = torch.arange(said.shape[1], device=said.device)
            self.sampled[:decodes] = torch.where(step <= right, said, -1).int()
        for number, length in enumerate(lengths):
            row = decodes + number
            said = self.model.prefill(
                self.inputs["prompts"][number, :length], self.inputs["blocks"][row, 0].long()
            )
            self.sampled[row] = -1
            self.sampled[row, :1] = said.int()[None]

    def _send(self, order: list[int], decodes: list[bool], copied: list[int]) -> Output:
        """Counts, drafts for the next step, and the tokens to the host."""
        rows = len(order)
        tokens, starts, arrived = self._rings[self.steps % len(self._rings)]
        self.counts.count(self.sampled[:rows])
        self.counts.send(rows)
        computed = self.counts.computed[:rows, 0]
        read = (self.inputs["rows"], computed, self.counts.valid, self.table)
        self.device.launch(
            self._draft, computed, stream=self.stream, reads=read, writes=(self.drafts,), name="draft"
        )
        for buffer, tensor in ((tokens, self.sampled), (starts, self.in_use)):
            if rows:
                self.device.copy_async(buffer.rows(0, rows), tensor[:rows], self.stream)
        arrived.record(self.stream)
        self.batch.remember_rows()
        self._drafted = [self.config.num_speculative_tokens if decode else 0 for decode in decodes]
        self._last = Output(self.steps, order, decodes, copied, tokens, starts, arrived)
        self.steps += 1
        return self._last

    def _draft(self, computed: torch.Tensor) -> None:
        """Drafts by how much a request has said: a stand-in for a draft head that knows the text."""
        rows = len(computed)
        request, prompt, _, decode = self.inputs["rows"][:rows].long().unbind(dim=1)
        said = computed + self.counts.valid[:rows, 0] + 1 - prompt
        said = torch.where(decode > 0, said, 1).clamp(0, self.table.shape[1] - 1)
        self.drafts[:rows] = self.table[request, said]


def serve(runner: AsyncRunner, scheduler: AsyncScheduler, most_steps: int = 5000) -> dict[int, list[int]]:
    """Steps until every request has ended; gives what each said.

    Raises BadInputError when that takes more than `most_steps`.
    """
    unread: Output | None = None
    while not scheduler.done:
        if runner.steps == most_steps:
            raise BadInputError(f"{most_steps} steps were not enough; raise most_steps or lower the requests")
        output = runner.step(scheduler.plan())
        if unread is not None:
            scheduler.consume(runner.collect(unread))
        unread = output
        if runner.config.scheduling == "sync":
            scheduler.consume(runner.collect(output))
            unread = None
    runner.device.synchronize()
    return scheduler.texts
