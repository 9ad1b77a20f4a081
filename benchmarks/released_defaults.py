"""What released vLLM makes of settings that a launch leaves out, by running its own configuration code.

`python benchmarks/released_defaults.py src/specmortem/exposure/defaults.csv` lifts, from each release, what chooses the
model runner, asynchronous scheduling, prefix caching and the cache mode of recurrent state, and runs it for kinds of
models, drafters and pipelines. Objects that it asks for are stand-ins with the values of a plain launch on a CUDA
machine. A setting that cannot be run that way has an empty field, and the reason beside it. `specmortem.exposure`
takes its defaults from that table.
"""

from __future__ import annotations

import ast
import csv
import itertools
import typing
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import click

from specmortem import upstream
from specmortem.upstream.tree import Tree

VLLM, ARGS = "vllm/config/vllm.py", "vllm/engine/arg_utils.py"
MODEL, MODELS = "vllm/config/model.py", "vllm/model_executor/models/config.py"
SPECULATIVE = "vllm/config/speculative.py"
COLUMNS = (
    "release", "model", "method", "pipeline", "runner", "async_v1", "async_v2", "prefix_caching", "cache_mode",
    "cache_mode_if_cached", "not_run",
)  # fmt: skip
METHODS = ("none", "mtp", "eagle", "eagle3", "dflash", "ngram", "suffix")
SUPPORTS_ALL = "mamba2"
# (kind, architecture, hybrid, mixture of experts); a mamba2 hybrid is one whose class supports mode `all`.
MODEL_KINDS = (
    ("gdn", "Qwen3NextForCausalLM", True, True),
    (SUPPORTS_ALL, "NemotronHForCausalLM", True, False),
    ("dense", "LlamaForCausalLM", False, False),
    ("qwen3", "Qwen3ForCausalLM", False, False),
    ("moe", "Qwen3MoeForCausalLM", False, True),
)


class NotRunError(Exception):
    """The released code asked for something that has no stand-in."""


