"""The shape of the package: which way imports point, how long functions are, and where incidents are named."""

import ast
import importlib.util
import re
import statistics
from collections import defaultdict
from pathlib import Path

import pytest

from specmortem import incident

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "specmortem"
SPEC = importlib.util.spec_from_file_location("architecture", ROOT / "docs" / "architecture.py")
architecture = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(architecture)
SOURCES = {path: ast.parse(path.read_text(encoding="utf-8")) for path in sorted(PACKAGE.rglob("*.py"))}
TOOLS = [path for path in SOURCES if {"tools", "report"} & set(path.relative_to(PACKAGE).parts)]
# One concept in two places: (class, why both stand).
TWICE: dict[str, str] = {}


def functions():
    """(lines, place) of every function that is not a kernel."""
    for path, tree in SOURCES.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                if any("jit" in ast.unparse(each) for each in node.decorator_list):
                    continue
                yield node.end_lineno - node.lineno + 1, f"{path.relative_to(PACKAGE)}:{node.name}"


def test_no_import_points_upwards_and_no_incident_imports_another():
    assert architecture.upwards(architecture.arrows()) == []


def test_an_upward_import_and_one_between_incidents_are_seen(tmp_path):
    for name, text in {
        "errors": "from specmortem import cli\n",
        "cli": "",
        "incidents/one/__init__": "def f():\n    from specmortem.incidents import two\n",
        "incidents/two/__init__": "",
        "incidents/__init__": "",
    }.items():
        path = tmp_path / f"{name}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    told = architecture.upwards(architecture.arrows(tmp_path))
    assert told == ["errors -> cli: errors", "incidents.one -> incidents.two: incidents.one"]


def test_the_figure_is_that_of_the_imports():
    page = architecture.PAGE.read_text(encoding="utf-8")
    assert architecture.written(page) == page, "run python docs/architecture.py"


@pytest.mark.parametrize("path", TOOLS, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_tools_and_pages_name_no_incident_and_no_cause(path):
    names = [*incident.all_slugs(), *incident.rules()]
    words = re.compile("|".join(rf"(?<![\w-]){re.escape(name)}(?![\w-])" for name in names))
    assert words.findall(path.read_text(encoding="utf-8")) == []


def test_functions_are_short():
    lengths = sorted(functions())
    numbers = [length for length, _ in lengths]
    assert statistics.median(numbers) <= 8
    assert numbers[int(len(numbers) * 0.9)] <= 20
    assert [entry for entry in lengths if entry[0] > 50] == []


def test_a_class_name_has_one_meaning():
    found = defaultdict(list)
    for path, tree in SOURCES.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                found[node.name].append(str(path.relative_to(PACKAGE)))
    twice = {name: places for name, places in found.items() if len(places) > 1 and name not in TWICE}
    assert twice == {}


@pytest.mark.parametrize("slug", incident.all_slugs())
def test_a_fix_is_read_on_one_screen(slug):
    fix = PACKAGE / "incidents" / slug.replace("-", "_") / "fix.py"
    tree = SOURCES[fix]
    assert len(fix.read_text(encoding="utf-8").splitlines()) < 80
    assert {"before"} <= {word for node in tree.body for word in getattr(node, "name", "").split("_")}
