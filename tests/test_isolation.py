"""Outcomes of experiments that fault, hang, or lose their supervisor or their caller."""

from __future__ import annotations

import importlib
import io
import math
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from specmortem import _forkserver, isolation
from specmortem.errors import BadInputError
from specmortem.isolation import Arm, ArmResult, Device, death_kind, exception_kind, run_arm, run_arms

HERE = Path(__file__).parent
RUNTIME_ERROR = ["builtins.RuntimeError", "builtins.Exception"]
HINTS = (
    "\nSearch for `{}' in the CUDA documentation for more information."
    "\nCompile with `TORCH_USE_CUDA_DSA` to enable device-side assertions."
)


@pytest.fixture(scope="module", autouse=True)
def experiments_can_be_imported() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(HERE))
        yield


def arm(function: str, **kwargs: Any) -> Arm:
    return Arm(f"isolated_targets:{function}", kwargs, name=function)


def gone(pid: int, patience_s: float = 60.0) -> bool:
    """Whether a process ends; one that waits to be reaped by a slow init has."""
    until = time.monotonic() + patience_s
    while time.monotonic() < until:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except (FileNotFoundError, ProcessLookupError):
            return True
        if state in "ZX":
            return True
        time.sleep(0.01)
    return False


def wait_for(condition: Callable[[], bool], patience_s: float = 120.0) -> None:
    until = time.monotonic() + patience_s
    while not condition():
        assert time.monotonic() < until, "the condition did not come true"
        time.sleep(0.01)


def pids_in(path: Path) -> list[int]:
    return [int(pid) for pid in path.read_text().split()]


ENDS: list[tuple[Arm, str, str]] = [
    (arm("read_address_zero"), "signal", "SIGSEGV"),
    (arm("kill_itself", number=9), "signal", "SIGKILL"),
    (arm("kill_itself", number=int(signal.SIGRTMIN) + 1), "signal", f"signal {int(signal.SIGRTMIN) + 1}"),
    (arm("abort_saying", text="no reason\n"), "signal", "SIGABRT"),
    (
        arm(
            "abort_saying",
            text="first\n what(): CUDA error: an illegal memory access was encountered\nmore\n",
        ),
        "illegal-address",
        "SIGABRT: what(): CUDA error: an illegal memory access was encountered",
    ),
    (arm("exit_at_once", code=3), "python-error", "exit code 3 without an outcome"),
    (arm("exit_at_once", code=0), "python-error", "exit code 0 without an outcome"),
    (arm("exit_politely"), "python-error", "SystemExit: enough"),
    (arm("fail", message="wrong shape"), "python-error", "RuntimeError: wrong shape"),
    (arm("close_stderr_and_fail"), "python-error", "LookupError: no stderr left"),
    (arm("fail", message="CUDA error: device-side assert triggered"), "device-assert", "device-side"),
    (arm("give_a_set"), "python-error", "returned a value that JSON cannot hold"),
    (arm("give_itself"), "python-error", "returned a value that JSON cannot hold"),
    (arm("give_text", size=_forkserver.RECORD_LIMIT), "python-error", "return a summary"),
    (arm("scribble_over_the_record"), "python-error", "cannot be read"),
    (arm("no_such_function"), "python-error", "AttributeError"),
    (Arm("no_such_module:f"), "python-error", "ModuleNotFoundError"),
    (arm("give", wrong=1), "python-error", "TypeError"),
]


@pytest.fixture(scope="module")
def ends(experiments_can_be_imported: None) -> list[ArmResult]:
    return run_arms([end[0] for end in ENDS])


def test_a_death_without_a_known_line_is_the_signal_alone(ends: list[ArmResult]) -> None:
    texts = {end.arm.kwargs["text"]: end.message for end in ends if end.arm.label == "abort_saying"}
    assert texts["no reason\n"] == "SIGABRT" and all("more" not in message for message in texts.values())


