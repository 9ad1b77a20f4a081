"""What a definition needs from its tree, in the order of execution; nothing is executed in here."""

from __future__ import annotations

import ast
import builtins
import sys
from collections.abc import Collection
from dataclasses import dataclass, field
from functools import cached_property
from importlib.util import find_spec
from pathlib import PurePosixPath

from specmortem.upstream import bodies
from specmortem.upstream.errors import LiftError, NotPresentError
from specmortem.upstream.source import Binding, Definition, Import, Source, read
from specmortem.upstream.stand_ins import is_stubbed
from specmortem.upstream.tree import Tree
from specmortem.upstream.trim import Trimmed, is_kernel, trim

MAX_DEFINITIONS = 400
REAL_PACKAGES = {"torch", "triton", "numpy", "typing_extensions", *sys.stdlib_module_names}
TRITON_UTILS = "vllm.triton_utils"
TRITON_NAMES = {
    "triton": Import("triton"),
    "tl": Import("triton.language"),
    "tldevice": Import("triton.language.extra.libdevice"),
    "libdevice": Import("triton.language.extra.libdevice"),
    "gluon": Import("triton.experimental.gluon"),
    "gl": Import("triton.experimental.gluon.language"),
    "aggregate": Import("triton.language.core", "_aggregate"),
    "HAS_TRITON": Import("specmortem.upstream.stand_ins", "HAS_TRITON"),
}
STAND_INS = {
    ("vllm.logger", "init_logger"): Import("specmortem.upstream.stand_ins", "init_logger"),
    ("vllm", "triton_utils"): Import("specmortem.upstream.stand_ins", "triton_utils"),
    (TRITON_UTILS, ""): Import("specmortem.upstream.stand_ins", "triton_utils"),
}


@dataclass(frozen=True)
class Defined:
    """A name that stands for a definition of the tree. `owner` is set for a single method."""

    path: str
    name: str
    node: ast.stmt
    owner: str = ""


@dataclass(frozen=True)
class Missing:
    """A name that stands for nothing, and why."""

    reason: str


@dataclass(frozen=True)
class Given:
    """A name that the caller provides."""

    name: str


Target = Defined | Import | Missing | Given


@dataclass(frozen=True)
class Execute:
    """Step: run a definition in the namespace of its file."""

    target: Defined
    trimmed: Trimmed


@dataclass(frozen=True)
class Bind:
    """Step: give a global of one file the value that it imports."""

    path: str
    name: str
    target: Target
    label: str


