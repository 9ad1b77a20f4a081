"""A small experiment on the stand-in engine, and tasks whose answer it knows."""

from __future__ import annotations

import json
import random
from pathlib import Path
from types import SimpleNamespace

from specmortem.tools.engine import arms, campaign
from specmortem.tools.engine.process import Environment

FAKE = Path(__file__).with_name("fake_vllm")
HERE = Environment(path=(str(FAKE),))
SPECULATION = {"method": "mtp", "num_speculative_tokens": 3}


def make(count, seed, length, answer):
    """Prompts whose right answer goes by their sum."""
    draw = random.Random(seed)
    prompts = [[draw.randrange(3, 250) for _ in range(draw.randint(*length))] for _ in range(count)]
    answers = ([(sum(prompt) + 7 * i) % 240 + 10 for i in range(answer)] for prompt in prompts)
    return [SimpleNamespace(prompt=p, answer=a) for p, a in zip(prompts, answers, strict=True)]


def tables(**cues):
    """The tables of an experiment with one speculating arm a cue, each told in FAKE_VLLM, and a plain arm."""
    made = [
        {"name": name, "set": {"env.FAKE_VLLM": json.dumps(cue)}, "reference": ""}
        for name, cue in cues.items()
    ]
    return {
        "incident": "toy",
        "question": "Does it break?",
        "runs": 5,
        "start_timeout_s": 120,
        "run_timeout_s": 120,
        "model": {"config": {"vocab_size": 256, "eos_token_id": 2}, "tasks": f"{__name__}:make"},
        "base": {
            "vllm": "0.23.0",
            "workload": "small",
            "engine": {"max_num_seqs": 4, "max_model_len": 128, "speculative_config": SPECULATION},
            "env": {"FAKE_VLLM": "{}"},
        },
        "workloads": {
            "small": {
                "source": "a test",
                "concurrency": [6],
                "requests": 10,
                "prompt_tokens": [8, 20],
                "max_tokens": [16, 24],
                "every": 1,
            }
        },
        "arms": [{"name": "sound"}, {"name": "plain", "without": ["engine.speculative_config"]}, *made],
        "pairs": [{"left": "sound", "right": name} for name in cues],
    }


def fake_gpu(folder, log):
    """An environment with a torch whose idle work is a line of `log`: 2,000 cycles a microsecond.

    Events without timing are lines too, with the number of the event.
    """
    (folder / "torch").mkdir()
    (folder / "torch" / "__init__.py").write_text(
        "from types import SimpleNamespace as N\n"
        "def line(*words):\n"
        f"    with open({str(log)!r}, 'a') as file: print(*words, file=file)\n"
        "made = []\n"
        "class Event:\n"
        "    def __init__(self, enable_timing=False):\n"
        "        self.number = None if enable_timing else len(made)\n"
        "        made.extend([] if enable_timing else [self])\n"
        "    def say(self, what):\n"
        "        if self.number is not None: line(what, self.number)\n"
        "    def record(self): self.say('record')\n"
        "    def synchronize(self): self.say('wait')\n"
        "    def elapsed_time(self, other): return 10.0\n"
        "cuda = N(_sleep=line, Event=Event,\n"
        "         is_available=lambda: True, synchronize=lambda: None, get_device_name=lambda i: 'Fake GPU')\n"
    )
    return Environment(path=(str(FAKE), str(folder)))


def run(tmp_path, data, only=(), environments=None, **options):
    """Run arms of an experiment; gives the results."""
    found = arms.parse(data)
    return campaign.run(
        found,
        environments or {"0.23.0": HERE},
        tmp_path,
        tmp_path / "engine.json",
        campaign.Options(tuple(only), command="specmortem engine toy", **options),
    )
