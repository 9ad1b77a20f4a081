"""The released draft loop over the released FlashInfer metadata builder, without vLLM and with or without a GPU.

Both classes are lifted and made on stub configurations: eager, one rank, the V1 runner, no TensorRT-LLM kernels. Stood
in for: the model, FlashInfer's wrapper (`StagedWrapper`), what the two files import from elsewhere, and the kernel that
advances the lengths, unless a probe gives the released one. On the CPU the released code's own PyTorch calls run on the
stand-in for CUDA (`detect.staging.simulated_cuda`); on CUDA they run as they are.
"""

from __future__ import annotations

import inspect
import os
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import fields
from types import MappingProxyType, SimpleNamespace
from typing import Any

import numpy as np
import torch

from specmortem import upstream
from specmortem.detect.staging import TorchWatch, simulated_cuda
from specmortem.detect.staging.simulated import Carrier
from specmortem.device import Event, Observer, Schedule, Stream
from specmortem.incidents.mtp_draft_loop.launches import KnownKernel
from specmortem.upstream.vllm_files import ATTENTION_BACKEND, DRAFTER, FLASHINFER, TORCH_UTILS

if os.environ.get("TRITON_INTERPRET") == "1":
    import torch._dynamo  # torch's shape functions do at their first call: a second, here once for all forks

BUILDER, PROPOSER, METADATA = "FlashInferMetadataBuilder", "SpecDecodeBaseProposer", "CommonAttentionMetadata"
COPY_INDICES, ADVANCE = "_copy_page_indices_kernel", "eagle_step_update_slot_mapping_and_metadata"
REAL_MODULES = (
    "vllm.triton_utils",
    "vllm.logger",
    "vllm.utils.math_utils",
    "vllm.v1.attention.backend",
    "vllm.v1.attention.backends.utils",
    "vllm.v1.utils",
)
DEVICE = torch.device("cuda")  # the name that released code is given, also where it is simulated
K, PAGE, LAYER, HIDDEN = 5, 16, "layer0", 8
UNUSED_FEATURES = (
    "uses_mrope uses_xdrope_dim draft_uses_xdrope_dim parallel_drafting supports_mm_inputs needs_extra_input_slots "
    "constant_draft_positions use_heterogeneous_vocab _share_mtp_indices"
).split()
LENGTHS = (61, 62, 63, 64)  # in each draft step another request enters a new page
STALL_CYCLES = 100_000_000  # about 50 ms


class Bench:
    """Where released PyTorch code runs: on a GPU; on the simulator `_SimulatedBench`."""

    waits = -1  # how often the host has waited for the device; -1 where that is not counted

    def __init__(self) -> None:
        self.stalled: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]

    def stall(self) -> None:
        """Keep the stream busy."""
        torch.cuda._sleep(STALL_CYCLES)  # type: ignore[no-untyped-call]
        self.stalled.record()

    def is_busy(self) -> bool:
        """Whether the stream is still busy with the latest stall."""
        return not self.stalled.query()

    def kernel(self, kernel: Any, addresses: bool = False) -> Any:
        """A kernel that is launched into the stream; `addresses` says that its arguments hold addresses of memory."""
        return kernel

    def synchronize(self) -> None:
        """Let the device finish."""
        torch.cuda.synchronize()


class _SimulatedBench(Bench, Observer):
    """Under the lazy schedule nothing runs before the host waits, so that no stall is needed."""

    def __init__(self, watch: TorchWatch) -> None:
        assert isinstance(watch.interceptor, Carrier)
        self.carrier, self.waits = watch.interceptor, 0
        self.carrier.device.observers.append(self)

    def synchronized(self, target: Stream | Event | None, site: str) -> None:
        self.waits += 1

    def stall(self) -> None:
        pass

    def is_busy(self) -> bool:
        return True

    def kernel(self, kernel: Any, addresses: bool = False) -> Any:
        return self.carrier.queued(kernel if addresses else KnownKernel(kernel))

    def synchronize(self) -> None:
        self.carrier.synchronize()


