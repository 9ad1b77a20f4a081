"""The study of incident `async-accepted-counts`: which arms run, in processes of their own, and the rows they give."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from typing import Any

import pandas as pd

from specmortem import study
from specmortem.isolation import Arm, ArmResult, run_arms
from specmortem.tools.engine import tasks, workload
from specmortem.tools.engine.result import ArmRuns, EngineResults, Request
from specmortem.verdict import DeviceKind, Evidence, Outcome, Row

MODULE = "specmortem.incidents.async_accepted_counts.arms"
SLUG = "async-accepted-counts"
NONE, ALIGN, METADATA = "stale-count-none", "stale-count-align", "graph-metadata-rows"
CAUSE_OF = {"none": NONE, "all": NONE, "align": ALIGN}
CONSUMERS = ("0.21.0", "0.23.0")  # releases whose graphs have the added rows
RELEASES = study.RELEASES
SHAPES = {
    "before": "as released: wait behind the row moves, then gather",
    "blocking-copy-gathered": "as released up to 0.21.0: blocking copy, then gather",
    "hoist-wait": "wait ahead of the row moves, gather kept",
    "drop-gather": "wait where it was, gather dropped",
    "hoist-and-drop": "wait ahead of the row moves, no gather",
    "private-target": "copy into a buffer of the runner's own, gather from it",
}
PLACES = {
    "before": "lands before",
    "inside": "lands inside",
    "after": "lands after",
    "not-in-flight": "not in flight",
}
NAMES = {"after-0.24.0": "after-as-released"}  # of policies, where a subject's name allows no dot
LANDED = {
    "none": ("before", "no-wait", "hoist-wait", "hoist-and-drop", "private-target", "after-0.24.0", "after"),
    "align": (*SHAPES, "after"),
}
WINDOW: Mapping[DeviceKind, dict[str, Any]] = {
    "sim": {"delays_us": list(range(0, 600, 10)), "trials": 1},
    "cuda": {
        "delays_us": list(range(0, 3000, 50)),
        "trials": 40,
        "forward_us": 2000.0,
        "between_us": 300.0,
    },
}
TEXTS = (
    ("none", "window", "async"),
    ("none", "early", "async"),
    ("none", "late", "async"),
    ("none", "window", "sync"),
    ("none", "window", "launch-blocking"),
    ("none", "window", "one-request"),
    ("align", "window", "async"),
    ("align", "early", "async"),
    ("align", "late", "async"),
    ("align", "window", "sync"),
    ("align", "window", "launch-blocking"),
    ("align", "window", "one-request"),
)
FEW_TEXTS = (TEXTS[0], TEXTS[1], TEXTS[3], TEXTS[6])
QUESTIONS = {
    "rows": "Why slice the metadata by requests and not by tokens?",
    "all": "Is the change needed for mode all too, or only without a cache mode?",
    "reuse": "Can the branch that exists be used again, instead of a second one?",
    "correction": "Does it now hang on the correction kernel?",
    "align": "Is align left as it was, and is that right?",
}


def _arm(
    function: str, name: str, kwargs: Mapping[str, Any], runs_on: DeviceKind = "sim", **more: Any
) -> Arm:
    return Arm(f"{MODULE}:{function}", dict(kwargs), name, more.pop("timeout_s", 300), runs_on, **more)


def _counted(
    end: ArmResult, cause: str, arm: str, subject: str, seed: int | None, runs: str, faults: str = "faults"
) -> Row:
    """A row from an arm's own counts of runs and faults; its account becomes the detail."""
    if end.kind != "value":
        return study.row(end, cause, arm, subject, seed)
    found, wrong = int(end.value[runs]), int(end.value[faults])
    evidence = Evidence(observed=f"{wrong:,} of {found:,} {runs}", detail={**end.value, "unit": runs})
    return Row(cause, arm, subject, "fault" if wrong else "clean", found, wrong, seed, evidence)


def of_arms(rows: Iterable[Row], prefix: str) -> list[Row]:
    """Rows whose arm's name starts so."""
    return [row for row in rows if row.arm.startswith(prefix)]


def from_where(rows: Sequence[Row], kind: DeviceKind) -> str:
    """What a page says above rows of a committed GPU run, or in place of them."""
    if kind == "cuda":
        return "this run is a GPU's: its own rows are above"
    if not rows:
        return "not yet run on a GPU"
    return f"from the committed run on {rows[0].evidence.detail['device']['name']}"


