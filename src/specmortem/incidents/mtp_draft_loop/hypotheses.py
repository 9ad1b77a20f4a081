"""The hypotheses of incident `mtp-draft-loop`: what each predicts, the arms that are made for it, and what refutes it.

Statements and stated verdicts are the incident's facts. `HYPOTHESES` has one entry for each of them, by its id. Rows
are dictionaries of what the user would have seen (`effect`, or `effects` of all schedules) and what is counted.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from specmortem import device as devices
from specmortem.device import Device
from specmortem.errors import BadInputError
from specmortem.incidents.mtp_draft_loop import arms
from specmortem.incidents.mtp_draft_loop.controls import FIXED, HIDING
from specmortem.incidents.mtp_draft_loop.launches import KnownLaunches

CONTROL_DRAFTS = 4
KEPT = ("effect", "why", "effects", "schedules", "faults", "wrong_ids", "wrong_plans", "mismatched_steps")
Found = dict[str, Any]


@dataclass(frozen=True)
class Tested:
    """How a hypothesis is decided: by `rows` of arms of its own, or by `arms` of the study for K drafts.

    The arms of one hypothesis repeat launches of each other, and share what they know.
    """

    predicts: str
    rows: Callable[[KnownLaunches], list[Found]] | None = None
    is_refuted: Callable[[Sequence[Found]], bool] | None = None
    arms: Callable[[int], tuple[str, ...]] = lambda _: ()


def hypothesis(name: str) -> dict[str, Any]:
    """Rows and verdict of one hypothesis with arms of its own. Raises BadInputError for any other name."""
    tested = HYPOTHESES.get(name)
    if tested is None or tested.rows is None or tested.is_refuted is None:
        raise BadInputError(f"hypothesis {name!r} is not one of {', '.join(own_arms())}")
    rows = tested.rows(KnownLaunches())
    return {"hypothesis": name, "rows": rows, "verdict": "refuted" if tested.is_refuted(rows) else "open"}


def own_arms() -> list[str]:
    """Hypotheses with arms of their own."""
    return [name for name, tested in HYPOTHESES.items() if tested.rows]


def _row(found: Found, arm: str) -> Found:
    return {"arm": arm} | {name: found[name] for name in KEPT if name in found}


def _effects_are(*effects: str) -> Callable[[Sequence[Found]], bool]:
    return lambda rows: [row["effect"] for row in rows] == list(effects)


def same_stream(launch: KnownLaunches) -> list[Found]:
    """The two buffer writes race with the model that reads them: looked for under every schedule.

    A control does what the hypothesis says: it issues the writes in another stream.
    """
    return [
        _row(arms.schedules(arm, k=k, launch=launch), arm)
        for arm, k in (("before", 4), ("side-stream-writes", 2))
    ]


def _ids_are_right(rows: Sequence[Found]) -> bool:
    real, control = rows
    return not real["wrong_ids"] and bool(real["faults"] and control["wrong_ids"])


def placeholders(launch: KnownLaunches) -> list[Found]:
    """-1 in the scheduled draft tokens breaks the loop.

    Under asynchronous scheduling the scheduler knows no drafts and sends -1 for each; the runner fills in the
    drafts of the step before on the GPU. The step before the first is one of the reference. Counted are steps
    with placeholders, ids below 0 that are left after that, and faults.
    """
    return [
        {"arm": f"{arm}, {'async' if asynchronous else 'sync'} scheduling"}
        | _scheduled(arm, asynchronous, launch)
        for arm, asynchronous in (("event", True), ("before", True), ("before", False))
    ]


def _placeholders_are_harmless(rows: Sequence[Found]) -> bool:
    healthy, before, without = rows
    sent_in_every_step = healthy["with_placeholders"] == healthy["steps"] and before["with_placeholders"] > 0
    harmless = healthy["negative_ids"] == 0 and healthy["effect"] == "clean"
    needless = without["with_placeholders"] == 0 and without["effect"] == "illegal-address"
    return bool(sent_in_every_step and harmless and needless)


def _scheduled(arm: str, asynchronous: bool, launch: KnownLaunches, steps: int = 3) -> Found:
    """Steps whose token ids are the last drafts, from the scheduler or filled in on the GPU."""
    chosen = arms.case(arm, observe=True, launch=launch)
    dev = arms.open_device("sim", "lazy", chosen.arm)
    earlier = arms.simulated_golden(chosen)[0].draft_token_ids
    with_placeholders = negative = 0
    with arms.watch(dev):
        drafting = arms.RepeatedDrafts(dev, chosen, [])
        account, draft_token_ids = drafting.account, drafting.proposer.buffers.draft_token_ids
        draft_token_ids.copy_(earlier)
        scheduled = dev.zeros(earlier.shape, torch.int64, "scheduled")
        while account.steps < steps and not account.why:
            sent = np.full(earlier.shape, -1) if asynchronous else draft_token_ids.cpu().numpy().copy()
            with_placeholders += bool((sent < 0).any())
            negative += _fill_in(dev, drafting, sent, scheduled)
            account.why = arms.until_outside(drafting.step)
        account.steps += bool(account.why)
    return {**account.result(), "with_placeholders": with_placeholders, "negative_ids": negative}


def _fill_in(
    dev: Device, drafting: arms.RepeatedDrafts, sent: npt.NDArray[np.int64], scheduled: torch.Tensor
) -> int:
    """Put the scheduler's ids where the next step takes them from; returns how many are still negative."""
    stream, buffer = drafting.proposer.stream, dev.host_buffer(sent.shape, torch.int64, name="scheduled ids")
    buffer[:] = sent
    dev.copy_async(scheduled, buffer, stream)
    tokens = drafting.tokens[drafting.account.steps % len(drafting.tokens)]
    args = (scheduled, drafting.proposer.buffers.draft_token_ids, tokens)
    dev.launch(_resolve, *args, stream=stream, reads=args, writes=(scheduled, tokens), name="fill in")
    dev.synchronize()
    return int((scheduled < 0).sum())


