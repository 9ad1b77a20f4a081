"""The study of incident `pp-align-copy`: which arms run, in processes of their own, and the result rows they give."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import pandas as pd

from specmortem import study
from specmortem.incidents.pp_align_copy import arms, fix, shift
from specmortem.isolation import Arm, ArmResult, run_arms, target_of
from specmortem.study import Cell
from specmortem.verdict import DeviceKind, Evidence, Row

CAUSE = "batch-row-index"
OWN = ("before", "after")
RELEASES = study.RELEASES[study.RELEASES.index("0.24.0") :]
PARTS: Mapping[DeviceKind, int] = {"sim": 4, "cuda": 8}  # processes that share a long run
DAMAGE = {
    "live-neighbour": "state that a live request is using",
    "other-block": "an older block of a live request",
    "stale-tail": "a block that nobody owns any more",
}
FLAGS = {
    "eager": "--enforce-eager",
    "graphs": "full decode graphs",
    "pp1": "--pipeline-parallel-size 1",
    "one-seq": "--max-num-seqs 1",
    "mtp-off": "no --speculative-config",
}


def control_rows(device: DeviceKind, seed: int, pp_sizes: Sequence[int] = (2, 3)) -> list[Row]:
    """`before` and `after` under every control, for each pipeline size; arm `pp3/eager` is eager with three ranks."""
    cells = []
    for subject, control, pp in itertools.product(OWN, arms.CONTROLS, pp_sizes):
        kwargs = {"subject": subject, "control": control, "pp_size": pp, "device": device, "seed": seed}
        blocking = device == "cuda" and control == "launch-blocking"
        env = {"CUDA_LAUNCH_BLOCKING": "1"} if blocking else {}
        arm = f"pp{pp}/{control}"
        cells.append(Cell(CAUSE, arm, subject, arms.control, kwargs, seed, device, env=env))
    return study.grid(cells, cuda_parallel=8)


def _control(row: Row) -> str:
    return row.arm.split("/")[1]


def control_table(rows: Sequence[Row]) -> pd.DataFrame:
    """Controls x subjects and pipeline sizes, each cell the effect."""
    found = study.pivot(
        rows,
        _control,
        lambda row: f"{row.subject}, PP {row.arm.split('/')[0].removeprefix('pp')}",
        lambda row: row.evidence.detail.get("effect", row.outcome),
    )
    return found.rename_axis("control")


def half_rows(device: DeviceKind, seed: int) -> list[Row]:
    """Each half of the fix alone, and the constant token of a wider vocabulary block."""
    cells = [
        ("half-of-the-fix", "row-only", 1024),
        ("half-of-the-fix", "table-only", 1024),
        ("vocabulary-blocks-8192", "before", 8192),
    ]
    given = {"device": device, "seed": seed}
    return study.grid(
        (
            Cell(CAUSE, arm, s, arms.control, {**given, "subject": s, "width": width}, seed, device)
            for arm, s, width in cells
        ),
        cuda_parallel=3,
    )


def random_rows(seed: int, workloads: int, device: DeviceKind = "sim") -> list[Row]:
    """Random workloads: all after, an eighth before, a fortieth with each half. On CUDA through the kernels."""
    rows = []
    kwargs = {"copies": "plain" if device == "sim" else "triton"}
    for subject in fix.SUBJECTS:
        cell = Cell(CAUSE, "random-workloads", subject, arms.random_workloads, kwargs, seed, device, 600)
        share = {"after": 1, "before": 8}.get(subject, 40)
        row, ended = _in_parts(cell, -(-workloads // share), arms.FIGURES[1:])
        rows.append(_with_damage(row, ended))
    return rows


def _in_parts(cell: Cell, workloads: int, sums: Sequence[str]) -> tuple[Row, list[ArmResult]]:
    """One row of at least so many workloads, seeds from the cell's on, over several processes; and their ends."""
    parts = PARTS[cell.device]
    each, seed = -(-workloads // parts), cell.seed or 0
    given = {**cell.kwargs, "subject": cell.subject, "workloads": each, "device": cell.device}
    cells = [replace(cell, kwargs={**given, "seed": seed + part * each}) for part in range(parts)]
    ended = run_arms([part.experiment for part in cells], cuda_parallel=parts)
    return study.total(ended, cell.cause, cell.arm, cell.subject, seed, "workloads", sums), ended


def _with_damage(row: Row, ended: Sequence[ArmResult]) -> Row:
    counts = Counter(dict.fromkeys(DAMAGE, 0))
    for end in ended:
        counts.update(end.value["damage"] if end.kind == "value" else {})
    return _with_detail(row, damage=dict(counts))


def _with_detail(row: Row, **detail: Any) -> Row:
    evidence = row.evidence.replace(detail={**row.evidence.detail, **detail})
    return row.replace(evidence=evidence)


def kernel_rows(seed: int, workloads: int, device: DeviceKind = "sim") -> list[Row]:
    """Kernels against the plain reference, and kernels without checks under the bounds detector."""
    reference, outside = arms.same_as_reference, arms.outside
    wanted: tuple[tuple[Callable[..., Any], str, str, int, tuple[str, ...]], ...] = (
        (reference, "kernels-against-reference", "after", workloads, ("steps", "copies")),
        (reference, "kernels-against-reference", "before", workloads // 8, ("steps", "copies")),
        (outside, "leaves-row-or-pool", "before", workloads // 4, ("copies", "wrong_copies")),
    )
    return [
        _in_parts(Cell(CAUSE, arm, subject, target, {}, seed, device, 600), count, sums)[0]
        for target, arm, subject, count, sums in wanted
    ]


def _totalled(unit: str, *sums: str) -> study.Read:
    """Rows with a witness, and with an upper bound where nothing faulted."""
    return lambda end, cell: study.total([end], cell.cause, cell.arm, cell.subject, cell.seed, unit, sums)


def shift_rows(device: DeviceKind, seed: int, shifts: int) -> list[Row]:
    """Shifts inside one block, before, after and with the kernels of a release on either side of its fix.

    The interpreter has no warps, so that there only `after` is run, against the expected bytes.
    """
    subjects = (*OWN, "vllm==0.28.0", "vllm==0.29.0") if device == "cuda" else ("after",)
    size = {} if device == "cuda" else {"requests": 2, "layers": 2}
    given = {"shifts": shifts, "device": device, "seed": seed, **size}
    return study.grid(
        (
            Cell("overlapping-shift", "shifts", s, shift.shifts, {"arm": s, **given}, seed, device, 600)
            for s in subjects
        ),
        _with_shapes,
    )


def _with_shapes(end: ArmResult, cell: Cell) -> Row:
    row = _totalled("shifts", "wrong_bytes")(end, cell)
    return _with_detail(row, shapes=end.value["shapes"] if end.kind == "value" else [])


def shift_table(rows: Sequence[Row]) -> pd.DataFrame:
    """Wrong shifts in percent by window and subject."""
    found: dict[str, dict[str, str]] = {}
    for row in rows:
        for s in row.evidence.detail.get("shapes", []):
            window = f"{s['dtype']} [{s['width']}, {s['token_bytes']} B a token]"
            wrong = f"{s['faults']:,} of {s['shifts']:,} ({100 * s['rate']:.3g} %)"
            found.setdefault(window, {})[row.subject] = wrong
    return pd.DataFrame.from_dict(found, orient="index").rename_axis("window")


def column_rows(device: DeviceKind) -> list[Row]:
    """A first column counted in blocks of 16 instead of 4,480 tokens: column 8,399 of a row of 123."""
    cause, arm, target = "seed-column-divisor", "column-past-the-row", shift.illegal_column
    return study.grid(
        Cell(cause, arm, s, target, {"arm": s, "device": device}, None, device, 180)
        for s in (*OWN, "vllm==0.31.0", "vllm==0.32.0")
    )


def small_case_rows(decisions: int = 6) -> list[Row]:
    """Every case of two requests and two ranks, and every schedule of some, on the simulated device always."""
    rows = []
    wanted: tuple[tuple[Callable[..., Any], str, str, int], ...] = (
        (arms.every_small_case, "every-small-case", "cases", decisions),
        (arms.interleavings, "every-interleaving", "interleavings", 2),
    )
    for target, arm, unit, length in wanted:
        cells = [Cell(CAUSE, arm, s, target, {"subject": s, "decisions": length}) for s in OWN]
        rows += study.grid(cells, _totalled(unit))
    return rows


def rank_rows(
    device: DeviceKind, gpus: int, world_sizes: Sequence[int] = (2, 3), requests: int = 0
) -> list[Row]:
    """A process a rank: over gloo on CPUs, and over NCCL where there are at least two GPUs.

    With `requests` the workload is that many random ones instead of the four of the small case. One run over NCCL at a
    time: its kernels wait on the GPU, and would share it.
    """
    over_nccl = device == "cuda" and gpus > 1
    backend, sizes = ("nccl", [gpus]) if over_nccl else ("gloo", list(world_sizes))
    given = {"device": "cuda" if over_nccl else "sim", "requests": requests}
    cells = [
        Cell(
            CAUSE,
            f"ranks-{backend}-{size}",
            subject,
            arms.ranks,
            {**given, "subject": subject, "world_size": size},
            0,
            timeout_s=600 + requests,
        )
        for size, subject in itertools.product(sizes, OWN)
    ]
    ended = run_arms([cell.experiment for cell in cells], parallel=1 if over_nccl else 2)
    return [study.effect(end, cell) for end, cell in zip(ended, cells, strict=True)]


def rank_table(rows: Sequence[Row]) -> pd.DataFrame:
    """One line a run of real ranks."""
    return study.table(
        rows,
        ranks=lambda row: row.arm.removeprefix("ranks-"),
        on=_on,
        subject=lambda row: row.subject,
        steps=lambda row: max(row.evidence.detail.get("steps", [0])),
        copies_by_rank=lambda row: row.evidence.detail.get("copies", ""),
        wrong_copies_by_rank=lambda row: row.evidence.detail.get("wrong_copies", ""),
        effect=lambda row: row.evidence.detail.get("effect", row.evidence.reason),
    )


def _on(row: Row) -> str:
    """The devices of a run of real ranks, and what they talked over."""
    counted = Counter(row.evidence.detail.get("devices", ()))
    devices = ", ".join(f"{count} x {name}" for name, count in counted.items())
    return f"{devices}; {row.evidence.detail.get('backend', '')}" if devices else ""


def prefix_rows(device: DeviceKind) -> list[Row]:
    """Requests that begin where an earlier one left a state in the prefix cache."""
    return study.grid(
        (
            Cell(CAUSE, "prefix-cache", s, arms.prefix_hits, {"subject": s, "device": device}, 0, device)
            for s in OWN
        ),
        _totalled("prefixes"),
    )


def reported_runs(seed: int, seeds: int, requests: int) -> tuple[list[Any], list[Any]]:
    """The reported workload, before with `seeds` seeds and after with the first of them.

    One record a run, see `arms.reported_workload`.
    """
    runs = [("after", seed), *(("before", number) for number in range(seed, seed + seeds))]
    target = target_of(arms.reported_workload)
    ended = run_arms(
        [Arm(target, {"subject": s, "requests": requests, "seed": number}) for s, number in runs]
    )
    found = [end.value if end.kind == "value" else {"failed": end.message} for end in ended]
    return found[1:], found[:1]


def reported_row(found: Sequence[Mapping[str, Any]], subject: str, seed: int, arm: str) -> Row:
    """One row of the reported workload; a run with a wrong copy is a fault."""
    lost = [one["failed"] for one in found if "failed" in one]
    if lost:
        return Row(CAUSE, arm, subject, "not-judged", 0, 0, seed, Evidence(reason=str(lost[0])))
    wrong = [one for one in found if one["first_wrong_copy"]]
    detail = {
        "unit": "reported workloads",
        "first_wrong_step": [one["first_wrong_copy"]["step"] for one in wrong],
        "first_wrong_request": [one["first_wrong_copy"]["request"] for one in wrong],
        "steps": sum(one["steps"] for one in found),
        "requests": sum(one["finished"] for one in found),
    }
    witness = str(wrong[0]["first_wrong_copy"]["why"]) if wrong else ""
    evidence = Evidence(witness=witness, detail=detail)
    return Row(CAUSE, arm, subject, "fault" if wrong else "clean", len(found), len(wrong), seed, evidence)


def reported_table(found: Sequence[Mapping[str, Any]]) -> pd.DataFrame:
    """One line a seed: what the first wrong copy was, and the first request that went on from a wrong state."""
    return pd.DataFrame(
        {
            "seed": one.get("seed", ""),
            "steps run": f"{one.get('steps', 0):,}",
            "first wrong copy": wrong["why"] if (wrong := one.get("first_wrong_copy")) else "none",
            "first wrong state used": _damaged(one.get("first_damage")),
        }
        for one in found
    )


def _damaged(damage: Mapping[str, Any] | None) -> str:
    return f"request {damage['request']}, after {damage['start']:,} tokens" if damage else "none"


def workaround_table(rows: Sequence[Row]) -> pd.DataFrame:
    """What a launch flag does to the fault, from the control rows of `before`."""
    effects: dict[str, set[str]] = {}
    for row in rows:
        if row.subject == "before":
            effects.setdefault(_control(row), set()).add(str(row.evidence.detail.get("effect")))
    return pd.DataFrame(
        {
            "flag": flag,
            "effect before": " / ".join(sorted(effects[control])),
            "helps": "yes" if effects[control] == {"clean"} else "no",
            "arm": control,
        }
        for control, flag in FLAGS.items()
    )


def answer_table(rows: Sequence[Row]) -> pd.DataFrame:
    """The report's five questions, answered from result rows."""
    helps = workaround_table([row for row in rows if row.arm.startswith("pp")]).set_index("arm")["helps"]
    affected = [row.subject.removeprefix("vllm==") for row in rows if _is_affected(row)]
    clean = [row.subject.removeprefix("vllm==") for row in rows if _is_affected(row, "clean")]
    known = f"fault in {', '.join(affected) or 'none judged'}; clean in {', '.join(clean) or 'none judged'}"
    graphs = f"eager mode helps: {helps['eager']}; graphs help: {helps['graphs']}"
    flags = ", ".join(arm for arm in helps.index if helps[arm] == "yes")
    return pd.DataFrame(
        [
            _answer("Is it known for this revision?", f"yes, by its mechanism: {known}", "rows released"),
            _answer("Is FULL_DECODE_ONLY to blame?", f"no: {graphs}", "rows eager and graphs"),
            _answer("Patch, flag or graph mode?", f"the fix; clean in the arms {flags}", "control rows"),
            _answer(
                "Is the structured-output patch involved?",
                "not needed: no arm here has structured output or that patch, and the copies go wrong",
                "every row of before",
            ),
            _answer("Which variable first?", f"speculation off: helps: {helps['mtp-off']}", "rows mtp-off"),
        ]
    )


def _is_affected(row: Row, outcome: str = "fault") -> bool:
    return row.cause == CAUSE and row.arm == "released" and row.outcome == outcome


def _answer(question: str, answer: str, shown_by: str) -> dict[str, str]:
    return {"question": question, "answer": answer, "shown by": shown_by}
