"""Every flag that `vllm serve` of a released vLLM knows, read from the syntax trees of its argument parsers.

`python benchmarks/released_flags.py src/specmortem/statements/flags.txt` writes their union over the releases of the
audit, without dashes. A flag that is not among them is a slip, a fork's or a newer release's: what a launch with it
leaves out is not known.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import click

from specmortem import upstream
from specmortem.affected.released import released

FILES = ("vllm/engine/arg_utils.py", "vllm/entrypoints/openai/cli_args.py", "vllm/entrypoints/cli/serve.py")
CLASSES = ("FrontendArgs", "BaseFrontendArgs")  # a flag for each field


def flags(tree: ast.Module) -> Iterator[str]:
    """Names of the arguments that a module adds, and of the fields that become arguments."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "add_argument":
            yield from (
                a.value for a in node.args if isinstance(a, ast.Constant) and str(a.value).startswith("-")
            )
        if isinstance(node, ast.ClassDef) and node.name in CLASSES:
            fields = (each.target for each in node.body if isinstance(each, ast.AnnAssign))
            yield from (name.id for name in fields if isinstance(name, ast.Name))


@click.command()
@click.argument("out", type=click.Path(path_type=Path))
def main(out: Path) -> None:
    """Write OUT, a flag a line."""
    found: set[str] = set()
    for release in released().releases:
        tree = upstream.resolve(f"vllm=={release}")
        for path in FILES:
            try:
                text = tree.fetch([path])[path].read_bytes()
            except upstream.MissingFileError:
                continue
            found |= {name.lstrip("-").replace("_", "-").lower() for name in flags(ast.parse(text))}
        click.echo(f"{release}: {len(found)}")
    out.write_text("\n".join(sorted(found)) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
