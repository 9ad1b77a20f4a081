"""The process of one engine: starts released vLLM, drives it step by step, and tells what happens.

Run by path with the interpreter of the environment under test: `python -P child.py REQUEST.json EVENTS`. It needs the
standard library and vLLM, nothing of this package. Each line that it adds to the file EVENTS is one JSON event, in
this order: `imported`, `up` when the engine has answered a few requests, then for each run `begin`, `request` as each
ends, `step` now and then, `run`; at last `done`, or `fault` with the classes and the text of the exception. The engine
lives in this process and thread
(VLLM_ENABLE_V1_MULTIPROCESSING=0), so that what arrives before step n arrives before step n in every run.
"""

from __future__ import annotations

import ctypes
import faulthandler
import importlib
import json
import os
import platform
import random
import resource
import signal
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from importlib import metadata
from types import ModuleType
from typing import Any

PR_SET_PDEATHSIG = 1
HEARTBEAT_S = 1.0
DRAIN_STEPS = 3
MESSAGE_LIMIT = 2000
CALIBRATION_CYCLES = 20_000_000
DRAFT_DELAY = "draft_delay_us"
DELAYS = ("gpu_delay_us", "gpu_delay_steps", DRAFT_DELAY)
# From an engine to the proposer of its drafts, by released source of vLLM 0.20.0 to 0.26.0, model runner V1 alone.
DRAFTER = (
    "engine_core",
    "engine_core",
    "model_executor",
    "driver_worker",
    "worker",
    "model_runner",
    "drafter",
)
CALM_STEPS = 24  # of a run, before delays in shares of a step's time begin; the first third is not timed
WRONG_RELEASE, FAULT = 78, 70  # exit codes
COUNTERS = {
    "vllm:spec_decode_num_drafts": "drafts",
    "vllm:spec_decode_num_draft_tokens": "draft_tokens",
    "vllm:spec_decode_num_accepted_tokens": "accepted",
    "vllm:spec_decode_num_accepted_tokens_per_pos": "per_position",
}
PACKAGES = ("torch", "triton", "flashinfer-python", "transformers")  # beside vLLM itself
Tell = Callable[..., None]
Spin = Callable[[float], None]


class EngineDriver:
    """One engine and what is sent to it."""

    def __init__(self, request: Mapping[str, Any], tell: Tell) -> None:
        self.request, self.tell = request, tell
        self.place: dict[str, Any] = {"phase": "import", "run": None, "step": None}
        self.engine: Any = None
        self.spin: Spin | None = None
        self.draft_delay: DraftDelay | None = None
        self.patch: BuildEvent | None = None

    def main(self) -> None:
        """Start, run everything, and tell."""
        start = time.perf_counter()
        found = versions(importlib.import_module("vllm"))
        self.tell("imported", seconds=time.perf_counter() - start, versions=found)
        if wanted := self.request.get("vllm"):
            refuse_another_release(found["vllm"], wanted)
        self.start()
        for plan in self.request["runs"]:
            self.run(plan)
        self.place = {"phase": "done", "run": None, "step": None}
        self.tell("done")

    def start(self) -> None:
        """The engine, with its statistics on: the counters of accepted drafts are among them."""
        self.place["phase"], start = "start", time.perf_counter()
        args = importlib.import_module("vllm.engine.arg_utils").EngineArgs(
            **{**self.request["engine"], "disable_log_stats": False}
        )
        if name := self.request.get("patch", ""):
            self.patch = PATCHES[name]()
        engine_class = importlib.import_module("vllm.v1.engine.llm_engine").LLMEngine
        self.engine = engine_class.from_engine_args(args)
        if (warm := self.request.get("warm")) is not None:
            self.warm_up(warm)
        self.delays()
        seconds = time.perf_counter() - start
        self.tell("up", seconds=seconds, device=device_name(), chosen=chosen(self.engine))

    def delays(self) -> None:
        """What puts idle work on the GPU, where a run asks for it."""
        asked = {name for plan in self.request["runs"] for name in DELAYS if plan[name][1] > 0}
        if asked:
            self.spin = spinner()
        if self.spin is not None and DRAFT_DELAY in asked:
            self.draft_delay = DraftDelay(draft_model(self.engine), self.spin)

    def warm_up(self, plan: Mapping[str, Any]) -> None:
        """Requests that nobody looks at, without idle work: what is compiled at first use is so before run 0."""
        Repetition(self.engine, plan, lambda event, **fields: None, {"step": 0}, None).main()

    def run(self, plan: Mapping[str, Any]) -> None:
        """One repetition of the workload."""
        self.place = {"phase": "run", "run": plan["run"], "step": 0}
        self.tell("begin", run=plan["run"])
        before, start = counters(self.engine), time.perf_counter()
        patched = self.patched()
        run = Repetition(self.engine, plan, self.tell, self.place, self.spin)
        if self.draft_delay is not None:
            self.draft_delay.draw = run.draft_delay
        run.main()
        if plan[DRAFT_DELAY][1] > 0 and not run.draft_delays:
            raise RuntimeError(
                f"{DRAFT_DELAY}: no draft pass called the drafter's model, so none was delayed"
            )
        if self.patch is not None and self.patched() == patched:
            raise RuntimeError(f"patch {self.request['patch']}: the engine never came by what it wraps")
        self.tell(
            "run",
            run=plan["run"],
            seconds=time.perf_counter() - start,
            acceptance=difference(before, counters(self.engine)),
            step_ms=[round(ms, 4) for ms in run.step_ms],
            delay_us=middle(run.delays),
            draft_delay_us=middle(run.draft_delays),
            draft_passes=len(run.draft_delays),
            patched_calls=self.patched() - patched,
            emitted=run.emitted,
        )

    def patched(self) -> int:
        """Calls that went through the patch so far."""
        return self.patch.calls if self.patch is not None else 0


