"""Probe `host-lengths-counted-twice`: do the lengths on the host keep step with the device in the draft loop?

The statements of the released V1 runner that give the drafter its lengths are run on their own, so that what they share
is what the runner shares. The released draft loop, metadata builder and length kernel then make K - 1 passes on the
simulated device; in each, the lengths that the builder plans from are compared with those that the device has. It is a
matter of the host's arithmetic alone, and no GPU is needed. Stood in for: the model, which returns at once, the
FlashInfer wrapper and the kernel that computes rejected counts. Not covered: the V2 runner, other builders, drafters
with a loop of their own, lengths at max_model_len.

This package's arms have one tensor for both fields (`before`), or two (`after`).
"""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from types import CodeType, SimpleNamespace
from typing import Any, Literal

import torch

from specmortem import upstream
from specmortem.incidents.mtp_draft_loop.released import (
    ADVANCE,
    BUILDER,
    DEVICE,
    LENGTHS,
    METADATA,
    PROPOSER,
    Bench,
    Drafter,
    K,
    bench,
    upload_helper,
)
from specmortem.upstream.vllm_files import ATTENTION_BACKEND, DRAFTER, FLASHINFER, RUNNER, UTILS
from specmortem.verdict import Evidence, Verdict

CAUSE = "host-lengths-counted-twice"
RUNNER_CLASS = "GPUModelRunner"
BUILD = f"{RUNNER_CLASS}._build_attention_metadata"
ADVANCE_KERNEL = "eagle_step_slot_mapping_metadata_kernel"
FIELDS = ("seq_lens", "_seq_lens_cpu", "seq_lens_cpu_upper_bound")
REJECTED = (1, 0, 2, 0)


@dataclass(frozen=True)
class Situation:
    """A step of drafts.

    `drafts_before`: `none` in a step that schedules none, so that nothing was rejected; `device` where the rejected
    counts are a device tensor; `host` with `disable_padded_drafter_batch`, where they are a list. `padded`: the batch
    was padded for a CUDA graph and is cut back for the drafter.
    """

    name: str
    async_scheduling: bool = False
    drafts_before: Literal["none", "device", "host"] = "none"
    padded: bool = False

    @property
    def rejected(self) -> tuple[int, ...]:
        """Rejected drafts of each request."""
        return REJECTED if self.drafts_before != "none" else (0,) * len(LENGTHS)


SITUATIONS = (
    Situation("synchronous, first drafts"),
    Situation("synchronous, first drafts, padded batch", padded=True),
    Situation("synchronous, rejections on the device", drafts_before="device"),
    Situation("synchronous, rejections on the host", drafts_before="host"),
    Situation("asynchronous, first drafts", async_scheduling=True),
    Situation("asynchronous, rejections on the device", async_scheduling=True, drafts_before="device"),
)


@dataclass
class Lengths:
    """Lengths by pass, one row a pass: what the builder planned from, the upper bound, what the device has.

    `start` are the lengths before the first pass; `one_tensor` says whether the two fields of the metadata that the
    drafter was given lie in the same memory.
    """

    start: list[int]
    one_tensor: bool
    planned: list[list[int]] = field(default_factory=list)
    upper_bound: list[list[int]] = field(default_factory=list)
    on_device: list[torch.Tensor] = field(default_factory=list)

    @property
    def device(self) -> list[list[int]]:
        """The lengths on the device; ask after it has finished."""
        return [[int(x) for x in row.cpu()] for row in self.on_device]

    def as_dict(self) -> dict[str, Any]:
        """JSON form: growth of the first request's lengths by pass, and what the plans are off by."""
        off = [
            [p - d for p, d in zip(*rows, strict=True)]
            for rows in zip(self.planned, self.device, strict=True)
        ]
        return {
            "one_tensor": self.one_tensor,
            "planned_grows": _growth(self.start, self.planned),
            "device_grows": _growth(self.start, self.device),
            "upper_bound_ends_at": self.upper_bound[-1] if self.upper_bound else None,
            "planned_minus_device": off,
        }


