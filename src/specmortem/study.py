"""What the studies of all incidents share: rows from experiments and probes, and the tables over releases."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pandas as pd

from specmortem import device as devices
from specmortem import incident
from specmortem import judge as probes
from specmortem import statistics as exact
from specmortem.errors import UnavailableError
from specmortem.isolation import Arm, ArmResult, run_arm, run_arms, target_of
from specmortem.verdict import DeviceInfo, DeviceKind, Evidence, Outcome, Row

RELEASES = (
    *("0.19.1", "0.20.1", "0.20.2", "0.21.0", "0.22.0", "0.22.1", "0.23.0", "0.24.0", "0.25.1"),
    *("0.26.0", "0.27.1", "0.28.0", "0.29.0", "0.30.0", "0.31.0", "0.32.0", "0.33.0"),
)
DIED = ("illegal-address", "device-assert", "cuda-error")


def info(device: str) -> dict[str, Any]:
    """Kind, name and driver of a device."""
    return devices.open(device).info.as_dict()


def device_info(device: str) -> DeviceInfo:
    """The device that `auto`, `sim` or `cuda` stands for here, opened in a process of its own.

    Raises UnavailableError when a CUDA device is asked for and cannot be opened.
    """
    kind = probes.device_kind(device)
    ended = run_arm(Arm(f"{__name__}:info", {"device": kind}, "device", 120, kind))
    if ended.kind != "value":
        raise UnavailableError(f"device {device!r} cannot be opened: {ended.message}; give device=sim")
    return DeviceInfo(**ended.value)


def gpus(kind: DeviceKind) -> int:
    """How many GPUs an experiment may use."""
    import torch

    return torch.cuda.device_count() if kind == "cuda" else 0


def causes(slug: str) -> list[str]:
    """Causes of an incident that a probe judges."""
    return [probe.cause for probe in incident.get(slug).probes]


def probe_rows(slug: str, subjects: Sequence[str], device: DeviceKind) -> list[Row]:
    """One row a cause and subject; this package's arms are named after themselves, releases `released`."""
    pairs = [(cause, subject) for cause in causes(slug) for subject in subjects]
    verdicts = probes.judge_many(pairs, device=device)
    return [
        Row.of(verdict, cause=cause, subject=subject, arm=subject if "==" not in subject else "released")
        for (cause, subject), verdict in zip(pairs, verdicts, strict=True)
    ]


def row(end: ArmResult, cause: str, arm: str, subject: str, seed: int | None) -> Row:
    """A row from one experiment: its own account (`effect`, `why`), or the typed end of its process."""
    if end.kind == "value":
        effect, why = str(end.value["effect"]), str(end.value.get("why", ""))
        detail = {key: value for key, value in end.value.items() if key != "why"}
    elif end.kind in DIED:
        effect, why, detail = end.kind, end.message.splitlines()[0], {"effect": end.kind}
    else:
        evidence = Evidence(reason=f"{end.kind}: {end.message}", detail={"stderr": end.stderr_tail[-400:]})
        return Row(cause, arm, subject, "not-judged", 0, 0, seed, evidence)
    outcome: Outcome = "clean" if effect == "clean" else "fault"
    evidence = Evidence(observed=effect, reason=why, detail={**detail, "effect": effect})
    return Row(cause, arm, subject, outcome, 1, int(outcome == "fault"), seed, evidence)


@dataclass(frozen=True)
class Cell:
    """One experiment of a grid, and the row that it fills: `target(**kwargs)`, run in a process of its own."""

    cause: str
    arm: str
    subject: str
    target: Callable[..., Any] | str
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    seed: int | None = None
    device: DeviceKind = "sim"
    timeout_s: float = 300
    env: Mapping[str, str] = field(default_factory=dict)

    @property
    def experiment(self) -> Arm:
        """What `specmortem.isolation` runs for it."""
        name = f"{self.cause}, {self.arm}, {self.subject}"
        return Arm(target_of(self.target), dict(self.kwargs), name, self.timeout_s, self.device, self.env)


Read = Callable[[ArmResult, Cell], Row]


def effect(end: ArmResult, cell: Cell) -> Row:
    """The row of an experiment that gives its own account, `effect` and `why`."""
    return row(end, cell.cause, cell.arm, cell.subject, cell.seed)


