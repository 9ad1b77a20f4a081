"""compute-sanitizer memcheck over the arms of `dflash-oob`: which line faults before, and that none does after.

usage: python benchmarks/memcheck_dflash.py OUT.json   (needs a GPU and compute-sanitizer on PATH)
"""

import json
import os
import re
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

MODULE = "specmortem.experiments.dflash_oob"
ARMS = {
    ("lookup", "before"): "control('gdn-lookup', 'graphs', 'cuda')",
    ("lookup", "after"): "lookup_replays('after', 200)",
    ("input kernel", "before"): "control('input-kernel', 'graphs', 'cuda')",
    ("input kernel", "after"): "graph_replays('after', 200)",
    ("random states", "after"): "random_states('after', 4, device='cuda')",
}
FAULT = re.compile(r"(Invalid __\w+__ \w+ of size \d+ bytes)\s*\n=+\s+at ([^\n]+)")


def check(kernel: str, arm: str, call: str) -> dict[str, object]:
    """Run one arm under memcheck; its error count and the first faulting line."""
    env = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    program = f"from {MODULE} import *; print({call})"
    command = ["compute-sanitizer", "--tool", "memcheck", sys.executable, "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, env=env, timeout=400)
    text = done.stdout + done.stderr
    summary = re.search(r"ERROR SUMMARY: (\d+) error", text)
    first = FAULT.search(text)
    place = re.sub(r"/\S*/(?=\w+\.py)", "", first[2]) if first else ""
    return {
        "kernel": kernel,
        "arm": arm,
        "errors": int(summary[1]) if summary else f"no summary: {text[-300:]}",
        "first error": first[1] if first else "none",
        "at": place,
    }


def main() -> int:
    """Write the table; exit 1 when a before-arm has no error or an after-arm has one."""
    if shutil.which("compute-sanitizer") is None:
        print("compute-sanitizer is not on PATH; it comes with the CUDA toolkit", file=sys.stderr)
        return 2
    with ThreadPoolExecutor() as pool:
        rows = list(pool.map(lambda entry: check(*entry[0], entry[1]), ARMS.items()))
    print(*rows, sep="\n")
    Path(sys.argv[1]).write_text(json.dumps(rows, indent=1) + "\n")
    wrong = [row for row in rows if (row["errors"] == 0) != (row["arm"] == "after")]
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
