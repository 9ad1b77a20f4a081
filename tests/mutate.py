"""Mutants of a kernel: its source with one guard taken out, as a live kernel of its own."""

import importlib.util
import inspect
from pathlib import Path
from types import ModuleType


def mutant(module: ModuleType, changes: dict[str, str], folder: Path) -> ModuleType:
    """The module with each old text replaced by the new one; every old text must occur exactly once."""
    text = inspect.getsource(module)
    for old, new in changes.items():
        assert text.count(old) == 1, f"{old!r} occurs {text.count(old)} times"
        text = text.replace(old, new)
    path = folder / f"mutant_{module.__name__.rsplit('.', 1)[-1]}.py"
    path.write_text(text)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    loaded = importlib.util.module_from_spec(spec)
    import sys

    sys.modules[path.stem] = loaded
    spec.loader.exec_module(loaded)
    return loaded
