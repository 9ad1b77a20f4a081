"""A tiny recurrent language model that talks in words, and whose text breaks visibly when its state is another's.

One gated delta layer after a causal convolution, as in the hybrid models of the incident. Every word has a vector of
angles; the convolution adds those of the last words, each rotated by its place, and cosine and sine of the sums are
the *context*. The recurrent state [V, D] maps contexts to the words that followed them: a word is written under the
context ahead of it, and the next word is the one that the present context recalls. When nothing is recalled, a bias
makes the model stop.

A prompt holds a story, the word for its end, and the first words of the story again; the model goes on with the story.
It can do so only by its state: there is no attention that would see the prompt.

A context has three parts, of the last four words, the last two, and the last; words of one kind have vectors near each
other. So a state that is not the request's own still recalls something: what followed such a word in another story.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from specmortem.device import Device
from specmortem.errors import BadInputError
from specmortem.kernels import Backend, causal_conv_update, gated_delta_state

VOCAB = 256
DIM = 256  # of a context: cosines, then sines
WIDTH = 5  # the word, and four before it
WINDOW = WIDTH - 1
STOP_BIAS = 0.2
PARTS = ((4, 0.375), (2, 0.25), (1, 0.375))  # words looked at, and the share of the angles
SPREAD = 0.5  # radians between a word and its kind

STOP, STORY, AGAIN = "<end>", "story", "again"
_KINDS = {
    "adjective": "red old tiny silver quiet brave hungry broken golden gentle clever frozen dusty green tall lazy",
    "animal": "fox heron badger otter owl hare wolf crane beaver lynx toad moth raven goat mole swan",
    "verb": "carries hides finds paints buries steals mends counts follows guards sells borrows weighs polishes",
    "number": "two three four five six seven eight nine ten twelve",
    "things": "lanterns kettles ladders ribbons acorns bells mirrors candles anchors buttons maps drums shells keys",
    "thing": "letter spoon hammer wheel basket violin compass blanket pumpkin window clock saddle",
    "place": "river bridge market tower orchard harbor cellar meadow station library valley lighthouse",
    "way": "across under behind near above beside around through",
    "person": "miller baker sailor doctor painter farmer captain weaver widow judge",
    "mood": "laughs sleeps whistles waits argues dances listens complains",
    "time": "tonight alone again-and-again outside slowly upstairs early forever",
}
KINDS = {kind: members.split() for kind, members in _KINDS.items()}
WORDS = [*(STOP, STORY, AGAIN), *("the", "a", "and", "while", "then")]
WORDS += [word for members in KINDS.values() for word in members]
ID = {word: number for number, word in enumerate(WORDS)}


def story(rng: random.Random) -> list[str]:
    """A sentence of 23 words, none of them twice but `the`."""

    def some(kind: str, count: int = 1) -> list[str]:
        return rng.sample(KINDS[kind], count)

    (one, two), (does, did) = some("adjective", 2), some("verb", 2)
    (way, around), (place, there) = some("way", 2), some("place", 2)
    first = ["the", one, *some("animal"), does, *some("number"), two, *some("things"), way, "the", place]
    second = ["and", "then", did, "a", *some("thing"), around, "the", there]
    return [*first, *second, "while", "the", *some("person"), *some("mood"), *some("time")]


def words(ids: Sequence[int]) -> str:
    """Text of word ids."""
    return " ".join(WORDS[i] if 0 <= i < len(WORDS) else f"<{i}>" for i in ids)


class Text(NamedTuple):
    """A prompt, and what the model should say to it, the stop included."""

    prompt: list[int]
    expected: list[int]


def text(rng: random.Random, opening: int = 4) -> Text:
    """A story to be told again from word number `opening` on. Raises BadInputError below 4, a context's length."""
    if opening < PARTS[0][0]:
        raise BadInputError(f"opening {opening}: the model knows a place by {PARTS[0][0]} words")
    whole = story(rng)
    prompt = [STORY, *whole, STOP, AGAIN, *whole[:opening]]
    return Text([ID[w] for w in prompt], [ID[w] for w in (*whole[opening:], STOP)])


class RestoredState(NamedTuple):
    """Blocks of a convolution's line, of the state, and of both's target, and how far the window shifts."""

    line: int
    block: int
    target: int
    shift: int


Split = Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]  # convolved inputs into keys and queries


def gated_delta_layer(
    run: Backend,
    x: torch.Tensor,  # float32 [N, T, D]
    value: torch.Tensor,  # float32 [N, T, V]
    weight: torch.Tensor,  # float32 [W, D]
    states: tuple[torch.Tensor, torch.Tensor],  # float32 [P, W - 1 + K, D] and [P, V, D], updated in place
    blocks: torch.Tensor,  # int32 [N, 1 + K]
    counts: torch.Tensor,  # int32 [N]
    split: Split,
) -> torch.Tensor:
    """The convolution, then the delta rule without decay: outputs float32 [N, T, V]."""
    conv, memory = states
    lines, ones = blocks[:, 0].contiguous(), x.new_ones(x.shape[:2])
    if run == "plain":
        key, query = split(causal_conv_update.reference(x, weight, conv, lines, counts))
        return gated_delta_state.reference(query, key, value, 0 * ones, ones, memory, blocks, counts)
    mixed, out = torch.empty_like(x), torch.empty_like(value)
    causal_conv_update.launch("after", x, weight, conv, lines, counts, mixed)
    key, query = split(mixed)
    gated_delta_state.launch("after", query, key, value, 0 * ones, ones, out, memory, blocks, counts)
    return out