def landing_rows(transitions: int, seed: int) -> list[Row]:
    """Every landing of the copy among the row moves of random transitions, enumerated on the simulated device."""
    cells = [(mode, arm) for mode, tried in LANDED.items() for arm in tried]
    asked = [
        _arm(
            "landing", f"{arm}, {mode}", {"arm": arm, "mode": mode, "transitions": transitions, "seed": seed}
        )
        for mode, arm in cells
    ]
    return [
        _counted(end, CAUSE_OF[mode], f"landing-{mode}", NAMES.get(arm, arm), seed, "interleavings")
        for end, (mode, arm) in zip(run_arms(asked), cells, strict=True)
    ]


def landing_table(rows: Iterable[Row], mode: str) -> pd.DataFrame:
    """Wrong of all interleavings by where the copy landed, one line a policy; blank where it never landed so."""
    tried = {row.subject: row.evidence.detail for row in rows if row.arm == f"landing-{mode}"}
    return pd.DataFrame(
        {
            "policy": subject,
            **{told: _counted_at(detail["landings"].get(place)) for place, told in PLACES.items()},
            "wrong transitions": f"{detail['wrong_transitions']} of {detail['transitions']}",
        }
        for subject, detail in tried.items()
    )


def _counted_at(found: Mapping[str, int] | None) -> str:
    return f"{found['wrong']} of {found['total']}" if found and found["total"] else ""


def shape_table(rows: Iterable[Row]) -> pd.DataFrame:
    """`landing_table` of mode align, with what each policy does."""
    table = landing_table(rows, "align")
    table.insert(1, "what it does", table["policy"].map({**SHAPES, "after": "the private target"}))
    return table[table["policy"] != "after"]


def move_rows(transitions: int, seed: int) -> list[Row]:
    """Before, in mode none, by how the host moved rows: holes closed only, rows swapped, both, neither."""
    end = run_arms([_arm("by_move", "moves", {"transitions": transitions, "seed": seed})])[0]
    if end.kind != "value":
        return [study.row(end, NONE, "moves", "before", seed)]
    rows = []
    for kind, found in end.value["moves"].items():
        told = f"{found['wrong']} of {found['total']} interleavings"
        outcome: Outcome = "fault" if found["wrong"] else "clean" if found["total"] else "not-judged"
        evidence = Evidence(observed=told, reason="" if found["total"] else "no such transition")
        rows.append(
            Row(NONE, f"moves-{kind}", "before", outcome, found["total"], found["wrong"], seed, evidence)
        )
    return rows


def detector_rows() -> list[Row]:
    """What the staging detector says of each policy; a fault is a race that it reports."""
    cells = [("none", "before"), ("none", "after")]
    cells += [("align", arm) for arm in (*SHAPES, "after")]
    asked = [_arm("races", f"races, {arm}, {mode}", {"arm": arm, "mode": mode}) for mode, arm in cells]
    rows = []
    for end, (mode, arm) in zip(run_arms(asked), cells, strict=True):
        cause, name = CAUSE_OF[mode], f"staging-detector-{mode}"
        if end.kind != "value":
            rows.append(study.row(end, cause, name, arm, None))
            continue
        found = end.value["races"]
        evidence = Evidence(observed=found[0]["told"] if found else "no race", detail=end.value)
        rows.append(Row(cause, name, arm, "fault" if found else "clean", 1, int(bool(found)), None, evidence))
    return rows


def detector_table(rows: Iterable[Row]) -> pd.DataFrame:
    """The pairs that the detector names, beside what an enumeration of the same transitions finds."""
    return pd.DataFrame(
        {
            "mode": row.arm.rsplit("-", 1)[-1],
            "policy": row.subject,
            "pairs that the detector names": _pairs(row) or "none",
            "wrong rows in this run": row.evidence.detail["wrong_in_this_run"],
            "wrong landings": f"{row.evidence.detail['wrong_landings']} of {row.evidence.detail['landings']}",
        }
        for row in rows
    )


def _pairs(row: Row) -> str:
    pairs = [f"{race['device']} × {race['host']}" for race in row.evidence.detail["races"]]
    return "; ".join(dict.fromkeys(pairs))


