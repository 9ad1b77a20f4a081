"""Random campaigns of the postmortems: the same experiment under many seeds, here or on a cluster.

Every seed is an experiment in a process of its own. Results are kept by seed, so that work which a dying worker took
with it and another one repeats counts once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from specmortem.errors import BadInputError
from specmortem.incident import Campaign, all_incidents
from specmortem.isolation import Arm, ArmResult, keep_supervisors, run_arm, run_arms
from specmortem.tools.audit.work import Cluster, Workers
from specmortem.verdict import DeviceKind

MOST_SEEDS = 1_000_000


@dataclass(frozen=True)
class Piece:
    """One seed of a campaign."""

    arm: Arm
    seed: int
    unit: str


@dataclass(frozen=True)
class Outcome:
    """What one seed gave: how many runs faulted of all; `lost` says why there is no figure."""

    seed: int
    runs: int = 0
    faults: int = 0
    witness: str = ""
    lost: str = ""


@dataclass(frozen=True)
class Tally:
    """A campaign's outcomes, one a seed, in the order of the seeds."""

    cause: str
    subject: str
    unit: str
    outcomes: tuple[Outcome, ...]

    @property
    def runs(self) -> int:
        """Runs of all seeds."""
        return sum(outcome.runs for outcome in self.outcomes)

    @property
    def faults(self) -> int:
        """Faults of all seeds."""
        return sum(outcome.faults for outcome in self.outcomes)

    @property
    def lost(self) -> tuple[Outcome, ...]:
        """Seeds without a figure."""
        return tuple(outcome for outcome in self.outcomes if outcome.lost)

    @property
    def upper_bound(self) -> float | None:
        """95 % upper bound of the rate where no run faulted; the runs of a seed are taken as independent."""
        return round(1 - 0.05 ** (1 / self.runs), 8) if self.runs and not self.faults else None

    def as_dict(self) -> dict[str, Any]:
        """JSON form."""
        return {
            "cause": self.cause,
            "subject": self.subject,
            "unit": self.unit,
            "seeds": [outcome.seed for outcome in self.outcomes],
            "runs": self.runs,
            "faults": self.faults,
            "upper_bound_95": self.upper_bound,
            "witness": next((o.witness for o in self.outcomes if o.witness), ""),
            "lost": {str(o.seed): o.lost for o in self.lost},
        }


def campaign_of(cause: str) -> Campaign:
    """The campaign of a cause.

    Raises BadInputError that lists the causes with one.
    """
    known = {cause: one for each in all_incidents().values() for cause, one in each.campaigns.items()}
    if cause not in known:
        raise BadInputError(f"no random campaign for {cause!r}; there are: {', '.join(known)}")
    return known[cause]


def run(
    cause: str,
    seeds: int,
    *,
    subject: str = "before",
    first: int = 0,
    device: DeviceKind = "sim",
    workers: Workers | None = None,
    timeout_s: float = 600,
    on_end: Callable[[], None] = lambda: None,
) -> Tally:
    """Run seeds `first` to `first + seeds - 1` of a campaign on `before` or `after`.

    Raises BadInputError for an unknown cause or subject, or a number of seeds that is not 1 to MOST_SEEDS.
    """
    campaign = campaign_of(cause)
    if subject not in ("before", "after"):
        raise BadInputError(f"a campaign runs before or after, not {subject!r}")
    if not 1 <= seeds <= MOST_SEEDS:
        raise BadInputError(f"--seeds is {seeds}; give 1 to {MOST_SEEDS}")
    pieces = [
        _piece(campaign, cause, subject, seed, device, timeout_s) for seed in range(first, first + seeds)
    ]
    outcomes = _done(pieces, workers, on_end)
    return Tally(cause, subject, campaign.unit, tuple(sorted(outcomes, key=lambda outcome: outcome.seed)))


def _piece(
    campaign: Campaign, cause: str, subject: str, seed: int, device: DeviceKind, timeout_s: float
) -> Piece:
    kwargs = {campaign.arm: subject, "seed": seed, **campaign.kwargs}
    if campaign.takes_device:
        kwargs["device"] = device
    arm = Arm(campaign.target, kwargs, f"{cause}, seed {seed}", timeout_s, device)
    return Piece(arm, seed, campaign.unit)


def _done(pieces: Sequence[Piece], workers: Workers | None, on_end: Callable[[], None]) -> list[Outcome]:
    if isinstance(workers, Cluster):
        return workers.map(run_piece, pieces, on_end)
    ends = run_arms([piece.arm for piece in pieces], on_end=lambda _: on_end())
    return [_outcome(piece, end) for piece, end in zip(pieces, ends, strict=True)]


def run_piece(piece: Piece) -> Outcome:
    """One seed, in an isolated process of this machine; the next one need not start everything anew."""
    keep_supervisors()
    return _outcome(piece, run_arm(piece.arm))


def _outcome(piece: Piece, end: ArmResult) -> Outcome:
    if end.kind != "value":
        return Outcome(piece.seed, lost=f"{end.kind}: {end.message}".splitlines()[0])
    found = end.value
    return Outcome(piece.seed, int(found[piece.unit]), int(found["faults"]), str(found.get("witness") or ""))