class WordModel:
    """Weights, and the states of all requests: `conv` [P, WINDOW + K, DIM], `memory` [P, V, DIM], block 0 nobody's.

    The channels of the convolution are two contexts' angles: of the words up to the one ahead (what the layer writes
    under) and of the words up to this one (what it asks with).
    """

    def __init__(self, device: Device, num_blocks: int, k: int, run: Backend = "plain") -> None:
        self.k, self.run, where = k, run, device.torch_device
        angles = _angles(torch.Generator().manual_seed(0))
        self.embedding = torch.cat([angles, angles], dim=1).to(where)
        self.weight = _taps().to(where)
        self.bias = torch.zeros(VOCAB, device=where)
        self.bias[ID[STOP]] = STOP_BIAS
        self.conv = device.zeros((num_blocks, WINDOW + k, DIM), torch.float32, name="conv states")
        self.memory = device.zeros((num_blocks, VOCAB, DIM), torch.float32, name="recurrent states")

    def decode(self, tokens: torch.Tensor, blocks: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        """Next words int64 [N, T] after tokens int32 [N, T]; blocks int32 [N, 1 + K], counts int32 [N]."""
        x, value = self.embedding[tokens.long()], _one_hot(tokens)
        states = (self.conv, self.memory)
        out = gated_delta_layer(self.run, x, value, self.weight, states, blocks, counts, _contexts)
        return (out + self.bias).argmax(dim=-1)

    def prefill(self, tokens: torch.Tensor, block: torch.Tensor) -> torch.Tensor:
        """The word after a whole prompt, int64 []; its state and its window go to `block`, int64 [].

        All tokens at once: with R = lower triangle of K Kᵀ below the diagonal, the delta rule's updates U solve
        (1 + R) U = V.
        """
        state, window, query = self.read(tokens)
        self.memory.index_copy_(0, block[None], state[None])
        self.conv[:, :WINDOW].index_copy_(0, block[None], window[None])
        return (state @ query + self.bias).argmax()

    def warm_up(self) -> None:
        """Have kernels compiled and libraries loaded; touches block 0 only."""
        nobody = torch.zeros(1, 1 + self.k, dtype=torch.int32, device=self.bias.device)
        self.decode(nobody, nobody, nobody[:, 0] + 1)
        self.prefill(nobody[0], nobody[0, 0].long())

    def copy_states(self, copies: Sequence[RestoredState]) -> None:
        """In order: the window shifted, the state as it is."""
        for line, block, target, shift in copies:
            self.conv[target, :WINDOW] = self.conv[line, shift : shift + WINDOW].clone()
            self.memory[target] = self.memory[block].clone()

    def read(self, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """State [V, DIM] and window [WINDOW, DIM] after tokens int32 [T] from nothing, and the last context."""
        x = self.embedding[tokens.long()]
        padded = torch.cat([x.new_zeros(WINDOW, x.shape[1]), x])
        mixed = (padded.unfold(0, WIDTH, 1) * self.weight.T).sum(dim=-1)
        key, query = _contexts(mixed)
        value = _one_hot(tokens)
        overlap = torch.tril(key @ key.T, -1) + torch.eye(len(key), device=key.device)
        updates = torch.linalg.solve_triangular(overlap, value, upper=False, unitriangular=True)
        return updates.T @ key, padded[len(tokens) :], query[-1]


def _one_hot(tokens: torch.Tensor) -> torch.Tensor:
    return (tokens[..., None] == torch.arange(VOCAB, device=tokens.device)).float()


def _angles(generator: torch.Generator) -> torch.Tensor:
    """Vectors [VOCAB, DIM / 2]: words of one kind are near each other, all others are far apart."""
    angles = torch.rand(VOCAB, DIM // 2, generator=generator) * 2 * torch.pi
    for kind in KINDS.values():
        members = [ID[word] for word in kind]
        offsets = torch.randn(len(members), DIM // 2, generator=generator) * SPREAD
        angles[members] = angles[members[0]] + offsets
    return angles


def _taps() -> torch.Tensor:
    """Weights [WIDTH, DIM] of the convolution: a place has factors of its own, and a part looks at its words only."""
    generator = torch.Generator().manual_seed(1)
    half = DIM // 2
    factors = torch.randint(1, 8, (WINDOW, half), generator=generator).float() * 2 - 1
    start = 0
    for looked_at, share in PARTS:
        stop = start + int(share * half)
        factors[: WINDOW - looked_at, start:stop] = 0
        if looked_at == 1:
            factors[-1, start:stop] = 1
        start = stop
    weight = torch.zeros(WIDTH, DIM)
    weight[:-1, :half] = factors
    weight[1:, half:] = factors
    return weight


def _contexts(mixed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Contexts [..., DIM] of length 1, ahead of each token and after it, of angles [..., DIM]."""
    half = mixed.shape[-1] // 2
    scale = half**-0.5
    ahead, after = mixed[..., :half], mixed[..., half:]
    key, query = (torch.cat([part.cos(), part.sin()], dim=-1) * scale for part in (ahead, after))
    return key.contiguous(), query.contiguous()
