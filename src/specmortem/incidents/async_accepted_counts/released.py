"""One step of a released V1 model runner over the simulated device, without vLLM and without a GPU.

Lifted from the tree: the runner's `_update_states`, `_prepare_inputs`, `_update_states_after_model_execute` and every
method of its class that these call, `InputBatch` whole, the decode-first reorder, the correction of counts, and those
statements of `execute_model` that touch accepted counts. Stood in for: what the accepted counts do not pass through.
A stand-in answers the names that it was made for; any other raises, and the probe says so instead of judging.

The host array of accepted counts is a pinned buffer of the simulated device and the event is one of its events: the
released copy is in flight until the schedule lets it land.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import cached_property, lru_cache, partial
from pathlib import Path
from types import FrameType, MethodType, SimpleNamespace
from typing import Any, Literal, NoReturn, get_args

import numpy as np
import torch

from specmortem import device as devices
from specmortem import upstream
from specmortem.device import Device, Event, HostBuffer
from specmortem.device.memory import Op, Region
from specmortem.device.objects import Stream
from specmortem.device.trace import Observer
from specmortem.errors import SpecmortemError
from specmortem.incidents.async_accepted_counts.engine.accepted_counts import Mode
from specmortem.upstream.vllm_files import ATTENTION_UTILS, BATCH, CACHE, CACHE_MODES, MAMBA, RUNNER, UTILS

RUNNER_CLASS = "GPUModelRunner"
SHARED = (
    "BatchUpdate",
    "BatchUpdateBuilder",
    "CachedRequestState",
    "InputBatch",
    "MoveDirectionality",
    "cdiv",
    "copy_slice",
    "init_logger",
    "length_from_prompt_token_ids_or_embeds",
    "reorder_batch_to_split_decodes_and_prefills",
    "swap_dict_values",
    "update_num_computed_tokens_for_batch_change",
)
K, PROMPT, MAX_REQS, MAX_LEN = 3, 8, 8, 64
COUNTS = "counts to host"
DEVICE = str(Path(devices.__file__).parent)

Phase = Literal["before", "inside", "after", "not-in-flight"]
Role = Literal["decode", "first-draft", "prefill"]


class UnfitError(SpecmortemError):
    """The code under test uses something that the probe does not give it."""


@dataclass(frozen=True)
class Row:
    """A request of the step that has just run.

    `decode`: it had drafts and goes on to have them; `first-draft`: its prefill is complete, the next step is its
    first with drafts; `prefill`: more of its prompt is to come. `accepted` counts the tokens it got; `leaves`: it is
    finished.
    """

    name: str
    role: Role
    accepted: int = 1
    leaves: bool = False


@dataclass(frozen=True)
class Transition:
    """Two steps: the rows of the first, and the requests that begin in the second."""

    rows: tuple[Row, ...]
    arrivals: tuple[str, ...] = ()

    def __str__(self) -> str:
        """One line: A(4) leaves, P(first draft) ..."""
        told = {"decode": "{0.name} accepted {0.accepted}", "first-draft": "{0.name} prefilled"}
        rows = [
            told.get(r.role, "{0.name} prefilling").format(r) + " and leaves" * r.leaves for r in self.rows
        ]
        return f"rows {', '.join(rows)}; {', '.join(self.arrivals) or 'nobody'} arrives"

    @property
    def right(self) -> dict[str, int]:
        """The count of each request that has drafts in the second step."""
        return {row.name: row.accepted for row in self.rows if not row.leaves and row.role != "prefill"}


@dataclass
class Landing(Observer):
    """What the host did to the accepted counts in the second step, and where the copy came to lie in that.

    Buffers with `accepted` in their name are watched, and the copies called COUNTS.
    """

    accesses: list[str] = field(default_factory=list)
    in_flight: bool = False
    landed: int | None = None
    moves: int = 0
    queued_at: str = ""

    def enqueued(self, stream: Stream, op: Op, site: str) -> None:
        """Note the line that queued the copy."""
        if op.name == COUNTS and not self.in_flight:
            caller = _caller()
            self.in_flight, self.queued_at = True, f"{Path(caller.f_code.co_filename).name}:{caller.f_lineno}"

    def executed(self, stream: Stream, op: Op) -> None:
        """Note the landing."""
        if op.name == COUNTS and self.landed is None:
            self.landed = len(self.accesses)

    def host_accessed(self, buffer: HostBuffer, region: Region, write: bool, site: str) -> None:
        """Note a move of counts, or what else the host does to them."""
        if "accepted" in buffer.name:
            base, size = buffer.region.start, buffer.backing[:1].nbytes
            first, last = (region.start - base) // size, (region.stop - base) // size - 1
            rows = f"row {first}" if first == last else f"rows {first} to {last}"
            self.accesses.append(f"{_caller().f_code.co_name} {'writes' if write else 'reads'} {rows}")

    def second_step_begins(self) -> None:
        """Forget what the first step did; a copy that has run by now was waited for."""
        self.in_flight = self.landed is None and self.in_flight
        self.accesses.clear()

    def rows_have_moved(self) -> None:
        """What follows reads the counts and moves no row."""
        self.moves = len(self.accesses)

    @property
    def phase(self) -> Phase:
        """Where the copy landed: before, inside or after the host's moves of rows."""
        if not self.in_flight:
            return "not-in-flight"
        if self.landed is None or self.landed >= self.moves:
            return "after"
        return "before" if self.landed == 0 else "inside"

    def __str__(self) -> str:
        """The access before the copy and the one behind it."""
        if not self.in_flight:
            return "no copy is in flight"
        if self.phase == "after":
            return "the copy lands after the rows have moved"
        assert self.landed is not None
        behind = self.accesses[self.landed]
        if self.landed == 0:
            return f"the copy lands before {behind}"
        return f"the copy lands after {self.accesses[self.landed - 1]} and before {behind}"


