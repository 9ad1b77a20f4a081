"""The study of incident `mtp-draft-loop`: which arms run, in processes of their own, and the result rows they give.

The subject `after` is this package's code under one of the fixes, `before` the plain code, also where a
control such as `stream-sync` or `launch-blocking` keeps it from faulting. An arm is named
`<where>/<arm of the loop>/k<drafts>`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
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
from specmortem.incidents.mtp_draft_loop import arms as mtp_loop
from specmortem.incidents.mtp_draft_loop import flashinfer as real
from specmortem.incidents.mtp_draft_loop.proposer import FIXED, HIDING
from specmortem.isolation import Arm, ArmResult, run_arms
from specmortem.verdict import DeviceKind, Evidence, Outcome, Row, Verdict, read_json

MODULE = "specmortem.incidents.mtp_draft_loop.arms"
DETECT = "specmortem.incidents.mtp_draft_loop.detector"
REAL = "specmortem.incidents.mtp_draft_loop.flashinfer"
BENCHMARK = "python benchmarks/mtp_price.py"
PROBE = "specmortem.incidents.mtp_draft_loop.probe"
SLUG, CAUSE = "mtp-draft-loop", "plan-staging-reuse"
LONG_RUNS = (*FIXED, "stream-sync")
CONTROLS = ("wrong-stream-sync", "constant-plan")
CONTROL_DRAFTS = 4
LOAD_CONTROL = (
    "steps/before/k5"  # on a GPU: that the load of the long runs is one that the race is lost under
)
UNGUARDED = ("steps/before/k3", "steps/no-page-kernel/k3", LOAD_CONTROL)
SIDE_BY_SIDE = 8
THREE_DRAFTS = ("0.28.0", "0.30.0")  # a release before the fix, and the first with it
RELEASES = tuple(r for r in study.RELEASES if r not in ("0.20.1", "0.22.0"))  # each has its successor
PREDICTS = {
    "plan-buffer": "before faults where the host overtakes a copy, and no arm does in which it cannot",
    "same-stream-buffer-race": "ids are wrong with both writes in the model's stream",
    "minus-one-placeholders": "no fault without placeholders; ids below 0 reach the model with them",
    "async-scheduling": "no fault without asynchronous scheduling",
    "stale-metadata": "one old plan for all passes leaves memory",
    "kv-boundary": "a new page faults, whatever becomes of the plan",
    "clamping": "a request at max_model_len faults",
    "stale-accepted-counts": "no fault without a recurrent layer",
}


def shown_by(k: int = 5) -> dict[str, tuple[str, ...]]:
    """Arms that decide the hypotheses which have none of their own; `k` drafts in the arms that have an order."""
    ordered = (f"schedules/{arm}/k{k}" for arm in (*FIXED, *HIDING))
    wrong = f"schedules/wrong-stream-sync/k{CONTROL_DRAFTS}"
    return {
        "plan-buffer": (f"schedules/before/k{k}", *ordered, wrong),
        "async-scheduling": ("minus-one-placeholders/before, sync scheduling",),
        "stale-accepted-counts": (f"schedules/before/k{k}",),
    }


def subject_of(arm: str) -> str:
    """The code under test in an arm of the loop; a form that is neither before nor a fix is named by itself."""
    if arm in FIXED:
        return "after"
    return arm if arm in ("plan-once", "side-stream-writes") else "before"


# Schedules


def schedule_rows(most: int = 6, k: int = 5) -> list[Row]:
    """Every schedule of one step: before for 1 to `most` drafts, the fixes for `k`, the controls for 3 or 4,
    and two steps of 2 drafts in flight.

    On the simulated device whatever the device is.
    """
    cells: list[dict[str, Any]] = [{"arm": "before", "k": drafts} for drafts in range(1, most + 1)]
    cells += [{"arm": "before", "k": 3, "metadata": False}, {"arm": "before", "k": 4, "graphs": True}]
    cells += [{"arm": "no-page-kernel", "k": drafts} for drafts in (3, 4)]
    cells += [{"arm": arm, "k": k} for arm in (*FIXED, *HIDING)]
    cells += [{"arm": arm, "k": CONTROL_DRAFTS} for arm in CONTROLS]
    asked = {
        _cell(cell): Arm(f"{MODULE}:schedules", cell, f"schedules, {_cell(cell)}", 180) for cell in cells
    }
    for name, waits in (("two-steps", False), ("two-steps-target-waits", True)):
        asked[f"{name}/k2"] = Arm(f"{MODULE}:two_steps", {"target_waits": waits}, name, 180)
    return [
        _schedule_row(end, f"schedules/{name}", subject_of(name.partition("/")[0]))
        for end, name in zip(run_arms(list(asked.values())), asked, strict=True)
    ]


def _cell(cell: Mapping[str, Any]) -> str:
    """Arm, number of drafts, and what else is set, as in the name of a row."""
    more = "-no-metadata" * (not cell.get("metadata", True)) + "-graphs" * cell.get("graphs", False)
    return f"{cell['arm']}/k{cell['k']}{more}"


def _schedule_row(end: ArmResult, name: str, subject: str) -> Row:
    if end.kind != "value":
        return study.row(end, CAUSE, name, subject, None)
    found = end.value
    runs, faults = found["schedules"], found["schedules"] - found["effects"].get("clean", 0)
    witness: Mapping[str, Any] = next(iter(found["witness"].values()), {})
    kept = ("effects", "k", "lens", "wrong_ids", "wrong_plans", "forwards")
    detail = {name: found[name] for name in kept if name in found}
    evidence = Evidence(
        witness=f"schedule {witness['choices']}" if witness else "",
        observed=_counted(found["effects"]),
        place=_place(witness.get("why", "")),
        reason=witness.get("why", ""),
        detail=detail,
    )
    return _counted_row(name, subject, runs, faults, None, evidence)


def _place(why: str) -> str:
    """`kernel (file:line)` of a detector's sentence."""
    return why.partition(" at ")[2].partition(",")[0]


