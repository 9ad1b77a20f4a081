"""Probes of incident `mtp-draft-loop`; each runs in an isolated process.

All three causes are one mistake: the host refills a page-locked buffer whose copy to the device is still queued. The
released classes are built by their own constructors on stub configurations and called twice, or K times, while the
device has run nothing; clones that are enqueued behind each call say what the device then finds. On the CPU the
released code's own PyTorch calls run on the stand-in for CUDA (`detect.staging.simulated_cuda`, schedule `lazy`:
nothing runs until the host waits); on CUDA they run on a stream that is kept busy.
"""

from __future__ import annotations

import ast
import inspect
import os
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, fields
from types import SimpleNamespace
from typing import Any, Protocol

import numpy as np
import torch

from specmortem import device as devices
from specmortem import upstream
from specmortem.detect.staging import TorchWatch, simulated_cuda
from specmortem.detect.staging.simulated import Carrier
from specmortem.device import Event, Observer, Prompt, Schedule, Stream
from specmortem.probes import ATTENTION_BACKEND, DRAFTER, FLASHINFER, TORCH_UTILS, WORKER_UTILS
from specmortem.verdict import Evidence, Verdict

if os.environ.get("TRITON_INTERPRET") == "1":
    import torch._dynamo  # torch's shape functions do at their first call: a second, here once for all forks

BUILDER, PROPOSER, ZEROER = "FlashInferMetadataBuilder", "SpecDecodeBaseProposer", "KVBlockZeroer"
COPY_INDICES, ZERO_BLOCKS = "_copy_page_indices_kernel", "_zero_kv_blocks_kernel"
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
    "uses_mrope",
    "uses_xdrope_dim",
    "draft_uses_xdrope_dim",
    "parallel_drafting",
    "supports_mm_inputs",
    "needs_extra_input_slots",
    "constant_draft_positions",
    "use_heterogeneous_vocab",
    "_share_mtp_indices",
)
LENGTHS = (61, 62, 63, 64)  # in each draft step another request enters a new page
STALL_CYCLES = 100_000_000  # about 50 ms
BATCHES_IN_FLIGHT = 2  # what asynchronous scheduling allows


class Bench(Protocol):
    """Where released PyTorch code runs."""

    @property
    def waits(self) -> int:
        """How often the host has waited for the device; -1 where that is not counted."""

    def stall(self) -> None:
        """Keep the stream busy."""

    def is_busy(self) -> bool:
        """Whether the stream is still busy with the latest stall; simulated work waits for the host anyway."""

    def kernel(self, kernel: Any) -> Any:
        """A kernel that is launched into the stream."""

    def synchronize(self) -> None:
        """Let the device finish."""


class _Waits(Observer):
    """Counts how often the host waits."""

    def __init__(self) -> None:
        self.count = 0

    def synchronized(self, target: Stream | Event | None, site: str) -> None:
        self.count += 1


class _Simulated:
    def __init__(self, watch: TorchWatch) -> None:
        assert isinstance(watch.interceptor, Carrier)
        self.carrier, self._waits = watch.interceptor, _Waits()
        self.carrier.device.observers.append(self._waits)

    @property
    def waits(self) -> int:
        return self._waits.count

    def stall(self) -> None:
        """Under the lazy schedule nothing runs anyway."""

    def is_busy(self) -> bool:
        return True

    def kernel(self, kernel: Any) -> Any:
        return self.carrier.queued(kernel)

    def synchronize(self) -> None:
        self.carrier.synchronize()


class _Cuda:
    waits = -1

    def __init__(self) -> None:
        self.stalled: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]

    def stall(self) -> None:
        torch.cuda._sleep(STALL_CYCLES)  # type: ignore[no-untyped-call]
        self.stalled.record()

    def is_busy(self) -> bool:
        return not self.stalled.query()

    def kernel(self, kernel: Any) -> Any:
        return kernel

    def synchronize(self) -> None:
        torch.cuda.synchronize()


@contextmanager
def bench(device: str, schedule: str | Schedule = "lazy") -> Iterator[Bench]:
    """The bench of a device; `schedule` says when simulated work runs."""
    if device == "cuda":
        yield _Cuda()
        return
    with simulated_cuda(schedule) as watch:
        yield _Simulated(watch)


def judge(cause: str, subject: str, device: str = "sim") -> dict[str, Any]:
    """Run the probe of `cause`; a verdict as JSON."""
    return _told(lambda: _JUDGES[cause](subject, device))