class Repetition:
    """The state of one repetition."""

    def __init__(
        self, engine: Any, plan: Mapping[str, Any], tell: Tell, place: dict[str, Any], spin: Spin | None
    ) -> None:
        self.engine, self.plan, self.tell, self.place, self.spin = engine, plan, tell, place, spin
        self.draw = random.Random(plan["seed"])
        self.draw_drafts = random.Random(f"{plan['seed']}/drafts")
        self.told = time.monotonic()
        self.step_ms: list[float] = []
        self.delays: list[float] = []
        self.draft_delays: list[float] = []
        self.emitted: dict[str, int] = {}
        self.tokens: dict[str, list[int]] = {}
        self.added_at: dict[str, int] = {}

    def main(self) -> None:
        """All rounds; then a batch that is still queued ends, and a fault on the GPU comes out, in this repetition."""
        for number, part in enumerate(self.plan["rounds"]):
            self.round(number, part)
        for _ in range(DRAIN_STEPS):
            self.engine.step()
        synchronize()

    def round(self, number: int, part: Mapping[str, Any]) -> None:
        """Requests arrive at their steps, as long as fewer than `concurrency` are in flight, until all have ended."""
        waiting, step = list(reversed(part["requests"])), 0
        while waiting or self.tokens:
            self.arrivals(waiting, part["concurrency"], step)
            self.aborts(part["requests"], step)
            if self.tokens:
                self.step()
                step += 1
            elif waiting:
                step = max(step, waiting[-1]["at"])
            if time.monotonic() - self.told > HEARTBEAT_S:
                self.told = time.monotonic()
                self.tell("step", **self.place, round=number, waiting=len(waiting), running=len(self.tokens))

    def arrivals(self, waiting: list[dict[str, Any]], concurrency: int, step: int) -> None:
        while waiting and waiting[-1]["at"] <= step and len(self.tokens) < concurrency:
            request = waiting.pop()
            self.tokens[request["id"]], self.added_at[request["id"]] = [], step
            prompt = {"type": "token", "prompt_token_ids": list(request["prompt"])}
            self.engine.add_request(request["id"], prompt, self.sampling(request))

    def sampling(self, request: Mapping[str, Any]) -> Any:
        module: Any = importlib.import_module("vllm.sampling_params")
        warm, eos = self.plan["temperature"] > 0, self.plan["eos"]
        return module.SamplingParams(
            temperature=self.plan["temperature"],
            seed=request["seed"] if warm else None,
            max_tokens=request["max_tokens"],
            ignore_eos=self.plan["ignore_eos"],
            # Without a tokenizer the engine is not told of an EOS.
            stop_token_ids=[eos] if eos is not None and not self.plan["ignore_eos"] else None,
            detokenize=False,
            output_kind=module.RequestOutputKind.DELTA,
        )

    def aborts(self, requests: Sequence[Mapping[str, Any]], step: int) -> None:
        for request in requests:
            id, after = request["id"], request["abort_after"]
            if after is not None and id in self.tokens and step >= self.added_at[id] + after:
                self.engine.abort_request([id])
                self.ended(id, "abort")

    def step(self) -> None:
        if self.spin is not None and (delay := self.delay()) > 0:
            self.spin(delay)
            self.delays.append(delay)
        start = time.perf_counter()
        outputs = self.engine.step()
        self.step_ms.append(1000 * (time.perf_counter() - start))
        self.place["step"] += 1
        for output in outputs:
            if output.request_id in self.tokens:
                self.take(output)

    def delay(self) -> float:
        """Microseconds of idle GPU work in front of the next step."""
        if self.plan["gpu_delay_us"][1] > 0:
            return self.draw.uniform(*self.plan["gpu_delay_us"])
        if len(self.step_ms) < CALM_STEPS:
            return 0.0
        usual = statistics.median(self.step_ms[CALM_STEPS // 3 : CALM_STEPS])
        return 1000 * usual * self.draw.uniform(*self.plan["gpu_delay_steps"])

    def draft_delay(self) -> float:
        """Microseconds of idle GPU work in front of the next draft pass."""
        self.draft_delays.append(self.draw_drafts.uniform(*self.plan[DRAFT_DELAY]))
        return self.draft_delays[-1]

    def take(self, output: Any) -> None:
        answer = output.outputs[0]
        new = list(answer.token_ids)
        self.tokens[output.request_id].extend(new)
        if new:
            self.emitted[str(len(new))] = self.emitted.get(str(len(new)), 0) + 1
        if output.finished:
            self.ended(output.request_id, str(answer.finish_reason))

    def ended(self, id: str, finish: str) -> None:
        self.tell("request", run=self.plan["run"], id=id, tokens=self.tokens.pop(id), finish=finish)


class DraftDelay:
    """Idle GPU work in front of each draft pass: of what `draw` gives, in microseconds; none while it is None."""

    def __init__(self, model: Any, spin: Spin) -> None:
        """Wraps the model's `forward`, for good.

        vLLM's decorator for torch.compile calls `forward` itself where nothing is compiled
        (compilation/decorators.py:466 in 0.20.0, :506 from 0.21.0 on), so hooks of torch.nn.Module never run.
        """
        self.draw: Callable[[], float] | None = None
        self.spin, self.forward = spin, model.forward
        model.forward = self._delayed

    def _delayed(self, *args: Any, **kwargs: Any) -> Any:
        if self.draw is not None:
            self.spin(self.draw())
        return self.forward(*args, **kwargs)


class BuildEvent:
    """Patch `build-event`: a build of FlashInfer metadata waits until the copies of the build before it have ended.

    A build fills page-locked buffers of its builder, the row pointers of the pages and FlashInfer's plan, and queues
    their copies (v1/attention/backends/flashinfer.py:885-940 and :1305 in vLLM 0.24.0). The next one fills the same
    buffers. One event a builder, recorded after its copies and waited for by the host, is what the fix of
    the draft-loop incident comes to.
    """

    def __init__(self) -> None:
        """Wraps `FlashInferMetadataBuilder.build`, for good."""
        module: Any = importlib.import_module("vllm.v1.attention.backends.flashinfer")
        self.event: Any = importlib.import_module("torch").cuda.Event
        self.calls = 0
        self.copied: dict[int, Any] = {}
        build = module.FlashInferMetadataBuilder.build

        def waiting(builder: Any, *args: Any, **kwargs: Any) -> Any:
            self.calls += 1
            if (copied := self.copied.get(id(builder))) is not None:
                copied.synchronize()
            made = build(builder, *args, **kwargs)
            self.copied[id(builder)] = self.event()
            self.copied[id(builder)].record()
            return made

        module.FlashInferMetadataBuilder.build = waiting


PATCHES = {"build-event": BuildEvent}


def drafter_of(engine: Any) -> Any:
    """What proposes the drafts of an engine in this process. Raises RuntimeError that names what is not there."""
    at, path = engine, "engine"
    for name in DRAFTER:
        if (found := getattr(at, name, None)) is None:
            raise RuntimeError(
                f"{DRAFT_DELAY}: {path} ({type(at).__name__}) has no {name}; it needs drafts by model runner V1"
            )
        at, path = found, f"{path}.{name}"
    return at


def draft_model(engine: Any) -> Any:
    """The model that drafts. Raises RuntimeError where there is none, or where it is compiled."""
    drafter = drafter_of(engine)
    model = getattr(drafter, "model", None)
    if not callable(getattr(model, "forward", None)):
        raise RuntimeError(
            f"{DRAFT_DELAY}: the drafter ({type(drafter).__name__}) has no model with a forward"
        )
    if not getattr(model, "do_not_compile", True):
        raise RuntimeError(
            f"{DRAFT_DELAY}: the drafter's model ({type(model).__name__}) is compiled; set enforce_eager = true"
        )
    return model


def draft_attention(engine: Any) -> list[str] | None:
    """The attention backends of the drafter, which vLLM chooses apart from the target's; None for no such drafter."""
    try:
        return [str(group.backend.get_name()) for group in drafter_of(engine).draft_attn_groups]
    except (AttributeError, RuntimeError, TypeError):
        return None


def middle(values: Sequence[float]) -> float | None:
    """The median, to a thousandth; None of nothing."""
    return round(statistics.median(values), 3) if values else None


def versions(vllm: ModuleType) -> dict[str, str]:
    """Of the packages that matter, as this interpreter sees them."""
    found = {"python": platform.python_version(), "vllm": str(getattr(vllm, "__version__", ""))}
    for name in PACKAGES:
        with suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found


def refuse_another_release(found: str, wanted: str) -> None:
    """Leave where the release is not the one that the arm is about."""
    if found.split("+")[0] != wanted:
        print(f"this environment holds vllm {found}, the arm needs {wanted}", file=sys.stderr, flush=True)
        os._exit(WRONG_RELEASE)


def chosen(engine: Any) -> dict[str, Any]:
    """What the engine settled on by itself."""
    config, attention = engine.vllm_config, draft_attention(engine)
    cache, scheduler = getattr(config, "cache_config", None), getattr(config, "scheduler_config", None)
    return {
        "block_size": getattr(cache, "block_size", None),
        "mamba_cache_mode": getattr(cache, "mamba_cache_mode", None),
        "async_scheduling": getattr(scheduler, "async_scheduling", None),
        **({} if attention is None else {"draft_attention": attention}),
    }


def counters(engine: Any) -> dict[str, Any]:
    """The engine's counters of drafts; empty without speculation."""
    return {
        COUNTERS[metric.name]: list(metric.values) if hasattr(metric, "values") else metric.value
        for metric in engine.get_metrics()
        if metric.name in COUNTERS
    }


def difference(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, Any]:
    """What a run added to the counters."""
    added: dict[str, Any] = {}
    for name, value in after.items():
        if isinstance(value, list):
            old = before.get(name) or [0] * len(value)
            added[name] = [new - was for new, was in zip(value, old)]  # noqa: B905 (as long by construction)
        else:
            added[name] = value - before.get(name, 0)
    return added


def torch_with_gpu() -> Any:
    """torch where vLLM has imported it and it has a GPU."""
    torch = sys.modules.get("torch")
    return torch if torch is not None and torch.cuda.is_available() else None


def synchronize() -> None:
    if (torch := torch_with_gpu()) is not None:
        torch.cuda.synchronize()


def device_name() -> str:
    torch = torch_with_gpu()
    return str(torch.cuda.get_device_name(0)) if torch is not None else ""


def spinner() -> Spin:
    """A function that puts so many microseconds of idle work on the GPU, in front of what is launched next."""
    torch: Any = importlib.import_module("torch")
    rate = max(measured_rate(torch) for _ in range(3))

    def spin(us: float) -> None:
        torch.cuda._sleep(int(us * rate))

    return spin


def measured_rate(torch: Any) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    torch.cuda._sleep(CALIBRATION_CYCLES)
    end.record()
    end.synchronize()
    return CALIBRATION_CYCLES / (1000 * float(start.elapsed_time(end)))


def fault_of(error: BaseException) -> dict[str, Any]:
    """An exception as the parent judges it."""
    code = getattr(error, "error_code", None)
    return {
        "types": [f"{kind.__module__}.{kind.__qualname__}" for kind in type(error).__mro__],
        "message": str(error)[:MESSAGE_LIMIT],
        "code": code if isinstance(code, int) else None,
    }


def die_with_parent() -> None:
    """SIGKILL for this process when the one that started it, its supervisor, dies (Linux)."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def no_core_file() -> None:
    """A core of an engine is of many gigabytes."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))


def main() -> None:
    """Never returns: leaving by os._exit skips a teardown that a broken CUDA context would hang in."""
    die_with_parent()
    no_core_file()
    faulthandler.enable()
    with open(sys.argv[1], encoding="utf-8") as file:  # noqa: PTH123
        request = json.load(file)
    channel = open(sys.argv[2], "a", encoding="utf-8")  # noqa: PTH123, SIM115

    def tell(event: str, **fields: Any) -> None:
        channel.write(json.dumps({"event": event, **fields}) + "\n")
        channel.flush()

    driver, code = EngineDriver(request, tell), 0
    try:
        driver.main()
    except BaseException as error:
        code = FAULT
        faulthandler.dump_traceback(all_threads=False)
        tell("fault", **driver.place, **fault_of(error))
        sys.excepthook(type(error), error, error.__traceback__)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    main()
