"""The command `load`. Heavy imports happen inside it, so that help is instant."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from specmortem.errors import BadInputError, UnavailableError
from specmortem.report.examples import examples

if TYPE_CHECKING:
    from rich.progress import Progress

    from specmortem.tools.load.driver import Driver, Show
    from specmortem.tools.load.outcome import RequestRecord
    from specmortem.tools.load.result import Result
    from specmortem.tools.load.settings import Settings

FILE, PAGE = Path("load.json"), Path("load.html")
SHAPE_NAMES = ("long-rounds", "short-ramp", "two-streams")
INTERRUPTED = 130
SECONDS = click.FloatRange(min=0, min_open=True)
COUNT = click.IntRange(min=1)


@click.command(
    context_settings={"show_default": True},
    epilog=examples(
        "specmortem load --url http://127.0.0.1:8000 --shape two-streams",
        "specmortem load --url http://127.0.0.1:8000 --concurrency 16,32 --check --expect clean --out out/load",
    ),
)
@click.option("--url", required=True, metavar="URL", help="Root of the server, e.g. http://127.0.0.1:8000")
@click.option("--shape", type=click.Choice(SHAPE_NAMES), default="short-ramp")
@click.option("--model", metavar="NAME", help="By default the first that the server lists.")
@click.option("--api", type=click.Choice(["chat", "completions"]), default="chat")
@click.option("--seed", type=int, help="Of prompts and lengths.", default=0)
@click.option("--concurrency", metavar="N[,N...]", help="In place of the shape's; one figure a round.")
@click.option("--rounds", type=COUNT, metavar="N", help="In place of the shape's.")
@click.option("--requests", type=click.IntRange(min=0), metavar="N", help="A round; 0: its concurrency.")
@click.option("--prompt-tokens", metavar="N|LOW-HIGH", help="In place of the shape's; an estimate.")
@click.option("--max-tokens", metavar="N|LOW-HIGH", help="In place of the shape's.")
@click.option(
    "--prompts", type=click.Path(path_type=Path), metavar="FILE", help="JSON lines, in place of made prompts."
)
@click.option("--temperature", type=click.FloatRange(min=0), metavar="T", help="In place of the shape's.")
@click.option("--stream/--no-stream", default=None, help="In place of the shape's.")
@click.option("--pause", type=click.FloatRange(min=0), metavar="S", help="Between rounds.")
@click.option("--warm-up", type=click.IntRange(min=0), metavar="N", help="One at a time.", default=1)
@click.option("--ignore-eos", is_flag=True, help="Forbid an early end (vLLM); healthy models may loop then.")
@click.option("--min-tokens", type=click.IntRange(min=0), metavar="N", help="(vLLM)", default=0)
@click.option("--check", is_flag=True, help="Judge whether answers recall the value asked for.")
@click.option("--metrics-every", type=click.FloatRange(min=0), metavar="S", help="0: never.", default=2)
@click.option("--health-every", type=SECONDS, metavar="S", default=2)
@click.option("--request-timeout", type=SECONDS, metavar="S", help="Of a whole request.")
@click.option("--first-byte-timeout", type=SECONDS, metavar="S", help="Of a stream.", default=300)
@click.option("--idle-timeout", type=SECONDS, metavar="S", help="Between bytes.", default=60)
@click.option("--connect-timeout", type=SECONDS, metavar="S", default=10)
@click.option("--max-requests", type=COUNT, metavar="N", help="Hard limit, warm-up included.", default=2000)
@click.option("--max-time", type=SECONDS, metavar="S", help="Hard limit of the run.", default=3600)
@click.option("--max-bytes", type=COUNT, metavar="N", help="Hard limit of a response.", default=8 * 2**20)
@click.option("--allow-host", multiple=True, metavar="HOST", help="A host other than this machine.")
@click.option("--api-key-env", metavar="NAME", help="Environment variable with the API key; never shown.")
@click.option("--expect", type=click.Choice(["clean"]), help="Exit with 1 unless the run is whole and clean.")
@click.option("--format", "form", type=click.Choice(["text", "json"]), default="text")
@click.option("--out", type=click.Path(path_type=Path), metavar="DIR", default=Path("out"))
@click.pass_context
def load(ctx: click.Context, /, form: str, out: Path, expect: str | None, **options: Any) -> None:
    """Put load on an OpenAI-compatible server, and say what broke; writes DIR/load.json and DIR/load.html.

    Shapes: long-rounds (64 at once, 5 rounds, 4,000 tokens), short-ramp (16, 32, then 64 at once, short prompts),
    two-streams (2 at once, prompts of 6,000 to 45,000 tokens, 100 requests). Nothing is ever sent twice. Only
    loopback addresses are let through; another host needs --allow-host.

    A line of --prompts is {"prompt": TEXT, "expected": TEXT}; either may be a list of token ids, for a server without a
    tokenizer (vLLM, --api completions). With --check an answer must hold the text, or begin with the ids.

    Exit code: 0 the run ended (with --expect: whole and clean), 1 the expectation failed, 2 bad input, no server, or
    a warm-up that was refused, 130 interrupted; the result is then partial and valid.
    """
    from specmortem.tools.load import address, render
    from specmortem.tools.load.outcome import Outcome
    from specmortem.tools.load.result import Status
    from specmortem.verdict import write_atomically

    settings = _settings(options)
    key = address.api_key(options["api_key_env"])
    _check_writable(out)
    result = _run(settings, key, out)
    result.save(out / FILE)
    write_atomically(out / PAGE, render.page(result))
    if form == "json":
        click.echo(result.as_json(), nl=False)
    else:
        render.terminal(result)
        click.echo(f"result: {out / FILE}\npage: {out / PAGE}")
    if result.status is Status.INTERRUPTED:
        ctx.exit(INTERRUPTED)
    if result.status is Status.WARM_UP_FAILED and Outcome.REFUSED in result.counts:
        raise BadInputError(f"the server refused the warm-up: {result.said}")
    ctx.exit(int(expect == "clean" and not result.clean))


def _check_writable(out: Path) -> None:
    """Make the folder and write in it, before anything is sent. Raises UnavailableError when that fails."""
    import tempfile

    try:
        out.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=out):
            pass
    except OSError as error:
        raise UnavailableError(
            f"cannot write to --out {out}: {error.strerror or error}; give another folder"
        ) from error


def _settings(options: dict[str, Any]) -> Settings:
    """The settings that the options stand for; the shape's own figures where none are given."""
    from specmortem.tools.load import address, prompts
    from specmortem.tools.load.settings import OPTIONS, SHAPES, Limits, Settings

    shape = SHAPES[options["shape"]]
    values = options | {
        "url": address.base_url(options["url"], options["allow_host"]),
        "prompt_tokens": _range("--prompt-tokens", options["prompt_tokens"]),
        "max_tokens": _range("--max-tokens", options["max_tokens"]),
        "concurrency": _concurrency(options["concurrency"], options["rounds"], shape.concurrency),
        "rounds": None,
        "prompts": prompts.read(options["prompts"]) if options["prompts"] else None,
    }
    places = {option[2:].replace("-", "_"): place for option, place in OPTIONS.items()}
    places |= {name: name for name in ("check", "ignore_eos", "allow_host")} | {"stream": "shape.stream"}
    parts: dict[str, dict[str, Any]] = {"": {}, "shape": {}, "limits": {}}
    for name, place in places.items():
        part, _, field = place.rpartition(".")
        if values[name] is not None:
            parts[part][field] = values[name]
    return Settings(shape=replace(shape, **parts["shape"]), limits=Limits(**parts["limits"]), **parts[""])


