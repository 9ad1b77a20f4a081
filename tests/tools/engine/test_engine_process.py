"""Every way in which an engine's process can end is typed and counted."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from contextlib import suppress
from pathlib import Path

import pytest
from tools.engine.engine_helpers import FAKE, HERE, fake_gpu, run, tables

from specmortem.errors import BadInputError
from specmortem.tools.engine import arms, campaign, compare, places, process, report
from specmortem.tools.engine.process import Environment, StartLimits
from specmortem.tools.engine.result import Counts, EngineResults
from specmortem.tools.engine.workload import plan, warm_up


@pytest.fixture(autouse=True)
def nothing_is_left(monkeypatch):
    """Ends what a test's engines left behind, and fails the test then; gives the mark of its processes."""
    monkeypatch.setenv("SPECMORTEM_TEST", mark := uuid.uuid4().hex)
    yield mark
    left = marked(mark)
    for pid in left:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    assert left == set()


def marked(mark):
    """The processes that were started with a mark."""
    found = set()
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if f"SPECMORTEM_TEST={mark}".encode() in (folder / "environ").read_bytes():
                found.add(int(folder.name))
    return found


def only_arm(results, name):
    found = results.arm(name)
    assert found is not None
    return found


def test_a_sound_engine_answers_right_and_its_counters_are_read(tmp_path):
    results = run(tmp_path, tables(), ["sound"])
    arm = only_arm(results, "sound")
    assert [run.run for run in arm.runs] == [0, 1, 2, 3, 4]
    assert {(r.outcome, r.lost, r.counts) for r in arm.runs} == {("whole", (), Counts(ended=10, judged=10))}
    assert all(each.kept == () and each.short == {} for each in arm.runs)
    assert [start.kind for start in arm.starts] == ["value"]
    assert arm.starts[0].versions["vllm"] == "0.23.0"
    assert arm.starts[0].chosen == {
        "block_size": 16,
        "mamba_cache_mode": "none",
        "async_scheduling": True,
        "draft_attention": ["FLASH_ATTN"],
    }


def test_acceptance_is_that_of_each_run_and_fits_the_tokens(tmp_path):
    arm = only_arm(run(tmp_path, tables(), ["sound"]), "sound")
    found = arms.parse(tables())
    for each in arm.runs:
        told, _ = plan(found.arm("sound").workload, found.model.source(), found.seed, each.run)
        assert each.acceptance.draft_tokens == 3 * each.acceptance.drafts > 0
        emitted = sum(int(count) * times for count, times in each.emitted.items())
        assert emitted == sum(asked["max_tokens"] for asked in told["rounds"][0]["requests"])
        extra = sum((int(count) - 1) * times for count, times in each.emitted.items())
        assert each.acceptance.accepted == extra > 0
        assert each.steps > 0 and each.median_ms <= each.p99_ms


def test_without_speculation_there_is_no_acceptance(tmp_path):
    arm = only_arm(run(tmp_path, tables(), ["plain"]), "plain")
    assert {each.acceptance for each in arm.runs} == {None}
    assert {tuple(each.emitted) for each in arm.runs} == {("1",)}
    assert "draft_attention" not in arm.starts[0].chosen


@pytest.mark.parametrize(
    ("fault", "kind", "signal_name", "exit_code"),
    [
        ("abort", "illegal-address", "SIGABRT", None),
        ("segv", "signal", "SIGSEGV", None),
        ("raise", "illegal-address", "", 70),
    ],
)
def test_a_death_is_a_run_and_the_runs_left_get_a_new_engine(tmp_path, fault, kind, signal_name, exit_code):
    arm = only_arm(run(tmp_path, tables(broken={"fault": fault, "at": 25}), ["broken"]), "broken")
    assert sorted(each.run for each in arm.runs) == [0, 1, 2, 3, 4]
    faults = [each for each in arm.runs if each.outcome == "fault"]
    assert faults and {each.kind for each in faults} == {kind}
    assert all(len(each.lost) + each.counts.ended == 10 and each.lost for each in faults)
    dead = [start for start in arm.starts if start.kind != "value"]
    assert len(dead) == len(faults)
    assert {(s.kind, s.phase, s.signal, s.exit_code) for s in dead} == {(kind, "run", signal_name, exit_code)}
    assert [start.run for start in dead] == [each.run for each in faults]
    assert all(start.log_tail for start in dead)
    assert arm.not_judged == ""


