"""The command line apart from running notebooks."""

import json
import subprocess
import sys
from types import ModuleType

import pytest
from click.testing import CliRunner

import specmortem
from specmortem import doctor, incident
from specmortem.cli import main
from specmortem.doctor import Check
from specmortem.incident import Incident, Probe
from specmortem.verdict import Evidence, Verdict

COMMAND = [sys.executable, "-c", "from specmortem.cli import main; main(prog_name='specmortem')"]
VERDICTS = {
    "before": Verdict("fault", Evidence(reason="reads past row 1", place="kernel.py:3")),
    "after": Verdict("clean"),
    "vllm==0.1": Verdict.not_judged("no such function"),
    "vllm==0.2": Verdict.not_judged("no index", unavailable=True),
}


def invoke(*arguments):
    return CliRunner().invoke(main, list(arguments))


@pytest.fixture
def probes(monkeypatch):
    """A stand-in for the probes: one cause, fixed verdicts."""
    module = ModuleType("specmortem.judge")
    module.asked = []

    def judge_many(pairs, *, device):
        module.asked += [(cause, subject, device) for cause, subject in pairs]
        return [VERDICTS[subject] for _, subject in pairs]

    module.judge_many = judge_many
    monkeypatch.setitem(sys.modules, "specmortem.judge", module)
    monkeypatch.setattr(specmortem, "judge", module, raising=False)
    toy = Incident("toy", "toy", (Probe("past-end", "Read past the end", (), ()),))
    monkeypatch.setattr(incident, "all_incidents", lambda: {"toy": toy})
    return module


def test_a_subject_that_cannot_be_had_is_one_error(probes):
    result = invoke("probe", "past-end", "--subject", "vllm==0.2")
    assert (result.exit_code, result.stdout, result.stderr) == (2, "", "specmortem: error: no index\n")


def test_help_imports_nothing_heavy():
    code = (
        "import sys; from specmortem.cli import main\n"
        "try: main(['--help'])\n"
        "finally: print(sorted({'torch', 'papermill', 'nbconvert', 'rich'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.splitlines()[-1] == "[]"
    assert all(command in done.stdout for command in ("run", "render", "probe", "doctor"))


def test_version():
    assert invoke("--version").output == f"specmortem, version {specmortem.__version__}\n"


def test_an_error_is_one_line_without_a_traceback(tmp_path):
    done = subprocess.run([*COMMAND, "render", tmp_path / "gone.ipynb"], capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr == f"specmortem: error: cannot read {tmp_path}/gone.ipynb: No such file or directory\n"


def test_an_interrupt_is_one_line_and_130(probes):
    def interrupted(*_, **__):
        raise KeyboardInterrupt

    probes.judge_many = interrupted
    result = invoke("probe", "past-end")
    assert (result.exit_code, result.stderr) == (130, "specmortem: interrupted\n")


def test_probe_judges_before_and_after_unless_told(probes):
    invoke("probe", "past-end")
    assert probes.asked == [("past-end", "before", "auto"), ("past-end", "after", "auto")]


def test_probe_passes_the_device_on(probes):
    invoke("probe", "past-end", "--subject", "after", "--device", "sim")
    assert probes.asked == [("past-end", "after", "sim")]


@pytest.mark.parametrize(
    ("subjects", "code"),
    [
        (["after"], 0),
        (["after", "vllm==0.1"], 3),
        (["after", "vllm==0.1", "vllm==0.2"], 2),
        (["vllm==0.2", "before", "after"], 1),
    ],
)
def test_probe_exit_code_is_that_of_the_worst_subject(probes, subjects, code):
    assert invoke("probe", "past-end", *(a for s in subjects for a in ("--subject", s))).exit_code == code


def test_probe_shows_verdict_and_evidence(probes):
    output = " ".join(invoke("probe", "past-end").output.split())
    assert "Read past the end" in output
    assert "before: past-end: fault: kernel.py:3: Read past the end; reads past row 1" in output


def test_probe_json_is_nothing_but_json(probes):
    result = invoke("probe", "past-end", "--format", "json")
    assert json.loads(result.stdout) == [
        {
            "cause": "past-end",
            "subject": "before",
            "outcome": "fault",
            "evidence": {"reason": "reads past row 1", "place": "kernel.py:3"},
        },
        {"cause": "past-end", "subject": "after", "outcome": "clean", "evidence": {}},
    ]


def test_an_unknown_cause_lists_the_known_ones(probes):
    result = invoke("probe", "other")
    assert result.exit_code == 2
    assert result.stderr == "specmortem: error: unknown cause 'other'; known causes: past-end\n"


def test_doctor_prints_every_check_and_passes_when_the_required_ones_do(monkeypatch):
    checks = [Check("torch", "ok", "2.13", True), Check("CUDA device", "missing", "no GPU")]
    monkeypatch.setattr(doctor, "examine", lambda: checks)
    result = invoke("doctor")
    assert result.exit_code == 0
    assert "missing" in result.output and "no GPU" in result.output


def test_doctor_fails_when_something_required_is_missing(monkeypatch):
    monkeypatch.setattr(doctor, "examine", lambda: [Check("torch", "missing", "not installed", True)])
    assert invoke("doctor").exit_code == 1