def three_drafts(subject: str, device: str = "sim") -> dict[str, Any]:
    """The released draft loop with 3 drafts, as JSON; on the simulator a copy into an idle stream runs at once."""
    return _told(lambda: _released_plans(subject, device, 3, prompt=True))


def _told(judged: Callable[[], Verdict]) -> dict[str, Any]:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            verdict = judged()
    except upstream.NotPresentError as error:
        verdict = Verdict.not_judged(f"not present: {error}", absent=str(error))
    return verdict.as_dict()


# Stand-ins for what the released files import


def _stub(name: str) -> type:
    """A class that can be named, subscripted, made with any arguments and asked `isinstance`."""
    body: dict[str, Any] = {"__init__": lambda self, *_, **__: None}
    return type(name, (), {**body, "__class_getitem__": classmethod(lambda cls, _: cls)})


def stand_ins(tree: upstream.Tree, path: str) -> dict[str, Any]:
    """A stub for every name that a file imports from vLLM or FlashInfer, but for the modules that are lifted."""
    given: dict[str, Any] = {}
    for node in ast.walk(ast.parse(tree.fetch([path])[path].read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and _is_foreign(node.module or ""):
            given |= {name.name: _stub(name.name) for name in node.names}
    return given | platform()


def _is_foreign(module: str) -> bool:
    return module.partition(".")[0] in ("vllm", "flashinfer") and module not in REAL_MODULES


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


def _config(drafts: int = K) -> SimpleNamespace:
    """The parts of a vLLM configuration that the builder and the drafter read: eager, one rank, the V1 runner.

    `use_trtllm_attention` is off: FlashInfer plans on the host also where a release would take the TensorRT-LLM or XQA
    kernels on this capability.
    """
    no_graphs = SimpleNamespace(decode_mode=lambda: "none")
    parallel: dict[str, Any] = {
        "decode_context_parallel_size": 1,
        "data_parallel_size": 1,
        "dcp_comm_backend": "ag_rs",
        "dcp_kv_cache_interleave_size": 1,
        "cp_kv_cache_interleave_size": 1,
    }
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
        parallel_config=SimpleNamespace(**parallel),
        speculative_config=SimpleNamespace(
            num_speculative_tokens=drafts, parallel_drafting=False, enable_adaptive_verification=False
        ),
        num_speculative_tokens=drafts,
        use_v2_model_runner=False,
    )


def _builder_stand_ins(tree: upstream.Tree) -> dict[str, Any]:
    parameters = SimpleNamespace(
        sm_scale=1.0,
        window_left=-1,
        logits_soft_cap=None,
        has_sinks=False,
        has_same_window_lefts=True,
        has_same_all_params=True,
    )
    one_rank = SimpleNamespace(world_size=1, rank_in_group=0)
    environment = SimpleNamespace(
        VLLM_BATCH_INVARIANT=False, VLLM_USE_V2_MODEL_RUNNER=False, VLLM_FLASHINFER_WORKSPACE_BUFFER_SIZE=1024
    )
    return stand_ins(tree, FLASHINFER) | {
        "envs": environment,
        "get_dcp_group": lambda: one_rank,
        "get_dcp_world_size_and_rank": lambda *_: (1, 0),
        "can_use_trtllm_attention": lambda *_, **__: False,
        "use_trtllm_attention": lambda *_, **__: False,
        "get_per_layer_parameters": lambda *_: {},
        "infer_global_hyperparameters": lambda _: parameters,
        "get_num_attention_heads_from_layers": lambda *_: None,
        "get_kv_cache_layout": lambda: "NHD",
        "get_flashinfer_layout_string": lambda _: "NHD",
        "gpu_sync_allowed": nullcontext,
        "get_seq_lens": _lengths,
        "CUDAGraphMode": SimpleNamespace(FULL="full", NONE="none"),
        "KVQuantMode": SimpleNamespace(NONE="none"),
        "BatchDecodeWithPagedKVCacheWrapper": StagedWrapper,
        "BatchPrefillWithPagedKVCacheWrapper": StagedWrapper,
    }


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
        self.plans.append([int(x) for x in self.staging[:n]])


def build_builder(tree: upstream.Tree, on: Bench, drafts: int = K) -> Any:
    """The released metadata builder, made by its own constructor.

    Raises upstream.NotPresentError when the tree has none.
    """
    given = _builder_stand_ins(tree)
    kernel = upstream.lift(tree, FLASHINFER, COPY_INDICES).function
    given[COPY_INDICES] = on.kernel(kernel)
    builder = upstream.lift(tree, FLASHINFER, BUILDER, provide=given).function
    spec = SimpleNamespace(
        block_size=PAGE,
        num_kv_heads=4,
        head_size=256,
        dtype=torch.float16,
        kv_quant_mode="none",
        dcp_sharded=False,
    )
    return builder(spec, [LAYER], _config(drafts), DEVICE)


# plan-staging-reuse


@dataclass
class Drafted:
    """What one step of drafts did: the plan of each rebuild, the one its forward read, and the host's waits.

    `busy` says of each rebuild, and of the step's end, whether the forward before was still running.
    """

    own: list[list[int]] = field(default_factory=list)
    read: list[torch.Tensor] = field(default_factory=list)
    waits: list[int] = field(default_factory=list)
    busy: list[bool] = field(default_factory=list)

    @property
    def seen(self) -> list[list[int]]:
        """What the forwards read; ask after the device has finished."""
        return [
            [int(x) for x in read[: len(own)].cpu()] for own, read in zip(self.own, self.read, strict=True)
        ]


class _Group:
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


class _Drafter:
    """The released draft loop over the released builder, with a model that reads the plan."""

    def __init__(self, tree: upstream.Tree, on: Bench, drafts: int = K) -> None:
        path = tree.first(DRAFTER)
        if path is None:
            raise upstream.NotPresentError(f"{tree.subject} has no file {DRAFTER[0]}")
        given = stand_ins(tree, path) | {
            "set_forward_context": lambda *_, **__: nullcontext(),
            "eagle_step_update_slot_mapping_and_metadata": _advance,
        }
        self.on, self.tree, self.drafts, self.drafted = on, tree, drafts, Drafted()
        self.builder = build_builder(tree, on, drafts)
        proposer = upstream.lift(tree, path, PROPOSER, provide=given).function
        self.proposer = proposer.__new__(proposer)
        vars(self.proposer).update(self._attributes())
        self._watch_builds()

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
            "model": self._forward,
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
            "draft_attn_groups": [_Group(self.builder)],
        }
        return {**off, **absent, **buffers, **hooks, **facts}

    def _watch_builds(self) -> None:
        build = self.builder.build_for_drafting

        def counted(*args: Any, **kwargs: Any) -> Any:
            before = self.on.waits
            if self.drafted.waits:
                self.drafted.busy.append(self.on.is_busy())
            metadata = build(*args, **kwargs)
            self.drafted.waits.append(self.on.waits - before)
            return metadata

        self.builder.build_for_drafting = counted

    def _forward(self, hidden_states: torch.Tensor, **_: Any) -> torch.Tensor:
        """A forward of the draft model: busy for a while, then the plan is read; the first one is a prefill."""
        self.on.stall()
        wrapper = self.builder._decode_wrapper
        if wrapper is not None and len(self.drafted.waits) > 1:
            self.drafted.own.append(wrapper.plans[-1])
            self.drafted.read.append(wrapper.workspace.clone())
        return hidden_states + 1

    def step(self, with_rejections: bool) -> Drafted:
        """Draft for each request; without rejections the host already holds the sequence lengths."""
        self.drafted = Drafted()
        n, tokens = len(LENGTHS), len(LENGTHS) * (self.drafts + 1)
        offered = {
            "num_speculative_tokens": self.drafts,
            "target_token_ids": torch.zeros(tokens, dtype=torch.int32, device=DEVICE),
            "target_positions": torch.zeros(tokens, dtype=torch.int64, device=DEVICE),
            "target_hidden_states": torch.zeros(tokens, HIDDEN, device=DEVICE),
            "next_token_ids": torch.zeros(n, dtype=torch.int32, device=DEVICE),
            "token_indices_to_sample": None,
            "common_attn_metadata": self._metadata(host_lengths=not with_rejections),
            "sampling_metadata": None,
            "num_rejected_tokens_gpu": torch.zeros(n, dtype=torch.int32, device=DEVICE)
            if with_rejections
            else None,
        }
        taken = inspect.signature(self.proposer.propose).parameters
        self.proposer.propose(**{name: value for name, value in offered.items() if name in taken})
        self.drafted.busy.append(self.on.is_busy())
        return self.drafted

    def _metadata(self, host_lengths: bool) -> Any:
        """The batch's metadata: K + 1 tokens of each request; fields that a release lacks are left out."""
        tokens = self.drafts + 1
        metadata = upstream.lift(
            self.tree, ATTENTION_BACKEND, "CommonAttentionMetadata", provide=stand_ins(self.tree, FLASHINFER)
        ).function
        n, starts = len(LENGTHS), torch.arange(0, len(LENGTHS) * tokens + 1, tokens, dtype=torch.int32)
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
        names = {each.name for each in fields(metadata)}
        return metadata(**{name: value for name, value in offered.items() if name in names})