def _resolve(scheduled: torch.Tensor, draft_token_ids: torch.Tensor, tokens: torch.Tensor) -> None:
    scheduled.copy_(torch.where(scheduled < 0, draft_token_ids, scheduled))
    tokens.copy_(scheduled[-1])


def stale_metadata(launch: KnownLaunches) -> list[Found]:
    """The plan of the first pass is used for all: wrong attention, but nothing outside."""
    return [_row(arms.steps(arm, launch=launch), arm) for arm in ("plan-once", "event", "before")]


def kv_boundary(launch: KnownLaunches) -> list[Found]:
    """A request that crosses into a new page faults: without and with a change of the plan."""
    return [
        _row(arms.steps("before", layout="page", launch=launch), "before, page added, plan unchanged"),
        _row(arms.steps("event", launch=launch), "event, page added, plan changed"),
        _row(arms.steps("before", launch=launch), "before, page added, plan changed"),
    ]


def clamping(launch: KnownLaunches) -> list[Found]:
    """A request reaches max_model_len while it drafts: its length is 1, the plan is for more."""
    rows = []
    for arm in ("before", "event"):
        chosen = arms.case(arm, layout="benign", observe=True, launch=launch)
        limit = max(chosen.lens) + 1
        chosen = replace(chosen, max_model_len=limit)
        found = arms.run(devices.open("sim"), chosen, arms.simulated_golden(chosen))
        rows.append(_row(found, f"{arm}, clamped at {limit}") | {"clamped": found["clamped"]})
    return rows


def _clamped_and_clean(rows: Sequence[Found]) -> bool:
    return all(row["effect"] == "clean" and row["clamped"] for row in rows)


def _ordered_or_not(k: int) -> tuple[str, ...]:
    ordered = (f"schedules/{arm}/k{k}" for arm in (*FIXED, *HIDING))
    return f"schedules/before/k{k}", *ordered, f"schedules/wrong-stream-sync/k{CONTROL_DRAFTS}"


HYPOTHESES = {
    "plan-buffer": Tested(
        "before faults where the host overtakes a copy, and no arm does in which it cannot",
        arms=_ordered_or_not,
    ),
    "same-stream-buffer-race": Tested(
        "ids are wrong with both writes in the model's stream", same_stream, _ids_are_right
    ),
    "minus-one-placeholders": Tested(
        "no fault without placeholders; ids below 0 reach the model with them",
        placeholders,
        _placeholders_are_harmless,
    ),
    "async-scheduling": Tested(
        "no fault without asynchronous scheduling",
        arms=lambda _: ("minus-one-placeholders/before, sync scheduling",),
    ),
    "stale-metadata": Tested(
        "one old plan for all passes leaves memory",
        stale_metadata,
        _effects_are("wrong-result", "clean", "illegal-address"),
    ),
    "kv-boundary": Tested(
        "a new page faults, whatever becomes of the plan",
        kv_boundary,
        _effects_are("clean", "clean", "illegal-address"),
    ),
    "clamping": Tested("a request at max_model_len faults", clamping, _clamped_and_clean),
    "stale-accepted-counts": Tested(
        "no fault without a recurrent layer", arms=lambda k: (f"schedules/before/k{k}",)
    ),
}
