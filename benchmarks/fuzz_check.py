"""Mutated launches, logs and service files through `check`: nothing raises, and no noise turns exposure into safety.

`python benchmarks/fuzz_check.py OUT.json [--inputs 200000] [--seed 0] [--jobs N]`. The oracle: what is added to a text
without being a flag of its launch never removes exposure. A cause that was reached or unknown stays reached or unknown
when sentences, foreign flags, variables, log lines or other launches are added. Random bytes only must not raise.
"""

from __future__ import annotations

import json
import random
import resource
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
import yaml

from specmortem.affected.answers import answer
from specmortem.affected.matrix import configurations
from specmortem.affected.released import released
from specmortem.errors import BadInputError
from specmortem.exposure import Config
from specmortem.incident import rules
from specmortem.tools.check.inputs import inputs
from specmortem.tools.check.understand import understand

SENTENCES = (
    "with --no-async-scheduling it has been stable for two days",
    "We set --max-num-seqs 1 and the crash went away.",
    "adding --enforce-eager helps",
    "- tried --no-enable-prefix-caching: no more garbled answers",
    "The same server without speculative decoding is fine.",
    "it works with --pipeline-parallel-size 1",
    "TRITON_ATTN in the drafter does not crash",
    "If I remove --speculative-config nothing happens.",
    "async off, k=1 is clean",
    "num_speculative_tokens 1 never faulted here",
    "VLLM_USE_V2_MODEL_RUNNER was not set by us",
    "mamba_cache_mode none was fine before the upgrade",
    "thanks for looking into this!",
    "> quoted: turn off CUDA graphs, use eager mode instead",
    "Then we set VLLM_USE_V2_MODEL_RUNNER=0 and it went away.",
    "VLLM_USE_V2_MODEL_RUNNER=1 fixed it for us",
    "The B200 box shows nothing of it.",
    "works on H100",
)
FLAGS = (
    "--frobnicate 3", "--speculative-confg none", "--async_scheduling_off", "--api-key sk-x", "--port 8001",
    "--served-model-name m", "--seed 1", "$EXTRA", "--no-such-switch", "--max-num-batched-tokens 8192", "-v",
)  # fmt: skip
VARIABLES = ("FOO=bar", "CUDA_VISIBLE_DEVICES=0,1", "HF_HOME=/x", "VLLM_LOGGING_LEVEL=DEBUG", "NO_SPEC=1")
LOG_LINES = (
    "INFO 11-02 10:00:01 [loggers.py:257] Engine 000: Running: 3 reqs, Waiting: 0 reqs",
    "(APIServer pid=1) INFO:     127.0.0.1:1 - \"POST /v1/completions HTTP/1.1\" 200 OK",
    "WARNING 11-02 10:00:01 [x.py:1] something else",
)  # fmt: skip
Mutation = Callable[[random.Random, str], str]


def _line(words: tuple[str, ...], *, first: bool = False) -> Mutation:
    def mutate(rng: random.Random, text: str) -> str:
        line = rng.choice(words)
        return f"{line}\n{text}" if first or rng.random() < 0.5 else f"{text}\n{line}"

    return mutate


def _flag(rng: random.Random, text: str) -> str:
    """A flag that takes nothing away, at the end of the command."""
    head, _, rest = text.partition("\n")
    return f"{head} {rng.choice(FLAGS)}" + (f"\n{rest}" if rest else "")


def _variable(rng: random.Random, text: str) -> str:
    return f"{rng.choice(VARIABLES)} {text}" if "vllm serve" in text.partition("\n")[0] else text


def _other_launch(rng: random.Random, text: str) -> str:
    return f"{text}\n{rng.choice(configurations()).launch}"


def _fenced(rng: random.Random, text: str) -> str:
    return f"```\n{text}\n```"


def _prompt(rng: random.Random, text: str) -> str:
    return f"{rng.choice(('$ ', '# ', '> ', 'root@x:/# '))}{text}"


def _broken_line(rng: random.Random, text: str) -> str:
    """The command over several lines, as people write it."""
    return text.replace(" --", " \\\n  --")


AFTER = (
    " # --no-enable-prefix-caching -pp 1", "; echo --no-async-scheduling", " | tee --enforce-eager log",
    " works with --no-async-scheduling", " (fine with -pp 1)", " > log.txt 2>&1 &",
    " && vllm serve x/y --no-enable-prefix-caching --max-num-seqs 1",
)  # fmt: skip


def _after(rng: random.Random, text: str) -> str:
    """What may follow a command on its line without being of it."""
    head, _, rest = text.partition("\n")
    return f"{head}{rng.choice(AFTER)}" + (f"\n{rest}" if rest else "")


def _same_line(rng: random.Random, text: str) -> str:
    """Another launch on the line of this one."""
    return f"{rng.choice(configurations()).launch}{rng.choice((' && ', '; ', ' & '))}{text}"


NOISE: tuple[Mutation, ...] = (
    _line(SENTENCES), _line(SENTENCES), _line(LOG_LINES), _flag, _variable, _other_launch, _fenced, _prompt,
    _broken_line, _after, _same_line,
)  # fmt: skip