@pytest.mark.parametrize(
    ("cue", "kind", "exit_code", "said"),
    [
        ({"fault": "bug", "at": 3}, "python-error", 70, "python-error: builtins.AttributeError: 'NoneType'"),
        ({"fault": "metrics"}, "python-error", 70, "python-error: builtins.TypeError: get_metrics() missing"),
        ({"fault": "memory", "at": 3}, "out-of-memory", 70, "out-of-memory: builtins.RuntimeError: CUDA out"),
        ({"fault": "exit", "at": 3}, "exit", 3, "exit: left with exit code 3"),
        ({"fault": "orphan", "at": 3}, "exit", 4, "exit: left with exit code 4"),
    ],
)
def test_what_is_no_fault_ends_the_arm_unjudged(tmp_path, cue, kind, exit_code, said):
    results = run(tmp_path, tables(broken=cue), ["sound", "broken"])
    arm = only_arm(results, "broken")
    assert arm.runs == () and not arm.whole
    assert [(s.kind, s.phase, s.run, s.exit_code) for s in arm.starts] == [(kind, "run", 0, exit_code)]
    assert arm.not_judged.startswith(said)
    assert compare.rate(arm, compare.MEASURES[0]) == compare.Rate(0, 0)
    (first, *_) = compare.comparisons(results)
    assert first.p is None and first.said.startswith(f"not judged: broken ended with {said}")
    assert compare.kinds(arm).startswith(f"not judged: {said}")


def test_runs_before_an_exception_do_not_make_an_arm_judged(tmp_path):
    arm = only_arm(run(tmp_path, tables(broken={"fault": "bug", "at": 60}), ["broken"]), "broken")
    assert 1 <= len(arm.runs) < 5 and {each.outcome for each in arm.runs} == {"whole"}
    assert len(arm.starts) == 1 and arm.not_judged
    assert {compare.rate(arm, measure).trials for measure in compare.MEASURES} == {0}


def test_an_arm_is_judged_when_it_ran_whole_after_all(tmp_path):
    marker = tmp_path / "marker"
    data = tables(broken={"fault": "bug-once", "at": 3, "marker": str(marker)})
    assert only_arm(run(tmp_path, data, ["broken"]), "broken").not_judged
    arm = only_arm(run(tmp_path, data, ["broken"], resume=True), "broken")
    assert (
        arm.whole
        and arm.not_judged == ""
        and [start.kind for start in arm.starts]
        == [
            "python-error",
            "value",
        ]
    )


@pytest.mark.parametrize(
    ("warm", "kind", "limit"),
    [("hang", "timeout", 1.5), ("bug", "python-error", 120), ("raise", "illegal-address", 120)],
)
def test_what_fails_before_the_first_run_is_no_run(tmp_path, warm, kind, limit):
    data = tables(broken={"warm": warm}) | {"start_timeout_s": limit, "run_timeout_s": 0.5}
    arm = only_arm(run(tmp_path, data, ["broken"]), "broken")
    assert arm.runs == () and [(s.kind, s.phase, s.up_s) for s in arm.starts] == [(kind, "start", None)]


def test_requests_before_the_first_run_are_prompts_and_drafts_and_leave_no_trace(tmp_path):
    log = tmp_path / "log"
    arm = only_arm(run(tmp_path, tables(logged={"log": str(log)}), ["logged"]), "logged")
    assert log.read_text().count("add") == 50 and arm.whole
    found = arms.parse(tables())
    told, _ = plan(found.arm("sound").workload, found.model.source(), found.seed, 0)
    warm = warm_up(told)
    first, requests = told["rounds"][0]["requests"], warm["rounds"][0]["requests"]
    assert [r["at"] for r in requests] == [0, 1, 2, 3] and warm["ignore_eos"]
    assert [r["prompt"] for r in requests] == [r["prompt"][::-1] for r in first[:4]]
    assert {r["max_tokens"] >= 16 for r in requests} == {True}
    assert not {r["id"] for r in requests} & {r["id"] for r in first}
    long = {**told, "rounds": [{"requests": [{**first[0], "prompt": list(range(5000))}]}]}
    assert len(warm_up(long)["rounds"][0]["requests"][0]["prompt"]) == 256