def _concurrency(text: str | None, rounds: int | None, own: tuple[int, ...]) -> tuple[int, ...]:
    """One figure a round: those given, else the shape's, from the start again where there are more rounds."""
    figures = own
    if text is not None:
        if not re.fullmatch(r"\d{1,6}(,\d{1,6})*", text):
            raise BadInputError(f"--concurrency {text}: expected N or N,N,...")
        figures = tuple(map(int, text.split(",")))
        if rounds is None and len(figures) == 1:
            rounds = len(own)
    return tuple(figures[i % len(figures)] for i in range(rounds or len(figures)))


def _range(option: str, text: str | None) -> tuple[int, int] | None:
    if text is None:
        return None
    if not (match := re.fullmatch(r"(\d{1,9})(?:-(\d{1,9}))?", text)):
        raise BadInputError(f"{option} {text}: expected N or LOW-HIGH")
    return int(match[1]), int(match[2] or match[1])


def _run(settings: Settings, key: str, out: Path) -> Result:
    """The run, with a live bar on stderr where that is a terminal, and a line a round in any case.

    SIGINT and SIGTERM end it with what there is.
    """
    import asyncio

    from rich.text import Text

    from specmortem.report.terminal import progress
    from specmortem.tools.load.driver import Driver

    told = "{task.fields[flight]} in flight, {task.fields[bad]} detected, {task.fields[tokens]} tokens"

    def checkpoint(result: Result) -> None:
        result.save(out / FILE)

    async def main() -> Result:
        with progress(told) as bars:
            show = _bar(bars, min(settings.planned, settings.limits.requests))
            driver = Driver(settings, key, lambda line: bars.console.print(Text(line)), show, checkpoint)
            _catch_signals(driver)
            return await driver.run()

    return asyncio.run(main())


def _catch_signals(driver: Driver) -> None:
    """The first SIGINT or SIGTERM stops the run; a second has its usual effect."""
    import asyncio
    import signal

    from specmortem.tools.load.result import Status

    loop = asyncio.get_running_loop()

    def stop(which: signal.Signals) -> None:
        for each in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(each)
        driver.stop(Status.INTERRUPTED, which.name)

    for which in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(which, stop, which)


def _bar(bars: Progress, planned: int) -> Show:
    """Shows a run on a bar of rich."""
    from specmortem.tools.load.outcome import UNREMARKABLE

    task = bars.add_task("requests", total=planned, flight=0, bad=0, tokens=0)

    def show(in_flight: int, closed: RequestRecord | None) -> None:
        bars.update(task, flight=in_flight)
        if closed:
            fields = bars.tasks[task].fields
            bad = fields["bad"] + (closed.outcome not in UNREMARKABLE)
            tokens = fields["tokens"] + (closed.completion_tokens or 0)
            bars.update(task, advance=1, bad=bad, tokens=tokens)

    return show
