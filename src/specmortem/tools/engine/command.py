"""The command `engine`. Heavy imports happen inside it, so that help is instant."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import click

from specmortem.errors import BadInputError
from specmortem.report.examples import examples

if TYPE_CHECKING:
    from specmortem.tools.engine.arms import EngineArm, Experiment
    from specmortem.tools.engine.campaign import Options
    from specmortem.tools.engine.process import Environment
    from specmortem.tools.engine.result import EngineResults

INTERRUPTED = 130
SMOKE = "smoke.json"  # no name that a page looks for


@click.command(
    epilog=examples(
        "specmortem engine SLUG --plan",
        "specmortem engine SLUG --at 0.24.0=/opt/vllm/bin/python --arm before --arm after",
    )
)
@click.argument("incident", metavar="SLUG|FILE.toml")
@click.option(
    "--at", "places", multiple=True, metavar="X.Y.Z=PYTHON|DIR:DIR", help="Where a vLLM release is."
)
@click.option("--arm", "arms", multiple=True, metavar="NAME", help="Only these arms; all by default.")
@click.option("--runs", type=click.IntRange(min=5), metavar="N", help="In place of the file's.")
@click.option(
    "--minutes", type=click.FloatRange(min=0, min_open=True), metavar="M", help="Hard limit for all."
)
@click.option("--resume", is_flag=True, help="Keep what DIR/engine.json holds and run what it lacks.")
@click.option("--smoke", is_flag=True, help="One run an arm, to DIR/smoke.json; no result to keep.")
@click.option("--plan", is_flag=True, help="Say what would be run, and run nothing.")
@click.option(
    "--out", type=click.Path(path_type=Path), default=Path("out/engine"), show_default=True, metavar="DIR"
)
@click.pass_context
def engine(
    ctx: click.Context,
    incident: str,
    places: tuple[str, ...],
    arms: tuple[str, ...],
    runs: int | None,
    minutes: float | None,
    resume: bool,
    smoke: bool,
    plan: bool,
    out: Path,
) -> None:
    """Run released vLLM engines, arm by arm, and compare them; writes DIR/engine.json and DIR/engine.md.

    The arms are those of investigations/SLUG/engine.toml. Every engine is a process of its own; runs of an arm share
    one as long as it lives. Without --at the installed vllm is used, where its release is the arm's.

    Exit code: 0 every arm that was asked for has its runs, be they faulty, 3 one has not, 2 bad input or no
    environment, 130 interrupted or out of time; the result is valid in every case.
    """
    from specmortem.tools.engine import campaign
    from specmortem.tools.engine.arms import load

    if smoke and (resume or runs is not None):
        raise BadInputError("--smoke is one run, kept nowhere; go without --runs and --resume")
    experiment = load(incident)
    chosen = [experiment.arm(name) for name in arms] or list(experiment.arms)
    runs = 1 if smoke else runs
    if plan:
        click.echo(_plan(experiment, chosen, runs or experiment.runs), nl=False)
        return
    environments = _environments(places, chosen)
    command = _command(incident, environments, arms, runs, resume, smoke)
    options = campaign.Options(arms, runs, minutes, resume, command)
    found = _run(experiment, environments, options, out, smoke)
    if found.status == "interrupted":
        ctx.exit(INTERRUPTED)
    done = {arm.name for arm in found.arms if arm.whole}
    ctx.exit(0 if done >= {arm.name for arm in chosen} else 3)


def _run(
    experiment: Experiment, environments: Mapping[str, Environment], options: Options, out: Path, smoke: bool
) -> EngineResults:
    """Run with models of the checkout, say what happens, and show what came out."""
    from specmortem import facts
    from specmortem.tools.engine import campaign, report
    from specmortem.tools.engine.result import FILE_NAME
    from specmortem.verdict import write_atomically

    file, root = out / (SMOKE if smoke else FILE_NAME), facts.find_root().parent
    found = campaign.run(
        experiment, environments, root, file, options, lambda line: click.echo(line, err=True)
    )
    text = report.markdown(found)
    click.echo(text, nl=False)
    click.echo(f"result: {file}")
    if not smoke:
        click.echo(f"page: {write_atomically(out / 'engine.md', text)}")
    return found


def _environments(places: Sequence[str], chosen: Sequence[EngineArm]) -> dict[str, Environment]:
    """Environments by release; what --at does not name is this interpreter's, if it has that release."""
    from importlib import metadata

    from specmortem.tools.engine.process import Environment

    found: dict[str, Environment] = {}
    for text in places:
        release, given, place = text.partition("=")
        if not given or not re.fullmatch(r"\d+\.\d+\.\d+\w*", release):
            raise BadInputError(f"--at {text}: expected X.Y.Z=PYTHON or X.Y.Z=DIR:DIR")
        found[release] = Environment.parse(place)
    with suppress(metadata.PackageNotFoundError):
        installed = metadata.version("vllm").split("+")[0]
        if installed in {arm.vllm for arm in chosen}:
            found.setdefault(installed, Environment.here())
    return found


def _command(
    incident: str,
    environments: Mapping[str, Environment],
    arms: Sequence[str],
    runs: int | None,
    resume: bool,
    smoke: bool,
) -> str:
    """The command for a reader; the places of environments are the reader's own."""
    words = ["specmortem", "engine", incident if "/" not in incident else Path(incident).name]
    words += [word for release in sorted(environments) for word in ("--at", f"{release}=ENVIRONMENT")]
    words += [word for arm in arms for word in ("--arm", arm)]
    words += ["--runs", str(runs)] if runs is not None and not smoke else []
    return shlex.join([*words, *["--resume"] * resume, *["--smoke"] * smoke])


def _plan(experiment: Experiment, chosen: Sequence[EngineArm], runs: int) -> str:
    """Arms, requests and a first estimate of the time on a GPU."""
    from specmortem.tools.engine import estimate

    trained, names = bool(experiment.model.tasks), {arm.name for arm in chosen}
    lines = [f"{experiment.incident}: {experiment.question}"]
    for arm in chosen:
        lines.append(
            f"  {arm.name}: vllm {arm.vllm}, workload {arm.workload.name}, {runs} runs of {arm.workload.total} "
            f"requests, about {estimate.run_s(arm, trained):.1f} s each; {arm.says}"
        )
    pairs = [pair for pair in experiment.pairs if {pair.left, pair.right} <= names]
    lines += [f"  pair {pair.left} / {pair.right}: {pair.variable}" for pair in pairs]
    return "\n".join([*lines, f"  {estimate.cost(experiment, chosen, runs)}"]) + "\n"