def _growth(start: Sequence[int], rows: Sequence[Sequence[int]]) -> list[int]:
    firsts = [start[0], *(row[0] for row in rows)]
    return [after - before for before, after in zip(firsts, firsts[1:], strict=False)]


def verdict(subject: str, device: str = "sim", situations: Sequence[Situation] = SITUATIONS) -> Verdict:
    """Fault where a pass planned from lengths that the device did not have; `detail["situations"]` has each.

    Raises upstream.NotPresentError where the release lacks a part.
    """
    if subject in ("before", "after"):
        return _judged("add one to each field", _own(subject), {"subject": subject})
    tree = upstream.resolve(subject)
    return _judged(_place(tree), lengths(tree, situations, device), {"runner": "V1", "hashes": _hashes(tree)})


def _judged(place: str, found: Mapping[str, Lengths], detail: Mapping[str, Any]) -> Verdict:
    detail = {**detail, "situations": {name: each.as_dict() for name, each in found.items()}}
    if any(len(each.planned) != K - 1 for each in found.values()):
        return Verdict.not_judged(f"not each of {K - 1} draft passes is planned", **detail)
    witness = (
        f"K = {K}, {len(LENGTHS)} requests of {LENGTHS} tokens, {REJECTED} rejected where there were drafts"
    )
    right = "every pass plans from the lengths that the device has"
    wrong = [name for name, each in found.items() if each.planned != each.device]
    if not wrong:
        return Verdict("clean", Evidence(witness, right, detail=detail))
    last = found[wrong[0]]
    observed = (
        f"{'; '.join(wrong)}: in pass {K - 1} the plan is made from {last.planned[-1]}, "
        f"the device has {last.device[-1]}"
    )
    return Verdict("fault", Evidence(witness, observed, right, place, detail=detail))


def _own(arm: str) -> dict[str, Lengths]:
    """This package's passes: one is added to each field, and the plan is made from the first of them."""
    exact = torch.tensor(LENGTHS, dtype=torch.int32)
    upper_bound = exact if arm == "before" else exact.clone()
    on_device = exact.clone()
    found = Lengths(list(LENGTHS), one_tensor=exact is upper_bound)
    for _ in range(K - 1):
        for counted in (exact, upper_bound, on_device):
            counted += 1
        found.planned.append(exact.tolist())
        found.upper_bound.append(upper_bound.tolist())
        found.on_device.append(on_device.clone())
    return {"first drafts": found}


def _place(tree: upstream.Tree) -> str:
    return (
        f"{PROPOSER} ({str(tree.first(DRAFTER)).rpartition('/')[2]}), {BUILD} ({RUNNER.rpartition('/')[2]})"
    )


def _hashes(tree: upstream.Tree) -> dict[str, str]:
    path = str(tree.first(DRAFTER))
    parts = {
        f"{PROPOSER}.propose": path,
        BUILD: RUNNER,
        f"{BUILDER}.build": FLASHINFER,
        METADATA: ATTENTION_BACKEND,
    }
    return {name: upstream.body_hash(tree, where, name) for name, where in parts.items()}


def lengths(
    tree: upstream.Tree, situations: Sequence[Situation] = SITUATIONS, device: str = "sim"
) -> dict[str, Lengths]:
    """Run one step of drafts in each situation; the lengths by its name.

    Raises upstream.NotPresentError where the release lacks a part.
    """
    found: dict[str, Lengths] = {}
    with bench(device) as on:
        drafter = LengthsDrafter(tree, on)
        for situation in situations:
            found[situation.name] = drafter.draft(situation)
            on.synchronize()
    return found


# What the runner gives the drafter


