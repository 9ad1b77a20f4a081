"""What the probes found on released vLLM: data/audit.csv, and audit-cuda.csv for what a CPU cannot judge."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from functools import cache
from pathlib import Path
from typing import Literal, get_args

from packaging.version import Version

from specmortem.errors import BadInputError, UnavailableError
from specmortem.facts import find_root
from specmortem.incident import causes
from specmortem.verdict import Results, Row

Status = Literal["fault", "clean", "not-present", "not-judged"]
AUDIT, ON_GPU = Path("data/audit.csv"), Path("data/audit-cuda.csv")
COLUMNS = {"cause", "version", "status", "date"}
RUNS = "runs/*/results.json"
RELEASE = "vllm=="
ABSENT: Status = "not-judged"


@dataclass(frozen=True)
class KnownVerdict:
    """What is known of a cause on a release: the status, and the file that says so."""

    status: Status
    source: str


@dataclass(frozen=True)
class Released:
    """Verdicts by (cause, release), of the releases that were judged; `date` is that of the audit."""

    verdicts: Mapping[tuple[str, str], KnownVerdict]
    date: str

    @property
    def releases(self) -> list[str]:
        """Releases that were judged, oldest first."""
        return sorted({release for _, release in self.verdicts}, key=Version)

    @property
    def incidents(self) -> frozenset[str]:
        """Incidents of which some cause was judged on some release; those of others have no such record."""
        judged, known = {cause for cause, _ in self.verdicts}, causes()
        return frozenset(known[cause].slug for cause in judged & known.keys())

    def of(self, cause: str, release: str) -> KnownVerdict:
        """The verdict; `not-judged` for a release or a cause that has none."""
        return self.verdicts.get((cause, release)) or KnownVerdict(ABSENT, "no probe ran on it")

    def check(self, rows: Iterable[Row], source: str) -> None:
        """Raises BadInputError for a row of a run that contradicts the audit."""
        for row in rows:
            release = row.subject.removeprefix(RELEASE)
            _agree(row.cause, release, self.of(row.cause, release), KnownVerdict(row.outcome, source))


def _agree(cause: str, release: str, known: KnownVerdict, other: KnownVerdict) -> None:
    """Raises BadInputError where one says that there is a fault, and the other that there is none."""
    said = {known.status, other.status}
    if "fault" in said and said & {"clean", "not-present"}:
        subject = f"{RELEASE}{release}"
        raise BadInputError(
            f"{other.source} says {other.status} of {cause} on {subject}, {known.source} says "
            f"{known.status}; judge it again: specmortem audit {subject} --cause {cause}"
        )


@cache
def released(root: Path | None = None) -> Released:
    """The verdicts of this checkout or wheel; `root` is the folder of the investigations.

    A verdict of the GPU counts where the CPU could not judge. Raises UnavailableError where the audit cannot be read,
    BadInputError for one that is damaged, and for a GPU or a run of the repository that contradicts it.
    """
    root = root or find_root()
    found, made = _audit(root.parent, AUDIT)
    on_gpu, _ = _audit(root.parent, ON_GPU)
    for key, known in on_gpu.items():
        if found.setdefault(key, known).status == "not-judged":
            found[key] = known
        _agree(*key, found[key], known)
    book = Released(found, made)
    for path in sorted(root.glob(f"*/{RUNS}")):
        rows = [row for row in Results.load(path).rows if row.subject.startswith(RELEASE)]
        book.check(rows, str(path.relative_to(root.parent)))
    return book


def _audit(folder: Path, name: Path) -> tuple[dict[tuple[str, str], KnownVerdict], str]:
    """The verdicts of a table, and the newest of its dates."""
    path = folder / name
    try:
        with path.open(encoding="utf-8", newline="") as stream:
            return _verdicts(list(csv.DictReader(stream)), name)
    except OSError as error:
        raise UnavailableError(f"cannot read {path}: {error.strerror or error}") from error
    except (csv.Error, TypeError, ValueError) as error:
        raise BadInputError(f"{path} is no table of an audit: {error}; write it with audit --csv") from None


def _verdicts(
    lines: Sequence[Mapping[str, str]], name: Path
) -> tuple[dict[tuple[str, str], KnownVerdict], str]:
    if missing := COLUMNS - set(lines[0] if lines else ()):
        raise ValueError(f"it has no {', '.join(sorted(missing))}")
    found: dict[tuple[str, str], KnownVerdict] = {}
    for line in lines:
        known = _known(line, name)
        if found.setdefault((line["cause"], line["version"]), known) != known:
            raise ValueError(f"{line['cause']} on {line['version']} stands twice, and not alike")
    return found, max(line["date"] for line in lines)


def _known(line: Mapping[str, str], name: Path) -> KnownVerdict:
    """The verdict of a row. Raises ValueError, or TypeError for a row that is cut, where it is none."""
    status = line["status"]
    if status not in get_args(Status):
        raise ValueError(f"{status!r} is no status; known: {', '.join(get_args(Status))}")
    Version(line["version"])
    date.fromisoformat(line["date"])
    return KnownVerdict(status, f"{name} of {line['date']}")  # type: ignore[arg-type]
