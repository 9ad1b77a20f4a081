"""Live functions out of a vLLM tree, without importing vLLM.

A lifted Triton kernel is decorated anew: it is interpreted if `TRITON_INTERPRET=1` is set by then (set it
before `triton` is imported; nothing in here does). The tree's code is executed: lift what you would install.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from importlib import import_module
from typing import Any

from specmortem.errors import BadInputError
from specmortem.upstream import bodies, closure
from specmortem.upstream.errors import LiftError
from specmortem.upstream.source import Import, Source
from specmortem.upstream.stand_ins import Placeholder
from specmortem.upstream.tree import Tree


@dataclass(frozen=True)
class Lifted:
    """A live object of a tree, and where it comes from.

    `requires` names the other definitions lifted with it, `stripped` the decorators dropped on the way,
    `missing` the names that are placeholders now, with the reason. `namespace` holds its globals.
    """

    function: Any
    name: str
    path: str
    line: int
    end_line: int
    planned: closure.Closure = field(repr=False, compare=False)
    requires: tuple[str, ...] = ()
    stripped: tuple[str, ...] = ()
    missing: Mapping[str, str] = field(default_factory=dict)
    namespace: dict[str, Any] = field(default_factory=dict, repr=False, compare=False)

    @cached_property
    def body_hash(self) -> str:
        """Like `body_hash` of this module."""
        return bodies.hash_node(self.planned.target.node)

    @cached_property
    def closure_hash(self) -> str:
        """Like `closure_hash` of this module, with what was provided left out."""
        return self.planned.hash


def lift(tree: Tree, path: str, name: str, provide: Mapping[str, Any] | None = None) -> Lifted:
    """Bring one top-level function, class or constant to life, with what it needs from its tree.

    `provide` gives values for global names (in any file) instead of lifting them: `current_platform`, say. `StandIns`
    also stand for whatever the code imports from elsewhere.
    Raises NotPresentError when the tree does not define the name, UnavailableError when a file cannot be had,
    LiftError when the code cannot run outside vLLM.
    """
    given = provide if provide is not None else {}
    planned = closure.plan(tree, path, name, [*given, *getattr(given, "rule", ())])
    alive = _Alive(planned, given)
    return Lifted(
        function=alive.function,
        name=name,
        path=path,
        line=planned.target.node.lineno,
        end_line=planned.target.node.end_lineno or planned.target.node.lineno,
        planned=planned,
        requires=tuple(dict.fromkeys(d.name for d in planned.definitions if d is not planned.target)),
        stripped=_stripped(planned),
        missing=alive.missing,
        namespace=alive.namespaces[path],
    )


def lift_method(tree: Tree, path: str, name: str, provide: Mapping[str, Any] | None = None) -> Lifted:
    """Bring the method `Class.method` to life as a plain function that takes whatever stands in for self.

    Its decorators that bind (`staticmethod`, `property`, ...) are dropped. Raises what `lift` raises, and
    BadInputError for a name of another form.
    """
    if name.count(".") != 1:
        raise BadInputError(f"{name!r} does not name a method; write it like Class.method")
    return lift(tree, path, name, provide)


def definition(tree: Tree, path: str, name: str) -> ast.AST:
    """The syntax tree of a function, class or `Class.method`; nothing is executed. It is shared: do not change it.

    Raises NotPresentError when the tree does not define the name.
    """
    with tree.asked("body", path, name) as report:
        node = closure.find(tree, path, name)[1].node
        report(node)
    return node


def body_hash(tree: Tree, path: str, name: str) -> str:
    """12 hex digits of what the body of a function, class or `Class.method` does; nothing is executed.

    Raises NotPresentError when the tree does not define the name.
    """
    return bodies.hash_node(definition(tree, path, name))


def closure_hash(tree: Tree, path: str, name: str) -> str:
    """Like `body_hash`, over the definition and everything that is lifted with it."""
    return closure.plan(tree, path, name).hash


def _stripped(planned: closure.Closure) -> tuple[str, ...]:
    steps = (step for step in planned.steps if isinstance(step, closure.Execute))
    return tuple(dict.fromkeys(head for step in steps for head in step.trimmed.stripped))


class _Alive:
    """The steps of a closure, run; what fails on the way, other than the target, becomes a placeholder."""

    def __init__(self, planned: closure.Closure, given: Mapping[str, Any]) -> None:
        self.planned, self.given = planned, given
        self.function: Any = None
        self.missing: dict[str, str] = {}
        self.namespaces = {path: _namespace(path, source) for path, source in planned.sources.items()}
        late = [step for step in planned.steps if not self._step(step)]
        for step in late:
            self._step(step)

    def _step(self, step: closure.Execute | closure.Bind) -> bool:
        """Take one step; False for a global whose definition has not run yet."""
        if isinstance(step, closure.Execute):
            self._run(step)
            return True
        target, namespace = step.target, self.namespaces[step.path]
        if isinstance(target, closure.Defined) and target.name not in self.namespaces[target.path]:
            return False
        namespace[step.name] = self._value(step.label, target)
        return True

    def _value(self, label: str, target: closure.Target) -> Any:
        match target:
            case closure.Defined():
                return self.namespaces[target.path][target.name]
            case closure.Given():
                return self.given[target.name]
            case closure.Missing():
                return self._placeholder(label, target.reason)
        try:
            return _imported(target)
        except Exception as error:
            return self._placeholder(label, f"import of {target.module} failed: {error}")

    def _run(self, step: closure.Execute) -> None:
        target, namespace = step.target, self.namespaces[step.target.path]
        place = f"{target.path}:{target.node.lineno}"
        try:
            exec(step.trimmed.code, namespace)
        except Exception as error:
            if target is self.planned.target:
                subject = self.planned.tree.subject
                raise LiftError(
                    f"{subject}: {target.name} ({place}) cannot run outside vLLM: {str(error) or type(error).__name__}"
                ) from error
            reason = f"{place} failed: {type(error).__name__}: {error}"
            namespace[target.name] = self._placeholder(target.name, reason)
        if target is self.planned.target:
            owned = namespace[target.owner].__dict__ if target.owner else namespace
            self.function = owned[target.name]

    def _placeholder(self, name: str, reason: str) -> Placeholder:
        self.missing[name] = reason
        return Placeholder(name, reason)


def _namespace(path: str, source: Source) -> dict[str, Any]:
    module = path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
    return {"__name__": f"lifted.{module}", "__file__": str(source.file)}


def _imported(target: Import) -> Any:
    module = import_module(target.module)
    if target.attribute and not hasattr(module, target.attribute):
        return import_module(f"{target.module}.{target.attribute}")
    return getattr(module, target.attribute) if target.attribute else module