def runner_lengths(tree: upstream.Tree, async_scheduling: bool, rows: int) -> dict[str, torch.Tensor | None]:
    """The fields of lengths as the released statements make them for `rows` rows, padding after the requests.

    Values are int32 tensors of shape (rows,), on the device for `seq_lens` and on the host for the others, or None.
    Raises upstream.NotPresentError where the runner builds no such metadata.
    """
    host = torch.zeros(rows, dtype=torch.int32)
    host[: len(LENGTHS)] = torch.tensor(LENGTHS, dtype=torch.int32)
    runner = SimpleNamespace(
        optimistic_seq_lens_cpu=host,
        seq_lens=host.to(DEVICE),
        use_async_spec_decode=_uses_async(tree, async_scheduling),
    )
    names: dict[str, Any] = {"self": runner, "num_reqs": len(LENGTHS), "num_reqs_padded": rows}
    exec(_statements(tree), {}, names)
    found: dict[str, torch.Tensor | None] = names["found"]
    return found


@cache
def _uses_async(tree: upstream.Tree, async_scheduling: bool) -> bool:
    """What the runner's constructor makes of asynchronous scheduling with K drafts."""
    init = upstream.definition(tree, RUNNER, f"{RUNNER_CLASS}.__init__")
    values = [
        node.value
        for node in ast.walk(init)
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "self.use_async_spec_decode"
    ]
    if not values:
        raise upstream.NotPresentError(f"{tree.subject}: {RUNNER_CLASS} does not set use_async_spec_decode")
    runner = SimpleNamespace(use_async_scheduling=async_scheduling, num_spec_tokens=K)
    return bool(eval(compile(ast.Expression(values[0]), RUNNER, "eval"), {}, {"self": runner}))


@cache
def _statements(tree: upstream.Tree) -> CodeType:
    """The statements that the lengths depend on, and `found = {field: released expression}` after them."""
    node = upstream.definition(tree, RUNNER, BUILD)
    assert isinstance(node, ast.FunctionDef)
    calls = [c for c in ast.walk(node) if isinstance(c, ast.Call) and ast.unparse(c.func) == METADATA]
    if not calls:
        raise upstream.NotPresentError(f"{tree.subject}: {BUILD} does not build {METADATA}")
    given = {word.arg: word.value for word in calls[0].keywords if word.arg in FIELDS}
    before = [statement for statement in node.body if statement.lineno < calls[0].lineno]
    wanted = {name for value in given.values() for name in _loads(value)}
    kept = _needed(before, wanted)
    keys: list[ast.expr | None] = [ast.Constant(name) for name in given]
    result = ast.Assign([ast.Name("found", ast.Store())], ast.Dict(keys, list(given.values())))
    return compile(ast.fix_missing_locations(ast.Module([*kept, result], [])), RUNNER, "exec")


def _needed(statements: Sequence[ast.stmt], wanted: set[str]) -> list[ast.stmt]:
    """Those of the statements that set a wanted name, backwards; names that they read become wanted."""
    kept: list[ast.stmt] = []
    for statement in reversed(statements):
        if isinstance(statement, ast.If):
            body, orelse = (_needed(part, wanted) for part in (statement.body, statement.orelse))
            if body or orelse:
                kept.append(ast.If(statement.test, body or [ast.Pass()], orelse))
                wanted |= _loads(statement.test)
        elif isinstance(statement, ast.Assign | ast.AnnAssign) and wanted & set(_stores(statement)):
            kept.append(statement)
            wanted |= _loads(statement)
    return kept[::-1]


def _loads(node: ast.AST) -> set[str]:
    return {n.id for n in ast.walk(node) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Load)} - {
        "self"
    }


def _stores(node: ast.AST) -> Iterator[str]:
    return (n.id for n in ast.walk(node) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store))


# The draft loop


