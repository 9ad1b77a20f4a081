"""The tiny model beside the released code: weight names, layouts, and the mathematics of its layers."""

import ast
import re
from types import SimpleNamespace

import pytest
import torch

from specmortem import upstream
from specmortem.errors import UnavailableError
from specmortem.tools.engine.tiny_model import (
    Attention,
    GatedDelta,
    GatedNorm,
    GemmaNorm,
    TinyConfig,
    TinyModel,
    delta_rule,
)

pytestmark = pytest.mark.network
RELEASES = ("0.22.1", "0.23.0", "0.24.0")
LAYERS = "vllm/model_executor/layers"
MAIN, HEAD, DENSE = (
    f"vllm/model_executor/models/{name}.py" for name in ("qwen3_next", "qwen3_next_mtp", "qwen2_moe")
)
DELTA = f"{LAYERS}/mamba/gdn/qwen_gdn_linear_attn.py"
GATING = f"{LAYERS}/fla/ops/fused_sigmoid_gating.py"
NORMS = f"{LAYERS}/layernorm.py"
CONVOLUTION = f"{LAYERS}/mamba/ops/causal_conv1d.py"
CONFIG, SPECULATION = "vllm/transformers_utils/configs/qwen3_next.py", "vllm/config/speculative.py"
ROTARY = f"{LAYERS}/rotary_embedding/common.py"
FILES = (MAIN, HEAD, DENSE, DELTA, GATING, NORMS, ROTARY, CONVOLUTION, CONFIG, SPECULATION)
HOLDS_WEIGHT = re.compile(r"(Linear|Norm|Embedding|LMHead|RMSNormGated)$")
SMALL = TinyConfig(linear_key_head_dim=8, linear_value_head_dim=8, hidden_size=32)
UNUSED = ("_layer_scale",)  # made only where the configuration has layer_scale


@pytest.fixture(scope="module", params=RELEASES)
def tree(request):
    try:
        found = upstream.resolve(f"vllm=={request.param}")
        found.fetch(FILES)
    except UnavailableError as error:
        pytest.skip(f"no package index: {error}")
    return found


def source(tree, path: str) -> str:
    return tree.fetch([path])[path].read_text()


class Released:
    """Parameter names of released modules, read from their constructors."""

    def __init__(self, sources: list[str]) -> None:
        self.classes: dict[str, ast.ClassDef] = {}
        self.alias: dict[str, str] = {}
        for source in sources:
            for node in ast.walk(ast.parse(source)):
                if isinstance(node, ast.ClassDef):
                    self.classes[node.name] = node
                elif isinstance(node, ast.ImportFrom):
                    self.alias |= {name.asname: name.name for name in node.names if name.asname}

    def method(self, owner: str, name: str) -> ast.FunctionDef | None:
        found = [x for x in self.classes[owner].body if isinstance(x, ast.FunctionDef) and x.name == name]
        return found[0] if found else None

    def parameters(self, owner: str) -> set[str]:
        """Names below one module; the number in a list of layers or experts is `#`."""
        constructor = self.method(owner, "__init__")
        assert constructor is not None, owner
        local = {x.name: x for x in ast.walk(constructor) if isinstance(x, ast.FunctionDef)}
        names: set[str] = set()
        for node in ast.walk(constructor):
            if isinstance(node, ast.Assign) and (attribute := _attribute(node.targets[0])):
                names |= {attribute + rest for rest in self._below(owner, node.value, local)}
        return names

    def _below(self, owner: str, value: ast.expr, local: dict[str, ast.FunctionDef]) -> set[str]:
        """What follows an attribute's name, by the classes that its value is made of."""
        called = _called(value)
        if "Parameter" in called:
            return {""}
        used = called | {node.id for node in ast.walk(value) if isinstance(node, ast.Name)}
        makers = [local.get(name) or self.method(owner, name) for name in used]
        for maker in filter(None, makers):
            called |= {name for x in ast.walk(maker) if isinstance(x, ast.Return) for name in _called(x)}
        number = ".#" if called & {"make_layers", "ModuleList"} else ""
        return {number + end for name in called for end in self._ends(self.alias.get(name, name))}

    def _ends(self, name: str) -> set[str]:
        if name in self.classes and self.method(name, "__init__"):
            return {f".{below}" for below in self.parameters(name)}
        if name == "FusedMoE":
            return {".fused"}
        return {".weight"} if HOLDS_WEIGHT.search(name) else set()