def _caller() -> FrameType:
    """The nearest frame outside the device and this file: code under test."""
    frame = sys._getframe(1)
    while frame.f_back and frame.f_code.co_filename.startswith((DEVICE, __file__)):
        frame = frame.f_back
    return frame


class HostArray:
    """The numpy face of a pinned buffer: every access is told to the device; what is read cannot be written."""

    def __init__(self, buffer: HostBuffer) -> None:
        self._buffer = buffer

    def __getitem__(self, index: Any) -> Any:
        found = self._buffer[index]
        if isinstance(found, np.ndarray):
            found.flags.writeable = False
        return found

    def __setitem__(self, index: Any, value: Any) -> None:
        self._buffer[index] = value

    def __len__(self) -> int:
        return len(self._buffer)


class PinnedTensor:
    """The torch face of a pinned buffer: a non-blocking copy into it is queued, a blocking one waited for."""

    def __init__(self, buffer: HostBuffer) -> None:
        self.buffer = buffer

    def __getitem__(self, rows: slice) -> PinnedTensor:
        start, stop, step = rows.indices(len(self.buffer))
        if step != 1:
            raise UnfitError(f"a pinned tensor is indexed with {rows}")
        return PinnedTensor(self.buffer.rows(start, stop))

    def copy_(self, source: torch.Tensor, non_blocking: bool = False) -> PinnedTensor:
        """Queue the copy of what the device holds now, in the order of its one stream."""
        device = self.buffer.device
        device.copy_async(self.buffer, source.to(self.buffer.dtype, copy=True), name=COUNTS)
        if not non_blocking:
            device.synchronize()
        return self

    def fill_(self, value: int) -> PinnedTensor:
        """A host write."""
        self.numpy()[:] = value
        return self

    def numpy(self) -> HostArray:
        """The numpy face."""
        return HostArray(self.buffer)


class _Torch:
    """torch for the runner's own buffers: pinned ones are buffers of the simulated device."""

    def __init__(self, device: Device) -> None:
        self._device = device

    def __getattr__(self, name: str) -> Any:
        found = getattr(torch, name)
        return (
            partial(self._make, found, int(name == "ones")) if name in ("zeros", "ones", "empty") else found
        )

    def _make(self, make: Callable[..., torch.Tensor], value: int, *size: Any, **options: Any) -> Any:
        if not options.pop("pin_memory", False):
            return make(*size, **options)
        shape = make(*size).shape
        buffer = self._device.host_buffer(
            tuple(shape), options.get("dtype", torch.float32), name="accepted counts"
        )
        buffer[:] = value
        return PinnedTensor(buffer)

    def Event(self, *_: Any, **__: Any) -> Event:  # noqa: N802
        """An event of the simulated device."""
        return self._device.event()


