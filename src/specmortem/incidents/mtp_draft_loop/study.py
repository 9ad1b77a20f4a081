"""The study of incident `mtp-draft-loop`: which arms run, in processes of their own, and the result rows they give.

The subject `after` is this package's code under one of the fixes, `before` the plain code, also where a
control such as `stream-sync` or `launch-blocking` keeps it from faulting. An arm is named
`<where>/<arm of the loop>/k<drafts>`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from importlib import metadata
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any

import pandas as pd

from specmortem import judge as probes
from specmortem import study
from specmortem.errors import BadInputError
from specmortem.facts import Hypothesis
from specmortem.incidents.mtp_draft_loop import arms as experiments
from specmortem.incidents.mtp_draft_loop import flashinfer, hypotheses, probe
from specmortem.incidents.mtp_draft_loop.controls import FIXED, HIDING
from specmortem.incidents.mtp_draft_loop.hypotheses import CONTROL_DRAFTS, HYPOTHESES
from specmortem.isolation import ArmResult, run_arms
from specmortem.study import Cell, Read
from specmortem.verdict import DeviceKind, Evidence, Outcome, Row, Verdict, read_json

BENCHMARK = "python benchmarks/mtp_price.py"
CAUSE = "plan-staging-reuse"
LONG_RUNS = (*FIXED, "stream-sync")
CONTROLS = ("wrong-stream-sync", "constant-plan")
LOAD_CONTROL = (
    "steps/before/k5"  # on a GPU: that the load of the long runs is one that the race is lost under
)
UNGUARDED = ("steps/before/k3", "steps/no-page-kernel/k3", LOAD_CONTROL)
SIDE_BY_SIDE = 8
THREE_DRAFTS = ("0.28.0", "0.30.0")  # a release before the fix, and the first with it
RELEASES = tuple(r for r in study.RELEASES if r not in ("0.20.1", "0.22.0"))  # each has its successor


def subject_of(arm: str) -> str:
    """The code under test in an arm of the loop; a form that is neither before nor a fix is named by itself."""
    if arm in FIXED:
        return "after"
    return arm if arm in ("plan-once", "side-stream-writes") else "before"


def _cell(where: str, arm: str, k: int, target: Callable[..., Any], suffix: str = "", **kwargs: Any) -> Cell:
    """An experiment on an arm of the loop with `k` drafts, on the device and with the seed that it is given."""
    return Cell(
        CAUSE,
        f"{where}/{arm}/k{k}{suffix}",
        subject_of(arm),
        target,
        {"arm": arm, "k": k, **kwargs},
        seed=kwargs.get("seed"),
        device=kwargs.get("device", "sim"),
    )


def _row(cell: Cell, runs: int, faults: int, evidence: Evidence) -> Row:
    outcome: Outcome = "fault" if faults else "clean"
    return Row(cell.cause, cell.arm, cell.subject, outcome, runs, faults, cell.seed, evidence)


def _bounded(row: Row) -> Row:
    """The row with an upper bound of its rate; for repeated runs, not for schedules, which are counted in full."""
    bound = {"upper_bound_95": study.upper_bound(row.runs, row.faults)}
    return row.replace(evidence=row.evidence.replace(detail={**row.evidence.detail, **bound}))


def _reading(runs: str, faults: str, observed: str = "{effect}") -> Read:
    """Rows of experiments that count `runs` and `faults` of them; `observed` is filled in with what they return."""

    def read(end: ArmResult, cell: Cell) -> Row:
        if end.kind != "value":
            return study.effect(end, cell)
        found = end.value
        evidence = Evidence(observed=observed.format(**found), reason=found.get("why", ""), detail=found)
        return _row(cell, found[runs], min(found[faults], found[runs]), evidence)

    return read


def _effects(effects: Mapping[str, int]) -> str:
    return ", ".join(f"{count} {effect}" for effect, count in sorted(effects.items()))


def _place(why: str) -> str:
    """`kernel (file:line)` of a detector's sentence."""
    return why.partition(" at ")[2].partition(",")[0]


