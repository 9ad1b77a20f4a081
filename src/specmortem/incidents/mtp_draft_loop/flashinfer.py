"""Arms of incident `mtp-draft-loop` on released FlashInfer: its own planner and kernels, on a GPU.

Nothing of FlashInfer is modelled here; what is imported is the release under test (`flashinfer-python`, with nvcc and
ninja on PATH; the first plan compiles for about 40 s into `$FLASHINFER_WORKSPACE_BASE/.cache/flashinfer`). Every
function takes JSON-able arguments, runs in a process of its own and returns a dictionary. On a fault the process dies
of it and the caller's isolation says so.

The public names are those of 0.6.6 to 0.7.2; of the private ones, `_int_workspace_buffer` (the device's block),
`_pin_memory_int_workspace_buffer` (where it is filled, one a wrapper) and `_plan_info` (the 15 numbers of
scheduler.cuh `PrefillPlanInfo::ToVector`), each is looked for and named if it is missing.
"""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from importlib import import_module, metadata
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from specmortem.errors import BadInputError, UnavailableError
from specmortem.incidents.mtp_draft_loop.kernels import Geometry, Plan, Planner
from specmortem.incidents.mtp_draft_loop.layouts import (
    DEFAULT_WORKSPACE,
    H200,
    WORKED_EXAMPLE,
    find_layout,
    first_row_outside,
)
from specmortem.verdict import Evidence, Verdict

HEADS, KV_HEADS, HEAD_SIZE, PAGE = H200.num_qo_heads, H200.num_kv_heads, H200.head_dim, H200.page_size
WORKSPACE_BYTES = DEFAULT_WORKSPACE
STALL_CYCLES = 400_000_000
STAGING, BLOCK, INFO = "_pin_memory_int_workspace_buffer", "_int_workspace_buffer", "_plan_info"
INFO_NAMES = (
    "num_padded total_num_rows total_num_rows_at cta_tile_q request_indices qo_tile_indices kv_tile_indices "
    "merge_indptr o_indptr kv_chunk_size v s block_valid_mask enable_cuda_graph split_kv"
).split()
ARMS = ("before", "sync-after-plan", "fresh-wrapper", "fresh-wrapper-dropped", "unpinned")
Bytes = npt.NDArray[np.uint8]


@cache
def library() -> Any:
    """The installed FlashInfer.

    Raises UnavailableError where there is no CUDA device, or where it cannot be imported.
    """
    if not torch.cuda.is_available():
        raise UnavailableError(
            "released FlashInfer needs a CUDA device, and there is none; run this on a GPU host"
        )
    try:
        return import_module("flashinfer")
    except Exception as error:  # a broken installation may raise anything
        raise UnavailableError(
            f"flashinfer cannot be imported ({type(error).__name__}: {error}); "
            "install flashinfer-python with apache-tvm-ffi and nvidia-cudnn-frontend"
        ) from error


def version() -> str:
    """Version of the installed release. Raises UnavailableError without one."""
    found = library()
    try:
        return metadata.version("flashinfer-python")
    except metadata.PackageNotFoundError:
        return str(found.__version__)


def num_sms() -> int:
    """Streaming multiprocessors of the device. Raises UnavailableError without one."""
    library()
    return int(torch.cuda.get_device_properties(0).multi_processor_count)


def geometry(sms: int = 0) -> Geometry:
    """What the planner is given beside lengths; 0 stands for the device's SMs."""
    return replace(H200, num_sms=sms or num_sms())