def _plan_staging(subject: str, device: str) -> Verdict:
    if subject in ("before", "after"):
        return _own_plan(subject, device)
    if subject.startswith("flashinfer=="):
        return _flashinfer(subject, device)
    return _released_plans(subject, device, K)


def _released_plans(subject: str, device: str, drafts: int, *, prompt: bool = False) -> Verdict:
    """The released loop and builder; with `prompt` a simulated copy into an idle stream does not wait."""
    tree = upstream.resolve(subject)
    steps: dict[str, Drafted] = {}
    with bench(device, Prompt() if prompt else "lazy") as on:
        drafter = _Drafter(tree, on, drafts)
        for situation, with_rejections in (("rejections known", True), ("no rejections", False)):
            if device == "cuda":
                drafter.step(with_rejections)  # compiles
            on.synchronize()
            steps[situation] = drafter.step(with_rejections)
            on.synchronize()
    return _plan_verdict(tree, steps, device, drafts)


def _plan_verdict(tree: upstream.Tree, steps: Mapping[str, Drafted], device: str, drafts: int = K) -> Verdict:
    """A fault where a forward read another plan; clean only if each build and the end found the stream busy."""
    path = str(tree.first(DRAFTER))
    hashes = {
        f"{BUILDER}.build": upstream.body_hash(tree, FLASHINFER, f"{BUILDER}.build"),
        f"{PROPOSER}.propose": upstream.body_hash(tree, path, f"{PROPOSER}.propose"),
    }
    witness = f"V1 runner, K = {drafts}, {len(LENGTHS)} requests of {LENGTHS} tokens, pages of {PAGE}, no CUDA graph"
    detail: dict[str, Any] = {"hashes": hashes, "runner": "V1"}
    if device != "cuda":
        detail["host_waits_by_build"] = {name: step.waits for name, step in steps.items()}
    wrong = [(name, _first_difference(step)) for name, step in steps.items() if step.own != step.seen]
    if any(len(step.own) != drafts - 1 for step in steps.values()):
        return Verdict.not_judged(f"{tree.subject} does not plan each of {drafts - 1} draft steps", **detail)
    if not wrong and not all(busy for step in steps.values() for busy in step.busy):
        why = "every forward reads its own plan, and the stream had caught up before the next was made"
        return Verdict.not_judged(why, **detail, caught_up=True)
    if not wrong:
        return Verdict("clean", Evidence(witness, "every forward reads its own plan", detail=detail))
    observed = "; ".join(f"{name}: {told}" for name, told in wrong)
    place = (
        f"{BUILDER}.build ({FLASHINFER.rpartition('/')[2]}), {PROPOSER}.propose ({path.rpartition('/')[2]})"
    )
    return Verdict(
        "fault", Evidence(witness, observed, "every forward reads its own plan", place, detail=detail)
    )


