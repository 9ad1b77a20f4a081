"""The study of incident `pp-align-copy`: which arms run, in processes of their own, and the result rows they give."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pandas as pd

from specmortem import study
from specmortem.incidents.pp_align_copy import arms, fix
from specmortem.isolation import Arm, ArmResult, run_arms
from specmortem.verdict import DeviceKind, Evidence, Row

MODULE = "specmortem.incidents.pp_align_copy.arms"
SHIFT = "specmortem.incidents.pp_align_copy.shift"
CAUSE = "batch-row-index"
RELEASES = study.RELEASES[study.RELEASES.index("0.24.0") :]
PARTS: Mapping[DeviceKind, int] = {"sim": 4, "cuda": 8}  # processes that share a long run
LANES = {
    "live-neighbour": "state that a live request is using",
    "other-block": "an older block of a live request",
    "stale-tail": "a block that nobody owns any more",
}


def _arm(
    function: str,
    name: str,
    kwargs: dict[str, Any],
    runs_on: DeviceKind,
    timeout_s: float = 300,
    env: Mapping[str, str] | None = None,
) -> Arm:
    return Arm(f"{MODULE}:{function}", kwargs, name, timeout_s, runs_on, env or {})


def control_rows(device: DeviceKind, seed: int, pp_sizes: Sequence[int] = (2, 3)) -> list[Row]:
    """`before` and `after` under every control, for each pipeline size; arm `pp3/eager` is eager with three ranks."""
    cells = [(s, c, pp) for s in ("before", "after") for c in arms.CONTROLS for pp in pp_sizes]
    asked = [
        _arm(
            "control",
            f"{s}, {c}, PP {pp}",
            {"subject": s, "control": c, "pp_size": pp, "device": device, "seed": seed},
            device,
            env={"CUDA_LAUNCH_BLOCKING": "1"} if device == "cuda" and c == "launch-blocking" else {},
        )
        for s, c, pp in cells
    ]
    ended = run_arms(asked, cuda_parallel=8)
    return [
        study.row(end, CAUSE, f"pp{pp}/{control}", subject, seed)
        for end, (subject, control, pp) in zip(ended, cells, strict=True)
    ]


def control_table(rows: Sequence[Row]) -> pd.DataFrame:
    """Controls x subjects and pipeline sizes, each cell the effect."""
    cells: dict[str, dict[str, str]] = {}
    for row in rows:
        pp, control = row.arm.split("/")
        column = f"{row.subject}, PP {pp.removeprefix('pp')}"
        cells.setdefault(control, {})[column] = str(row.evidence.detail.get("effect", row.outcome))
    return pd.DataFrame.from_dict(cells, orient="index").loc[list(arms.CONTROLS)].rename_axis("control")


def half_rows(device: DeviceKind, seed: int) -> list[Row]:
    """Each half of the fix alone, and the constant token of a wider vocabulary block."""
    cells = [("row-only", 1024), ("table-only", 1024), ("before", 8192)]
    kwargs = {"device": device, "seed": seed}
    asked = [
        _arm("control", f"{s}, {width}", {**kwargs, "subject": s, "width": width}, device)
        for s, width in cells
    ]
    names = ("half-of-the-fix", "half-of-the-fix", "vocabulary-blocks-8192")
    ended = run_arms(asked, cuda_parallel=3)
    return [
        study.row(end, CAUSE, name, subject, seed)
        for end, name, (subject, _) in zip(ended, names, cells, strict=True)
    ]


def random_rows(seed: int, workloads: int, device: DeviceKind = "sim") -> list[Row]:
    """Random workloads: all after, an eighth before, a fortieth with each half. On CUDA through the kernels."""
    rows, parts = [], PARTS[device]
    copies = "plain" if device == "sim" else "triton"
    for subject in fix.SUBJECTS:
        each = -(-workloads // (parts * {"after": 1, "before": 8}.get(subject, 40)))
        kwargs = {"subject": subject, "workloads": each, "device": device, "copies": copies}
        asked = [
            _arm(
                "random_workloads", f"random, {subject}", {**kwargs, "seed": seed + part * each}, device, 600
            )
            for part in range(parts)
        ]
        ended = run_arms(asked, cuda_parallel=parts)
        row = study.total(ended, CAUSE, "random-workloads", subject, seed, "workloads", arms.FIGURES[1:])
        rows.append(_with_lanes(row, ended))
    return rows


def _with_lanes(row: Row, ended: Sequence[ArmResult]) -> Row:
    lanes = dict.fromkeys(LANES, 0)
    for end in ended:
        for lane, count in (end.value["lanes"] if end.kind == "value" else {}).items():
            lanes[lane] += count
    evidence = replace(row.evidence, detail={**row.evidence.detail, "lanes": lanes})
    return replace(row, evidence=evidence)


def kernel_rows(seed: int, workloads: int, device: DeviceKind = "sim") -> list[Row]:
    """Kernels against the plain reference, and kernels without checks under the bounds detector."""
    rows, parts = [], PARTS[device]
    wanted = (
        ("same_as_reference", "kernels-against-reference", "after", workloads, ("steps", "copies")),
        ("same_as_reference", "kernels-against-reference", "before", workloads // 8, ("steps", "copies")),
        ("outside", "leaves-row-or-pool", "before", workloads // 4, ("copies", "wrong_copies")),
    )
    for function, name, subject, count, sums in wanted:
        each = -(-count // parts)
        kwargs = {"subject": subject, "workloads": each, "device": device}
        asked = [
            _arm(function, f"{name}, {subject}", {**kwargs, "seed": seed + part * each}, device, 600)
            for part in range(parts)
        ]
        ended = run_arms(asked, cuda_parallel=parts)
        rows.append(study.total(ended, CAUSE, name, subject, seed, "workloads", sums))
    return rows


def shift_rows(device: DeviceKind, seed: int, shifts: int) -> list[Row]:
    """Shifts inside one block, before, after and with the kernels of a release on either side of its fix.

    The interpreter has no warps, so that there only `after` is run, against the expected bytes.
    """
    subjects = ("before", "after", "vllm==0.28.0", "vllm==0.29.0")
    rows = []
    for subject in subjects if device == "cuda" else ("after",):
        size = {} if device == "cuda" else {"requests": 2, "layers": 2}
        kwargs = {"arm": subject, "shifts": shifts, "device": device, "seed": seed, **size}
        end = run_arms([Arm(f"{SHIFT}:shifts", kwargs, f"shifts, {subject}", 600, device)])[0]
        row = study.total([end], "overlapping-shift", "shifts", subject, seed, "shifts", ("wrong_bytes",))
        shapes = end.value["shapes"] if end.kind == "value" else []
        rows.append(
            replace(row, evidence=replace(row.evidence, detail={**row.evidence.detail, "shapes": shapes}))
        )
    return rows


def shift_table(rows: Sequence[Row]) -> pd.DataFrame:
    """Wrong shifts in percent by window and subject."""
    data = [
        {
            "window": f"{s['dtype']} [{s['width']}, {s['token_bytes']} B a token]",
            "subject": row.subject,
            "wrong": f"{s['faults']:,} of {s['shifts']:,} ({100 * s['rate']:.3g} %)",
        }
        for row in rows
        for s in row.evidence.detail.get("shapes", [])
    ]
    if not data:
        return pd.DataFrame()
    wide = pd.DataFrame(data).pivot(index="window", columns="subject", values="wrong")
    return wide[list(dict.fromkeys(d["subject"] for d in data))].rename_axis(None, axis=1)


def column_rows(device: DeviceKind) -> list[Row]:
    """A first column counted in blocks of 16 instead of 4,480 tokens: column 8,399 of a row of 123."""
    subjects = ("before", "after", "vllm==0.31.0", "vllm==0.32.0")
    asked = [
        Arm(f"{SHIFT}:illegal_column", {"arm": s, "device": device}, f"column, {s}", 180, device)
        for s in subjects
    ]
    return [
        study.row(end, "seed-column-divisor", "column-past-the-row", subject, None)
        for end, subject in zip(run_arms(asked), subjects, strict=True)
    ]


def small_case_rows(decisions: int = 6) -> list[Row]:
    """Every case of two requests and two ranks, and every schedule of some, on the simulated device always."""
    cells = [
        (function, name, unit, length, subject)
        for function, name, unit, length in (
            ("every_small_case", "every-small-case", "cases", decisions),
            ("interleavings", "every-interleaving", "interleavings", 2),
        )
        for subject in ("before", "after")
    ]
    asked = [_arm(f, f"{name}, {s}", {"subject": s, "decisions": n}, "sim") for f, name, _, n, s in cells]
    return [
        study.total([end], CAUSE, name, subject, None, unit)
        for end, (_, name, unit, _, subject) in zip(run_arms(asked), cells, strict=True)
    ]


def rank_rows(
    device: DeviceKind, gpus: int, world_sizes: Sequence[int] = (2, 3), requests: int = 0
) -> list[Row]:
    """A process a rank: over gloo on CPUs, and over NCCL where there are at least two GPUs.

    With `requests` the workload is that many random ones instead of the four of the small case.
    """
    where: list[tuple[str, DeviceKind, int]] = [("gloo", "sim", size) for size in world_sizes]
    if device == "cuda" and gpus > 1:
        where = [("nccl", "cuda", gpus)]
    cells = [(backend, kind, size, s) for backend, kind, size in where for s in ("before", "after")]
    asked = [
        _arm(
            "ranks",
            f"{size} ranks, {subject}",
            {"subject": subject, "world_size": size, "device": kind, "requests": requests},
            "sim",
            600 + requests,
        )
        for _, kind, size, subject in cells
    ]
    alone = any(
        kind == "cuda" for _, kind, _, _ in cells
    )  # NCCL's kernels wait on the GPU, and would share it
    ended = run_arms(asked, parallel=1 if alone else 2)
    return [
        study.row(end, CAUSE, f"ranks-{backend}-{size}", subject, 0)
        for end, (backend, _, size, subject) in zip(ended, cells, strict=True)
    ]


def rank_table(rows: Sequence[Row]) -> pd.DataFrame:
    """One line a run of real ranks."""
    return pd.DataFrame(
        {
            "ranks": row.arm.removeprefix("ranks-"),
            "on": _on(row),
            "subject": row.subject,
            "steps": max(row.evidence.detail.get("steps", [0])),
            "copies by rank": row.evidence.detail.get("copies", ""),
            "wrong copies by rank": row.evidence.detail.get("wrong_copies", ""),
            "effect": row.evidence.detail.get("effect", row.evidence.reason),
        }
        for row in rows
    )


def _on(row: Row) -> str:
    """The devices of a run of real ranks, and what they talked over."""
    counted = Counter(row.evidence.detail.get("devices", ()))
    devices = ", ".join(f"{count} x {name}" for name, count in counted.items())
    return f"{devices}; {row.evidence.detail.get('backend', '')}" if devices else ""


def prefix_rows(device: DeviceKind) -> list[Row]:
    """Requests that begin where an earlier one left a state in the prefix cache."""
    subjects = ("before", "after")
    asked = [_arm("prefix_hits", f"prefix, {s}", {"subject": s, "device": device}, device) for s in subjects]
    return [
        study.total([end], CAUSE, "prefix-cache", subject, 0, "prefixes")
        for end, subject in zip(run_arms(asked), subjects, strict=True)
    ]


def reported_runs(seed: int, seeds: int, requests: int) -> tuple[list[Any], list[Any]]:
    """The reported workload, before with `seeds` seeds and after with the first of them.

    One record a run, see `pp_align.reported_workload`.
    """
    runs = [("after", seed), *(("before", number) for number in range(seed, seed + seeds))]
    asked = [
        _arm(
            "reported_workload",
            f"reported workload, {subject}, seed {number}",
            {"subject": subject, "requests": requests, "seed": number},
            "sim",
        )
        for subject, number in runs
    ]
    found = [end.value if end.kind == "value" else {"failed": end.message} for end in run_arms(asked)]
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
    lines = []
    for one in found:
        wrong, damage = one.get("first_wrong_copy"), one.get("first_damage")
        after = "" if damage is None else f"request {damage['request']}, after {damage['start']:,} tokens"
        told = {
            "first wrong copy": wrong["why"] if wrong else "none",
            "first wrong state used": after or "none",
        }
        lines.append({"seed": one.get("seed", ""), "steps run": f"{one.get('steps', 0):,}", **told})
    return pd.DataFrame(lines)


def workaround_table(rows: Sequence[Row]) -> pd.DataFrame:
    """What a launch flag does to the fault, from the control rows of `before`."""
    tried = {
        "eager": "--enforce-eager",
        "graphs": "full decode graphs",
        "pp1": "--pipeline-parallel-size 1",
        "one-seq": "--max-num-seqs 1",
        "mtp-off": "no --speculative-config",
    }
    effects: dict[str, set[str]] = {}
    for row in rows:
        if row.subject == "before":
            effects.setdefault(row.arm.split("/")[1], set()).add(str(row.evidence.detail.get("effect")))
    return pd.DataFrame(
        {
            "flag": flag,
            "effect before": " / ".join(sorted(effects[control])),
            "helps": "yes" if effects[control] == {"clean"} else "no",
            "arm": control,
        }
        for control, flag in tried.items()
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
