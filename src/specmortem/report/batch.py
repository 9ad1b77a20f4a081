"""Run the notebooks of incidents with papermill and leave, for each, a folder that is whole or not there.

`DIR/<slug>/` gets executed.ipynb, results.json and postmortem.html, `DIR/index.html` lists them. A folder is
built beside its place and moved there at the end; a run that did not finish leaves its notebook and a page
that says so, and no results.json.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import nbformat
from nbclient.exceptions import CellTimeoutError, DeadKernelError
from papermill.exceptions import PapermillExecutionError

from specmortem import facts as fact_files
from specmortem.errors import BadInputError, SpecmortemError, UnavailableError
from specmortem.facts import Facts
from specmortem.report import html, workers
from specmortem.report.html import EXECUTED, INDEX, OVERVIEW, PAGE, RESULTS, RunRecord, Status
from specmortem.report.kernel import execute
from specmortem.report.parameters import chosen_parameters, declared_parameters
from specmortem.report.summary import broken_expectations, summarize
from specmortem.verdict import Results, write_atomically

EXIT_CODE: Mapping[Status, int] = {"passed": 0, "failed": 1, "could-not-run": 2}
OVERVIEW_NOTEBOOK = "00-overview.ipynb"
Say = Callable[[str], None]


@dataclass(frozen=True)
class RunResult:
    """How one notebook went."""

    slug: str
    status: Status
    reason: str
    seconds: float
    results: Results | None = None

    @property
    def exit_code(self) -> int:
        """0 passed, 1 an expectation broke, 2 could not run."""
        return EXIT_CODE[self.status]


@dataclass(frozen=True)
class _Job:
    """A notebook to run, with all its parameters but `results_path`; `problem` says why it cannot be.

    The overview has no incident.
    """

    slug: str
    incident: Facts | None
    root: Path
    out: Path
    timeout_s: float | None
    parameters: Mapping[str, Any] = field(default_factory=dict)
    problem: str = ""

    @property
    def notebook(self) -> Path:
        """Of the incident, or of all of them."""
        overview = self.root.parent / "notebooks" / OVERVIEW_NOTEBOOK
        return fact_files.notebook(self.incident, self.root) if self.incident else overview


def run(
    slugs: Sequence[str],
    device: str = "auto",
    quick: bool = False,
    out: Path = Path("out"),
    params: Mapping[str, str] | None = None,
    timeout_s: float | None = None,
    root: Path | None = None,
    say: Say = lambda line: None,
    at_a_time: int | None = None,
) -> list[RunResult]:
    """Run the notebooks of `slugs` side by side, then `overview`, which is one too, and list them in the index.

    `params` are extra notebook parameters as text, `timeout_s` limits each whole notebook, `root` is the
    investigations folder; `say` gets a line when a notebook starts, comes to a section, and ends. `at_a_time` notebooks
    run at a time, by default as many as cores and memory allow on the simulated device, one on a GPU.
    Raises BadInputError, before anything runs, for a slug or a parameter that is not known, and
    UnavailableError when `out` cannot be written or nbconvert is incomplete.
    """
    html.exporter()
    root, out = root or fact_files.find_root(), out.absolute()
    standard = {"device": device, "quick": quick, "results_dir": str(out)}
    incidents = {slug: fact_files.load(slug, root) for slug in slugs if slug != OVERVIEW}
    jobs = [
        _with_parameters(_Job(slug, incidents.get(slug), root, out, timeout_s), params or {}, standard)
        for slug in slugs
    ]
    _claim(out, slugs)
    found: dict[str, RunResult] = {}
    try:
        for group in ([job for job in jobs if job.incident], [job for job in jobs if not job.incident]):
            with closing(_run_all(group, say, at_a_time, device)) as results:
                for result in results:
                    found[result.slug] = result
                    say(f"{result.slug}: {result.status} in {result.seconds:.0f} s {result.reason}".rstrip())
    except KeyboardInterrupt:
        if any(out.glob(f"*/{EXECUTED}")):
            write_index(out, root)
        raise
    write_index(out, root)
    return [found[slug] for slug in slugs]


def _run_all(
    jobs: Sequence[_Job], say: Say, at_a_time: int | None, device: str
) -> Generator[RunResult, None, None]:
    """The results as the notebooks end: of one at a time in this process, else each in a process of its own."""
    count, why = workers.count(len(jobs), at_a_time, device)
    if why:
        say(f"{count} of {len(jobs)} notebooks at a time: {why}")
    if count <= 1:
        for job in jobs:
            yield _run_job(job, say)
        return
    with closing(workers.side_by_side(_run_job, jobs, count, say)) as results:
        for job, ended in results:
            if isinstance(ended, workers.Death):
                for scratch in job.out.glob(f".{job.slug}.*"):
                    shutil.rmtree(scratch, ignore_errors=True)
                ended = RunResult(job.slug, "could-not-run", ended.reason, ended.seconds)
            yield ended


def write_index(out: Path, root: Path) -> Path:
    """List every postmortem that lies in `out`; one whose incident is not to be found has no summary."""
    entries, known = [], fact_files.homes(root)
    for executed in sorted(out.glob(f"*/{EXECUTED}"), key=lambda path: (path.parent.name != OVERVIEW, path)):
        run = RunRecord.of(html.read_notebook(executed), executed)
        results = executed.with_name(RESULTS)
        loaded = Results.load(results) if results.exists() else None
        incident = fact_files.load(run.slug, root) if run.slug in known else None
        entries.append((run, summarize(incident, loaded, run.date) if incident else None))
    return write_atomically(out / INDEX, html.index_page(entries))


def _with_parameters(job: _Job, params: Mapping[str, str], standard: Mapping[str, Any]) -> _Job:
    try:
        declared = declared_parameters(job.notebook)
    except SpecmortemError as error:
        return replace(job, problem=str(error))
    chosen = {name: value for name, value in standard.items() if name in declared}
    chosen |= chosen_parameters(job.slug, params, declared, lenient=job.incident is None)
    return replace(job, parameters=chosen)


def _claim(out: Path, slugs: Sequence[str]) -> None:
    """Refuse early a folder that cannot be written, or one that holds files of someone else."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=out).close()
    except OSError as error:
        raise UnavailableError(
            f"cannot write to {out}: {error.strerror or error}; give another folder with --out"
        ) from error
    for slug in slugs:
        folder = out / slug
        if folder.exists() and (other := {p.name for p in folder.iterdir()} - {EXECUTED, RESULTS, PAGE}):
            raise BadInputError(
                f"{folder} holds {min(other)}, which no run wrote; give another folder with --out"
            )


