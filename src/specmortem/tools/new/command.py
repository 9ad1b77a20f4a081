"""Write the folder of a new incident from the template beside this file, with copier."""

from __future__ import annotations

import keyword
import re
import tempfile
from importlib.util import find_spec
from pathlib import Path

import click

from specmortem.errors import BadInputError, SpecmortemError, UnavailableError
from specmortem.report.examples import examples

TEMPLATE = Path(__file__).with_name("template")
OVERVIEW = "overview"  # what `run` calls the notebook of all incidents
SLUG = re.compile(r"[a-z][a-z0-9]*(-[a-z0-9]+)*")
PLACE = re.compile(r"(?P<file>[\w./-]+\.py):(?P<name>[A-Za-z_][\w.]*)")


@click.command(
    epilog=examples(
        "specmortem new row-mix --function vllm/v1/worker/block_table.py:BlockTable.append_row --subject installed",
        "specmortem new torn-copy --kernel vllm/v1/sample/rejection_sampler.py:expand_kernel --subject vllm==0.33.0",
    )
)
@click.argument("slug")
@click.option(
    "--kernel", metavar="FILE:NAME", help="A Triton kernel of the subject, such as vllm/x.py:copy_kernel."
)
@click.option("--function", metavar="FILE:NAME", help="A function or method of the subject.")
@click.option("--subject", required=True, metavar="P", help="vllm==X, installed or tree:DIR.")
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    default=Path(),
    show_default=True,
    metavar="DIR",
    help="Where to.",
)
def new(slug: str, kernel: str | None, function: str | None, subject: str, out: Path) -> None:
    """Write DIR/SLUG: facts, fix, probe, notebook and tests of a new incident, which run as they are.

    A fault is planted in it as an example. Exit code: 0 written, 2 nothing was written, with the reason.
    """
    if (kernel is None) == (function is None):
        raise BadInputError("give either --kernel FILE:NAME or --function FILE:NAME")
    folder = create(slug, "kernel" if kernel else "function", kernel or function or "", subject, out)
    click.echo(f"{folder}: written, with a planted fault")
    click.echo(f"  specmortem --incidents {out} run {slug}")
    click.echo(f"  python -m pytest {folder}")


def create(slug: str, kind: str, place: str, subject: str, out: Path) -> Path:
    """The folder of a new incident, whole or not there.

    Raises BadInputError for a slug that is taken or malformed, a place that the subject does not have, or a folder
    that exists; UnavailableError where the subject cannot be had or the folder not written.
    """
    from copier import run_copy

    file, name = _place(place)
    package = _package(slug)
    if (folder := out / package).exists():
        raise BadInputError(f"{folder} exists; give another slug, or another folder with --out")
    if find_spec(package) is not None:
        raise BadInputError(
            f"{slug!r} would have the name of a Python package that is installed, {package}; give another slug"
        )
    _check(subject, file, name)
    answers = {"slug": slug, "package": package, "kind": kind, "file": file, "name": name, "subject": subject}
    try:
        out.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{package}.", dir=out) as stage:
            run_copy(str(TEMPLATE), stage, data=answers, defaults=True, quiet=True)
            Path(stage, package).rename(folder)
    except OSError as error:
        raise UnavailableError(f"cannot write {folder}: {error.strerror or error}") from error
    return folder


def _place(text: str) -> tuple[str, str]:
    if not (match := PLACE.fullmatch(text)):
        raise BadInputError(f"{text!r} is not FILE:NAME, such as vllm/v1/worker/mamba_utils.py:copy_kernel")
    return match["file"], match["name"]


def _package(slug: str) -> str:
    from specmortem import incident

    if not SLUG.fullmatch(slug):
        raise BadInputError(f"{slug!r} is no slug: words of small letters and digits, joined by hyphens")
    if keyword.iskeyword(slug) or slug == OVERVIEW:
        raise BadInputError(f"{slug!r} has a meaning already; give another slug")
    if slug in incident.all_slugs():
        raise BadInputError(f"there is an incident {slug!r} already; give another slug")
    return slug.replace("-", "_")


def _check(subject: str, file: str, name: str) -> None:
    """The subject has the function."""
    from specmortem import upstream

    try:
        upstream.body_hash(upstream.resolve(subject), file, name)
    except upstream.NotPresentError as error:
        raise BadInputError(f"{subject} has no {file}:{name}: {error}") from error
    except SpecmortemError as error:
        raise UnavailableError(f"{subject}: {error}") from error