class DecodeAttention:
    """Decode attention by the release: one KV cache, and wrappers that share a float workspace.

    `cache` is bfloat16 [pages, 2, page, KV heads, head size], `query` bfloat16 [requests, heads, head size]; both are
    fixed random numbers.
    """

    def __init__(self, max_pages: int, requests: int) -> None:
        library()
        torch.manual_seed(0)
        options: dict[str, Any] = {"dtype": torch.bfloat16, "device": "cuda"}
        self.workspace = torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device="cuda")
        self.cache = torch.randn(max_pages, 2, PAGE, KV_HEADS, HEAD_SIZE, **options)
        self.query = torch.randn(requests, HEADS, HEAD_SIZE, **options)
        self.indices = torch.arange(max_pages, dtype=torch.int32, device="cuda")

    def wrapper(self, pinned: bool = True) -> Any:
        """A new decode wrapper, its plan buffer page-locked as released or pageable."""
        made = library().BatchDecodeWithPagedKVCacheWrapper(self.workspace, "NHD", use_tensor_cores=True)
        buffer = attribute(made, STAGING)
        if not buffer.is_pinned():
            raise UnavailableError(f"FlashInfer {version()}: {STAGING} is not pinned; the arms do not fit it")
        if not pinned:
            setattr(made, STAGING, torch.empty(buffer.shape, dtype=buffer.dtype))
        return made

    def plan(self, wrapper: Any, lengths: Sequence[int]) -> None:
        """Plan a decode step for requests of these lengths."""
        pages = [-(-length // PAGE) for length in lengths]
        indptr = torch.tensor(np.cumsum([0, *pages]), dtype=torch.int32)
        last = torch.tensor([(length - 1) % PAGE + 1 for length in lengths], dtype=torch.int32)
        wrapper.plan(
            *(indptr, self.indices[: sum(pages)], last, HEADS, KV_HEADS, HEAD_SIZE, PAGE),
            q_data_type=torch.bfloat16,
            kv_data_type=torch.bfloat16,
        )

    def run(self, wrapper: Any, requests: int) -> torch.Tensor:
        """Attention of one query token a request, by the wrapper's last plan."""
        out: torch.Tensor = wrapper.run(self.query[:requests], self.cache)
        return out


def attribute(wrapper: Any, name: str) -> Any:
    """A private attribute of a wrapper.

    Raises UnavailableError that lists the wrapper's private names when the release has none of that name.
    """
    if not hasattr(wrapper, name):
        known = ", ".join(sorted(each for each in vars(wrapper) if each.startswith("_")))
        raise UnavailableError(f"FlashInfer {version()}: a decode wrapper has no {name}; it has {known}")
    return getattr(wrapper, name)


def plan_info(wrapper: Any) -> dict[str, int]:
    """The numbers that the last plan returned to the host, by name: byte offsets of its arrays among them."""
    numbers = [int(x) for x in attribute(wrapper, INFO)]
    if len(numbers) != len(INFO_NAMES):
        raise UnavailableError(
            f"FlashInfer {version()}: a plan returns {len(numbers)} numbers, not {len(INFO_NAMES)}: {numbers}"
        )
    return dict(zip(INFO_NAMES, numbers, strict=True))


def arrays(block: Bytes, info: dict[str, int]) -> dict[str, list[int]]:
    """What kernels that were launched with these offsets read from a block, which may hold another plan."""
    parts = {name: block[start:stop] for name, (start, stop) in _extents(info).items()}
    return {
        name: (part if name == "block_valid_mask" else part.view(np.int32)).tolist()
        for name, part in parts.items()
    }


def _extents(info: dict[str, int]) -> dict[str, tuple[int, int]]:
    """First byte of each array of a plan, and the first after it."""
    padded, pointers = info["num_padded"], 4 * (info["total_num_rows"] + 1)
    sizes = dict.fromkeys(("request_indices", "qo_tile_indices", "kv_tile_indices"), 4 * padded)
    sizes |= {"o_indptr": pointers, "kv_chunk_size": 4}
    if info["split_kv"]:
        sizes |= {"merge_indptr": pointers, "block_valid_mask": padded}
    return {name: (info[name], info[name] + size) for name, size in sizes.items()}


def _block_bytes(info: dict[str, int]) -> int:
    """A length that holds the whole plan."""
    return -(-max(stop for _, stop in _extents(info).values()) // 16) * 16


def _laid_out(attention: DecodeAttention, wrapper: Any, lengths: Sequence[int]) -> dict[str, Any]:
    """What the released planner makes of one batch: its numbers, and its arrays as the device has them."""
    attention.plan(wrapper, lengths)
    torch.cuda.synchronize()
    info = plan_info(wrapper)
    block = attribute(wrapper, BLOCK)[: _block_bytes(info)].cpu().numpy()
    return {"lengths": list(lengths), "info": info, "arrays": arrays(block, info)}


def random_lengths(rng: random.Random) -> list[int]:
    """Lengths of a random batch: 1 to 64 requests, short and long."""
    longest = rng.choice((40, 600, 5_000, 20_000))
    return [rng.randint(1, longest) for _ in range(rng.choice((1, 2, 3, 4, 6, 8, 16, 33, 64)))]


def cross_check(batches: int = 200, seed: int = 0) -> dict[str, Any]:
    """Compare this package's planner with the released one over random batches: numbers, offsets and arrays."""
    rng, planner = random.Random(seed), Planner(geometry())
    drawn = [random_lengths(rng) for _ in range(batches)]
    most = max(sum(-(-length // PAGE) for length in lengths) for lengths in drawn)
    attention = DecodeAttention(1, 64)
    attention.indices = torch.zeros(most, dtype=torch.int32, device="cuda")
    wrapper = attention.wrapper()
    differences = [
        difference
        for lengths in drawn
        for difference in planner_differences(planner.plan(lengths), _laid_out(attention, wrapper, lengths))
    ]
    return {
        "effect": "different" if differences else "equal",
        "version": version(),
        "sms": num_sms(),
        "batches": batches,
        "split": sum(planner.plan(lengths).split for lengths in drawn),
        "differences": len(differences),
        "first": differences[:3],
        "seed": seed,
    }


def planner_differences(own: Plan, released: dict[str, Any]) -> list[str]:
    """Where a plan of this package differs from what the released planner makes of the same batch."""
    info, found = released["info"], released["arrays"]
    pairs: dict[str, tuple[Any, Any]] = {
        "num_padded": (own.num_padded, info["num_padded"]),
        "split_kv": (own.split, bool(info["split_kv"])),
        "cta_tile_q": (own.geometry.cta_tile_q, info["cta_tile_q"]),
    }
    if own.split:
        pairs["s"] = (own.s_offset, info["s"])
    for name, start in own.offsets.items():
        pairs[f"offset of {name}"] = (start, info[name])
        pairs[name] = ([int(x) for x in own.arrays[name]], found.get(name))
    return [
        f"{released['lengths']}: {name} is {mine} here and {theirs} in the release"
        for name, (mine, theirs) in pairs.items()
        if mine != theirs
    ]


def overwritten_plan(
    first: Sequence[int] = WORKED_EXAMPLE, second: Sequence[int] = (), stall_cycles: int = STALL_CYCLES
) -> dict[str, Any]:
    """Plan twice behind a stalled stream; which plan does a clone of the device's block between them hold?

    `second` is one token more a request by default. `stalled` is False when the stream had caught up before the
    second plan returned: then the clone says nothing.
    """
    second = list(second) or [length + 1 for length in first]
    attention = DecodeAttention(sum(-(-length // PAGE) + 1 for length in first), len(first))
    wrapper = attention.wrapper()
    expected = {name: _laid_out(attention, wrapper, each) for name, each in (("A", first), ("B", second))}
    length = max(_block_bytes(each["info"]) for each in expected.values())
    clone, block = torch.empty(length, dtype=torch.uint8, device="cuda"), attribute(wrapper, BLOCK)[:length]
    done = torch.cuda.Event()  # type: ignore[no-untyped-call]
    torch.cuda.synchronize()
    torch.cuda._sleep(stall_cycles)  # type: ignore[no-untyped-call]
    done.record()
    attention.plan(wrapper, first)
    clone.copy_(block)
    start = time.perf_counter()
    attention.plan(wrapper, second)
    seconds, stalled = time.perf_counter() - start, not done.query()  # type: ignore[no-untyped-call]
    torch.cuda.synchronize()
    seen = clone.cpu().numpy()
    holds = [name for name, each in expected.items() if arrays(seen, each["info"]) == each["arrays"]]
    return {
        "effect": "overwritten" if holds == ["B"] else "clean" if holds == ["A"] else "unclear",
        "holds": holds,
        "stalled": stalled,
        "second_plan_ms": round(1000 * seconds, 3),
        "version": version(),
        "lengths": [list(first), second],
        "kernels_of_the_first_plan_read": arrays(seen, expected["A"]["info"]),
        "they_should_read": expected["A"]["arrays"],
        "plan_buffer": STAGING,
    }


def verdict(subject: str) -> Verdict:
    """Verdict of cause `plan-staging-reuse` on the installed release, which `flashinfer==X` must name."""
    try:
        if subject != f"flashinfer=={version()}":
            return Verdict.not_judged(f"{subject} is not installed here; FlashInfer {version()} is")
        found = overwritten_plan()
    except UnavailableError as error:
        return Verdict.not_judged(str(error), unavailable=True)
    if not found["stalled"] or found["effect"] == "unclear":
        return Verdict.not_judged(f"the stream caught up, or neither plan was found: {found}")
    key = "merge_indptr"
    evidence = Evidence(
        witness=f"plan({found['lengths'][0]}), clone, plan({found['lengths'][1]}) behind a stalled stream",
        observed=f"the clone holds plan {found['holds'][0]}; kernels of the first plan read {key} "
        f"{found['kernels_of_the_first_plan_read'].get(key)}",
        expected=f"plan A; {key} {found['they_should_read'].get(key)}",
        place=f"BatchDecodeWithPagedKVCacheWrapper.{STAGING}",
        detail=found,
    )
    return Verdict("fault" if found["effect"] == "overwritten" else "clean", evidence)


def faulting_batches(count: int, sms: int = 0, k: int = 5, seed: int = 0) -> list[list[int]]:
    """Batches at the start of a draft loop whose last but one plan, read through the last, walks out of all memory.

    3 to 6 requests of 4,000 to 12,000 tokens: of 7 to 10 hardly any do (see `layouts.growth`).
    """
    rng, g = random.Random(seed), geometry(sms)
    rows = first_row_outside(g, DEFAULT_WORKSPACE)
    sizes = ((rng.randint(3, 6), rng.randrange(1 << 30)) for _ in range(count))
    return [
        find_layout(g, batch, 4_000, 12_000, first=k - 2, last=k - 1, rows=rows, seed=drawn)
        for batch, drawn in sizes
    ]


class _Loop:
    """A draft loop of K - 1 plans and forwards a step, in one arm; arms other than the fresh ones keep `wrapper`."""

    def __init__(self, arm: str, attention: DecodeAttention, cycles: int, k: int) -> None:
        self.arm, self.attention, self.cycles, self.k = arm, attention, cycles, k
        self.wrapper = attention.wrapper(pinned=arm != "unpinned")
        self.held: list[Any] = []
        self.lengths = torch.zeros(1, dtype=torch.int32, device="cuda")

    def step(self, base: Sequence[int]) -> list[torch.Tensor]:
        """Draft once. The step begins with a blocking read, as the drafter's first rebuild does."""
        self.lengths.cpu()
        self.held.clear()
        outs = []
        for j in range(1, self.k):
            wrapper = self._wrapper()
            self.attention.plan(wrapper, [length + j for length in base])
            if self.arm == "sync-after-plan":
                torch.cuda.synchronize()
            torch.cuda._sleep(self.cycles)  # type: ignore[no-untyped-call]
            outs.append(self.attention.run(wrapper, len(base)))
        return outs

    def _wrapper(self) -> Any:
        """The kept wrapper, or a new one: held until the step's end, or dropped after its run."""
        if not self.arm.startswith("fresh"):
            return self.wrapper
        made = self.attention.wrapper()
        if self.arm == "fresh-wrapper":
            self.held.append(made)
        return made


def loop(
    arm: str, steps: int = 5000, k: int = 5, cycles: int = 3_000_000, batches: int = 8, seed: int = 0
) -> dict[str, Any]:
    """Draft `steps` times in one arm (see ARMS), over batches whose overwritten plan must fault.

    `cycles` of GPU work stand before each forward, so that the host runs ahead. Outputs are compared with those of a
    loop that waits after each plan, on the device. Before dies of an illegal address. `fresh-wrapper` keeps the
    wrappers of a step alive until the next blocking read; `fresh-wrapper-dropped` does not: FlashInfer's copy is
    unknown to PyTorch's allocator of page-locked memory, which may hand the block out again at once.
    Raises BadInputError for an unknown arm, UnavailableError without FlashInfer or a GPU.
    """
    if arm not in ARMS:
        raise BadInputError(f"unknown arm {arm!r}; known: {', '.join(ARMS)}")
    library()
    drawn = faulting_batches(batches, k=k, seed=seed)
    most = max(sum(-(-(length + k) // PAGE) for length in base) for base in drawn)
    attention = DecodeAttention(most, max(len(base) for base in drawn))
    expected = [_Loop("sync-after-plan", attention, 0, k).step(base) for base in drawn]
    wrong, drafting = torch.zeros(1, dtype=torch.int64, device="cuda"), _Loop(arm, attention, cycles, k)
    torch.cuda.synchronize()
    start = time.perf_counter()
    for number in range(steps):
        which = number % len(drawn)
        for out, right in zip(drafting.step(drawn[which]), expected[which], strict=True):
            wrong += (out != right).any()
    torch.cuda.synchronize()
    seconds, faulty = time.perf_counter() - start, int(wrong)
    return {
        "effect": "corruption" if faulty else "clean",
        "arm": arm,
        "steps": steps,
        "forwards": steps * (k - 1),
        "wrong_outputs": faulty,
        "seconds": round(seconds, 2),
        "version": version(),
        "sms": num_sms(),
        "batches": drawn,
        "k": k,
        "cycles": cycles,
    }