# Schedules


def schedule_rows(most: int = 6, k: int = 5) -> list[Row]:
    """Every schedule of one step: before for 1 to `most` drafts, the fixes for `k`, the controls for 3 or 4,
    and two steps of 2 drafts in flight.

    On the simulated device whatever the device is.
    """
    asked: list[tuple[str, int, str, dict[str, Any]]] = [
        *(("before", drafts, "", {}) for drafts in range(1, most + 1)),
        ("before", 3, "-no-metadata", {"metadata": False}),
        ("before", 4, "-graphs", {"graphs": True}),
        *(("no-page-kernel", drafts, "", {}) for drafts in (3, 4)),
        *((arm, k, "", {}) for arm in (*FIXED, *HIDING)),
        *((arm, CONTROL_DRAFTS, "", {}) for arm in CONTROLS),
    ]
    cells = [
        _cell("schedules", arm, drafts, experiments.schedules, suffix, **more)
        for arm, drafts, suffix, more in asked
    ]
    cells += [
        Cell(CAUSE, f"schedules/{name}/k2", "before", experiments.two_steps, {"target_waits": waits})
        for name, waits in (("two-steps", False), ("two-steps-target-waits", True))
    ]
    return study.grid(cells, schedule_row)


def schedule_row(end: ArmResult, cell: Cell) -> Row:
    """Each schedule is a run, and a fault is one that is not clean."""
    if end.kind != "value":
        return study.effect(end, cell)
    found = end.value
    witness: Mapping[str, Any] = next(iter(found["witness"].values()), {})
    kept = ("effects", "k", "lens", "wrong_ids", "wrong_plans", "forwards")
    evidence = Evidence(
        witness=f"schedule {witness['choices']}" if witness else "",
        observed=_effects(found["effects"]),
        place=_place(witness.get("why", "")),
        reason=witness.get("why", ""),
        detail={name: found[name] for name in kept if name in found},
    )
    runs = found["schedules"]
    return _row(cell, runs, runs - found["effects"].get("clean", 0), evidence)


def schedule_table(rows: Sequence[Row]) -> pd.DataFrame:
    """One line an arm: how many schedules there are, and what the user would have seen under them."""

    def count(row: Row, effect: str) -> str:
        return str(row.evidence.detail.get("effects", {}).get(effect, 0))

    return study.table(
        rows,
        arm=lambda row: row.arm.split("/")[1],
        K=lambda row: row.arm.rpartition("/k")[2].replace("-", ", ", 1).replace("-", " "),
        schedules=lambda row: str(row.runs),
        illegal_address=lambda row: count(row, "illegal-address"),
        another_plan_read=lambda row: count(row, "wrong-plan"),
        clean=lambda row: count(row, "clean"),
    )


# Hypotheses


def hypothesis_rows() -> tuple[list[Row], dict[str, str]]:
    """Rows of every hypothesis that has arms of its own, and the verdict that follows from them."""
    cells = [
        Cell(CAUSE, name, "before", hypotheses.hypothesis, {"name": name}) for name in hypotheses.own_arms()
    ]
    rows, verdicts = [], {}
    for cell, end in zip(cells, run_arms([cell.experiment for cell in cells]), strict=True):
        if end.kind != "value":
            rows.append(study.effect(end, cell))
            verdicts[cell.arm] = "open"
            continue
        rows += [hypothesis_row(cell.arm, found) for found in end.value["rows"]]
        verdicts[cell.arm] = end.value["verdict"]
    return rows, verdicts


def hypothesis_row(name: str, found: Mapping[str, Any]) -> Row:
    """One arm of a hypothesis, with the counts that it is about."""
    effects = found.get("effects") or {found["effect"]: 1}
    runs, arm = sum(effects.values()), found["arm"]
    seen = [_effects(effects) if "schedules" in found else found["effect"], *_counts(found)]
    evidence = Evidence(observed="; ".join(seen), reason=found.get("why", ""), detail=dict(found))
    cell = Cell(CAUSE, f"{name}/{arm}", subject_of(arm.partition(",")[0]), hypotheses.hypothesis)
    return _row(cell, runs, runs - effects.get("clean", 0), evidence)


