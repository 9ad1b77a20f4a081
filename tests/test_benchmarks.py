"""The benchmarks that run without a GPU."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


@pytest.mark.network
def test_the_detector_is_right_about_every_case(tmp_path):
    out = tmp_path / "cases.json"
    command = [sys.executable, str(ROOT / "benchmarks" / "detector.py"), str(out), "--cases-only"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=540)
    if done.returncode == 2:
        pytest.skip(done.stderr.strip())
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads(out.read_text(encoding="utf-8"))
    says = {row["case"]: row["bounds"]["says"] for row in result["cases"]}
    silent = {case for case, word in says.items() if word == "silent"}
    assert silent == {"a", "e", "f1", "f2", "f3", "h"} and set(says.values()) == {"silent", "reports"}


SCRIPTS = sorted({path.name for path in (ROOT / "benchmarks").glob("*.py")} - {"memcheck.py"})


@pytest.mark.parametrize("name", SCRIPTS)
def test_asking_for_help_measures_and_writes_nothing(tmp_path, name):
    command = [sys.executable, str(ROOT / "benchmarks" / name), "--help"]
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert ended.returncode in (0, 2), ended.stderr
    assert (ended.stdout + ended.stderr).lower().startswith("usage")
    assert list(tmp_path.iterdir()) == []