@contextmanager
def bench(device: str, schedule: str | Schedule = "lazy") -> Iterator[Bench]:
    """The bench of a device; `schedule` says when simulated work runs.

    Warnings of releases that read their own deprecated fields are not shown.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        if device == "cuda":
            yield Bench()
            return
        with simulated_cuda(schedule) as watch:
            yield _SimulatedBench(watch)


# Stand-ins for what the released files import


def stand_ins(**given: Any) -> upstream.StandIns:
    """Given values, the machine, and a stub for what comes from vLLM or FlashInfer, but for modules that are lifted."""
    return upstream.StandIns(platform() | given, modules=REAL_MODULES, packages=("vllm", "flashinfer"))


class _Platform:
    """A GPU on which FlashInfer plans: no TensorRT-LLM kernels, compute capability 9.0."""

    def fp8_dtype(self) -> torch.dtype:
        return torch.float8_e4m3fn

    def has_device_capability(self, capability: int) -> bool:
        return capability <= 90

    def is_device_capability(self, capability: int) -> bool:
        return capability == 90

    def is_device_capability_family(self, capability: int) -> bool:
        return capability == 90

    def get_device_capability(self) -> Any:
        return SimpleNamespace(major=9, minor=0)


def platform() -> dict[str, Any]:
    """Names that released files ask about the machine; memory can be pinned."""
    return {
        "PIN_MEMORY": True,
        "is_pin_memory_available": lambda: True,
        "current_platform": _Platform(),
    }


def upload_helper(tree: upstream.Tree) -> dict[str, Any]:
    """The released helper that uploads from a page-locked copy, by its name, where the tree has one."""
    try:
        helper = upstream.lift(tree, TORCH_UTILS, "async_tensor_h2d", provide=platform()).function
    except upstream.NotPresentError:
        return {}
    return {"async_tensor_h2d": helper}


def _config(drafts: int = K) -> SimpleNamespace:
    """The parts of a vLLM configuration that the builder and the drafter read: eager, one rank, the V1 runner.

    `use_trtllm_attention` is off: FlashInfer plans on the host also where a release would take the TensorRT-LLM or XQA
    kernels on this capability.
    """
    no_graphs = SimpleNamespace(decode_mode=lambda: "none")
    ranks = ("decode_context_parallel_size", "data_parallel_size")
    interleaved = ("dcp_kv_cache_interleave_size", "cp_kv_cache_interleave_size")
    return SimpleNamespace(
        cache_config=SimpleNamespace(cache_dtype="auto", get_resolved_kv_cache_layout=lambda: "NHD"),
        model_config=SimpleNamespace(
            max_model_len=4096, dtype=torch.float16, uses_mrope=False, get_num_attention_heads=lambda _: 24
        ),
        attention_config=SimpleNamespace(
            use_trtllm_attention=False, disable_flashinfer_q_quantization=True, use_non_causal=False
        ),
        compilation_config=SimpleNamespace(cudagraph_mode=no_graphs, max_cudagraph_capture_size=None),
        scheduler_config=SimpleNamespace(max_num_seqs=8, max_num_batched_tokens=256),
        parallel_config=SimpleNamespace(**dict.fromkeys((*ranks, *interleaved), 1), dcp_comm_backend="ag_rs"),
        speculative_config=SimpleNamespace(
            num_speculative_tokens=drafts, parallel_drafting=False, enable_adaptive_verification=False
        ),
        num_speculative_tokens=drafts,
        use_v2_model_runner=False,
    )


def _builder_stand_ins() -> upstream.StandIns:
    same = {"has_same_window_lefts": True, "has_same_all_params": True}
    parameters = SimpleNamespace(sm_scale=1.0, window_left=-1, logits_soft_cap=None, has_sinks=False, **same)
    environment = SimpleNamespace(
        VLLM_BATCH_INVARIANT=False, VLLM_USE_V2_MODEL_RUNNER=False, VLLM_FLASHINFER_WORKSPACE_BUFFER_SIZE=1024
    )
    return stand_ins(
        envs=environment,
        get_dcp_group=lambda: SimpleNamespace(world_size=1, rank_in_group=0),
        get_dcp_world_size_and_rank=lambda *_: (1, 0),
        can_use_trtllm_attention=lambda *_, **__: False,
        use_trtllm_attention=lambda *_, **__: False,
        get_per_layer_parameters=lambda *_: {},
        infer_global_hyperparameters=lambda _: parameters,
        get_num_attention_heads_from_layers=lambda *_: None,
        get_kv_cache_layout=lambda: "NHD",
        get_flashinfer_layout_string=lambda _: "NHD",
        gpu_sync_allowed=nullcontext,
        get_seq_lens=_lengths,
        CUDAGraphMode=SimpleNamespace(FULL="full", NONE="none"),
        KVQuantMode=SimpleNamespace(NONE="none"),
        BatchDecodeWithPagedKVCacheWrapper=StagedWrapper,
        BatchPrefillWithPagedKVCacheWrapper=StagedWrapper,
    )


def _lengths(indptr: torch.Tensor, last_page_len: torch.Tensor, page_size: int) -> torch.Tensor:
    """Sequence lengths from page counts, as FlashInfer's helper of this purpose gives them."""
    return torch.clamp(indptr[1:] - indptr[:-1] - 1, min=0) * page_size + last_page_len


