"""The staging detector over one step of the draft loop: what it reports under which schedule, by arm."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from specmortem.detect import staging
from specmortem.device import Device
from specmortem.incidents.mtp_draft_loop.arms import Case, Loop, case, open_device
from specmortem.incidents.mtp_draft_loop.proposer import arm_of

SCHEDULES = ("immediate", "lazy", "random")


def first_step(
    arm: str = "before", k: int = 5, device: str = "sim", schedules: Sequence[str] = SCHEDULES, seed: int = 0
) -> dict[str, Any]:
    """Races that one step has, without attention, so that no plan can fault however it is read.

    On CUDA there is one schedule, the GPU's own. Launch blocking is the schedule `immediate`. `effect` is
    `unordered` when every schedule has a race, `ordered` when none has, else `mixed`; `races` counts them by
    schedule. Raises BadInputError for an unknown arm, or a CUDA
    process without the arm's environment.
    """
    chosen = case(arm, device, k, layout="benign", attend=False, seed=seed)
    if device == "cuda":
        schedules = ("cuda",)
    elif arm_of(arm).launch_blocking:
        schedules = ("immediate",)
    found = {
        schedule: _races(open_device(device, schedule, chosen.arm, seed), chosen) for schedule in schedules
    }
    told = [str(race) for races in found.values() for race in races]
    seen = [bool(races) for races in found.values()]
    return {
        "effect": "unordered" if all(seen) else "mixed" if any(seen) else "ordered",
        "why": told[0] if told else "",
        "races": {schedule: len(races) for schedule, races in found.items()},
        "pairs": sorted({f"{race.first} / {race.second}" for races in found.values() for race in races}),
        "schedules": len(found),
        "reported": sum(seen),
    }


def _races(dev: Device, chosen: Case) -> list[staging.Race]:
    with staging.watch(dev) as watched:
        Loop(dev, chosen, []).step()
    return watched.races
