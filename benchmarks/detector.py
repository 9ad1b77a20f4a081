"""What the bounds detector says about released kernels and what it costs, beside TileLens' sanitizer.

usage: python benchmarks/detector.py [OUT.json] [--repeats 5] [--kernel NAME]... [--cases-only]

Every cell is measured in a process of its own, on the same launch with the same inputs: those of
tests/detect/test_released_kernels.py. Exit code 1 when `bounds.watch()` is wrong about a case or costs more than
twice the plain interpreter; 2 when the released sources cannot be had.
"""

import datetime
import functools
import json
import os
import platform
import re
import resource
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest import mock

import click
import torch
from rich.console import Console
from rich.table import Table

from specmortem import upstream
from specmortem.detect import bounds
from specmortem.errors import SpecmortemError
from specmortem.incidents.dflash_oob import probe as dflash_oob
from specmortem.isolation import Arm, ArmResult, run_arms
from specmortem.upstream import vllm_files
from specmortem.verdict import versions, write_atomically

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests"))
from incidents.pp_align_copy import align  # noqa: E402

RELEASE, BEFORE_ROW_FIX = "vllm==0.33.0", "vllm==0.31.0"
MAMBA = "vllm/v1/worker/mamba_utils.py"
PRECOPY, POSTPROCESS = "precopy_mamba_align_fused_kernel", "postprocess_mamba_fused_kernel"
GATED_DELTA = "fused_sigmoid_gating_delta_rule_update"
CLAMP = "block_num = tl.minimum(block_num, block_table_stride - 1)"
GOOD = [[10, 11, 12, 13], [40, 41, 42, 43]]
DETECTORS = ("bounds", "tilelens")
LIMIT, LIMIT_KERNEL = 2.0, "dflash"
CASE_LIMIT_S, PRICE_LIMIT_S = 60.0, 300.0


# The detectors: one launch, watched or not


class Blind:
    """Takes the declarations of a watch and sees nothing."""

    reports = ()

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *_, **__: None


@contextmanager
def detector(name: str) -> Iterator[Callable[[Sequence[bounds.Report]], list[dict[str, Any]]]]:
    """Put one detector on all kernels lifted inside the block; yields what turns its reports into JSON."""
    sanitizers: list[Any] = []
    with ExitStack() as stack:
        if name != "bounds":
            stack.enter_context(mock.patch.object(bounds, "watch", lambda **_: nullcontext(Blind())))
        if name == "tilelens":
            stack.enter_context(mock.patch.object(upstream, "lift", functools.partial(_traced, sanitizers)))
            yield lambda _: [_from_tilelens(r) for s in sanitizers for r in s.records]
        else:
            yield lambda reports: [_from_bounds(r) for r in reports]


def _from_bounds(r: bounds.Report) -> dict[str, Any]:
    return {"tensor": r.tensor, "line": r.line, "text": str(r)}


def _from_tilelens(record: Any) -> dict[str, Any]:
    """A record of TileLens, its address counted in elements from the start of the tensor that it names."""
    name = (record.tensor_name or "unknown").removesuffix("_ptr")
    index = (record.violation_address - record.tensor.data_ptr()) // record.tensor.element_size()
    frames = record.user_code_tracebacks
    line = frames[-1].lineno if frames else 0
    return {"tensor": name, "line": line, "text": f"{record.op_type.__name__.lower()} of {name}[{index}]"}


def _traced(sanitizers: list[Any], *arguments: Any, lift: Any = upstream.lift, **named: Any) -> Any:
    """`upstream.lift`, with TileLens' sanitizer around the kernel that is lifted or that the launcher launches."""
    import tilelens
    from tilelens.clients import Sanitizer

    def trace(kernel: Any) -> Any:
        sanitizers.append(Sanitizer(abort_on_error=False))
        return tilelens.trace(sanitizers[-1])(kernel)

    lifted = lift(*arguments, **named)
    kernel = f"{lifted.name}_kernel"
    if kernel not in lifted.namespace:
        return replace(lifted, function=trace(lifted.function))
    lifted.namespace[kernel] = trace(lifted.namespace[kernel])
    return lifted


# The cases: what a detector has to say


@dataclass(frozen=True)
class Case:
    """One launch. `expected` is the tensor and the words that a right report names; None where none is right.

    `good` is the case with the same kernel and good inputs: the lines that are reported there too say nothing.
    """

    title: str
    run: Callable[[], Sequence[bounds.Report]]
    expected: tuple[str, str] | None = None
    good: str = "a"


def _dflash(*positions: list[int], rejected: list[int] | None = None, clamped: bool = True) -> Any:
    with tempfile.TemporaryDirectory() as folder:
        tree = upstream.resolve(RELEASE)
        if not clamped:
            tree = _without_clamp(tree, Path(folder))
        kernel = upstream.lift(tree, vllm_files.UTILS, vllm_files.V1).function
        return dflash_oob._v1(kernel)(dflash_oob.batch(list(positions), rejected=rejected), 8).reports


