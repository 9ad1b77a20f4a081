"""What a source file binds at module level, read from its syntax tree; nothing is executed.

Conditions are decided for vLLM's defaults on a CUDA platform: `HAS_TRITON` and `current_platform.is_cuda()`
hold, `TYPE_CHECKING` does not, environment variables have the default that the code gives them.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import IntEnum
from functools import lru_cache
from pathlib import Path

from specmortem.upstream.errors import LiftError
from specmortem.upstream.tree import Tree

Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


class Rank(IntEnum):
    """How surely a binding is the one in force: unconditional, in an undecided branch, on failure, never."""

    LIVE = 0
    UNSURE = 1
    FALLBACK = 2
    DEAD = 3


@dataclass(frozen=True)
class Import:
    """`from module import attribute`, or `import module` if `attribute` is empty; `level` counts the dots."""

    module: str
    attribute: str = ""
    level: int = 0


@dataclass(frozen=True, eq=False)
class Binding:
    """One statement that gives a name its value."""

    name: str
    rank: Rank
    value: ast.stmt | Import


@dataclass
class Source:
    """A parsed file: its place on disk, the bindings of each name in source order, and its star imports."""

    path: str
    file: Path
    postponed: bool
    bindings: dict[str, list[Binding]] = field(default_factory=dict)
    stars: list[Import] = field(default_factory=list)

    def candidates(self, name: str) -> list[Binding]:
        """Bindings of a name, the one in force first: the last live one, else the first conditional one."""
        found = list(enumerate(self.bindings.get(name, [])))
        found.sort(key=lambda item: (item[1].rank, -item[0] if item[1].rank is Rank.LIVE else item[0]))
        return [binding for _, binding in found]


def read(tree: Tree, path: str) -> Source:
    """Fetch, parse and index one file.

    Raises LiftError when it is not Python that this interpreter can parse.
    """
    file = tree.fetch([path])[path]
    try:
        return _indexed(path, file, file.read_bytes())
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise LiftError(f"{tree.subject}: {path} cannot be parsed by this Python: {error}") from error


@lru_cache(maxsize=32)
def _indexed(path: str, file: Path, content: bytes) -> Source:
    """Shared by all that read a file of this content; nobody changes it."""
    module = ast.parse(content, str(file))
    source = Source(path, file, postponed=_postpones_annotations(module))
    for binding in _bindings(module.body, Rank.LIVE):
        if binding.name == "*" and isinstance(binding.value, Import):
            source.stars.append(binding.value)
        else:
            source.bindings.setdefault(binding.name, []).append(binding)
    return source


def _postpones_annotations(module: ast.Module) -> bool:
    imports = (
        node for node in module.body if isinstance(node, ast.ImportFrom) and node.module == "__future__"
    )
    return any(alias.name == "annotations" for node in imports for alias in node.names)


def _bindings(body: list[ast.stmt], rank: Rank) -> Iterator[Binding]:
    """Module-level bindings in source order, those inside blocks with the rank of their branch."""
    for node in body:
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                yield Binding(node.name, rank, node)
            case ast.Assign() | ast.AnnAssign(value=ast.expr()):
                yield from (Binding(name, rank, node) for name in _targets(node))
            case ast.Import() | ast.ImportFrom():
                yield from (Binding(name, rank, value) for name, value in imports(node))
            case ast.If():
                yield from _branches(node, rank)
            case ast.Try():
                yield from _bindings(node.body + node.orelse + node.finalbody, rank)
                for handler in node.handlers:
                    yield from _bindings(handler.body, max(rank, Rank.FALLBACK))
            case ast.With():
                yield from _bindings(node.body, rank)


def _branches(node: ast.If, rank: Rank) -> Iterator[Binding]:
    try:
        holds = bool(_decide(node.test))
    except LookupError:
        ranks = (Rank.UNSURE, Rank.UNSURE)
    else:
        ranks = (Rank.LIVE, Rank.DEAD) if holds else (Rank.DEAD, Rank.LIVE)
    yield from _bindings(node.body, max(rank, ranks[0]))
    yield from _bindings(node.orelse, max(rank, ranks[1]))


def _targets(node: ast.Assign | ast.AnnAssign) -> list[str]:
    """Names that an assignment binds; `a.b = x` and `a[b] = x` bind none."""
    targets = node.targets if isinstance(node, ast.Assign) else [node.target]
    leaves = (leaf for target in targets for leaf in ast.walk(target))
    return [leaf.id for leaf in leaves if isinstance(leaf, ast.Name) and isinstance(leaf.ctx, ast.Store)]


def imports(node: ast.Import | ast.ImportFrom) -> Iterator[tuple[str, Import]]:
    """The names that an import statement binds, and what they stand for."""
    for alias in node.names:
        if isinstance(node, ast.ImportFrom):
            yield alias.asname or alias.name, Import(node.module or "", alias.name, node.level)
        elif alias.asname:
            yield alias.asname, Import(alias.name)
        else:
            yield alias.name.partition(".")[0], Import(alias.name.partition(".")[0])


def _decide(test: ast.expr) -> object:
    """The value of a condition under vLLM's defaults on CUDA.

    Raises LookupError where that cannot be told.
    """
    match test:
        case ast.Constant():
            return test.value
        case ast.Name("HAS_TRITON"):
            return True
        case ast.Name("TYPE_CHECKING") | ast.Attribute(ast.Name("typing"), "TYPE_CHECKING"):
            return False
        case ast.UnaryOp(ast.Not(), operand):
            return not _decide(operand)
        case ast.BoolOp(operator, values):
            return _decide_all(values, stop=isinstance(operator, ast.Or))
        case ast.Compare(left, [ast.Eq()], [right]):
            return _decide(left) == _decide(right)
        case ast.Compare(left, [ast.NotEq()], [right]):
            return _decide(left) != _decide(right)
        case ast.Call(ast.Attribute(ast.Name("current_platform"), question)) if question in _PLATFORM:
            return _PLATFORM[question]
        case ast.Call(function, [_, default]) if ast.unparse(function) in ("os.environ.get", "os.getenv"):
            return _decide(default)
    raise LookupError


def _decide_all(values: list[ast.expr], stop: bool) -> bool:
    """`or` (stop at a true value) and `and` (stop at a false one); undecided only if no part stops."""
    undecided = False
    for value in values:
        try:
            if bool(_decide(value)) is stop:
                return stop
        except LookupError:
            undecided = True
    if undecided:
        raise LookupError
    return not stop


_PLATFORM = {
    f"is_{name}": name in ("cuda", "cuda_alike")
    for name in ("cuda", "cuda_alike", "rocm", "xpu", "cpu", "tpu")
}
