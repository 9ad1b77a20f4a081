"""Parameters of a notebook: what it declares, and what the command line may set."""

from __future__ import annotations

import ast
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from specmortem.errors import BadInputError, UnavailableError
from specmortem.report.html import assignments, read_notebook

RESERVED = ("device", "quick", "results_path", "results_dir")


def declared_parameters(notebook: Path) -> dict[str, str]:
    """Parameters of a notebook, the assignments of its cell tagged `parameters`, with defaults as written.

    Raises UnavailableError when there is no such notebook, BadInputError when it or the cell is malformed.
    """
    if not notebook.exists():
        raise UnavailableError(f"the notebook {notebook.name} is missing from {notebook.parent}")
    cells = read_notebook(notebook).cells
    source = next((c.source for c in cells if "parameters" in c.metadata.get("tags", [])), "")
    try:
        return dict(assignments(source))
    except SyntaxError as error:
        raise BadInputError(
            f"{notebook.name}: the cell tagged 'parameters' is not Python: {error}"
        ) from error


def chosen_parameters(
    slug: str, params: Mapping[str, str], declared: Mapping[str, str], *, lenient: bool = False
) -> dict[str, Any]:
    """The user's parameters, checked and converted; a lenient notebook takes only those it declares.

    Raises BadInputError naming the known ones, or the type that is asked for.
    """
    known = [name for name in declared if name not in RESERVED]
    for name in params:
        if name in RESERVED:
            raise BadInputError(f"parameter {name} is set by --device, --quick or --out, not by -p")
        if name not in declared and not lenient:
            raise BadInputError(f"{slug} has no parameter {name!r}; known: {', '.join(known) or 'none'}")
    return {
        name: parse_value(name, text, declared[name]) for name, text in params.items() if name in declared
    }


def parse_value(name: str, text: str, default: str) -> Any:
    """A parameter given as JSON or plain text, of the type of the notebook's `default` (as written there).

    Raises BadInputError when the type does not fit.
    """
    try:
        like = ast.literal_eval(default)
    except (ValueError, SyntaxError):
        like = None
    value = _json_or_text(text)
    if isinstance(like, str):
        return value if isinstance(value, str) else text
    if like is None or _fits(value, like):
        return float(value) if isinstance(like, float) else value
    kind = "list" if isinstance(like, tuple) else type(like).__name__
    raise BadInputError(f"parameter {name}={text} is not of the type {kind} of its default {default}")


def _json_or_text(text: str) -> Any:
    try:
        return json.loads({"True": "true", "False": "false", "None": "null"}.get(text, text))
    except ValueError:
        return text


def _fits(value: Any, like: Any) -> bool:
    """Whether `value` may stand for `like`; a whole number may stand for a float, a list for a tuple."""
    if isinstance(value, bool) or isinstance(like, bool):
        return isinstance(value, bool) and isinstance(like, bool)
    if isinstance(like, float):
        return isinstance(value, int | float)
    return isinstance(value, list if isinstance(like, tuple) else type(like))