def test_an_engine_leaves_no_core_file(tmp_path):
    log = tmp_path / "log"
    soft, hard = resource.getrlimit(resource.RLIMIT_CORE)
    resource.setrlimit(resource.RLIMIT_CORE, (hard, hard))
    try:
        run(tmp_path, tables(logged={"log": str(log)}), ["logged"])
    finally:
        resource.setrlimit(resource.RLIMIT_CORE, (soft, hard))
    assert log.read_text().splitlines()[0] == "core 0"


def test_a_hang_is_killed_with_its_whole_group_and_counted(tmp_path):
    pids = tmp_path / "pids"
    data = tables(broken={"fault": "hang", "at": 3, "pids": str(pids)}) | {"run_timeout_s": 0.7}
    arm = only_arm(run(tmp_path, data, ["broken"]), "broken")
    assert [(each.outcome, each.kind) for each in arm.runs] == [("timeout", "timeout")] * 5
    assert [start.message for start in arm.starts] == [f"killed after 0.7 s in run {n}" for n in range(5)]
    for pid in map(int, pids.read_text().split()):
        assert not _alive(pid)


@pytest.mark.parametrize(("fault", "kind"), [("slip", "timeout"), ("slip-and-die", "signal")])
def test_a_process_in_a_session_of_its_own_does_not_outlive_the_engine(tmp_path, fault, kind):
    """Not even one that hides its environment, or whose parent is dead."""
    pids = tmp_path / "pids"
    data = tables(broken={"fault": fault, "at": 3, "pids": str(pids)}) | {"run_timeout_s": 0.7}
    arm = only_arm(run(tmp_path, data, ["broken"]), "broken")
    assert {each.kind for each in arm.runs} == {kind}
    found = list(map(int, pids.read_text().split()))
    assert len(found) == 3 and not any(map(_alive, found))


@pytest.mark.parametrize(
    ("number", "said"), [(signal.SIGKILL, "died by SIGKILL"), (signal.SIGSTOP, "did not answer")]
)
def test_a_supervisor_that_is_lost_ends_the_arm_unjudged(tmp_path, monkeypatch, number, said):
    monkeypatch.setattr(process, "ANSWER_S", 5.0)
    cue = {"fault": "supervisor", "at": 3, "number": int(number)}
    arm = only_arm(run(tmp_path, tables(broken=cue) | {"run_timeout_s": 1.0}, ["broken"]), "broken")
    assert [start.kind for start in arm.starts] == ["exit"] and arm.runs == ()
    assert arm.not_judged.startswith(f"exit: the supervisor process {said}")


def test_nothing_of_an_engine_outlives_a_caller_that_is_killed(tmp_path, nothing_is_left):
    pids, temporary = tmp_path / "pids", tmp_path / "temporary"
    temporary.mkdir()
    cue = {"fault": "slip", "at": 3, "pids": str(pids)}
    script = (
        "import sys; sys.path.insert(0, sys.argv[1])\n"
        "from pathlib import Path\n"
        "from engine_helpers import run, tables\n"
        f"run(Path({str(tmp_path)!r}), tables(broken={cue!r}), ['broken'])\n"
    )
    caller = subprocess.Popen(
        [sys.executable, "-c", script, str(Path(__file__).parent)],
        env={**os.environ, "TMPDIR": str(temporary)},
    )
    try:
        assert _within(120, lambda: pids.exists() and len(pids.read_text().split()) == 3)
        assert len(list(temporary.iterdir())) == 2
    finally:
        caller.kill()
        caller.wait()
    assert not any(map(_alive, map(int, pids.read_text().split())))
    assert _within(60, lambda: not list(temporary.iterdir()))
    assert _within(60, lambda: not marked(nothing_is_left)), "the supervisor leaves when its folder is gone"


