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
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext, suppress
from functools import cached_property, partial
from types import CodeType, MethodType, SimpleNamespace
from typing import Any, NamedTuple, get_args

import numpy as np
import torch

from specmortem import upstream
from specmortem.device import Device, Event
from specmortem.incidents.async_accepted_counts.engine.copy_completion import (
    CopyCompletion,
    PinnedTensor,
    UnfitError,
)
from specmortem.incidents.async_accepted_counts.engine.policies import Mode
from specmortem.incidents.async_accepted_counts.engine.transition import Landing, StepRow, Transition
from specmortem.upstream.stand_ins import Placeholder, stub
from specmortem.upstream.vllm_files import BATCH, CACHE, CACHE_MODES, MAMBA, RUNNER

RUNNER_CLASS = "GPUModelRunner"
LIFTED = (  # of what the released files import
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
_UNSET = ("logprobs", "prompt_logprobs", "logprob_token_ids", "allowed_token_ids", "bad_words_token_ids")
GREEDY = {"sampling_type": 0, "temperature": 0.0, "top_p": 1.0, "top_k": 0, "thinking_token_budget": None}
GREEDY |= {"frequency_penalty": 0.0, "presence_penalty": 0.0, "repetition_penalty": 1.0}
GREEDY |= dict.fromkeys(_UNSET)


class _Torch:
    """torch for the runner's own buffers: pinned ones are buffers of the simulated device."""

    def __init__(self, device: Device) -> None:
        self._device = device

    def __getattr__(self, name: str) -> Any:
        found = getattr(torch, name)
        return partial(self._make, found) if name in ("zeros", "ones", "empty") else found

    def _make(self, make: Callable[..., torch.Tensor], *size: Any, **options: Any) -> Any:
        pinned = options.pop("pin_memory", False)
        made = make(*size, **options)
        if not pinned:
            return made
        buffer = self._device.host_buffer(tuple(made.shape), made.dtype, name="accepted counts")
        buffer[:] = int(make is torch.ones)
        return PinnedTensor(buffer)

    def Event(self, *_: Any, **__: Any) -> Event:  # noqa: N802
        """An event of the simulated device."""
        return self._device.event()


class _Buffer:
    """A pair of host and device arrays that the counts in flight do not touch: copied at once."""

    def __init__(self, size: int, dtype: torch.dtype = torch.int32) -> None:
        self.cpu, self.gpu = torch.zeros((2, size), dtype=dtype).unbind()
        self.np = self.cpu.numpy()

    def copy_to_gpu(self, n: int | None = None) -> torch.Tensor:
        """Host to device."""
        return self.gpu[:n].copy_(self.cpu[:n])


def _nothing(*_: Any, **__: Any) -> None:
    """Stands for work that does not touch accepted counts."""


def _quiet(*names: str) -> SimpleNamespace:
    """Functions of these names that do nothing."""
    return SimpleNamespace(**dict.fromkeys(names, _nothing))


def _block_table(*_: Any, **__: Any) -> SimpleNamespace:
    rows = ("add_row", "append_row", "clear_row", "move_row", "swap_row")
    return _quiet(*rows, "commit_block_table", "compute_slot_mapping")


def stand_in(name: str) -> Any:
    """For a class one that can be made and asked `isinstance`; for anything else one that refuses to be used."""
    if name.lstrip("_")[:1].isupper():
        return stub(name)
    return Placeholder(name, "it is of another vLLM file")


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
        given = {
            "MultiGroupBlockTable": _block_table,
            "PIN_MEMORY": False,
            "SamplingType": SimpleNamespace(GREEDY=0, RANDOM=1, RANDOM_SEED=2),
            "get_pp_group": lambda: SimpleNamespace(is_first_rank=True, is_last_rank=True),
            "gpu_sync_allowed": nullcontext,
            "maybe_create_thinking_budget_state_holder": _nothing,
            "mamba_utils": _quiet(
                "postprocess_mamba",
                "postprocess_mamba_all",
                "preprocess_mamba",
                "preprocess_mamba_all_specdec",
                "stage_postprocess_inputs_to_gpu",
            ),
        }
        self.given = upstream.StandIns(given, names=LIFTED, make=stand_in)
        self.hashes: dict[str, str] = {}
        self.lines: dict[str, str] = {}
        self._methods: dict[str, Any] = {}
        with suppress(upstream.NotPresentError):
            name = "postprocess_mamba_align_gpu"
            setattr(self.given["mamba_utils"], name, self._lifted(MAMBA, name))
        self.batch = self._lifted(BATCH, "InputBatch")
        self.request = self._lifted(BATCH, "CachedRequestState")
        for name in ("_update_states", "_prepare_inputs", "_update_states_after_model_execute"):
            if self.method(name) is None:
                raise upstream.NotPresentError(f"{RUNNER_CLASS}.{name} in {RUNNER}")

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
    def _definitions(self) -> dict[str, ast.FunctionDef]:
        """The methods of the runner's class."""
        runner: Any = upstream.definition(self.tree, RUNNER, RUNNER_CLASS)
        return {node.name: node for node in runner.body if isinstance(node, ast.FunctionDef)}

    def method(self, name: str) -> Any:
        """A method of the runner as a function; None when its class has none of that name."""
        if name not in self._methods and name in self._definitions:
            lifted = upstream.lift_method(self.tree, RUNNER, f"{RUNNER_CLASS}.{name}", provide=self.given)
            self._methods[name] = self._noted(lifted)
        return self._methods.get(name)

    def initial(self, name: str) -> ast.expr | None:
        """What the runner's own `__init__` assigns to an attribute."""
        for node in ast.walk(self._definitions.get("__init__", ast.Module([], []))):
            targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
            value = getattr(node, "value", None)
            if any(isinstance(t, ast.Attribute) and t.attr == name for t in targets) and value is not None:
                return value if isinstance(value, ast.expr) else None
        return None

    @cached_property
    def around(self) -> tuple[CodeType, ...]:
        """Statements of `execute_model` that touch accepted counts.

        They are those before, between and after its calls of `_update_states` and `_prepare_inputs`.
        """
        node = self._definitions.get("execute_model")
        if node is None:
            raise upstream.NotPresentError(f"{RUNNER_CLASS}.execute_model in {RUNNER}")
        calls = [_line_of_call(node, name) for name in ("_update_states", "_prepare_inputs")]
        parts: tuple[list[ast.stmt], ...] = ([], [], [])
        for statement in _touching(node.body):
            parts[sum(call < statement.lineno for call in calls)].append(statement)
        return tuple(compile(ast.Module(part, []), RUNNER, "exec") for part in parts)


def _line_of_call(node: ast.FunctionDef, name: str) -> int:
    lines = [n.lineno for n in ast.walk(node) if isinstance(n, ast.Attribute) and n.attr == name]
    if not lines:
        raise UnfitError(f"its {node.name} does not call {name}")
    return min(lines)


def _touching(body: Sequence[ast.stmt]) -> Iterator[ast.stmt]:
    """Innermost statements that name accepted counts, with their conditions unless the calls stand under these too."""
    for statement in body:
        source = ast.unparse(statement)
        if "num_accepted_tokens" not in source:
            continue
        inner = [part for name in ("body", "orelse", "finalbody") for part in getattr(statement, name, [])]
        whole = isinstance(statement, ast.If) and "._update_states(" not in source
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
        self._code = code
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
        bufs = SimpleNamespace(postprocess_align=context, preprocess=None)
        self._get_mamba_bufs = lambda: bufs

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
        self.late_interaction_runner = _quiet("on_requests_finished", "register_request")
        self._prepare_input_ids = _nothing  # token ids do not depend on accepted counts
        self._get_mamba_copy_bufs = self._get_mamba_state_copy_funcs = _nothing  # no row crosses a block

    def _buffers(self) -> None:
        rows, tokens = MAX_REQS, MAX_REQS * MAX_LEN
        self.num_accepted_tokens, self.prev_positions = _Buffer(rows), _Buffer(rows)
        self.prev_num_draft_tokens, self.num_scheduled_tokens = _Buffer(rows), _Buffer(rows)
        self.num_decode_draft_tokens, self.query_start_loc = _Buffer(rows), _Buffer(rows + 1)
        self.discard_request_mask = _Buffer(rows, torch.bool)
        self.input_ids, self.query_pos = _Buffer(tokens), _Buffer(tokens, torch.int64)
        self.req_indices = _Buffer(tokens, torch.int64)
        self.arange_np = np.arange(tokens)
        self.optimistic_seq_lens_cpu, self.seq_lens = torch.zeros((2, rows), dtype=torch.int32).unbind()
        by_row = torch.zeros((2, rows), dtype=torch.int32)
        self.num_computed_tokens, self.valid_sampled_token_count_gpu = by_row.unbind()
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
        missing, value = f"the probe gives the runner no {name}", self._code.initial(name)
        if value is None:
            raise AttributeError(missing)
        scope = {"torch": self._torch, "np": np, "self": self, "PIN_MEMORY": True}
        try:
            found = eval(compile(ast.Expression(value), RUNNER, "eval"), scope)
        except Exception as error:
            raise AttributeError(f"{missing}, and its own cannot be evaluated: {error}") from error
        setattr(self, name, found)
        return found

    def _calc_spec_decode_metadata(self, *_: Any, **__: Any) -> SimpleNamespace:
        return SimpleNamespace(logits_indices=None)

    def _get_valid_sampled_token_count(self) -> list[int]:
        counts: list[int] = self.valid_sampled_token_count_gpu.tolist()
        return counts


def counts_of(code: RunnerCode, mode: Mode, transition: Transition, device: Device) -> Landing:
    """Run the second step of a transition; the first one's copy is still queued when it begins."""
    copy = CopyCompletion()
    device.observers.append(copy)
    runner = Runner(code, device, mode)
    _first_step(runner, transition)
    copy.second_step_begins()
    second = _second_step(transition)
    scope = {
        "self": runner,
        "np": np,
        "torch": torch,
        "mamba_utils": code.given["mamba_utils"],
        "scheduler_output": second,
        "deferred_state_corrections_fn": None,
    }
    before, between, after = code.around
    exec(before, scope)
    scope["deferred_state_corrections_fn"] = runner._update_states(second)
    copy.rows_have_moved()
    scope["num_reqs"] = runner.input_batch.num_reqs
    exec(between, scope)
    order = runner.input_batch.req_ids
    runner._prepare_inputs(second, np.array([second.num_scheduled_tokens[r] for r in order], dtype=np.int32))
    exec(after, scope)
    counts = dict(zip(order, runner.num_accepted_tokens.gpu.tolist(), strict=False))
    return Landing(transition, {req_id: counts[req_id] for req_id in transition.right}, copy)


class _Tokens(NamedTuple):
    """Of a request: computed before the first step, scheduled in it, in its prompt, and its outputs after it."""

    computed: int
    scheduled: int
    prompt: int
    outputs: int

    @classmethod
    def of(cls, row: StepRow) -> _Tokens:
        if row.role == "decode":
            return cls(PROMPT, 1 + K, PROMPT, 2 + K)
        first_draft = row.role == "first-draft"
        return cls(0, PROMPT, PROMPT if first_draft else 2 * PROMPT, int(first_draft))


def _request(req_id: str, prompt: int = PROMPT, computed: int = 0) -> dict[str, Any]:
    """What a request that the scheduler sends, and one that the runner keeps, have in common."""
    return {
        "req_id": req_id,
        "prompt_token_ids": [1] * prompt,
        "mm_features": [],
        "sampling_params": SimpleNamespace(**GREEDY),
        "block_ids": ([1],),
        "num_computed_tokens": computed,
    }


def _scheduled(tokens: dict[str, int], drafting: Iterable[str]) -> SimpleNamespace:
    """A scheduler's output: tokens of each request, and who has drafts."""
    lists = ("req_ids", "num_computed_tokens", "new_block_ids", "num_output_tokens", "new_token_ids")
    cached = SimpleNamespace(resumed_req_ids=set(), all_token_ids={}, **{name: [] for name in lists})
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
        scheduled_spec_decode_tokens={req_id: [0] * K for req_id in drafting},
    )


