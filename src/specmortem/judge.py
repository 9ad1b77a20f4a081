"""Probes: one cause, run on one subject, with small adversarial inputs, gives a verdict.

`judge("v2-null-block", "vllm==0.24.0")` fetches what it needs of that release, runs the released function in a process
of its own and returns a `Verdict`. What cannot be judged says why: an unreachable index, a function that the tree does
not have, a cause that needs a GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

from specmortem.errors import BadInputError, SpecmortemError, UnavailableError
from specmortem.incident import Probe, of_cause, probe_of
from specmortem.isolation import Arm, ArmResult, run_arms
from specmortem.verdict import DeviceKind, Evidence, Verdict


def judge(cause: str, subject: str, *, device: DeviceKind | str = "sim", timeout_s: float = 120) -> Verdict:
    """Verdict of one cause on one subject: `before`, `after`, `vllm==X`, `installed` or `tree:DIR`.

    `plan-staging-reuse` also judges `flashinfer==X`, on a GPU where that release is installed.

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
    """Verdicts in the order of `pairs`, judged in parallel processes; files are fetched first, once a subject."""
    kind = device_kind(device)
    verdicts: dict[int, Verdict] = {}
    for subject in dict.fromkeys(s for _, s in pairs):
        missing = _fetch(subject, {c for c, s in pairs if s == subject})
        verdicts |= {i: missing[c] for i, (c, s) in enumerate(pairs) if s == subject and c in missing}
    for i, (cause, _) in enumerate(pairs):
        if probe_of(cause).needs == "cuda" and kind == "sim" and i not in verdicts:
            verdicts[i] = Verdict.not_judged(f"needs a GPU: {probe_of(cause).why}", needs="cuda")
    todo = [i for i in range(len(pairs)) if i not in verdicts]
    arms = [_arm(*pairs[i], _runs_on(pairs[i][0], kind), timeout_s) for i in todo]
    for i, ended in zip(todo, run_arms(arms, cuda_parallel=8, progress=progress, on_end=on_end), strict=True):
        verdicts[i] = _verdict(ended)
    return [verdicts[i] for i in range(len(pairs))]


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


def _runs_on(cause: str, kind: DeviceKind) -> DeviceKind:
    return "sim" if probe_of(cause).needs == "interpreter" else kind


def _fetch(subject: str, causes: Iterable[str]) -> dict[str, Verdict]:
    """Bring the files of these causes into the cache; verdicts of those that cannot be judged."""
    from specmortem import upstream

    if subject in ("before", "after"):
        return {}
    missing: dict[str, Verdict] = {}
    probes = [probe_of(c) for c in causes]
    package, pinned, _ = subject.partition("==")
    if pinned and package != "vllm":
        told = f"{subject}: this cause is judged on other packages only"
        return {p.cause: Verdict.not_judged(told) for p in probes if package not in p.packages}
    try:
        tree = upstream.resolve(subject)
    except UnavailableError as error:
        return {p.cause: Verdict.not_judged(str(error), unavailable=True) for p in probes}
    wanted: dict[str, list[str]] = {}
    for probe in probes:
        try:
            found = [tree.first(list(group)) for group in probe.files]
        except UnavailableError as error:
            missing[probe.cause] = Verdict.not_judged(str(error), unavailable=True)
            continue
        if None in found:
            absent = probe.files[found.index(None)][0]
            told = f"{subject} has no {absent}"
            if subject.startswith("tree:"):
                told += "; give the folder that holds vllm/"
            missing[probe.cause] = Verdict.not_judged(
                told, absent=absent, unavailable=subject.startswith("tree:")
            )
            continue
        wanted[probe.cause] = [path for path in found if path is not None]
        wanted[probe.cause] += [path for path, _ in probe.also if tree.has(path)]
    if not wanted:
        return missing
    try:
        tree.fetch(sorted({path for paths in wanted.values() for path in paths}))
        needed = {pair for cause in wanted for pair in _functions(probe_of(cause), wanted[cause])}
        for path, name in sorted(needed):
            _prefetch_closure(tree, path, name)
    except SpecmortemError as error:
        missing |= {cause: Verdict.not_judged(str(error), unavailable=True) for cause in wanted}
    return missing


def _functions(probe: Probe, paths: Sequence[str]) -> list[tuple[str, str]]:
    """Files and names of what a probe judges, where the tree has these files."""
    names = [*probe.functions, *(name for path, name in probe.also if path in paths)]
    return [(path, name) for path, name in zip(paths, names, strict=True) if name]


def _prefetch_closure(tree: Any, path: str, name: str) -> None:
    """Hashing walks every module that lifting will need, so that the judging process needs no network."""
    from specmortem import upstream

    with suppress(upstream.NotPresentError):
        upstream.closure_hash(tree, path, name)


def _arm(cause: str, subject: str, kind: DeviceKind, timeout_s: float) -> Arm:
    return Arm(
        target=of_cause(cause).judge,
        kwargs={"cause": cause, "subject": subject, "device": kind},
        name=f"{cause} on {subject}",
        timeout_s=timeout_s,
        device=kind,
    )


def _verdict(ended: ArmResult) -> Verdict:
    """A probe that ended otherwise than by a value: a GPU fault is a fault, anything else is not judged."""
    if ended.kind == "value":
        verdict = Verdict.from_dict(ended.value)
        judged_on = "interpreter" if ended.arm.device == "sim" else "cuda"
        return replace(
            verdict,
            evidence=replace(verdict.evidence, detail={**verdict.evidence.detail, "judged_on": judged_on}),
        )
    evidence = Evidence(reason=f"{ended.kind}: {ended.message}", detail={"stderr": ended.stderr_tail[-800:]})
    if ended.kind in ("illegal-address", "device-assert"):
        return Verdict("fault", evidence)
    return Verdict("not-judged", evidence)