def _counted(effects: Mapping[str, int]) -> str:
    return ", ".join(f"{count} {effect}" for effect, count in sorted(effects.items()))


def _counted_row(arm: str, subject: str, runs: int, faults: int, seed: int | None, evidence: Evidence) -> Row:
    outcome: Outcome = "fault" if faults else "clean"
    return Row(CAUSE, arm, subject, outcome, runs, faults, seed, evidence)


def _bounded(row: Row) -> Row:
    """The row with an upper bound of its rate; for repeated runs, not for schedules, which are counted in full."""
    bound = {"upper_bound_95": study.upper_bound(row.runs, row.faults)}
    return replace(row, evidence=replace(row.evidence, detail={**row.evidence.detail, **bound}))


def schedule_table(rows: Sequence[Row]) -> pd.DataFrame:
    """One line an arm: how many schedules there are, and what the user would have seen under them."""
    lines = []
    for row in rows:
        effects = row.evidence.detail.get("effects", {})
        _, arm, drafts = row.arm.split("/")
        told = {"arm": arm, "K": drafts.removeprefix("k").replace("-", ", ", 1).replace("-", " ")}
        told |= {"schedules": str(row.runs)}
        told |= {
            label: str(effects.get(effect, 0))
            for effect, label in (
                ("illegal-address", "illegal address"),
                ("wrong-plan", "another plan read"),
                ("clean", "clean"),
            )
        }
        lines.append(told)
    return pd.DataFrame(lines)


# Hypotheses


def hypothesis_rows() -> tuple[list[Row], dict[str, str]]:
    """Rows of every hypothesis that has arms of its own, and the verdict that follows from them."""
    names = list(mtp_loop.HYPOTHESES)
    asked = [Arm(f"{MODULE}:hypothesis", {"name": name}, f"hypothesis {name}", 180) for name in names]
    rows, verdicts = [], {}
    for name, end in zip(names, run_arms(asked), strict=True):
        if end.kind != "value":
            rows.append(study.row(end, CAUSE, name, "before", None))
            verdicts[name] = "open"
            continue
        rows += [_hypothesis_row(name, found) for found in end.value["rows"]]
        verdicts[name] = end.value["verdict"]
    return rows, verdicts


def _hypothesis_row(name: str, found: Mapping[str, Any]) -> Row:
    effects = found.get("effects") or {found["effect"]: 1}
    runs = sum(effects.values())
    evidence = Evidence(observed=_told(found, effects), reason=found.get("why", ""), detail=dict(found))
    subject = subject_of(found["arm"].partition(",")[0])
    return _counted_row(
        f"{name}/{found['arm']}", subject, runs, runs - effects.get("clean", 0), None, evidence
    )