def _within(seconds, true):
    """Whether something becomes true in time."""
    for _ in range(int(20 * seconds)):
        if true():
            return True
        time.sleep(0.05)
    return False


def _alive(pid):
    """Whether a process runs; one that is dead and not yet collected does not."""
    for _ in range(50):
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except FileNotFoundError:
            return False
        if state in "ZX":
            return False
        time.sleep(0.05)
    return True


@pytest.mark.parametrize(
    ("cue", "kind", "phase", "said"),
    [
        ({"fault": "import"}, "python-error", "import", "libcudart.so.13"),
        ({"fault": "refuse"}, "python-error", "start", "No available memory"),
        ({"version": "0.22.1"}, "wrong-release", "start", "holds vllm 0.22.1, the arm needs 0.23.0"),
        ({"fault": "hang-import"}, "timeout", "import", "killed after 1 s in phase import"),
    ],
)
def test_an_engine_that_does_not_come_up_is_no_run(tmp_path, cue, kind, phase, said):
    data = tables(broken=cue) | ({"start_timeout_s": 1.0} if cue.get("fault") == "hang-import" else {})
    results = run(tmp_path, data, ["broken"])
    arm = only_arm(results, "broken")
    assert (arm.runs, arm.whole, results.status) == ((), False, "partial")
    assert [(start.kind, start.phase) for start in arm.starts] == [(kind, phase)]
    assert said in arm.starts[0].message + arm.starts[0].log_tail


def test_a_local_build_of_the_release_is_the_release(tmp_path):
    arm = only_arm(run(tmp_path, tables(local={"version": "0.23.0+cu130"}), ["local"]), "local")
    assert arm.whole and arm.starts[0].versions["vllm"] == "0.23.0+cu130"


def test_ctrl_c_leaves_a_valid_partial_result_and_no_process(tmp_path):
    pids = tmp_path / "pids"
    script = (
        "import json, sys; from pathlib import Path\n"
        f"sys.path.insert(0, {str(FAKE.parent)!r})\n"
        "import engine_helpers as h\n"
        f"data = h.tables(broken={{'fault': 'hang', 'at': 25, 'pids': {str(pids)!r}}})\n"
        f"found = h.run(Path({str(tmp_path)!r}), data, ['broken'])\n"
        "print(found.status)"
    )
    caller = subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        assert _within(120, lambda: pids.exists() and pids.read_text())
        caller.send_signal(signal.SIGTERM)
        assert caller.communicate(timeout=120)[0].strip() == "interrupted"
    finally:
        caller.kill()
        caller.wait()
    results = EngineResults.load(tmp_path / "engine.json")
    arm = only_arm(results, "broken")
    assert results.status == "interrupted"
    assert arm.runs and {each.outcome for each in arm.runs} == {"whole"} and not arm.whole
    assert [start.kind for start in arm.starts] == ["interrupted"]
    assert not any(map(_alive, map(int, pids.read_text().split())))


def test_the_end_of_the_time_is_told_and_does_not_count_as_a_run(tmp_path):
    data = tables(broken={"fault": "hang", "at": 3, "pids": str(tmp_path / "pids")})
    results = run(tmp_path, data, ["broken", "sound"], minutes=0.03)
    assert results.status == "interrupted"
    assert [arm.name for arm in results.arms] == ["broken"]
    assert only_arm(results, "broken").runs == ()
    assert only_arm(results, "broken").starts[0].message == "the time given for all arms was up"


def test_resume_runs_only_what_is_not_there(tmp_path):
    log = tmp_path / "log"
    data = tables(logged={"log": str(log)})
    run(tmp_path, data, ["logged"])
    asked = log.read_text().count("add")
    results = run(tmp_path, data, ["logged", "sound"], resume=True)
    assert log.read_text().count("add") == asked == 50
    assert [arm.whole for arm in results.arms] == [True, True]
    assert results.command.count("specmortem engine toy") == 2