def counted(unit: str, faults: str = "faults") -> Read:
    """Rows of experiments that return how many `unit` they ran, and how many of them faulted."""

    def read(end: ArmResult, cell: Cell) -> Row:
        if end.kind != "value":
            return effect(end, cell)
        runs, wrong = int(end.value[unit]), int(end.value[faults])
        evidence = Evidence(observed=f"{wrong:,} of {runs:,} {unit}", detail={**end.value, "unit": unit})
        outcome: Outcome = "fault" if wrong else "clean"
        return Row(cell.cause, cell.arm, cell.subject, outcome, runs, wrong, cell.seed, evidence)

    return read


def grid(cells: Iterable[Cell], read: Read = effect, *, cuda_parallel: int = 1) -> list[Row]:
    """The rows of experiments, in the order of `cells`; each runs in a process of its own.

    `cuda_parallel` experiments share a GPU: more than one only where neither timing nor memory is the subject.
    """
    cells = list(cells)
    ended = run_arms([cell.experiment for cell in cells], cuda_parallel=cuda_parallel)
    return [read(end, cell) for end, cell in zip(ended, cells, strict=True)]


def table(rows: Iterable[Row], **columns: Callable[[Row], Any]) -> pd.DataFrame:
    """A line a row; underscores in the names of columns are shown as spaces."""
    shown = {name.replace("_", " "): of for name, of in columns.items()}
    return pd.DataFrame([{name: of(row) for name, of in shown.items()} for row in rows], columns=list(shown))


def pivot(
    rows: Iterable[Row], line: Callable[[Row], str], column: Callable[[Row], str], cell: Callable[[Row], Any]
) -> pd.DataFrame:
    """Lines and columns in the order in which rows name them; a cell that no row names is blank."""
    found: dict[str, dict[str, Any]] = {}
    for row in rows:
        found.setdefault(line(row), {})[column(row)] = cell(row)
    return pd.DataFrame.from_dict(found, orient="index").fillna("")


def total(
    ended: Sequence[ArmResult],
    cause: str,
    arm: str,
    subject: str,
    seed: int | None,
    unit: str,
    sums: Sequence[str] = (),
) -> Row:
    """One row from the parts of a long run, with the keys in `sums` added up in its detail.

    A part that did not return a value makes it a fault or not judged.
    """
    bad = next((end for end in ended if end.kind != "value"), None)
    if bad is not None:
        return row(bad, cause, arm, subject, seed)
    runs, faults = (sum(int(end.value[key]) for end in ended) for key in (unit, "faults"))
    witness = next((str(end.value["witness"]) for end in ended if end.value.get("witness")), "")
    added = {key: sum(int(end.value[key]) for end in ended) for key in sums}
    detail = {"unit": unit, "upper_bound_95": upper_bound(runs, faults), **added}
    return Row(
        cause,
        arm,
        subject,
        "fault" if faults else "clean",
        runs,
        faults,
        seed,
        Evidence(witness=witness, detail=detail),
    )


def upper_bound(runs: int, faults: int) -> float | None:
    """95 % upper bound of the rate after 0 faults in `runs` independent runs; None when there were faults."""
    return round(exact.zero_bound(runs), 8) if runs and not faults else None


def release_table(rows: Sequence[Row]) -> pd.DataFrame:
    """Causes x releases, each cell the outcome."""
    frame = pd.DataFrame(
        [(r.cause, r.subject.removeprefix("vllm=="), r.outcome) for r in rows if "==" in r.subject]
    )
    return frame.pivot(index=0, columns=1, values=2).rename_axis("cause").rename_axis(None, axis=1)


def body_table(rows: Sequence[Row]) -> pd.DataFrame:
    """Which releases have the same body of each judged function."""
    found: dict[tuple[str, str], list[str]] = {}
    for one in rows:
        for function, body in dict(one.evidence.detail.get("hashes", {})).items():
            releases = found.setdefault((function, body), [])
            release = one.subject.removeprefix("vllm==")
            if release not in releases:
                releases.append(release)
    data: list[dict[str, Any]] = [
        {"function": f, "body": body, "releases": ", ".join(releases)}
        for (f, body), releases in sorted(found.items())
    ]
    return pd.DataFrame(data)
