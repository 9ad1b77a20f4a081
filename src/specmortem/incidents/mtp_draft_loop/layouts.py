"""Plan layouts of incident `mtp-draft-loop`: what kernels do when their block holds another pass's plan.

Arithmetic on the host alone, no device: the offsets of the launch are one plan's, the bytes another's.
Functions that return dictionaries take JSON-able arguments.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from specmortem.errors import BadInputError
from specmortem.incidents.mtp_draft_loop.kernels import Geometry, Plan, Planner

SMALL = Geometry(num_sms=5, num_qo_heads=1, num_kv_heads=1, head_dim=8)
RTX_5090 = Geometry(num_sms=170, num_qo_heads=24, num_kv_heads=4, head_dim=256)
H200 = Geometry(num_sms=132, num_qo_heads=24, num_kv_heads=4, head_dim=256)
GEOMETRIES = {"small": SMALL, "rtx5090": RTX_5090, "h200": H200}
DEFAULT_WORKSPACE = 394 << 20  # bytes; VLLM_FLASHINFER_WORKSPACE_BUFFER_SIZE
BF16 = 2
MERGE_ROWS = 4  # that a thread block of the merge takes at a time, for heads of 256 (cascade.cuh:698-701)
WORKED_EXAMPLE = (6373, 11589, 4176, 7409)  # one token more moves every array, for 132 SMs
EXAMPLES = (("rtx5090", (8859, 8736, 7224, 9301)), ("h200", WORKED_EXAMPLE), ("h200", (25344,)))


def first_row_outside(
    geometry: Geometry, workspace_bytes: int = DEFAULT_WORKSPACE, itemsize: int = BF16
) -> int:
    """The first row of partial values [H, D] that does not fit into the float workspace."""
    return workspace_bytes // (geometry.num_qo_heads * geometry.head_dim * itemsize)


def consequence(plan: Plan, block: npt.NDArray[np.uint8], rows: int) -> str:
    """What kernels launched with `plan` do when the block holds these bytes.

    `read`: the merge walks past the last of `rows` rows of the workspace; `write`: a partial result is stored
    past it; `wrong-plan`: all stays inside; `clean`: the block holds the plan itself. Row counts are unsigned and
    are rounded up to MERGE_ROWS in 32 bits (cascade.cuh:395, :426), so a descent by less than that merges nothing.
    """
    if plan.is_in(block):
        return "clean"
    seen = plan.seen_in(block)
    if not plan.split:
        return "write" if int(_unsigned(seen["o_indptr"][:-1]).max()) >= plan.num_reqs else "wrong-plan"
    low, high = _unsigned(seen["merge_indptr"][:-1]), _unsigned(seen["merge_indptr"][1:])
    count = (high - low) & 0xFFFFFFFF
    merged = (count > 0) & (count + MERGE_ROWS - 1 < 1 << 32)
    if bool((merged & (low + count > rows)).any()):
        return "read"
    return "write" if _stores_outside(plan, seen, rows) else "wrong-plan"


def _stores_outside(plan: Plan, seen: dict[str, npt.NDArray[Any]], rows: int) -> bool:
    live = seen["qo_tile_indices"] == 0
    if plan.geometry.constant:
        live = live & (seen["block_valid_mask"][: live.size] != 0)
    requests = seen["request_indices"][live]
    if bool(((requests < 0) | (requests >= plan.num_reqs)).any()):
        return True
    row = _unsigned(seen["o_indptr"])[requests] + _unsigned(seen["kv_tile_indices"][live])
    return bool(((row & 0xFFFFFFFF) >= rows).any())


def _unsigned(array: npt.NDArray[Any]) -> npt.NDArray[np.int64]:
    return array.astype(np.int64) & 0xFFFFFFFF


def overwritten(plans: Sequence[Plan], reader: int, writer: int) -> npt.NDArray[np.uint8]:
    """The block that pass `reader` copies after plans 0 to `writer` were put into one buffer in turn."""
    block = np.zeros(max(plan.nbytes for plan in plans), dtype=np.uint8)
    for plan in plans[: writer + 1]:
        plan.fill(block)
    return block[: plans[reader].nbytes]


def example(geometry: str, lens: Sequence[int]) -> dict[str, Any]:
    """A plan, the plan of lengths + 1 in the same buffer, and what kernels of the first then read."""
    planner = Planner(_geometry(geometry))
    plans = [planner.plan([n + more for n in lens]) for more in (0, 1)]
    block = overwritten(plans, 0, 1)
    names = ("o_indptr", "kv_chunk_size", "merge_indptr")
    seen, own = (
        {name: of[name].tolist() for name in names} for of in (plans[0].seen_in(block), plans[0].arrays)
    )
    return {
        "geometry": geometry,
        "lens": list(lens),
        "chunks": [plan.num_chunks for plan in plans],
        "consequence": consequence(plans[0], block, first_row_outside(planner.geometry)),
        "seen": seen,
        "own": own,
    }


def search(
    geometry: str = "rtx5090",
    batch: int = 16,
    low: int = 4000,
    high: int = 12000,
    trials: int = 10_000,
    seed: int = 0,
) -> dict[str, Any]:
    """Random lengths in [low, high]: how often does one more token a request make a layout that faults.

    Counts over `trials` batches. Only a change of P moves the arrays, so all other pairs stay inside.
    """
    g = _geometry(geometry)
    lens = np.random.default_rng(seed).integers(low, high + 1, size=(trials, batch))
    planner, rows = Planner(g), first_row_outside(g)
    moved = np.flatnonzero(total_chunks(g, lens) != total_chunks(g, lens + 1))
    found: Counter[str] = Counter()
    witness: dict[str, list[int]] = {}
    for trial in moved:
        plans = [planner.plan(lens[trial] + more) for more in (0, 1)]
        what = consequence(plans[0], overwritten(plans, 0, 1), rows)
        found[what] += 1
        witness.setdefault(what, lens[trial].tolist())
    return {
        "geometry": geometry,
        "batch": batch,
        "lengths": [low, high],
        "trials": trials,
        "seed": seed,
        "layout_changes": len(moved),
        "read": found["read"],
        "write": found["write"],
        "read_rate": found["read"] / trials,
        "write_rate": found["write"] / trials,
        "witness": witness,
    }


def total_chunks(geometry: Geometry, lens: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """P of many batches of lengths [trials, B] at once."""
    pages = np.maximum(-(-lens // geometry.page_size), 1)
    low = np.full(len(lens), geometry.min_chunk_pages, dtype=np.int64)
    high = np.maximum(pages.max(axis=1), low)
    while bool((low < high).any()):
        middle = (low + high) // 2
        fits = (-(-pages // middle[:, None])).sum(axis=1) <= geometry.max_chunks
        low, high = np.where(fits, low, middle + 1), np.where(fits, middle, high)
        high = np.maximum(low, high)
    return np.asarray((-(-pages // low[:, None])).sum(axis=1), dtype=np.int64)


def growth(
    geometry: str = "rtx5090", low: int = 4000, high: int = 12000, trials: int = 10_000, seed: int = 0
) -> dict[str, Any]:
    """`search` for batches of 1 to 64."""
    batches = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
    return {"rows": [search(geometry, b, low, high, trials, seed) for b in batches]}


def find_layout(
    geometry: Geometry,
    batch: int,
    low: int,
    high: int,
    *,
    kind: str = "read",
    first: int = 2,
    last: int = 5,
    rows: int,
    seed: int = 0,
    trials: int = 200_000,
    step: int = 1,
) -> list[int]:
    """Lengths of a batch with a wanted property in passes `first` to `last`, if each pass adds `step` to all lengths.

    `read` or `write`: pass `first` has that consequence whichever later plan its copy meets. `benign`: the
    plans of all passes are equal. `page`: a page is added after pass `first`, and the plan stays as it is.
    Raises BadInputError when `trials` batches have none.
    """
    rng, planner, page = random.Random(seed), Planner(geometry), geometry.page_size
    for _ in range(trials):
        lens = [rng.randint(low, high) for _ in range(batch)]
        if kind != "benign":
            at = rng.randrange(batch)
            lens[at] = max(page, lens[at] // page * page) - step * first
        plans = [planner.plan([n + step * i for n in lens]) for i in range(last + 1)]
        if _has(kind, plans, first, rows):
            return lens
    raise BadInputError(
        f"no {kind!r} layout in {trials} batches of {batch} in [{low}, {high}]; widen the lengths"
    )


def _has(kind: str, plans: Sequence[Plan], first: int, rows: int) -> bool:
    if kind in ("benign", "page"):
        same = all(np.array_equal(plans[1].image, plan.image) for plan in plans[2:])
        return same and (plans[1].page_counts != plans[-1].page_counts) == (kind == "page")
    if plans[first].num_chunks == plans[first + 1].num_chunks:
        return False
    later = range(first + 1, len(plans))
    return all(consequence(plans[first], overwritten(plans, first, m), rows) == kind for m in later)


def _geometry(name: str) -> Geometry:
    if name not in GEOMETRIES:
        raise BadInputError(f"geometry {name!r} is not one of {', '.join(GEOMETRIES)}")
    return GEOMETRIES[name]