class StagedWrapper:
    """In place of a FlashInfer wrapper: `plan` fills one page-locked buffer and enqueues its copy.

    That released FlashInfer does so is what the subjects `flashinfer==X` show. The plan is reduced to the page counts
    that it is made of.
    """

    is_cuda_graph_enabled = False

    def __init__(self, *_: Any, **__: Any) -> None:
        self.staging = torch.zeros(16, dtype=torch.int32, pin_memory=True)
        self.workspace = torch.zeros(16, dtype=torch.int32, device=DEVICE)
        self.plans: list[list[int]] = []

    def plan(self, **arguments: Any) -> None:
        """Plan from the page counts in `indptr` or `paged_kv_indptr`, on the host."""
        indptr = arguments["indptr"] if "indptr" in arguments else arguments["paged_kv_indptr"]
        n = len(indptr)
        self.staging[:n].numpy()[:] = indptr.to("cpu").numpy()
        self.workspace[:n].copy_(self.staging[:n], non_blocking=True)
        self.plans.append(self.staging[:n].tolist())


def build_builder(tree: upstream.Tree, on: Bench, drafts: int = K) -> Any:
    """The released metadata builder, made by its own constructor.

    Raises upstream.NotPresentError when the tree has none.
    """
    given = _builder_stand_ins()
    given[COPY_INDICES] = on.kernel(upstream.lift(tree, FLASHINFER, COPY_INDICES).function)
    builder = upstream.lift(tree, FLASHINFER, BUILDER, provide=given).function
    heads = {"num_kv_heads": 4, "head_size": 256, "dtype": torch.float16}
    spec = SimpleNamespace(block_size=PAGE, kv_quant_mode="none", dcp_sharded=False, **heads)
    return builder(spec, [LAYER], _config(drafts), DEVICE)


# The draft loop


class _AttentionGroup:
    """An attention group of one builder."""

    layer_names = (LAYER,)

    def __init__(self, builder: Any) -> None:
        self.builder = builder

    def get_metadata_builder(self) -> Any:
        return self.builder

    def build_metadata_for_drafting(self, common_attn_metadata: Any, draft_index: int) -> Any:
        return self.builder.build_for_drafting(common_attn_metadata, draft_index)


def _advance(seq_lens: torch.Tensor, positions_1d: torch.Tensor, **rest: Any) -> None:
    """In place of the drafter's kernel of this purpose: positions and lengths go up by one, on the device."""
    seq_lens += 1
    rest["out_clamped_positions"].copy_(positions_1d + 1)