def _without_clamp(tree: upstream.Tree, folder: Path) -> upstream.Tree:
    """The released file with the upper clamp of the block column taken out."""
    text = tree.fetch([vllm_files.UTILS])[vllm_files.UTILS].read_text(encoding="utf-8")
    if CLAMP not in text:
        raise upstream.LiftError(f"{RELEASE}: {vllm_files.UTILS} does not have the line {CLAMP!r}")
    target = folder / vllm_files.UTILS
    target.parent.mkdir(parents=True)
    target.write_text(text.replace(CLAMP, "block_num = block_num"), encoding="utf-8")
    return upstream.resolve(f"tree:{folder}")


def _align(release: str, name: str, idx_mapping: list[int], *inputs: list[int], columns: int = 5) -> Any:
    kernel = upstream.lift(upstream.resolve(release), MAMBA, name).function
    batch = align.AlignBatch(columns=columns)
    launch = align.precopy if name == PRECOPY else align.postprocess
    with bounds.watch(perform_mapped=True) as watch:
        align.watch_align(watch, batch, bounds.mapped(idx_mapping))
        launch(kernel, batch, idx_mapping, *inputs)
    return watch.reports


def _gated_delta(accepted: list[int]) -> Any:
    subject = dflash_oob.DFlashSubject(RELEASE, "cpu", {}, {}, upstream.resolve(RELEASE))
    return dflash_oob._state_lookup(subject)(accepted)


_after_step = [2, 2], [1, 1], [16, 17]
CASES = {
    "a": Case("DFlash, good", lambda: _dflash(*GOOD, rejected=[1, 2])),
    "b": Case(
        "rejected == context on request 0",
        lambda: _dflash(*GOOD, rejected=[4, 0]),
        ("target_positions", "target_positions[-1]"),
    ),
    "c": Case(
        "rejected == context on request 1",
        lambda: _dflash(*GOOD, rejected=[0, 4]),
        ("target_positions", "there lies target_positions[3] of request 0"),
    ),
    "d0": Case(
        "position -100 on request 0",
        lambda: _dflash([-100, -99, -98, -97], GOOD[1]),
        ("block_table", "block_table[-"),
    ),
    "d1": Case(
        "position -9 on request 1",
        lambda: _dflash(GOOD[0], [-9, -8, -7, -6]),
        ("block_table", "of request 0"),
    ),
    "e": Case("position 999, behind the clamp", lambda: _dflash([996, 997, 998, 999], GOOD[1])),
    "e row": Case(
        "no clamp, the next request's row",
        lambda: _dflash([60, 61, 62, 63], GOOD[1], clamped=False),
        ("block_table", "there lies block_table[16] of request 1"),
    ),
    "e end": Case(
        "no clamp, past the table",
        lambda: _dflash([996, 997, 998, 999], clamped=False),
        ("block_table", "block_table[249]"),
    ),
    "f1": Case("align precopy, good", lambda: _align(RELEASE, PRECOPY, [1, 0], [0, 1], [1, 2], [0, 1])),
    "f2": Case("align postprocess, good", lambda: _align(RELEASE, POSTPROCESS, [1, 0], *_after_step)),
    "f3": Case(
        "align postprocess of 0.31.0, good", lambda: _align(BEFORE_ROW_FIX, POSTPROCESS, [0, 1], *_after_step)
    ),
    "f row": Case(
        "align postprocess of 0.31.0, wrong row",
        lambda: _align(BEFORE_ROW_FIX, POSTPROCESS, [1, 0], *_after_step),
        ("block_table", "of request 1"),
        "f3",
    ),
    "g": Case(
        "align precopy, column 8399 of 123",
        lambda: _align(RELEASE, PRECOPY, [1, 0], [8399, 1], [1, 2], [0, 1], columns=123),
        ("block_table", "block_table[8399] is outside block_table[0, 123) of request 0"),
        "f1",
    ),
    "h": Case("gated delta, counts in range", lambda: _gated_delta([1, 2, 4])),
    "h0": Case(
        "gated delta, count 0 on row 0",
        lambda: _gated_delta([0, 1, 1]),
        ("ssm_state_indices", "ssm_state_indices[-1]"),
        "h",
    ),
    "h1": Case(
        "gated delta, count 0 on row 1",
        lambda: _gated_delta([1, 0, 1]),
        ("ssm_state_indices", "there lies ssm_state_indices[3] of request 0"),
        "h",
    ),
    "h2": Case(
        "gated delta, count K + 2 on row 1",
        lambda: _gated_delta([1, 5, 1]),
        ("ssm_state_indices", "there lies ssm_state_indices[8] of request 2"),
        "h",
    ),
}