@pytest.mark.parametrize("index", range(len(ENDS)), ids=lambda i: f"{i}-{ENDS[i][0].label}")
def test_every_way_to_end_has_its_kind_and_message(ends: list[ArmResult], index: int) -> None:
    expected_arm, kind, message = ENDS[index]
    ended = ends[index]
    assert ended.arm == expected_arm
    assert (ended.kind, ended.value) == (kind, None)
    assert message in ended.message


def test_stderr_shows_the_traceback_of_an_error_and_of_a_crash(ends: list[ArmResult]) -> None:
    by_label = {ended.arm.label: ended for ended in ends}
    assert 'raise LookupError("no stderr left")' in by_label["close_stderr_and_fail"].stderr_tail
    assert "in read_address_zero" in by_label["read_address_zero"].stderr_tail


def test_values_come_back_with_nan_and_a_flood_of_output_does_no_harm() -> None:
    given = {"a": [1, 2.5, None, "é\ud800"], "b": True}
    value, nan, text, flood = run_arms(
        [
            arm("give", value=given),
            arm("give_nan"),
            arm("give_text", size=1 << 20),
            arm("flood_stdout", megabytes=20),
        ]
    )
    assert (value.kind, value.value) == ("value", given)
    assert math.isnan(nan.value[0]) and math.isinf(nan.value[1])
    assert len(text.value) == 1 << 20
    assert (flood.kind, flood.value, flood.stderr_tail) == ("value", "done", "")
    assert 0 < value.seconds < 60


def test_memory_beyond_the_limit_is_out_of_memory_and_below_it_is_not() -> None:
    arms = [arm("fill_memory"), arm("fill_memory_with_a_tensor"), arm("give_text", size=1 << 20)]
    ends = run_arms(arms, memory_bytes=512 << 20)
    assert [end.kind for end in ends] == ["out-of-memory", "out-of-memory", "value"]


def test_the_memory_limit_spares_cuda_arms() -> None:
    ended = run_arms([Arm("isolated_targets:origin", device="cuda")], memory_bytes=1 << 20)[0]
    assert ended.kind == "value", ended


def test_an_overrun_that_kills_the_interpreter_is_a_signal() -> None:
    ended = run_arm(arm("overrun_in_the_interpreter"))
    assert (ended.kind, ended.message) == ("signal", "SIGSEGV")


def test_a_time_limit_kills_the_grandchildren_too(tmp_path: Path) -> None:
    hang = Arm(
        "isolated_targets:hang_with_a_stubborn_grandchild", {"pids": str(tmp_path / "pids")}, timeout_s=1.0
    )
    ended, other = run_arms([hang, arm("give", value=1)])
    assert (ended.kind, ended.message) == ("timeout", "killed after 1 s")
    assert 1.0 <= ended.seconds < 10.0
    assert all(gone(pid) for pid in pids_in(tmp_path / "pids"))
    assert other.value == 1


def test_what_a_finished_arm_left_running_is_killed(tmp_path: Path) -> None:
    assert run_arm(arm("leave_with_a_stubborn_grandchild", pids=str(tmp_path / "pids"))).kind == "value"
    assert all(gone(pid) for pid in pids_in(tmp_path / "pids"))


def test_when_the_supervisor_dies_every_remaining_arm_ends_and_nothing_keeps_running(tmp_path: Path) -> None:
    first, deadly = arm("give", value=1), arm("kill_the_supervisor", pids=str(tmp_path / "pids"))
    waiting = arm("give", value=2)
    began = time.monotonic()
    ends = run_arms([first, deadly, waiting], parallel=1)
    assert [end.kind for end in ends] == ["value", "python-error", "python-error"]
    assert all("the supervisor process died by SIGKILL" in end.message for end in ends[1:])
    assert time.monotonic() - began < 30, "the caller waited for an arm that outlived the supervisor"
    assert all(gone(pid) for pid in pids_in(tmp_path / "pids"))


