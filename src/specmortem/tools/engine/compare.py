"""Arms beside each other: rates with exact intervals, and what a difference, or its absence, amounts to.

What is counted is a *run*, a repetition of the workload: it faults or not, and when it ends whole it has a damaged
answer or none. Damage comes in bursts, so that requests of a run are no independent trials; how many there were is
told, without a p. Runs of one engine start share their process; a page that shows their p-values says so.
"""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median

from specmortem import statistics as exact
from specmortem.tools.engine.result import ArmRuns, Counts, EngineResults

SIGNIFICANT = 0.05
ENDS_SHOWN = 120  # characters
CAVEAT = (
    "The unit is the run, a repetition of the workload. Two-sided intervals are Clopper-Pearson, 95%; for a count of "
    "zero the bound is one-sided, 95%. p is of Fisher's exact test, two-sided, and adjusted over the pairs for each "
    "measure (Holm). Both take runs for independent trials; runs of one engine start share a process. Wrong answers "
    "and the like are judged in runs that ended whole, at temperature 0 alone."
)


@dataclass(frozen=True)
class Measure:
    """What is counted in runs, and words for a page; by counts of requests that were `tried` and that `shown` it.

    Faults are of runs and have neither.
    """

    name: str
    said: str
    tried: str = ""
    shown: str = ""

    def of(self, counts: Counts) -> tuple[int, int]:
        """Requests that showed it, of those that could."""
        return getattr(counts, self.shown), getattr(counts, self.tried)


@dataclass(frozen=True)
class Rate:
    """So many of so many."""

    events: int
    trials: int

    def __str__(self) -> str:
        """With the exact interval (Clopper-Pearson, 95%), for example `3 / 12 (5.5% to 57%)`.

        For a count of zero with what it allows, one-sided.
        """
        if not self.trials:
            return "not tried"
        if not self.events:
            return f"0 / {self.trials:,} (below {_percent(exact.zero_bound(self.trials))})"
        low, high = exact.clopper_pearson(self.events, self.trials)
        return f"{self.events:,} / {self.trials:,} ({_percent(low)} to {_percent(high)})"


MEASURES = (
    Measure("faults", "runs that faulted or hung"),
    Measure("wrong", "runs with a token that is not the answer's", "judged", "wrong"),
    Measure(
        "unlike plain",
        "runs with an answer unlike the same engine's without speculation",
        "compared",
        "differs",
    ),
    Measure("early ends", "runs with an answer that ended early", "judged", "early"),
    Measure("loops", "runs with an answer that ended in a loop", "judged", "ends_in_loop"),
)


def rate(arm: ArmRuns, measure: Measure) -> Rate:
    """Of an arm, over its runs; no trial where the arm is not judged."""
    if arm.not_judged:
        return Rate(0, 0)
    if not measure.shown:
        return Rate(sum(run.outcome != "whole" for run in arm.runs), len(arm.runs))
    counted = [measure.of(run.counts) for run in arm.runs if run.outcome == "whole"]
    judged = [shown for shown, tried in counted if tried]
    return Rate(sum(shown > 0 for shown in judged), len(judged))


def requests(arm: ArmRuns, measure: Measure) -> tuple[int, int] | None:
    """Requests that showed it, of those judged, over all runs; None for faults, which are of runs."""
    if not measure.shown:
        return None
    counted = [measure.of(run.counts) for run in arm.runs]
    return sum(shown for shown, _ in counted), sum(tried for _, tried in counted)


@dataclass(frozen=True)
class Comparison:
    """One measure of two arms that differ in one variable.

    `reason` says why it is not judged. `adjusted` is `p` over all pairs of this measure (Holm).
    """

    left: str
    right: str
    variable: str
    measure: Measure
    rates: tuple[Rate, Rate]
    reason: str = ""
    adjusted: float | None = None

    @property
    def p(self) -> float | None:
        """Fisher's exact test, two-sided; None where an arm has no trial."""
        left, right = self.rates
        if not (left.trials and right.trials):
            return None
        return exact.fisher(left.events, left.trials, right.events, right.trials)

    @property
    def said(self) -> str:
        """What it amounts to, in a sentence."""
        left, right = self.rates
        if self.adjusted is None:
            return f"not judged: {self.reason or 'an arm has no trial'}"
        if left.events == right.events == 0:
            return f"no difference shown: {self.left} {left}; {self.right} {right}"
        if self.adjusted >= SIGNIFICANT:
            return f"no difference shown at p < {SIGNIFICANT:g} (p = {self.adjusted:.2g} over the pairs)"
        more = self.left if left.events / left.trials > right.events / right.trials else self.right
        return f"more in {more} (p = {self.adjusted:.2g} over the pairs)"