class Drafter:
    """The released draft loop over the released builder; a probe gives it the eyes, `watch_builds` and `forward`."""

    def __init__(
        self,
        tree: upstream.Tree,
        on: Bench,
        drafts: int = K,
        provide: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        """Lift and make both; `provide` replaces what stands in for names of the drafter's file.

        Raises upstream.NotPresentError where the release lacks a part.
        """
        path = tree.first(DRAFTER)
        if path is None:
            raise upstream.NotPresentError(f"{tree.subject} has no file {DRAFTER[0]}")
        given = stand_ins(
            **{"set_forward_context": lambda *_, **__: nullcontext(), ADVANCE: _advance, **provide}
        )
        self.on, self.tree, self.drafts = on, tree, drafts
        self.builder = build_builder(tree, on, drafts)
        proposer = upstream.lift(tree, path, PROPOSER, provide=given).function
        self.proposer = proposer.__new__(proposer)
        vars(self.proposer).update(self._attributes())
        self.metadata_class = upstream.lift(tree, ATTENTION_BACKEND, METADATA, provide=stand_ins()).function
        self.watch_builds()

    def watch_builds(self) -> None:
        """Note what a probe wants to know of each build of metadata."""

    def forward(self, hidden_states: torch.Tensor, **_: Any) -> torch.Tensor:
        """In place of a forward of the draft model."""
        return hidden_states + 1

    def _attributes(self) -> dict[str, Any]:
        rows = len(LENGTHS) * (self.drafts + 1)
        off = dict.fromkeys(UNUSED_FEATURES, False)
        absent = dict.fromkeys(("allowed_attn_types", "eplb_state"))
        buffers = {
            "input_ids": torch.zeros(rows, dtype=torch.int32, device=DEVICE),
            "positions": torch.zeros(rows, dtype=torch.int64, device=DEVICE),
            "hidden_states": torch.zeros(rows, HIDDEN, device=DEVICE),
            "inputs_embeds": None,
            "arange": torch.arange(rows + 1, dtype=torch.int32, device=DEVICE),
            "token_arange_np": np.arange(rows + 1, dtype=np.int32),
            "_slot_mapping_buffer": torch.zeros(rows, dtype=torch.int64, device=DEVICE),
        }
        hooks = {
            "model": self.forward,
            "model_returns_tuple": lambda: False,
            "_determine_batch_execution_and_padding": lambda n, *_, **__: (None, n, None),
            "_greedy_sample": lambda hidden: hidden.argmax(dim=-1),
            "_sample_draft_tokens": lambda hidden, *_: (hidden.argmax(dim=-1), None),
            "_get_slot_mapping": lambda *_: {},
        }
        facts = {
            "method": "mtp",
            "num_speculative_tokens": self.drafts,
            "pass_hidden_states_to_model": True,
            "block_size": PAGE,
            "max_model_len": 4096,
            "hidden_size": HIDDEN,
            "vllm_config": _config(self.drafts),
            "draft_attn_groups": [_AttentionGroup(self.builder)],
        }
        return {**off, **absent, **buffers, **hooks, **facts}

    def metadata(self, host_lengths: bool) -> Any:
        """The batch's metadata: K + 1 tokens of each request; fields that a release lacks are left out.

        With `host_lengths` the lengths on the host and their upper bound are two tensors. So it is with asynchronous
        scheduling, where the build for the target has read the lengths from the GPU. Without it the runner of 0.20.0
        to 0.29.0 gives one tensor for both (cause `host-lengths-counted-twice`), which is not modelled here.
        """
        n, tokens = len(LENGTHS), self.drafts + 1
        starts = torch.arange(0, n * tokens + 1, tokens, dtype=torch.int32)
        offered = {
            "query_start_loc": starts.to(DEVICE),
            "query_start_loc_cpu": starts,
            "seq_lens": torch.tensor(LENGTHS, dtype=torch.int32, device=DEVICE),
            "num_reqs": n,
            "num_actual_tokens": n * tokens,
            "max_query_len": tokens,
            "max_seq_len": max(LENGTHS),
            "block_table_tensor": torch.arange(n * 256, dtype=torch.int32, device=DEVICE).reshape(n, 256),
            "slot_mapping": torch.zeros(n * tokens, dtype=torch.int64, device=DEVICE),
            "seq_lens_cpu_upper_bound": torch.tensor(LENGTHS, dtype=torch.int32),
        }
        if host_lengths:
            offered["_seq_lens_cpu"] = torch.tensor(LENGTHS, dtype=torch.int32)
        names = {each.name for each in fields(self.metadata_class)}
        return self.metadata_class(**{name: value for name, value in offered.items() if name in names})

    def propose(
        self,
        metadata: Any,
        positions: torch.Tensor,
        *,
        rejected: torch.Tensor | None = None,
        last_valid: torch.Tensor | None = None,
    ) -> None:
        """One step of drafts for tokens at `positions`, an int64 device tensor of one entry a token.

        `rejected` counts the rejected drafts of each request, `last_valid` is the row of its last valid token: int32
        device tensors. Arguments that a release does not take are left out.
        """
        offered = {
            "num_speculative_tokens": self.drafts,
            "target_token_ids": torch.zeros(len(positions), dtype=torch.int32, device=DEVICE),
            "target_positions": positions,
            "target_hidden_states": torch.zeros(len(positions), HIDDEN, device=DEVICE),
            "next_token_ids": torch.zeros(len(LENGTHS), dtype=torch.int32, device=DEVICE),
            "token_indices_to_sample": last_valid,
            "common_attn_metadata": metadata,
            "sampling_metadata": None,
            "num_rejected_tokens_gpu": rejected,
        }
        self.proposer.propose(**taken(self.proposer.propose, offered))


def taken(function: Callable[..., Any], offered: Mapping[str, Any]) -> dict[str, Any]:
    """The offered arguments that a function takes."""
    names = inspect.signature(function).parameters
    return {name: value for name, value in offered.items() if name in names}
