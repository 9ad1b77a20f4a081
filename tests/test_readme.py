"""Every snippet of README.md runs, and prints what stands there."""

import os
import pty
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
TEXT = (ROOT / "README.md").read_text(encoding="utf-8")
SNIPPETS = re.findall(r"^```(\w*)\n(.*?)^```$", TEXT, re.MULTILINE | re.DOTALL)
BIN = Path(sys.executable).parent


def of(kind):
    return [body for found, body in SNIPPETS if found == kind]


def on_a_terminal(command):
    """What a command prints on a terminal of 80 columns without colours."""
    main, side = pty.openpty()
    env = {**os.environ, "COLUMNS": "80", "LINES": "60", "NO_COLOR": "1", "TERM": "dumb"}
    env["PATH"] = f"{BIN}{os.pathsep}{env['PATH']}"
    process = subprocess.Popen(
        ["bash", "-c", command],
        stdout=side,
        stderr=subprocess.DEVNULL,
        stdin=subprocess.DEVNULL,
        cwd=ROOT,
        env=env,
    )
    os.close(side)
    found = b""
    try:
        while block := os.read(main, 65536):
            found += block
    except OSError:  # the other side is closed
        pass
    os.close(main)
    process.wait()
    return "\n".join(line.rstrip() for line in found.decode().replace("\r", "").splitlines())


def commands():
    """(command, what is printed below it) of the console snippets."""
    for body in of("console"):
        for part in re.split(r"^\$ ", body, flags=re.MULTILINE)[1:]:
            command, _, printed = part.partition("\n")
            yield command, printed.rstrip()


def test_readme_is_short_and_all_its_snippets_are_of_a_kind_that_is_run():
    assert len(TEXT.splitlines()) < 120
    assert {kind for kind, _ in SNIPPETS} == {"sh", "console", "python"}
    assert ".venv/bin" in TEXT and "activate" in TEXT


@pytest.mark.network
@pytest.mark.parametrize(("command", "printed"), list(commands()), ids=[command for command, _ in commands()])
def test_a_command_prints_what_stands_below_it(command, printed):
    assert on_a_terminal(command) == printed


@pytest.mark.parametrize("line", [line for body in of("sh") for line in body.splitlines()])
def test_make_knows_its_targets(line):
    command = line.partition("#")[0].split()
    assert subprocess.run([*command, "-n"], cwd=ROOT, capture_output=True).returncode == 0


@pytest.mark.parametrize("body", of("python"))
def test_the_test_of_a_kernel_passes(body, tmp_path):
    (tmp_path / "test_snippet.py").write_text(body)
    env = {**os.environ, "TRITON_INTERPRET": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, env=env, cwd=tmp_path)
    assert done.returncode == 0 and "1 passed" in done.stdout, done.stdout


def test_a_reader_of_the_file_as_it_is_sees_a_wrong_output(monkeypatch):
    command, printed = next(commands())
    assert on_a_terminal(command) != printed + "\nmore"
