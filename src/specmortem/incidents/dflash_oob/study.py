"""The study of incident `dflash-oob`: which arms run, in processes of their own, and the result rows they give."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pandas as pd

from specmortem import study
from specmortem.incidents.dflash_oob import arms
from specmortem.incidents.dflash_oob.proposer import capture_sizes, padded_size
from specmortem.isolation import Arm, ArmResult, run_arm, run_arms, target_of
from specmortem.study import Cell
from specmortem.verdict import DeviceKind, Row

INPUTS, LOOKUP = "v1-rejected-equals-context", "gdn-unbounded-accepted"
CHAIN, NO_DFLASH = "count-to-lookup-chain", "no-dflash"
CAUSE_OF = {
    "input-kernel": INPUTS,
    "stale-graph-tail": "stale-graph-tail",
    "stale-graph-tail-k3": "stale-graph-tail",
    "buffer-1024-capture-512": "capture-below-buffer",
    "stale-block-id": "stale-block-id",
    "gdn-lookup": LOOKUP,
    CHAIN: CHAIN,
}


def control_rows(device: DeviceKind, seed: int, transitions: int) -> list[Row]:
    """Every cell of the table candidates x controls; the timed candidate has a GPU for itself.

    Without DFlash all candidates are one experiment, the target loop alone, which runs once.
    """
    distinct = [cell for cell in arms.CELLS if cell[1] != NO_DFLASH or cell[0] == CHAIN]
    found: dict[tuple[str, str], Row] = {}
    for timed in (False, True):
        asked = [cell for cell in distinct if (cell[0] == CHAIN) == timed]
        cells = [_control(*cell, device, seed, transitions) for cell in asked]
        found |= zip(asked, study.grid(cells, cuda_parallel=1 if timed else 8), strict=True)
    plain = found[CHAIN, NO_DFLASH]
    return [
        found.get(cell) or plain.replace(cause=CAUSE_OF[cell[0]], arm=_arm_name(*cell)) for cell in arms.CELLS
    ]


def _control(candidate: str, control: str, device: DeviceKind, seed: int, transitions: int) -> Cell:
    kwargs = {"candidate": candidate, "control": control, "device": device, "transitions": transitions}
    blocking = device == "cuda" and control == "launch-blocking"
    env = {"CUDA_LAUNCH_BLOCKING": "1"} if blocking else {}
    cause, arm = CAUSE_OF[candidate], _arm_name(candidate, control)
    return Cell(cause, arm, "before", arms.control, {**kwargs, "seed": seed}, seed, device, 180, env)


def _arm_name(candidate: str, control: str) -> str:
    return f"k3/{control}" if candidate.endswith("-k3") else control


def link_rows(device: DeviceKind, seed: int, transitions: int) -> list[Row]:
    """The chain whole, with each link corrected alone, and with all of them."""
    kwargs = {"device": device, "seed": seed, "transitions": transitions}
    arm_of = {link: link if link in ("before", "after") else "one-link-mended" for link in arms.LINKS}
    return study.grid(
        Cell(CHAIN, arm, link, arms.chain, {"link": link, **kwargs}, seed, device, 180)
        for link, arm in arm_of.items()
    )


def random_rows(
    device: DeviceKind, seed: int, launches: int, requests: int = 64, k: int = 15, parts: int = 4
) -> list[Row]:
    """Random request states, `requests` to a launch: a quarter of the launches before, all of them after.

    Each part has a seed of its own.
    """
    rows = []
    for arm, share in (("before", 4), ("after", 1)):
        each = -(-launches // (parts * share))
        kwargs = {"arm": arm, "launches": each, "requests": requests, "k": k, "device": device}
        cells = [
            Cell(INPUTS, "random-states", arm, arms.random_states, {**kwargs, "seed": part}, part, device)
            for part in range(seed, seed + parts)
        ]
        ended = run_arms([cell.experiment for cell in cells], cuda_parallel=parts)
        rows.append(study.total(ended, INPUTS, "random-states", arm, seed, "states"))
    return rows


def _total(unit: str) -> Callable[[ArmResult, Cell], Row]:
    def read(end: ArmResult, cell: Cell) -> Row:
        return study.total([end], cell.cause, cell.arm, cell.subject, cell.seed, unit)

    return read


def schedule_rows() -> list[Row]:
    """Every distinguishable schedule of the small case, on the simulator whatever the device is."""
    cells = [
        Cell(INPUTS, "schedules", arm, arms.schedules, {"arm": arm}, timeout_s=180)
        for arm in ("before", "after")
    ]
    return study.grid(cells, _total("schedules"))


def replay_rows(device: DeviceKind, seed: int, replays: int) -> list[Row]:
    """Graph replays over random states of the `after` proposer, and over random counts of the `after` lookup."""
    kwargs = {"arm": "after", "replays": replays, "seed": seed, "device": device}
    targets: dict[str, Callable[..., Any]] = {INPUTS: arms.graph_replays, LOOKUP: arms.lookup_replays}
    cells = [
        Cell(cause, "graph-replays", "after", target, kwargs, seed, device, 600)
        for cause, target in targets.items()
    ]
    return study.grid(cells, _total("replays"), cuda_parallel=2)


def one_value(target: Callable[..., Any], device: DeviceKind = "sim", **kwargs: Any) -> ArmResult:
    """What one function of `arms` returned, in a process of its own."""
    return run_arm(Arm(target_of(target), kwargs, target.__name__, 300, device))


def anatomies(subject: str) -> dict[str, Any]:
    """Two launches of a subject's input kernel, each with a request rejected whole; those that ran, by a title."""
    kinds = {"request 0 rejected whole": [4, 0], "request 1 rejected whole": [0, 4]}
    ended = {kind: one_value(arms.anatomy, subject=subject, rejected=r) for kind, r in kinds.items()}
    return {f"{subject}, {kind}": end.value for kind, end in ended.items() if end.kind == "value"}


