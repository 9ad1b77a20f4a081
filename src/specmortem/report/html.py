"""Executed notebook -> one HTML page that opens anywhere: no script, no font, nothing fetched."""

from __future__ import annotations

import ast
import hashlib
import html as html_module
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

import nbformat
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup
from nbconvert.exporters import HTMLExporter

from specmortem import facts as fact_files
from specmortem.affected.screen import safest
from specmortem.errors import BadInputError, UnavailableError
from specmortem.facts import Facts
from specmortem.report.selfcontained import check_self_contained
from specmortem.report.summary import Summary, summarize
from specmortem.report.terminal import MARKS
from specmortem.verdict import Results, write_atomically

TEMPLATES = Path(__file__).with_name("template")
EXECUTED, RESULTS, PAGE, INDEX = "executed.ipynb", "results.json", "postmortem.html", "index.html"
OVERVIEW = "overview"
Status = Literal["passed", "failed", "could-not-run"]
PAPERMILL_ERROR_TAG = "papermill-error-cell-tag"
DISPLAY_PRIORITY = ["text/html", "text/markdown", "image/svg+xml", "image/png", "image/jpeg", "text/plain"]
HEADING = re.compile(r'<h2 id="(?P<id>[^"]+)">(?P<text>.*?)<a class="anchor-link"', re.DOTALL)
XML_ONLY = re.compile(r"<\?xml.*?\?>|<!DOCTYPE.*?>|<metadata>.*?</metadata>", re.DOTALL)


@dataclass(frozen=True)
class RunRecord:
    """How a notebook run went; kept in the executed notebook's metadata under `specmortem`."""

    slug: str
    status: Status
    date: str
    reason: str = ""

    @classmethod
    def of(cls, notebook: Mapping[str, Any], source: Path) -> RunRecord:
        """The run that left this notebook. Raises BadInputError when it is not from `specmortem run`."""
        try:
            return cls(**notebook["metadata"]["specmortem"])
        except (KeyError, TypeError):
            raise BadInputError(
                f"{source} was not written by `specmortem run`; render an executed.ipynb of it"
            ) from None


def render(executed: Path, out: Path | None = None, root: Path | None = None) -> Path:
    """Write the page of an executed notebook, by default beside it; returns where.

    A page whose notebook in the checkout is another by now says so. Raises BadInputError when the notebook or its
    results cannot be used, UnavailableError when they cannot be read or the page cannot be written.
    """
    notebook = read_notebook(executed)
    run = RunRecord.of(notebook, executed)
    incident = None if run.slug == OVERVIEW else fact_files.load(run.slug, root)
    results = executed.with_name(RESULTS)
    loaded = Results.load(results) if results.exists() else None
    older = ""
    if incident:
        source = fact_files.notebook(incident, root)
        older = changes(notebook, read_notebook(source)) if source.exists() else ""
    return write_atomically(out or executed.with_name(PAGE), page(notebook, incident, loaded, run, older))


def find_page(slug: str, out: Path, root: Path | None = None) -> Path:
    """The page of an incident: of the run in `out`, else the reference run, of a GPU where there is one.

    Raises BadInputError for an unknown slug, UnavailableError where there is no page.
    """
    home = fact_files.homes(root).get(slug)
    if home is None:
        raise BadInputError(f"no incident {slug!r}; known: {', '.join(fact_files.homes(root))}")
    places = [out / slug / PAGE, *(home / "runs" / backend / PAGE for backend in ("cuda", "cpu", "sim"))]
    for page in places:
        if page.is_file():
            return page.resolve()
    raise UnavailableError(f"no page of {slug} in {out} or {home}; make one: specmortem run {slug}")


def changes(executed: Any, source: Any) -> str:
    """In what a notebook is another than when it was run, in a sentence; empty where it is not."""
    ran = {cell["id"]: cell.source for cell in executed.cells if "id" in cell}
    new = sum(cell.get("id") not in ran for cell in source.cells)
    other = sum(ran.get(cell.get("id"), cell.source) != cell.source for cell in source.cells)
    told = [
        f"{count} cell{'s' * (count != 1)} {what}"
        for count, what in ((new, "added"), (other, "changed"))
        if count
    ]
    return f"The notebook is newer than this run of it: {', '.join(told)} since." if told else ""


def read_notebook(path: Path) -> Any:
    """The notebook at `path`; UnavailableError when it cannot be read, BadInputError when it is none."""
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise UnavailableError(f"cannot read {path}: {error.strerror or error}") from error
    try:
        return nbformat.reads(text, as_version=4)
    except Exception as error:
        raise BadInputError(f"{path} is not a notebook: {error}") from error


def page(
    notebook: Any, incident: Facts | None, results: Results | None, run: RunRecord, older: str = ""
) -> str:
    """The whole page; `older` says what is newer than it.

    Raises BadInputError when an output of the notebook would fetch or run something.
    """
    notebook, heading = _without_title(notebook)
    body = _body(notebook)
    return standalone(
        TEMPLATES,
        "page.html.j2",
        run.slug,
        title=incident.title if incident else heading or run.slug,
        summary=summarize(incident, results, run.date) if incident else None,
        run=run,
        older=older,
        contents=[(m["id"], Markup(m["text"]).striptags()) for m in HEADING.finditer(body)],
        body=Markup(body),
    )


