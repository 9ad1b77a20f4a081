"""Pass `i` of the draft loop before, and with each fix that is compared: a diff of two functions is the fix.

`reference` is what all are compared with. What a pass is made of: `proposer.DraftLoop`.
"""

from specmortem.incidents.mtp_draft_loop.proposer import DraftLoop


def reference(loop: DraftLoop, i: int) -> None:
    """Host memory of its own for every plan, staged at the call, and nothing in flight before the forward."""
    plan = loop.plan(i, loop.next_lengths())
    buffer = loop.host_memory(plan.nbytes, pinned=False)
    plan.fill(buffer)
    loop.copy(plan, buffer)
    loop.write_inputs()
    loop.stream.synchronize()
    loop.forward(i)


def before(loop: DraftLoop, i: int) -> None:
    """One page-locked buffer, filled again although the copy of the last plan may still have to read it."""
    plan = loop.plan(i, loop.next_lengths())
    plan.fill(loop.staging)
    loop.copy(plan, loop.staging)
    loop.write_inputs()
    loop.forward(i)


def event(loop: DraftLoop, i: int) -> None:
    """Wait for the last copy, then fill."""
    plan = loop.plan(i, loop.next_lengths())
    loop.copied.synchronize()
    plan.fill(loop.staging)
    loop.copy(plan, loop.staging)
    loop.copied.record(loop.stream)
    loop.write_inputs()
    loop.forward(i)


def fresh(loop: DraftLoop, i: int) -> None:
    """New page-locked memory for each plan, which the allocator does not hand out again before it was copied."""
    plan = loop.plan(i, loop.next_lengths())
    buffer = loop.host_memory(plan.nbytes)
    plan.fill(buffer)
    loop.copy(plan, buffer)
    loop.write_inputs()
    loop.forward(i)


def pageable(loop: DraftLoop, i: int) -> None:
    """One pageable buffer, which CUDA stages at the call."""
    plan = loop.plan(i, loop.next_lengths())
    plan.fill(loop.pageable)
    loop.copy(plan, loop.pageable)
    loop.write_inputs()
    loop.forward(i)


def reread_lengths(loop: DraftLoop, i: int) -> None:
    """Read the lengths from the GPU, which drains the stream: vLLM from 0.30.0 on (flashinfer.py:1410-1413)."""
    plan = loop.plan(i, loop.read_lengths())
    plan.fill(loop.staging)
    loop.copy(plan, loop.staging)
    loop.write_inputs()
    loop.forward(i)


def stream_sync(loop: DraftLoop, i: int) -> None:
    """Rejected (vllm#42603): drain the stream between the two writes that were blamed and the forward."""
    plan = loop.plan(i, loop.next_lengths())
    plan.fill(loop.staging)
    loop.copy(plan, loop.staging)
    loop.write_inputs()
    loop.stream.synchronize()
    loop.forward(i)
