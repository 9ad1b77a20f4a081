"""`specmortem new`: what it writes runs and passes its tests unedited, everywhere that an incident is reached."""

import json
import subprocess
import sys

import pytest
from click.testing import CliRunner

from specmortem.cli import main

SOURCE = """\
import triton
import triton.language as tl


@triton.jit
def copy_kernel(source, target):
    tl.store(target, tl.load(source))


def num_blocks(tokens):
    return tokens
"""


@pytest.fixture(scope="module")
def tree(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tree")
    (folder / "vllm").mkdir()
    (folder / "vllm" / "x.py").write_text(SOURCE)
    return folder


def invoke(*arguments):
    return CliRunner().invoke(main, list(map(str, arguments)))


def made(tree, out, slug, option, name):
    result = invoke("new", slug, option, f"vllm/x.py:{name}", "--subject", f"tree:{tree}", "--out", out)
    assert result.exit_code == 0, result.output
    return out / slug.replace("-", "_")


@pytest.fixture(scope="module")
def incident(tree, tmp_path_factory):
    out = tmp_path_factory.mktemp("incidents")
    return "my-kernel", made(tree, out, "my-kernel", "--kernel", "copy_kernel")


@pytest.fixture(scope="module")
def of_function(tree, tmp_path_factory):
    return made(tree, tmp_path_factory.mktemp("incidents"), "my-tally", "--function", "num_blocks")


def call(*arguments):
    """The command in a process of its own: the registry of this one stays as it is."""
    command = [sys.executable, "-c", "from specmortem.cli import main; main()", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True)


@pytest.mark.parametrize("kind", ["kernel", "function"])
def test_its_own_tests_pass_unedited(kind, incident, of_function):
    folder = incident[1] if kind == "kernel" else of_function
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=folder)
    assert done.returncode == 0 and "5 passed" in done.stdout, done.stdout


@pytest.mark.notebook
def test_its_notebook_runs_and_finds_the_planted_fault(incident, tmp_path):
    slug, folder = incident
    done = call("--incidents", folder.parent, "run", slug, "--device", "sim", "--out", tmp_path)
    assert done.returncode == 0, done.stderr
    rows = json.loads((tmp_path / slug / "results.json").read_text())["rows"]
    outcomes = {(row["arm"], row["subject"]): row["outcome"] for row in rows}
    assert outcomes["before", "before"] == "fault" and outcomes["after", "after"] == "clean"
    assert outcomes["control", "before"] == "clean"


def test_it_shows_up_where_the_four_do(incident, tree, tmp_path):
    slug, folder = incident
    log = tmp_path / "log.txt"
    log.write_text("CUDA error: an illegal memory access was encountered\n")
    for arguments in (
        ("incidents",),
        ("probe", f"{slug}-example"),
        ("audit", f"tree:{tree}", "--incident", slug),
        ("triage", log, "--format", "json"),
    ):
        done = call("--incidents", folder.parent, *arguments)
        assert slug in done.stdout, (arguments, done.stdout, done.stderr)


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("dflash-oob", "--kernel", "vllm/x.py:copy_kernel"), "there is an incident 'dflash-oob' already"),
        (("My_Bug", "--kernel", "vllm/x.py:copy_kernel"), "'My_Bug' is no slug"),
        (
            ("json", "--kernel", "vllm/x.py:copy_kernel"),
            "the name of a Python package that is installed, json",
        ),
        (("class", "--kernel", "vllm/x.py:copy_kernel"), "'class' has a meaning already"),
        (("overview", "--kernel", "vllm/x.py:copy_kernel"), "'overview' has a meaning already"),
        (("my-bug", "--kernel", "copy_kernel"), "'copy_kernel' is not FILE:NAME"),
        (("my-bug", "--kernel", "vllm/x.py:no_kernel"), "has no vllm/x.py:no_kernel"),
        (("my-bug", "--kernel", "vllm/y.py:copy_kernel"), "vllm/y.py"),
        (("my-bug",), "give either --kernel FILE:NAME or --function FILE:NAME"),
    ],
    ids=["taken", "slug", "package", "keyword", "overview", "place", "name", "file", "neither"],
)
def test_bad_input_is_one_error_and_writes_nothing(arguments, told, tree, tmp_path):
    result = invoke("new", *arguments, "--subject", f"tree:{tree}", "--out", tmp_path)
    assert result.exit_code == 2 and told in result.stderr, result.output
    assert len(result.stderr.splitlines()) == 1 and not any(tmp_path.iterdir())


def test_a_folder_that_exists_is_left_alone(tree, tmp_path):
    (tmp_path / "my_bug").mkdir()
    result = invoke(
        "new", "my-bug", "--kernel", "vllm/x.py:copy_kernel", "--subject", f"tree:{tree}", "--out", tmp_path
    )
    assert result.exit_code == 2 and "my_bug exists" in result.stderr
    assert not any((tmp_path / "my_bug").iterdir())
