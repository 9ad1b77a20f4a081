"""Probes: one cause, run on one subject, with small adversarial inputs, gives a verdict.

`judge("v2-null-block", "vllm==0.24.0")` fetches what it needs of that release, runs the released function in a process
of its own and returns a `Verdict`. What cannot be judged says why: an unreachable index, a function that the tree does
not have, a cause that needs a GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, Literal

from specmortem.errors import BadInputError, SpecmortemError, UnavailableError
from specmortem.isolation import Arm, Ended, run_arms
from specmortem.verdict import DeviceKind, Evidence, Verdict

UTILS = "vllm/v1/spec_decode/utils.py"
V2_SPECULATOR = "vllm/v1/worker/gpu/spec_decode/dflash/speculator.py"
GATING = (
    "vllm/third_party/flash_linear_attention/ops/fused_sigmoid_gating.py",
    "vllm/model_executor/layers/fla/ops/fused_sigmoid_gating.py",
)
CONV = "vllm/model_executor/layers/mamba/ops/causal_conv1d.py"
V1, V2 = "copy_and_expand_dflash_inputs_kernel", "prepare_dflash_inputs"
MAMBA = "vllm/v1/worker/mamba_utils.py"
HYBRID = "vllm/v1/worker/gpu/model_states/mamba_hybrid.py"
POSTCOPY = "postprocess_mamba_fused_kernel"
REJECTION = "vllm/v1/sample/rejection_sampler.py"
FLASHINFER = "vllm/v1/attention/backends/flashinfer.py"
ATTENTION_BACKEND = "vllm/v1/attention/backend.py"
ATTENTION_UTILS = "vllm/v1/attention/backends/utils.py"
HOST_BUFFERS = "vllm/v1/utils.py"
DRAFTER = ("vllm/v1/spec_decode/llm_base_proposer.py", "vllm/v1/spec_decode/eagle.py")
WORKER_UTILS = "vllm/v1/worker/utils.py"
TORCH_UTILS = "vllm/utils/torch_utils.py"
FLASHINFER_CAUSE = "plan-staging-reuse"
RUNNER = "vllm/v1/worker/gpu_model_runner.py"
BATCH = "vllm/v1/worker/gpu_input_batch.py"
GDN = "vllm/v1/attention/backends/gdn_attn.py"
CACHE = "vllm/config/cache.py"
CACHE_MODES = "MambaCacheMode"


Needs = Literal["any", "interpreter", "cuda"]


@dataclass(frozen=True)
class Probe:
    """What a probe needs.

    `files` are groups of candidate paths, of which the first that exists in a tree is used; `functions` stand in them,
    one a group, empty where a file is read and nothing of it is lifted. `also` is judged beside them where a tree has
    it: (path, function). `needs` says what runs the kernels: any device, the interpreter, for its bounds or because
    the defect is the host's alone, or a GPU.
    """

    cause: str
    incident: str
    title: str
    files: tuple[tuple[str, ...], ...]
    functions: tuple[str, ...]
    also: tuple[tuple[str, str], ...] = ()
    needs: Needs = "any"
    version: int = 1


def _dflash(cause: str, title: str, path: str, function: str) -> Probe:
    return Probe(cause, "dflash-oob", title, ((path,),), (function,))


def _align(cause: str, title: str, needs: Needs = "any") -> Probe:
    functions = (POSTCOPY, "MambaHybridModelState.postprocess_state")
    return Probe(cause, "pp-align-copy", title, ((MAMBA,), (HYBRID,)), functions, needs=needs)


def _counts(cause: str, title: str, also: tuple[tuple[str, str], ...] = (), version: int = 1) -> Probe:
    """Files and functions of a step of the V1 runner."""
    parts = {
        RUNNER: "GPUModelRunner._prepare_inputs",
        BATCH: "InputBatch",
        ATTENTION_UTILS: "reorder_batch_to_split_decodes_and_prefills",
        UTILS: "update_num_computed_tokens_for_batch_change",
        MAMBA: "postprocess_mamba_align_gpu",
    }
    files, functions = tuple((path,) for path in parts), tuple(parts.values())
    return Probe(cause, "async-accepted-counts", title, files, functions, also, version=version)


def _staging(
    cause: str,
    title: str,
    files: tuple[tuple[str, ...], ...],
    functions: tuple[str, ...],
    also: tuple[tuple[str, str], ...] = (),
) -> Probe:
    return Probe(cause, "mtp-draft-loop", title, files, functions, also)


_ALL = (
    _dflash("v1-rejected-equals-context", "V1: the last valid position of a request without one", UTILS, V1),
    Probe(
        "stale-block-id",
        "dflash-oob",
        "a block id behind the allocated prefix is used",
        ((UTILS,),),
        (V1,),
        also=((V2_SPECULATOR, V2),),
    ),
    _dflash("v2-null-block", "V2: the null block is taken for a slot", V2_SPECULATOR, V2),
    _dflash("v2-rejected-context-slots", "V2: rejected context rows keep their slots", V2_SPECULATOR, V2),
    _dflash("v2-past-max-len", "V2: positions and lengths past max_model_len", V2_SPECULATOR, V2),
    _dflash(
        "v2-slot-past-max-len",
        "V2: positions past max_model_len write into the last block",
        V2_SPECULATOR,
        V2,
    ),
    _dflash("v2-stale-tail", "V2: padded rows of a replayed graph reach live state", V2_SPECULATOR, V2),
    Probe(
        "gdn-unbounded-accepted",
        "dflash-oob",
        "an accepted count outside 1 … K + 1 indexes another row",
        (GATING, (CONV,)),
        ("fused_sigmoid_gating_delta_rule_update", "causal_conv1d_update"),
        needs="interpreter",
    ),
    Probe(
        "recovered-token-out-of-vocab",
        "dflash-oob",
        "a NaN row recovers a token id outside the vocabulary",
        ((REJECTION,),),
        ("sample_recovered_tokens_kernel",),
        needs="cuda",
    ),
    _align("batch-row-index", "state is copied through the block ids of another request"),
    _align(
        "accepted-written-in-place", "accepted counts are reset while other programs read them", "interpreter"
    ),
    _align("overlapping-shift", "a window is shifted inside its block without an order", "interpreter"),
    _align("seed-column-divisor", "the first running column is counted in blocks of another size"),
    _align("null-block-copied", "the null block is taken for a state"),
    _staging(
        FLASHINFER_CAUSE,
        "a plan is overwritten in its page-locked buffer before its copy has run",
        ((FLASHINFER,), (ATTENTION_BACKEND,), (ATTENTION_UTILS,), (HOST_BUFFERS,), DRAFTER),
        (
            "FlashInferMetadataBuilder._compute_flashinfer_kv_metadata",
            "CommonAttentionMetadata",
            "split_decodes_and_prefills",
            "CpuGpuBuffer",
            "SpecDecodeBaseProposer._get_positions",  # not propose, whose closure is most of vLLM
        ),
    ),
    _staging(
        "builder-staging-reuse",
        "row pointers are overwritten in their page-locked buffer before their copy has run",
        ((FLASHINFER,), (ATTENTION_BACKEND,), (ATTENTION_UTILS,), (HOST_BUFFERS,)),
        (
            "FlashInferMetadataBuilder._compute_flashinfer_kv_metadata",
            "CommonAttentionMetadata",
            "split_decodes_and_prefills",
            "CpuGpuBuffer",
        ),
    ),
    _staging(
        "zeroer-staging-reuse",
        "block ids to zero are overwritten in their page-locked buffer before their copy has run",
        ((WORKER_UTILS,),),
        ("KVBlockZeroer.zero_block_ids",),
        also=((TORCH_UTILS, "async_tensor_h2d"),),
    ),
    Probe(
        "host-lengths-counted-twice",
        "mtp-draft-loop",
        "lengths on the host grow by two in a draft pass, those on the device by one",
        (
            (RUNNER,),
            DRAFTER,
            (UTILS,),
            (FLASHINFER,),
            (ATTENTION_BACKEND,),
            (ATTENTION_UTILS,),
            (HOST_BUFFERS,),
        ),
        (
            "",  # statements of the runner's methods are run, without what these lift
            "SpecDecodeBaseProposer._get_positions",
            "eagle_step_update_slot_mapping_and_metadata",
            "FlashInferMetadataBuilder._compute_flashinfer_kv_metadata",
            "CommonAttentionMetadata",
            "split_decodes_and_prefills",
            "CpuGpuBuffer",
        ),
        also=((TORCH_UTILS, "async_tensor_h2d"),),
        needs="interpreter",
    ),
    _counts(
        "stale-count-none",
        "the first draft of a request inherits another request's accepted count",
        also=((CACHE, CACHE_MODES),),
        version=2,
    ),
    _counts("stale-count-align", "align: rows inherit the accepted counts of others"),
    Probe(
        "graph-metadata-rows",
        "async-accepted-counts",
        "metadata of a captured graph has a row per token, not per request",
        ((GDN,), (ATTENTION_UTILS,)),
        ("GDNAttentionMetadataBuilder.build", "mamba_get_block_table_tensor"),
    ),
)
CAUSES: dict[str, Probe] = {probe.cause: probe for probe in _ALL}


def probe_of(cause: str) -> Probe:
    """The probe of a cause.

    Raises BadInputError that lists the known causes.
    """
    if cause not in CAUSES:
        raise BadInputError(f"unknown cause {cause!r}; known causes: {', '.join(sorted(CAUSES))}")
    return CAUSES[cause]


def judge(cause: str, subject: str, *, device: DeviceKind | str = "sim", timeout_s: float = 120) -> Verdict:
    """Verdict of one cause on one subject: `before`, `after`, `vllm==X`, `installed` or `tree:DIR`.

    `plan-staging-reuse` also judges `flashinfer==X`, on a GPU where that release is installed.

    Raises BadInputError for an unknown cause or a malformed subject.
    """
    return judge_many([(cause, subject)], device=device, timeout_s=timeout_s)[0]


def judge_many(
    pairs: Sequence[tuple[str, str]],
    *,
    device: DeviceKind | str = "sim",
    timeout_s: float = 120,
    progress: bool = False,
    on_end: Callable[[Ended], None] | None = None,
) -> list[Verdict]:
    """Verdicts in the order of `pairs`, judged in parallel processes; files are fetched first, once a subject."""
    kind = device_kind(device)
    verdicts: dict[int, Verdict] = {}
    for subject in dict.fromkeys(s for _, s in pairs):
        missing = _fetch(subject, {c for c, s in pairs if s == subject})
        verdicts |= {i: missing[c] for i, (c, s) in enumerate(pairs) if s == subject and c in missing}
    for i, (cause, _) in enumerate(pairs):
        if probe_of(cause).needs == "cuda" and kind == "sim" and i not in verdicts:
            verdicts[i] = Verdict.not_judged(
                "needs a GPU: the interpreter's maximum treats NaN as numpy does", needs="cuda"
            )
    todo = [i for i in range(len(pairs)) if i not in verdicts]
    arms = [_arm(*pairs[i], _runs_on(pairs[i][0], kind), timeout_s) for i in todo]
    for i, ended in zip(todo, run_arms(arms, cuda_parallel=8, progress=progress, on_end=on_end), strict=True):
        verdicts[i] = _verdict(ended)
    return [verdicts[i] for i in range(len(pairs))]


def device_kind(device: str) -> DeviceKind:
    """The kind that `auto`, `sim` or `cuda` stands for on this machine.

    Raises BadInputError for another word.
    """
    if device == "auto":
        import torch

        return "cuda" if torch.cuda.is_available() else "sim"
    if device not in ("sim", "cuda"):
        raise BadInputError(f"unknown device {device!r}; give sim, cuda or auto")
    return "cuda" if device == "cuda" else "sim"


def _runs_on(cause: str, kind: DeviceKind) -> DeviceKind:
    return "sim" if probe_of(cause).needs == "interpreter" else kind


def _fetch(subject: str, causes: Iterable[str]) -> dict[str, Verdict]:
    """Bring the files of these causes into the cache; verdicts of those that cannot be judged."""
    from specmortem import upstream

    if subject in ("before", "after"):
        return {}
    missing: dict[str, Verdict] = {}
    probes = [probe_of(c) for c in causes]
    if subject.startswith("flashinfer=="):
        told = f"{subject} is judged for {FLASHINFER_CAUSE} only"
        return {p.cause: Verdict.not_judged(told) for p in probes if p.cause != FLASHINFER_CAUSE}
    try:
        tree = upstream.resolve(subject)
    except UnavailableError as error:
        return {p.cause: Verdict.not_judged(str(error), unavailable=True) for p in probes}
    wanted: dict[str, list[str]] = {}
    for probe in probes:
        try:
            found = [tree.first(list(group)) for group in probe.files]
        except UnavailableError as error:
            missing[probe.cause] = Verdict.not_judged(str(error), unavailable=True)
            continue
        if None in found:
            absent = probe.files[found.index(None)][0]
            told = f"{subject} has no {absent}"
            if subject.startswith("tree:"):
                told += "; give the folder that holds vllm/"
            missing[probe.cause] = Verdict.not_judged(
                told, absent=absent, unavailable=subject.startswith("tree:")
            )
            continue
        wanted[probe.cause] = [path for path in found if path is not None]
        wanted[probe.cause] += [path for path, _ in probe.also if tree.has(path)]
    if not wanted:
        return missing
    try:
        tree.fetch(sorted({path for paths in wanted.values() for path in paths}))
        needed = {pair for cause in wanted for pair in _functions(CAUSES[cause], wanted[cause])}
        for path, name in sorted(needed):
            _prefetch_closure(tree, path, name)
    except SpecmortemError as error:
        missing |= {cause: Verdict.not_judged(str(error), unavailable=True) for cause in wanted}
    return missing


def _functions(probe: Probe, paths: Sequence[str]) -> list[tuple[str, str]]:
    """Files and names of what a probe judges, where the tree has these files."""
    names = [*probe.functions, *(name for path, name in probe.also if path in paths)]
    return [(path, name) for path, name in zip(paths, names, strict=True) if name]


def _prefetch_closure(tree: Any, path: str, name: str) -> None:
    """Hashing walks every module that lifting will need, so that the judging process needs no network."""
    from specmortem import upstream

    with suppress(upstream.NotPresentError):
        upstream.closure_hash(tree, path, name)


def _arm(cause: str, subject: str, kind: DeviceKind, timeout_s: float) -> Arm:
    return Arm(
        target=f"specmortem.probes.{probe_of(cause).incident.replace('-', '_')}:judge",
        kwargs={"cause": cause, "subject": subject, "device": kind},
        name=f"{cause} on {subject}",
        timeout_s=timeout_s,
        device=kind,
    )


def _verdict(ended: Ended) -> Verdict:
    """A probe that ended otherwise than by a value: a GPU fault is a fault, anything else is not judged."""
    if ended.kind == "value":
        verdict = Verdict.from_dict(ended.value)
        judged_on = "interpreter" if ended.arm.device == "sim" else "cuda"
        return replace(
            verdict,
            evidence=replace(verdict.evidence, detail={**verdict.evidence.detail, "judged_on": judged_on}),
        )
    evidence = Evidence(reason=f"{ended.kind}: {ended.message}", detail={"stderr": ended.stderr_tail[-800:]})
    if ended.kind in ("illegal-address", "device-assert"):
        return Verdict("fault", evidence)
    return Verdict("not-judged", evidence)