def index_page(entries: Iterable[tuple[RunRecord, Summary | None]]) -> str:
    """The page that lists the postmortems of a run."""
    return standalone(TEMPLATES, "index.html.j2", INDEX, entries=list(entries), safest=safest().text)


def standalone(folder: Path, template: str, name: str, **context: Any) -> str:
    """A page of `template`, which lies in `folder`; what it includes lies here.

    Raises BadInputError when a text would make the page of `name` fetch or run something.
    """
    text = _environment(folder).get_template(template).render(**context)
    if problems := check_self_contained(text):
        raise BadInputError(
            f"the page of {name} would not stand alone: {'; '.join(problems[:3])}; change that output"
        )
    return text


@cache
def _environment(folder: Path) -> Environment:
    environment = Environment(
        loader=FileSystemLoader(list(dict.fromkeys((folder, TEMPLATES)))),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    style = Markup((TEMPLATES / "style.css").read_text(encoding="utf-8"))
    environment.globals.update(style=style, marks=MARKS)
    return environment


def exporter() -> HTMLExporter:
    """nbconvert's exporter with our template.

    Raises UnavailableError when nbconvert does not find its own templates, which lie outside its package.
    """
    try:
        return HTMLExporter(template_name="notebook", extra_template_basedirs=[str(TEMPLATES)])
    except ValueError as error:
        raise UnavailableError(
            "nbconvert does not find its own templates, share/jupyter/nbconvert of its installation; "
            "reinstall nbconvert, or add that share/jupyter folder to JUPYTER_PATH"
        ) from error


def _body(notebook: Any) -> str:
    """The cells as HTML, without the page around them."""
    converter = exporter()
    converter.config.NbConvertBase.display_data_priority = DISPLAY_PRIORITY
    for filter in (scroll_tables, figure, assignments, line_count):
        converter.register_filter(filter.__name__, filter)
    body, _ = converter.from_notebook_node(notebook)
    return str(body)


def _without_title(notebook: Any) -> tuple[Any, str]:
    """The notebook less papermill's error banners and its first level-one heading, and the heading's text."""
    notebook = nbformat.from_dict(notebook)
    notebook.cells = [c for c in notebook.cells if PAPERMILL_ERROR_TAG not in c.metadata.get("tags", [])]
    for cell in notebook.cells:
        if cell.cell_type == "markdown" and (match := re.match(r"\s*# +(.+)\n?", cell.source)):
            rest = cell.source[match.end() :]
            notebook.cells = [type(c)(c, source=rest) if c is cell else c for c in notebook.cells]
            return notebook, match[1].strip()
    return notebook, ""


def scroll_tables(html: str) -> str:
    """Tables wrapped so that they scroll sideways on a narrow screen."""
    return html.replace("<table", '<div class="scroll" tabindex="0"><table').replace(
        "</table>", "</table></div>"
    )


def line_count(source: str) -> str:
    """Length of a code cell in words."""
    lines = len(source.splitlines())
    return f"{lines} line{'s' * (lines != 1)}"


def assignments(source: str) -> list[tuple[str, str]]:
    """Names and values that a parameter cell assigns, as written."""
    found = []
    for node in ast.parse(source).body:
        if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
            target = node.target if isinstance(node, ast.AnnAssign) else node.targets[0]
            found.append((ast.unparse(target), ast.unparse(node.value)))
    return found


def figure(output: Mapping[str, Any], mime: str) -> str:
    """A figure on its own panel, with its text alternative, from an image output."""
    data = output["data"][mime]
    metadata = output.get("metadata", {})
    alt = metadata.get(mime, {}).get("alt") or metadata.get("alt") or _svg_title(data) or "figure"
    label = html_module.escape(alt)
    if mime == "image/svg+xml":
        content = f'<div class="panel" role="img" aria-label="{label}">{inline_svg(data)}</div>'
    else:
        content = (
            f'<div class="panel"><img alt="{label}" src="data:{mime};base64,{"".join(data.split())}"></div>'
        )
    return f"<figure>{content}</figure>"


def inline_svg(svg: str) -> str:
    """An SVG document as an element of an HTML page; its ids are made unique to it."""
    svg = XML_ONLY.sub("", svg).strip()
    prefix = f"f{hashlib.sha1(svg.encode(), usedforsecurity=False).hexdigest()[:8]}-"
    return re.sub(r'(\bid="|url\(#|href="#|aria-\w+by=")', rf"\g<1>{prefix}", svg)


def _svg_title(data: str) -> str:
    match = re.search(r"<title[^>]*>(.*?)</title>", data, re.DOTALL)
    return html_module.unescape(match[1].strip()) if match else ""