def judge(name: str, case: str) -> list[dict[str, Any]]:
    """What one detector reports about one case; runs in a process of its own."""
    with detector(name) as reports_of:
        return reports_of(CASES[case].run())


def says(case: Case, reports: list[dict[str, Any]], on_good: list[dict[str, Any]]) -> str:
    """A detector's reports in a word."""
    if not reports:
        return "silent"
    if case.expected is None:
        return "false report"
    if {r["line"] for r in reports} <= {r["line"] for r in on_good}:
        return "as on good input"
    tensor, words = case.expected
    at_tensor = [r["text"] for r in reports if r["tensor"] == tensor]
    if any(words in text for text in at_tensor):
        return "reports"
    return "wrong place or owner" if at_tensor else "wrong tensor"


# The price: the median of warm runs


def _dflash_work(requests: int, num_speculative_tokens: int, context: int) -> Callable[[], Any]:
    dflash_oob.K = num_speculative_tokens
    tree = upstream.resolve(RELEASE)
    run = dflash_oob._v1(upstream.lift(tree, vllm_files.UTILS, vllm_files.V1).function)
    batch = dflash_oob.batch([list(range(8, 8 + context))] * requests, rejected=[1] * requests)
    return lambda: run(batch, requests * batch.num_query_per_req).reports


def _gated_delta_work(requests: int, heads: int, dim: int) -> Callable[[], Any]:
    tree = upstream.resolve(RELEASE)
    launch = upstream.lift(tree, tree.first(list(vllm_files.GATING)), GATED_DELTA).function
    inputs = dflash_oob.gating_inputs(requests, 4, heads, dim)
    accepted = torch.arange(requests, dtype=torch.int32) % 4 + 1
    of = bounds.program(2, divided_by=heads)

    def run() -> Any:
        with bounds.watch() as watch:
            watch.rows(inputs["ssm_state_indices"], of=of, name="ssm_state_indices")
            launch(**inputs, num_accepted_tokens=accepted)
        return watch.reports

    return run


KERNELS = {
    "dflash": ("DFlash inputs, 64 requests, K=15", lambda: _dflash_work(64, 15, 16)),
    "dflash-tiny": ("DFlash inputs, 2 requests, K=3", lambda: _dflash_work(2, 3, 4)),
    "gdn": ("gated delta, 8 requests, HV=4, D=128", lambda: _gated_delta_work(8, 4, 128)),
    "gdn-small": ("gated delta, 3 requests, HV=1, D=8", lambda: _gated_delta_work(3, 1, 8)),
}


def measure(name: str, kernel: str, repeats: int) -> dict[str, float]:
    """Median CPU seconds of a warm run, and the peak RSS; runs in a process of its own."""
    with detector(name) as reports_of:
        run = KERNELS[kernel][1]()
        if reports := reports_of(run()):
            raise RuntimeError(f"a report on good inputs: {reports[0]['text']}")
        seconds = []
        for _ in range(repeats):
            began = time.process_time()
            run()
            seconds.append(time.process_time() - began)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10
    return {"median_s": round(statistics.median(seconds), 5), "peak_rss_mib": peak}


# The run


def _outcomes(target: str, arms: dict[tuple[str, str], dict[str, Any]], **options: Any) -> dict[Any, Any]:
    """Each arm's value, or a line of text about why there is none."""
    here = {key: kwargs for key, kwargs in arms.items() if key[0] != "tilelens" or find_spec("tilelens")}
    ended = run_arms(
        [Arm(f"detector:{target}", kwargs, **options) for kwargs in here.values()],
        parallel=1,
        progress=True,
    )
    return dict.fromkeys(arms, "not installed") | dict(zip(here, map(_value, ended), strict=True))


def _value(ended: ArmResult) -> Any:
    if ended.kind == "value":
        return ended.value
    if ended.kind == "timeout":
        return f"no answer in {ended.arm.timeout_s:g} s"
    message = re.sub(r"\S*/", "", ended.message.strip() or "no message").splitlines()[-1]
    return f"crashes with {ended.kind}: {message}"


def _case_rows() -> list[dict[str, Any]]:
    arms = {(d, c): {"name": d, "case": c} for c in CASES for d in DETECTORS}
    found = _outcomes("judge", arms, timeout_s=CASE_LIMIT_S)
    return [_case_row(key, case, found) for key, case in CASES.items()]


def _case_row(key: str, case: Case, found: dict[Any, Any]) -> dict[str, Any]:
    row: dict[str, Any] = {"case": key, "inputs": case.title}
    row["expected"] = f"{case.expected[0]}: {case.expected[1]}" if case.expected else "silent"
    for name in DETECTORS:
        reports, on_good = found[name, key], found[name, case.good]
        if isinstance(reports, str):
            row[name] = {"says": reports, "right": False, "reports": 0, "first": ""}
            continue
        word = says(case, reports, on_good if isinstance(on_good, list) else [])
        first = reports[0]["text"] if reports else ""
        right = word == ("reports" if case.expected else "silent")
        row[name] = {"says": word, "right": right, "reports": len(reports), "first": first}
    return row


