"""The study of incident `async-accepted-counts`: which arms run, in processes of their own, and the rows they give."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import groupby
from typing import Any

import pandas as pd

from specmortem import study
from specmortem.exposure import Config, resolve
from specmortem.incidents.async_accepted_counts import arms
from specmortem.isolation import ArmResult
from specmortem.study import Cell
from specmortem.tools.engine import tasks, workload
from specmortem.tools.engine.result import ArmRuns, EngineResults
from specmortem.verdict import DeviceKind, Evidence, Outcome, Row

SLUG = "async-accepted-counts"
NONE, ALIGN, METADATA = "stale-count-none", "stale-count-align", "graph-metadata-rows"
CAUSE_OF = {"none": NONE, "all": NONE, "align": ALIGN}
CONSUMERS = ("0.21.0", "0.23.0")  # releases whose graphs have the added rows
RELEASES = study.RELEASES
DEFAULTS = Config(model="Qwen/Qwen3.5-27B", speculation="mtp", launched=True, complete=True)
SHAPES = {
    "before": "as released: wait after the row moves, then gather",
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
TRIED = {
    "none": ("before", "no-wait", "hoist-wait", "hoist-and-drop", "private-target", "after-0.24.0", "after"),
    "align": (*SHAPES, "after"),
}
WINDOW: Mapping[DeviceKind, dict[str, Any]] = {
    "sim": {"delays_us": list(range(0, 600, 10)), "trials": 1},
    "cuda": {"delays_us": list(range(0, 3000, 50)), "trials": 40, "forward_us": 2000.0, "between_us": 300.0},
}
TEXTS = tuple(
    (mode, completion, control)
    for mode in ("none", "align")
    for completion, control in (
        *((completion, "async") for completion in ("window", "early", "late")),
        *(("window", control) for control in ("sync", "launch-blocking", "one-request")),
    )
)
FEW_TEXTS = (TEXTS[0], TEXTS[1], TEXTS[3], TEXTS[6])
QUESTIONS = {
    "rows": "Why slice the metadata by requests and not by tokens?",
    "all": "Is the change needed for mode all too, or only without a cache mode?",
    "reuse": "Can the branch that exists be used again, instead of a second one?",
    "correction": "Does it now hang on the correction kernel?",
    "align": "Is align left as it was, and is that right?",
}


def of_arms(rows: Iterable[Row], prefix: str) -> list[Row]:
    """Rows whose arm's name starts so."""
    return [row for row in rows if row.arm.startswith(prefix)]


def from_where(rows: Sequence[Row], kind: DeviceKind) -> str:
    """What a page says above rows of a committed GPU run, or in place of them."""
    if kind == "cuda":
        return "this run is a GPU's: its own rows are above"
    if not rows:
        return "not yet run on a GPU"
    return f"from the committed run on {_detail(rows[0])['device']['name']}"


def _detail(row: Row) -> Mapping[str, Any]:
    return row.evidence.detail


def _mode(row: Row) -> str:
    return row.arm.rsplit("-", 1)[-1]


def _one_run(told: Callable[[Mapping[str, Any]], tuple[bool, str]]) -> study.Read:
    """Rows of experiments that count as one run; `told` says whether what one returned is a fault, and why."""

    def read(end: ArmResult, cell: Cell) -> Row:
        if end.kind != "value":
            return study.effect(end, cell)
        faulty, observed = told(end.value)
        evidence = Evidence(observed=observed, detail=end.value)
        outcome: Outcome = "fault" if faulty else "clean"
        return Row(cell.cause, cell.arm, cell.subject, outcome, 1, int(faulty), cell.seed, evidence)

    return read


def _parts(cell: Cell, part: Callable[[str, Mapping[str, Any]], Row], key: str) -> list[Row]:
    """A row for each name under `key` of what an experiment returned; or how its process ended."""
    (whole,) = study.grid([cell], _one_run(lambda _: (False, "")))
    if whole.outcome != "clean":
        return [whole]
    return [part(name, _detail(whole)) for name in _detail(whole)[key]]


def completion_rows(transitions: int, seed: int) -> list[Row]:
    """Every completion of the copy among the row moves of random transitions, enumerated on the simulated device."""
    asked = {"transitions": transitions, "seed": seed}
    tried = [(mode, arm) for mode, policies in TRIED.items() for arm in policies]
    cells = [_cell("landing", mode, arm, arms.copy_completions, asked, seed) for mode, arm in tried]
    return study.grid(cells, study.counted("interleavings"))