def text_rows(
    device: DeviceKind, seed: int, requests: int, cells: Sequence[tuple[str, str, str]]
) -> list[Row]:
    """Requests served to their end, before and after, under each (mode, landing, control); kept are garbled texts."""
    tried = [(subject, *cell) for cell in cells for subject in ("before", "after")]
    asked = [_text_arm(device, seed, requests, *one) for one in tried]
    rows = []
    for end, (subject, mode, landing, control) in zip(run_arms(asked, cuda_parallel=3), tried, strict=True):
        if end.kind == "value":
            end.value["texts"] = [one for one in end.value["texts"] if not one["intact"]]
        arm = f"text-{mode}/{_setting(landing, control)}"
        rows.append(_counted(end, CAUSE_OF[mode], arm, subject, seed, "requests"))
    return rows


def _setting(landing: str, control: str) -> str:
    return landing if control == "async" else control


def _text_arm(
    device: DeviceKind, seed: int, requests: int, subject: str, mode: str, landing: str, control: str
) -> Arm:
    kwargs = {
        "arm": subject,
        "mode": mode,
        "landing": landing,
        "control": control,
        "requests": requests,
        "device": device,
        "seed": seed,
    }
    blocking = device == "cuda" and control == "launch-blocking"
    env = {"CUDA_LAUNCH_BLOCKING": "1"} if blocking else {}
    return _arm("generations", f"{subject}, {mode}, {landing}, {control}", kwargs, device, env=env)


def text_table(rows: Iterable[Row]) -> pd.DataFrame:
    """Intact texts by mode and setting, before and after."""
    cells: dict[str, dict[str, str]] = {}
    for row in rows:
        told = f"{row.runs - row.faults} of {row.runs} intact" if row.runs else row.evidence.reason
        cells.setdefault(row.arm.removeprefix("text-"), {})[row.subject] = told
    return pd.DataFrame.from_dict(cells, orient="index").rename_axis("mode / setting")


def story_table(row: Row, most: int = 4) -> pd.DataFrame:
    """Garbled answers beside what the request was to get, and the count that its first drafts started from."""
    starts = {start["request"]: start for start in row.evidence.detail["wrong_starts"]}
    shown = sorted(row.evidence.detail["texts"], key=lambda one: (not one["ended_early"], one["request"]))[
        :most
    ]
    return pd.DataFrame(
        {
            "request": one["request"],
            "prompt ends": "… " + " ".join(one["prompt"].split()[-4:]),
            "right": one["expected"],
            "garbled": one["text"],
            "count": f"{starts[one['request']]['got']} instead of {starts[one['request']]['own']}",
        }
        for one in shown
    )


def window_rows(device: DeviceKind) -> list[Row]:
    """The worked example at each host delay, before and after, one process each."""
    kwargs = {"device": device, **WINDOW[device]}
    asked = [_arm("window", f"window, {s}", {**kwargs, "arm": s}, device) for s in ("before", "after")]
    rows = []
    for end, subject in zip(run_arms(asked), ("before", "after"), strict=True):
        if end.kind == "value":
            end.value["examples"] = len(end.value["delays_us"]) * end.value["trials"]
            end.value["faults"] = sum(end.value["wrong"])
        rows.append(_counted(end, NONE, "window", subject, None, "examples"))
    return rows


def window_title(rows: Iterable[Row]) -> str:
    """At how many host delays a count was wrong, by arm."""
    wrong = {row.subject: row.evidence.detail["wrong"] for row in rows}
    hit = {arm: f"{sum(map(bool, each))} of {len(each)}" for arm, each in wrong.items()}
    return f"Wrong at {hit['before']} host delays before, at {hit['after']} after"


