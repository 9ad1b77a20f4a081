"""Runs arms under `compute-sanitizer --tool memcheck` and tells what it says; used by the memcheck_*.py scripts."""

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

FAULT = re.compile(r"(Invalid __\w+__ \w+ of size \d+ bytes)\s*\n=+\s+at ([^\n]+)")
SUMMARY = re.compile(r"ERROR SUMMARY: (\d+) error")
LIMIT_S = 540


class Checked(NamedTuple):
    """One arm: what runs (`kernel`), before or after a fix (`arm`), and the call in a module that is to be made."""

    kernel: str
    arm: str
    module: str
    call: str


def summary(output: str) -> dict[str, Any]:
    """Errors that memcheck counted (None where it did not come to an end), the first of them and its line."""
    counted, first = SUMMARY.search(output), FAULT.search(output)
    return {
        "errors": int(counted[1]) if counted else None,
        "first error": first[1] if first else "none" if counted else f"no summary: {output[-300:]}",
        "at": re.sub(r"/\S*/(?=\w+\.py)", "", first[2]) if first else "",
    }


def check(one: Checked) -> dict[str, Any]:
    """Run one arm, without the caching allocator, whose segments would hide an overrun."""
    program = f"from {one.module} import *; print({one.call})"
    command = ["compute-sanitizer", "--tool", "memcheck", sys.executable, "-c", program]
    env = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    try:
        done = subprocess.run(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=env, timeout=LIMIT_S
        )
        output, status = done.stdout, done.returncode
    except subprocess.TimeoutExpired:
        output, status = f"no answer in {LIMIT_S} s", None
    told = summary(output)
    if one.arm == "after" and status != 0 and told["errors"] == 0:
        told |= {"errors": None, "first error": f"the arm failed: {output[-300:]}"}
    return {"kernel": one.kernel, "arm": one.arm, **told}


def as_stated(row: dict[str, Any]) -> bool:
    """Errors before, none after; an arm without an answer is neither."""
    return row["errors"] is not None and (row["errors"] == 0) == (row["arm"] == "after")


def main(arms: Sequence[Checked], parallel: int | None = None) -> int:
    """Write the table to the file that the command line names; the exit code of the script."""
    if len(sys.argv) != 2 or sys.argv[1].startswith("-"):
        print(f"usage: python {sys.argv[0]} OUT.json", file=sys.stderr)
        return 2
    if shutil.which("compute-sanitizer") is None:
        print("compute-sanitizer is not on PATH; it comes with the CUDA toolkit", file=sys.stderr)
        return 2
    with ThreadPoolExecutor(parallel) as pool:
        rows = list(pool.map(check, arms))
    print(*rows, sep="\n")
    Path(sys.argv[1]).write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    return int(not all(map(as_stated, rows)))