def _cell(
    name: str, mode: str, arm: str, target: Callable[..., Any], asked: Mapping[str, Any], *options: Any
) -> Cell:
    """A policy in a mode; `options` are seed, device and time limit."""
    kwargs = {"arm": arm, "mode": mode, **asked}
    return Cell(CAUSE_OF[mode], f"{name}-{mode}", NAMES.get(arm, arm), target, kwargs, *options)


def completion_table(rows: Iterable[Row], mode: str) -> pd.DataFrame:
    """Wrong of all interleavings by where the copy completed, one line a policy; blank where it never did so."""
    return study.table(
        (row for row in rows if row.arm == f"landing-{mode}"),
        policy=lambda row: row.subject,
        **{shown: lambda row, phase=phase: _wrong_at(row, phase) for phase, shown in PLACES.items()},
        wrong_transitions=lambda row: f"{_detail(row)['wrong_transitions']} of {_detail(row)['transitions']}",
    )


def _wrong_at(row: Row, phase: str) -> str:
    found = _detail(row)["landings"].get(phase)
    return f"{found['wrong']} of {found['total']}" if found and found["total"] else ""


def shape_table(rows: Iterable[Row]) -> pd.DataFrame:
    """`completion_table` of mode align, with what each policy does."""
    table = completion_table(rows, "align")
    table.insert(1, "what it does", table["policy"].map({**SHAPES, "after": "the private target"}))
    return table[table["policy"] != "after"]


def move_rows(transitions: int, seed: int) -> list[Row]:
    """Before, in mode none, by how the host moved rows: holes closed only, rows swapped, both, neither."""
    asked = {"transitions": transitions, "seed": seed}
    cell = Cell(NONE, "moves", "before", arms.by_move, asked, seed)
    return _parts(cell, partial(_move_row, seed), "moves")


def _move_row(seed: int, kind: str, found: Mapping[str, Any]) -> Row:
    wrong, total = found["moves"][kind]["wrong"], found["moves"][kind]["total"]
    outcome: Outcome = "fault" if wrong else "clean" if total else "not-judged"
    reason = "" if total else "no such transition"
    evidence = Evidence(observed=f"{wrong} of {total} interleavings", reason=reason)
    return Row(NONE, f"moves-{kind}", "before", outcome, total, wrong, seed, evidence)


def detector_rows() -> list[Row]:
    """What the staging detector says of each policy; a fault is a race that it reports."""
    tried = [("none", "before"), ("none", "after"), *(("align", arm) for arm in TRIED["align"])]
    return study.grid([_cell("staging-detector", *one, arms.races, {}) for one in tried], _one_run(_detected))


def _detected(found: Mapping[str, Any]) -> tuple[bool, str]:
    races = found["races"]
    return bool(races), races[0]["message"] if races else "no race"


def detector_table(rows: Iterable[Row]) -> pd.DataFrame:
    """The pairs that the detector names, beside what an enumeration of the same transitions finds."""
    return study.table(
        rows,
        mode=_mode,
        policy=lambda row: row.subject,
        pairs_that_the_detector_names=lambda row: _pairs(row) or "none",
        wrong_rows_in_this_run=lambda row: _detail(row)["wrong_in_this_run"],
        wrong_landings=lambda row: f"{_detail(row)['wrong_landings']} of {_detail(row)['landings']}",
    )


def _pairs(row: Row) -> str:
    pairs = [f"{race['device']} × {race['host']}" for race in _detail(row)["races"]]
    return "; ".join(dict.fromkeys(pairs))


def text_rows(
    device: DeviceKind, seed: int, requests: int, tried: Sequence[tuple[str, str, str]]
) -> list[Row]:
    """Requests served to their end, before and after, by (mode, completion, control); the garbled texts are kept."""
    asked = {"requests": requests, "device": device, "seed": seed}
    cells = [_text_cell(subject, *setting, asked) for setting in tried for subject in ("before", "after")]
    return study.grid(cells, _garbled, cuda_parallel=3)


def _text_cell(subject: str, mode: str, completion: str, control: str, asked: Mapping[str, Any]) -> Cell:
    kwargs = {"arm": subject, "mode": mode, "completion": completion, "control": control, **asked}
    arm = f"text-{mode}/{completion if control == 'async' else control}"
    blocking = asked["device"] == "cuda" and control == "launch-blocking"
    env = {"CUDA_LAUNCH_BLOCKING": "1"} if blocking else {}
    target, device = arms.generations, asked["device"]
    return Cell(CAUSE_OF[mode], arm, subject, target, kwargs, asked["seed"], device, env=env)


