"""Experiments that `test_isolation` has other processes run; each does one thing that may end a process."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
import triton
import triton.language as tl

STUBBORN = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(60)"


@triton.jit
def store_at(target, offset):  # type: ignore[no-untyped-def]
    tl.store(target + offset, 1.0)


def give(value: Any) -> Any:
    return value


def give_nan() -> list[float]:
    return [float("nan"), float("inf")]


def give_text(size: int) -> str:
    return "x" * size


def give_a_set() -> set[int]:
    return {1}


def give_itself() -> list[Any]:
    value: list[Any] = []
    value.append(value)
    return value


def nap(seconds: float, value: Any = None) -> Any:
    time.sleep(seconds)
    return value


def lifetime(seconds: float) -> list[float]:
    """When this process started, rounded up to a tick, and when it is about to end: seconds since boot."""
    ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    time.sleep(seconds)
    return [(ticks + 1) / os.sysconf("SC_CLK_TCK"), time.clock_gettime(time.CLOCK_BOOTTIME)]


def read_address_zero() -> None:
    ctypes.string_at(0)


def kill_itself(number: int) -> None:
    os.kill(os.getpid(), number)


def exit_at_once(code: int) -> None:
    os._exit(code)


def exit_politely() -> None:
    sys.exit("enough")


def fail(message: str) -> None:
    raise RuntimeError(message)


def abort_saying(text: str) -> None:
    os.write(2, text.encode())
    os.abort()


def close_stderr_and_fail() -> None:
    sys.stderr.close()
    raise LookupError("no stderr left")


def fill_memory() -> int:
    return len(bytearray(8 << 30))


def fill_memory_with_a_tensor() -> int:
    return torch.empty(8 << 30, dtype=torch.uint8).numel()


def flood_stdout(megabytes: int) -> str:
    for _ in range(megabytes):
        os.write(1, b"y" * (1 << 20))
        print("z" * (1 << 20))
    return "done"


def scribble_over_the_record() -> None:
    Path("../record.json").write_bytes(b'{"value": \xff')
    os._exit(0)


def surroundings() -> dict[str, Any]:
    cwd = Path.cwd()
    Path("left-behind").write_text("x")
    return {
        "cwd": str(cwd),
        "empty": [entry.name for entry in cwd.iterdir()] == ["left-behind"],
        "stdin": sys.stdin.read(),
        "session": os.getsid(0) == os.getpid(),
    }


def origin() -> dict[str, Any]:
    """Which process this is: a fork has the command line of the supervisor."""
    parent = Path(f"/proc/{os.getppid()}/stat").read_text().rpartition(")")[2].split()
    return {
        "parent": os.getppid(),
        "parent_since": int(parent[19]),  # clock ticks; a process id alone may come back
        "forked": "supervise" in sys.orig_argv,
        "torch": "torch" in sys.modules,
        "threads": len(list(Path("/proc/self/task").iterdir())),
    }


def variable(name: str) -> str | None:
    return os.environ.get(name)


def kind_of_kernel() -> str:
    return type(store_at).__name__


def overrun_in_the_interpreter() -> None:
    store_at[(1,)](torch.zeros(1), 1 << 40)


def hang_with_a_stubborn_grandchild(pids: str, own_session: bool = False) -> None:
    """Writes its own and the grandchild's pid into the file `pids`, then never returns."""
    leave_with_a_stubborn_grandchild(pids, own_session)
    time.sleep(60)


def leave_with_a_stubborn_grandchild(pids: str, own_session: bool = False) -> None:
    grandchild = subprocess.Popen([sys.executable, "-S", "-c", STUBBORN], start_new_session=own_session)
    part = Path(pids + ".part")
    part.write_text(f"{os.getpid()} {grandchild.pid}")
    part.rename(pids)


def kill_the_supervisor(pids: str, number: int = signal.SIGKILL) -> None:
    leave_with_a_stubborn_grandchild(pids)
    os.kill(os.getppid(), number)
    time.sleep(60)


def stop_the_supervisor(pids: str) -> None:
    kill_the_supervisor(pids, signal.SIGSTOP)


def store_far_outside_on_the_gpu() -> None:
    """The launch returns before the error arrives."""
    store_at[(1,)](torch.zeros(1, device="cuda"), 1 << 40)


def fail_while_a_fault_is_on_its_way() -> None:
    store_far_outside_on_the_gpu()
    raise ValueError("a consequence, not the cause")


def index_outside_on_the_gpu() -> float:
    return float(torch.zeros(4, device="cuda")[torch.tensor([9], device="cuda")].sum())


def fill_the_gpu() -> int:
    return torch.empty(1 << 50, dtype=torch.uint8, device="cuda").numel()


def sum_on_the_gpu() -> float:
    return float(torch.ones(8, device="cuda").sum())
