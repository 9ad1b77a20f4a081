"""Small stand-ins for the vLLM names that nearly every file imports."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping
from importlib import import_module
from types import MappingProxyType
from typing import Any, NoReturn

from specmortem.upstream.errors import LiftError

HAS_TRITON = True


def init_logger(name: str) -> logging.Logger:
    """A standard logger with vLLM's `*_once` methods."""
    logger = logging.getLogger(name)
    for level in ("debug", "info", "warning"):
        setattr(logger, f"{level}_once", getattr(logger, level))
    return logger


class _TritonUtils:
    """`vllm.triton_utils` used as a module: the installed Triton's parts."""

    def __getattr__(self, name: str) -> Any:
        from specmortem.upstream.closure import TRITON_NAMES

        if name not in TRITON_NAMES:
            raise AttributeError(f"vllm.triton_utils.{name} is not lifted as a module attribute")
        found = TRITON_NAMES[name]
        module = import_module(found.module)
        return getattr(module, found.attribute) if found.attribute else module


triton_utils = _TritonUtils()


class Stub:
    """Keeps the keyword arguments that it is made with; can be subscripted like a generic class."""

    def __init__(self, *_: Any, **fields: Any) -> None:
        """Positional arguments are dropped."""
        self.__dict__.update(fields)

    def __class_getitem__(cls, _: Any) -> type[Stub]:
        """Itself, whatever the parameter."""
        return cls


def stub(name: str) -> Any:
    """A class of that name, which can be made with any arguments and asked `isinstance`."""
    return type(name, (Stub,), {})


class StandIns(dict[str, Any]):
    """Values for global names of lifted code, and a stub for every other name that it imports from some packages.

    Stubs are made when they are first needed, the same one for a name from then on. Imports of `modules` (dotted
    names), and of `names` from anywhere, are lifted all the same.
    """

    def __init__(
        self,
        given: Mapping[str, Any] = MappingProxyType({}),
        *,
        modules: Collection[str] = (),
        names: Collection[str] = (),
        packages: Collection[str] = ("vllm",),
        make: Callable[[str], Any] = stub,
    ) -> None:
        """`make` gives the stub of a name."""
        super().__init__(given)
        self._make = make
        self._made: dict[str, Any] = {}
        self.rule = tuple(
            f"{word} {each}"
            for word, listed in (("stub", packages), ("module", modules), ("name", names))
            for each in listed
        )

    def __missing__(self, name: str) -> Any:
        """The stub of a name. It is no key: what was stubbed so far does not change what is lifted next."""
        if name not in self._made:
            self._made[name] = self._make(name)
        return self._made[name]


def is_stubbed(module: str, name: str, rule: Collection[str]) -> bool:
    """Whether a rule of StandIns, among names that are provided, has a stub for a name of a module."""
    return (
        f"stub {module.partition('.')[0]}" in rule
        and f"module {module}" not in rule
        and f"name {name}" not in rule
    )


class Placeholder:
    """Stands where something could not be lifted: naming it is harmless, using it raises LiftError."""

    def __init__(self, name: str, reason: str) -> None:
        """`reason` ends the message."""
        self.__dict__.update(_name=name, _reason=reason)

    def __repr__(self) -> str:
        """Name and reason; never raises."""
        return f"<not lifted: {self.__dict__['_name']}: {self.__dict__['_reason']}>"

    def __getattr__(self, attribute: str) -> Any:
        """Raise LiftError, but let Python and Triton ask for special attributes."""
        if attribute.startswith("__") and attribute.endswith("__"):
            raise AttributeError(attribute)
        return _refuse(self)

    __hash__ = object.__hash__


def _refuse(self: Placeholder, *_: Any, **__: Any) -> NoReturn:
    name, reason = self.__dict__["_name"], self.__dict__["_reason"]
    raise LiftError(
        f"the lifted code uses {name}, which was not lifted: {reason}; give a substitute with provide="
    )


_USES = (
    "call getitem setitem iter len bool contains enter setattr index int float mro_entries instancecheck "
    "subclasscheck "
    "eq ne lt le gt ge neg add radd sub rsub mul rmul truediv rtruediv floordiv rfloordiv mod rmod pow rpow "
    "and rand or ror xor rxor lshift rlshift rshift rrshift matmul rmatmul invert abs"
)
for _use in _USES.split():
    setattr(Placeholder, f"__{_use}__", _refuse)