def test_resume_refuses_an_arm_that_was_another_configuration(tmp_path):
    run(tmp_path, tables(), ["sound"])
    data = tables()
    data["base"]["engine"]["max_num_seqs"] = 2
    with pytest.raises(BadInputError, match="arm sound was run with another configuration"):
        run(tmp_path, data, ["sound"], resume=True)


def test_the_same_seed_sends_the_same_at_the_same_steps(tmp_path):
    logs = [tmp_path / "a", tmp_path / "b"]
    for log in logs:
        data = tables(logged={"log": str(log)})
        data["workloads"]["small"] |= {"abort_share": 0.4, "abort_after": [1, 4]}
        run(log.with_suffix(".out"), data, ["logged"])
    first, second = (log.read_text() for log in logs)
    assert first == second
    assert "abort" in first


def test_an_aborted_request_is_judged_as_far_as_it_came(tmp_path):
    data = tables()
    data["workloads"]["small"] |= {"abort_share": 1.0, "abort_after": [2, 3]}
    arm = only_arm(run(tmp_path, data, ["sound"]), "sound")
    assert all(each.kept == () and len(each.short) == each.counts.judged == 10 for each in arm.runs)
    assert all(0 < tokens < 24 for each in arm.runs for tokens in each.short.values())


def test_arrivals_are_one_a_step_and_never_more_in_flight_than_asked(tmp_path):
    log = tmp_path / "log"
    data = tables(logged={"log": str(log)})
    data["workloads"]["small"]["concurrency"] = [3]
    run(tmp_path, data, ["logged"])
    lines = [line.split() for line in log.read_text().splitlines() if line[0] in "ae"]
    added = [int(words[2]) for words in lines if words[0] == "add"][:10]
    assert added[:3] == [0, 1, 2] and added == sorted(set(added)) and added[-1] > 9
    flight, most = 0, 0
    for words in lines:
        flight += {"add": 1, "end": -1}[words[0]]
        most = max(most, flight)
    assert (flight, most) == (0, 3)


def test_rounds_begin_when_the_one_before_has_ended(tmp_path):
    log = tmp_path / "log"
    data = tables(logged={"log": str(log)})
    data["workloads"]["small"] |= {"concurrency": [3, 2], "requests": 0, "every": 0}
    arm = only_arm(run(tmp_path, data, ["logged"]), "logged")
    assert arm.runs[0].counts.ended == 5
    adds = [line.split()[1:3] for line in log.read_text().splitlines() if line.startswith("add")][:5]
    assert [step for _, step in adds[:3]] == ["0"] * 3
    assert len({step for _, step in adds[3:]}) == 1 and int(adds[3][1]) > 0


def test_idle_gpu_work_is_put_in_front_of_every_step(tmp_path):
    assert compare.delays(only_arm(run(tmp_path / "calm", tables(), ["sound"]), "sound")) is None
    data = tables()
    data["workloads"]["small"]["gpu_delay_us"] = [100, 200]
    environment = fake_gpu(tmp_path, tmp_path / "cycles")
    results = run(tmp_path / "out", data, ["sound"], {"0.23.0": environment})
    arm = only_arm(results, "sound")
    cycles = list(map(int, (tmp_path / "cycles").read_text().split()))
    rate = 20_000_000 / 10_000
    assert len(cycles) - 3 == sum(each.steps for each in arm.runs)
    assert all(100 <= each.delay_us <= 200 for each in arm.runs)
    assert compare.delays(arm) == (min(r.delay_us for r in arm.runs), max(r.delay_us for r in arm.runs))
    assert all(100 * rate <= each <= 200 * rate for each in cycles[3:])
    assert arm.starts[0].device == "Fake GPU"