def _first_difference(step: Drafted) -> str:
    pairs = enumerate(zip(step.own, step.seen, strict=True), start=1)
    j, own, seen = next((j, own, seen) for j, (own, seen) in pairs if own != seen)
    return f"the forward of draft step {j} reads page counts {seen}, its plan was {own}"


def _own_plan(arm: str, device: str) -> Verdict:
    """This package's planner: two plans of a batch that grows by a token, while the stream is busy."""
    from specmortem.experiments.mtp_layouts import H200, WORKED_EXAMPLE
    from specmortem.kernels.split_attention import Planner, Staging

    dev = devices.open("cuda" if device == "cuda" else "sim")
    planner = Planner(H200)
    first, second = (planner.plan([length + more for length in WORKED_EXAMPLE]) for more in (0, 1))
    size = max(first.nbytes, second.nbytes)
    target, clone = dev.zeros([size], torch.uint8, "plan"), dev.zeros([size], torch.uint8, "clone")
    staging, stream = Staging(dev, size, fresh=arm == "after"), dev.stream("draft")
    dev.synchronize()
    dev.spin(10_000, stream)
    staging.send(first, target, stream)
    dev.copy_async(clone, target, stream)
    staging.send(second, target, stream)
    dev.synchronize()
    read = first.seen_in(clone.cpu().numpy())
    wrong = [name for name, array in first.arrays.items() if not np.array_equal(array, read[name])]
    witness = f"plans of {WORKED_EXAMPLE} tokens and of one more each, {planner.geometry}"
    if not wrong:
        return Verdict("clean", Evidence(witness, "every array is the first plan's"))
    observed, expected = (
        f"merge_indptr {[int(x) for x in of['merge_indptr']]}" for of in (read, first.arrays)
    )
    return Verdict("fault", Evidence(witness, observed, expected, "Staging.send", detail={"arrays": wrong}))


