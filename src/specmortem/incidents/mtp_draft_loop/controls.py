"""All arms of the draft loop by name: before, the fixes of `fix`, and controls, of which each changes one thing."""

from __future__ import annotations

from specmortem.errors import BadInputError
from specmortem.incidents.mtp_draft_loop import fix
from specmortem.incidents.mtp_draft_loop.proposer import DraftLoop, LoopArm


def wrong_stream_sync(loop: DraftLoop, i: int) -> None:
    """`fix.stream_sync` of a stream in which nothing runs."""
    plan = loop.plan(i, loop.next_lengths())
    plan.fill(loop.staging)
    loop.copy(plan, loop.staging)
    loop.write_inputs()
    loop.other.synchronize()
    loop.forward(i)


def no_page_kernel(loop: DraftLoop, i: int) -> None:
    """`fix.before` with a build that enqueues nothing but its plan: the first copy meets an idle stream."""
    plan = loop.plan(i, loop.next_lengths(), pages=False)
    plan.fill(loop.staging)
    loop.copy(plan, loop.staging)
    loop.write_inputs()
    loop.forward(i)


def plan_once(loop: DraftLoop, i: int) -> None:
    """The first plan in every pass."""
    if i == 1:
        fix.before(loop, i)
        return
    loop.plans[i] = loop.plans[1]
    loop.write_inputs()
    loop.forward(i)


def side_stream_writes(loop: DraftLoop, i: int) -> None:
    """`fix.event` with the two buffer writes in another stream: what the same-stream hypothesis would need."""
    plan = loop.plan(i, loop.next_lengths())
    loop.copied.synchronize()
    plan.fill(loop.staging)
    loop.copy(plan, loop.staging)
    loop.copied.record(loop.stream)
    loop.write_inputs(loop.other)
    loop.forward(i)


ARMS = {
    arm.name: arm
    for arm in (
        LoopArm("before", fix.before),
        LoopArm("event", fix.event),
        LoopArm("fresh", fix.fresh),
        LoopArm("pageable", fix.pageable),
        LoopArm("reread-lengths", fix.reread_lengths),
        LoopArm("stream-sync", fix.stream_sync),
        LoopArm("wrong-stream-sync", wrong_stream_sync),
        LoopArm("launch-blocking", fix.before, launch_blocking=True),
        LoopArm("constant-plan", fix.before, constant=True),
        LoopArm("no-page-kernel", no_page_kernel),
        LoopArm("plan-once", plan_once),
        LoopArm("side-stream-writes", side_stream_writes),
    )
}
FIXED = ("event", "fresh", "pageable", "reread-lengths")
HIDING = ("stream-sync", "launch-blocking")
REFERENCE = LoopArm("reference", fix.reference)


def arm_of(name: str) -> LoopArm:
    """The arm of that name. Raises BadInputError for an unknown one."""
    if name not in ARMS:
        raise BadInputError(f"arm {name!r} is not one of {', '.join(ARMS)}")
    return ARMS[name]