def test_idle_gpu_work_in_shares_of_a_step_begins_after_the_calm_steps(tmp_path):
    from specmortem.tools.engine import child

    spun = []
    plan = {"seed": 1, "gpu_delay_us": [0, 0], "gpu_delay_steps": [0.5, 1.5]}
    run = child.Repetition(None, plan, None, {}, spun.append)
    run.step_ms = [1000.0] * (child.CALM_STEPS // 3) + [2.0] * (child.CALM_STEPS - child.CALM_STEPS // 3 - 1)
    assert run.delay() == 0
    run.step_ms += [2.0] + [500.0] * 10
    delays = [run.delay() for _ in range(200)]
    assert 1000 <= min(delays) < 1200 and 2800 < max(delays) <= 3000


def drafting(**cue):
    """The tables of an experiment whose `delayed` arm has idle work in front of its draft passes."""
    data = tables(delayed=cue)
    data["base"]["engine"]["enforce_eager"] = True
    data["arms"][-1]["set"]["workload.draft_delay_us"] = [100, 200]
    return data | {"pairs": []}


def test_idle_gpu_work_is_put_in_front_of_every_draft_pass(tmp_path):
    log = tmp_path / "log"
    environment = fake_gpu(tmp_path, log)
    results = run(
        tmp_path / "out", drafting(drafter="calls", log=str(log)), ["delayed"], {"0.23.0": environment}
    )
    arm = only_arm(results, "delayed")
    assert arm.whole and {each.outcome for each in arm.runs} == {"whole"}
    lines = log.read_text().splitlines()
    calibrated = [at for at, line in enumerate(lines) if line == "20000000"]
    before, after = lines[: calibrated[0]], lines[calibrated[-1] + 1 :]
    assert len(calibrated) == 3
    assert {line.split()[0] for line in before} == {"core", "draft"}, "no idle work in requests before run 0"
    drafts = [at for at, line in enumerate(after) if line.startswith("draft")]
    idle = [at for at, line in enumerate(after) if line.isdigit()]
    assert idle == [at - 1 for at in drafts]
    assert all(100 * 2000 <= int(after[at]) <= 200 * 2000 for at in idle)
    assert (
        len(drafts) == sum(each.draft_passes for each in arm.runs) == 3 * sum(each.steps for each in arm.runs)
    )
    assert all(100 <= each.draft_delay_us <= 200 and each.delay_us is None for each in arm.runs)
    assert compare.delays(arm) is None
    low, high, fewest, most = compare.draft_delays(arm)
    assert 100 <= low <= high <= 200 and 0 < fewest <= most
    assert " in front of each of " in report.markdown(results)


def test_idle_gpu_work_of_drafts_is_the_same_for_the_same_seed(tmp_path):
    found = []
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        environment = fake_gpu(tmp_path / name, tmp_path / name / "log")
        data = drafting(drafter="calls")
        found.append(run(tmp_path / name, data, ["delayed"], {"0.23.0": environment}).arms[0])
    first, second = ([(r.draft_delay_us, r.draft_passes) for r in arm.runs] for arm in found)
    assert first == second and len({delay for delay, _ in first}) > 1


@pytest.mark.parametrize(
    ("drafter", "phase", "said"),
    [
        (
            "none",
            "start",
            "engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner (SimpleNamespace) "
            "has no drafter",
        ),
        ("bare", "start", "the drafter (SimpleNamespace) has no model with a forward"),
        ("compiled", "start", "the drafter's model (Model) is compiled; set enforce_eager = true"),
        ("silent", "run", "no draft pass called the drafter's model, so none was delayed"),
    ],
)
def test_an_engine_whose_draft_passes_cannot_be_delayed_leaves_its_arm_unjudged(
    tmp_path, drafter, phase, said
):
    environment = fake_gpu(tmp_path, tmp_path / "log")
    results = run(tmp_path / "out", drafting(drafter=drafter), ["delayed"], {"0.23.0": environment})
    arm = only_arm(results, "delayed")
    assert [(start.kind, start.phase) for start in arm.starts] == [("python-error", phase)]
    assert f"draft_delay_us: {said}" in arm.not_judged
    assert arm.runs == ()


def patched(**cue):
    """The tables of an experiment whose `after` arm has the patch of mtp-draft-loop."""
    data = tables(after=cue)
    data["arms"][-1]["set"]["patch"] = "build-event"
    return data | {"pairs": []}


def test_a_patched_builder_waits_for_the_copies_of_its_build_before(tmp_path):
    log = tmp_path / "log"
    environment = fake_gpu(tmp_path, log)
    results = run(tmp_path / "out", patched(builders=2, log=str(log)), ["after"], {"0.23.0": environment})
    arm = only_arm(results, "after")
    assert arm.whole and arm.config["patch"] == "build-event"
    lines = [line for line in log.read_text().splitlines() if line.split()[0] in ("wait", "build", "record")]
    assert lines[:4] == ["build 0", "record 0", "build 1", "record 1"]
    for at in range(4, len(lines), 3):
        event = (at - 4) // 3
        assert lines[at : at + 3] == [f"wait {event}", f"build {event % 2}", f"record {event + 2}"]
    counted = [each.patched_calls for each in arm.runs]
    assert all(calls == 2 * each.steps for calls, each in zip(counted, arm.runs, strict=True))
    assert 0 < sum(counted) < lines.count("build 0") + lines.count("build 1"), "warm-up is not counted"


def test_a_patch_that_nothing_comes_by_leaves_its_arm_unjudged(tmp_path):
    environment = fake_gpu(tmp_path, tmp_path / "log")
    results = run(tmp_path / "out", patched(), ["after"], {"0.23.0": environment})
    arm = only_arm(results, "after")
    assert "patch build-event: the engine never came by what it wraps" in arm.not_judged
    assert arm.runs == ()


def test_an_arm_without_a_patch_wraps_nothing(tmp_path):
    log = tmp_path / "log"
    environment = fake_gpu(tmp_path, log)
    data = tables(before={"builders": 2, "log": str(log)}) | {"pairs": []}
    arm = only_arm(run(tmp_path / "out", data, ["before"], {"0.23.0": environment}), "before")
    assert arm.whole and "patch" not in arm.config and {each.patched_calls for each in arm.runs} == {0}
    assert not [line for line in log.read_text().splitlines() if line.startswith(("wait", "record"))]


def test_an_environment_is_an_interpreter_or_folders(tmp_path, monkeypatch):
    assert Environment.parse(sys.executable) == Environment(sys.executable)
    monkeypatch.chdir(Path(sys.executable).parent)
    assert Environment.parse(Path(sys.executable).name) == Environment(sys.executable)
    assert Environment.parse(f"{FAKE}:{tmp_path}").path == (str(FAKE), str(tmp_path))
    with pytest.raises(BadInputError, match="is no folder and no interpreter"):
        Environment.parse(str(tmp_path / "nowhere"))
    with pytest.raises(BadInputError, match="an environment is empty"):
        Environment.parse(":")


def test_an_arm_without_an_environment_is_refused_before_anything_runs(tmp_path):
    with pytest.raises(BadInputError, match=r"no environment for vllm 0\.23\.0; give --at"):
        run(tmp_path, tables(), ["sound"], {"0.24.0": HERE})
    assert not (tmp_path / "engine.json").exists()


def test_nothing_of_the_callers_python_reaches_the_engine(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", "/somewhere/else")
    for name in ("TRITON_INTERPRET", "CUDA_LAUNCH_BLOCKING", "VLLM_USE_V2_MODEL_RUNNER", "VLLM_CACHE_ROOT"):
        monkeypatch.setenv(name, "1")
    variables = HERE.variables({"A": "1"})
    assert variables["PYTHONPATH"] == str(FAKE)
    assert not {"TRITON_INTERPRET", "CUDA_LAUNCH_BLOCKING", "VLLM_USE_V2_MODEL_RUNNER"} & set(variables)
    assert variables["A"] == variables["VLLM_CACHE_ROOT"] == "1"


def test_places_of_this_machine_do_not_reach_the_result(tmp_path):
    arm = only_arm(run(tmp_path, tables(broken={"fault": "raise", "at": 3}), ["broken"]), "broken")
    assert "fake_vllm" not in json.dumps([start.log_tail for start in arm.starts])
    assert "ENVIRONMENT" in arm.starts[0].log_tail


def test_neither_places_nor_terminal_controls_reach_the_result_or_the_terminal(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path / "someone"))
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "someone" / "cache"))
    lines = []
    found = arms.parse(tables(broken={"fault": "leak", "at": 3}))
    options = campaign.Options(("broken",))
    campaign.run(found, {"0.23.0": HERE}, tmp_path, tmp_path / "engine.json", options, lines.append)
    text = (tmp_path / "engine.json").read_text()
    arm = only_arm(EngineResults.load(tmp_path / "engine.json"), "broken")
    assert arm.starts[0].message == (
        "builtins.RuntimeError: no \\x1b[2J\\u202e in HOME/x, MODEL or "
        f"TMP/{arm.starts[0].message.split('TMP/')[1]}"
    )
    assert arm.starts[0].inherited["TRITON_CACHE_DIR"] == "HOME/cache"
    for told in (text, "\n".join(lines), report.markdown(EngineResults.load(tmp_path / "engine.json"))):
        for place in (str(tmp_path), tempfile.gettempdir() + "/", str(FAKE), "\x1b", "\u202e"):
            assert place not in told
    assert "MODEL" in "\n".join(lines)


