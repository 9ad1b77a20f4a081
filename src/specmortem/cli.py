"""The command line. Heavy imports happen inside the commands, so that help is instant."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from specmortem import __version__
from specmortem.errors import BadInputError, SpecmortemError, UnavailableError
from specmortem.report.examples import examples
from specmortem.report.terminal import finding_line, write_lines, write_table
from specmortem.tools.audit.command import audit, campaign
from specmortem.tools.check.command import check
from specmortem.tools.engine.command import engine
from specmortem.tools.load.command import load
from specmortem.tools.new.command import new

if TYPE_CHECKING:
    from specmortem.report.batch import RunResult
    from specmortem.verdict import Verdict

DEVICES = click.Choice(["auto", "sim", "cuda"])
INTERRUPTED = 130


class _Commands(click.Group):
    """Every error becomes one line and exit code 2, Ctrl-C one line and 130."""

    def main(
        self,
        args: Sequence[str] | None = None,
        prog_name: str | None = None,
        complete_var: str | None = None,
        standalone_mode: bool = True,
        **extra: Any,
    ) -> Any:
        """As click does, with its errors of usage in the one style."""
        if not standalone_mode:
            return super().main(args, prog_name, complete_var, False, **extra)
        try:
            sys.exit(super().main(args, prog_name, complete_var, False, **extra) or 0)
        except click.exceptions.Abort:
            click.echo("specmortem: interrupted", err=True)
            sys.exit(INTERRUPTED)
        except click.ClickException as error:
            path = getattr(getattr(error, "ctx", None), "command_path", "specmortem")
            told = " ".join(error.format_message().split()).rstrip(".")
            click.echo(f"specmortem: error: {told}; see {path} --help", err=True)
            sys.exit(2)

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except SpecmortemError as error:
            click.echo(f"specmortem: error: {error}", err=True)
            ctx.exit(2)
        except KeyboardInterrupt:
            click.echo("specmortem: interrupted", err=True)
            ctx.exit(INTERRUPTED)


@click.group(
    cls=_Commands,
    no_args_is_help=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog=examples("specmortem check serve.log", "specmortem COMMAND --help"),
)
@click.version_option(__version__, prog_name="specmortem")
@click.option(
    "--incidents",
    "folders",
    multiple=True,
    type=click.Path(path_type=Path),
    metavar="DIR",
    help="A directory with incidents of your own, a folder each; also $SPECMORTEM_INCIDENTS.",
)
def main(folders: tuple[Path, ...]) -> None:
    """Executable postmortems of speculative-decoding incidents in vLLM."""
    given = [*(str(folder.absolute()) for folder in folders), os.environ.get("SPECMORTEM_INCIDENTS", "")]
    if folders:  # for the processes that are started, too
        os.environ["SPECMORTEM_INCIDENTS"] = os.pathsep.join(filter(None, given))


@main.command(
    epilog=examples("specmortem run async-accepted-counts --quick", "specmortem run --all --jobs 2 --out out")
)
@click.argument("slugs", metavar="[SLUG]...", nargs=-1)
@click.option("--all", "every", is_flag=True, help="Every incident, then the overview.")
@click.option("--device", type=DEVICES, default="auto", show_default=True)
@click.option("--quick", is_flag=True, help="Fewer runs; for a first look.")
@click.option("--out", type=click.Path(path_type=Path), default=Path("out"), show_default=True, metavar="DIR")
@click.option(
    "-p", "pairs", multiple=True, metavar="NAME=VALUE", help="A parameter of the notebook (JSON or text)."
)
@click.option(
    "--timeout", type=click.FloatRange(min=0, min_open=True), metavar="S", help="Limit for each notebook."
)
@click.option(
    "--jobs",
    type=click.IntRange(min=1),
    metavar="N",
    help="Notebooks at a time; by default as many as cores and memory allow, one on a GPU.",
)
@click.pass_context
def run(
    ctx: click.Context,
    slugs: tuple[str, ...],
    every: bool,
    device: str,
    quick: bool,
    out: Path,
    pairs: tuple[str, ...],
    timeout: float | None,
    jobs: int | None,
) -> None:
    """Run postmortems and write DIR/SLUG/ (executed.ipynb, results.json, postmortem.html) and DIR/index.html.

    The overview has the slug `overview`. Exit code: 0 all as expected, 1 an expectation broke, 2 a notebook
    could not run; the highest of them counts.
    """
    params = _pairs(pairs)
    chosen = _chosen(slugs, every)
    from specmortem.report import batch

    results = batch.run(
        chosen,
        device,
        quick,
        out,
        params,
        timeout,
        say=lambda line: click.echo(line, err=True),
        at_a_time=jobs,
    )
    _print_runs(results)
    click.echo(f"index: {out / 'index.html'}")
    ctx.exit(max(result.exit_code for result in results))


@main.command(
    epilog=examples(
        "specmortem render out/pp-align-copy/executed.ipynb",
        "specmortem render executed.ipynb --out page.html",
    )
)
@click.argument("executed", type=click.Path(path_type=Path), metavar="EXECUTED.ipynb")
@click.option(
    "--out", type=click.Path(path_type=Path), metavar="FILE", help="By default beside the notebook."
)
def render(executed: Path, out: Path | None) -> None:
    """Render the page of an executed notebook again, from it and the results beside it."""
    from specmortem.report import html

    click.echo(html.render(executed, out))


@main.command(
    epilog=examples(
        "specmortem probe v2-null-block --subject vllm==0.24.0",
        "specmortem probe batch-row-index --subject tree:/path/to/vllm --format json",
    )
)
@click.argument("cause")
@click.option(
    "--subject",
    "subjects",
    multiple=True,
    default=("before", "after"),
    show_default=True,
    help="before, after, vllm==X, installed or tree:DIR; may be given more than once.",
)
@click.option("--device", type=DEVICES, default="auto", show_default=True)
@click.option("--format", "form", type=click.Choice(["text", "json"]), default="text", show_default=True)
@click.pass_context
def probe(ctx: click.Context, cause: str, subjects: tuple[str, ...], device: str, form: str) -> None:
    """Judge subjects for one cause.

    Exit code: 1 a subject faults, else 2 a subject could not be had (an unreachable index, a corrupt wheel, a tree
    without the file), else 3 one could not be judged, else 0 all are clean on the inputs tried.
    """
    from specmortem import incident
    from specmortem import judge as probes

    title = incident.probe_of(cause).title
    judged = probes.judge_many([(cause, subject) for subject in subjects], device=device)
    verdicts = dict(zip(subjects, judged, strict=True))
    lost = [verdict.evidence.reason for verdict in judged if verdict.evidence.detail.get("unavailable")]
    if len(lost) == len(judged):
        raise UnavailableError("; ".join(dict.fromkeys(lost)))
    if form == "json":
        rows = [{"cause": cause, "subject": s, **v.as_dict()} for s, v in verdicts.items()]
        click.echo(json.dumps(rows, indent=1, ensure_ascii=False))
    else:
        _print_verdicts(cause, title, verdicts)
    outcomes = {verdict.outcome for verdict in verdicts.values()}
    ctx.exit(1 if "fault" in outcomes else 2 if lost else 3 if "not-judged" in outcomes else 0)


@main.command(
    epilog=examples(
        "specmortem triage server.log client.txt",
        "zcat server.log.gz | specmortem triage - --format markdown",
    )
)
@click.argument("files", nargs=-1, required=True, metavar="FILE...")
@click.option(
    "--format",
    "form",
    type=click.Choice(["text", "json", "markdown", "html"]),
    default="text",
    show_default=True,
)
@click.pass_context
def triage(ctx: click.Context, files: tuple[str, ...], form: str) -> None:
    """Say which incident logs and reports fit, why, and what to try next; `-` is standard input.

    Text, gzip and zstd in any encoding. Files are judged together; what tells of another incident is judged apart.
    Where one fits, the way out is computed for the launch that they state, as `specmortem check` does.
    Exit code: 0 an incident fits, 1 none of them, 3 not enough evidence, 2 a file cannot be read.
    """
    from specmortem.tools import triage as triages

    found = triages.triage(files)
    click.echo(triages.FORMATS[form](found), nl=False)
    ctx.exit({triages.NONE: 1, triages.INSUFFICIENT: 3}.get(found.answer, 0))


@main.command(
    epilog=examples("specmortem doctor", "specmortem doctor --engine --python /opt/vllm/bin/python")
)
@click.option("--engine", "engines", is_flag=True, help="Say what whole engines lack instead.")
@click.option(
    "--python", "place", metavar="PYTHON|DIR:DIR", help="With --engine: where vLLM is, if not here."
)
@click.pass_context
def doctor(ctx: click.Context, engines: bool, place: str | None) -> None:
    """Say what this machine can run, and why not the rest.

    Exit code: 0 the CPU experiments (with --engine: whole engines) can run, 1 something they need is missing.
    """
    from specmortem.doctor import examine

    if place is not None and not engines:
        raise BadInputError("--python asks about whole engines; give --engine with it")
    if engines:
        from specmortem.tools.engine.examine import examine_engine

        checks = examine_engine(place)
    else:
        checks = examine()
    write_table(("check", "", "what it means"), [(c.name, c.word, c.meaning) for c in checks])
    ctx.exit(int(any(check.required and check.word == "missing" for check in checks)))


@main.command(epilog=examples("specmortem incidents", "specmortem --incidents DIR incidents"))
def incidents() -> None:
    """List the incidents, one line each, with the releases at which a common launch is affected."""
    from specmortem import facts
    from specmortem.affected.screen import exposure

    loaded = [facts.load(slug) for slug in facts.all_slugs()]
    rows = [(i.slug, i.grade, exposure(i.slug).affected or "none on record", i.title) for i in loaded]
    write_table(("slug", "grade", "affected vllm", "what broke"), rows)


@main.command(
    epilog=examples("specmortem show async-accepted-counts", "specmortem show pp-align-copy --print")
)
@click.argument("slug")
@click.option("--print", "only_path", is_flag=True, help="Print the path instead of opening it.")
@click.option("--out", type=click.Path(path_type=Path), default=Path("out"), show_default=True, metavar="DIR")
def show(slug: str, only_path: bool, out: Path) -> None:
    """Open the page of an incident: the one of your last run in DIR, else the reference run of the repository."""
    from specmortem.report.html import find_page

    page = find_page(slug, out)
    if only_path or click.launch(page.as_uri()) != 0:
        click.echo(page)


main.add_command(check)
main.add_command(audit)
main.add_command(campaign)
main.add_command(load)
main.add_command(engine)
main.add_command(new)


def _chosen(slugs: Sequence[str], every: bool) -> list[str]:
    """The slugs to run, each once."""
    from specmortem import facts

    if every == bool(slugs):
        known = ", ".join(facts.all_slugs())
        raise BadInputError(f"give slugs or --all, not {'both' if every else 'neither'}; known: {known}")
    return [*facts.all_slugs(), "overview"] if every else list(dict.fromkeys(slugs))


def _pairs(pairs: Iterable[str]) -> dict[str, str]:
    """NAME=VALUE arguments as a mapping."""
    for pair in pairs:
        if not pair.partition("=")[0].isidentifier() or "=" not in pair:
            raise BadInputError(f"-p {pair}: expected NAME=VALUE")
    return {name: value for name, _, value in (pair.partition("=") for pair in pairs)}


def _print_runs(results: Iterable[RunResult]) -> None:
    rows = []
    for result in results:
        found = result.results.rows if result.results else ()
        counts = [
            str(sum(row.outcome == outcome for row in found)) for outcome in ("fault", "clean", "not-judged")
        ]
        rows.append((result.slug, result.status, *counts, f"{result.seconds:.0f} s", result.reason))
    write_table(("slug", "status", "fault", "clean", "not judged", "time", "reason"), rows)


def _print_verdicts(cause: str, title: str, verdicts: Mapping[str, Verdict]) -> None:
    """On a terminal a table, off it one line a verdict, with the cause whole."""
    from rich.console import Console

    console = Console()
    rows = [
        (subject, found.outcome, found.evidence.reason or found.evidence.observed, found.evidence.place)
        for subject, found in verdicts.items()
    ]
    if console.is_terminal:
        write_table(("subject", "verdict", "evidence", "place"), rows, f"{cause}: {title}", console)
        return
    lines = (
        finding_line(subject, cause, verdict, place, "; ".join(filter(None, [title, told])))
        for subject, verdict, told, place in rows
    )
    write_lines(lines, console)