def _price_rows(kernels: Sequence[str], repeats: int) -> list[dict[str, Any]]:
    arms = {
        (d, k): {"name": d, "kernel": k, "repeats": repeats} for k in kernels for d in ("plain", *DETECTORS)
    }
    found = _outcomes("measure", arms, timeout_s=PRICE_LIMIT_S, env={"TRITON_INTERPRET": "1"})
    rows = []
    for kernel in kernels:
        cells = {d: found[d, kernel] for d in ("plain", *DETECTORS)}
        plain = cells["plain"]
        for cell in cells.values():
            if isinstance(cell, dict) and isinstance(plain, dict):
                cell["ratio"] = round(cell["median_s"] / plain["median_s"], 2)
        rows.append({"kernel": kernel, "inputs": KERNELS[kernel][0], **cells})
    return rows


def _acceptance(cases: list[dict[str, Any]], price: list[dict[str, Any]]) -> dict[str, bool]:
    """Each criterion that this run measured, and whether `bounds.watch()` meets it."""
    verdict = {"bounds right on every case": all(row["bounds"]["right"] for row in cases)}
    for row in price:
        if row["kernel"] == LIMIT_KERNEL:
            cell = row["bounds"]
            within = isinstance(cell, dict) and cell.get("ratio", LIMIT + 1) <= LIMIT
            verdict[f"bounds at most {LIMIT}x plain on {row['inputs']}"] = within
    return verdict


def _show(console: Console, result: dict[str, Any]) -> None:
    table = Table("case", "inputs", "expected", *DETECTORS, title="what each detector says")
    for row in result["cases"]:
        cells = [("" if row[d]["right"] else "[red]") + row[d]["says"] for d in DETECTORS]
        table.add_row(row["case"], row["inputs"], row["expected"].replace("[", r"\["), *cells)
    console.print(table)
    if result["price"]:
        table = Table("kernel", "plain", *DETECTORS, title="CPU time of a warm run, ratio to plain, peak RSS")
        for row in result["price"]:
            table.add_row(row["inputs"], *(_price_cell(row[d]) for d in ("plain", *DETECTORS)))
        console.print(table)
    for criterion, met in result["acceptance"].items():
        console.print(f"{'[green]PASS' if met else '[red]FAIL'}[/]  {criterion}")


def _price_cell(cell: dict[str, float] | str) -> str:
    if isinstance(cell, str):
        return cell
    return f"{1000 * cell['median_s']:.1f} ms, {cell.get('ratio', float('nan')):.2f}x, {cell['peak_rss_mib']} MiB"


def _fetch() -> None:
    """Fill the cache once, so that the measured processes only read it."""
    wanted = {RELEASE: [vllm_files.UTILS, MAMBA, *vllm_files.GATING], BEFORE_ROW_FIX: [MAMBA]}
    for release, paths in wanted.items():
        tree = upstream.resolve(release)
        tree.fetch([path for path in paths if tree.has(path)])


@click.command(help=(__doc__ or "").split("\n\n")[0])
@click.argument("out", required=False, type=click.Path(dir_okay=False, path_type=Path))
@click.option("--repeats", default=5, show_default=True, type=click.IntRange(min=1))
@click.option(
    "--kernel", "kernels", multiple=True, type=click.Choice(list(KERNELS)), help="Time only this one."
)
@click.option("--cases-only", is_flag=True, help="Time nothing.")
def main(out: Path | None, repeats: int, kernels: tuple[str, ...], cases_only: bool) -> None:
    """Measure, show and write; a run that leaves something out is written only where OUT says."""
    if not (kernels or cases_only):
        out = out or ROOT / "data" / "detector.json"
    try:
        _fetch()
        cases = _case_rows()
        price = [] if cases_only else _price_rows(kernels or list(KERNELS), repeats)
    except SpecmortemError as error:
        click.echo(f"error: {error}", err=True)
        sys.exit(2)
    result = {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "machine": {"cores": os.cpu_count(), "system": platform.system(), "architecture": platform.machine()},
        "versions": versions(("specmortem", "torch", "triton", "numpy", "tilelens")),
        "released": [RELEASE, BEFORE_ROW_FIX],
        "repeats": repeats,
        "cases": cases,
        "price": price,
        "acceptance": _acceptance(cases, price),
    }
    _show(Console(width=None if sys.stdout.isatty() else 140), result)
    if out is not None:
        write_atomically(out, json.dumps(result, indent=1) + "\n")
    sys.exit(0 if all(result["acceptance"].values()) else 1)


if __name__ == "__main__":
    main()