class _Buffer:
    """A pair of host and device arrays that the counts in flight do not touch: copied at once."""

    def __init__(self, size: int, dtype: torch.dtype = torch.int32) -> None:
        self.cpu, self.gpu = torch.zeros(size, dtype=dtype), torch.zeros(size, dtype=dtype)
        self.np = self.cpu.numpy()

    def copy_to_gpu(self, n: int | None = None) -> torch.Tensor:
        """Host to device."""
        return self.gpu[:n].copy_(self.cpu[:n])


def _nothing(*_: Any, **__: Any) -> None:
    """Stands for work that does not touch accepted counts."""


BLOCK_TABLE_CALLS = (
    "add_row",
    "append_row",
    "clear_row",
    "commit_block_table",
    "compute_slot_mapping",
    "move_row",
    "swap_row",
)


def _block_table(*_: Any, **__: Any) -> SimpleNamespace:
    return SimpleNamespace(**dict.fromkeys(BLOCK_TABLE_CALLS, _nothing))


class _Stub:
    """Keeps the keyword arguments that it is made with."""

    def __init__(self, *_: Any, **fields: Any) -> None:
        self.__dict__.update(fields)


def _stub(name: str) -> Any:
    """For a class one that can be made and asked `isinstance`; for a function one that refuses to be called."""
    if name.lstrip("_")[:1].isupper():
        return type(name, (_Stub,), {})

    def refuse(*_: Any, **__: Any) -> NoReturn:
        raise UnfitError(f"{name} of another vLLM file is called, which the probe does not lift")

    return refuse


