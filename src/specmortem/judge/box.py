"""A box for foreign code: limits of time, memory and file size, no sockets, no processes, an empty environment.

`enter` is called in the process of one judgement, before the code of a tree is lifted; it cannot be undone. The
filter of system calls needs Linux on x86_64 or aarch64; elsewhere the limits alone hold, and `enter` says so.
`CodeWatch` tells afterwards whether the code changed a function of this package. The box is made for accidents and
crude hostility: code that was written against this very package can still forge a verdict. Judge what you would
install.
"""

from __future__ import annotations

import builtins
import ctypes
import errno
import os
import platform
import struct
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

from specmortem import _forkserver

FILE_BYTES = 64 << 20
MEMORY_BYTES = 4 << 30
OPEN_FILES = 256
KEPT = (
    "PATH",
    "LANG",
    "LC_ALL",
    "TZ",
    "TMPDIR",
    "LD_LIBRARY_PATH",
    "CUDA_VISIBLE_DEVICES",
    "CUDA_HOME",
    "SPECMORTEM_INCIDENTS",
    "TRITON_INTERPRET",
    "TRITON_CACHE_DIR",
    "OMP_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "MKL_NUM_THREADS",
)
PR_SET_NO_NEW_PRIVS, PR_SET_SECCOMP, SECCOMP_MODE_FILTER = 38, 22, 2
CLONE_THREAD = 0x10000
LOAD, EQUAL, SET, RETURN = 0x20, 0x15, 0x45, 0x06  # of classic BPF: ld abs, jeq, jset, ret
ALLOW, REFUSE = 0x7FFF0000, 0x00050000
NUMBER, ARCHITECTURE, FIRST_ARGUMENT = 0, 4, 16  # offsets in struct seccomp_data
MACHINES: Mapping[str, tuple[int, int, Mapping[str, int]]] = {
    "x86_64": (
        0xC000003E,
        56,
        {
            "socket": 41,
            "connect": 42,
            "bind": 49,
            "fork": 57,
            "vfork": 58,
            "execve": 59,
            "kill": 62,
            "ptrace": 101,
            "mount": 165,
            "unshare": 272,
            "process_vm_writev": 311,
            "bpf": 321,
            "execveat": 322,
            "io_uring_setup": 425,
        },
    ),
    "aarch64": (
        0xC00000B7,
        220,
        {
            "mount": 40,
            "unshare": 97,
            "ptrace": 117,
            "kill": 129,
            "socket": 198,
            "bind": 200,
            "connect": 203,
            "execve": 221,
            "process_vm_writev": 271,
            "bpf": 280,
            "execveat": 281,
            "io_uring_setup": 425,
        },
    ),
}
CLONE3 = 435


def enter(cpu_seconds: float, *, strict: bool) -> str:
    """Close the box around this process; says in words what holds.

    `strict` refuses sockets and processes as well; kernels that are compiled for a GPU need a compiler and go without.
    """
    for name in set(os.environ) - set(KEPT):
        del os.environ[name]
    os.environ["HOME"] = str(Path.cwd())
    for what, most in (
        ("RLIMIT_CPU", int(cpu_seconds) + 1),
        ("RLIMIT_FSIZE", FILE_BYTES),
        ("RLIMIT_NOFILE", OPEN_FILES if strict else 4096),
    ):
        _forkserver.limit(what, most)
    if not strict:
        return "limits of time and files"
    return (
        "no sockets, no processes, limits" if _filter_calls() else "limits alone: this platform has no filter"
    )


def _filter_calls() -> bool:
    """Install the filter; False where the platform has none."""
    machine = MACHINES.get(platform.machine())
    if sys.platform != "linux" or machine is None:
        return False
    program = b"".join(struct.pack("HBBI", *step) for step in _program(*machine))
    code = ctypes.create_string_buffer(program)
    header = struct.pack("HxxxxxxP", len(program) // 8, ctypes.addressof(code))
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0:
        return False
    return bool(
        libc.prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, ctypes.create_string_buffer(header), 0, 0) == 0
    )


def _program(
    architecture: int, clone: int, refused: Mapping[str, int]
) -> Iterator[tuple[int, int, int, int]]:
    """Steps (code, jump if true, jump if false, value): refuse the calls, and a clone that makes no thread."""
    no = REFUSE | errno.EPERM
    yield LOAD, 0, 0, ARCHITECTURE
    yield EQUAL, 1, 0, architecture
    yield RETURN, 0, 0, no
    yield LOAD, 0, 0, NUMBER
    for number in refused.values():
        yield EQUAL, 0, 1, number
        yield RETURN, 0, 0, no
    yield EQUAL, 0, 1, CLONE3
    yield RETURN, 0, 0, REFUSE | errno.ENOSYS  # the C library falls back to clone
    yield SET, 0, 1, 0x40000000  # numbers of the x32 table
    yield RETURN, 0, 0, no
    yield EQUAL, 1, 0, clone
    yield RETURN, 0, 0, ALLOW
    yield LOAD, 0, 0, FIRST_ARGUMENT
    yield SET, 0, 1, CLONE_THREAD
    yield RETURN, 0, 0, ALLOW
    yield RETURN, 0, 0, no


@contextmanager
def scrubbed_environment() -> Iterator[None]:
    """Only harmless variables for processes started meanwhile; for one thread at a time."""
    before = dict(os.environ)
    try:
        for name in set(before) - {*KEPT, "HOME"}:
            del os.environ[name]
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


class CodeWatch:
    """Which functions and classes of this package, and of the built-ins, were replaced since it was made."""

    def __init__(self) -> None:
        """Note what there is now."""
        self._seen = _callables()

    def changed(self) -> list[str]:
        """Names that stand for something else now, or for nothing."""
        now = _callables()
        return sorted(name for name, found in self._seen.items() if now.get(name) != found)


def _callables() -> dict[str, tuple[int, int]]:
    """Dotted name -> identity, and that of the code, of functions, classes and their methods."""
    found: dict[str, tuple[int, int]] = {}
    for name, module in list(sys.modules.items()):
        if isinstance(module, ModuleType) and name.partition(".")[0] == "specmortem":
            for key, value in list(vars(module).items()):
                _note(found, f"{name}.{key}", value)
    for key, value in list(vars(builtins).items()):
        _note(found, f"builtins.{key}", value)
    return found


def _note(found: dict[str, tuple[int, int]], name: str, value: Any) -> None:
    if isinstance(value, FunctionType):
        found[name] = id(value), id(value.__code__)
    elif isinstance(value, type):
        found[name] = id(value), 0
        for owner in reversed(value.__mro__):  # a method that hides an inherited one is seen as well
            if owner.__module__.partition(".")[0] == "specmortem":
                _note_methods(found, name, owner)
    elif callable(value) and name.startswith("builtins."):
        found[name] = id(value), 0


def _note_methods(found: dict[str, tuple[int, int]], name: str, owner: type) -> None:
    for key, part in list(vars(owner).items()):
        if isinstance(part, FunctionType | classmethod | staticmethod | property):
            code = getattr(part, "__code__", None) or getattr(getattr(part, "__func__", None), "__code__", 0)
            found[f"{name}.{key}"] = id(part), id(code)