def _told(found: Mapping[str, Any], effects: Mapping[str, int]) -> str:
    """The effects, and the counts that the hypothesis is about."""
    extra = []
    if "with_placeholders" in found:
        extra = [
            f"{found['with_placeholders']} steps with placeholders",
            f"{found['negative_ids']} ids below 0",
        ]
    elif found.get("clamped"):
        extra = [f"requests clamped: {found['clamped']}"]
    if "schedules" in found:
        extra.append(f"ids wrong in {found['wrong_ids']} passes")
    return "; ".join([_counted(effects) if "schedules" in found else found["effect"], *extra])


def verdicts_of(rows: Sequence[Row], own: Mapping[str, str], k: int = 5) -> dict[str, str]:
    """The verdict of each hypothesis: `own` from the arms made for it, the others from rows of other arms."""
    by_arm, shown = {row.arm: row for row in rows}, shown_by(k)
    before, *ordered, wrong = (by_arm[arm] for arm in shown["plan-buffer"])
    holds = before.faults > 0 and wrong.faults > 0 and all(row.outcome == "clean" for row in ordered)
    found = {"plan-buffer": "supported" if holds else "open"}
    for name in ("async-scheduling", "stale-accepted-counts"):
        faults = all(by_arm[arm].outcome == "fault" for arm in shown[name])
        found[name] = "refuted" if faults else "open"
    return found | dict(own)


def hypothesis_table(
    hypotheses: Sequence[Hypothesis], rows: Sequence[Row], verdicts: Mapping[str, str], k: int = 5
) -> pd.DataFrame:
    """Statement, prediction, what the rows show, verdict."""
    lines = []
    for hypothesis in hypotheses:
        wanted = shown_by(k).get(hypothesis.id, ())
        shown = [row for row in rows if row.arm in wanted or row.arm.startswith(f"{hypothesis.id}/")]
        told = "; ".join(f"{_short(row.arm)}: {row.evidence.observed}" for row in shown)
        lines.append(
            {
                "hypothesis": hypothesis.statement,
                "predicts": PREDICTS[hypothesis.id],
                "measured (arm: outcome)": told,
                "verdict": verdicts[hypothesis.id],
            }
        )
    return pd.DataFrame(lines)


def _short(arm: str) -> str:
    return arm.partition("/")[2]


# Processes


def process_rows(
    device: DeviceKind, seed: int, processes: int, steps: int, forward_us: float, side_by_side: int = 5
) -> list[Row]:
    """`before` with 5 drafts in processes of their own, each with a layout of its own that must fault."""
    kwargs = {"arm": "before", "device": device, "k": 5, "steps": steps, "forward_us": forward_us}
    asked = [
        Arm(f"{MODULE}:steps", {**kwargs, "seed": seed + n}, f"before, process {n}", 240, device)
        for n in range(processes)
    ]
    ended = run_arms(asked, cuda_parallel=side_by_side)
    return [process_row(ended, seed, steps)]


def process_row(ended: Sequence[ArmResult], seed: int, steps: int) -> Row:
    """How processes ended: a fault is one that died, or came back with anything but clean results."""
    name, effects = f"processes/before/k{ended[0].arm.kwargs['k']}", Counter(_effect(end) for end in ended)
    lost = [end for end in ended if _effect(end) == "lost"]
    if len(lost) == len(ended):
        return study.row(lost[0], CAUSE, name, "before", seed)
    judged = len(ended) - len(lost)
    why = next((_why(end) for end in ended if _effect(end) == "illegal-address"), "")
    detail = {
        "effects": dict(effects),
        "steps_at_most": steps,
        "seconds": [round(end.seconds, 1) for end in ended],
        "lost": [f"{end.kind}: {end.message}"[:200] for end in lost],
    }
    evidence = Evidence(observed=_counted(effects), place=_place(why), reason=why, detail=detail)
    return _bounded(_counted_row(name, "before", judged, judged - effects["clean"], seed, evidence))


def _effect(end: ArmResult) -> str:
    if end.kind == "value":
        return str(end.value["effect"])
    return end.kind if end.kind in study.DIED else "lost"