def stand_ins(tree: upstream.Tree, paths: Sequence[str], lifted: Sequence[str] = ()) -> dict[str, Any]:
    """A stub for every vLLM name that the files import, but for those to be lifted."""
    given: dict[str, Any] = {}
    for path in tree.fetch(paths).values():
        for node in ast.walk(_parsed(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and (node.level or (node.module or "").startswith("vllm")):
                given |= {n.name: _stub(n.name) for n in node.names if n.name not in lifted}
    return given


@lru_cache(maxsize=8)
def _parsed(text: str) -> ast.Module:
    """Shared by all that read a file of this content; nobody changes it."""
    return ast.parse(text)


def _align_context(counts: torch.Tensor) -> SimpleNamespace:
    """The context of the fused postprocess where no row crosses a block: the counts go through as they are."""
    buffers = ("mamba_state_idx", "num_scheduled_tokens", "num_computed_tokens", "num_draft_tokens")
    out = torch.ones_like(counts)

    def run_fused_postprocess(num_reqs: int, num_accepted_tokens_gpu: torch.Tensor, **_: Any) -> None:
        out[:num_reqs] = num_accepted_tokens_gpu[:num_reqs]

    return SimpleNamespace(
        is_initialized=True,
        num_accepted_tokens_out=out,
        run_fused_postprocess=run_fused_postprocess,
        **{f"{name}_buf": _Buffer(MAX_REQS) for name in buffers},
    )


class RunnerCode:
    """What is lifted of a tree, once; `hashes` names the bodies that run.

    Raises upstream.NotPresentError when the tree lacks one of them.
    """

    def __init__(self, tree: upstream.Tree) -> None:
        self.tree = tree
        self.given = stand_ins(tree, [RUNNER, BATCH, ATTENTION_UTILS, UTILS, MAMBA], SHARED) | {
            "MultiGroupBlockTable": _block_table,
            "PIN_MEMORY": False,
            "SamplingType": SimpleNamespace(GREEDY=0, RANDOM=1, RANDOM_SEED=2),
            "get_pp_group": lambda: SimpleNamespace(is_first_rank=True, is_last_rank=True),
            "gpu_sync_allowed": nullcontext,
            "maybe_create_thinking_budget_state_holder": _nothing,
            "mamba_utils": SimpleNamespace(
                postprocess_mamba=_nothing,
                postprocess_mamba_all=_nothing,
                preprocess_mamba=_nothing,
                preprocess_mamba_all_specdec=_nothing,
                stage_postprocess_inputs_to_gpu=_nothing,
            ),
        }
        self.hashes: dict[str, str] = {}
        self.lines: dict[str, str] = {}
        self._methods: dict[str, Any] = {}
        self._lift_align_postprocess()
        self.batch = self._lifted(BATCH, "InputBatch")
        self.request = self._lifted(BATCH, "CachedRequestState")
        for name in ("_update_states", "_prepare_inputs", "_update_states_after_model_execute"):
            if self.method(name) is None:
                raise upstream.NotPresentError(f"{RUNNER_CLASS}.{name} in {RUNNER}")

    def _lift_align_postprocess(self) -> None:
        name = "postprocess_mamba_align_gpu"
        try:
            setattr(self.given["mamba_utils"], name, self._lifted(MAMBA, name))
        except upstream.NotPresentError:
            return

    def _lifted(self, path: str, name: str) -> Any:
        return self._noted(upstream.lift(self.tree, path, name, provide=self.given))

    def _noted(self, lifted: upstream.Lifted) -> Any:
        self.hashes[lifted.name] = lifted.body_hash
        self.lines[lifted.name] = f"{lifted.path}:{lifted.line}"
        return lifted.function

    def offers(self, mode: Mode) -> bool:
        """Whether the tree's configuration names the cache mode. NotPresentError where it names none."""
        return mode in get_args(upstream.lift(self.tree, CACHE, CACHE_MODES).function)

    @cached_property
    def _class(self) -> ast.ClassDef:
        module = _parsed(self.tree.fetch([RUNNER])[RUNNER].read_text(encoding="utf-8"))
        found = [n for n in module.body if isinstance(n, ast.ClassDef) and n.name == RUNNER_CLASS]
        if not found:
            raise upstream.NotPresentError(f"{RUNNER_CLASS} in {RUNNER}")
        return found[0]

    def _definition(self, name: str) -> ast.FunctionDef | None:
        return next((n for n in self._class.body if isinstance(n, ast.FunctionDef) and n.name == name), None)

    def method(self, name: str) -> Any:
        """A method of the runner as a function; None when its class has none of that name."""
        if name not in self._methods:
            if self._definition(name) is None:
                return None
            path = f"{RUNNER_CLASS}.{name}"
            self._methods[name] = self._noted(
                upstream.lift_method(self.tree, RUNNER, path, provide=self.given)
            )
        return self._methods[name]

    def initial(self, name: str) -> ast.expr | None:
        """What the runner's own `__init__` assigns to an attribute."""
        for node in ast.walk(self._definition("__init__") or ast.Module([], [])):
            targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
            value = getattr(node, "value", None)
            if any(isinstance(t, ast.Attribute) and t.attr == name for t in targets) and value is not None:
                return value if isinstance(value, ast.expr) else None
        return None

    @cached_property
    def around(self) -> tuple[Any, Any, Any]:
        """Statements of `execute_model` that touch accepted counts: before, between and behind its two calls."""
        node = self._definition("execute_model")
        if node is None:
            raise upstream.NotPresentError(f"{RUNNER_CLASS}.execute_model in {RUNNER}")
        calls = [_line_of_call(node, name) for name in ("_update_states", "_prepare_inputs")]
        parts: tuple[list[ast.stmt], ...] = ([], [], [])
        for statement in _touching(node.body):
            parts[sum(call < statement.lineno for call in calls)].append(statement)
        compiled = [compile(ast.Module(part, []), RUNNER, "exec") for part in parts]
        return compiled[0], compiled[1], compiled[2]


def _line_of_call(node: ast.FunctionDef, name: str) -> int:
    lines = [n.lineno for n in ast.walk(node) if isinstance(n, ast.Attribute) and n.attr == name]
    if not lines:
        raise UnfitError(f"its {node.name} does not call {name}")
    return min(lines)


def _touching(body: Sequence[ast.stmt]) -> Iterator[ast.stmt]:
    """Innermost statements that name accepted counts, with their conditions unless the calls stand under these too."""
    for statement in body:
        told = ast.unparse(statement)
        if "num_accepted_tokens" not in told:
            continue
        inner = [part for name in ("body", "orelse", "finalbody") for part in getattr(statement, name, [])]
        whole = isinstance(statement, ast.If) and "._update_states(" not in told
        if whole or not inner:
            yield statement
        else:
            yield from _touching(inner)


class Runner:
    """In place of a `GPUModelRunner`: lifted methods over a batch whose accepted counts the device copies.

    Attributes beyond those set here are what the tree's own `__init__` assigns; where that cannot be evaluated, and for
    names that the class does not know, AttributeError.
    """

    def __init__(self, code: RunnerCode, device: Device, mode: Mode) -> None:
        self._code, self._landing = code, Landing()
        device.observers.append(self._landing)
        self._torch = _Torch(device)
        self.device = torch.device("cpu")
        self.pin_memory = True
        self.max_num_reqs = MAX_REQS
        self._settings(mode)
        self._buffers()
        self.input_batch = self._batch()
        self.requests: dict[str, Any] = {}
        self.num_accepted_tokens_event = device.event("accepted counts copied")
        context = _align_context(self.num_accepted_tokens.gpu)
        self._bufs = SimpleNamespace(postprocess_align=context, preprocess=None)

    def _settings(self, mode: Mode) -> None:
        self.use_async_scheduling = self.use_async_spec_decode = True
        self.speculative_config = SimpleNamespace(num_speculative_tokens=K, use_ngram_gpu=lambda: False)
        self.num_spec_tokens = K
        self.model_config = SimpleNamespace(is_hybrid=True)
        self.cache_config = SimpleNamespace(mamba_cache_mode=mode, enable_prefix_caching=mode != "none")
        self.compilation_config = SimpleNamespace(static_forward_context={})
        self.kv_cache_config = SimpleNamespace(kv_cache_groups=["one"], num_blocks=1)
        self.reorder_batch_threshold = 1 + K
        self.is_pooling_model = self.enable_prompt_embeds = self.uses_mrope = False
        self.uses_xdrope_dim = 0
        self.lora_config = None
        self.mamba_prev_last_scheduled_idx = _Buffer(MAX_REQS) if mode == "all" else None
        self.mamba_state_idx: dict[str, int] = {}
        self.num_prompt_logprobs: dict[str, int] = {}
        self.encoder_cache: dict[str, Any] = {}
        self.model = SimpleNamespace(get_mamba_state_copy_func=_nothing)
        self.late_interaction_runner = SimpleNamespace(
            on_requests_finished=_nothing, register_request=_nothing
        )

    def _buffers(self) -> None:
        rows, tokens = MAX_REQS, MAX_REQS * MAX_LEN
        for name in (
            "num_accepted_tokens",
            "prev_positions",
            "prev_num_draft_tokens",
            "num_scheduled_tokens",
        ):
            setattr(self, name, _Buffer(rows))
        self.num_accepted_tokens = _Buffer(rows)
        self.num_decode_draft_tokens, self.query_start_loc = _Buffer(rows), _Buffer(rows + 1)
        self.discard_request_mask = _Buffer(rows, torch.bool)
        self.input_ids, self.query_pos = _Buffer(tokens), _Buffer(tokens, torch.int64)
        self.req_indices = _Buffer(tokens, torch.int64)
        self.arange_np = np.arange(tokens)
        self.optimistic_seq_lens_cpu = torch.zeros(rows, dtype=torch.int32)
        self.seq_lens = torch.zeros(rows, dtype=torch.int32)
        self.num_computed_tokens = torch.zeros(rows, dtype=torch.int32)
        self.valid_sampled_token_count_gpu = torch.zeros(rows, dtype=torch.int32)
        self.positions = torch.zeros(tokens, dtype=torch.int64)

    def _batch(self) -> Any:
        offered = {
            "max_num_reqs": MAX_REQS,
            "max_model_len": MAX_LEN,
            "max_num_batched_tokens": MAX_REQS * MAX_LEN,
            "device": self.device,
            "pin_memory": False,
            "vocab_size": 100,
            "block_sizes": [MAX_LEN],
            "kernel_block_sizes": [MAX_LEN],
            "max_num_blocks_per_req": [1],
            "logitsprocs": SimpleNamespace(all=[]),
        }
        taken = self._code.batch.__init__.__code__.co_varnames
        batch = self._code.batch(**{name: value for name, value in offered.items() if name in taken})
        if not isinstance(getattr(batch, "num_accepted_tokens_cpu_tensor", None), torch.Tensor):
            raise UnfitError("its InputBatch has no num_accepted_tokens_cpu_tensor")
        pinned = self._torch.ones(MAX_REQS, dtype=torch.int32, pin_memory=True)
        batch.num_accepted_tokens_cpu_tensor, batch.num_accepted_tokens_cpu = pinned, pinned.numpy()
        return batch

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        method = self._code.method(name)
        if method is not None:
            return MethodType(method, self)
        value = self._code.initial(name)
        if value is None:
            raise AttributeError(f"the probe gives the runner no {name}")
        scope = {"torch": self._torch, "np": np, "self": self, "PIN_MEMORY": True}
        try:
            found = eval(compile(ast.Expression(value), RUNNER, "eval"), scope)
        except Exception as error:
            raise AttributeError(
                f"the probe gives the runner no {name}, and its own cannot be evaluated: {error}"
            ) from error
        setattr(self, name, found)
        return found

    def _prepare_input_ids(self, *_: Any, **__: Any) -> None:
        """Token ids do not depend on accepted counts."""

    def _calc_spec_decode_metadata(self, *_: Any, **__: Any) -> SimpleNamespace:
        return SimpleNamespace(logits_indices=None)

    def _get_valid_sampled_token_count(self) -> list[int]:
        counts: list[int] = self.valid_sampled_token_count_gpu.tolist()
        return counts

    def _get_mamba_bufs(self) -> SimpleNamespace:
        return self._bufs

    def _get_mamba_copy_bufs(self) -> None:
        """Copies of states are left out: no row crosses a block."""

    def _get_mamba_state_copy_funcs(self) -> None:
        """As above."""


@dataclass(frozen=True)
class Counts:
    """Accepted counts that the device has for the requests with drafts, and where the copy landed."""

    given: dict[str, int]
    landing: Landing


def counts_of(code: RunnerCode, mode: Mode, transition: Transition, device: Device) -> Counts:
    """Run the second step of a transition; the first one's copy is still queued when it begins."""
    runner = Runner(code, device, mode)
    first = _scheduled({row.name: _computed(row)[1] for row in transition.rows})
    first.scheduled_spec_decode_tokens = {r.name: [0] * K for r in transition.rows if r.role == "decode"}
    _first_step(runner, transition, first)
    runner._landing.second_step_begins()
    second = _second_step(transition)
    before, between, behind = code.around
    scope = {
        "self": runner,
        "np": np,
        "torch": torch,
        "mamba_utils": code.given["mamba_utils"],
        "scheduler_output": second,
        "deferred_state_corrections_fn": None,
    }
    exec(before, scope)
    scope["deferred_state_corrections_fn"] = runner._update_states(second)
    runner._landing.rows_have_moved()
    scope["num_reqs"] = runner.input_batch.num_reqs
    exec(between, scope)
    order = runner.input_batch.req_ids
    runner._prepare_inputs(second, np.array([second.num_scheduled_tokens[r] for r in order], dtype=np.int32))
    exec(behind, scope)
    given = {name: int(runner.num_accepted_tokens.gpu[order.index(name)]) for name in transition.right}
    return Counts(given, runner._landing)


def _computed(row: Row) -> tuple[int, int, int]:
    """Tokens computed before the first step, scheduled in it, and the prompt's length."""
    if row.role == "decode":
        return PROMPT, 1 + K, PROMPT
    return 0, PROMPT, PROMPT if row.role == "first-draft" else 2 * PROMPT


def _request(runner: Runner, name: str, prompt: int, computed: int, outputs: int = 0) -> Any:
    return runner._code.request(
        req_id=name,
        prompt_token_ids=[1] * prompt,
        mm_features=[],
        sampling_params=_sampling(),
        generator=None,
        block_ids=([1],),
        num_computed_tokens=computed,
        output_token_ids=[1] * outputs,
    )


def _sampling() -> SimpleNamespace:
    return SimpleNamespace(
        sampling_type=0,
        temperature=0.0,
        top_p=1.0,
        top_k=0,
        frequency_penalty=0.0,
        presence_penalty=0.0,
        repetition_penalty=1.0,
        logprobs=None,
        prompt_logprobs=None,
        logprob_token_ids=None,
        allowed_token_ids=None,
        bad_words_token_ids=None,
        thinking_token_budget=None,
    )


def _scheduled(tokens: dict[str, int]) -> SimpleNamespace:
    cached = SimpleNamespace(
        req_ids=[],
        resumed_req_ids=set(),
        num_computed_tokens=[],
        new_block_ids=[],
        num_output_tokens=[],
        new_token_ids=[],
        all_token_ids={},
    )
    return SimpleNamespace(
        num_scheduled_tokens=tokens,
        total_num_scheduled_tokens=sum(tokens.values()),
        finished_req_ids=set(),
        preempted_req_ids=set(),
        new_block_ids_to_zero=None,
        free_encoder_mm_hashes=[],
        kv_cache_block_copies=None,
        scheduled_new_reqs=[],
        scheduled_cached_reqs=cached,
        scheduled_spec_decode_tokens={},
    )


def _first_step(runner: Runner, transition: Transition, scheduled: SimpleNamespace) -> None:
    """Fill the batch, and let the released code take in what the step sampled."""
    batch, rows = runner.input_batch, transition.rows
    for index, row in enumerate(rows):
        computed, _, prompt = _computed(row)
        decodes = row.role == "decode"
        request = _request(runner, row.name, prompt, computed, outputs=int(decodes))
        runner.requests[row.name] = request
        batch.add_request(request)
        request.prev_num_draft_len = K if decodes else 0
        runner.num_computed_tokens[index] = computed
        runner.valid_sampled_token_count_gpu[index] = row.accepted if row.role != "prefill" else 0
    batch.refresh_metadata()
    sampled = torch.full((len(rows), 1 + K), -1)
    for index, row in enumerate(rows):
        sampled[index, : row.accepted] = 1
    runner._update_states_after_model_execute(sampled, scheduled)
    batch.prev_req_id_to_index = {r.name: i for i, r in enumerate(rows) if r.role != "prefill"}


def _second_step(transition: Transition) -> SimpleNamespace:
    staying = [row for row in transition.rows if not row.leaves]
    tokens = {row.name: PROMPT if row.role == "prefill" else 1 + K for row in staying}
    second = _scheduled(tokens | dict.fromkeys(transition.arrivals, PROMPT))
    second.finished_req_ids = {row.name for row in transition.rows if row.leaves}
    second.scheduled_spec_decode_tokens = {name: [0] * K for name in transition.right}
    cached = second.scheduled_cached_reqs
    for row in staying:
        cached.req_ids.append(row.name)
        cached.num_computed_tokens.append(sum(_computed(row)[:2]))
        cached.new_block_ids.append(None)
        cached.num_output_tokens.append({"decode": 2 + K, "first-draft": 1, "prefill": 0}[row.role])
    for name in transition.arrivals:
        second.scheduled_new_reqs.append(_arrival(name))
    return second


def _arrival(name: str) -> SimpleNamespace:
    return SimpleNamespace(
        req_id=name,
        prompt_token_ids=[1] * PROMPT,
        prompt_embeds=None,
        prompt_is_token_ids=None,
        mm_features=[],
        sampling_params=_sampling(),
        pooling_params=None,
        block_ids=([1],),
        num_computed_tokens=0,
        lora_request=None,
    )