def comparisons(results: EngineResults) -> list[Comparison]:
    """All pairs whose arms were both started, with every measure that one of them could show."""
    started = {arm.name: arm for arm in results.arms if arm.starts}
    pairs = [pair for pair in results.pairs if {pair["left"], pair["right"]} <= set(started)]
    found = [
        each
        for measure in MEASURES
        for each in _adjusted([_comparison(started, pair, measure) for pair in pairs])
    ]
    order = [(pair["left"], pair["right"]) for pair in pairs]
    return sorted(found, key=lambda each: order.index((each.left, each.right)))


def _comparison(arms: Mapping[str, ArmRuns], pair: Mapping[str, str], measure: Measure) -> Comparison:
    left, right = arms[pair["left"]], arms[pair["right"]]
    rates = rate(left, measure), rate(right, measure)
    reason = "; ".join(f"{arm.name} ended with {arm.not_judged}" for arm in (left, right) if arm.not_judged)
    return Comparison(left.name, right.name, pair["variable"], measure, rates, reason)


def _adjusted(found: Sequence[Comparison]) -> list[Comparison]:
    """With Holm's p over those that have one; without those in which nothing was tried and nothing went wrong."""
    tested = [each for each in found if each.p is not None]
    values = exact.holm([each.p or 0.0 for each in tested])
    known = {(each.left, each.right): p for each, p in zip(tested, values, strict=True)}
    return [
        replace(each, adjusted=known.get((each.left, each.right)))
        for each in found
        if any(rate.trials for rate in each.rates) or (each.reason and each.measure == MEASURES[0])
    ]


def acceptance(arm: ArmRuns) -> str:
    """Accepted of drafted tokens over all whole runs, and the range over the runs."""
    counted = [run.acceptance for run in arm.runs if run.acceptance and run.acceptance.draft_tokens]
    if not counted:
        return "no drafts" if "speculative_config" not in arm.config["engine"] else "not counted"
    rates = [each.accepted / each.draft_tokens for each in counted]
    pooled = sum(each.accepted for each in counted) / sum(each.draft_tokens for each in counted)
    return f"{pooled:.1%} ({min(rates):.1%} to {max(rates):.1%} over {len(rates)} runs)"


def step_times(arm: ArmRuns) -> tuple[float | None, float | None]:
    """Medians over the runs of the median and the 99th percentile of a step, in milliseconds.

    The first run of an engine start compiles kernels and is left out where there are others.
    """
    timed = [run for run in arm.runs if run.median_ms is not None and run.p99_ms is not None]
    settled = [run for run in timed if not run.first] or timed
    if not settled:
        return None, None
    return median(run.median_ms or 0.0 for run in settled), median(run.p99_ms or 0.0 for run in settled)


def delays(arm: ArmRuns) -> tuple[float, float] | None:
    """The least and the largest median, over runs, of the idle GPU work in front of a step, in microseconds."""
    found = [run.delay_us for run in arm.runs if run.delay_us is not None]
    return (min(found), max(found)) if found else None


def draft_delays(arm: ArmRuns) -> tuple[float, float, int, int] | None:
    """The same of the work in front of a draft pass, and the least and the largest count of such passes in a run."""
    found = [(run.draft_delay_us, run.draft_passes) for run in arm.runs if run.draft_delay_us is not None]
    if not found:
        return None
    medians, passes = zip(*found, strict=True)
    return min(medians), max(medians), min(passes), max(passes)


def kinds(arm: ArmRuns) -> str:
    """The faults of an arm by kind, starts that never came to a run, and ends that are no faults.

    What an exception said is cut to ENDS_SHOWN characters; `Start.message` has all of it.
    """
    told = [run.kind for run in arm.runs if run.outcome != "whole"]
    counted = [f"{told.count(kind)} {kind}" for kind in dict.fromkeys(told)]
    bad = [start for start in arm.starts if start.kind not in ("value", "interrupted")]
    failed = [f"did not start: {_short(start.told)}" for start in bad if start.phase in ("import", "start")]
    ended = [f"not judged: {_short(s.told)}" for s in bad if s.phase in ("run", "done") and not s.judges]
    return ", ".join([*counted, *failed, *ended])


def _short(told: str) -> str:
    return textwrap.shorten(told, ENDS_SHOWN, placeholder=" ...")


def _percent(share: float) -> str:
    percent = 100 * share
    return f"{percent:.2g}%" if 0 < percent < 99.5 else f"{percent:.4g}%"