def _attribute(target: ast.expr) -> str:
    """The attribute of self that is set; the last one of several (`make_layers` returns two numbers first)."""
    last = target.elts[-1] if isinstance(target, ast.Tuple) else target
    own = isinstance(last, ast.Attribute) and isinstance(last.value, ast.Name) and last.value.id == "self"
    return last.attr if own else ""


def _called(value: ast.AST) -> set[str]:
    calls = (node.func for node in ast.walk(value) if isinstance(node, ast.Call))
    return {f.attr if isinstance(f, ast.Attribute) else getattr(f, "id", "") for f in calls}


def stacked(code: str) -> list[tuple[str, str]]:
    """Parameter and shard names of the `stacked_params_mapping` in a released `load_weights`."""
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "stacked_params_mapping":
            return [(param, shard) for param, shard, _ in ast.literal_eval(node.value)]
    raise AssertionError("no stacked_params_mapping")


def loaded_name(name: str, mapping: list[tuple[str, str]]) -> str:
    """Where `load_weights` puts a saved weight: experts into the fused tensor, shards into the stacked one."""
    if re.search(r"mlp\.experts\.\d+\.(gate|up|down)_proj\.weight$", name):
        name = re.sub(r"mlp\.experts\..*", "mlp.experts.fused", name)
    for param, shard in mapping:
        if shard in name and "mlp.experts" not in name:
            name = name.replace(shard, param)
            break
    return re.sub(r"\.\d+\.", ".#.", name)


def released_parameters(tree, owner: str) -> set[str]:
    released = Released([source(tree, path) for path in (MAIN, HEAD, DENSE, DELTA)])
    return {name for name in released.parameters(owner) if not name.endswith(UNUSED)}


def test_saved_weights_and_released_parameters_are_one_to_one(tree):
    mapping = stacked(source(tree, MAIN))
    saved = {loaded_name(name, mapping) for name in TinyModel().state_dict() if not name.startswith("mtp.")}
    assert saved == released_parameters(tree, "Qwen3NextForCausalLM")


def test_the_heads_weights_and_released_parameters_are_one_to_one(tree):
    mapping = stacked(source(tree, HEAD))
    shared = ("model.embed_tokens.", "lm_head.")
    names = [name for name in TinyModel().state_dict() if name.startswith(("mtp.", *shared))]
    saved = {loaded_name(name.replace("mtp.", "model."), mapping) for name in names}
    released = released_parameters(tree, "Qwen3NextMTP")
    dense = {f"model.layers.#.mlp.{part}_proj.weight" for part in ("gate_up", "down")}
    assert saved == {name for name in released if ".linear_attn." not in name} - dense


def test_a_wrong_name_is_noticed(tree):
    mapping = stacked(source(tree, MAIN))
    wrong = loaded_name("model.layers.0.linear_attn.in_proj_qkv.weight", mapping)
    assert wrong not in released_parameters(tree, "Qwen3NextForCausalLM")


def test_every_field_of_the_configuration_is_read(tree):
    code = ast.parse(source(tree, CONFIG))
    (made,) = [x for x in ast.walk(code) if isinstance(x, ast.FunctionDef) and x.name == "__init__"]
    taken = {argument.arg for argument in made.args.args}
    for node in ast.walk(made):
        if isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "pop":
            taken.add(ast.literal_eval(node.args[0]))
    of_any_model = {"architectures", "model_type", "torch_dtype", "bos_token_id", "eos_token_id"}
    fields = set(TinyConfig().to_json())
    assert fields - taken - of_any_model == {"num_nextn_predict_layers"}
    assert 'getattr(hf_config, "num_nextn_predict_layers", None)' in source(tree, SPECULATION)


def test_both_parts_must_hold_experts(tree):
    """Why layer 0 has experts: a released model without any of them raises while it is made."""
    code = source(tree, MAIN)
    assert "No Qwen3Next layer found" in code
    for path in (MAIN, HEAD):
        assert "self.set_moe_parameters()" in source(tree, path)
    assert 0 not in TinyConfig().mlp_only_layers


