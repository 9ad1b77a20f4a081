"""A small hybrid model in plain PyTorch with the mathematics and the weight names of vLLM's Qwen3-Next.

The modules follow vllm 0.22.1, 0.23.0 and 0.24.0: `model_executor/models/qwen3_next.py` (attention with an output
gate, experts, layers), `qwen3_next_mtp.py` (the head that drafts) and `layers/mamba/gdn/qwen_gdn_linear_attn.py` with
`layers/fla/ops` (the gated delta net). Its state dict has the names that their `load_weights` read, so a directory
written by `save` is a model that a released engine loads, and this module says what the engine should say.

A released model must hold a layer of experts in its main part and one in its head (`set_moe_parameters` raises
otherwise), so layer 0 of both has experts. Every token uses all of them: no rounding can flip a choice of experts.

Shapes: B sequences of one length, T tokens, D hidden size, H heads. No padding.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from specmortem.convert import Value
from specmortem.errors import BadInputError, UnavailableError
from specmortem.tools.engine.tasks import BOS, EOS, MAX_PROMPT, VOCAB

CHUNK = 64  # tokens that the gated delta rule takes at once
L2_EPS = 1e-6  # of queries and keys in the delta rule (fla/ops/l2norm.py)
LINEAR, FULL = "linear_attention", "full_attention"
WEIGHTS, CONFIG = "model.safetensors", "config.json"


class TinyConfig(Value, frozen=True):
    """The fields of a Qwen3-Next `config.json` that change the mathematics, under their names there."""

    vocab_size: int = VOCAB
    hidden_size: int = 128
    intermediate_size: int = 256
    layer_types: tuple[str, ...] = (LINEAR, LINEAR, FULL)
    mlp_only_layers: tuple[int, ...] = (1, 2)
    num_attention_heads: int = 4
    num_key_value_heads: int = 4
    head_dim: int = 64
    partial_rotary_factor: float = 0.25
    rope_theta: float = 10000.0
    max_position_embeddings: int = MAX_PROMPT + 2048
    rms_norm_eps: float = 1e-6
    linear_conv_kernel_dim: int = 4
    linear_key_head_dim: int = 64
    linear_value_head_dim: int = 64
    linear_num_key_heads: int = 2
    linear_num_value_heads: int = 4
    num_experts: int = 4
    num_experts_per_tok: int = 4
    moe_intermediate_size: int = 64
    shared_expert_intermediate_size: int = 64

    @property
    def rotary_dim(self) -> int:
        """Leading entries of each attention head that are rotated."""
        return int(self.head_dim * self.partial_rotary_factor)

    def to_json(self) -> dict[str, Any]:
        """The `config.json` of a model directory."""
        fixed = {
            "architectures": ["Qwen3NextForCausalLM"],
            "model_type": "qwen3_next",
            "num_hidden_layers": len(self.layer_types),
            "hidden_act": "silu",
            "attention_bias": False,
            "tie_word_embeddings": False,
            "decoder_sparse_step": 1,
            "norm_topk_prob": True,
            "num_nextn_predict_layers": 1,
            "torch_dtype": "bfloat16",
            "bos_token_id": BOS,
            "eos_token_id": EOS,
        }
        return fixed | self.as_dict()

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> TinyConfig:
        """The configuration in a `config.json`. Raises BadInputError that names a field that is missing or wrong."""
        return cls.from_dict({key: v for key, v in values.items() if key in cls.__struct_fields__}, CONFIG)


class LinearState(NamedTuple):
    """What a gated delta layer keeps of a request: `conv` [B, channels, kernel - 1], `ssm` [B, H, K, V]."""

    conv: Tensor
    ssm: Tensor


class KeyValues(NamedTuple):
    """What an attention layer keeps: keys and values [B, H, tokens, head_dim]."""

    keys: Tensor
    values: Tensor

    def up_to(self, count: int) -> KeyValues:
        """Those of the first `count` tokens."""
        return KeyValues(self.keys[:, :, :count], self.values[:, :, :count])

    def followed_by(self, *more: KeyValues) -> KeyValues:
        """With those of more tokens behind."""
        return KeyValues(*(torch.cat(parts, 2) for parts in zip(self, *more, strict=True)))


LayerState = LinearState | KeyValues


class GemmaNorm(nn.RMSNorm):
    """RMS norm whose weight is stored less one; computed in float32."""

    def reset_parameters(self) -> None:
        """A weight of one."""
        nn.init.zeros_(self.weight)

    def forward(self, x: Tensor) -> Tensor:
        """[..., size] to the same."""
        normed = functional.rms_norm(x.float(), self.normalized_shape, 1 + self.weight.float(), self.eps)
        return normed.to(x.dtype)


class GatedNorm(nn.RMSNorm):
    """RMS norm times SiLU of a gate; its weight is stored as it is."""

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:  # type: ignore[override]
        """[..., size] twice to the gate's type."""
        normed = functional.rms_norm(x.float(), self.normalized_shape, self.weight.float(), self.eps)
        return (normed * functional.silu(gate.float())).to(gate.dtype)


