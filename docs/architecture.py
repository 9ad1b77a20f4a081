"""Read the import graph of the package, and draw it into ARCHITECTURE.md.

`python docs/architecture.py` writes the figure; `tests/test_architecture.py` fails where the file is older than the
imports, an arrow points upwards, or an incident imports another.
"""

from __future__ import annotations

import ast
import sys
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "src" / "specmortem"
PAGE = ROOT / "ARCHITECTURE.md"
BEGIN, END = "<!-- drawn by docs/architecture.py -->", "<!-- end -->"
# From the bottom up. A room imports from lower layers alone; rooms of one layer do not import each other.
LAYERS = (
    ("errors",),
    ("convert",),
    ("verdict", "_interpreter", "_forkserver", "statistics"),
    ("isolation", "device", "kernels", "upstream", "facts", "exposure"),
    ("detect", "incident", "statements"),
    ("affected", "judge"),
    ("study", "report", "doctor"),
    ("tools.load",),
    ("tools.audit", "tools.check", "tools.engine", "tools.new", "tools.triage"),
    ("incidents.*",),
    ("cli",),
)


def modules(package: Path = PACKAGE) -> dict[str, Path]:
    """Files by module name below the package."""
    found = {}
    for path in sorted(package.rglob("*.py")):
        parts = path.relative_to(package).with_suffix("").parts
        found[".".join(parts).removesuffix("__init__").rstrip(".")] = path
    return found


def room(module: str) -> str:
    """The part of the package that a module belongs to: one incident, one tool, or a top-level room."""
    parts = module.split(".")
    return ".".join(parts[: 2 if parts[0] in ("incidents", "tools") else 1])


def arrows(package: Path = PACKAGE) -> dict[tuple[str, str], list[str]]:
    """(importing room, imported room): the modules that import, function bodies included."""
    known = modules(package)
    found: dict[tuple[str, str], list[str]] = defaultdict(list)
    for module, path in known.items():
        for imported in _imported(ast.parse(path.read_text(encoding="utf-8")), known):
            pair = room(module), room(imported)
            if pair[0] != pair[1] and pair[1]:
                found[pair].append(module)
    return dict(found)


def _imported(tree: ast.Module, known: dict[str, Path]) -> set[str]:
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "specmortem":
            below = (node.module or "").partition(".")[2]
            for alias in node.names:
                full = f"{below}.{alias.name}".lstrip(".")
                names.add(full if full in known else below)
        elif isinstance(node, ast.Import):
            names |= {a.name.partition(".")[2] for a in node.names if a.name.startswith("specmortem.")}
    return names


def layer(name: str) -> int:
    """The number of the layer of a room, from the bottom. Raises KeyError for a room that has none."""
    wanted = "incidents.*" if name.startswith("incidents.") else name
    for number, rooms in enumerate(LAYERS):
        if wanted in rooms:
            return number
    raise KeyError(f"{name} has no layer; add it to LAYERS in docs/architecture.py")


def upwards(found: dict[tuple[str, str], list[str]]) -> list[str]:
    """Arrows that do not point downwards, with the modules that draw them."""
    return [
        f"{a} -> {b}: {', '.join(sorted(set(by)))}"
        for (a, b), by in sorted(found.items())
        if layer(b) >= layer(a)
    ]


def figure() -> str:
    """The graph as Mermaid: incidents as one node, arrows that others imply left out."""
    pairs = {(_node(a), _node(b)) for a, b in arrows()} - {("incidents", "incidents")}
    pairs = {(a, b) for a, b in pairs if a != b and not _implied(a, b, pairs)}
    lines = [f"  {a.replace('.', '_')}[{a}] --> {b.replace('.', '_')}[{b}]" for a, b in sorted(pairs)]
    return "\n".join([BEGIN, "```mermaid", "graph TD", *lines, "```", END])


def _node(name: str) -> str:
    return "incidents" if name.startswith("incidents") else name


def _implied(start: str, end: str, pairs: set[tuple[str, str]]) -> bool:
    waiting, seen = [b for a, b in pairs if a == start and b != end], set()
    while waiting:
        at = waiting.pop()
        if at == end:
            return True
        if at not in seen:
            seen.add(at)
            waiting += [b for a, b in pairs if a == at]
    return False


def written(page: str) -> str:
    """The page with the figure between its marks."""
    head, _, rest = page.partition(BEGIN)
    return head + figure() + rest.partition(END)[2]


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    sys.exit(bool(upwards(arrows())))
