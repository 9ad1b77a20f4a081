"""The command `check`. Heavy imports happen inside it, so that help is instant."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from specmortem.errors import BadInputError
from specmortem.report.examples import examples

if TYPE_CHECKING:
    from specmortem.tools.check.inputs import Input
    from specmortem.tools.check.report import CheckReport


@click.command(
    epilog=examples(
        "specmortem check serve.log",
        "specmortem check --vllm 0.28.0 --launch 'vllm serve Qwen/Qwen3.5-27B -sc.method mtp'",
    )
)
@click.argument("files", metavar="[FILE|-]...", nargs=-1)
@click.option(
    "--vllm", "subject", default="", metavar="X", help="A release, installed, tree:DIR, wheel:FILE."
)
@click.option(
    "--launch", "commands", multiple=True, metavar="COMMAND", help="A launch command; may be repeated."
)
@click.option(
    "--format",
    "form",
    type=click.Choice(["text", "json", "github", "sarif", "html"]),
    default="text",
    show_default=True,
)
@click.pass_context
def check(
    ctx: click.Context, files: tuple[str, ...], subject: str, commands: tuple[str, ...], form: str
) -> None:
    """Say whether a launch of vLLM is affected by an incident, and what to change.

    A FILE is a launch command, a log, a report, a compose or Kubernetes file, `vllm collect-env` output or a model's
    config.json, in any mix; `-` is standard input. Files that contradict each other are judged apart.

    Exit code: 0 not affected, 1 affected, 2 bad input, 3 not enough to say.
    """
    from specmortem.tools.check.inputs import inputs, is_tree, read

    given = [each for command in commands for each in inputs("--launch", command)]
    given += [each for path in files if not is_tree(path) for each in read(path)]
    trees = [path for path in files if is_tree(path)] + [subject] * bool(subject)
    if len(trees) > 1:
        raise BadInputError(f"{' and '.join(trees)}: give one vLLM at a time")
    report = _report(given, trees[0] if trees else "")
    _write(report, form)
    ctx.exit(report.exit_code)


def _report(given: Sequence[Input], tree: str) -> CheckReport:
    from specmortem.affected.released import released
    from specmortem.tools.check import report as reports
    from specmortem.tools.check.understand import release_of, understand

    named = f"tree:{tree}" if tree and Path(tree).is_dir() else tree
    if not given and not named:
        raise BadInputError("nothing to check: give a FILE, - for standard input, --launch '…' or --vllm X")
    if named == "installed" or named.startswith(("tree:", "wheel:", "sdist:")):
        from specmortem.judge.subjects import open_subject

        version = open_subject(named)[0].version
        return reports.check(understand(given, version), named, reports.judged_now)
    release = release_of(named) if named else ""
    if release and release not in released().releases:
        return reports.check(understand(given, release), f"vllm=={release}", reports.judged_now)
    return reports.check(understand(given, release))


def _write(report: CheckReport, form: str) -> None:
    from specmortem.tools.check import formats, render

    if form == "text":
        render.text(report)
        return
    made = {"json": formats.as_json, "github": formats.github, "sarif": formats.sarif, "html": formats.html}
    click.echo(made[form](report), nl=False)
