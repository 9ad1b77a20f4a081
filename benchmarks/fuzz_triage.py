"""Random and mutated inputs for `specmortem triage`: none may raise, and none of 1 MiB may take more than a second.

usage: python benchmarks/fuzz_triage.py [--inputs 200000] [--seed 1]   random bytes and mutations of made-up logs
       python benchmarks/fuzz_triage.py --atheris [ATHERIS OPTIONS]    guided by coverage, where atheris is installed

Exit code 1 when an input raises or is too slow; the input is written to crash-N.bin in the current folder.
"""

import random
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path

import click

if "--atheris" in sys.argv:
    import atheris

    with atheris.instrument_imports(include=["specmortem.statements", "specmortem.tools.triage"]):
        import specmortem.tools.triage.render  # noqa: F401

from specmortem.tools.triage import triage_text
from specmortem.tools.triage.render import as_html, as_markdown, as_text

LIMIT_S = 1.0  # of processor time
LARGE = 1 << 20
LARGE_EVERY = 2_000  # inputs
FLAGS = "vLLM 0.22.1 MTP n=4 EAGLE3 DFlash2 PP=2 TP=4 --no-async-scheduling --enforce-eager CUDA_LAUNCH_BLOCKING=1"
TOLD = "Xid 31 VIRT_READ VIRT_WRITE OOM NaN not no without still crashes clean garbled tokens repeat loop"
WORDS = [
    *FLAGS.split(), *TOLD.split(),
    "CUDA error: an illegal memory access was encountered",
    "NVRM: Xid (PCI:0000:0a:00): 31, pid=7, MMU Fault: ACCESS_TYPE_VIRT_READ",
    "(EngineCore_DP0 pid=4) (Worker_TP2 pid=5) ERROR 11-20 14:20:38 [core.py:82] ",
    "[rank1]:[E731 01:20:58.516120000 ProcessGroupNCCL.cpp:2119] ",
    "2026-03-04T05:00:16.157949381+08:00 stdout F ",
    "scheduled_spec_decode_tokens={r: [-1, -1]}",
    "Running: 5 reqs, Waiting: 0 reqs, GPU KV cache usage: 5.7%",
    "Mean acceptance length: 1.00, Accepted: 0 tokens, Drafted: 480 tokens",
    '{"log": "', '{"completion_tokens": 1, "text": "',
    '\\n"}', "<p>", "</p>", "&lt;", "&#x41;", "\x1b[31m", "\x1b]0;", "```", "`", "|", "> ", "- ", "[user]",
    "---", "--speculative-config '{\"method\":\"mtp\"", "prompt: '", "/home/u/x", "10.0.0.1:80", "sk-abcdefghijkl",
    "user@host",
    "duct" * 9, "!" * 40, "0, " * 20, "\n", "\n", "\n", "\r\n", "\t",
    "\x00", "\u202e", "\ufeff", "\U0001f600",
]  # fmt: skip


def run(data: bytes) -> None:
    """One input through everything."""
    report = triage_text(data.decode("utf-8", "surrogateescape" if len(data) % 2 else "replace"))
    as_text(report), as_markdown(report), as_html(report), report.as_json()


def inputs(count: int, source: random.Random) -> Iterator[bytes]:
    """Small ones of every make, and a large one now and then."""
    makes: list[Callable[[random.Random, int], bytes]] = [_bytes, _words, _mutated, _repeated]
    for number in range(count):
        size = LARGE if number % LARGE_EVERY == 0 else source.choice((16, 120, 600))
        yield source.choice(makes)(source, size)


def _bytes(source: random.Random, size: int) -> bytes:
    return source.randbytes(size)


def _words(source: random.Random, size: int) -> bytes:
    parts: list[str] = []
    length = 0
    while length < size:
        parts.append(source.choice(WORDS) + source.choice(("", " ", " ", "\n")))
        length += len(parts[-1])
    return "".join(parts).encode("utf-8", "surrogatepass")


def _mutated(source: random.Random, size: int) -> bytes:
    data = bytearray(_words(source, size))
    for _ in range(max(1, len(data) // 50)):
        data[source.randrange(len(data))] = source.randrange(256)
    return bytes(data)


def _repeated(source: random.Random, size: int) -> bytes:
    """What makes a backtracking engine slow."""
    unit = "".join(source.choice(WORDS) for _ in range(source.randrange(1, 4)))
    return (unit * (size // max(1, len(unit)) + 1)).encode("utf-8", "surrogatepass")


def campaign(count: int, seed: int) -> int:
    """Run; the number of inputs that failed."""
    failed = 0
    slowest = 0.0
    run(b"")  # patterns are compiled at first use
    begun = time.process_time()
    for number, data in enumerate(inputs(count, random.Random(seed))):
        start = time.process_time()
        try:
            run(data)
        except Exception:
            traceback.print_exc()
            failed += 1
            Path(f"crash-{number}.bin").write_bytes(data)
        seconds = time.process_time() - start
        slowest = max(slowest, seconds)
        if seconds > LIMIT_S:
            failed += 1
            Path(f"crash-{number}.bin").write_bytes(data)
            print(f"input {number}: {seconds:.2f} s for {len(data)} bytes")
    print(
        f"{count} inputs, {failed} failed, slowest {slowest:.2f} s, {time.process_time() - begun:.0f} s in all"
    )
    return failed


@click.command()
@click.option("--inputs", "count", default=200_000, show_default=True, type=click.IntRange(min=1))
@click.option("--seed", default=1, show_default=True)
def main(count: int, seed: int) -> None:
    """Random bytes and mutations of made-up logs."""
    sys.exit(int(campaign(count, seed) > 0))


if __name__ == "__main__":
    if "--atheris" in sys.argv:
        atheris.Setup([sys.argv[0], *(a for a in sys.argv[1:] if a != "--atheris")], run)
        atheris.Fuzz()
    else:
        main()