@dataclass
class Closure:
    """The steps that bring `target` to life, from first to last."""

    tree: Tree
    target: Defined
    provided: Collection[str] = ()
    steps: list[Execute | Bind] = field(default_factory=list)
    sources: dict[str, Source] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Walk the names.

        Raises LiftError when too many definitions would come along.
        """
        self._seen_names: set[tuple[str, str]] = set()
        self._seen_nodes: set[ast.stmt] = set()
        self._define(self.target)

    @cached_property
    def definitions(self) -> tuple[Defined, ...]:
        """All definitions, the target among them, in the order of execution."""
        return tuple(step.target for step in self.steps if isinstance(step, Execute))

    @property
    def hash(self) -> str:
        """12 hex digits over the bodies of all definitions, wherever they stand."""
        parts = {f"{each.name} {bodies.hash_node(each.node)}" for each in self.definitions}
        return bodies.hash_text("\n".join(sorted(parts)))

    def _define(self, target: Defined) -> None:
        """Plan a definition: first what it reads at once, then itself, then what it reads when called."""
        if target.node in self._seen_nodes:
            return
        self._seen_nodes.add(target.node)
        if len(self._seen_nodes) > MAX_DEFINITIONS:
            raise LiftError(
                f"{self.tree.subject}: {self.target.name} of {self.target.path} needs more than "
                f"{MAX_DEFINITIONS} definitions of vLLM; give substitutes for the largest with provide="
            )
        source = self._source(target.path)
        trimmed = trim(source, target.node, lambda name: self._is_known(source, name), target.owner)
        self._refer(target, trimmed, trimmed.eager)
        self.steps.append(Execute(target, trimmed))
        self._refer(target, trimmed, trimmed.lazy)
        if is_kernel(target.node):
            self._refer(target, trimmed, _languages(source))

    def _refer(self, target: Defined, trimmed: Trimmed, names: tuple[str, ...]) -> None:
        """Plan the globals that a definition reads."""
        source = self._source(target.path)
        for name in names:
            if name == target.name and name in trimmed.eager and not target.owner:
                self._redefine(source, target)
            elif (source.path, name) not in self._seen_names and not self._is_builtin(source, name):
                self._seen_names.add((source.path, name))
                self._bind(source, name, trimmed.imports.get(name))

    def _redefine(self, source: Source, target: Defined) -> None:
        """`f = wrap(f)`: the binding before the one in force comes first."""
        nodes = [binding.value for binding in source.candidates(target.name)]
        earlier = nodes[nodes.index(target.node) + 1 :]
        if earlier and isinstance(earlier[0], ast.stmt):
            self._define(Defined(source.path, target.name, earlier[0]))

    def _bind(self, source: Source, name: str, hidden: Import | None) -> None:
        """Plan one global: what the file binds it to, or what the import inside a function gives."""
        target = self._imported(source, hidden) if hidden else self._follow(source, name)
        if isinstance(target, Defined):
            self._define(target)
            if (target.path, target.name) == (source.path, name):
                return
        label = hidden.attribute or hidden.module if hidden else name
        self.steps.append(Bind(source.path, name, target, label))

    def _is_builtin(self, source: Source, name: str) -> bool:
        is_dunder = name.startswith("__") and name.endswith("__")
        return is_dunder or (
            hasattr(builtins, name) and name not in source.bindings and name not in self.provided
        )

    def _is_known(self, source: Source, name: str) -> bool:
        return self._is_builtin(source, name) or not isinstance(self._follow(source, name), Missing)

    def _source(self, path: str) -> Source:
        if path not in self.sources:
            self.sources[path] = read(self.tree, path)
        return self.sources[path]

    def _follow(self, source: Source, name: str, seen: frozenset[tuple[str, str]] = frozenset()) -> Target:
        """What a global of a file stands for, through re-exports."""
        if name in self.provided:
            return Given(name)
        if (source.path, name) in seen:
            return Missing(f"{source.path} imports {name} from itself")
        seen |= {(source.path, name)}
        reason = Missing(f"{source.path} does not define {name}")
        for binding in source.candidates(name):
            target = self._value(source, binding, seen)
            if not isinstance(target, Missing):
                return target
            reason = target
        return self._from_stars(source, name, seen) or reason

    def _value(self, source: Source, binding: Binding, seen: frozenset[tuple[str, str]]) -> Target:
        if isinstance(binding.value, Import):
            return self._imported(source, binding.value, seen)
        return Defined(source.path, binding.name, binding.value)

    def _from_stars(self, source: Source, name: str, seen: frozenset[tuple[str, str]]) -> Target | None:
        for star in source.stars:
            target = self._imported(source, Import(star.module, name, star.level), seen)
            if isinstance(target, Defined):
                return target
        return None

    def _imported(
        self, source: Source, value: Import, seen: frozenset[tuple[str, str]] = frozenset()
    ) -> Target:
        """What an import statement of `source` gives."""
        if value.attribute in self.provided:
            return Given(value.attribute)
        module = _absolute(source.path, value)
        if value.attribute and is_stubbed(module, value.attribute, self.provided):
            return Given(value.attribute)
        root = module.partition(".")[0]
        if root != "vllm":
            real = root in REAL_PACKAGES and find_spec(root) is not None
            return Import(module, value.attribute) if real else Missing(f"package {root} is not lifted")
        if module.startswith(TRITON_UTILS) and value.attribute in TRITON_NAMES:
            return TRITON_NAMES[value.attribute]
        if (module, value.attribute) in STAND_INS:
            return STAND_INS[module, value.attribute]
        if not value.attribute:
            return Missing(f"module {module} is not lifted as a whole")
        return self._from_file(module, value.attribute, seen)

    def _from_file(self, module: str, name: str, seen: frozenset[tuple[str, str]]) -> Target:
        path = self.tree.first(_files(module))
        if path is None:
            return Missing(f"{self.tree.subject} has no module {module}")
        try:
            source = self._source(path)
        except LiftError as error:
            return Missing(str(error))
        target = self._follow(source, name, seen)
        if isinstance(target, Missing) and self.tree.first(_files(f"{module}.{name}")):
            return Missing(f"module {module}.{name} is not lifted as a whole")
        return target


def _languages(source: Source) -> tuple[str, ...]:
    """Names of `triton.language` in a file: the interpreter wants one even where a kernel reads none."""
    wanted = {("vllm.triton_utils", "tl"), ("triton.language", ""), ("triton", "language")}
    bound = ((name, each.value) for name, found in source.bindings.items() for each in found)
    pairs = ((name, value) for name, value in bound if isinstance(value, Import))
    return tuple(dict.fromkeys(name for name, value in pairs if (value.module, value.attribute) in wanted))


def _files(module: str) -> tuple[str, str]:
    folder = module.replace(".", "/")
    return f"{folder}.py", f"{folder}/__init__.py"


def _absolute(path: str, value: Import) -> str:
    """The dotted name of an imported module; relative imports are counted from the importing file."""
    if not value.level:
        return value.module
    package = PurePosixPath(path).parts[: -value.level]
    return ".".join((*package, *filter(None, [value.module])))


def find(tree: Tree, path: str, name: str) -> tuple[Source, Defined]:
    """The definition of a top-level name, or of `Class.method`.

    Raises NotPresentError when the file or the name is not in the tree.
    """
    if not tree.has(path):
        raise NotPresentError(f"{tree.subject} has no file {path}")
    source = read(tree, path)
    owner, _, method = name.rpartition(".")
    nodes = [each.value for each in source.candidates(owner or name) if isinstance(each.value, ast.stmt)]
    if owner:
        parts = (part for node in nodes for part in reversed(getattr(node, "body", [])))
        nodes = [part for part in parts if isinstance(part, Definition) and part.name == method]
    if not nodes:
        raise NotPresentError(f"{tree.subject}: {path} does not define {name}")
    return source, Defined(path, method, nodes[0], owner)


def plan(tree: Tree, path: str, name: str, provided: Collection[str] = ()) -> Closure:
    """The closure of one name of a tree.

    Raises NotPresentError when the tree does not define it, LiftError when it needs too much.
    """
    with tree.asked("closure", path, name, provided) as report:
        source, target = find(tree, path, name)
        try:
            planned = Closure(tree, target, provided, sources={path: source})
        except RecursionError as error:
            raise LiftError(
                f"{tree.subject}: the dependencies of {name} of {path} nest too deeply"
            ) from error
        report(planned)
    return planned