class Mlp(nn.Module):
    """SiLU-gated feed-forward layer, [..., D] to the same."""

    def __init__(self, hidden: int, inner: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden, inner, bias=False)
        self.up_proj = nn.Linear(hidden, inner, bias=False)
        self.down_proj = nn.Linear(inner, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        inner = functional.silu(self.gate_proj(x)) * self.up_proj(x)
        return self.down_proj(inner)  # type: ignore[no-any-return]


class Experts(nn.Module):
    """Routed experts with renormalized weights, and a shared one behind a sigmoid gate."""

    def __init__(self, config: TinyConfig) -> None:
        super().__init__()
        hidden = config.hidden_size
        self.chosen = config.num_experts_per_tok
        self.gate = nn.Linear(hidden, config.num_experts, bias=False)
        self.experts = nn.ModuleList(
            Mlp(hidden, config.moe_intermediate_size) for _ in range(config.num_experts)
        )
        self.shared_expert = Mlp(hidden, config.shared_expert_intermediate_size)
        self.shared_expert_gate = nn.Linear(hidden, 1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """[..., D] to the same."""
        weights = self.gate(x).float().softmax(-1)
        top, which = weights.topk(self.chosen, -1)
        top = top / top.sum(-1, keepdim=True)
        shares = torch.zeros_like(weights).scatter(-1, which, top).to(x.dtype)
        out: Tensor = self.shared_expert(x) * torch.sigmoid(self.shared_expert_gate(x))
        for number, expert in enumerate(self.experts):
            out = out + shares[..., number, None] * expert(x)
        return out


def rotate(x: Tensor, positions: Tensor, theta: float, size: int) -> Tensor:
    """Rotary embedding of the first `size` entries of heads [B, H, T, head_dim], halves paired; positions [T]."""
    rates = theta ** (-torch.arange(0, size, 2, dtype=torch.float32, device=x.device) / size)
    angles = positions.float()[:, None] * rates
    cos, sin = angles.cos(), angles.sin()
    first, second = x[..., : size // 2].float(), x[..., size // 2 : size].float()
    turned = torch.cat([first * cos - second * sin, second * cos + first * sin], -1).to(x.dtype)
    return torch.cat([turned, x[..., size:]], -1)


class Attention(nn.Module):
    """Causal attention with normalized queries and keys, and a sigmoid gate on its output.

    `q_proj` holds for each head its query, then its gate.
    """

    def __init__(self, config: TinyConfig) -> None:
        super().__init__()
        self.config, hidden = config, config.hidden_size
        self.heads, self.groups = config.num_attention_heads, config.num_key_value_heads
        self.size = config.head_dim
        self.q_proj = nn.Linear(hidden, 2 * self.heads * self.size, bias=False)
        self.k_proj = nn.Linear(hidden, self.groups * self.size, bias=False)
        self.v_proj = nn.Linear(hidden, self.groups * self.size, bias=False)
        self.o_proj = nn.Linear(self.heads * self.size, hidden, bias=False)
        self.q_norm = GemmaNorm(self.size, config.rms_norm_eps)
        self.k_norm = GemmaNorm(self.size, config.rms_norm_eps)

    def project(self, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor, KeyValues]:
        """Queries and gates [B, heads, T, head_dim] and the tokens' own keys and values, from [B, T, D]."""
        queries, gates = (
            self.q_proj(x).unflatten(-1, (self.heads, 2 * self.size)).transpose(1, 2).chunk(2, -1)
        )
        keys = self.k_norm(self.k_proj(x).unflatten(-1, (self.groups, self.size)).transpose(1, 2))
        values = self.v_proj(x).unflatten(-1, (self.groups, self.size)).transpose(1, 2)
        rope = (positions, self.config.rope_theta, self.config.rotary_dim)
        return rotate(self.q_norm(queries), *rope), gates, KeyValues(rotate(keys, *rope), values)

    def attend(self, queries: Tensor, gates: Tensor, seen: KeyValues, visible: Tensor) -> Tensor:
        """[B, T, D] of what queries read, in float32, of those seen [S] that are `visible` [T, S], and their gates."""
        read = functional.scaled_dot_product_attention(
            queries.float(), seen.keys.float(), seen.values.float(), visible, enable_gqa=True
        )
        gated = read.to(gates.dtype) * torch.sigmoid(gates)
        return self.o_proj(gated.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]

    def forward(self, x: Tensor, positions: Tensor, past: KeyValues | None) -> tuple[Tensor, KeyValues]:
        """[B, T, D] to the same, with keys and values of all tokens so far."""
        queries, gates, new = self.project(x, positions)
        seen = past.followed_by(new) if past is not None else new
        return self.attend(queries, gates, seen, until(x.shape[1], seen.keys.shape[2], x.device)), seen


def until(rows: int, columns: int, device: torch.device) -> Tensor:
    """Which of `columns` tokens the last `rows` of them see, [rows, columns]: themselves and those before."""
    return torch.ones(rows, columns, dtype=torch.bool, device=device).tril(columns - rows)


def delta_rule(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """Gated delta rule over T tokens: what the queries read [B, H, T, V], and the state after the last token.

    q, k [B, H, T, K]; v [B, H, T, V]; log_decay, beta [B, H, T]; state [B, H, K, V]; all float32. Per token,
    S = exp(log_decay) S; S += k (beta (v - S^T k))^T; the token reads S^T q. Tokens are taken CHUNK at a time: the
    corrections inside a chunk solve one triangular system.
    """
    out = []
    for start in range(0, q.shape[2], CHUNK):
        chunk = (each[:, :, start : start + CHUNK] for each in (q, k, v, log_decay, beta))
        read, state = _delta_chunk(state, *chunk)
        out.append(read)
    return torch.cat(out, 2), state


def _delta_chunk(
    state: Tensor, q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor
) -> tuple[Tensor, Tensor]:
    total = log_decay.cumsum(-1)
    between = (total[..., :, None] - total[..., None, :]).tril().exp().tril()  # decay from column to row
    since_start = total.exp()[..., None]
    overlap = beta[..., None] * (between * (k @ k.transpose(-1, -2))).tril(-1)
    wanted = beta[..., None] * (v - since_start * (k @ state))
    written = torch.linalg.solve_triangular(overlap, wanted, upper=False, unitriangular=True)
    read = since_start * (q @ state) + (between * (q @ k.transpose(-1, -2))) @ written
    to_end = between[..., -1, :, None]
    return read, since_start[..., -1:, :] * state + (to_end * k).transpose(-1, -2) @ written


def _unit(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + L2_EPS)


class GatedDelta(nn.Module):
    """Gated delta net behind a causal convolution.

    `in_proj_qkvz` holds, for each key head, its query, its key, and the values and gates of its value heads;
    `in_proj_ba` in the same order the write strengths b and the decays a. The convolution runs over all queries, then
    all keys, then all values. A value head uses the key head at the same share of its number.
    """

    def __init__(self, config: TinyConfig) -> None:
        super().__init__()
        self.key_heads, self.heads = config.linear_num_key_heads, config.linear_num_value_heads
        self.key_size, self.size = config.linear_key_head_dim, config.linear_value_head_dim
        keys, values = self.key_heads * self.key_size, self.heads * self.size
        self.kernel = config.linear_conv_kernel_dim
        self.state_dtype = torch.float32
        channels = 2 * keys + values
        self.in_proj_qkvz = nn.Linear(config.hidden_size, channels + values, bias=False)
        self.in_proj_ba = nn.Linear(config.hidden_size, 2 * self.heads, bias=False)
        self.conv1d = nn.Conv1d(channels, channels, self.kernel, groups=channels, bias=False)
        self.A_log = nn.Parameter(torch.zeros(self.heads))
        self.dt_bias = nn.Parameter(torch.ones(self.heads))
        self.norm = GatedNorm(self.size, config.rms_norm_eps)
        self.out_proj = nn.Linear(values, config.hidden_size, bias=False)

    def start(self, batch: int, device: torch.device, dtype: torch.dtype) -> LinearState:
        """The state of requests that have said nothing."""
        conv = torch.zeros(batch, self.conv1d.in_channels, self.kernel - 1, device=device, dtype=dtype)
        shape = (batch, self.heads, self.key_size, self.size)
        return LinearState(conv, torch.zeros(shape, device=device, dtype=self.state_dtype))

    def _split(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Convolution input [B, T, channels], gates [B, T, H, V], b and a [B, T, H]."""
        share = self.heads // self.key_heads
        sizes = [self.key_size, self.key_size, share * self.size, share * self.size]
        q, k, v, z = self.in_proj_qkvz(x).unflatten(-1, (self.key_heads, -1)).split(sizes, -1)
        b, a = self.in_proj_ba(x).unflatten(-1, (self.key_heads, -1)).split([share, share], -1)
        mixed = torch.cat([part.flatten(2) for part in (q, k, v)], -1)
        return mixed, z.flatten(2).unflatten(-1, (self.heads, self.size)), b.flatten(2), a.flatten(2)

    def _convolve(self, mixed: Tensor, past: Tensor) -> tuple[Tensor, Tensor]:
        window = torch.cat([past, mixed.transpose(1, 2)], -1)
        return functional.silu(self.conv1d(window)).transpose(1, 2), window[..., 1 - self.kernel :]

    def _heads(self, mixed: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries and keys [B, H, T, K] of unit length, the queries scaled, and values [B, H, T, V]; float32."""
        keys, share = self.key_heads * self.key_size, self.heads // self.key_heads
        q, k, v = mixed.float().tensor_split((keys, 2 * keys), -1)
        q, k = (
            _unit(part.reshape(*part.shape[:2], self.key_heads, -1))
            .repeat_interleave(share, 2)
            .transpose(1, 2)
            for part in (q, k)
        )
        values = v.reshape(*v.shape[:2], self.heads, -1)
        return q * self.key_size**-0.5, k, values.transpose(1, 2)

    def gates(self, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        """Logarithm of the decay, and the write strength, [B, H, T] in float32 from a and b [B, T, H]."""
        log_decay = -self.A_log.float().exp() * functional.softplus(a.float() + self.dt_bias.float())
        return log_decay.transpose(1, 2), torch.sigmoid(b.float()).transpose(1, 2)

    def forward(self, x: Tensor, past: LinearState | None) -> tuple[Tensor, LinearState]:
        """[B, T, D] to the same, and the state after the last token."""
        past = past or self.start(x.shape[0], x.device, x.dtype)
        mixed, z, b, a = self._split(x)
        mixed, conv = self._convolve(mixed, past.conv)
        read, ssm = delta_rule(*self._heads(mixed), *self.gates(a, b), past.ssm.float())
        read = self.norm(read.transpose(1, 2).to(x.dtype), z)
        return self.out_proj(read.flatten(2)), LinearState(conv, ssm.to(past.ssm.dtype))


class Layer(nn.Module):
    """One layer: a mixer over tokens and a feed-forward part, each with its norm and around it a residual."""

    linear_attn: GatedDelta
    self_attn: Attention

    def __init__(self, config: TinyConfig, kind: str, number: int) -> None:
        super().__init__()
        self.kind = kind
        if kind == LINEAR:
            self.linear_attn = GatedDelta(config)
        else:
            self.self_attn = Attention(config)
        self.mlp = (
            Mlp(config.hidden_size, config.intermediate_size)
            if number in config.mlp_only_layers
            else Experts(config)
        )
        self.input_layernorm = GemmaNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = GemmaNorm(config.hidden_size, config.rms_norm_eps)

    def feed(self, x: Tensor) -> Tensor:
        """The feed-forward half."""
        return x + self.mlp(self.post_attention_layernorm(x))  # type: ignore[no-any-return]

    def forward(self, x: Tensor, positions: Tensor, past: LayerState | None) -> tuple[Tensor, LayerState]:
        """[B, T, D] to the same, and the layer's state."""
        state: LayerState
        if self.kind == LINEAR:
            assert not isinstance(past, KeyValues)
            mixed, state = self.linear_attn(self.input_layernorm(x), past)
        else:
            mixed, state = self.self_attn(self.input_layernorm(x), positions, past)
        return self.feed(x + mixed), state


class Trunk(nn.Module):
    """Embedding, layers and the last norm."""

    def __init__(self, config: TinyConfig) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Layer(config, kind, i) for i, kind in enumerate(config.layer_types))
        self.norm = GemmaNorm(config.hidden_size, config.rms_norm_eps)


class Mtp(nn.Module):
    """The head that drafts, from the next token's embedding and the hidden state ahead of it."""

    def __init__(self, config: TinyConfig) -> None:
        super().__init__()
        self.fc = nn.Linear(2 * config.hidden_size, config.hidden_size, bias=False)
        self.layers = nn.ModuleList([Layer(config, FULL, 0)])
        self.norm = GemmaNorm(config.hidden_size, config.rms_norm_eps)
        self.pre_fc_norm_hidden = GemmaNorm(config.hidden_size, config.rms_norm_eps)
        self.pre_fc_norm_embedding = GemmaNorm(config.hidden_size, config.rms_norm_eps)

    def enter(self, embedded: Tensor, hidden: Tensor) -> Tensor:
        """The layer's input [B, T, D], from embeddings and hidden states of that shape."""
        both = [self.pre_fc_norm_embedding(embedded), self.pre_fc_norm_hidden(hidden)]
        return self.fc(torch.cat(both, -1))  # type: ignore[no-any-return]


class State(NamedTuple):
    """What the model keeps of a batch of requests: one state a layer, and the tokens so far."""

    layers: tuple[LayerState, ...]
    tokens: int

    def with_parts(self, other: State, names: Collection[str]) -> State:
        """This state with parts (`conv`, `ssm`, `keys`, `values`) of another batch of the same size and length."""
        mixed = [
            mine._replace(**{name: getattr(theirs, name) for name in mine._fields if name in names})
            for mine, theirs in zip(self.layers, other.layers, strict=True)
        ]
        return State(tuple(mixed), self.tokens)


class TinyModel(nn.Module):
    """The main model and its head, with the weight names of a released checkpoint."""

    def __init__(self, config: TinyConfig | None = None) -> None:
        super().__init__()
        self.config = config or TinyConfig()
        self.model = Trunk(self.config)
        self.lm_head = nn.Linear(self.config.hidden_size, self.config.vocab_size, bias=False)
        self.mtp = Mtp(self.config)

    def forward(self, tokens: Tensor, past: State | None = None) -> tuple[Tensor, State]:
        """Hidden states [B, T, D] after the last norm, of tokens [B, T] that follow `past`, and the state after."""
        start = past.tokens if past else 0
        positions = torch.arange(start, start + tokens.shape[1], device=tokens.device)
        x, states = self.model.embed_tokens(tokens), []
        for number, layer in enumerate(self.model.layers):
            x, state = layer(x, positions, past.layers[number] if past else None)
            states.append(state)
        return self.model.norm(x), State(tuple(states), start + tokens.shape[1])

    def keep_state_in(self, dtype: torch.dtype) -> None:
        """The type in which the delta layers keep their recurrent state between calls; float32 at first.

        An engine's is its model's, unless `mamba_ssm_cache_dtype` says otherwise.
        """
        for module in self.modules():
            if isinstance(module, GatedDelta):
                module.state_dtype = dtype

    def logits(self, hidden: Tensor) -> Tensor:
        """[..., vocabulary] in float32; of the main model's hidden states and of the head's alike."""
        return self.lm_head(hidden).float()  # type: ignore[no-any-return]

    def draft(
        self, tokens: Tensor, hidden: Tensor, start: int, past: KeyValues | None
    ) -> tuple[Tensor, KeyValues]:
        """The head's hidden states [B, T, D] at positions from `start`, and its keys and values.

        `tokens` [B, T] are those that follow the places of `hidden`: the head at place t reads the hidden state of t
        and token t + 1, and its logits are for token t + 2.
        """
        positions = torch.arange(start, start + tokens.shape[1], device=tokens.device)
        x = self.mtp.enter(self.model.embed_tokens(tokens), hidden)
        x, state = self.mtp.layers[0](x, positions, past)
        return self.mtp.norm(x), state

    def unrolled_drafts(self, tokens: Tensor, hidden: Tensor, depth: int, start: int = 0) -> list[Tensor]:
        """Hidden states of `depth` draft steps from every place from `start` on at once, for training.

        `tokens` [B, T + 1] and `hidden` [B, T, D] of the first T. Entry k of the result, [B, T - start - k, D], holds
        for each place t what the head says of token t + 2 + k after k drafts that were right. As in the engine, a
        later step sees the keys of the first step up to place t, and those of its own drafts after it.
        """
        layer: Layer = self.mtp.layers[0]  # type: ignore[assignment]
        embedded, count = self.model.embed_tokens(tokens), hidden.shape[1] - start
        places = torch.arange(hidden.shape[1], device=tokens.device)
        x = self.mtp.enter(embedded[:, 1:], hidden)
        queries, gates, first = layer.self_attn.project(layer.input_layernorm(x), places)
        x, queries, gates = x[:, start:], queries[:, :, start:], gates[:, :, start:]
        outputs: list[Tensor] = []
        own: list[KeyValues] = []
        for step in range(depth):
            if step:
                count -= 1
                ahead = embedded[:, start + step + 1 : start + step + 1 + count]
                x = self.mtp.enter(ahead, outputs[-1][:, :count])
                at = places[start : start + count] + step
                queries, gates, new = layer.self_attn.project(layer.input_layernorm(x), at)
                own = [one.up_to(count) for one in (*own, new)]
            itself = torch.eye(count, dtype=torch.bool, device=tokens.device)
            visible = torch.cat([until(count, start + count, tokens.device), *[itself] * step], 1)
            seen = first.up_to(start + count).followed_by(*own)
            mixed = layer.self_attn.attend(queries, gates, seen, visible)
            outputs.append(self.mtp.norm(layer.feed(x + mixed)))
        return outputs


class Greedy(NamedTuple):
    """Greedy text of a batch: tokens [B, count], and for each by how much its logit beat the next best."""

    tokens: Tensor
    margins: Tensor


@torch.no_grad()
def greedy(model: TinyModel, prompts: Tensor, count: int, past: State | None = None) -> Greedy:
    """The next `count` tokens after `prompts` [B, T], one step at a time, each with its logit margin."""
    tokens, margins = [], []
    step, state = prompts, past
    for _ in range(count):
        hidden, state = model(step, state)
        top = model.logits(hidden[:, -1]).topk(2, -1)
        step = top.indices[:, :1]
        tokens.append(step)
        margins.append(top.values[:, :1] - top.values[:, 1:])
    return Greedy(torch.cat(tokens, 1), torch.cat(margins, 1))


class Speculated(NamedTuple):
    """Text of one request, and how many drafts each step accepted."""

    tokens: list[int]
    counts: list[int]


@torch.no_grad()
def speculate(model: TinyModel, prompt: Sequence[int], count: int, depth: int) -> Speculated:
    """Greedy text of one request with `depth` drafts a step by the model's own head.

    The tokens are those of `greedy`. As in the engine, the head first reads the verified tokens with the main model's
    hidden states, then its own drafts, whose keys and values are dropped when the next step starts.
    """
    device = model.lm_head.weight.device
    hidden, state = model(torch.tensor([list(prompt)], device=device))
    said = [int(model.logits(hidden[:, -1]).argmax())]
    fresh, head = [*prompt[1:], said[0]], None
    counts: list[int] = []
    while len(said) < count:
        drafts, head = _drafts(model, torch.tensor([fresh], device=device), hidden, state.tokens, head, depth)
        fed = torch.tensor([[said[-1], *drafts]], device=device)
        hidden, after = model(fed, state)
        told = model.logits(hidden[0]).argmax(-1).tolist()
        right = next((i for i, draft in enumerate(drafts) if draft != told[i]), depth)
        state = after if right == depth else model(fed[:, : right + 1], state)[1]
        hidden, fresh = hidden[:, : right + 1], told[: right + 1]
        said += fresh
        counts.append(right)
    return Speculated(said[:count], counts)


def _drafts(
    model: TinyModel, fresh: Tensor, hidden: Tensor, end: int, head: KeyValues | None, depth: int
) -> tuple[list[int], KeyValues]:
    """`depth` drafts after verified tokens [1, n], and the head's keys and values of verified places."""
    start = end - fresh.shape[1]
    out, kept = model.draft(fresh, hidden, start, head)
    drafts, own = [int(model.logits(out[:, -1]).argmax())], kept
    for step in range(1, depth):
        token = torch.tensor([[drafts[-1]]], device=fresh.device)
        out, own = model.draft(token, out[:, -1:], end + step - 1, own)
        drafts.append(int(model.logits(out[:, -1]).argmax()))
    return drafts, kept


def save(model: TinyModel, folder: Path) -> None:
    """Writes `config.json` and `model.safetensors` (bfloat16; the decay rates A_log in float32, as released).

    Raises:
        UnavailableError: safetensors is not installed.
    """
    folder.mkdir(parents=True, exist_ok=True)
    (folder / CONFIG).write_text(json.dumps(model.config.to_json(), indent=1) + "\n")
    weights = {name: stored(name, value).contiguous().cpu() for name, value in model.state_dict().items()}
    _safetensors().save_file(weights, folder / WEIGHTS, metadata={"format": "pt"})


def stored(name: str, value: Tensor, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """A weight in the type that the checkpoint, or an engine of `dtype`, holds it in: A_log in float32."""
    return value.detach().to(torch.float32 if name.endswith("A_log") else dtype)


def load(folder: Path, dtype: torch.dtype = torch.float32) -> TinyModel:
    """The model in a directory, its weights as stored and then in `dtype` (A_log always float32).

    Raises:
        BadInputError: the directory holds no such model, or other weights than its configuration asks for.
        UnavailableError: safetensors is not installed.
    """
    try:
        config = TinyConfig.from_json(json.loads((folder / CONFIG).read_text()))
        weights = _safetensors().load_file(folder / WEIGHTS)
    except (FileNotFoundError, json.JSONDecodeError) as error:
        raise BadInputError(
            f"{folder} holds no model ({error}): give a directory written by `save`"
        ) from error
    model = TinyModel(config)
    try:
        model.load_state_dict(weights)
    except RuntimeError as error:
        raise BadInputError(f"{folder}: the weights do not fit its {CONFIG}: train it again") from error
    return in_type(model, dtype).eval()


def in_type(model: TinyModel, dtype: torch.dtype) -> TinyModel:
    """The model itself, its weights now in `dtype`, but the decay rates A_log in float32 as in an engine."""
    for name, value in model.named_parameters():
        value.data = stored(name, value, dtype)
    return model


def _safetensors() -> Any:
    try:
        from safetensors import torch as files
    except ImportError as error:
        raise UnavailableError("safetensors is not installed: pip install 'specmortem[engine]'") from error
    return files