def _first_step(runner: Runner, transition: Transition) -> None:
    """Fill the batch, and let the released code take in what the step sampled."""
    batch, rows = runner.input_batch, transition.rows
    known_tokens = {row.req_id: _Tokens.of(row) for row in rows}
    for row, tokens in zip(rows, known_tokens.values(), strict=True):
        decodes = row.role == "decode"
        known = _request(row.req_id, tokens.prompt, tokens.computed)
        request = runner._code.request(**known, generator=None, output_token_ids=[1] * decodes)
        runner.requests[row.req_id] = request
        batch.add_request(request)
        request.prev_num_draft_len = K if decodes else 0
    computed = [tokens.computed for tokens in known_tokens.values()]
    valid = [row.accepted if row.role != "prefill" else 0 for row in rows]
    runner.num_computed_tokens[: len(rows)] = torch.tensor(computed, dtype=torch.int32)
    runner.valid_sampled_token_count_gpu[: len(rows)] = torch.tensor(valid, dtype=torch.int32)
    sampled = torch.tensor([[1] * row.accepted + [-1] * (1 + K - row.accepted) for row in rows])
    batch.refresh_metadata()
    scheduled = {req_id: tokens.scheduled for req_id, tokens in known_tokens.items()}
    drafting = (row.req_id for row in rows if row.role == "decode")
    runner._update_states_after_model_execute(sampled, _scheduled(scheduled, drafting))
    batch.prev_req_id_to_index = {r.req_id: i for i, r in enumerate(rows) if r.role != "prefill"}


def _second_step(transition: Transition) -> SimpleNamespace:
    staying = [row for row in transition.rows if not row.finished]
    tokens = {row.req_id: PROMPT if row.role == "prefill" else 1 + K for row in staying}
    second = _scheduled(tokens | dict.fromkeys(transition.new_req_ids, PROMPT), transition.right)
    second.finished_req_ids = {row.req_id for row in transition.rows if row.finished}
    cached = second.scheduled_cached_reqs
    for row in staying:
        done = _Tokens.of(row)
        cached.req_ids.append(row.req_id)
        cached.num_computed_tokens.append(done.computed + done.scheduled)
        cached.new_block_ids.append(None)
        cached.num_output_tokens.append(done.outputs)
    unset = dict.fromkeys(("prompt_embeds", "prompt_is_token_ids", "pooling_params", "lora_request"))
    arrivals = [SimpleNamespace(**_request(req_id), **unset) for req_id in transition.new_req_ids]
    second.scheduled_new_reqs.extend(arrivals)
    return second