def _why(end: ArmResult) -> str:
    return str(end.value["why"]) if end.kind == "value" else end.message.splitlines()[0]


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
    cells = [(arm, 5, steps) for arm in arms]
    if device == "cuda":
        cells += [("before", 3, steps), ("no-page-kernel", 3, -(-steps // 4)), ("before", 5, steps)]
    kwargs = {"device": device, "forward_us": forward_us, "seed": seed, "schedule": "random"}
    asked = [
        Arm(f"{MODULE}:steps", {**kwargs, "arm": arm, "k": k, "steps": n}, f"{arm}, K {k}", timeout_s, device)
        for arm, k, n in cells
    ]
    ended = run_arms(asked, cuda_parallel=SIDE_BY_SIDE)
    return [
        steps_row(end, f"steps/{arm}/k{k}", subject_of(arm), seed)
        for end, (arm, k, _) in zip(ended, cells, strict=True)
    ]


def steps_row(end: ArmResult, name: str, subject: str, seed: int) -> Row:
    """A run of many steps of one batch; each step is a run."""
    if end.kind != "value":
        return study.row(end, CAUSE, name, subject, seed)
    found = end.value
    faults = 0 if found["effect"] == "clean" else max(1, found["mismatched_steps"])
    detail = {"unit": "steps", "seconds": round(end.seconds, 1), **found}
    evidence = Evidence(observed=found["effect"], reason=found["why"], detail=detail)
    return _bounded(_counted_row(name, subject, max(found["steps"], faults), faults, seed, evidence))


# Detector


def detector_rows(device: DeviceKind, seed: int) -> list[Row]:
    """What the staging detector reports in the first step: a fault here is a missing order, not a wrong read."""
    cells = [("before", 5), ("before", 3), ("launch-blocking", 5), ("wrong-stream-sync", 5)]
    cells += [(arm, 5) for arm in LONG_RUNS]
    asked = [
        Arm(
            f"{DETECT}:first_step",
            {"arm": arm, "k": k, "device": device, "seed": seed},
            f"detector, {arm}, K {k}",
            120,
            device,
            mtp_loop.env_of(arm) if device == "cuda" else {},
        )
        for arm, k in cells
    ]
    ended = run_arms(asked, cuda_parallel=SIDE_BY_SIDE)
    return [
        _detector_row(end, f"detector/{arm}/k{k}", subject_of(arm), seed)
        for end, (arm, k) in zip(ended, cells, strict=True)
    ]


def _detector_row(end: ArmResult, name: str, subject: str, seed: int) -> Row:
    if end.kind != "value":
        return study.row(end, CAUSE, name, subject, seed)
    found = end.value
    evidence = Evidence(observed=found["effect"], reason=found["why"], detail=dict(found))
    return _counted_row(name, subject, found["schedules"], found["reported"], seed, evidence)


def detector_table(rows: Sequence[Row]) -> pd.DataFrame:
    """One line an arm: the schedules of its first step, and the pair that is reported."""
    return pd.DataFrame(
        {
            "arm": row.arm.split("/")[1],
            "K": row.arm.rpartition("/k")[2],
            "races by schedule": ", ".join(
                f"{name}: {count}" for name, count in row.evidence.detail.get("races", {}).items()
            ),
            "order": row.evidence.observed or row.evidence.reason,
            "pair without an order": "; ".join(row.evidence.detail.get("pairs", [])),
        }
        for row in rows
    )


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
    told = [
        f"{ratio:.3f} ({low:.3f} to {high:.3f})"
        for ratio, (low, high) in zip(frame[f"to_{base}"], frame[f"to_{base}_95"], strict=True)
    ]
    wide = frame.assign(told=told)[frame["arm"] != base].pivot(index="arm", columns="k", values="told")
    wide = wide.loc[[arm for arm in dict.fromkeys(frame["arm"]) if arm != base]]
    return wide.rename(columns=lambda k: f"K = {k}").rename_axis(f"over {base}").rename_axis(None, axis=1)


# The released loop with three drafts


def three_draft_rows(device: DeviceKind) -> list[Row]:
    """The released loop and builder with 3 drafts, which plan twice a step: a release before the fix, and one with it.

    On the simulator a copy into an idle stream runs at once; on a GPU the two processes share it.
    """
    asked = [
        Arm(
            f"{PROBE}:three_drafts",
            {"subject": f"vllm=={release}", "device": device},
            f"released, 3 drafts, {release}",
            120,
            device,
        )
        for release in THREE_DRAFTS
    ]
    ended = run_arms(asked, cuda_parallel=len(asked))
    return [_three_draft_row(end, end.arm.kwargs["subject"]) for end in ended]


def _three_draft_row(end: ArmResult, subject: str) -> Row:
    if end.kind != "value":
        return study.row(end, CAUSE, "released-k3", subject, None)
    return Row.of(Verdict.from_dict(end.value), cause=CAUSE, subject=subject, arm="released-k3")


# The real library


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
    rows = [Row.of(verdict, cause=CAUSE, subject=subject, arm="overwritten-plan")]
    check = Arm(f"{REAL}:cross_check", {"batches": batches, "seed": seed}, "planner cross-check", 200, "cuda")
    loops = [
        Arm(f"{REAL}:loop", {"arm": a, "steps": steps, "cycles": cycles, "seed": seed}, a, 400, "cuda")
        for a in real.ARMS
    ]
    ended = run_arms([check, *loops], cuda_parallel=SIDE_BY_SIDE)
    rows.append(_cross_check_row(ended[0], subject, seed))
    return rows + [real_loop_row(end, subject, seed) for end in ended[1:]]


def _cross_check_row(end: ArmResult, subject: str, seed: int) -> Row:
    if end.kind != "value":
        return study.row(end, CAUSE, "planner-cross-check", subject, seed)
    found = end.value
    evidence = Evidence(
        observed=f"{found['differences']} differences in {found['batches']} batches", detail=found
    )
    faults = min(found["differences"], found["batches"])
    return _bounded(_counted_row("planner-cross-check", subject, found["batches"], faults, seed, evidence))


def real_loop_row(end: ArmResult, subject: str, seed: int) -> Row:
    """A loop of plans and runs of the released library; a process that died counts one fault."""
    name = f"loop/{end.arm.kwargs['arm']}"
    if end.kind != "value":
        return study.row(end, CAUSE, name, subject, seed)
    found = end.value
    faults = min(found["wrong_outputs"], found["steps"])
    evidence = Evidence(observed=found["effect"], detail=found)
    return _bounded(_counted_row(name, subject, found["steps"], faults, seed, evidence))


# The reports' figures


def throughput_table(data: pd.DataFrame) -> pd.DataFrame:
    """One line a validator and measure, numbers of drafts in columns."""
    keys = ["validator", "hardware", "vllm", "measure", "unit"]
    told = data.assign(value=[f"{value:,g}" if value < 1000 else f"{value:,.1f}" for value in data["value"]])
    wide = told.pivot(index=keys, columns="drafts", values="value").reset_index()
    return wide.rename(columns=lambda name: f"K = {name}" if isinstance(name, int) else name).rename_axis(
        None, axis=1
    )


def tokens_in_flight(data: pd.DataFrame) -> pd.DataFrame:
    """Throughput times mean latency: what the first validator's two columns say about each other."""
    first = data[data["validator"] == 1].pivot(index="drafts", columns="measure", values="value")
    product = first["throughput"] * first["mean latency"]
    asked = 40 * 2048
    told = [f"{value:,.0f}" for value in product]
    return pd.DataFrame(
        {
            "K": list(first.index),
            "throughput x latency": told,
            "of 40 x 2,048": (product / asked).round(3).tolist(),
        }
    )


def growth_table(told: Mapping[str, Sequence[Mapping[str, Any]]]) -> pd.DataFrame:
    """One line a batch size: layouts that move, merges that walk out of memory, stores outside.

    A key is a description with the card's name in brackets at its end, or the name alone.
    """
    columns: dict[str, list[Any]] = {"requests": [row["batch"] for row in next(iter(told.values()))]}
    for label, rows in told.items():
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
    told = []
    for row in rows:
        situations = row.evidence.detail.get("situations", {})
        if situations and "==" in row.subject:
            grows = {name: _grows(found) for name, found in situations.items()}
            told.append((row.subject.removeprefix("vllm=="), grows))
    columns: dict[str, dict[str, str]] = {}
    for grows, group in groupby(told, key=itemgetter(1)):
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