def _counts(found: Mapping[str, Any]) -> list[str]:
    if "with_placeholders" in found:
        return [
            f"{found['with_placeholders']} steps with placeholders",
            f"{found['negative_ids']} ids below 0",
        ]
    if found.get("clamped"):
        return [f"requests clamped: {found['clamped']}"]
    return [f"ids wrong in {found['wrong_ids']} passes"] if "schedules" in found else []


def verdicts_of(rows: Sequence[Row], own: Mapping[str, str], k: int = 5) -> dict[str, str]:
    """The verdict of each hypothesis: `own` from the arms made for it, the others from rows of other arms."""
    by_arm = {row.arm: row for row in rows}
    before, *ordered, wrong = (by_arm[arm] for arm in HYPOTHESES["plan-buffer"].arms(k))
    holds = before.faults > 0 and wrong.faults > 0 and all(row.outcome == "clean" for row in ordered)
    found = {"plan-buffer": "supported" if holds else "open"}
    for name in ("async-scheduling", "stale-accepted-counts"):
        faults = all(by_arm[arm].outcome == "fault" for arm in HYPOTHESES[name].arms(k))
        found[name] = "refuted" if faults else "open"
    return found | dict(own)


def hypothesis_table(
    stated: Sequence[Hypothesis], rows: Sequence[Row], verdicts: Mapping[str, str], k: int = 5
) -> pd.DataFrame:
    """Statement, prediction, what the rows show, verdict."""

    def measured(name: str) -> str:
        arms = HYPOTHESES[name].arms(k)
        shown = [row for row in rows if row.arm in arms or row.arm.startswith(f"{name}/")]
        return "; ".join(f"{row.arm.partition('/')[2]}: {row.evidence.observed}" for row in shown)

    return pd.DataFrame(
        {
            "hypothesis": one.statement,
            "predicts": HYPOTHESES[one.id].predicts,
            "measured (arm: outcome)": measured(one.id),
            "verdict": verdicts[one.id],
        }
        for one in stated
    )


# Processes


def process_rows(
    device: DeviceKind, seed: int, processes: int, steps: int, forward_us: float, side_by_side: int = 5
) -> list[Row]:
    """`before` with 5 drafts in processes of their own, each with a layout of its own that must fault."""
    kwargs: dict[str, Any] = {"device": device, "steps": steps, "forward_us": forward_us}
    cells = [
        _cell("processes", "before", 5, experiments.steps, seed=seed + n, **kwargs) for n in range(processes)
    ]
    ended = run_arms([cell.experiment for cell in cells], cuda_parallel=side_by_side)
    return [process_row(ended, cells[0], steps)]  # the row names the first seed


def process_row(ended: Sequence[ArmResult], cell: Cell, steps: int) -> Row:
    """How processes ended: a fault is one that died, or came back with anything but clean results."""
    each = [study.effect(end, cell) for end in ended]
    judged = [row for row in each if row.outcome != "not-judged"]
    if not judged:
        return each[0]
    effects = Counter(row.evidence.observed for row in judged)
    lost = [f"{end.kind}: {end.message}"[:200] for end, row in zip(ended, each, strict=True) if not row.runs]
    why = next((row.evidence.reason for row in judged if row.evidence.observed == "illegal-address"), "")
    ends = dict(effects) | ({"lost": len(lost)} if lost else {})
    detail = {
        "effects": ends,
        "steps_at_most": steps,
        "seconds": [round(end.seconds, 1) for end in ended],
        "lost": lost,
    }
    evidence = Evidence(observed=_effects(ends), place=_place(why), reason=why, detail=detail)
    return _bounded(_row(cell, len(judged), len(judged) - effects["clean"], evidence))


