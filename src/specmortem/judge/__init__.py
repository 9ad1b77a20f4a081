"""Probes: one cause, run on one subject, with small adversarial inputs, gives a verdict.

`judge("v2-null-block", "vllm==0.24.0")` fetches what it needs of that release, runs the released function in a process
of its own, inside a box, and returns a `Verdict`. What cannot be judged says why: an unreachable index, a function
that the tree does not have, a cause that needs a GPU. Subjects with the same code are judged once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from specmortem.errors import BadInputError
from specmortem.isolation import ArmResult
from specmortem.verdict import DeviceKind, Verdict


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
    verdicts = {pair: known.verdict_on(pair[1]) for pair, known in settled.items()}
    shared = {pair: known.subject for pair, known in settled.items() if known.subject != pair[1]}
    verdicts |= {pair: _with(verdicts[pair], same_code_as=judged) for pair, judged in shared.items()}
    return [_of_folder(verdicts[pair], *pair) for pair in pairs]


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


def _with(verdict: Verdict, *, reason: str = "", **detail: object) -> Verdict:
    evidence = verdict.evidence
    detail = {**evidence.detail, **detail}
    return replace(verdict, evidence=replace(evidence, reason=reason or evidence.reason, detail=detail))


def _of_folder(verdict: Verdict, cause: str, subject: str) -> Verdict:
    """A folder without a file that the probe needs is taken for the wrong folder, not for a vLLM without it."""
    from specmortem.incident import probe_of

    needed = {group[0] for group in probe_of(cause).files}
    if not subject.startswith("tree:") or verdict.evidence.detail.get("absent") not in needed:
        return verdict
    told = f"{verdict.evidence.reason}; give the folder that holds vllm/"
    return _with(verdict, reason=told, unavailable=True)
