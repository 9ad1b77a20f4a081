import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

from vllm import CUE
from vllm.sampling_params import RequestOutputKind
from vllm.v1.attention.backends.flashinfer import FlashInferMetadataBuilder

EOS = 2


def right(prompt, count):
    return [(sum(prompt) + 7 * i) % 240 + 10 for i in range(count)]


class Model:
    """Its call goes to `forward` past the hooks of a module, as one that vLLM's decorator has."""

    def __init__(self, compiled, note):
        self.do_not_compile, self.note = not compiled, note

    def __call__(self, **inputs):
        return self.forward(**inputs)

    def forward(self, position):
        self.note("draft", position)


def drafter(note):
    backend = SimpleNamespace(get_name=lambda: "FLASH_ATTN")
    model = None if CUE.get("drafter") == "bare" else Model(CUE.get("drafter") == "compiled", note)
    return SimpleNamespace(model=model, draft_attn_groups=[SimpleNamespace(backend=backend)])


class LLMEngine:
    def __init__(self, args):
        if CUE.get("fault") == "refuse":
            raise ValueError("No available memory for the cache blocks")
        self.args, self.steps = args, 0
        self.waiting, self.running = [], []
        self.drafts = self.accepted = 0
        self.vllm_config = SimpleNamespace(
            cache_config=SimpleNamespace(block_size=16, mamba_cache_mode="none"),
            scheduler_config=SimpleNamespace(async_scheduling=True),
        )
        self.note("core", *resource.getrlimit(resource.RLIMIT_CORE)[:1])
        self.k = (args.speculative_config or {}).get("num_speculative_tokens", 0)
        runner = SimpleNamespace()
        if self.k and CUE.get("drafter") != "none":
            runner.drafter = drafter(self.note)
        worker = SimpleNamespace(worker=SimpleNamespace(model_runner=runner))
        core = SimpleNamespace(model_executor=SimpleNamespace(driver_worker=worker))
        self.engine_core, self.runner = SimpleNamespace(engine_core=core), runner
        self.builders = [FlashInferMetadataBuilder(self.note) for _ in range(CUE.get("builders", 0))]

    @classmethod
    def from_engine_args(cls, args):
        assert Path(args.model, "config.json").is_file()
        return cls(args)

    def note(self, *words):
        if log := CUE.get("log"):
            with Path(log).open("a") as file:
                print(*words, file=file)

    def add_request(self, request_id, prompt, params):
        assert params.output_kind is RequestOutputKind.DELTA
        assert prompt["type"] == "token"
        tokens = prompt["prompt_token_ids"]
        assert len(tokens) + params.max_tokens <= self.args.max_model_len
        if request_id.startswith("warm"):
            answer = right(tokens, params.max_tokens)
        else:
            self.note("add", request_id, self.steps, len(tokens))
            answer = self.damaged(request_id, right(tokens, params.max_tokens))
        self.waiting.append(SimpleNamespace(id=request_id, answer=answer, sent=0, params=params))

    def damaged(self, request_id, answer):
        number = int(request_id.rpartition("-")[2])
        if number % CUE.get("every", 1) or (CUE.get("speculating") and not self.k):
            return answer
        fault = CUE.get("fault")
        if fault == "wrong":
            answer[3] = 5
        elif fault == "loop":
            answer[2:] = [5, 6] * len(answer[2:])
            del answer[len(answer) // 2 * 2 :]
        elif fault == "early":
            answer[4:] = [EOS]
        return answer

    def abort_request(self, request_ids):
        self.note("abort", *request_ids, self.steps)
        for queue in (self.waiting, self.running):
            queue[:] = [r for r in queue if r.id not in request_ids]

    def step(self):
        if not (self.waiting or self.running):
            return []
        if all(r.id.startswith("warm") for r in self.waiting + self.running):
            self.misbehave(CUE.get("warm"))
        else:
            if self.steps == CUE.get("at", 0):
                self.misbehave(CUE.get("fault"))
            self.steps += 1
            self.note("step", self.steps, len(self.running))
        while self.waiting and len(self.running) < self.args.max_num_seqs:
            self.running.append(self.waiting.pop(0))
        outputs = [self.advance(r) for r in self.running]
        for number, builder in enumerate(self.builders):
            builder.build(0, number)
        if CUE.get("drafter") == "calls":
            for position in range(self.k):
                self.runner.drafter.model(position=position)
        self.running = [r for r in self.running if r.sent < len(r.answer)]
        return outputs

    def advance(self, r):
        count = 1
        if self.k and r.sent:
            self.drafts += 1
            count += (r.sent + len(r.answer)) % (self.k + 1)
        new = r.answer[r.sent : r.sent + count]
        if self.k and r.sent:
            self.accepted += len(new) - 1
        r.sent += len(new)
        done = r.sent == len(r.answer)
        if done and not r.id.startswith("warm"):
            self.note("end", r.id, self.steps)
        stopped = new and new[-1] in (r.params.stop_token_ids or ())
        reason = ("stop" if stopped else "length") if done else None
        answer = SimpleNamespace(token_ids=new, finish_reason=reason)
        return SimpleNamespace(request_id=r.id, outputs=[answer], finished=done)

    def misbehave(self, fault):
        if fault == "abort":
            print("terminate called after throwing an instance of 'c10::AcceleratorError'", file=sys.stderr)
            print("CUDA error: an illegal memory access was encountered", file=sys.stderr, flush=True)
            os.abort()
        if fault == "segv":
            os.kill(os.getpid(), signal.SIGSEGV)
        if fault == "exit":
            print("EngineCore encountered an issue", file=sys.stderr, flush=True)
            os._exit(3)
        if fault == "orphan":
            if os.fork() == 0:
                time.sleep(3600)
            os._exit(4)
        if fault == "bug-once" and not Path(CUE["marker"]).exists():
            Path(CUE["marker"]).touch()
            fault = "bug"
        if fault == "bug":
            raise AttributeError("'NoneType' object has no attribute 'step'")
        if fault == "memory":
            raise RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB")
        if fault in ("slip", "slip-and-die"):
            command = [sys.executable, "-c", "import time; time.sleep(3600)"]
            away = subprocess.Popen(command, start_new_session=True)
            bare = subprocess.Popen(command, start_new_session=True, env={})
            Path(CUE["pids"]).write_text(f"{os.getpid()} {away.pid} {bare.pid}")
            if fault == "slip-and-die":
                os.abort()
            time.sleep(3600)
        if fault == "supervisor":
            os.kill(os.getppid(), CUE["number"])
            time.sleep(3600)
        if fault == "leak":
            raise RuntimeError(
                f"no \x1b[2J\u202e in {os.environ['HOME']}/x, {self.args.model} or {Path.cwd()}/y"
            )
        if fault == "raise":
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        if fault == "hang":
            child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(3600)"])
            if "pids" in CUE:
                Path(CUE["pids"]).write_text(f"{os.getpid()} {child.pid}")
            time.sleep(3600)

    def get_metrics(self):
        assert not self.args.disable_log_stats
        if CUE.get("fault") == "metrics" and self.steps:
            raise TypeError("get_metrics() missing 1 required positional argument")
        if not self.k:
            return [SimpleNamespace(name="vllm:num_requests_running", value=0)]
        prefix = "vllm:spec_decode_num_"
        return [
            SimpleNamespace(name=prefix + "drafts", value=self.drafts),
            SimpleNamespace(name=prefix + "draft_tokens", value=self.drafts * self.k),
            SimpleNamespace(name=prefix + "accepted_tokens", value=self.accepted),
            SimpleNamespace(
                name=prefix + "accepted_tokens_per_pos", values=[self.accepted] + [0] * (self.k - 1)
            ),
        ]