def long_rows(
    device: DeviceKind,
    seed: int,
    steps: int,
    forward_us: float,
    timeout_s: float,
    arms: Sequence[str] = LONG_RUNS,
) -> list[Row]:
    """The fixes and the rejected patch with 5 drafts: results equal bit for bit, step by step.

    The layout must fault where a plan is overtaken; on the simulator work runs at random moments. On a GPU the arms
    share it, which keeps each stream busy, and the arms UNGUARDED run beside them (`no-page-kernel` a quarter of the
    steps, which is enough to tell it from `before`).
    """
    asked = [(arm, 5, steps) for arm in arms]
    if device == "cuda":
        asked += [("before", 3, steps), ("no-page-kernel", 3, -(-steps // 4)), ("before", 5, steps)]
    kwargs: dict[str, Any] = {"device": device, "forward_us": forward_us, "seed": seed, "schedule": "random"}
    cells = [
        replace(_cell("steps", arm, k, experiments.steps, steps=n, **kwargs), timeout_s=timeout_s)
        for arm, k, n in asked
    ]
    return study.grid(cells, steps_row, cuda_parallel=SIDE_BY_SIDE)


def steps_row(end: ArmResult, cell: Cell) -> Row:
    """A run of many steps of one batch; each step is a run."""
    if end.kind != "value":
        return study.effect(end, cell)
    found = end.value
    faults = 0 if found["effect"] == "clean" else max(1, found["mismatched_steps"])
    detail = {"unit": "steps", "seconds": round(end.seconds, 1), **found}
    evidence = Evidence(observed=found["effect"], reason=found["why"], detail=detail)
    return _bounded(_row(cell, max(found["steps"], faults), faults, evidence))


# Detector

detector_row = _reading("schedules", "reported")


def detector_rows(device: DeviceKind, seed: int) -> list[Row]:
    """What the staging detector reports in the first step: a fault here is a missing order, not a wrong read."""
    asked = [("before", 5), ("before", 3), ("launch-blocking", 5), ("wrong-stream-sync", 5)]
    asked += [(arm, 5) for arm in LONG_RUNS]
    cells = [_cell("detector", arm, k, experiments.first_step, device=device, seed=seed) for arm, k in asked]
    if device == "cuda":
        cells = [replace(cell, env=experiments.env_of(cell.kwargs["arm"])) for cell in cells]
    return study.grid(cells, detector_row, cuda_parallel=SIDE_BY_SIDE)


def detector_table(rows: Sequence[Row]) -> pd.DataFrame:
    """One line an arm: the schedules of its first step, and the pair that is reported."""

    def races(row: Row) -> str:
        return ", ".join(f"{name}: {count}" for name, count in row.evidence.detail.get("races", {}).items())

    return study.table(
        rows,
        arm=lambda row: row.arm.split("/")[1],
        K=lambda row: row.arm.rpartition("/k")[2],
        races_by_schedule=races,
        order=lambda row: row.evidence.observed or row.evidence.reason,
        pair_without_an_order=lambda row: "; ".join(row.evidence.detail.get("pairs", [])),
    )


# The released loop with three drafts


def three_draft_rows(device: DeviceKind) -> list[Row]:
    """The released loop and builder with 3 drafts, which plan twice a step: a release before the fix, and one with it.

    On the simulator a copy into an idle stream runs at once; on a GPU the two processes share it.
    """

    def read(end: ArmResult, cell: Cell) -> Row:
        if end.kind != "value":
            return study.effect(end, cell)
        return Row.of(Verdict.from_dict(end.value), cause=cell.cause, subject=cell.subject, arm=cell.arm)

    subjects = [f"vllm=={release}" for release in THREE_DRAFTS]
    asked = [{"subject": subject, "device": device} for subject in subjects]
    cells = [
        Cell(CAUSE, "released-k3", subject, probe.three_drafts, kwargs, device=device)
        for subject, kwargs in zip(subjects, asked, strict=True)
    ]
    return study.grid(cells, read, cuda_parallel=len(cells))


# The real library

real_loop_row = _reading("steps", "wrong_outputs")
_cross_check_row = _reading("batches", "differences", "{differences} differences in {batches} batches")


def flashinfer_version() -> str:
    """Version of the installed FlashInfer; empty where there is none. Nothing is imported."""
    try:
        return metadata.version("flashinfer-python")
    except metadata.PackageNotFoundError:
        return ""


def flashinfer_rows(device: DeviceKind, steps: int, cycles: int, batches: int, seed: int) -> list[Row]:
    """Arms on the installed FlashInfer; none without a GPU or without the library.

    The first compiles its kernels, for some 40 s, so it runs before the others.
    """
    version = flashinfer_version()
    if device != "cuda" or not version:
        return []
    subject = f"flashinfer=={version}"
    verdict = probes.judge(CAUSE, subject, device="cuda", timeout_s=240)
    check = Cell(
        *(CAUSE, "planner-cross-check", subject, flashinfer.cross_check),
        {"batches": batches, "seed": seed},
        seed=seed,
        device="cuda",
    )
    sizes = {"steps": steps, "cycles": cycles, "seed": seed}
    loops = [
        replace(check, arm=f"loop/{arm}", target=flashinfer.loop, kwargs={"arm": arm, **sizes}, timeout_s=400)
        for arm in flashinfer.ARMS
    ]

    def read(end: ArmResult, cell: Cell) -> Row:
        row = _cross_check_row(end, cell) if cell is check else real_loop_row(end, cell)
        return row if end.kind != "value" else _bounded(row)

    judged = Row.of(verdict, cause=CAUSE, subject=subject, arm="overwritten-plan")
    return [judged, *study.grid([check, *loops], read, cuda_parallel=SIDE_BY_SIDE)]


# Price


def price_of(path: Path) -> tuple[dict[str, Any], str]:
    """What `benchmarks/mtp_price.py` wrote to `path`, and what to say above it; nothing where there is no file.

    Raises BadInputError for a file that it did not write.
    """
    if not path.exists():
        return {}, "not yet run on a GPU"
    found = read_json(path, BENCHMARK)
    try:
        where = f"{found['device']['name']}, forwards of {found['forward_us']:,.0f} us"
        return found, f"{where}\n{found['measured']}"
    except (KeyError, TypeError) as error:
        raise BadInputError(f"{path} holds no price; run `{BENCHMARK}` to write one") from error


def price_table(found: Mapping[str, Any], base: str) -> pd.DataFrame:
    """Arms x numbers of drafts: the time of a step over that of `base`, and the interval of the ratio's median."""
    frame = pd.DataFrame(found["rows"])
    shown = [
        f"{ratio:.3f} ({low:.3f} to {high:.3f})"
        for ratio, (low, high) in zip(frame[f"to_{base}"], frame[f"to_{base}_95"], strict=True)
    ]
    wide = frame.assign(shown=shown)[frame["arm"] != base].pivot(index="arm", columns="k", values="shown")
    wide = wide.loc[[arm for arm in dict.fromkeys(frame["arm"]) if arm != base]]
    return wide.rename(columns=lambda k: f"K = {k}").rename_axis(f"over {base}").rename_axis(None, axis=1)


# The reports' figures


def throughput_table(data: pd.DataFrame) -> pd.DataFrame:
    """One line a validator and measure, numbers of drafts in columns."""
    keys = ["validator", "hardware", "vllm", "measure", "unit"]
    values = [f"{value:,g}" if value < 1000 else f"{value:,.1f}" for value in data["value"]]
    wide = data.assign(value=values).pivot(index=keys, columns="drafts", values="value").reset_index()
    return wide.rename(columns=lambda name: f"K = {name}" if isinstance(name, int) else name).rename_axis(
        None, axis=1
    )


def tokens_in_flight(data: pd.DataFrame) -> pd.DataFrame:
    """Throughput times mean latency: what the first validator's two columns say about each other."""
    first = data[data["validator"] == 1].pivot(index="drafts", columns="measure", values="value")
    product = first["throughput"] * first["mean latency"]
    return pd.DataFrame(
        {
            "K": list(first.index),
            "throughput x latency": [f"{value:,.0f}" for value in product],
            "of 40 x 2,048": (product / (40 * 2048)).round(3).tolist(),
        }
    )


def growth_table(searches: Mapping[str, Sequence[Mapping[str, Any]]]) -> pd.DataFrame:
    """One line a batch size: layouts that move, merges that walk out of memory, stores outside.

    A key is a description with the card's name in brackets at its end, or the name alone.
    """
    columns: dict[str, list[Any]] = {"requests": [row["batch"] for row in next(iter(searches.values()))]}
    for label, rows in searches.items():
        card = label.partition("(")[2].rstrip(")") or label
        columns[f"{card}: changes / reads / stores"] = [
            f"{row['layout_changes']} / {row['read']} / {row['write']}" for row in rows
        ]
    return pd.DataFrame(columns)


def examples_table(examples: Sequence[Mapping[str, Any]]) -> pd.DataFrame:
    """One line an array of each worked example: as the kernels should read it, and as they do."""
    return pd.DataFrame(
        {
            "lengths": f"{example['geometry']}: {', '.join(map(str, example['lens']))}",
            "chunks": " to ".join(map(str, example["chunks"])),
            "array": name,
            "its own": str(example["own"][name]),
            "read": str(example["seen"][name]),
            "consequence": example["consequence"],
        }
        for example in examples
        for name in ("merge_indptr", "o_indptr")
    )


def waits_table(rows: Sequence[Row]) -> pd.DataFrame:
    """How often the host waits in each build of a step, releases with the same counts together."""
    found: dict[tuple[str, ...], list[str]] = {}
    for row in rows:
        for_situations = row.evidence.detail.get("host_waits_by_build", {})
        if for_situations:
            key = tuple(f"{situation}: {waits}" for situation, waits in for_situations.items())
            found.setdefault(key, []).append(row.subject.removeprefix("vllm=="))
    lines = [(key, f"{names[0]} to {names[-1]} ({len(names)} releases)") for key, names in found.items()]
    return pd.DataFrame({"releases": names, "waits in builds 1 to 5": "; ".join(key)} for key, names in lines)


def lengths_table(rows: Sequence[Row]) -> pd.DataFrame:
    """By how much the lengths of a plan and those on the GPU grow in a draft pass, neighbouring releases together."""
    growths = []
    for row in rows:
        situations = row.evidence.detail.get("situations", {})
        if situations and "==" in row.subject:
            grows = {name: _grows(found) for name, found in situations.items()}
            growths.append((row.subject.removeprefix("vllm=="), grows))
    columns: dict[str, dict[str, str]] = {}
    for grows, group in groupby(growths, key=itemgetter(1)):
        names = [name for name, _ in group]
        columns[f"{names[0]} to {names[-1]}" if len(names) > 1 else names[0]] = grows
    return pd.DataFrame(columns).rename_axis("step").reset_index()


def _grows(found: Mapping[str, Sequence[int]]) -> str:
    """Growth a pass, of the plan's lengths and of the GPU's; all passes where they differ."""
    pair = (sorted(set(found[name])) for name in ("planned_grows", "device_grows"))
    return " / ".join(", ".join(map(str, growth)) for growth in pair)


def split_table(found: Mapping[str, Any]) -> pd.DataFrame:
    """Which pairs of plans race by K and the ratio of GPU to host time, and the measured threshold of K."""
    frame = pd.DataFrame([row for row in found["rows"] if row["metadata"]])
    frame["pairs"] = [", ".join(f"{a}-{b}" for a, b in pairs) or "none" for pairs in frame["measured"]]
    wide = frame.pivot(index="k", columns="ratio", values="pairs")
    wide = wide.rename(columns=lambda ratio: f"ratio {ratio:g}")
    wide["races from ratio"] = [found["threshold"][str(k)] or "never" for k in wide.index]
    bare = {row["k"]: row["measured"] for row in found["rows"] if not row["metadata"]}
    wide["no metadata"] = [", ".join(f"{a}-{b}" for a, b in bare[k]) or "none" for k in wide.index]
    return wide.rename_axis("K").rename_axis(None, axis=1)