def _flashinfer(subject: str, device: str) -> Verdict:
    """The real library: a second plan behind a stalled stream."""
    if device != "cuda":
        return Verdict.not_judged(f"{subject} needs a GPU: its planner is compiled for one", needs="cuda")
    from specmortem.experiments import flashinfer_real

    return flashinfer_real.verdict(subject)


# builder-staging-reuse


class _Calls:
    """Two calls behind a stall; what the first left for the device. Rounds before the last compile and allocate."""

    def __init__(
        self,
        on: Bench,
        call: Callable[[list[int]], torch.Tensor],
        first: list[int],
        second: list[int],
    ) -> None:
        for _ in range(3):
            on.synchronize()
            on.stall()
            clone = call(first)
            call(second)
            self.busy = on.is_busy()
        on.synchronize()
        self.found = [int(x) for x in clone.cpu()]

    def verdict(
        self, first: list[int], second: list[int], what: str, witness: str, hashes: dict[str, str]
    ) -> Verdict:
        """Clean if the device found the first call's values; a stream that has caught up proves nothing."""
        observed = f"behind the first call the device finds {what} {self.found}"
        evidence = Evidence(witness, observed, f"{what} {first}", detail={"hashes": hashes})
        if self.found == first and self.busy:
            return Verdict("clean", evidence)
        if self.found == second:
            return Verdict("fault", evidence)
        why = "neither call's" if self.busy else "and the stream had caught up before the second call ended"
        return Verdict.not_judged(f"{observed}, {why}", hashes=hashes, caught_up=not self.busy)


class _OwnStaging:
    """This package's arms: one page-locked buffer refilled at each call, or a fresh one each time."""

    def __init__(self, arm: str, size: int) -> None:
        self.arm = arm
        self.reused = torch.zeros(size, dtype=torch.int32, pin_memory=True)
        self.target = torch.zeros(size, dtype=torch.int32, device=DEVICE)

    def upload(self, values: Sequence[int]) -> torch.Tensor:
        """Enqueue the copy of some values; the device tensor that it writes."""
        n = len(values)
        source = self.reused[:n]
        if self.arm == "after":
            source = torch.zeros(n, dtype=torch.int32, pin_memory=True)
        source.numpy()[:] = values
        return self.target[:n].copy_(source, non_blocking=True)


def _indptr(counts: Sequence[int]) -> list[int]:
    return [int(x) for x in np.cumsum([0, *counts])]


def _builder_staging(subject: str, device: str) -> Verdict:
    """The row pointers as the device finds them between two builds."""
    first, second = [10, 10, 10, 10], [11, 11, 11, 11]
    witness = f"two builds while the device is busy: page counts {first}, then {second}"
    hashes: dict[str, str] = {}
    with bench(device) as on:
        build = (
            _own_build(subject) if subject in ("before", "after") else _released_build(subject, on, hashes)
        )
        calls = _Calls(on, lambda counts: build(counts).clone(), first, second)
    return calls.verdict(_indptr(first), _indptr(second), "row pointers", witness, hashes)


def _own_build(arm: str) -> Callable[[list[int]], torch.Tensor]:
    staging = _OwnStaging(arm, 5)
    return lambda counts: staging.upload(_indptr(counts))