def _run_job(job: _Job, say: Say) -> RunResult:
    start, folder = time.monotonic(), job.out / job.slug
    say(f"{job.slug}: running {job.notebook.name}")
    try:
        with tempfile.TemporaryDirectory(prefix=f".{job.slug}.", dir=job.out) as scratch:
            stage = Path(scratch) / "new"
            stage.mkdir()
            status, reason, results = _judge(job, stage, *_execute(job, stage, say))
            run = _finish(job, stage, RunRecord(job.slug, status, _now(), reason), results)
            _publish(stage, folder)
        return RunResult(job.slug, run.status, run.reason, time.monotonic() - start, results)
    except OSError as error:
        reason = f"cannot write {folder}: {error.strerror or error}; nothing was written there"
        return RunResult(job.slug, "could-not-run", reason, time.monotonic() - start)


def _execute(job: _Job, stage: Path, say: Say) -> tuple[Status, str]:
    """Run the notebook into `stage`; a disk that refuses raises OSError."""
    if job.problem:
        return "could-not-run", job.problem
    try:
        execute(
            job.notebook,
            stage / EXECUTED,
            parameters={**job.parameters, "results_path": str(stage / RESULTS)},
            cwd=job.root.parent,
            timeout_s=job.timeout_s,
            on_section=lambda title: say(f"{job.slug}: {title}"),
        )
    except PapermillExecutionError as error:
        failed = error.ename == "AssertionError"
        said = f"{error.ename}: {error.evalue}".strip().rstrip(":")
        return ("failed" if failed else "could-not-run"), f"{said} (cell {error.cell_index})"
    except CellTimeoutError:
        return (
            "could-not-run",
            f"not finished after the time limit of {job.timeout_s:g} s; the kernel was killed",
        )
    except DeadKernelError:
        return "could-not-run", "the kernel died"
    except OSError:
        raise
    except Exception as error:
        return "could-not-run", f"{type(error).__name__}: {error}"
    return "passed", ""


def _judge(job: _Job, stage: Path, status: Status, reason: str) -> tuple[Status, str, Results | None]:
    """Hold the results against the expectations; results of a run that did not finish are dropped."""
    path = stage / RESULTS
    if status == "could-not-run" or job.incident is None:
        path.unlink(missing_ok=True)
        return status, reason, None
    try:
        results = _load_results(job.incident, path)
        broken = broken_expectations(job.incident, results)
    except SpecmortemError as error:
        path.unlink(missing_ok=True)
        return ("failed", reason, None) if status == "failed" else ("could-not-run", str(error), None)
    if status == "passed" and broken:
        return "failed", "; ".join(broken), results
    return status, reason, results


def _load_results(incident: Facts, path: Path) -> Results:
    """The results of this run, checked; SpecmortemError when they are missing or of another incident."""
    if not path.exists():
        raise UnavailableError(f"the notebook of {incident.slug} wrote no {RESULTS} to its results_path")
    results = Results.load(path)
    if results.incident != incident.slug:
        raise BadInputError(f"{RESULTS} says incident {results.incident!r}, not {incident.slug!r}")
    summarize(incident, results)
    return results


def _finish(job: _Job, stage: Path, run: RunRecord, results: Results | None) -> RunRecord:
    """Write the executed notebook with its run record, and the page; a run without a page did not finish."""
    executed = stage / EXECUTED
    notebook = html.read_notebook(executed) if executed.exists() else nbformat.v4.new_notebook()
    try:
        page = html.page(notebook, job.incident, results, run)
    except BadInputError as error:
        run = replace(run, status="could-not-run", reason=str(error))
        page = html.page(nbformat.v4.new_notebook(), job.incident, results, run)
    notebook.metadata["specmortem"] = vars(run)
    executed.write_text(_relative(nbformat.writes(notebook) + "\n", stage, job.root.parent), encoding="utf-8")
    (stage / PAGE).write_text(_relative(page, stage, job.root.parent), encoding="utf-8")
    return run


def _relative(text: str, *folders: Path) -> str:
    """`text` with the paths of this machine cut down to what lies below `folders`."""
    for folder in folders:
        text = text.replace(f"{folder}{os.sep}", "") if folder.name else text
    return text


def _publish(stage: Path, target: Path) -> None:
    """Put the staged folder in place of an earlier one, which comes back when the move fails."""
    old = target.rename(stage.with_name("old")) if target.exists() else None
    try:
        stage.rename(target)
    except OSError:
        if old:
            old.rename(target)
        raise


def _now() -> str:
    return datetime.now(UTC).isoformat(sep=" ", timespec="minutes").replace("+00:00", " UTC")
