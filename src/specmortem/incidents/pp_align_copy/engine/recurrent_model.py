"""A small recurrent language model, one layer a rank, with a sampler that shows what NaN does to text.

A layer keeps a convolution window [conv_width - 1 + K, D] and a temporal state [D] a block, as a Mamba or gated delta
layer does: a decode with K drafts stores the state after its i-th token in the i-th column from its running column on,
and the next step goes on from the one that was accepted.

The sampler takes the argmax in blocks of the vocabulary, each by a tree of comparisons. `left >= right` is false for
NaN, so the right operand wins every time: a row of NaN gives the *last* index of a block, and among blocks that are
all NaN the first is taken. The token is the block's width - 1: 1023 with blocks of 1024, 8191 with blocks of 8192,
again and again, since the state stays NaN. (In Triton, `tl.max` with indices behaves so; the engine's Gumbel and
resample kernels use 1024, its greedy verification of drafts 8192.)
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Mapping, Sequence
from functools import cache, partial
from typing import NamedTuple

import torch

from specmortem.device import Device
from specmortem.errors import BadInputError
from specmortem.incidents.pp_align_copy.engine.pipeline import Pipeline
from specmortem.incidents.pp_align_copy.engine.scheduler import Batch, EngineConfig, Request
from specmortem.incidents.pp_align_copy.engine.worker import Layout
from specmortem.incidents.pp_align_copy.kernels import RecurrentState

DIM = 16


class RecurrentModel:
    """The layer of one rank, and the embedding and head that every rank knows."""

    def __init__(
        self, device: Device, config: EngineConfig, rank: int, vocab: int = 2048, seed: int = 0
    ) -> None:
        self.device, self.dim, self.window = device, DIM, config.conv_width - 1
        width = self.window + config.num_speculative_tokens
        shared = torch.Generator().manual_seed(seed)
        self.embedding = self._weight(shared, vocab, DIM)
        self.head = self._weight(shared, DIM, vocab)
        own = torch.Generator().manual_seed(1000 * seed + rank + 1)
        self.taps = self._weight(own, config.conv_width, DIM)
        self.decay = torch.sigmoid(self._weight(own, DIM) + 1)
        self.conv = device.zeros((config.num_blocks, width, DIM), torch.float32, name="conv")
        self.ssm = device.zeros((config.num_blocks, DIM), torch.float32, name="ssm")
        self.states = [RecurrentState(self.conv, conv_width=width), RecurrentState(self.ssm)]

    def _weight(self, generator: torch.Generator, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(self.device.torch_device)

    def embed(self, tokens: Sequence[int]) -> torch.Tensor:
        """Hidden states [len(tokens), D] of token ids."""
        return self.embedding[torch.tensor(tokens, device=self.embedding.device)]

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits [..., vocab] of hidden states [..., D]."""
        scale = hidden.square().mean(dim=-1, keepdim=True).sqrt()
        return (hidden / (scale + 1e-6)) @ self.head

    def scan(
        self, x: torch.Tensor, window: torch.Tensor, state: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Outputs [N, T, D] of x [N, T, D], the states after each token, and window and x in one sequence."""
        inputs = torch.cat([window, x], dim=1)
        mixed = sum(tap * inputs[:, i : i + x.shape[1]] for i, tap in enumerate(self.taps))
        assert isinstance(mixed, torch.Tensor)
        states = []
        for token in mixed.unbind(dim=1):
            state = self.decay * state + token
            states.append(state)
        stacked = torch.stack(states, dim=1)
        return x + torch.tanh(stacked), stacked, inputs

    def forward(self, batch: Batch, layout: Layout, hidden: torch.Tensor | None) -> torch.Tensor:
        """Hidden states [tokens of the batch, D] of the next rank."""
        x = self.embed([t for row in batch.rows for t in row.tokens]) if hidden is None else hidden
        parts = torch.split(x, [row.num_tokens for row in batch.rows])
        decodes = sum(row.decode for row in batch.rows)
        outs = []
        if decodes:
            head = Layout(layout.table[:decodes], layout.req_idxs[:decodes], layout.counters)
            outs += list(self.decode(head, torch.stack(parts[:decodes])).unbind())
        for number in range(decodes, len(parts)):
            outs.append(self._prefill(number, batch.rows[number].start, layout, parts[number]))
        return torch.cat(outs)

    def decode(self, layout: Layout, x: torch.Tensor) -> torch.Tensor:
        """x [N, 1 + K, D] of N decodes; all that varies is read from device memory, so a graph may hold it."""
        n, tokens, _ = x.shape
        where = x.device
        columns = layout.counters.state_idx[layout.req_idxs].long()
        offset = layout.counters.num_accepted[layout.req_idxs].long() - 1
        step = torch.arange(max(tokens, self.window), device=where)
        blocks = layout.table[:n].long().gather(1, columns[:, None] + step[None, :tokens])
        state = self.ssm[blocks.gather(1, offset[:, None])[:, 0]]
        row = torch.arange(n, device=where)[:, None]
        window = self.conv[blocks[:, 0]][row, offset[:, None] + step[None, : self.window]]
        out, states, inputs = self.scan(x, window, state)
        self.ssm[blocks] = states
        self.conv[blocks[:, 0]] = inputs[:, 1:]
        return out

    def _prefill(self, number: int, start: int, layout: Layout, x: torch.Tensor) -> torch.Tensor:
        """x [T, D] of one chunk, which ends at a block boundary at the latest."""
        block = layout.table[number, layout.counters.state_idx[layout.req_idxs[number]].long()].long()
        window, state = self.conv[block, : self.window], self.ssm[block]
        if start == 0:
            window, state = torch.zeros_like(window), torch.zeros_like(state)
        out, states, inputs = self.scan(x[None], window[None], state[None])
        self.ssm[block] = states[0, -1]
        self.conv[block, : self.window] = inputs[0, x.shape[0] :]
        return out[0]


def blocked_argmax(logits: torch.Tensor, width: int) -> torch.Tensor:
    """Indices [N] of the maxima of logits [N, V], as a tree of comparisons in blocks of `width` finds them.

    Raises BadInputError unless the width is a power of two and divides V.
    """
    if width < 1 or width & (width - 1) or logits.shape[1] % width:
        raise BadInputError(
            f"blocks of {width} in a vocabulary of {logits.shape[1]}: a power of two that divides it"
        )
    value = logits.reshape(logits.shape[0], -1, width)
    index = torch.arange(width, device=logits.device).expand_as(value)
    while value.shape[2] > 1:
        keep = value[..., 0::2] >= value[..., 1::2]
        index = torch.where(keep, index[..., 0::2], index[..., 1::2])
        value = torch.where(keep, value[..., 0::2], value[..., 1::2])
    block = value[:, :, 0].argmax(dim=1, keepdim=True)  # the first NaN, if there is one
    return (block * width + index[:, :, 0].gather(1, block))[:, 0]


class GreedyVerifier:
    """Sampled tokens of each row: drafts are accepted as long as the model agrees."""

    def __init__(self, model: RecurrentModel, block_width: int = 1024) -> None:
        self.model, self.width = model, block_width
        self.nan_rows = 0

    def __call__(self, batch: Batch, hidden: torch.Tensor | None) -> list[list[int]]:
        """One token, and one for each accepted draft; none for a chunk that is not its prompt's last."""
        if hidden is None:
            return []
        last = [row.num_tokens if row.decode else int(row.samples) for row in batch.rows]
        parts = torch.split(hidden, [row.num_tokens for row in batch.rows])
        targets = self._targets(
            torch.cat([part[len(part) - n :] for part, n in zip(parts, last, strict=True)])
        )
        ends = itertools.accumulate(last)
        return [
            accepted(row.tokens, targets[end - n : end]) if row.samples else []
            for row, n, end in zip(batch.rows, last, ends, strict=True)
        ]

    def _targets(self, hidden: torch.Tensor) -> list[int]:
        """What the model says after each row of hidden [N, D]."""
        if not len(hidden):
            return []
        logits = self.model.logits(hidden)
        self.nan_rows += int(torch.isnan(logits).any(dim=1).sum())
        found: list[int] = blocked_argmax(logits, self.width).tolist()
        return found


def accepted(tokens: Sequence[int], targets: Sequence[int]) -> list[int]:
    """The targets up to the first draft, tokens[1:], that the one before it does not confirm; one at least."""
    count = 1
    while count < len(targets) and tokens[count] == targets[count - 1]:
        count += 1
    return list(targets[:count])


class Carried(NamedTuple):
    """The state of every rank between two tokens: windows [1, conv_width - 1, D] and temporal states [1, D]."""

    windows: list[torch.Tensor]
    states: list[torch.Tensor]


def fresh(models: Sequence[RecurrentModel]) -> Carried:
    """Before the first token."""
    zeros = models[0].embedding.new_zeros
    return Carried([zeros(1, m.window, DIM) for m in models], [zeros(1, DIM) for _ in models])


def read(
    models: Sequence[RecurrentModel], carried: Carried, tokens: Sequence[int]
) -> tuple[torch.Tensor, Carried]:
    """Hidden state [1, D] after the last of some tokens, and what is carried on."""
    x, windows, states = models[0].embed(tokens)[None], [], []
    for i, model in enumerate(models):
        x, after, inputs = model.scan(x, carried.windows[i], carried.states[i])
        windows.append(inputs[:, inputs.shape[1] - model.window :])
        states.append(after[:, -1])
    return x[:, -1], Carried(windows, states)


def continued(
    models: Sequence[RecurrentModel], carried: Carried, tokens: Sequence[int], length: int, width: int = 1024
) -> list[int]:
    """The greedy text of that length after `tokens`."""
    text: list[int] = []
    while len(text) < length:
        hidden, carried = read(models, carried, tokens)
        tokens = blocked_argmax(models[0].logits(hidden), width).tolist()
        text += tokens
    return text


def expected_text(
    models: Sequence[RecurrentModel], prompt: Sequence[int], length: int, width: int = 1024
) -> list[int]:
    """What the ranks' layers say to a prompt when nobody copies states around."""
    return continued(models, fresh(models), prompt, length, width)


class NoisyDrafter:
    """Drafts that are what the text should be, each with probability `rate`: a stand-in for an MTP head."""

    def __init__(
        self, texts: Mapping[int, Sequence[int]], prompts: Mapping[int, int], k: int, seed: int, rate: float
    ):
        self.texts, self.prompts, self.k, self.seed, self.rate = texts, prompts, k, seed, rate

    def __call__(self, req_id: int, known: Sequence[int]) -> list[int]:
        """K drafts after the known tokens of a request; the same call gives the same drafts."""
        coin = random.Random(self.seed * 1_000_003 + req_id * 10_007 + len(known))
        at = len(known) - self.prompts[req_id]
        coming = [*self.texts[req_id][at : at + self.k], *[0] * self.k][: self.k]
        return [token if coin.random() < self.rate else (token + 1) % 1000 for token in coming]


class SpeakingPipeline(Pipeline):
    """The layers in every rank, over a vocabulary of two blocks of `width`.

    `texts` has what they should say to each request. Of the drafts, 0.7 are right. Without `ranks` all of them run.
    """

    def __init__(
        self,
        device: Device,
        config: EngineConfig,
        requests: Sequence[Request],
        subject: str,
        width: int = 1024,
        seed: int = 0,
        ranks: Sequence[int] = (),
    ) -> None:
        self.models = [
            RecurrentModel(device, config, rank, 2 * width, seed) for rank in range(config.pp_size)
        ]
        expected = cache(partial(expected_text, self.models, width=width))
        self.texts = {request.req_id: expected(request.prompt, request.max_tokens) for request in requests}
        prompts = {request.req_id: len(request.prompt) for request in requests}
        self.verifier = GreedyVerifier(self.models[-1], width)
        super().__init__(
            device,
            config,
            requests,
            subject=subject,
            models={rank: self.models[rank] for rank in ranks or range(config.pp_size)},
            sampler=self.verifier,
            drafter=NoisyDrafter(self.texts, prompts, config.num_speculative_tokens, seed, rate=0.7),
        )
