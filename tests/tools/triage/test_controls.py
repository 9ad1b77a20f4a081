"""A control needs a subject and a result in one clause; suggestions are none."""

import pytest

from specmortem.tools.triage.controls import controls


def told(text):
    return {(control.subject, control.result) for control in controls(text)}


@pytest.mark.parametrize(
    "text, control",
    [
        ("--no-async-scheduling still crashes.", ("no-async", "faults")),
        ("CUDA_LAUNCH_BLOCKING=1 does not trigger the crash.", ("launch-blocking", "clean")),
        ("Disabling DFlash or CUDA graphs removes it.", ("eager", "clean")),
        ("Disabling DFlash or CUDA graphs removes it.", ("no-spec", "clean")),
        ("cudagraph_mode=NONE still crashes", ("eager", "faults")),
        ("one request at a time never shows it", ("one-request", "clean")),
        ("MTP=1/2/3 do not crash, while MTP=4 does.", ("fewer-drafts", "clean")),
        ("Speculation off is unaffected.", ("no-spec", "clean")),
        ("With the plan buffer unpinned the run is clean.", ("unpinned", "clean")),
    ],
)
def test_a_control_is_read(text, control):
    assert control in told(text)


@pytest.mark.parametrize(
    "text",
    [
        "For debugging consider passing CUDA_LAUNCH_BLOCKING=1",
        "Could you try --enforce-eager? It might fix it.",
        "tried --no-async-scheduling",
        "num_accepted_tokens_event.synchronize() crashes",
    ],
)
def test_a_suggestion_or_a_frame_is_no_control(text):
    assert told(text) == set()
