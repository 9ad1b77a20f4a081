"""Where the child finds the drafter and what it wraps, by released source, and what a drafter takes for attention."""

from __future__ import annotations

import ast

import pytest

from specmortem import upstream
from specmortem.tools.engine import arms, child

pytestmark = [pytest.mark.network, pytest.mark.usefixtures("package_index")]

RELEASES = (arms.OLDEST, "0.21.0", "0.22.1", "0.23.0", "0.24.0", "0.25.1", arms.NEWEST)
PROPOSER = "vllm/v1/spec_decode/llm_base_proposer.py"
PATH = (
    ("vllm/v1/engine/llm_engine.py", "LLMEngine", "engine_core"),
    ("vllm/v1/engine/core_client.py", "InprocClient", "engine_core"),
    ("vllm/v1/engine/core.py", "EngineCore", "model_executor"),
    ("vllm/v1/executor/uniproc_executor.py", "UniProcExecutor", "driver_worker"),
    ("vllm/v1/worker/worker_base.py", "WorkerWrapperBase", "worker"),
    ("vllm/v1/worker/gpu_worker.py", "Worker", "model_runner"),
    ("vllm/v1/worker/gpu_model_runner.py", "GPUModelRunner", "drafter"),
    (PROPOSER, "SpecDecodeBaseProposer", "model"),
    (PROPOSER, "SpecDecodeBaseProposer", "draft_attn_groups"),
)


@pytest.fixture(params=RELEASES)
def release(request):
    return upstream.resolve(f"vllm=={request.param}")


def assigned(definition):
    """Attributes that a class's methods assign to self."""
    targets = (
        target
        for node in ast.walk(definition)
        if isinstance(node, ast.Assign | ast.AnnAssign)
        for target in (node.targets if isinstance(node, ast.Assign) else [node.target])
    )
    return {ast.unparse(target) for target in targets}


def test_the_path_to_the_drafter_is_that_of_the_release(release):
    assert tuple(name for _, _, name in PATH)[: len(child.DRAFTER)] == child.DRAFTER
    for path, owner, name in PATH:
        assert f"self.{name}" in assigned(upstream.definition(release, path, owner)), (path, name)


def test_every_draft_pass_calls_the_model_and_nothing_else_of_it_that_forwards(release):
    propose = upstream.definition(release, PROPOSER, "SpecDecodeBaseProposer.propose")
    calls = [node for node in ast.walk(propose) if isinstance(node, ast.Call)]
    passes = [call.lineno for call in calls if ast.unparse(call.func) == "self.model"]
    (loop,) = (
        node
        for node in ast.walk(propose)
        if isinstance(node, ast.For) and "num_speculative_tokens - 1" in ast.unparse(node.iter)
    )
    assert len(passes) == 2
    assert [loop.lineno < line <= loop.end_lineno for line in passes] == [False, True]


def test_an_eager_model_is_called_past_the_hooks_of_a_module_but_through_its_forward(release):
    """The draft model's class is decorated for torch.compile; this is what its `__call__` does eagerly."""
    import torch

    model_file = "vllm/model_executor/models/qwen3_next_mtp.py"
    drafting = upstream.definition(release, model_file, "Qwen3NextMTP")
    assert "support_torch_compile" in [ast.unparse(each) for each in drafting.decorator_list]
    file = "vllm/compilation/decorators.py"
    code = ast.walk(ast.parse(release.fetch([file])[file].read_text(encoding="utf-8")))
    call = next(node for node in code if isinstance(node, ast.FunctionDef) and node.name == "__call__")
    first = next(node for node in call.body if isinstance(node, ast.If))
    call.body, call.args.args[0].annotation = [first], None
    call.args.vararg.annotation = call.args.kwarg.annotation = call.returns = None
    space = {"torch": torch}
    exec(compile(ast.Module([call], []), "decorators.py", "exec"), space)
    ran = []
    forward = {"forward": lambda self, x: ran.append("forward") or 2 * x, "__call__": space["__call__"]}
    model = type("Model", (torch.nn.Module,), forward)()
    model.do_not_compile = True
    model.register_forward_pre_hook(lambda *given: ran.append("hook"))
    delay = child.DraftDelay(model, lambda us: ran.append(us))
    assert (model(x=1), ran) == (2, ["forward"])
    delay.draw = lambda: 7.0
    assert (model(x=2), ran) == (4, ["forward", 7.0, "forward"])
    assert "hook" not in ran


def test_the_drafters_attention_is_its_own_from_0_21_on(release):
    """Why arms name the backend of both: what is not named is chosen anew for the drafter."""
    fields = {
        node.target.id
        for node in upstream.definition(release, "vllm/config/speculative.py", "SpeculativeConfig").body
        if isinstance(node, ast.AnnAssign)
    }
    own = upstream.definition(release, PROPOSER, "SpecDecodeBaseProposer._create_draft_vllm_config")
    taken = [ast.unparse(node.value) for node in ast.walk(own) if isinstance(node, ast.keyword)]
    apart = release.version != "0.20.0"
    assert ("attention_backend" in fields) is ("spec_cfg.attention_backend" in taken) is apart


def test_the_patch_wraps_the_builds_that_fill_page_locked_buffers(release):
    """All of them go through `build` of one class: it alone calls what fills, and nothing else of it overrides."""
    path = "vllm/v1/attention/backends/flashinfer.py"
    builder = upstream.definition(release, path, "FlashInferMetadataBuilder")
    methods = {node.name: node for node in builder.body if isinstance(node, ast.FunctionDef)}
    fills = {
        name
        for name, method in methods.items()
        for call in ast.walk(method)
        if isinstance(call, ast.Call)
        and ast.unparse(call.func).endswith((".plan", "fast_plan_decode", "_compute_flashinfer_kv_metadata"))
    }
    assert fills == {"build"}
    assert "build_for_drafting" not in methods
