"""What arms would cost in time on a GPU, roughly."""

from __future__ import annotations

from collections.abc import Sequence

from specmortem.tools.engine.arms import EngineArm, Experiment

# Of an engine on an H200, eager: 20 to 60 s with a Triton cache, 99 s without, 175 s where FlashInfer compiles.
START_S = 75.0
STEP_S = 0.03  # of an eager step of a tiny model with three drafts on an H200; 0.015 without drafts


def run_s(arm: EngineArm, trained: bool) -> float:
    """Seconds of a run: steps at `STEP_S` and the idle GPU work in front of them and of their draft passes.

    A step is taken to give each request in flight a token and, of a `trained` model, half of its drafts.
    """
    work = arm.workload
    drafts: int = (arm.engine.get("speculative_config") or {}).get("num_speculative_tokens", 0)
    answer = sum(work.max_tokens) / 2 / (1 + (drafts / 2 if trained else 0))
    most: int = arm.engine.get("max_num_seqs", max(work.concurrency))
    steps: float = sum(
        answer * max(1.0, work.in_round(number) / min(flight, most))
        for number, flight in enumerate(work.concurrency)
    )
    idle = sum(work.gpu_delay_us) / 2e6 + STEP_S * sum(work.gpu_delay_steps) / 2
    idle += drafts * sum(work.draft_delay_us) / 2e6
    return steps * (STEP_S + idle)


def cost(experiment: Experiment, chosen: Sequence[EngineArm], runs: int) -> str:
    """Of `runs` runs of each arm, in a line: the least count of starts and of runs, their time, and what faults add."""
    trained = bool(experiment.model.tasks)
    seconds = sum(START_S + runs * run_s(arm, trained) for arm in chosen)
    restarts = len(chosen) * (runs - 1)
    return (
        f"about {seconds / 60:.1f} minutes: {len(chosen)} starts of about {START_S:g} s and {len(chosen) * runs} "
        f"runs; a fault costs one start more, at most {restarts} of them "
        f"({restarts * START_S / 60:.1f} minutes), which --minutes bounds"
    )