def test_a_supervisor_that_does_not_answer_is_ended_and_so_is_what_it_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(isolation, "SILENCE_S", 5.0)
    stopping = Arm("isolated_targets:stop_the_supervisor", {"pids": str(tmp_path / "pids")}, timeout_s=0.1)
    ends = run_arms([arm("give", value=1), stopping, arm("give", value=2)], parallel=1)
    assert [end.kind for end in ends] == ["value", "python-error", "python-error"]
    assert all("the supervisor process did not answer" in end.message for end in ends[1:])
    assert all(gone(pid) for pid in pids_in(tmp_path / "pids"))
    assert run_arm(arm("give", value=3)).value == 3


@pytest.mark.parametrize("function", ["hang", "leave"])
def test_what_an_arm_started_in_a_session_of_its_own_is_killed_too(tmp_path: Path, function: str) -> None:
    kwargs = {"pids": str(tmp_path / "pids"), "own_session": True}
    away = Arm(f"isolated_targets:{function}_with_a_stubborn_grandchild", kwargs, timeout_s=2.0)
    ended, other = run_arms([away, arm("nap", seconds=3.0, value="unharmed")], parallel=2)
    assert ended.kind == {"hang": "timeout", "leave": "value"}[function]
    assert all(gone(pid) for pid in pids_in(tmp_path / "pids"))
    assert other.value == "unharmed"


def test_outcomes_keep_the_order_of_the_arms_and_are_told_in_the_order_they_end() -> None:
    told: list[Any] = []
    arms = [arm("nap", seconds=0.6, value="slow"), arm("nap", seconds=0.0, value="quick")]
    ends = run_arms(arms, parallel=2, on_end=lambda end: told.append(end.value))
    assert [end.value for end in ends] == ["slow", "quick"]
    assert told == ["quick", "slow"]


def most_at_once(spans: list[list[float]]) -> int:
    return max(sum(start <= at < end for start, end in spans) for at, _ in spans)


def test_simulated_arms_run_as_many_at_a_time_as_allowed_and_cuda_arms_one_at_a_time() -> None:
    sim = [Arm("isolated_targets:lifetime", {"seconds": 0.3}) for _ in range(5)]
    cuda = [Arm("isolated_targets:lifetime", {"seconds": 0.1}, device="cuda") for _ in range(2)]
    ends = run_arms([*sim, *cuda], parallel=2)
    assert most_at_once([end.value for end in ends[:5]]) == 2
    assert most_at_once([end.value for end in ends[5:]]) == 1


def test_a_share_of_the_cores_is_taken_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(isolation.PARALLEL, "1")
    ends = run_arms([Arm("isolated_targets:lifetime", {"seconds": 0.2}) for _ in range(3)])
    assert most_at_once([end.value for end in ends]) == 1
    monkeypatch.setenv(isolation.PARALLEL, "many")
    with pytest.raises(BadInputError, match="SPECMORTEM_PARALLEL is 'many'"):
        run_arms([arm("give", value=1)])


def test_simulated_arms_are_forks_of_one_single_threaded_supervisor() -> None:
    one, other = (end.value for end in run_arms([arm("origin"), arm("origin")]))
    assert one == other == {**one, "forked": True, "torch": True, "threads": 1}
    assert one["parent"] != os.getpid()


@pytest.mark.parametrize("device", ["sim", "cuda"])
def test_arms_with_variables_are_fresh_interpreters_and_others_forks(device: Device) -> None:
    own = Arm("isolated_targets:origin", device=device, env={"COLOUR": "red"})
    plain = Arm("isolated_targets:origin", device=device)
    assert [end.value["forked"] for end in run_arms([own, plain])] == [False, True]


def test_cuda_arms_may_run_side_by_side_where_asked() -> None:
    ends = run_arms(
        [Arm("isolated_targets:lifetime", {"seconds": 0.5}, device="cuda") for _ in range(3)], cuda_parallel=3
    )
    assert most_at_once([end.value for end in ends]) >= 2


def test_a_process_with_a_second_thread_may_not_fork() -> None:
    stop = threading.Event()
    thread = threading.Thread(target=stop.wait)
    thread.start()
    try:
        assert not _forkserver.may_fork("isolated_targets:give")
    finally:
        stop.set()
        thread.join()