def _garbled(end: ArmResult, cell: Cell) -> Row:
    if end.kind == "value":
        end.value["texts"] = [one for one in end.value["texts"] if not one["intact"]]
    return study.counted("requests")(end, cell)


def text_table(rows: Iterable[Row]) -> pd.DataFrame:
    """Intact texts by mode and setting, before and after."""

    def intact(row: Row) -> str:
        return f"{row.runs - row.faults} of {row.runs} intact" if row.runs else row.evidence.reason

    table = study.pivot(rows, lambda row: row.arm.removeprefix("text-"), lambda row: row.subject, intact)
    return table.rename_axis("mode / setting")


def story_table(row: Row, most: int = 4) -> pd.DataFrame:
    """Garbled answers beside what the request was to get, and the count that its first drafts started from."""
    starts = {start["request"]: start for start in _detail(row)["wrong_starts"]}
    texts = sorted(_detail(row)["texts"], key=lambda one: (not one["ended_early"], one["request"]))
    return pd.DataFrame(
        {
            "request": one["request"],
            "prompt ends": "… " + " ".join(one["prompt"].split()[-4:]),
            "right": one["expected"],
            "garbled": one["text"],
            "count": f"{starts[one['request']]['got']} instead of {starts[one['request']]['own']}",
        }
        for one in texts[:most]
    )


def window_rows(device: DeviceKind) -> list[Row]:
    """The worked example at each host delay, before and after, one process each."""
    asked = {"device": device, **WINDOW[device]}
    cells = [
        Cell(NONE, "window", subject, arms.window, {**asked, "arm": subject}, device=device)
        for subject in ("before", "after")
    ]
    return study.grid(cells, study.counted("examples"))


def window_title(rows: Iterable[Row]) -> str:
    """At how many host delays a count was wrong, by arm."""
    wrong = {row.subject: _detail(row)["wrong"] for row in rows}
    hit = {arm: f"{sum(map(bool, each))} of {len(each)}" for arm, each in wrong.items()}
    return f"Wrong at {hit['before']} host delays before, at {hit['after']} after"


