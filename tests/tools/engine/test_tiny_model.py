"""The tiny model: its two ways to run agree, its files load, and its text needs its memory."""

import json
import sys

import pytest
import torch

from specmortem.errors import BadInputError, UnavailableError
from specmortem.tools.engine.tiny_model import (
    CONFIG,
    FULL,
    LINEAR,
    WEIGHTS,
    LinearState,
    TinyConfig,
    TinyModel,
    delta_rule,
    greedy,
    load,
    rotate,
    save,
    speculate,
    stored,
)

SMALL = TinyConfig(
    hidden_size=32,
    intermediate_size=48,
    layer_types=(LINEAR, FULL, LINEAR),
    mlp_only_layers=(1,),
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    linear_key_head_dim=8,
    linear_value_head_dim=12,
    num_experts_per_tok=2,
    moe_intermediate_size=16,
    shared_expert_intermediate_size=16,
)


@pytest.fixture
def model() -> TinyModel:
    torch.manual_seed(0)
    return TinyModel(SMALL).eval()


@pytest.fixture
def tokens() -> torch.Tensor:
    return torch.randint(0, 256, (3, 90), generator=torch.Generator().manual_seed(1))


def token_by_token(q, k, v, log_decay, beta, state):
    """The delta rule as its definition says it."""
    out = []
    for t in range(q.shape[2]):
        state = state * log_decay[:, :, t].exp()[..., None, None]
        missing = v[:, :, t] - torch.einsum("bhk,bhkv->bhv", k[:, :, t], state)
        state = state + torch.einsum("bhk,bhv->bhkv", k[:, :, t], beta[:, :, t, None] * missing)
        out.append(torch.einsum("bhk,bhkv->bhv", q[:, :, t], state))
    return torch.stack(out, 2), state


@pytest.mark.parametrize("length", [1, 63, 64, 65, 150])
def test_the_delta_rule_in_chunks_is_the_rule_token_by_token(length):
    torch.manual_seed(length)
    q, k = torch.nn.functional.normalize(torch.randn(2, 2, 3, length, 8), dim=-1)
    v, state = torch.randn(2, 3, length, 5), torch.randn(2, 3, 8, 5)
    gates = -torch.rand(2, 3, length), torch.rand(2, 3, length)
    for got, expected in zip(
        delta_rule(q, k, v, *gates, state), token_by_token(q, k, v, *gates, state), strict=True
    ):
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("pieces", [[90], [89, 1], [1] * 90, [30, 1, 59]])
@torch.no_grad()
def test_a_prompt_in_pieces_gives_what_it_gives_at_once(model, tokens, pieces):
    whole, end = model(tokens)
    state, parts = None, []
    for piece in tokens.split(pieces, 1):
        part, state = model(piece, state)
        parts.append(part)
    torch.testing.assert_close(torch.cat(parts, 1), whole, rtol=1e-4, atol=1e-5)
    assert state.tokens == end.tokens == 90
    for got, expected in zip(state.layers, end.layers, strict=True):
        assert type(got) is type(expected)
        pairs = ("conv", "ssm") if isinstance(got, LinearState) else ("keys", "values")
        for name in pairs:
            torch.testing.assert_close(getattr(got, name), getattr(expected, name), rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_no_token_sees_a_later_one(model, tokens):
    changed = tokens.clone()
    changed[:, 60] = (changed[:, 60] + 1) % 256
    before, after = model(tokens)[0], model(changed)[0]
    torch.testing.assert_close(before[:, :60], after[:, :60])
    assert not torch.allclose(before[:, 60:], after[:, 60:])


@torch.no_grad()
def test_drafts_from_all_places_at_once_are_those_of_the_loop(model, tokens):
    hidden, _ = model(tokens[:, :40])
    unrolled = model.unrolled_drafts(tokens[:, :41], hidden, 4)
    assert [out.shape[1] for out in unrolled] == [40, 39, 38, 37]
    for place in (0, 7, 36):
        out, head = model.draft(tokens[:, 1 : place + 2], hidden[:, : place + 1], 0, None)
        torch.testing.assert_close(out[:, -1], unrolled[0][:, place], rtol=1e-4, atol=1e-5)
        for step in range(1, 4):
            at = place + step
            out, head = model.draft(tokens[:, at + 1 : at + 2], out[:, -1:], at, head)
            torch.testing.assert_close(out[:, -1], unrolled[step][:, place], rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_drafts_of_the_last_places_need_no_others(model, tokens):
    hidden, _ = model(tokens[:, :40])
    every, last = (model.unrolled_drafts(tokens[:, :41], hidden, 3, start) for start in (0, 25))
    for all_places, some in zip(every, last, strict=True):
        torch.testing.assert_close(some, all_places[:, 25:], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("depth", [1, 3])
def test_drafts_never_change_the_text(model, tokens, depth):
    said = speculate(model, tokens[0, :20].tolist(), 25, depth)
    assert said.tokens == greedy(model, tokens[:1, :20], 25).tokens[0].tolist()
    assert 0 <= sum(said.counts) <= depth * len(said.counts)


def test_margins_are_the_lead_of_the_chosen_token(model, tokens):
    said = greedy(model, tokens[:, :20], 1)
    logits = model.logits(model(tokens[:, :20])[0][:, -1]).detach()
    rest = logits.scatter(1, said.tokens, -torch.inf).amax(1)
    torch.testing.assert_close(said.margins[:, 0], logits.amax(1) - rest)


def test_rotation_keeps_lengths_and_depends_on_distance_only():
    x = torch.randn(1, 1, 6, 16)
    turned = rotate(x, torch.arange(6), 10000.0, 8)
    torch.testing.assert_close(turned.norm(dim=-1), x.norm(dim=-1))
    torch.testing.assert_close(turned[..., 8:], x[..., 8:])
    same = torch.randn(16).expand(1, 1, 6, 16)
    products = [rotate(same, torch.arange(6) + shift, 10000.0, 8) for shift in (0, 50)]
    scores = [p @ p.transpose(-1, -2) for p in products]
    torch.testing.assert_close(scores[0], scores[1], rtol=1e-4, atol=1e-4)


def test_a_saved_model_comes_back(model, tokens, tmp_path):
    pytest.importorskip("safetensors")
    save(model, tmp_path)
    again = load(tmp_path)
    assert again.config == SMALL
    for name, value in again.state_dict().items():
        assert torch.equal(value, stored(name, model.state_dict()[name]).float()), name
    twice = tmp_path / "twice"
    save(again, twice)
    assert (twice / WEIGHTS).read_bytes() == (tmp_path / WEIGHTS).read_bytes()


def test_a_directory_without_a_model_is_refused(model, tmp_path):
    pytest.importorskip("safetensors")
    with pytest.raises(BadInputError, match="holds no model"):
        load(tmp_path)
    save(model, tmp_path)
    config = json.loads((tmp_path / CONFIG).read_text())
    (tmp_path / CONFIG).write_text(json.dumps(config | {"hidden_size": 64}))
    with pytest.raises(BadInputError, match="do not fit"):
        load(tmp_path)
    del config["head_dim"]
    (tmp_path / CONFIG).write_text(json.dumps(config))
    with pytest.raises(BadInputError, match="head_dim"):
        load(tmp_path)


def test_without_safetensors_the_way_out_is_named(model, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "safetensors", None)
    with pytest.raises(UnavailableError, match=r"specmortem\[engine\]"):
        save(model, tmp_path)
