"""What engine runs say, as tables for notebooks, terminals and pages."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
from markupsafe import escape

from specmortem.report.terminal import markdown_table
from specmortem.tools.engine import compare
from specmortem.tools.engine.compare import MEASURES, Measure
from specmortem.tools.engine.result import FILE_NAME, ArmRuns, EngineResults

FOLDER = Path("runs") / "engine"
CAMPAIGNS = f"{FOLDER}*/{FILE_NAME}"  # below an incident's folder; others than FOLDER are kept beside it


def committed(path: Path) -> EngineResults | None:
    """The results of a file, of a folder, or of an incident's folder below `investigations`; None where none are.

    Raises BadInputError for a file that is not one.
    """
    places = (path, path / FILE_NAME, path / FOLDER / FILE_NAME)
    found = next((place for place in places if place.is_file()), None)
    return EngineResults.load(found) if found is not None else None


def campaigns(path: Path) -> dict[str, EngineResults]:
    """Results by the name of their folder: those of `committed` first, then earlier ones beside them, by name.

    An incident's folder may hold more than one campaign, as where one showed nothing and why was found out; only
    `runs/engine` is resumed. Raises BadInputError for a file that is not a result.
    """
    found = {} if (first := committed(path)) is None else {FOLDER.name: first}
    for file in sorted(path.glob(CAMPAIGNS)):
        if file.parent.name not in found:
            found[file.parent.name] = EngineResults.load(file)
    return found


def upright(table: pd.DataFrame) -> pd.DataFrame:
    """`arms_table` with a column an arm, which fits a page, and without what no arm was judged by."""
    told = table.loc[:, [set(table[name]) - {"", "not judged"} != set() for name in table]]
    return told.set_index("arm").T.rename_axis("arm").rename_axis(None, axis=1)


def arms_table(results: EngineResults) -> pd.DataFrame:
    """One row an arm: counts with exact intervals, acceptance, times, and how engines ended."""
    return pd.DataFrame([_arm_row(arm) for arm in results.arms])


def _arm_row(arm: ArmRuns) -> dict[str, object]:
    middle, high = compare.step_times(arm)
    return {
        "arm": arm.name,
        "vllm": arm.config["vllm"],
        "what it is": arm.says,
        "runs": f"{len(arm.runs)} of {arm.planned} in {len(arm.starts)} start{'s' * (len(arm.starts) != 1)}",
        **{measure.name: _counted(arm, measure) for measure in MEASURES},
        "accepted drafts": compare.acceptance(arm),
        "step, median ms": f"{middle:.2f}" if middle is not None else "",
        "step, p99 ms": f"{high:.2f}" if high is not None else "",
        "idle GPU work, median us": _idle(arm),
        "ends": compare.kinds(arm),
    }


def _idle(arm: ArmRuns) -> str:
    """In front of a step, and of a draft pass with the count of these in a run."""
    told = []
    if (steps := compare.delays(arm)) is not None:
        told.append(f"{steps[0]:,.0f} to {steps[1]:,.0f}")
    if (drafts := compare.draft_delays(arm)) is not None:
        low, high, fewest, most = drafts
        passes = f"{fewest:,}" if fewest == most else f"{fewest:,} to {most:,}"
        told.append(f"{low:,.0f} to {high:,.0f} in front of each of {passes} draft passes a run")
    return "; ".join(told)


def _counted(arm: ArmRuns, measure: Measure) -> str:
    """Runs with their interval, and requests."""
    found, counted = compare.rate(arm, measure), compare.requests(arm, measure)
    if not found.trials:
        return "not judged"
    return str(found) if counted is None else f"{found}; {counted[0]:,} of {counted[1]:,} requests"


def comparisons_table(results: EngineResults) -> pd.DataFrame:
    """One row a pair and a measure: both rates, p, p over the pairs, and the sentence."""
    columns = ["pair", "variable", "measure", "left", "right", "p", "p (Holm)", "what it amounts to"]
    rows = [
        (
            f"{each.left} / {each.right}",
            each.variable,
            each.measure.said,
            str(each.rates[0]),
            str(each.rates[1]),
            "" if each.p is None else f"{each.p:.2g}",
            "" if each.adjusted is None else f"{each.adjusted:.2g}",
            each.said,
        )
        for each in compare.comparisons(results)
    ]
    return pd.DataFrame(rows, columns=columns)


def pins(results: EngineResults) -> str:
    """Versions of the packages that the engines ran with, as requirements that pip takes."""
    found = {
        (name, version)
        for arm in results.arms
        for start in arm.starts
        for name, version in start.versions.items()
        if name != "python"
    }
    wanted = {("vllm", str(arm.config["vllm"])) for arm in results.arms if not arm.starts}
    return ", ".join(f"{name}=={version}" for name, version in sorted(found | wanted))


def how(results: EngineResults) -> str:
    """How a campaign was run, in lines: device, driver and Python, pins, seed, status, commands."""
    starts = [start for arm in results.arms for start in arm.starts]
    told = {start.device for start in starts}
    drivers = {f"driver {start.host['driver']}" for start in starts if start.host.get("driver")}
    pythons = {f"Python {start.versions['python']}" for start in starts if "python" in start.versions}
    on = ", ".join([*sorted(told - {""}), *sorted(drivers), *sorted(pythons)])
    head = f"{on}; {pins(results)}" if on else pins(results)
    return f"{head}\nseed {results.seed}; status: {results.status}\n{results.command}"


def markdown(results: EngineResults) -> str:
    """Both tables, the commands and the notes."""
    lines = [f"## {results.incident}: on the whole engine", "", results.question, ""]
    lines += [f"Status: {results.status}. Seed {results.seed}. Pins: {pins(results)}.", ""]
    for table in (arms_table(results), comparisons_table(results)):
        lines += [*markdown_table(list(table.columns), table.itertuples(index=False)), ""]
    lines += [compare.CAVEAT, "", *(f"- {note}" for note in results.notes), ""]
    lines += ["```", *results.command.split("\n"), "```", ""]
    return "\n".join(lines)


def html(results: EngineResults) -> str:
    """Both tables, the commands and the notes, as a fragment."""
    with pd.option_context("display.max_colwidth", None):
        tables = [
            table.to_html(index=False, border=0)
            for table in (arms_table(results), comparisons_table(results))
        ]
    notes = "".join(f"<li>{escape(note)}</li>" for note in results.notes)
    told = f"<p>{escape(results.question)} Status: {escape(results.status)}.</p>"
    tail = f"<p>{escape(compare.CAVEAT)}</p><ul>{notes}</ul><pre>{escape(how(results))}</pre>"
    return "\n".join([told, *tables, tail])