class LengthsDrafter(Drafter):
    """The released loop and builder with the released length kernel; notes the lengths of every pass but the first.

    The first forward of a step reads the metadata as the runner left it and is no part of the loop.
    """

    lengths: Lengths

    def __init__(self, tree: upstream.Tree, on: Bench) -> None:
        """Raises upstream.NotPresentError where the release lacks a part."""
        kernel = _queued(on, upstream.lift(tree, UTILS, ADVANCE_KERNEL).function)
        advance = upstream.lift(tree, UTILS, ADVANCE, provide={ADVANCE_KERNEL: kernel}).function
        super().__init__(tree, on, provide={ADVANCE: advance, **upload_helper(tree)})

    def watch_builds(self) -> None:
        """Note what each plan is made from."""
        build, count_pages = self.builder.build_for_drafting, self.builder._compute_flashinfer_kv_metadata
        made_from: list[int] = []

        def counted(num_blocks: Any, seq_lens: Any, *rest: Any, **named: Any) -> Any:
            made_from[:] = seq_lens.tolist()
            return count_pages(num_blocks, seq_lens, *rest, **named)

        def noted(common_attn_metadata: Any, draft_index: int) -> Any:
            made_from.clear()
            metadata = build(common_attn_metadata=common_attn_metadata, draft_index=draft_index)
            if draft_index and made_from:
                self._note(list(made_from), common_attn_metadata)
            return metadata

        self.builder._compute_flashinfer_kv_metadata = counted
        self.builder.build_for_drafting = noted

    def _note(self, made_from: list[int], metadata: Any) -> None:
        self.lengths.planned.append(made_from)
        self.lengths.on_device.append(metadata.seq_lens.clone())
        upper_bound = getattr(metadata, "seq_lens_cpu_upper_bound", None)
        if upper_bound is not None:
            self.lengths.upper_bound.append(upper_bound.tolist())

    def draft(self, situation: Situation) -> Lengths:
        """One step of drafts; each request brings K + 1 tokens, the last of its prompt or a token and K drafts."""
        metadata = self._from_runner(situation)
        starts = [length - K - 1 for length in LENGTHS]
        positions = torch.tensor([start + i for start in starts for i in range(K + 1)], device=DEVICE)
        if situation.drafts_before == "host":
            accepted = [[0] * (K + 1 - rejected) for rejected in REJECTED]
            metadata, kept = self.proposer.prepare_inputs(metadata, accepted, [K] * len(LENGTHS))
            positions = positions[kept]
        start = [length - less for length, less in zip(LENGTHS, situation.rejected, strict=True)]
        self.lengths = Lengths(start, _is_one_tensor(metadata))
        if situation.drafts_before == "device":
            last_valid = [(row + 1) * (K + 1) - 1 - less for row, less in enumerate(REJECTED)]
            self.propose(
                metadata, positions, rejected=_to_device(REJECTED), last_valid=_to_device(last_valid)
            )
        else:
            self.propose(metadata, positions)
        return self.lengths

    def _from_runner(self, situation: Situation) -> Any:
        """The metadata with the runner's own lengths, cut back by the released method where the batch was padded."""
        given = runner_lengths(self.tree, situation.async_scheduling, len(LENGTHS) + situation.padded)
        metadata = replace(self.metadata(host_lengths=False), **given)
        if situation.padded:
            metadata = metadata.unpadded(len(LENGTHS) * (K + 1), len(LENGTHS))
        return metadata


def _queued(on: Bench, kernel: Any) -> Any:
    """The kernel as the bench launches it, with the names that the dispatcher of 0.30.0 and later asks a kernel for."""
    queued = on.kernel(kernel)
    if not hasattr(queued, "arg_names"):
        queued.arg_names = list(inspect.signature(kernel.fn).parameters)
    return queued


def _is_one_tensor(metadata: Any) -> bool:
    exact, bound = (getattr(metadata, name, None) for name in FIELDS[1:])
    return exact is not None and bound is not None and exact.data_ptr() == bound.data_ptr()


def _to_device(values: Sequence[int]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)
