"""Probes: one cause, run on one subject, with small adversarial inputs, gives a verdict.

`judge("v2-null-block", "vllm==0.24.0")` fetches what it needs of that release, runs the released function in a process
of its own, inside a box, and returns a `Verdict`. What cannot be judged says why: an unreachable index, a function
that the tree does not have, a cause that needs a GPU. Subjects with the same code are judged once.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from specmortem.errors import BadInputError
from specmortem.isolation import ArmResult
from specmortem.verdict import DeviceKind, Verdict

if TYPE_CHECKING:
    from specmortem.judge.records import Known

SAME_CODE = "same_code_as"  # in a verdict's detail: the subject that was judged
LINE = re.compile(r"\.py:\d")  # in evidence that names a line


def judge(cause: str, subject: str, *, device: DeviceKind | str = "sim", timeout_s: float = 120) -> Verdict:
    """Verdict of one cause on one subject: `before`, `after`, `vllm==X`, `installed`, `tree:DIR`, `wheel:FILE` or
    `sdist:FILE`.

    A cause whose probe names other packages also judges `PACKAGE==X`, where that release is installed.
    Raises BadInputError for an unknown cause or a malformed subject.
    """
    return judge_many([(cause, subject)], device=device, timeout_s=timeout_s)[0]


def judge_many(
    pairs: Sequence[tuple[str, str]],
    *,
    device: DeviceKind | str = "sim",
    timeout_s: float = 120,
    progress: bool = False,
    on_end: Callable[[ArmResult], None] | None = None,
) -> list[Verdict]:
    """Verdicts in the order of `pairs`, judged in parallel processes; files are fetched first, once a subject.

    Subjects that answer alike all that a judgement asked of its tree get one verdict, `same_code_as` in its detail
    where another one was judged. Nothing is remembered from one call to the next.
    """
    from specmortem.judge.rounds import Rounds
    from specmortem.judge.work import Local

    workers = Local(processes=1, progress=progress, on_end=on_end)
    run = Rounds(pairs, device_kind(device), keep=False, workers=workers, timeout_s=timeout_s)
    settled = run.settle_all()
    return [_verdict(settled[pair], *pair) for pair in pairs]


def device_kind(device: str) -> DeviceKind:
    """The kind that `auto`, `sim` or `cuda` stands for on this machine.

    Raises BadInputError for another word.
    """
    if device == "auto":
        import torch

        return "cuda" if torch.cuda.is_available() else "sim"
    if device not in ("sim", "cuda"):
        raise BadInputError(f"unknown device {device!r}; give sim, cuda or auto")
    return "cuda" if device == "cuda" else "sim"


def _verdict(known: Known, cause: str, subject: str) -> Verdict:
    """What is known, told of this pair."""
    from specmortem.incident import probe_of

    verdict = known.verdict_on(subject)
    evidence, detail = verdict.evidence, verdict.evidence.detail
    if known.subject != subject:
        lines = f" [lines of {known.subject}, the same code]"
        place = evidence.place + lines if LINE.search(evidence.observed + evidence.place) else evidence.place
        evidence = evidence.replace(place=place.strip(), detail={**detail, SAME_CODE: known.subject})
    elif subject.startswith("tree:") and detail.get("absent") in [
        group[0] for group in probe_of(cause).files
    ]:
        # taken for the wrong folder, not for a vLLM without the file
        told = f"{evidence.reason}; give the folder that holds vllm/"
        evidence = evidence.replace(reason=told, detail={**detail, "unavailable": True})
    return verdict.replace(evidence=evidence)
