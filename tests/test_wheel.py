"""The wheel in a fresh environment and an empty folder: every command works without a checkout."""

import os
import re
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
LOG = ROOT / "data" / "mtp-draft-loop-log.txt"


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """The `specmortem` of an environment that has the wheel, and this one's libraries without its editable install."""
    folder = tmp_path_factory.mktemp("wheel")
    build = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "-q",
        "--no-deps",
        "--no-build-isolation",
        "-w",
        str(folder),
    ]
    subprocess.run([*build, str(ROOT)], check=True, capture_output=True, text=True)
    (wheel,) = folder.glob("specmortem-*.whl")
    venv.create(folder / "venv", symlinks=True)
    bin_ = folder / "venv" / "bin"
    site = Path(sysconfig.get_path("purelib", vars={"base": str(folder / "venv")}))
    (site / "libraries.pth").write_text(f"{sysconfig.get_path('purelib')}\n")
    pip = [sys.executable, "-m", "pip", f"--python={bin_ / 'python'}", "install", "-q", "--no-deps"]
    subprocess.run([*pip, "--force-reinstall", str(wheel)], check=True, capture_output=True, text=True)
    return bin_ / "specmortem"


@pytest.fixture
def call(installed, tmp_path):
    empty = tmp_path / "empty"
    empty.mkdir()
    environment = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "SPECMORTEM_HOME")}
    environment["JUPYTER_PATH"] = str(
        Path(sys.prefix, "share", "jupyter")
    )  # templates of the borrowed libraries

    def invoke(*arguments):
        return subprocess.run(
            [installed, *map(str, arguments)], cwd=empty, env=environment, capture_output=True, text=True
        )

    return invoke


def test_the_package_is_that_of_the_wheel(installed):
    where = "import specmortem; print(specmortem.__file__)"
    done = subprocess.run(
        [installed.with_name("python"), "-c", where], capture_output=True, text=True, cwd=installed.parent,
        env={k: v for k, v in os.environ.items() if k != "PYTHONPATH"},
    )  # fmt: skip
    assert Path(done.stdout.strip()).is_relative_to(installed.parents[1])


def test_incidents_and_their_facts_are_there(call):
    done = call("incidents")
    assert done.returncode == 0, done.stderr
    assert all(slug in done.stdout for slug in ("mtp-draft-loop", "pp-align-copy", "dflash-oob"))


def test_triage_reads_a_log(call):
    done = call("triage", LOG)
    assert done.returncode == 0 and "mtp-draft-loop" in done.stdout, done.stderr


def test_doctor_says_what_runs(call):
    done = call("doctor")
    assert done.returncode == 0, done.stdout + done.stderr


def test_load_refuses_another_host(call):
    done = call("load", "--url", "http://192.0.2.1:8000")
    assert done.returncode == 2 and "--allow-host" in done.stderr


@pytest.mark.network
@pytest.mark.usefixtures("package_index")
def test_a_release_is_probed_and_audited(call):
    probed = call("probe", "zeroer-staging-reuse", "--subject", "before", "--subject", "vllm==0.31.0")
    assert probed.returncode == 1 and "clean" in probed.stdout, probed.stderr
    audited = call("audit", "vllm==0.31.0")
    assert audited.returncode == 1 and "zeroer-staging-reuse" in audited.stdout, audited.stderr


@pytest.mark.notebook
def test_a_notebook_runs_and_leaves_its_page(call, tmp_path):
    done = call("run", "overview", "--quick", "--out", tmp_path / "out")
    assert done.returncode == 0, done.stderr
    assert re.search(r"<h1", (tmp_path / "out" / "overview" / "postmortem.html").read_text())
