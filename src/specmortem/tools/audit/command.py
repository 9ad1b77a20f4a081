"""The commands `audit` and `campaign`. Heavy imports happen inside them, so that help is instant."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from specmortem.errors import BadInputError, UnavailableError
from specmortem.report.examples import examples

if TYPE_CHECKING:
    from specmortem.tools.audit.campaign import CampaignResult
    from specmortem.tools.audit.matrix import Audit

DEVICES = click.Choice(["auto", "sim", "cuda"])
PAGE = Path("audit.html")


def _executor_options(command: Callable[..., Any]) -> Callable[..., Any]:
    command = click.option("--scheduler", default="", metavar="ADDRESS", help="Of the Dask scheduler.")(
        command
    )
    return click.option(
        "--executor", type=click.Choice(["local", "dask"]), default="local", show_default=True
    )(command)


@click.command(
    epilog=examples(
        "specmortem audit vllm==0.31.0 --config serve.log",
        "specmortem audit installed --python /opt/vllm/bin/python --format html",
    )
)
@click.argument("subjects", metavar="[SUBJECT]...", nargs=-1)
@click.option("--all-releases", is_flag=True, help="Every release from 0.19.0 on that the index offers.")
@click.option("--cause", "causes", multiple=True, metavar="CAUSE", help="Only this cause; may be repeated.")
@click.option("--incident", "slugs", multiple=True, metavar="SLUG", help="Only the causes of this incident.")
@click.option("--python", default="", metavar="PATH", help="Interpreter whose environment `installed` means.")
@click.option(
    "--config",
    "source",
    metavar="FILE|-",
    help="Launch command, log head or key=value words: what it reaches.",
)
@click.option("--device", type=DEVICES, default="sim", show_default=True)
@click.option(
    "--format",
    "form",
    type=click.Choice(["table", "json", "markdown", "html"]),
    default="table",
    show_default=True,
)
@click.option("--out", type=click.Path(path_type=Path), default=Path("out"), show_default=True, metavar="DIR")
@click.option(
    "--csv", "table", type=click.Path(path_type=Path), metavar="FILE", help="Write the rows here, too."
)
@click.option("--no-cache", is_flag=True, help="Judge anew; neither read nor write the cache of verdicts.")
@click.option(
    "--timeout",
    type=click.FloatRange(min=1),
    default=120,
    show_default=True,
    metavar="S",
    help="Per verdict.",
)
@click.option(
    "-v", "--verbose", is_flag=True, help="Also what is out of reach or clean, and hashes of bodies."
)
@_executor_options
@click.pass_context
def audit(
    ctx: click.Context,
    subjects: tuple[str, ...],
    all_releases: bool,
    causes: tuple[str, ...],
    slugs: tuple[str, ...],
    python: str,
    source: str | None,
    device: str,
    form: str,
    out: Path,
    table: Path | None,
    no_cache: bool,
    timeout: float,
    verbose: bool,
    executor: str,
    scheduler: str,
) -> None:
    """Say which defects a vLLM has, which of them a configuration reaches, and what to do.

    A SUBJECT is vllm==X, installed, tree:DIR, wheel:FILE or sdist:FILE; without one it is the vLLM of this
    environment, or of --python. With --format html the page is DIR/audit.html.

    Exit code: 1 a fault (with --config: one that it reaches), else 2 a subject could not be had, else 3 something
    could not be judged or whether it is reached cannot be told, else 0.
    """
    from specmortem.statements import launch
    from specmortem.tools.audit import matrix
    from specmortem.tools.audit.render import lost_subjects
    from specmortem.tools.audit.work import workers

    chosen = _subjects(subjects, all_releases, python)
    stated = launch.load_all(source) if source else []
    with workers(executor, scheduler) as who, _progress() as tick:
        done = matrix.audit(
            chosen,
            matrix.chosen(causes, slugs),
            device=device,
            python=python,
            config=stated[0] if stated else None,
            keep=not no_cache,
            workers=who,
            timeout_s=timeout,
            tick=tick,
        )
    lost = lost_subjects(done)
    if len(lost) == len({row.subject for row in done.rows}):
        raise UnavailableError("; ".join(dict.fromkeys(lost.values())))
    _write(replace(done, launches=len(stated)), form, out, table, verbose)
    ctx.exit(_exit_code(done))


def _subjects(given: Sequence[str], every: bool, python: str) -> list[str]:
    """The subjects of the command line."""
    from specmortem.tools.audit.subjects import all_releases, is_installed

    if every:
        return [*all_releases(), *given]
    if given:
        return list(given)
    if python or is_installed():
        return ["installed"]
    raise BadInputError(
        "this environment has no vllm; name a subject: vllm==X, tree:DIR, wheel:FILE, sdist:FILE, "
        "or installed with --python PATH"
    )


def _write(done: Audit, form: str, out: Path, table: Path | None, verbose: bool) -> None:
    from specmortem.tools.audit import render
    from specmortem.verdict import write_atomically

    if form == "table":
        render.terminal(done, verbose=verbose)
    elif form == "html":
        click.echo(write_atomically(out / PAGE, render.page(done)))
    else:
        click.echo(render.as_json(done) if form == "json" else render.markdown(done), nl=form == "json")
    if table is not None:
        write_atomically(table, render.as_csv(done))


def _exit_code(done: Audit) -> int:
    if any(row.status == "fault" and row.reach in ("yes", "") for row in done.rows):
        return 1
    if any(row.unavailable for row in done.rows):
        return 2
    open_rows = (row.status in ("fault", "not-judged") and row.reach != "no" for row in done.rows)
    return 3 if any(open_rows) else 0


@contextmanager
def _progress() -> Iterator[Callable[[str, int, int], None]]:
    """A bar for each kind of work on stderr, where that is a terminal."""
    from specmortem.report.terminal import progress

    tasks: dict[str, Any] = {}
    with progress() as bars:

        def tick(what: str, done: int, total: int) -> None:
            if what not in tasks:
                tasks[what] = bars.add_task(what, total=total)
            bars.update(tasks[what], completed=done, total=total)

        yield tick


@click.command(
    epilog=examples(
        "specmortem campaign CAUSE --seeds 20",
        "specmortem campaign CAUSE --seeds 100 --subject after --format json",
    )
)
@click.argument("cause")
@click.option("--seeds", type=int, required=True, metavar="N", help="How many seeds to run.")
@click.option("--first", type=int, default=0, show_default=True, help="The first of them.")
@click.option("--subject", type=click.Choice(["before", "after"]), default="before", show_default=True)
@click.option("--device", type=DEVICES, default="sim", show_default=True)
@click.option("--format", "form", type=click.Choice(["text", "json"]), default="text", show_default=True)
@_executor_options
@click.pass_context
def campaign(
    ctx: click.Context,
    cause: str,
    seeds: int,
    first: int,
    subject: str,
    device: str,
    form: str,
    executor: str,
    scheduler: str,
) -> None:
    """Run the random experiment of a cause under N seeds, each in a process of its own.

    Exit code: 1 a run faulted, else 3 a seed gave no figure, else 0.
    """
    from specmortem.judge import device_kind
    from specmortem.judge.work import counter
    from specmortem.tools.audit import campaign as campaigns
    from specmortem.tools.audit.work import workers

    with workers(executor, scheduler) as who, _progress() as tick:
        found = campaigns.run(
            cause,
            seeds,
            subject=subject,
            first=first,
            device=device_kind(device),
            workers=who,
            on_end=counter(tick, "seeds", seeds),
        )
    click.echo(json.dumps(found.as_dict(), indent=1) if form == "json" else _told(found))
    ctx.exit(1 if found.faults else 3 if found.lost else 0)


def _told(found: CampaignResult) -> str:
    counted = f"{found.faults} faults in {found.runs} {found.unit}, {len(found.outcomes)} seeds"
    lines = [f"{found.cause} on {found.subject}: {counted}"]
    if found.upper_bound is not None:
        lines.append(f"95 % upper bound of the rate: {found.upper_bound:g}")
    lines += [f"witness: {o.witness}" for o in found.outcomes if o.witness][:1]
    lines += [f"seed {o.seed} gave no figure: {o.lost}" for o in found.lost]
    return "\n".join(lines)
