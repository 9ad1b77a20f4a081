"""The command line apart from running notebooks."""

import csv
import json
import re
import shlex
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import click
import pytest
from click.testing import CliRunner
from packaging.version import Version

import specmortem
from specmortem import doctor, facts, incident
from specmortem.affected import screen
from specmortem.affected.matrix import FILE
from specmortem.cli import main
from specmortem.doctor import Check
from specmortem.facts import find_root
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
    return CliRunner().invoke(main, list(arguments), prog_name="specmortem")


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


def examples_of(name):
    """The commands below the help of a command, each as its arguments without what is piped into it."""
    text = invoke(name, "--help").stdout
    lines = text.partition("\n  Examples:\n")[2].splitlines()
    return [shlex.split(line.rpartition(" | ")[2]) for line in lines if line.strip()]


@pytest.mark.parametrize("name", main.commands)
def test_every_command_has_two_examples_that_it_takes(name):
    found = examples_of(name)
    assert len(found) == 2
    for program, *arguments in found:
        assert program == "specmortem"
        given = arguments[2:] if arguments[0] == "--incidents" else arguments
        assert given[0] == name
        main.commands[name].make_context(name, given[1:])  # raises for an option that it does not have


def test_an_example_with_an_option_that_is_not_there_is_refused():
    with pytest.raises(click.NoSuchOption):
        main.commands["show"].make_context("show", ["SLUG", "--zz9"])


@pytest.mark.parametrize("name", main.commands)
def test_an_error_of_usage_has_the_one_style(name):
    result = invoke(name, "--zz9")
    assert (result.exit_code, result.stdout) == (2, "")
    option = "'?--zz9'?"
    assert re.fullmatch(
        rf"specmortem: error: No such option:? {option}; see specmortem {name} --help\n", result.stderr
    )


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ([], "Missing command; see specmortem --help"),
        (["no-such-command"], "No such command 'no-such-command'; see specmortem --help"),
        (["--zz9"], "No such option"),
        (["render"], "Missing argument 'EXECUTED.ipynb'; see specmortem render --help"),
        (["load"], "Missing option '--url'; see specmortem load --help"),
        (["run", "toy", "--jobs", "0"], "Invalid value for '--jobs': 0 is not in the range"),
        (["check", "--format", "xml"], "Invalid value for '--format': 'xml' is not one of"),
        (["incidents", "extra"], "Got unexpected extra argument"),
        (["run", "toy", "--timeout"], "Option '--timeout' requires an argument"),
    ],
)
def test_every_kind_of_usage_error_is_one_line(arguments, told):
    result = CliRunner().invoke(main, arguments, prog_name="specmortem")
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.startswith(f"specmortem: error: {told}")
    assert re.fullmatch(r"[^\n]+; see specmortem( \w+)? --help\n", result.stderr)


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


@pytest.fixture
def pages(tmp_path, monkeypatch):
    """A repository with one incident, a page of it in a run of one's own, and what was opened."""
    opened = []
    monkeypatch.setattr(click, "launch", lambda url: opened.append(url) or 0)
    slug = next(iter(facts.all_slugs()))
    own = tmp_path / "out" / slug / "postmortem.html"
    own.parent.mkdir(parents=True)
    own.write_text("<!doctype html>")
    return slug, own, opened


def test_show_opens_the_page_of_the_last_run(pages):
    slug, own, opened = pages
    result = invoke("show", slug, "--out", str(own.parents[1]))
    assert (result.exit_code, result.output) == (0, "")
    assert opened == [own.resolve().as_uri()]


def test_show_prints_the_path_and_opens_nothing(pages):
    slug, own, opened = pages
    result = invoke("show", slug, "--print", "--out", str(own.parents[1]))
    assert (result.exit_code, result.output, opened) == (0, f"{own.resolve()}\n", [])


def test_show_prints_the_path_where_nothing_can_open_it(pages, monkeypatch):
    slug, own, _ = pages
    monkeypatch.setattr(click, "launch", lambda url: 1)
    assert invoke("show", slug, "--out", str(own.parents[1])).output == f"{own.resolve()}\n"


@pytest.mark.parametrize("slug", facts.all_slugs())
def test_show_falls_back_on_the_reference_run(slug, tmp_path):
    result = invoke("show", slug, "--print", "--out", str(tmp_path))
    page = Path(result.output.strip())
    assert result.exit_code == 0
    assert page.is_file() and slug in page.parts and page.suffix == ".html"


def test_show_of_an_unknown_incident_names_the_known_ones():
    result = invoke("show", "no-such-incident", "--print")
    assert result.exit_code == 2
    known = ", ".join(facts.all_slugs())
    assert result.stderr == f"specmortem: error: no incident 'no-such-incident'; known: {known}\n"


def test_incidents_is_one_line_each_with_the_affected_releases():
    lines = invoke("incidents").stdout.splitlines()[1:]
    with Path(find_root().parent / FILE).open(encoding="utf-8") as file:
        rows = [row for row in csv.DictReader(file) if row["answer"] == "affected"]
    assert [line.split()[0] for line in lines] == facts.all_slugs()
    for line in lines:
        slug = line.split()[0]
        hit = sorted({row["release"] for row in rows if row["incident"] == slug}, key=Version)
        assert hit[0] in line and hit[-1] in line
        assert facts.load(slug).title in line


def test_incidents_says_where_none_is_on_record(monkeypatch):
    monkeypatch.setattr(screen, "exposure", lambda slug: SimpleNamespace(affected=""))
    assert all("none on record" in line for line in invoke("incidents").stdout.splitlines()[1:])
