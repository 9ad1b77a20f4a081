"""A check as text: few lines on a terminal, one line a finding off it, and nothing hostile in either."""

import io
import re

import pytest
from click.testing import CliRunner
from rich.console import Console

from specmortem.affected.answers import answer
from specmortem.cli import main
from specmortem.tools.check import render, report
from specmortem.tools.check.inputs import inputs
from specmortem.tools.check.understand import understand
from tests.tools.check.test_launches import LAUNCHES, UNKNOWN

LIMIT, WIDTH = 25, 80
ONE = [each for each in LAUNCHES if len(each[3]) == 1 and UNKNOWN not in each[3].values()]
ESCAPES = "\x1b[31mred\x1b]0;title\x07\x9b2J\x08\r"


def checked(release, launch, gpu=""):
    text = f"{launch}\n{gpu and f'GPU 0: NVIDIA {gpu}'}"
    return report.check(understand(inputs("launch", text), release))


def on_terminal(done, monkeypatch, width=WIDTH):
    """What a terminal of that width shows."""
    stream = io.StringIO()
    console = Console(file=stream, force_terminal=True, width=width, color_system=None, legacy_windows=False)
    monkeypatch.setattr("rich.console.Console", lambda *a, **k: console)
    render.text(done)
    return stream.getvalue().splitlines()


def test_there_are_many_launches_with_one_affected_incident():
    assert len(ONE) >= 25


@pytest.mark.parametrize(
    ("release", "launch", "gpu", "expected", "reason"), ONE, ids=[str(n) for n in range(len(ONE))]
)
def test_one_affected_incident_fits_a_terminal(monkeypatch, release, launch, gpu, expected, reason):
    lines = on_terminal(checked(release, launch, gpu), monkeypatch)
    commands = [line for line in lines if line.startswith("  $ ")]
    assert len(lines) <= LIMIT, "\n".join(lines)
    assert all(len(line) <= WIDTH for line in lines if line not in commands)
    marked = [number for number, line in enumerate(lines) if line.startswith("✗ AFFECTED")]
    others = [number for number, line in enumerate(lines) if line.startswith(("✓", "–"))]
    assert len(marked) == 1 and marked[0] < min(others, default=LIMIT)
    (slug,) = expected
    assert lines[marked[0]].startswith(f"✗ AFFECTED {slug}: ")
    assert re.search(r"1 affected", lines[-1]) and "not affected" in lines[-1]


def test_affected_launches_come_first(monkeypatch):
    safe, hit = "vllm serve meta-llama/Llama-3.3-70B-Instruct", LAUNCHES[2][1]
    lines = on_terminal(checked("0.22.1", f"{safe}\n{hit}", "H100"), monkeypatch)
    heads = [line for line in lines if line.startswith(("✗", "– unknown", "✓"))]
    assert heads[0].startswith("✗") and heads[-1].startswith("✓")


@pytest.mark.parametrize(("release", "launch", "gpu", "expected", "reason"), LAUNCHES[::6])
def test_off_a_terminal_a_finding_is_one_line_with_whole_names(release, launch, gpu, expected, reason):
    done = checked(release, launch, gpu)
    lines = list(render.findings(done))
    answers = answer(done.checked[0].config).incidents
    assert len(lines) == sum(len(one.deciding) or 1 for one in answers) + 1
    for one in answers:
        for cause in one.deciding:
            (line,) = [
                each for each in lines if f": {one.incident}/{cause.cause}: {one.answer}: launch: " in each
            ]
            assert "\n" not in line and line.startswith(f"vllm=={release}: ")
    affected = sum(one.answer == "affected" for one in answers)
    assert f"{affected} affected" in lines[-1] or "affected" in lines[-1]


def test_what_is_piped_is_neither_wrapped_nor_coloured():
    release, launch, *_ = LAUNCHES[8]
    result = CliRunner().invoke(main, ["check", "--vllm", release, "--launch", launch], env={"COLUMNS": "40"})
    assert result.exit_code == 1
    assert "\x1b" not in result.stdout
    assert "async-accepted-counts/stale-count-align: affected: " in result.stdout


HOSTILE = [
    f"vllm serve org/{ESCAPES} -pp 2",
    f"vllm serve Qwen/Qwen3.5-27B{ESCAPES} -sc.method mtp{ESCAPES}",
    f"vllm serve a/b --attention-backend {ESCAPES} --kv-cache-dtype {ESCAPES} --no-{ESCAPES}",
    f"GPU 0: NVIDIA H100{ESCAPES}\nvLLM 0.31.0{ESCAPES}\nvllm serve a/b --port 1",
    "vllm serve [bold]a[/bold]/b --port 1",
    "vllm serve a/\u202egnp.b --port 1",
]  # fmt: skip


@pytest.mark.parametrize("form", ["text", "github", "json", "sarif", "html"])
@pytest.mark.parametrize("text", HOSTILE)
def test_escapes_in_inputs_never_reach_the_output(tmp_path, form, text):
    """Went wrong: the model's name was printed as it stood."""
    path = tmp_path / "a.log"
    path.write_text(text, newline="")
    result = CliRunner().invoke(main, ["check", "--vllm", "0.31.0", "--format", form, str(path)])
    assert result.exit_code in (0, 1, 3), result.output
    assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]", result.output)


@pytest.mark.parametrize("text", HOSTILE)
def test_escapes_in_inputs_never_reach_a_terminal(monkeypatch, text):
    shown = "\n".join(on_terminal(checked("0.31.0", text), monkeypatch))
    assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e]", shown)
    assert "[bold]" in shown or "bold" not in text


def test_a_name_of_a_file_with_escapes_is_shown_without(tmp_path):
    path = tmp_path / "a\x1b[2J.log"
    path.write_text("vllm serve a/b --port 1")
    result = CliRunner().invoke(main, ["check", "--vllm", "0.31.0", str(path)])
    assert result.exit_code == 3 and "\x1b" not in result.output
