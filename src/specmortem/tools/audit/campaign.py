"""Random campaigns of the postmortems: the same experiment under many seeds, here or on a cluster.

Every seed is an experiment in a process of its own. Results are kept by seed, so that work which a dying worker took
with it and another one repeats counts once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from specmortem.errors import BadInputError
from specmortem.incident import Campaign, all_incidents
from specmortem.isolation import Arm, ArmResult, keep_supervisors, run_arm, run_arms
from specmortem.judge.work import OnEnd, Workers
from specmortem.statistics import zero_bound
from specmortem.tools.audit.work import Cluster
from specmortem.verdict import DeviceKind

MOST_SEEDS = 1_000_000


@dataclass(frozen=True)
class SeedRun:
    """One seed of a campaign."""

    arm: Arm
    seed: int
    unit: str


@dataclass(frozen=True)
class SeedResult:
    """What one seed gave: how many runs faulted of all; `lost` says why there is no figure."""

    seed: int
    runs: int = 0
    faults: int = 0
    witness: str = ""
    lost: str = ""


@dataclass(frozen=True)
class CampaignResult:
    """A campaign's outcomes, one a seed, in the order of the seeds."""

    cause: str
    subject: str
    unit: str
    outcomes: tuple[SeedResult, ...]

    @property
    def runs(self) -> int:
        """Runs of all seeds."""
        return sum(outcome.runs for outcome in self.outcomes)

    @property
    def faults(self) -> int:
        """Faults of all seeds."""
        return sum(outcome.faults for outcome in self.outcomes)

    @property
    def lost(self) -> tuple[SeedResult, ...]:
        """Seeds without a figure."""
        return tuple(outcome for outcome in self.outcomes if outcome.lost)

    @property
    def upper_bound(self) -> float | None:
        """95 % upper bound of the rate where no run faulted; the runs of a seed are taken as independent."""
        return round(zero_bound(self.runs), 8) if self.runs and not self.faults else None

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
    on_end: OnEnd = lambda: None,
) -> CampaignResult:
    """Run seeds `first` to `first + seeds - 1` of a campaign on `before` or `after`.

    Raises BadInputError for an unknown cause or subject, or a number of seeds that is not 1 to MOST_SEEDS.
    """
    campaign = campaign_of(cause)
    if subject not in ("before", "after"):
        raise BadInputError(f"a campaign runs before or after, not {subject!r}")
    if not 1 <= seeds <= MOST_SEEDS:
        raise BadInputError(f"--seeds is {seeds}; give 1 to {MOST_SEEDS}")
    seed_runs = [
        _seed_run(campaign, cause, subject, seed, device, timeout_s) for seed in range(first, first + seeds)
    ]
    outcomes = _done(seed_runs, workers, on_end)
    return CampaignResult(
        cause, subject, campaign.unit, tuple(sorted(outcomes, key=lambda outcome: outcome.seed))
    )


def _seed_run(
    campaign: Campaign, cause: str, subject: str, seed: int, device: DeviceKind, timeout_s: float
) -> SeedRun:
    kwargs = {campaign.arm: subject, "seed": seed, **campaign.kwargs}
    if campaign.takes_device:
        kwargs["device"] = device
    arm = Arm(campaign.target, kwargs, f"{cause}, seed {seed}", timeout_s, device)
    return SeedRun(arm, seed, campaign.unit)


def _done(seed_runs: Sequence[SeedRun], workers: Workers | None, on_end: OnEnd) -> list[SeedResult]:
    if isinstance(workers, Cluster):
        return workers.map(run_seed, seed_runs, on_end)
    ends = run_arms([one.arm for one in seed_runs], on_end=lambda _: on_end())
    return [_outcome(one, end) for one, end in zip(seed_runs, ends, strict=True)]


def run_seed(one: SeedRun) -> SeedResult:
    """One seed, in an isolated process of this machine; the next one need not start everything anew."""
    keep_supervisors()
    return _outcome(one, run_arm(one.arm))


def _outcome(one: SeedRun, end: ArmResult) -> SeedResult:
    if end.kind != "value":
        return SeedResult(one.seed, lost=f"{end.kind}: {end.message}".splitlines()[0])
    found = end.value
    return SeedResult(one.seed, int(found[one.unit]), int(found["faults"]), str(found.get("witness") or ""))
