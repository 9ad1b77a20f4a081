"""What the child relies on exists in the releases that the arms name, by their source."""

from __future__ import annotations

import ast
import re
from collections import deque
from types import SimpleNamespace

import pytest

from specmortem import upstream
from specmortem.tools.engine import arms, child

pytestmark = [pytest.mark.network, pytest.mark.usefixtures("package_index")]

RELEASES = (arms.OLDEST, "0.22.1", "0.23.0", "0.24.0", arms.NEWEST)
ARGS, ENGINE = "vllm/engine/arg_utils.py", "vllm/v1/engine/llm_engine.py"
SAMPLING, OUTPUTS = "vllm/sampling_params.py", "vllm/outputs.py"


@pytest.fixture(params=RELEASES)
def release(request):
    return upstream.resolve(f"vllm=={request.param}")


def source(release, path):
    return release.fetch([path])[path].read_text(encoding="utf-8")


def annotated(release, path, name):
    """Names that a class body annotates or assigns."""
    found = set()
    for node in upstream.definition(release, path, name).body:
        if isinstance(node, ast.AnnAssign):
            found.add(node.target.id)
        elif isinstance(node, ast.Assign):
            found.update(target.id for target in node.targets)
    return found


def parameters(release, path, name, method):
    function = upstream.definition(release, path, f"{name}.{method}")
    every = [*function.args.posonlyargs, *function.args.args]
    needed = every[: len(every) - len(function.args.defaults)]
    return [arg.arg for arg in every], [arg.arg for arg in needed]


@pytest.mark.parametrize(
    ("method", "given"),
    [
        ("from_engine_args", ["cls", "engine_args"]),
        ("add_request", ["self", "request_id", "prompt", "params"]),
        ("abort_request", ["self", "request_ids"]),
        ("step", ["self"]),
        ("get_metrics", ["self"]),
    ],
)
def test_methods_of_the_engine_take_what_they_are_given(release, method, given):
    every, needed = parameters(release, ENGINE, "LLMEngine", method)
    assert every[: len(given)] == given
    assert set(needed) <= set(given)


def test_every_engine_argument_of_the_arms_is_one(release):
    fields = annotated(release, ARGS, "EngineArgs")
    used = {"model", "disable_log_stats"}
    for slug in arms.with_arms():
        for arm in arms.load(slug).arms:
            if arm.vllm == release.version:
                used |= set(arm.engine)
    assert used <= fields


def test_the_releases_of_all_arms_are_looked_at():
    named = {arm.vllm for slug in arms.with_arms() for arm in arms.load(slug).arms}
    assert named == {"0.22.1", "0.23.0", "0.24.0"} <= set(RELEASES)


def test_requests_are_described_as_the_child_does(release):
    fields = annotated(release, SAMPLING, "SamplingParams")
    given = {"temperature", "seed", "max_tokens", "ignore_eos", "stop_token_ids", "detokenize", "output_kind"}
    assert given <= fields
    assert "DELTA" in annotated(release, SAMPLING, "RequestOutputKind")
    tokens = upstream.definition(release, "vllm/inputs/engine.py", "TokensInput")
    assert {"type", "prompt_token_ids"} <= annotated(release, "vllm/inputs/engine.py", "TokensInput")
    assert "Literal['token']" in ast.unparse(tokens)


def test_outputs_hold_what_the_child_reads(release):
    assert {"token_ids", "finish_reason"} <= annotated(release, OUTPUTS, "CompletionOutput")
    every, _ = parameters(release, OUTPUTS, "RequestOutput", "__init__")
    assert {"request_id", "outputs", "finished"} <= set(every)


def test_counters_have_the_names_that_the_child_looks_for(release):
    told = set(re.findall(r'"(vllm:spec_decode\w+)"', source(release, "vllm/v1/spec_decode/metrics.py")))
    assert told == set(child.COUNTERS)
    reader = "vllm/v1/metrics/reader.py"
    assert annotated(release, reader, "Counter") == {"value"}
    assert annotated(release, reader, "Vector") == {"values"}
    assert "name" in annotated(release, reader, "Metric")


def test_the_environment_variables_of_every_arm_are_read(release):
    text = source(release, "vllm/envs.py")
    for name in arms.ALWAYS_ENV:
        assert not name.startswith("VLLM_") or f'"{name}"' in text


def test_what_the_engine_settled_on_is_where_the_child_looks(release):
    assert {"block_size", "mamba_cache_mode"} <= annotated(release, "vllm/config/cache.py", "CacheConfig")
    assert "async_scheduling" in annotated(release, "vllm/config/scheduler.py", "SchedulerConfig")
    assert "self.vllm_config = vllm_config" in source(release, ENGINE)


def test_the_method_and_the_backends_that_arms_name_are_known(release):
    assert '"qwen3_next_mtp"' in source(release, "vllm/config/speculative.py")
    known = annotated(release, "vllm/v1/attention/backends/registry.py", "AttentionBackendEnum")
    assert {"FLASHINFER", "FLASH_ATTN"} <= known


def test_statistics_are_kept_unless_they_are_disabled(release):
    tree = ast.parse(source(release, ENGINE))
    calls = [
        ast.unparse(keyword.value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        for keyword in node.keywords
        if keyword.arg == "log_stats"
    ]
    assert "not engine_args.disable_log_stats" in calls


def test_an_asynchronous_step_may_come_back_empty_and_be_called_again_when_all_is_done(release):
    """As `Repetition.main` does: with no request and an empty queue a step returns and touches nothing."""
    core_file, client_file = "vllm/v1/engine/core.py", "vllm/v1/engine/core_client.py"
    step = upstream.lift_method(release, core_file, "EngineCore.step_with_batch_queue").function
    core = SimpleNamespace(
        batch_queue=deque(), batch_queue_size=2, scheduler=SimpleNamespace(has_requests=lambda: False)
    )
    assert step(core) == (None, False)
    ended, empty = [], object()
    core.step_fn, core.post_step = lambda: step(core), lambda **fields: ended.append(fields)
    provided = {"EngineCoreOutputs": lambda: empty}
    output = upstream.lift_method(release, client_file, "InprocClient.get_output", provided).function
    assert output(SimpleNamespace(engine_core=core)) is empty
    assert ended == [{"model_executed": False}]


def test_flashinfers_kernels_are_compiled_after_the_start_where_layers_differ(release):
    """Why requests are sent before the first run: the warm-up asks for FlashInfer in all groups."""
    text = source(release, "vllm/model_executor/warmup/kernel_warmup.py")
    (warm,) = (
        node
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.If) and "_is_flashinfer_backend" in ast.unparse(node.test)
    )
    assert "all((_is_flashinfer_backend(" in ast.unparse(warm.test)
    assert "force_attention=True" in ast.unparse(warm)