class Stand(SimpleNamespace):
    """An object of vLLM's with the fields that it has been given; any other is an error that names it."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise NotRunError(f"no stand-in for .{name}")


class Quiet:
    """A logger that says nothing."""

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *args, **kwargs: None


CUDA = Stand(
    is_rocm=lambda: False, is_unspecified=lambda: False, is_cuda=lambda: True, is_cuda_alike=lambda: True
)


def engine(
    architecture: str, hybrid: bool, moe: bool, method: str, pipeline: int, supports_all: bool
) -> Stand:
    """The configuration objects of a plain `vllm serve` on a CUDA machine."""
    none = method == "none"
    return Stand(
        model_config=Stand(
            architectures=[architecture],
            architecture=architecture,
            runner_type="generate",
            is_hybrid=hybrid,
            is_attention_free=False,
            has_inner_state=hybrid,
            is_moe=moe,
            is_quantized=False,
            is_diffusion=False,
            is_encoder_decoder=False,
            use_mla=False,
            attn_type="hybrid" if hybrid else "decoder",
            pooler_config=None,
            max_model_len=32768,
            supports_mamba_prefix_caching=supports_all,
            is_chunked_prefill_supported=True,
            is_prefix_caching_supported=None,
            hf_config=Stand(),
            logits_processors=None,
            enable_return_routed_experts=False,
            enable_prompt_embeds=False,
            is_multimodal_model=False,
            logprobs_mode="raw_logprobs",
        ),
        speculative_config=None if none else drafter(method),
        parallel_config=Stand(
            pipeline_parallel_size=pipeline,
            tensor_parallel_size=1,
            data_parallel_size=1,
            prefill_context_parallel_size=1,
            decode_context_parallel_size=1,
            distributed_executor_backend="mp",
            use_ubatching=False,
            enable_dbo=False,
            enable_elastic_ep=False,
            enable_eplb=False,
            all2all_backend="allgather_reducescatter",
        ),
        scheduler_config=Stand(async_scheduling=None, enable_chunked_prefill=True),
        compilation_config=Stand(
            mode="VLLM_COMPILE", pass_config=Stand(enable_sp=False), static_forward_context={}
        ),
        cache_config=Stand(
            enable_prefix_caching=None,
            mamba_cache_mode="none",
            mamba_block_size=None,
            block_size=16,
            kv_sharing_fast_prefill=False,
            cache_dtype="auto",
            prefix_match_unit=None,
            enable_mamba_shared_prefix_checkpoint=False,
        ),
        attention_config=Stand(hisparse_config=None),
        lora_config=None,
        kv_transfer_config=None,
        ec_transfer_config=None,
        watermark_config=None,
        structured_outputs_config=Stand(),
        reasoning_config=None,
    )


def drafter(method: str) -> Stand:
    """A speculative configuration with its defaults."""
    return Stand(
        method=method,
        disable_padded_drafter_batch=False,
        parallel_drafting=method == "dflash",
        use_heterogeneous_vocab=False,
        draft_model_config=Stand(architectures=["DFlashDraftModel"], hf_config=Stand(layer_types=[])),
        enable_multi_layers_mtp=False,
        draft_tensor_parallel_size=1,
        draft_sample_method="greedy",
        use_local_argmax_reduction=False,
        rejection_sample_method="standard",
        uses_draft_model=lambda: False,
        use_eagle=lambda: method in ("mtp", "eagle", "eagle3"),
        enable_adaptive_verification=False,
        uses_dynamic_speculative_decoding=lambda: False,
    )


def runner(tree: Tree, config: Stand) -> str:
    """`v1` or `v2`, as `use_v2_model_runner` of the release has it; `v1` where there is none."""
    provide = {
        "envs": Stand(VLLM_USE_V2_MODEL_RUNNER=None),
        "logger": Quiet(),
        "HAS_TRITON": True,
        "current_platform": CUDA,
    }
    names = ("use_v2_model_runner", "_is_default_v2_model_runner_model",
             "_get_v2_model_runner_unsupported_features", "_dflash_needs_multi_kv_group", "_is_dflash2_draft",
             "_is_dflash_candidate_draft")  # fmt: skip
    for name in names:
        try:
            function = upstream.lift_method(tree, VLLM, f"VllmConfig.{name}", provide).function
        except upstream.NotPresentError:
            if name == names[0]:
                return "v1"
            continue
        setattr(config, name, lambda function=function: function(config))
    return "v2" if config.use_v2_model_runner() else "v1"


def async_scheduling(tree: Tree, config: Stand, chosen: str) -> bool:
    """Run the statements of `VllmConfig.__post_init__` that decide it, with an executor that supports it."""
    body = upstream.definition(tree, VLLM, "VllmConfig.__post_init__").body
    last = next(n for n, node in enumerate(body) if _decides_async(node))
    first = next(n for n, node in enumerate(body) if _assigns(node, "executor_supports_async_sched")) + 1
    module = ast.fix_missing_locations(ast.Module(body[first : last + 1], []))
    config.use_v2_model_runner = chosen == "v2"
    config.scheduler_config.async_scheduling = None
    names = {
        "self": config,
        "logger": Quiet(),
        "get_args": typing.get_args,
        "executor_supports_async_sched": True,
        "executor_backend": "mp",
        "current_platform": CUDA,
        **literals(tree),
    }
    exec(compile(module, VLLM, "exec"), names)
    return bool(config.scheduler_config.async_scheduling)


def _decides_async(node: ast.stmt) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test) == "self.scheduler_config.async_scheduling"


def _assigns(node: ast.stmt, name: str) -> bool:
    return isinstance(node, ast.Assign) and any(ast.unparse(target) == name for target in node.targets)


def literals(tree: Tree) -> dict[str, Any]:
    """The names that vllm/config/speculative.py gives to sets of methods."""
    names: dict[str, Any] = {"Literal": typing.Literal, "get_args": typing.get_args}
    for node in ast.parse(tree.fetch([SPECULATIVE])[SPECULATIVE].read_bytes()).body:
        if isinstance(node, ast.Assign) and "Types" in ast.unparse(node.targets[0]):
            exec(compile(ast.Module([node], []), SPECULATIVE, "exec"), names)
    return {name: value for name, value in names.items() if name.endswith("Types")}


def prefix_caching(tree: Tree, config: Stand) -> bool:
    """The statement of `EngineArgs` that gives its default, after `ModelConfig.is_prefix_caching_supported`."""
    model = config.model_config
    supported = upstream.lift_method(
        tree, MODEL, "ModelConfig.is_prefix_caching_supported", {"logger": Quiet()}
    )
    model.is_prefix_caching_supported = supported.function(model)
    body = upstream.definition(
        tree, ARGS, "EngineArgs._set_default_chunked_prefill_and_prefix_caching_args"
    ).body
    statement = next(node for node in body if _assigns(node, "default_prefix_caching"))
    names: dict[str, Any] = {"model_config": model}
    exec(compile(ast.Module([statement], []), ARGS, "exec"), names)
    return bool(names["default_prefix_caching"])


def cache_mode(tree: Tree, config: Stand, cached: bool) -> str:
    """What `MambaModelConfig` makes of mode none."""
    if not config.model_config.is_hybrid:
        return "none"
    config.cache_config.enable_prefix_caching = cached
    config.cache_config.mamba_cache_mode = "none"
    update = upstream.lift_method(
        tree, MODELS, "MambaModelConfig.verify_and_update_config", {"logger": Quiet()}
    )
    update.function(None, config)
    return str(config.cache_config.mamba_cache_mode)


def rows(tree: Tree) -> Iterator[dict[str, Any]]:
    """One row for each kind of model, method and pipeline."""
    for (kind, architecture, hybrid, moe), method, pipeline in itertools.product(
        MODEL_KINDS, METHODS, (1, 2)
    ):
        config = engine(architecture, hybrid, moe, method, pipeline, kind == SUPPORTS_ALL)
        row: dict[str, Any] = {"model": kind, "method": method, "pipeline": pipeline}
        lost: list[str] = []

        def take(
            name: str, found: Callable[[], Any], row: dict[str, Any] = row, lost: list[str] = lost
        ) -> None:
            try:
                row[name] = found()
            except (NotRunError, upstream.LiftError, StopIteration, Exception) as error:
                row[name] = ""
                lost.append(f"{name}: {type(error).__name__}: {error}")

        take("runner", lambda config=config: runner(tree, config))
        for chosen in ("v1", "v2"):
            take(
                f"async_{chosen}", lambda config=config, chosen=chosen: async_scheduling(tree, config, chosen)
            )
        take("prefix_caching", lambda config=config: prefix_caching(tree, config))
        take("cache_mode", lambda config=config, row=row: cache_mode(tree, config, row["prefix_caching"]))
        take("cache_mode_if_cached", lambda config=config: cache_mode(tree, config, True))
        yield {**row, "not_run": "; ".join(lost)}


@click.command()
@click.argument("out", type=click.Path(path_type=Path))
@click.argument("releases", nargs=-1)
def main(out: Path, releases: tuple[str, ...]) -> None:
    """Write OUT.csv for RELEASES, by default those of data/audit.csv."""
    from specmortem.affected.released import released

    with out.open("w", encoding="utf-8", newline="") as stream:
        writer = csv.DictWriter(stream, COLUMNS, lineterminator="\n")
        writer.writeheader()
        for release in releases or released().releases:
            tree = upstream.resolve(f"vllm=={release}")
            for row in rows(tree):
                writer.writerow({"release": release, **row})
            click.echo(release)


if __name__ == "__main__":
    main()