@pytest.mark.parametrize(
    ("text", "clean"),
    [
        ("/a/b/c and /a/b", "DEEP and TOP"),
        ("/a/bc /x/a/b /a/b/d /a/b.", "/a/bc /x/a/b TOP/d TOP."),
        ("one\ntwo\r\x07", "one\ntwo\\r\\x07"),
    ],
)
def test_the_longest_place_is_hidden_and_no_part_of_a_name(text, clean):
    assert places.cleaned(text, {"/a/b": "TOP", "/a/b/c": "DEEP"}) == clean
    assert places.cleaned_all({"k": [text, 1]}, {"/a/b": "TOP", "/a/b/c": "DEEP"}) == {"k": [clean, 1]}


def test_the_root_folder_is_no_place_to_hide(monkeypatch):
    monkeypatch.setenv("HOME", "/")
    assert "/" not in places.known({"/": "CHECKOUT"})


def test_what_of_the_callers_may_change_an_engine_is_recorded_with_its_host(tmp_path, monkeypatch):
    for name in ("PYTORCH_ALLOC_CONF", "CUDA_DEVICE_MAX_CONNECTIONS", "VLLM_LOGGING_LEVEL", "EDITOR"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("TRITON_CACHE_AUTOTUNING", "0")
    start = only_arm(run(tmp_path, tables(), ["sound"]), "sound").starts[0]
    assert {"PYTORCH_ALLOC_CONF", "CUDA_DEVICE_MAX_CONNECTIONS"} <= set(start.inherited)
    assert not {"VLLM_LOGGING_LEVEL", "EDITOR", "TRITON_CACHE_AUTOTUNING"} & set(start.inherited)
    assert {"system", "driver", "python"} <= set(start.host)


def test_resume_keeps_the_host_of_each_start(tmp_path, monkeypatch):
    monkeypatch.setattr(campaign, "_driver", lambda: "1.0")
    run(tmp_path, tables(), ["sound"])
    monkeypatch.setattr(campaign, "_driver", lambda: "2.0")
    results = run(tmp_path, tables(), ["sound", "plain"], resume=True)
    drivers = [[start.host["driver"] for start in only_arm(results, n).starts] for n in ("sound", "plain")]
    assert drivers == [["1.0"], ["2.0"]]


def test_the_child_needs_the_standard_library_alone(tmp_path):
    request = tmp_path / "request.json"
    request.write_text('{"engine": {"model": "."}, "runs": []}')
    (tmp_path / "config.json").write_text("{}")
    ended = subprocess.run(
        [sys.executable, "-S", "-P", str(process.CHILD), str(request), "events"],
        env={"PYTHONPATH": str(FAKE)},
        cwd=tmp_path,
        capture_output=True,
        timeout=60,
        check=False,
    )
    events = [json.loads(line)["event"] for line in (tmp_path / "events").read_text().splitlines()]
    assert (ended.returncode, events) == (0, ["imported", "up", "done"])


def test_a_process_that_cannot_be_started_is_an_error_not_a_run(tmp_path):
    from specmortem.errors import UnavailableError

    broken = Environment(str(tmp_path / "no-python"))
    with pytest.raises(UnavailableError, match="cannot start"):
        process.run({}, broken, {}, StartLimits(1, 1), lambda event: None)