def test_variables_reach_their_own_arm_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLOUR", "blue")
    asks = [Arm("isolated_targets:variable", {"name": "COLOUR"}, env=env) for env in ({"COLOUR": "red"}, {})]
    assert [end.value for end in run_arms(asks)] == ["red", "blue"]


def test_triton_interprets_in_simulated_arms_and_compiles_in_cuda_arms(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    ask = "isolated_targets:kind_of_kernel"
    ends = run_arms([Arm(ask), Arm(ask, env={"COLOUR": "red"}), Arm(ask, device="cuda")])
    assert [end.value for end in ends] == ["InterpretedFunction", "InterpretedFunction", "JITFunction"]


def test_each_arm_has_its_own_session_and_empty_folder_which_is_removed() -> None:
    first, second = (end.value for end in run_arms([arm("surroundings"), arm("surroundings")]))
    assert first["cwd"] != second["cwd"]
    assert not Path(first["cwd"]).exists()
    assert (first["empty"], first["stdin"], first["session"]) == (True, "", True)


CALLER = """
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)
sys.path.insert(0, {here!r})
from specmortem.isolation import Arm, run_arms
arms = [Arm("isolated_targets:hang_with_a_stubborn_grandchild", {{"pids": {pids!r} + str(i)}}) for i in range(3)]
run_arms(arms, parallel=2)
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_when_the_caller_is_stopped_nothing_of_the_run_remains(
    tmp_path: Path, number: signal.Signals
) -> None:
    temporary, pids = tmp_path / "tmp", tmp_path / "pids"
    temporary.mkdir()
    script = CALLER.format(here=str(HERE), pids=str(pids))
    environment = {
        **os.environ,
        "TMPDIR": str(temporary),
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
    }
    caller = subprocess.Popen([sys.executable, "-c", script], env=environment, stderr=subprocess.PIPE)
    started = [Path(f"{pids}{i}") for i in range(2)]
    wait_for(lambda: all(path.exists() for path in started))
    caller.send_signal(number)
    _, stderr = caller.communicate(timeout=120)
    assert caller.returncode == -number
    assert stderr.rstrip().endswith(b"KeyboardInterrupt") == (number == signal.SIGINT)
    assert all(gone(pid) for path in started for pid in pids_in(path))
    wait_for(lambda: not any(temporary.iterdir()))
    assert not Path(f"{pids}2").exists()


def test_an_error_in_on_end_stops_the_run_and_removes_its_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))

    def refuse(end: ArmResult) -> None:
        raise LookupError(end.value)

    with pytest.raises(LookupError, match="seen"):
        run_arms([arm("give", value="seen"), arm("nap", seconds=60)], parallel=2, on_end=refuse)
    assert list(tmp_path.iterdir()) == []


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_progress_is_shown_on_a_terminal_and_nowhere_else(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    for name in ("FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
        monkeypatch.delenv(name, raising=False)
    run_arms([arm("give", value=1)], progress=True)
    assert capfd.readouterr() == ("", "")
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    run_arms([arm("give", value=1)], progress=True)
    assert "1/1" in terminal.getvalue()


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"target": "experiments.give"}, "'package.module:function'"),
        ({"target": "isolated_targets:give.more"}, "'package.module:function'"),
        ({"target": "__main__:give"}, "move the function to a module"),
        ({"target": lambda: None}, "'package.module:function'"),
        ({"kwargs": {"value": {1, 2}}}, "JSON cannot hold its kwargs"),
        ({"device": "tpu"}, "'sim' or 'cuda'"),
        ({"timeout_s": 0}, "timeout_s is 0"),
        ({"timeout_s": math.inf}, "timeout_s is inf"),
        ({"env": {"A=B": "1"}}, "env 'A=B'"),
        ({"env": {"A": 1}}, "must be text"),
    ],
)
def test_arms_that_cannot_be_run_are_refused_when_made(fields: dict[str, Any], text: str) -> None:
    with pytest.raises(BadInputError, match=text):
        Arm(**{"target": "isolated_targets:give", **fields})


def test_an_arm_of_a_function_is_the_arm_of_its_name() -> None:
    give = importlib.import_module("isolated_targets").give
    made = Arm(give, {"value": 5})
    assert made == Arm("isolated_targets:give", {"value": 5})
    assert (made.label, run_arms([made])[0].value) == ("isolated_targets:give", 5)


def test_limits_that_make_no_sense_are_refused_before_anything_starts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(subprocess, "Popen", None)
    with pytest.raises(BadInputError, match="parallel is 0"):
        run_arms([arm("give", value=1)], parallel=0)
    with pytest.raises(BadInputError, match="memory_bytes is 0"):
        run_arms([arm("give", value=1)], memory_bytes=0)
    assert run_arms([]) == []


@pytest.mark.parametrize(
    ("types", "message", "code", "kind"),
    [
        (
            RUNTIME_ERROR,
            "CUDA error: an illegal memory access was encountered" + HINTS,
            None,
            "illegal-address",
        ),
        (
            RUNTIME_ERROR,
            "Triton Error [CUDA]: an illegal memory access was encountered",
            None,
            "illegal-address",
        ),
        (RUNTIME_ERROR, "cudaErrorIllegalAddress: reported by a library", None, "illegal-address"),
        (["torch.AcceleratorError", *RUNTIME_ERROR], "anything", 700, "illegal-address"),
        (RUNTIME_ERROR, "CUDA error: device-side assert triggered" + HINTS, None, "device-assert"),
        (["torch.AcceleratorError", *RUNTIME_ERROR], "anything", 710, "device-assert"),
        (RUNTIME_ERROR, "CUDA error: misaligned address" + HINTS, None, "cuda-error"),
        (RUNTIME_ERROR, "CUDA error: unspecified launch failure" + HINTS, 719, "cuda-error"),
        (RUNTIME_ERROR, "Triton Error [CUDA]: invalid argument", None, "cuda-error"),
        (RUNTIME_ERROR, "CUDA error: out of memory" + HINTS, 2, "out-of-memory"),
        (["torch.OutOfMemoryError", *RUNTIME_ERROR], "CUDA out of memory. Tried", None, "out-of-memory"),
        (["numpy._ArrayMemoryError", "builtins.MemoryError"], "Unable to allocate", None, "out-of-memory"),
        (RUNTIME_ERROR, "DefaultCPUAllocator: can't allocate memory", None, "out-of-memory"),
        (RUNTIME_ERROR, "shape mismatch", None, "python-error"),
        (["builtins.ValueError"], "the log says CUDA error: an illegal memory access", None, "python-error"),
        (["builtins.ValueError"], "has a number of its own", 700, "python-error"),
    ],
)
def test_kind_of_an_exception(types: list[str], message: str, code: int | None, kind: str) -> None:
    assert exception_kind(types, message, code) == kind


@pytest.mark.parametrize(
    ("number", "stderr", "oom_killed", "kind"),
    [
        (
            signal.SIGABRT,
            "what():  CUDA error: an illegal memory access was encountered" + HINTS,
            False,
            "illegal-address",
        ),
        (signal.SIGABRT, "what():  CUDA error: misaligned address" + HINTS, False, "cuda-error"),
        (
            signal.SIGABRT,
            "terminate called after throwing an instance of 'std::bad_alloc'",
            False,
            "out-of-memory",
        ),
        (signal.SIGABRT, "Fatal Python error: Aborted", False, "signal"),
        (signal.SIGSEGV, "CUDA error: an illegal memory access was encountered", False, "signal"),
        (signal.SIGKILL, "", True, "out-of-memory"),
        (signal.SIGKILL, "", False, "signal"),
    ],
)
def test_kind_of_a_death(number: signal.Signals, stderr: str, oom_killed: bool, kind: str) -> None:
    assert death_kind(number, stderr, oom_killed=oom_killed) == kind


@pytest.mark.parametrize(
    "text", ["low 0\noom 3\noom_kill 2\noom_group_kill 0\n", "oom_kill_disable 0\noom_kill 2\n"]
)
def test_the_count_of_kernel_kills_is_read_from_either_version_of_cgroups(tmp_path: Path, text: str) -> None:
    (tmp_path / "events").write_text(text)
    assert _forkserver.oom_count(tmp_path / "events") == 2


def test_only_a_kill_that_the_kernel_counted_and_nobody_ordered_is_put_down_to_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(_forkserver, "oom_kills", lambda: 4)
    child = _forkserver.Child(index=0, began=0.0, deadline=1.0, oom_kills=3)
    late = _forkserver.Child(index=0, began=0.0, deadline=1.0, oom_kills=3, timed_out=True)
    other = _forkserver.Child(index=0, began=0.0, deadline=1.0, oom_kills=4)
    assert child.killed_for_memory(-signal.SIGKILL)
    assert not child.killed_for_memory(-signal.SIGSEGV)
    assert not late.killed_for_memory(-signal.SIGKILL)
    assert not other.killed_for_memory(-signal.SIGKILL)


def cuda_or_skip() -> None:
    import torch

    if not torch.cuda.is_available():
        pytest.skip("torch.cuda.is_available() is False: no CUDA device here")


@pytest.mark.gpu
def test_a_cuda_fault_has_its_kind_and_leaves_the_next_arm_unharmed() -> None:
    cuda_or_skip()
    functions = [
        "store_far_outside_on_the_gpu",
        "fail_while_a_fault_is_on_its_way",
        "index_outside_on_the_gpu",
        "fill_the_gpu",
        "sum_on_the_gpu",
    ]
    ends = run_arms(
        [Arm(f"isolated_targets:{function}", device="cuda", timeout_s=120) for function in functions]
    )
    kinds = [end.kind for end in ends]
    assert kinds == ["illegal-address", "illegal-address", "device-assert", "out-of-memory", "value"], ends
    assert "a consequence, not the cause" in ends[1].stderr_tail
    assert ends[-1].value == 8.0


@pytest.fixture
def none_kept() -> Iterator[None]:
    """As when nobody has asked for supervisors to be kept."""
    isolation.keep_supervisors(wanted=False)
    yield
    isolation.keep_supervisors()


@pytest.fixture
def kept(none_kept: None) -> None:
    isolation.keep_supervisors()


def supervisors(count: int = 1) -> set[tuple[int, int]]:
    """Their process ids and when they started."""
    ended = run_arms([arm("origin")] * count)
    return {(end.value["parent"], end.value["parent_since"]) for end in ended}


@pytest.mark.usefixtures("none_kept")
def test_without_asking_each_call_has_a_supervisor_of_its_own() -> None:
    assert supervisors() != supervisors()


@pytest.mark.usefixtures("kept")
def test_a_kept_supervisor_serves_the_next_call() -> None:
    assert len(supervisors(2) | supervisors(3)) == 1


@pytest.mark.usefixtures("kept")
def test_other_surroundings_get_another_supervisor(monkeypatch: pytest.MonkeyPatch) -> None:
    before = supervisors()
    monkeypatch.setenv("SPECMORTEM_TEST_SURROUNDINGS", "1")
    assert supervisors() != before


@pytest.mark.usefixtures("kept")
def test_a_kept_supervisor_that_died_is_replaced() -> None:
    (before,) = supervisors()
    os.kill(before[0], signal.SIGKILL)
    assert gone(before[0])
    assert supervisors() != {before}


@pytest.mark.usefixtures("kept")
def test_a_call_left_in_the_middle_keeps_nothing() -> None:
    def leave(end: ArmResult) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_arms([arm("origin"), arm("nap", seconds=60)], on_end=leave)
    assert not isolation._idle._kept


@pytest.mark.usefixtures("none_kept")
def test_keeping_none_ends_what_was_kept() -> None:
    isolation.keep_supervisors()
    ((supervisor, _),) = supervisors()
    isolation.keep_supervisors(wanted=False)
    assert gone(supervisor)