def random_rows(device: DeviceKind, seed: int, transitions: int) -> list[Row]:
    """A chain of random transitions with random host delays: all of them after in mode none, fewer elsewhere.

    The bound is over steps: the transitions of one step share their timing.
    """
    fewer = max(transitions // 10, min(transitions, 20_000))
    cells = [
        ("none", "before", fewer),
        ("none", "after", transitions),
        ("align", "before", fewer),
        ("align", "after", fewer),
    ]
    asked = [
        _arm(
            "transitions",
            f"random delays, {arm}, {mode}",
            {"arm": arm, "mode": mode, "n": n, "device": device, "seed": seed},
            device,
            timeout_s=600,
        )
        for mode, arm, n in cells
    ]
    rows = []
    for end, (mode, arm, _) in zip(run_arms(asked), cells, strict=True):
        if end.kind == "value":
            end.value["upper_bound_95_steps"] = study.upper_bound(end.value["steps"], end.value["faults"])
        rows.append(_counted(end, CAUSE_OF[mode], f"random-delays-{mode}", arm, seed, "judged_rows"))
    return rows


def random_table(rows: Iterable[Row]) -> pd.DataFrame:
    """Transitions, steps with a timing of their own, and wrong rows with their rate."""
    return pd.DataFrame(
        {
            "mode": row.arm.rsplit("-", 1)[-1],
            "arm": row.subject,
            "transitions": f"{row.evidence.detail['transitions']:,}",
            "steps": f"{row.evidence.detail['steps']:,}",
            "wrong rows of judged": f"{row.faults:,} of {row.runs:,}",
            "rate": f"{row.faults / row.runs:.2%}",
        }
        for row in rows
    )


def throughput_rows(device: DeviceKind, rounds: int, steps: int) -> list[Row]:
    """Steps a second of before, after and a blocking copy, in turns in one process; a fault is a wrong row."""
    kwargs = {"device": device, "rounds": rounds, "steps": steps}
    end = run_arms([_arm("throughput", "throughput", kwargs, device)])[0]
    if end.kind != "value":
        return [study.row(end, NONE, "throughput", "after", None)]
    found = end.value
    rows = []
    for subject, rate in found["steps_a_second"].items():
        ratio, wrong = found["ratio"][subject], found["wrong"][subject]
        detail = {
            "unit": "steps",
            "steps_a_second": rate,
            "ratio_to_before": ratio,
            "all": found["all"][subject],
        }
        detail |= {key: found[key] for key in ("device", "rounds", "steps", "forward_us", "host_us")}
        evidence = Evidence(observed=f"{rate:.0f} steps a second, {ratio:.3f} of before", detail=detail)
        outcome: Outcome = "fault" if wrong else "clean"
        runs = max(rounds * steps, wrong)
        rows.append(Row(NONE, "throughput", subject, outcome, runs, wrong, None, evidence))
    return rows


def throughput_table(rows: Iterable[Row]) -> pd.DataFrame:
    """Medians and their ratios, and the range of the ratio to before over the rounds."""
    found = {row.subject: row.evidence.detail for row in rows}
    first, blocking = found["before"]["all"], found["blocking-copy"]["steps_a_second"]
    lines = []
    for path, detail in found.items():
        by_round = [rate / other for rate, other in zip(detail["all"], first, strict=True)]
        lines.append(
            {
                "path": path,
                "steps a second": f"{detail['steps_a_second']:.1f}",
                "ratio to before": f"{detail['ratio_to_before']:.3f}",
                "by round": f"{min(by_round):.3f} to {max(by_round):.3f}" if path != "before" else "",
                "ratio to blocking-copy": f"{detail['steps_a_second'] / blocking:.3f}",
                "rounds": len(by_round),
            }
        )
    return pd.DataFrame(lines)


def metadata_rows(device: DeviceKind, drafts: int = 3) -> list[Row]:
    """What both kernels do with the rows that no request has: 72 requests, and 3 in a graph for 4.

    A fault is a state or an output of a request that those rows changed. The kernels are Triton's on a GPU; on the
    simulated device the plain reference runs the large batch, and the interpreter the small one.
    """
    sizes = [(72, 72, "triton" if device == "cuda" else "plain"), (3, 4, "triton")]
    asked = [
        _arm(
            "metadata",
            f"metadata, {n} requests",
            {"requests": n, "padded": padded, "drafts": drafts, "device": device, "run": run},
            device,
        )
        for n, padded, run in sizes
    ]
    return [_inert(end, f"consumers-{n}") for end, (n, _, _) in zip(run_arms(asked), sizes, strict=True)]


def consumer_rows(releases: Sequence[str]) -> list[Row]:
    """The kernels of releases over the same rows, in the interpreter; the metadata is this package's."""
    asked = [
        _arm("released_consumers", f"consumers of {release}", {"subject": f"vllm=={release}"})
        for release in releases
    ]
    return [
        _inert(end, f"consumers-of-{release}") for end, release in zip(run_arms(asked), releases, strict=True)
    ]


def _inert(end: ArmResult, arm: str) -> Row:
    if end.kind != "value":
        return study.row(end, METADATA, arm, "before", None)
    same = bool(end.value["inert"])
    told = "states and outputs are the same, bit for bit" if same else "states or outputs differ"
    outcome: Outcome = "clean" if same else "fault"
    evidence = Evidence(observed=told, detail=end.value)
    return Row(METADATA, arm, "before", outcome, 1, int(not same), None, evidence)


def metadata_table(rows: Iterable[Row]) -> pd.DataFrame:
    """Shapes before and after of each tensor."""
    return pd.DataFrame(
        {
            "requests": f"{row.evidence.detail['requests']} in a graph for {row.evidence.detail['padded']}",
            "tensor": tensor,
            "before": str(shape),
            "after": str(row.evidence.detail["after"]["shapes"][tensor]),
        }
        for row in rows
        for tensor, shape in row.evidence.detail["before"]["shapes"].items()
    )


def first_draft_table(rows: Iterable[Row]) -> pd.DataFrame:
    """Before: wrong rows where the host's counts are used as they are, and behind the correction on the device."""
    behind = {"landing-align": "the host's count (align)", "landing-none": "corrected on the device (none)"}
    return pd.DataFrame(
        {
            "a row starts from": behind[row.arm],
            "wrong rows": row.evidence.detail["wrong_rows"],
            "at their first drafts": row.evidence.detail["wrong_first_drafts"],
            "value of a request that left": row.evidence.detail["counts_of_who_left"],
        }
        for row in rows
        if row.subject == "before" and row.arm in behind
    )


def review_table(rows: Sequence[Row]) -> pd.DataFrame:
    """The questions asked in the review of the fix, and what the report of it takes as risks, answered from rows."""
    found = {(row.cause, row.arm, row.subject): row for row in rows}

    def told(cause: str, arm: str, subject: str) -> str:
        row = found[cause, arm, subject]
        return f"{row.faults:,} of {row.runs:,}"

    shapes = found[METADATA, "consumers-72", "before"].evidence.detail
    sizes = [shapes[arm]["shapes"]["num_accepted"][0] for arm in ("before", "after")]
    kept, align = told(NONE, "landing-none", "after-as-released"), told(ALIGN, "landing-align", "before")
    steady = found[NONE, "random-delays-none", "after"]
    answers = {
        "rows": f"{shapes['requests']} requests have {sizes[0]} rows by tokens, {sizes[1]} by requests; "
        f"{sizes[0] - sizes[1]} rows are nobody's",
        "all": _in_mode_all(rows),
        "reuse": f"yes: ones for all rows, with the copy still in flight, are wrong in {kept} landings",
        "correction": f"yes, for rows that had drafts; wrong rows: {steady.faults:,} of {steady.runs:,}",
        "align": f"left as it was, and wrong: {align} landings",
    }
    shown_by = {
        "rows": "consumers-72",
        "all": f"{NONE}, released",
        "reuse": "landing-none, after-as-released",
        "correction": "random-delays-none, after",
        "align": "landing-align, before",
    }
    return pd.DataFrame(
        {"question": QUESTIONS[key], "answer": answers[key], "rows": shown_by[key]} for key in QUESTIONS
    )


def _in_mode_all(rows: Iterable[Row]) -> str:
    """Wrong landings of the released runner in mode all, releases in a row that agree together."""
    judged = [
        (row.subject.removeprefix("vllm=="), row.evidence.detail["mode_all"])
        for row in rows
        if row.cause == NONE and "mode_all" in row.evidence.detail
    ]
    told = []
    for found, alike in groupby(judged, lambda one: _landings_in_all(one[1])):
        releases = [release for release, _ in alike]
        span = releases[0] if len(releases) == 1 else f"{releases[0]} to {releases[-1]}"
        told.append(f"{found} in {span}")
    wrong = any(bad for _, one in judged for bad, _ in one.get("landings", {}).values())
    return f"{'yes' if wrong else 'no'}: {'; '.join(told)}" if told else "not judged in this run"


def _landings_in_all(found: Mapping[str, Any]) -> str:
    if "landings" not in found:
        return "no such mode"
    wrong, total = (sum(pair) for pair in zip(*found["landings"].values(), strict=True))
    return f"{wrong} of {total} landings wrong"


def fault_table(rows: Iterable[Row]) -> pd.DataFrame:
    """What released code did wrong, releases with the same account on one line."""
    found: dict[tuple[str, str, str], list[str]] = {}
    for row in rows:
        if row.outcome == "fault":
            key = (row.cause, row.evidence.observed, row.evidence.witness)
            found.setdefault(key, []).append(row.subject.removeprefix("vllm=="))
    return pd.DataFrame(
        {"cause": cause, "observed": observed, "first witness": witness, "releases": ", ".join(releases)}
        for (cause, observed, witness), releases in found.items()
    )


def agreement_table(rows: Iterable[Row]) -> pd.DataFrame:
    """Wrong of all landings in the probes' own transitions, by where the copy landed."""
    return pd.DataFrame(
        {
            "cause": row.cause,
            "subject": row.subject,
            **{
                f"lands {w}": _of(row.evidence.detail["landings"].get(w))
                for w in ("before", "inside", "after")
            },
        }
        for row in rows
        if "landings" in row.evidence.detail
    )


def _of(counted: Sequence[int] | None) -> str:
    return "" if counted is None else f"{counted[0]} of {counted[1]}"


def exposure_table(rows: Iterable[Row], defaults: Mapping[str, Any]) -> pd.DataFrame:
    """A hybrid with MTP at default settings: which mode and runner it gets, and the verdict on that path."""
    outcomes = {(row.cause, row.subject.removeprefix("vllm==")): row.outcome for row in rows}
    lines = []
    for one in defaults["rows"]:
        mode = "align" if one["prefix_caching_of_hybrids"] else "none"
        outcome = outcomes.get((CAUSE_OF[mode], one["release"]))
        if outcome is None:
            continue
        lines.append(
            {
                "release": one["release"],
                "prefix caching": "on" if mode == "align" else "off",
                "mode": mode,
                "runner": one["runner"],
                "by default": outcome if one["runner"] == "V1" else "not this runner",
                "read in": ", ".join(one["sources"]),
            }
        )
    return pd.DataFrame(lines)


def wrong_answers_table(results: EngineResults) -> pd.DataFrame:
    """Exploratory: wrong answers of whole engines by the arms that gave them, each with the same tokens.

    `wrong from token` counts from 1.
    """
    givers: dict[tuple[int, str, tuple[int, ...]], list[str]] = {}
    asked: dict[tuple[int, str, tuple[int, ...]], tuple[Request, int]] = {}
    for arm in results.arms:
        for number, request, wrong in _wrong_answers(arm, results.seed):
            key = (number, request.id, request.got)
            givers.setdefault(key, []).append(arm.name)
            asked[key] = request, wrong
    return pd.DataFrame(
        _given_by(arms, {key: asked[key] for key, by in givers.items() if by == list(arms)})
        for arms in dict.fromkeys(map(tuple, givers.values()))
    )


def _wrong_answers(arm: ArmRuns, seed: int) -> Iterable[tuple[int, Request, int]]:
    """Run, request and how many of its tokens are wrong, for each wrong answer of an arm."""
    load, recall = workload.Workload.from_dict(arm.config["workload"]), workload.Recall(tasks.tasks)
    for run in arm.runs:
        answers = workload.plan(load, recall, seed, run.run)[1]
        for request in run.kept:
            right = answers[request.id] or ()
            if request.wrong_at is not None:
                yield run.run, request, sum(a != b for a, b in zip(request.got, right, strict=False))


def _given_by(
    arms: Sequence[str], found: Mapping[tuple[int, str, tuple[int, ...]], tuple[Request, int]]
) -> dict[str, Any]:
    requests = [request for request, _ in found.values()]
    starts = sorted({1 + request.wrong_at for request in requests if request.wrong_at is not None})
    tokens = sum(len(request.got) for request in requests)
    return {
        "wrong in": ", ".join(arms),
        "requests": len(requests),
        "in runs": len({number for number, _, _ in found}),
        "wrong from token": ", ".join(map(str, starts)),
        "wrong tokens": f"{sum(wrong for _, wrong in found.values())} of {tokens}",
        "ended in a loop": sum(request.ends_in_loop for request in requests),
    }