def service(launch: str, release: str, rng: random.Random) -> str:
    """The launch as a compose file or a Kubernetes one."""
    import shlex

    words = shlex.split(launch)
    env = dict(
        word.split("=", 1) for word in words if "=" in word and words.index(word) < words.index("vllm")
    )
    args = words[words.index("serve") + 1 :]
    image = f"vllm/vllm-openai:v{release}"
    if rng.random() < 0.5:
        return yaml.safe_dump({"services": {"a": {"image": image, "environment": env, "command": args}}})
    variables = [{"name": name, "value": value} for name, value in env.items()]
    container = {"name": "a", "image": image, "args": args, "env": variables}
    return yaml.safe_dump(
        {"apiVersion": "apps/v1", "spec": {"template": {"spec": {"containers": [container]}}}}
    )


def exposed(text: str, release: str, gpu: int | None = None) -> dict[str, set[str]] | None:
    """Causes by what some launch of the text makes of them; None for a text that states nothing."""
    try:
        cases = understand(inputs("x", text), release)
    except BadInputError:
        return None
    found: dict[str, set[str]] = {cause: set() for cause in rules()}
    for case in cases:
        config: Config = replace(case.config, gpu=gpu) if gpu else case.config
        for one in answer(config).incidents:
            for cause in (*one.causes, *one.others):
                found[cause.cause].add(cause.answer)
    return found


def lost(before: dict[str, set[str]], after: dict[str, set[str]] | None) -> list[str]:
    """Causes that were affected or unknown and are neither any more."""
    if after is None:
        return ["everything"]
    open_before = (cause for cause, answers in before.items() if answers - {"not-affected"})
    return [cause for cause in open_before if after[cause] <= {"not-affected"}]


def scrambled(rng: random.Random, text: str) -> str:
    """Bytes removed, doubled and changed."""
    data = bytearray(text.encode())
    for _ in range(rng.randint(1, 12)):
        at = rng.randrange(len(data))
        data[at : at + rng.randint(0, 4)] = bytes(rng.randrange(256) for _ in range(rng.randint(0, 4)))
        data = data or bytearray(b" ")
    return data.decode("utf-8", "replace")


def trial(rng: random.Random) -> tuple[str, str, list[str]]:
    """(kind, text, causes lost) of one mutated input."""
    each, release = rng.choice(configurations()), rng.choice(released().releases)
    base = service(each.launch, release, rng) if rng.random() < 0.2 else each.launch
    if rng.random() < 0.3:
        text = scrambled(rng, base)
        exposed(text, release)
        return "scrambled", text, []
    text = base
    if base == each.launch:
        for _ in range(rng.randint(1, 4)):
            text = rng.choice(NOISE)(rng, text)
    before = exposed(each.launch, release)
    assert before is not None
    return "service" if base != each.launch else "noise", text, lost(before, exposed(text, release))


def trials(seed: int, count: int) -> Iterator[dict[str, Any]]:
    """Inputs that raised, lost a cause or took more than a second; and at the end how many of each kind ran."""
    rng, kinds = random.Random(seed), Counter()
    slowest = 0.0
    for number in range(count):
        state, began = rng.getstate(), time.perf_counter()
        try:
            kind, text, gone = trial(rng)
        except Exception as error:
            rng.setstate(state)
            yield {"seed": seed, "number": number, "error": f"{type(error).__name__}: {error}"}
            rng.random()
            continue
        kinds[kind] += 1
        slowest = max(slowest, time.perf_counter() - began)
        if gone:
            yield {"seed": seed, "number": number, "kind": kind, "lost": gone, "text": text[:2000]}
    yield {"kinds": dict(kinds), "slowest_s": round(slowest, 3)}


@click.command()
@click.argument("out", type=click.Path(path_type=Path))
@click.option("--inputs", default=200_000, show_default=True)
@click.option("--seed", default=0, show_default=True)
@click.option("--jobs", default=2, show_default=True)
def main(out: Path, inputs: int, seed: int, jobs: int) -> None:
    """Write what went wrong, and how many inputs ran, to OUT.json."""
    from joblib import Parallel, delayed

    parts = 20 * jobs
    sizes = [inputs // parts + (n < inputs % parts) for n in range(parts)]
    found = Parallel(n_jobs=jobs)(
        delayed(lambda s, c: list(trials(s, c)))(seed * 1000 + n, size) for n, size in enumerate(sizes)
    )
    rows = [row for part in found for row in part]
    kinds = sum((Counter(row["kinds"]) for row in rows if "kinds" in row), Counter())
    wrong = [row for row in rows if "kinds" not in row]
    peak = (
        max(resource.getrusage(who).ru_maxrss for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
        / 1024
    )
    slowest = max(row["slowest_s"] for row in rows if "kinds" in row)
    data = {"inputs": inputs, "kinds": dict(kinds), "wrong": wrong[:50], "wrong_count": len(wrong),
            "slowest_s": slowest, "peak_mib": round(peak)}  # fmt: skip
    out.write_text(json.dumps(data, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    click.echo(json.dumps({key: value for key, value in data.items() if key != "wrong"}))
    raise SystemExit(int(bool(wrong)))


if __name__ == "__main__":
    main()
