"""The command `engine`, and what `doctor --engine` says."""

from __future__ import annotations

import json
import sys

import pytest
from click.testing import CliRunner
from tools.engine.engine_helpers import FAKE, tables

from specmortem import cli
from specmortem.tools.engine import arms, estimate, examine, report
from specmortem.tools.engine.process import Environment
from specmortem.tools.engine.result import EngineResults


def toml(value):
    """TOML of JSON-like tables; inline below the top."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{json.dumps(k)} = {toml(v)}" for k, v in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(toml, value)) + "]"
    return json.dumps(value)


@pytest.fixture
def file(tmp_path):
    def write(**cues):
        path = tmp_path / "engine.toml"
        path.write_text("".join(f"{k} = {toml(v)}\n" for k, v in tables(**cues).items()))
        return str(path)

    return write


@pytest.fixture
def call(tmp_path):
    def invoke(*arguments):
        return CliRunner().invoke(cli.main, ["engine", *arguments, "--out", str(tmp_path / "out")])

    return invoke


def test_arms_are_run_and_a_reader_can_repeat_them(call, file, tmp_path):
    ended = call(file(), "--at", f"0.23.0={FAKE}")
    assert ended.exit_code == 0, ended.output
    results = EngineResults.load(tmp_path / "out" / "engine.json")
    assert results.status == "complete"
    assert results.command == "specmortem engine engine.toml --at 0.23.0=ENVIRONMENT"
    assert (tmp_path / "out" / "engine.md").read_text() in ended.output
    assert "sound: run 4: 10 requests, 0 damaged" in ended.output


def test_faults_are_results_not_errors(call, file):
    ended = call(file(broken={"fault": "segv", "at": 2}), "--at", f"0.23.0={FAKE}", "--arm", "broken")
    assert ended.exit_code == 0
    assert "5 / 5 (48% to 100%)" in ended.output


def test_an_arm_that_has_not_all_runs_is_told_by_the_exit_code(call, file):
    ended = call(file(broken={"fault": "refuse"}), "--at", f"0.23.0={FAKE}", "--arm", "broken")
    assert ended.exit_code == 3
    assert "did not start: python-error" in ended.output


def test_the_end_of_the_time_has_the_exit_code_of_an_interruption(call, file, tmp_path):
    cue = {"fault": "hang", "at": 1, "pids": str(tmp_path / "pids")}
    ended = call(file(broken=cue), "--at", f"0.23.0={FAKE}", "--arm", "broken", "--minutes", "0.03")
    assert ended.exit_code == cli.INTERRUPTED
    assert EngineResults.load(tmp_path / "out" / "engine.json").status == "interrupted"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--at", "0.23.0"], "--at 0.23.0: expected X.Y.Z=PYTHON"),
        (["--at", "new=/tmp"], "--at new=/tmp: expected X.Y.Z=PYTHON"),
        (["--at", "0.23.0=/nowhere"], "/nowhere is no folder and no interpreter"),
        (["--arm", "nobody"], "no arm 'nobody'; known: sound, plain"),
        ([], "no environment for vllm 0.23.0; give --at 0.23.0=PYTHON"),
    ],
)
def test_bad_input_is_one_line_and_runs_nothing(call, file, tmp_path, arguments, said):
    ended = call(file(), *arguments)
    assert ended.exit_code == 2
    assert said in ended.output and ended.output.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_smoke_is_one_run_and_no_result_that_a_page_finds(call, file, tmp_path):
    ended = call(file(), "--at", f"0.23.0={FAKE}", "--smoke", "--arm", "sound")
    assert ended.exit_code == 0, ended.output
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["smoke.json"]
    results = EngineResults.load(tmp_path / "out" / "smoke.json")
    assert [len(arm.runs) for arm in results.arms] == [1]
    assert results.command.endswith("--arm sound --smoke")
    assert report.committed(tmp_path / "out") is None


@pytest.mark.parametrize("more", [["--runs", "6"], ["--resume"]])
def test_smoke_goes_alone(call, file, more):
    ended = call(file(), "--smoke", *more)
    assert ended.exit_code == 2 and "--smoke is one run" in ended.output


def test_a_plan_counts_starts_runs_and_restarts(call, file):
    ended = call(file(), "--plan", "--runs", "12")
    assert "about 2.9 minutes: 2 starts of about 75 s and 24 runs" in ended.output
    assert "at most 22 of them (27.5 minutes)" in ended.output


@pytest.mark.parametrize(
    ("change", "factor"),
    [
        (lambda d: d["workloads"]["small"].update(requests=20), 2),
        (lambda d: d["base"]["engine"].pop("speculative_config"), 2.5),
        (lambda d: d["model"].pop("tasks"), 2.5),
        (lambda d: d["workloads"]["small"].update(gpu_delay_us=[30_000, 30_000]), 2),
        (lambda d: d["workloads"]["small"].update(gpu_delay_steps=[0.5, 1.5]), 2),
        (
            lambda d: (
                d["base"]["engine"].update(enforce_eager=True)
                or d["workloads"]["small"].update(draft_delay_us=[5_000, 15_000])
            ),
            2,
        ),
        (lambda d: d["workloads"]["small"].update(concurrency=[6, 6]), 2),
    ],
)
def test_a_run_is_taken_to_last_as_long_as_its_steps(change, factor):
    times = []
    for each in (lambda d: None, change):
        data = tables() | {"pairs": []}
        data["arms"] = data["arms"][:1]
        each(data)
        found = arms.parse(data)
        times.append(estimate.run_s(found.arm("sound"), bool(found.model.tasks)))
    assert times[0] == pytest.approx(20 / 2.5 * (10 / 4) * 0.03)
    assert times[1] / times[0] == pytest.approx(factor)


def test_a_plan_runs_nothing(call, file, tmp_path):
    ended = call(file(other={"at": 1}), "--plan")
    assert ended.exit_code == 0
    assert "sound: vllm 0.23.0, workload small, 5 runs of 10 requests" in ended.output
    assert "pair sound / other: env.FAKE_VLLM" in ended.output
    assert not (tmp_path / "out").exists()


def test_help_does_not_import_what_is_heavy():
    import subprocess

    script = (
        "import sys; from specmortem import cli\n"
        "try: cli.main(['engine', '--help'])\n"
        "except SystemExit: pass\n"
        "print(sorted({'torch', 'pandas', 'numpy'} & set(sys.modules)))"
    )
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert ended.stdout.splitlines()[-1] == "[]"


@pytest.mark.parametrize(
    ("found", "words"),
    [
        (
            {
                "python": "3.12.3",
                "vllm": "0.24.0+cu130",
                "torch": "2.11.0",
                "gpu": "H200",
                "flashinfer": "0.6.12",
            },
            ["ok", "ok", "ok", "ok"],
        ),
        (
            {"python": "3.10.1", "vllm": "0.33.0", "torch_error": "ImportError: x"},
            ["missing", "missing", "missing", "missing"],
        ),
        (
            {"python": "3.12.3", "vllm": "dev", "torch": "2.11.0", "gpu": ""},
            ["ok", "missing", "limited", "missing"],
        ),
        ({"error": "no such file"}, ["missing"] * 4),
    ],
)
def test_what_an_environment_lacks(monkeypatch, tmp_path, found, words):
    monkeypatch.setattr(examine, "probe", lambda environment: found)
    checks = examine.examine(Environment(), tmp_path)
    assert [check.word for check in checks[:4]] == words
    assert checks[4].meaning.endswith("only arms with random weights can run")
    assert [check.name for check in checks if check.required] == [
        "engine python",
        "engine GPU",
        "engine vllm",
    ]


def test_a_model_that_is_there_is_told(monkeypatch, tmp_path):
    monkeypatch.setattr(examine, "probe", lambda environment: {})
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).write_text("{}")
    assert examine._model(tmp_path).word == "ok"


def test_an_environment_is_asked_in_its_own_interpreter(tmp_path):
    for name in ("torch", "triton"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text(
            "from types import SimpleNamespace\n__version__ = '2.11.0'\n"
            "cuda = SimpleNamespace(is_available=lambda: True, get_device_name=lambda i: 'Fake GPU')\n"
        )
    found = examine.probe(Environment(path=(str(FAKE), str(tmp_path))))
    assert (found["vllm"], found["torch"], found["gpu"]) == ("0.23.0", "2.11.0", "Fake GPU")
    broken = examine.probe(Environment(str(tmp_path / "no-python")))
    assert "no-python" in broken["error"]


def test_doctor_tells_of_engines_only_when_asked(monkeypatch):
    monkeypatch.setattr(examine, "probe", lambda environment: {"error": "nothing there"})
    ended = CliRunner().invoke(cli.main, ["doctor", "--engine", "--python", str(FAKE)])
    assert ended.exit_code == 1
    assert "engine GPU" in ended.output and "browser" not in ended.output
    refused = CliRunner().invoke(cli.main, ["doctor", "--python", str(FAKE)])
    assert refused.exit_code == 2 and "give --engine with it" in refused.output