def test_projections_are_laid_out_as_released(tree):
    layer = GatedDelta(TinyConfig())
    released = upstream.lift_method(tree, DELTA, "QwenGatedDeltaNetAttention.fix_query_key_value_ordering")
    stand_in = SimpleNamespace(
        num_k_heads=layer.key_heads,
        num_v_heads=layer.heads,
        head_k_dim=layer.key_size,
        head_v_dim=layer.size,
        tp_size=1,
    )
    x = torch.randn(1, 7, 128)
    q, k, v, *gates = released.function(stand_in, layer.in_proj_qkvz(x)[0], layer.in_proj_ba(x)[0])
    mixed, *own = layer._split(x)
    torch.testing.assert_close(torch.cat([part.flatten(1) for part in (q, k, v)], -1), mixed[0])
    for got, expected in zip(own, gates, strict=True):
        torch.testing.assert_close(got[0], expected)


@pytest.mark.usefixtures("interpreted")
@torch.no_grad()
def test_the_delta_rule_is_the_released_kernels(tree):
    """Gates, normalization, scale, sharing of key heads, and the state: the decode kernel, token after token."""
    layer, tokens = GatedDelta(TinyConfig()), 3
    layer.A_log.copy_(torch.rand(4) - 0.5)
    layer.dt_bias.copy_(torch.randn(4))
    mixed, b, a = torch.randn(1, tokens, 512), torch.randn(1, tokens, 4), torch.randn(1, tokens, 4)
    state = torch.randn(2, 4, 64, 64)
    q, k, v = mixed.split([128, 128, 256], -1)
    update = upstream.lift(tree, GATING, "fused_sigmoid_gating_delta_rule_update").function
    pool = torch.stack([torch.zeros_like(state[0]), *state.transpose(-1, -2)]).contiguous()
    expected, _ = update(
        A_log=layer.A_log,
        a=a[0],
        b=b[0],
        dt_bias=layer.dt_bias,
        q=q.unflatten(-1, (2, 64)),
        k=k.unflatten(-1, (2, 64)),
        v=v.unflatten(-1, (4, 64)),
        initial_state=pool,
        cu_seqlens=torch.tensor([0, tokens], dtype=torch.int32),
        ssm_state_indices=torch.tensor([[2] * tokens], dtype=torch.int32),
        num_accepted_tokens=torch.tensor([1], dtype=torch.int32),
        use_qk_l2norm_in_kernel=True,
    )
    got, after = delta_rule(*layer._heads(mixed), *layer.gates(a, b), state[1:])
    torch.testing.assert_close(got.transpose(1, 2), expected.reshape(1, tokens, 4, 64), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(after[0], pool[2].transpose(-1, -2), rtol=1e-4, atol=1e-4)


@pytest.mark.usefixtures("interpreted")
@torch.no_grad()
def test_the_convolution_is_the_released_kernel(tree):
    """Taps, activation, and the three inputs that are kept."""
    layer, width = GatedDelta(SMALL), 4
    channels = layer.conv1d.in_channels
    x, past = torch.randn(1, 5, channels), torch.randn(1, channels, width - 1)
    platform = SimpleNamespace(is_xpu=lambda: False, is_cpu=lambda: False)
    update = upstream.lift(tree, CONVOLUTION, "causal_conv1d_update", {"current_platform": platform}).function
    pool = torch.zeros(2, width - 1, channels)
    pool[1] = past[0].T
    told = []
    for token in x[0]:
        told += update(
            token[None].clone(),
            pool.transpose(1, 2),
            layer.conv1d.weight[:, 0],
            None,
            "silu",
            conv_state_indices=torch.tensor([1], dtype=torch.int32),
        )
    got, kept = layer._convolve(x, past)
    torch.testing.assert_close(got[0], torch.stack(told), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(kept[0], pool[1].T)


@torch.no_grad()
def test_attention_is_the_released_one(tree):
    """Layout of queries and gates, norms, rotation and gate; the attention itself is PyTorch's."""
    config = TinyConfig()
    own, x = Attention(config), torch.randn(1, 9, 128)
    for norm in (own.q_norm, own.k_norm):
        norm.weight.normal_(std=0.3)
    turn = upstream.lift_method(tree, ROTARY, "ApplyRotaryEmb.forward_static").function
    rates = config.rope_theta ** (-torch.arange(0, 16, 2) / 16)
    angles = torch.arange(9)[:, None] * rates

    def rotary(_, *heads):
        split = [part.unflatten(-1, (4, 64)) for part in heads]
        turned = [turn(part[..., :16], angles.cos(), angles.sin(), True) for part in split]
        return [torch.cat([t, part[..., 16:]], -1).flatten(1) for t, part in zip(turned, split, strict=True)]

    def attend(q, k, v):
        heads = [part.unflatten(-1, (4, 64)).transpose(0, 1) for part in (q, k, v)]
        read = torch.nn.functional.scaled_dot_product_attention(*heads, is_causal=True)
        return read.transpose(0, 1).flatten(1)

    stacked_weight = torch.cat([own.q_proj.weight, own.k_proj.weight, own.v_proj.weight])
    stand_in = SimpleNamespace(
        qkv_proj=lambda h: (h @ stacked_weight.T, None),
        o_proj=lambda h: (own.o_proj(h), None),
        q_norm=own.q_norm,
        k_norm=own.k_norm,
        rotary_emb=rotary,
        attn=attend,
        attn_output_gate=True,
        use_fused_qk_norm_rope_gate=False,
        q_size=256,
        kv_size=256,
        num_heads=4,
        num_kv_heads=4,
        head_dim=64,
    )
    name = "Qwen3NextAttention._project_qkv_gate"
    if "_project_qkv_gate" in source(tree, MAIN):
        project = upstream.lift_method(tree, MAIN, name).function
        stand_in._project_qkv_gate = lambda *given: project(stand_in, *given)
    out = torch.empty(9, 128)
    forward = upstream.lift_method(tree, MAIN, "Qwen3NextAttention.forward").function
    forward(stand_in, torch.arange(9), out, x[0])
    torch.testing.assert_close(own(x, torch.arange(9), None)[0][0], out, rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_the_gated_norm_is_the_released_one(tree):
    own, x, gate = GatedNorm(64, 1e-6), torch.randn(5, 64), torch.randn(5, 64)
    own.weight.normal_()
    static = upstream.lift_method(tree, NORMS, "RMSNormGated.forward_static").function
    torch.testing.assert_close(own(x, gate), static(x, gate, own.weight, 1e-6, x.dtype, None, True, "silu"))


@torch.no_grad()
def test_the_other_norms_add_one_to_their_weight(tree):
    code = source(tree, NORMS)
    start = code.index("class GemmaRMSNorm")
    assert re.search(r"self\.weight\.(data\.)?float\(\) \+ 1\.0|1\.0 \+ ", code[start : start + 3000])
    assert "GemmaRMSNorm as Qwen3NextRMSNorm" in source(tree, MAIN)
    own, x = GemmaNorm(64, 1e-6), torch.randn(5, 64)
    torch.testing.assert_close(own(x), torch.nn.functional.rms_norm(x, (64,), eps=1e-6))


@torch.no_grad()
def test_the_head_joins_the_embedding_first_and_then_the_hidden_state(tree):
    model, embedded, hidden = TinyModel().mtp, torch.randn(1, 4, 128), torch.randn(1, 4, 128)
    seen = {}

    def layer(positions, hidden_states, residual):
        seen["entered"] = hidden_states
        return hidden_states, hidden_states

    stand_in = SimpleNamespace(
        pre_fc_norm_embedding=model.pre_fc_norm_embedding,
        pre_fc_norm_hidden=model.pre_fc_norm_hidden,
        fc=model.fc,
        num_mtp_layers=1,
        layers=[layer],
        norm=lambda x, residual: (x, residual),
    )
    rank = SimpleNamespace(is_first_rank=True, is_last_rank=True)
    forward = upstream.lift_method(
        tree, HEAD, "Qwen3NextMultiTokenPredictor.forward", {"get_pp_group": lambda: rank}
    ).function
    forward(stand_in, None, torch.arange(4), hidden[0], None, embedded[0])
    torch.testing.assert_close(seen["entered"], model.enter(embedded, hidden)[0])