def random_rows(device: DeviceKind, seed: int, transitions: int) -> list[Row]:
    """A chain of random transitions with random host delays: all of them after in mode none, fewer elsewhere.

    The bound is over steps: the transitions of one step share their timing.
    """
    fewer = max(transitions // 10, min(transitions, 20_000))
    lengths = {("none", "before"): fewer, ("none", "after"): transitions}
    lengths |= {("align", "before"): fewer, ("align", "after"): fewer}
    asked = {"device": device, "seed": seed}
    cells = [
        _cell("random-delays", *one, arms.transitions, {"n": n, **asked}, seed, device, 600)
        for one, n in lengths.items()
    ]
    return study.grid(cells, _bounded)


def _bounded(end: ArmResult, cell: Cell) -> Row:
    if end.kind == "value":
        end.value["upper_bound_95_steps"] = study.upper_bound(end.value["steps"], end.value["faults"])
    return study.counted("judged_rows")(end, cell)


def random_table(rows: Iterable[Row]) -> pd.DataFrame:
    """Transitions, steps with a timing of their own, and wrong rows with their rate."""
    return study.table(
        rows,
        mode=_mode,
        arm=lambda row: row.subject,
        transitions=lambda row: f"{_detail(row)['transitions']:,}",
        steps=lambda row: f"{_detail(row)['steps']:,}",
        wrong_rows_of_judged=lambda row: f"{row.faults:,} of {row.runs:,}",
        rate=lambda row: f"{row.faults / row.runs:.2%}",
    )


def throughput_rows(device: DeviceKind, rounds: int, steps: int) -> list[Row]:
    """Steps a second of before, after and a blocking copy, in turns in one process; a fault is a wrong row."""
    asked = {"device": device, "rounds": rounds, "steps": steps}
    return _parts(
        Cell(NONE, "throughput", "after", arms.throughput, asked, device=device), _rate_row, "steps_a_second"
    )


def _rate_row(subject: str, found: Mapping[str, Any]) -> Row:
    rate, ratio, wrong = (found[key][subject] for key in ("steps_a_second", "ratio", "wrong"))
    detail = {"unit": "steps", "steps_a_second": rate, "ratio_to_before": ratio, "all": found["all"][subject]}
    detail |= {key: found[key] for key in ("device", "rounds", "steps", "forward_us", "host_us")}
    evidence = Evidence(observed=f"{rate:.0f} steps a second, {ratio:.3f} of before", detail=detail)
    outcome: Outcome = "fault" if wrong else "clean"
    runs = max(found["rounds"] * found["steps"], wrong)
    return Row(NONE, "throughput", subject, outcome, runs, wrong, None, evidence)


def throughput_table(rows: Iterable[Row]) -> pd.DataFrame:
    """Medians and their ratios, and the range of the ratio to before over the rounds."""
    rows = list(rows)
    found = {row.subject: _detail(row) for row in rows}
    blocking = found["blocking-copy"]["steps_a_second"]

    def by_round(row: Row) -> str:
        pairs = zip(_detail(row)["all"], found["before"]["all"], strict=True)
        ratios = [rate / other for rate, other in pairs]
        return f"{min(ratios):.3f} to {max(ratios):.3f}" if row.subject != "before" else ""

    return study.table(
        rows,
        path=lambda row: row.subject,
        steps_a_second=lambda row: f"{_detail(row)['steps_a_second']:.1f}",
        ratio_to_before=lambda row: f"{_detail(row)['ratio_to_before']:.3f}",
        by_round=by_round,
        **{"ratio to blocking-copy": lambda row: f"{_detail(row)['steps_a_second'] / blocking:.3f}"},
        rounds=lambda row: len(_detail(row)["all"]),
    )


def metadata_rows(device: DeviceKind, drafts: int = 3) -> list[Row]:
    """What both kernels do with the rows that no request has: 72 requests, and 3 in a graph for 4.

    A fault is a state or an output of a request that those rows changed. The kernels are Triton's on a GPU; on the
    simulated device the plain reference runs the large batch, and the interpreter the small one.
    """
    sizes = [(72, 72, "triton" if device == "cuda" else "plain"), (3, 4, "triton")]
    asked = [
        {"requests": requests, "padded": padded, "drafts": drafts, "device": device, "run": run}
        for requests, padded, run in sizes
    ]
    cells = [
        Cell(METADATA, f"consumers-{one['requests']}", "before", arms.metadata, one, device=device)
        for one in asked
    ]
    return study.grid(cells, _one_run(_inert))


def consumer_rows(releases: Sequence[str]) -> list[Row]:
    """The kernels of releases over the same rows, in the interpreter; the metadata is this package's."""
    cells = [
        Cell(
            METADATA,
            f"consumers-of-{release}",
            "before",
            arms.released_consumers,
            {"subject": f"vllm=={release}"},
        )
        for release in releases
    ]
    return study.grid(cells, _one_run(_inert))


def _inert(found: Mapping[str, Any]) -> tuple[bool, str]:
    same = bool(found["inert"])
    return not same, "states and outputs are the same, bit for bit" if same else "states or outputs differ"


def metadata_table(rows: Iterable[Row]) -> pd.DataFrame:
    """Shapes before and after of each tensor."""
    return pd.DataFrame(
        {
            "requests": f"{_detail(row)['requests']} in a graph for {_detail(row)['padded']}",
            "tensor": tensor,
            "before": str(shape),
            "after": str(_detail(row)["after"]["shapes"][tensor]),
        }
        for row in rows
        for tensor, shape in _detail(row)["before"]["shapes"].items()
    )


def first_draft_table(rows: Iterable[Row]) -> pd.DataFrame:
    """Before: wrong rows where the host's counts are used as they are, and after the correction on the device."""
    starts = {"landing-align": "the host's count (align)", "landing-none": "corrected on the device (none)"}
    return study.table(
        (row for row in rows if row.subject == "before" and row.arm in starts),
        a_row_starts_from=lambda row: starts[row.arm],
        wrong_rows=lambda row: _detail(row)["wrong_rows"],
        at_their_first_drafts=lambda row: _detail(row)["wrong_first_drafts"],
        value_of_a_request_that_left=lambda row: _detail(row)["counts_of_who_left"],
    )


def review_table(rows: Sequence[Row]) -> pd.DataFrame:
    """The questions asked in the review of the fix, and what the report of it takes as risks, answered from rows."""
    found = {(row.cause, row.arm, row.subject): row for row in rows}
    shapes = _detail(found[METADATA, "consumers-72", "before"])
    by_token, by_request = (shapes[arm]["shapes"]["num_accepted"][0] for arm in ("before", "after"))
    kept, align = found[NONE, "landing-none", "after-as-released"], found[ALIGN, "landing-align", "before"]
    steady = found[NONE, "random-delays-none", "after"]
    sizes = f"{by_token} rows by tokens, {by_request} by requests; {by_token - by_request} rows are nobody's"
    reused = f"ones for all rows, with the copy still in flight, are wrong in {_rate(kept)} landings"
    answers = {
        "rows": (f"{shapes['requests']} requests have {sizes}", "consumers-72"),
        "all": (_in_mode_all(rows), f"{NONE}, released"),
        "reuse": (f"yes: {reused}", "landing-none, after-as-released"),
        "correction": (
            f"yes, for rows that had drafts; wrong rows: {_rate(steady)}",
            "random-delays-none, after",
        ),
        "align": (f"left as it was, and wrong: {_rate(align)} landings", "landing-align, before"),
    }
    return pd.DataFrame(
        {"question": question, "answer": answers[key][0], "rows": answers[key][1]}
        for key, question in QUESTIONS.items()
    )


def _rate(row: Row) -> str:
    return f"{row.faults:,} of {row.runs:,}"


def _in_mode_all(rows: Iterable[Row]) -> str:
    """Wrong landings of the released runner in mode all, releases in a row that agree together."""
    judged = [
        (row.subject.removeprefix("vllm=="), _detail(row)["mode_all"])
        for row in rows
        if row.cause == NONE and "mode_all" in _detail(row)
    ]
    spans = []
    for found, alike in groupby(judged, lambda one: _completions_in_all(one[1])):
        releases = [release for release, _ in alike]
        span = releases[0] if len(releases) == 1 else f"{releases[0]} to {releases[-1]}"
        spans.append(f"{found} in {span}")
    wrong = any(bad for _, one in judged for bad, _ in one.get("landings", {}).values())
    return f"{'yes' if wrong else 'no'}: {'; '.join(spans)}" if spans else "not judged in this run"


def _completions_in_all(found: Mapping[str, Any]) -> str:
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
    """Wrong of all landings in the probes' own transitions, by where the copy completed."""

    def wrong_at(row: Row, phase: str) -> str:
        counted = _detail(row)["landings"].get(phase)
        return "" if counted is None else f"{counted[0]} of {counted[1]}"

    return study.table(
        (row for row in rows if "landings" in _detail(row)),
        cause=lambda row: row.cause,
        subject=lambda row: row.subject,
        **{f"lands {phase}": lambda row, phase=phase: wrong_at(row, phase) for phase in arms.PHASES},
    )


def exposure_table(rows: Iterable[Row]) -> pd.DataFrame:
    """A hybrid with MTP at default settings: which mode and runner it gets, and the verdict on that path."""
    outcomes = {(row.cause, row.subject.removeprefix("vllm==")): row.outcome for row in rows}
    lines = []
    for release in RELEASES:
        known = resolve(replace(DEFAULTS, version=release))
        if (outcome := outcomes.get((CAUSE_OF[str(known.cache_mode)], release))) is not None:
            line = {"release": release, "prefix caching": "on" if known.prefix_caching else "off"}
            line |= {"mode": str(known.cache_mode), "runner": str(known.runner).upper()}
            lines.append(line | {"by default": outcome if known.runner == "v1" else "not this runner"})
    return pd.DataFrame(lines)


def wrong_answers_table(results: EngineResults) -> pd.DataFrame:
    """Exploratory: wrong answers of whole engines by the arms that gave them, each with the same tokens.

    `wrong from token` counts from 1.
    """
    columns = ["arm", "run", "id", "got", "wrong from", "wrong", "in a loop"]
    found = pd.DataFrame(
        (one for arm in results.arms for one in _wrong_answers(arm, results.seed)), columns=columns
    )
    answers = found.groupby(["run", "id", "got"], sort=False, as_index=False).agg(
        {"arm": ", ".join} | dict.fromkeys(columns[4:], "first")
    )
    return pd.DataFrame(
        {
            "wrong in": givers,
            "requests": len(given),
            "in runs": given["run"].nunique(),
            "wrong from token": ", ".join(map(str, sorted(given["wrong from"].unique()))),
            "wrong tokens": f"{given['wrong'].sum()} of {given['got'].map(len).sum()}",
            "ended in a loop": int(given["in a loop"].sum()),
        }
        for givers, given in answers.groupby("arm", sort=False)
    )


def _wrong_answers(arm: ArmRuns, seed: int) -> Iterator[tuple[Any, ...]]:
    """Of each wrong answer: arm, run, request, its tokens, the first wrong one, how many, whether it ends in a loop."""
    load, recall = workload.Workload.from_dict(arm.config["workload"]), workload.RecallPrompts(tasks.tasks)
    for run in arm.runs:
        answers = workload.plan(load, recall, seed, run.run)[1]
        for one in run.kept:
            if one.wrong_at is not None:
                wrong = sum(a != b for a, b in zip(one.got, answers[one.id] or (), strict=False))
                yield arm.name, run.run, one.id, one.got, 1 + one.wrong_at, wrong, one.ends_in_loop
