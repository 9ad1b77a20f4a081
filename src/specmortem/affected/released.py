"""What the probes found on released vLLM: data/audit.csv, and audit-cuda.csv for what a CPU cannot judge."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Literal, get_args

from packaging.version import Version

from specmortem.errors import BadInputError, UnavailableError
from specmortem.facts import find_root
from specmortem.incident import all_incidents
from specmortem.verdict import Results, Row

Status = Literal["fault", "clean", "not-present", "not-judged"]
AUDIT, ON_GPU = Path("data/audit.csv"), Path("data/audit-cuda.csv")
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

    def of(self, cause: str, release: str) -> KnownVerdict:
        """The verdict; `not-judged` for a release or a cause that has none."""
        return self.verdicts.get((cause, release)) or KnownVerdict(ABSENT, "no probe ran on it")

    def check(self, rows: Iterable[Row], source: str) -> None:
        """Raises BadInputError for a row of a run that contradicts the audit."""
        for row in rows:
            known = self.of(row.cause, row.subject.removeprefix(RELEASE))
            if row.outcome in ("fault", "clean") and _contradict(known.status, row.outcome):
                raise BadInputError(
                    f"{source} says {row.outcome} of {row.cause} on {row.subject}, {known.source} says "
                    f"{known.status}; judge it again: specmortem audit {row.subject} --cause {row.cause}"
                )


def _contradict(known: Status, outcome: str) -> bool:
    return known in ("fault", "clean") and known != outcome


@cache
def released(root: Path | None = None) -> Released:
    """The verdicts of this checkout or wheel; `root` is the folder of the investigations.

    Raises UnavailableError where the audit cannot be read, BadInputError for one that is damaged, and for a run of
    the repository that contradicts it.
    """
    root = root or find_root()
    found, date = _audit(root.parent, AUDIT)
    on_gpu, _ = _audit(root.parent, ON_GPU)
    found |= {key: known for key, known in on_gpu.items() if found.get(key, known).status == "not-judged"}
    book = Released(found, date)
    for path in sorted(root.glob(f"*/{RUNS}")):
        rows = [row for row in Results.load(path).rows if row.subject.startswith(RELEASE)]
        book.check(rows, str(path.relative_to(root.parent)))
    return book


def _audit(folder: Path, name: Path) -> tuple[dict[tuple[str, str], KnownVerdict], str]:
    path = folder / name
    try:
        with path.open(encoding="utf-8", newline="") as stream:
            lines = list(csv.DictReader(stream))
    except OSError as error:
        raise UnavailableError(f"cannot read {path}: {error.strerror or error}") from error
    try:
        found = {(line["cause"], line["version"]): _known(line, name) for line in lines}
        return found, max(line["date"] for line in lines)
    except (KeyError, TypeError, ValueError) as error:
        raise BadInputError(f"{path} is no table of an audit: {error!r}; write it with audit --csv") from None


def _known(line: Mapping[str, str], name: Path) -> KnownVerdict:
    status = line["status"]
    if status not in get_args(Status):
        raise BadInputError(f"{name}: {status!r} is no status; known: {', '.join(get_args(Status))}")
    Version(line["version"])
    return KnownVerdict(status, f"{name} of {line['date']}")  # type: ignore[arg-type]


def judged_causes() -> set[str]:
    """Causes that a probe judges."""
    return {probe.cause for one in all_incidents().values() for probe in one.probes}
