"""What this machine can run, and why not the rest."""

from __future__ import annotations

import os
import platform
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Literal

from packaging.specifiers import SpecifierSet

from specmortem.errors import SpecmortemError

Word = Literal["ok", "limited", "missing"]
Answer = tuple[Word, str]  # of a check: the word, and what it means
ACCEPTED: Mapping[str, str] = {"python": ">=3.11", "torch": ">=2.11", "triton": ">=3.6"}
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
INDEX_TIMEOUT_S = 5.0
FREE_BYTES = 1 << 30


@dataclass(frozen=True)
class Check:
    """One line of the examination; `required` ones must be ok for the CPU experiments to run."""

    name: str
    word: Word
    meaning: str
    required: bool = False


def examine() -> list[Check]:
    """All checks, in the order in which a reader wants them."""
    return [_check(name, look) for name, look in CHECKS.items()]


def _check(name: str, look: Callable[[], Answer]) -> Check:
    """A check that cannot even be made counts as missing, with the reason."""
    try:
        word, meaning = look()
    except (SpecmortemError, ImportError, OSError, RuntimeError) as error:
        word, meaning = "missing", f"{type(error).__name__}: {error}"
    return Check(name, word, meaning, name in REQUIRED)


def _version(name: str, found: str | None) -> Answer:
    """Whether a version lies in the accepted range."""
    if found is None:
        return "missing", f"not installed; needs {ACCEPTED[name]}"
    if not SpecifierSet(ACCEPTED[name]).contains(found, prereleases=True):
        return "missing", f"{found} is outside {ACCEPTED[name]}"
    return "ok", f"{found}, accepted {ACCEPTED[name]}"


def _installed(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _interpreter() -> Answer:
    from specmortem.detect import bounds

    if reason := bounds.unsupported():
        return "missing", f"{reason}; kernels cannot be watched, probes say not-judged"
    return "ok", "kernels can be watched on the CPU"


def _cuda() -> Answer:
    import torch

    without = "the simulated device runs; causes that need a GPU stay not judged"
    if torch.version.cuda is None:
        return "missing", f"this torch is built without CUDA; {without}"
    if not torch.cuda.is_available():
        return "missing", f"torch finds no usable GPU or driver; {without}"
    return "ok", f"{torch.cuda.get_device_name(0)}, CUDA {torch.version.cuda}"


def _tool(*programs: str, having: str, lacking: str) -> Answer:
    """Whether one of some programs is on PATH."""
    found = next(filter(None, map(shutil.which, programs)), None)
    return ("ok", f"{found}: {having}") if found else ("missing", f"not on PATH: {lacking}")


def _package(name: str, having: str, lacking: str) -> Answer:
    """Whether an optional package is installed."""
    found = _installed(name)
    return ("ok", f"{found}: {having}") if found else ("missing", f"not installed: {lacking}")


def _index() -> Answer:
    from specmortem.upstream import index

    address = index.endpoint()
    with index.session() as session:
        answer = session.head(f"{address}/vllm/", timeout=INDEX_TIMEOUT_S, allow_redirects=True)
    if answer.ok:
        return "ok", f"{index.redacted(address)}: releases can be fetched"
    return "missing", f"{index.redacted(address)} answers {answer.status_code} for vllm"


def _cache() -> Answer:
    folder = _cache_folder()
    if os.access(_existing(folder), os.W_OK):
        return "ok", f"{folder} can be written"
    return "missing", f"{folder} cannot be written; set SPECMORTEM_CACHE to one that can"


def _disk() -> Answer:
    free = shutil.disk_usage(_existing(_cache_folder())).free
    word: Word = "ok" if free >= FREE_BYTES else "limited"
    return word, f"{free / 2**30:.1f} GiB free for the cache; 1 GiB is comfortable"


def _cache_folder() -> Path:
    from specmortem.upstream.cache import default_cache

    return default_cache()


def _existing(folder: Path) -> Path:
    """The folder, or its nearest parent that exists."""
    return next(parent for parent in (folder, *folder.absolute().parents) if parent.exists())


REQUIRED = frozenset({*ACCEPTED, "interpreter hooks"})
CHECKS: Mapping[str, Callable[[], Answer]] = {
    "python": lambda: _version("python", platform.python_version()),
    "torch": lambda: _version("torch", _installed("torch")),
    "triton": lambda: _version("triton", _installed("triton")),
    "interpreter hooks": _interpreter,
    "CUDA device": _cuda,
    "compute-sanitizer": lambda: _tool(
        "compute-sanitizer", having="sanitizer arms run", lacking="sanitizer arms are skipped"
    ),
    "package index": _index,
    "cache folder": _cache,
    "disk space": _disk,
    "vllm": lambda: _package(
        "vllm",
        having="the subject 'installed' can be judged",
        lacking="the subject 'installed' is not judged",
    ),
    "browser": lambda: _tool(
        *BROWSERS,
        having="pages can be tested and printed",
        lacking="browser tests are skipped; pages still render",
    ),
    "jupyterlab": lambda: _package(
        "jupyterlab",
        having="notebooks can be opened",
        lacking="install specmortem[lab] to open notebooks; runs do not need it",
    ),
}