def _released_build(subject: str, on: Bench, hashes: dict[str, str]) -> Callable[[list[int]], torch.Tensor]:
    tree = upstream.resolve(subject)
    name = f"{BUILDER}._compute_flashinfer_kv_metadata"
    hashes[name] = upstream.body_hash(tree, FLASHINFER, name)
    builder = build_builder(tree, on)
    table = torch.arange(128, dtype=torch.int32, device=DEVICE).reshape(4, 32)

    def build(counts: list[int]) -> torch.Tensor:
        blocks = np.array(counts, dtype=np.int32)
        builder._compute_flashinfer_kv_metadata(blocks, blocks * PAGE, table, len(counts), PAGE)
        pointers: torch.Tensor = builder.paged_kv_indptr.gpu[: len(counts) + 1]
        return pointers

    return build


# zeroer-staging-reuse


def _zeroer_staging(subject: str, device: str) -> Verdict:
    """Block 1 is zeroed, then block 2, while the device is busy; which of them is zero in between?"""
    witness = "block 1 is to be zeroed, then block 2, in two calls while the device is busy"
    hashes: dict[str, str] = {}
    with bench(device) as on:
        pool = torch.ones(4, 32, dtype=torch.int32, device=DEVICE)
        if subject in ("before", "after"):
            zero = _own_zeroer(subject, pool)
        else:
            tree = upstream.resolve(subject)
            name = f"{ZEROER}.zero_block_ids"
            hashes[name] = upstream.body_hash(tree, WORKER_UTILS, name)
            zero = _build_zeroer(tree, pool, on).zero_block_ids

        def zeroed(ids: list[int]) -> torch.Tensor:
            pool.fill_(1)
            zero(ids)
            return (pool == 0).all(dim=1).int()

        calls = _Calls(on, zeroed, [1], [2])
    return calls.verdict([0, 1, 0, 0], [0, 0, 1, 0], "zero blocks", witness, hashes)


def _own_zeroer(arm: str, pool: torch.Tensor) -> Callable[[list[int]], object]:
    staging = _OwnStaging(arm, 1)
    return lambda ids: pool.index_fill_(0, staging.upload(ids).long(), 0)


def _build_zeroer(tree: upstream.Tree, pool: torch.Tensor, on: Bench) -> Any:
    """The released zeroer over a pool of blocks, made by its own constructor."""
    kernel = upstream.lift(tree, WORKER_UTILS, ZERO_BLOCKS).function
    given = stand_ins(tree, WORKER_UTILS) | {ZERO_BLOCKS: on.kernel(kernel)}
    given |= _zeroer_parts(tree)
    spec = given.setdefault("FullAttentionSpec", given["AttentionSpec"])
    given["AttentionSpec"] = spec
    kv_cache_spec = spec()
    kv_cache_spec.block_size, kv_cache_spec.num_kv_heads, kv_cache_spec.head_size = 1, 1, 1
    group = SimpleNamespace(
        kv_cache_spec=kv_cache_spec,
        kv_cache_group_id=0,
        layer_names=[LAYER],
        kernel_block_stride=0,
        backend=SimpleNamespace(get_kv_cache_block_dim=lambda *_, **__: 0),
    )
    offered = {
        "device": DEVICE,
        "pin_memory": True,
        "attn_groups_iter": [group],
        "kernel_block_sizes": [1],
        "cache_dtype": "auto",
        "static_forward_context": {LAYER: SimpleNamespace(kv_cache=pool)},
        "num_blocks": len(pool),
        "runner_only_attn_layers": set(),
        "max_concurrency": BATCHES_IN_FLIGHT,
    }
    zeroer_class = upstream.lift(tree, WORKER_UTILS, ZEROER, provide=given).function
    zeroer = zeroer_class(**_taken(zeroer_class, offered))
    if hasattr(zeroer, "init_meta"):
        zeroer.init_meta(**_taken(zeroer.init_meta, offered))
    return zeroer


def _zeroer_parts(tree: upstream.Tree) -> dict[str, Any]:
    """The released upload helper, where the tree has one."""
    try:
        helper = upstream.lift(tree, TORCH_UTILS, "async_tensor_h2d", provide=platform()).function
    except upstream.NotPresentError:
        return {}
    return {"async_tensor_h2d": helper}


def _taken(function: Callable[..., Any], offered: Mapping[str, Any]) -> dict[str, Any]:
    """The offered arguments that a function takes."""
    names = inspect.signature(function).parameters
    return {name: value for name, value in offered.items() if name in names}


_JUDGES: dict[str, Callable[[str, str], Verdict]] = {
    "plan-staging-reuse": _plan_staging,
    "builder-staging-reuse": _builder_staging,
    "zeroer-staging-reuse": _zeroer_staging,
}
