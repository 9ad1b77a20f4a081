"""A definition made fit to run alone: annotations and platform decorators gone, imports of vLLM replaced.

Line numbers stay those of the released file. Triton kernels keep annotations: they carry `tl.constexpr`.
"""

from __future__ import annotations

import ast
import dis
import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import CodeType
from typing import TypeVar

from specmortem.upstream.bodies import copied
from specmortem.upstream.source import Definition, Import, Source, imports

PLATFORM_DECORATORS = (
    "torch.compile",
    "torch.inference_mode",
    "torch.jit",
    "torch._dynamo",
    "support_torch_compile",
    "override",
)
BINDING_DECORATORS = (
    "staticmethod",
    "classmethod",
    "property",
    "cached_property",
    "abstractmethod",
    "setter",
)
_LOADS = ("LOAD_NAME", "LOAD_GLOBAL", "LOAD_FROM_DICT_OR_GLOBALS")
_Node = TypeVar("_Node", bound=ast.AST)
_FIELD_KINDS = ("ClassVar", "InitVar", "KW_ONLY")


@dataclass
class Trimmed:
    """A compiled definition and the globals it reads: `eager` when it is executed, `lazy` when it is called.

    `imports` are the hidden globals that stand for imports of vLLM inside functions.
    """

    code: CodeType
    eager: tuple[str, ...]
    lazy: tuple[str, ...]
    stripped: tuple[str, ...]
    imports: dict[str, Import] = field(default_factory=dict)


def trim(source: Source, node: ast.stmt, is_known: Callable[[str], bool], owner: str = "") -> Trimmed:
    """Trim and compile one statement.

    `is_known` says whether a global name of this file stands for something; decorators that use others are
    dropped. `owner` is the class of a single method, compiled as a plain function in a class of that name.
    """
    trimmer = _Trimmer(source, is_known, dropped=BINDING_DECORATORS if owner else ())
    statement = trimmer.visit(copied(node))
    if owner:
        statement = _inside_class(owner, statement)
    module = ast.Module([statement], type_ignores=[])
    code = compile(module, str(source.file), "exec", dont_inherit=True)
    names: dict[str, bool] = {}
    for name, at_once in _loads(code):
        names[name] = names.get(name, False) or at_once
    eager, lazy = (tuple(name for name in names if names[name] is at_once) for at_once in (True, False))
    return Trimmed(code, eager, lazy, tuple(trimmer.stripped), trimmer.imports)


def _inside_class(owner: str, method: ast.stmt) -> ast.stmt:
    shell = ast.parse(f"class {owner}: pass").body[0]
    assert isinstance(shell, ast.ClassDef)
    shell.body = [method]
    return shell


def _loads(code: CodeType, eager: bool = True) -> Iterator[tuple[str, bool]]:
    """Global names that the code reads, and whether it does so at once."""
    own = set()
    for instruction in dis.get_instructions(code):
        if instruction.opname == "STORE_NAME":
            own.add(instruction.argval)
        elif instruction.opname in _LOADS and instruction.argval not in own:
            yield instruction.argval, eager
    for inner in (constant for constant in code.co_consts if isinstance(constant, CodeType)):
        runs_now = not inner.co_flags & inspect.CO_OPTIMIZED or inner.co_name.endswith(("comp>", "genexpr>"))
        yield from _loads(inner, eager and runs_now)


def is_kernel(node: ast.stmt) -> bool:
    """Whether the definition is compiled by Triton (or Gluon)."""
    return any(
        _head(decorator).rpartition(".")[2] == "jit" for decorator in getattr(node, "decorator_list", [])
    )


def _head(decorator: ast.expr) -> str:
    """`triton.jit` of both `@triton.jit` and `@triton.jit(...)`."""
    return ast.unparse(decorator.func if isinstance(decorator, ast.Call) else decorator)


class _Trimmer(ast.NodeTransformer):
    def __init__(self, source: Source, is_known: Callable[[str], bool], dropped: tuple[str, ...]) -> None:
        self.source, self.is_known, self.dropped = source, is_known, dropped
        self.stripped: list[str] = []
        self.imports: dict[str, Import] = {}
        self._depth = 0

    def visit_FunctionDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> ast.AST:
        self._annotations(node, keep=is_kernel(node))
        self._undecorate(node)
        self._depth += 1
        self.generic_visit(node)
        self._depth -= 1
        return node

    visit_AsyncFunctionDef = visit_FunctionDef  # noqa: N815

    def visit_ClassDef(self, node: ast.ClassDef) -> ast.ClassDef:
        self._undecorate(node)
        self.generic_visit(node)
        return node

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.AnnAssign:
        """Fields keep an annotation only where it decides something; variables of functions keep theirs."""
        self.generic_visit(node)
        if not self._depth:
            node.annotation = self._field_type(node.annotation)
        return node

    def visit_Import(self, node: ast.Import | ast.ImportFrom) -> ast.stmt | list[ast.Assign]:
        """`name = hidden global` for each name that a function would import from vLLM."""
        relative = isinstance(node, ast.ImportFrom) and node.level > 0
        roots = {value.module.partition(".")[0] for _, value in imports(node)}
        if not relative and "vllm" not in roots:
            return node
        return [_at(node, self._assignment(name, value)) for name, value in imports(node)]

    visit_ImportFrom = visit_Import  # noqa: N815

    def _annotations(self, node: ast.FunctionDef | ast.AsyncFunctionDef, keep: bool) -> None:
        node.returns = None
        for argument in ast.walk(node.args):
            if isinstance(argument, ast.arg) and argument.annotation is not None:
                argument.annotation = self._postponed(argument.annotation) if keep else None

    def _field_type(self, annotation: ast.expr) -> ast.expr:
        """`None`, but for `tl.constexpr`, `ClassVar` and the like, which decide what the field is."""
        head = annotation.value if isinstance(annotation, ast.Subscript) else annotation
        last = ast.unparse(head).rpartition(".")[2]
        if last == "constexpr":
            return self._postponed(annotation)
        return head if last in _FIELD_KINDS else _at(annotation, ast.Constant(None))

    def _postponed(self, annotation: ast.expr) -> ast.expr:
        """The annotation as the file means it: a string where the file postpones annotations."""
        return _at(annotation, ast.Constant(ast.unparse(annotation))) if self.source.postponed else annotation

    def _undecorate(self, node: Definition) -> None:
        dropped = [decorator for decorator in node.decorator_list if self._must_go(decorator)]
        node.decorator_list = [decorator for decorator in node.decorator_list if decorator not in dropped]
        self.stripped += [_head(decorator) for decorator in dropped]

    def _must_go(self, decorator: ast.expr) -> bool:
        head = _head(decorator)
        if any(head == name or head.startswith(f"{name}.") for name in PLATFORM_DECORATORS):
            return True
        if head.rpartition(".")[2] in self.dropped:
            return True
        if self._depth or head.endswith(".setter"):
            return False
        reads = _loads(compile(ast.Expression(decorator), "<decorator>", "eval"))
        return not all(self.is_known(name) for name, at_once in reads if at_once)

    def _assignment(self, name: str, value: Import) -> ast.Assign:
        hidden = f"_import{value.level}_{value.module}_{value.attribute}".replace(".", "_")
        self.imports[hidden] = value
        return ast.Assign(targets=[ast.Name(name, ast.Store())], value=ast.Name(hidden, ast.Load()))


def _at(place: ast.AST, node: _Node) -> _Node:
    return ast.fix_missing_locations(ast.copy_location(node, place))
