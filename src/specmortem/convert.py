"""One way between values and what TOML and JSON hold, for all files of this package.

A `Value` states its file's form: names and order of the keys by its fields, kinds and ranges of what they hold by
their annotations. Nothing else is accepted, and a refusal names the place.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from types import UnionType
from typing import (
    Annotated,
    Any,
    ClassVar,
    Literal,
    Self,
    TypeVar,
    Union,
    get_args,
    get_origin,
    get_type_hints,
)

import msgspec

from specmortem.errors import BadInputError

Text = Annotated[str, msgspec.Meta(min_length=1)]
Count = Annotated[int, msgspec.Meta(ge=0)]
Amount = Annotated[float, msgspec.Meta(ge=0)]
Path = Sequence[str | int]  # keys and positions, from the outermost
T = TypeVar("T")


class Value(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A value that cannot change and has a form in TOML and JSON.

    `younger` are fields that files of older versions lack.
    """

    younger: ClassVar[frozenset[str]] = frozenset()

    def as_dict(self) -> dict[str, Any]:
        """JSON form, in the order of the fields."""
        made: dict[str, Any] = msgspec.to_builtins(self)
        return made

    @classmethod
    def from_dict(cls, data: Any, source: str = "") -> Self:
        """Inverse of `as_dict`: a field may be absent where `as_dict` or an older version leaves it out.

        Raises BadInputError that names `source` and the first field that is wrong.
        """

        def place(path: Path) -> str:
            return _slashed(source, path)

        made = build(cls, data, place)
        _check_whole(made, data, (), place)
        return made

    def replace(self, **changes: Any) -> Self:
        """The same value with other fields, checked as a new one is."""
        return msgspec.structs.replace(self, **changes)


def build(kind: type[T], data: Any, place: Callable[[Path], str]) -> T:
    """A `kind` of what a file holds; `place` tells where a path is, as a reader of the file looks for it.

    A class that msgspec does not know is called with what stands for it. Raises BadInputError with the place.
    """
    try:
        made = msgspec.convert(data, kind, dec_hook=lambda custom, given: custom(given))
        _tagged(kind, data)
    except msgspec.ValidationError as error:
        message, _, at = str(error).partition(" - at `$")
        path = _path(kind, data, at)
        raise BadInputError(place(path) + _explained(message, kind, data, path)) from error
    return made


def _check_whole(made: Any, data: Any, path: Path, place: Callable[[Path], str]) -> None:
    """Refuses a file that leaves to a default what its writer writes out."""
    if isinstance(made, tuple):
        for number, (value, given) in enumerate(zip(made, data, strict=True)):
            _check_whole(value, given, [*path, number], place)
    if not isinstance(made, Value):
        return
    written = made.__struct_fields__
    if isinstance(data, list):
        data = dict(zip(written, data, strict=False))
    optional = written if made.__struct_config__.omit_defaults else made.younger
    for name in written:
        if name in data:
            _check_whole(getattr(made, name), data[name], [*path, name], place)
        elif name not in optional:
            raise BadInputError(f"{place(path)}: {name} is missing")


def _tagged(kind: Any, data: Any) -> None:
    """Refuses a table without the number of its form, which msgspec asks for in unions alone."""
    if (name := kind.__struct_config__.tag_field) and name not in data:
        raise msgspec.ValidationError(f"Object missing required field `{name}`")


def _explained(message: str, kind: Any, data: Any, path: Path) -> str:
    """What msgspec says of the value at `path`, with what would be right."""
    kind, value = _at(kind, data, path)
    if name := re.fullmatch(r"Object missing required field `(\w+)`", message):
        return f": {name[1]} is missing"
    if name := re.fullmatch(r"Object contains unknown field `(.*)`", message, re.DOTALL):
        return f": unknown key {name[1]!r}; known: {', '.join(kind.__struct_fields__)}"
    if message.startswith("Invalid enum value"):
        return f" {value!r} is not one of {', '.join(map(str, _allowed(kind)))}"
    if message == "Expected `str` of length >= 1" or message.startswith("Expected `str`, got"):
        return f" must be text that is not empty, got {value!r}"
    if message.startswith("Expected `array`"):
        return f" must be a list, got {value!r}"
    return f": {message}"


def _path(kind: Any, data: Any, at: str) -> Path:
    """The path that msgspec writes as `at`; it leaves keys of mappings out, which are looked for here."""
    path: list[str | int] = []
    for name, number in re.findall(r"\.(\w+)|\[(\d+|\.\.\.)\]", at):
        if number == "...":
            of, table = _at(kind, data, path)
            name, number = next(key for key, held in table.items() if not _fits(get_args(of)[1], held)), ""
        path.append(int(number) if number else name)
    return path


def _fits(kind: Any, value: Any) -> bool:
    try:
        msgspec.convert(value, kind)
    except msgspec.ValidationError:
        return False
    return True


def _at(kind: Any, data: Any, path: Path) -> tuple[Any, Any]:
    """The type and the value at `path`."""
    for part in path:
        data = data[part] if isinstance(part, int) or part in data else None
        if hasattr(kind, "__struct_fields__"):
            kind = get_type_hints(kind, include_extras=True).get(str(part), Any)
        else:
            kind = get_args(kind)[0 if isinstance(part, int) else 1]
        if get_origin(kind) in (UnionType, Union):
            kind = get_args(kind)[0]
    return kind, data


def _allowed(kind: Any) -> Sequence[Any]:
    return get_args(kind) if get_origin(kind) is Literal else [each.value for each in kind]


def _slashed(source: str, path: Path) -> str:
    where = "/".join(map(str, path)) or "top level"
    return f"{source}: {where}" if source else where