def control_table(rows: Sequence[Row]) -> pd.DataFrame:
    """Candidates x controls, each cell the effect; the last columns compare with the report."""
    cell_of = {(CAUSE_OF[cell[0]], _arm_name(*cell)): cell for cell in arms.CELLS}
    frame = study.pivot(
        rows,
        lambda row: cell_of[row.cause, row.arm][0],
        lambda row: cell_of[row.cause, row.arm][1],
        lambda row: str(row.evidence.detail.get("effect", row.outcome)),
    )[list(arms.CONTROLS)]
    consistent = [arms.consistent(dict(cells)) for _, cells in frame.iterrows()]
    frame["verdict"] = ["consistent" if fits else "refuted" for fits in consistent]
    frame.loc["reported"] = [*arms.REPORTED.values(), ""]
    return frame.rename_axis("candidate cause")


def crash_table(data: Mapping[str, Any]) -> pd.DataFrame:
    """What the scheduler dumps of the two crashes allow: one line a hypothesis, computed from their numbers."""
    config, crashes = data["configuration"], data["crashes"]
    k, limit = config["num_speculative_tokens"], config["max_model_len"]
    block = data["smallest_hybrid_block"]["tokens"]
    estimate = f"block of {block} (estimate)"
    sizes, rows = capture_sizes(config["max_num_seqs"], k), config["max_num_seqs"] * (k + 1)

    def answers(crash: Mapping[str, Any]) -> dict[str, str]:
        tokens = crash["total_num_scheduled_tokens"]
        last, graph = max(crash["num_computed_tokens"]) + k + 1, padded_size(tokens, sizes)
        found = {
            "a padded graph's tail": (graph != tokens, f"{tokens} tokens, graph of {graph}"),
            "a batch larger than every graph": (tokens > sizes[-1], f"{tokens} of at most {sizes[-1]}"),
            "a batch larger than the buffers": (tokens > rows, f"{tokens} of {rows} rows"),
            "a position past the model length": (last > limit, f"{last} of {limit}"),
            "a drafted token in a second block": (last > block, f"position {last}, {estimate}"),
        }
        return {question: f"{'yes' if yes else 'no'}: {why}" for question, (yes, why) in found.items()}

    columns = {f"crash {crash['name']}": answers(crash) for crash in crashes}
    return pd.DataFrame(columns).rename_axis("could it be")
