"""Incidents of others, in folders and of other distributions: found by every command, refused in one line."""

import os
import shutil
import subprocess
import sys

import pytest

from specmortem import facts
from specmortem.report import batch
from specmortem.tools.new.command import create

SLUG, PACKAGE = "my-count", "my_count"


@pytest.fixture(scope="module")
def tree(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tree")
    (folder / "vllm").mkdir()
    (folder / "vllm" / "x.py").write_text("def num_blocks(tokens):\n    return tokens\n")
    return folder


@pytest.fixture(scope="module")
def template(tree, tmp_path_factory):
    out = tmp_path_factory.mktemp("made")
    return create(SLUG, "function", "vllm/x.py:num_blocks", f"tree:{tree}", out)


@pytest.fixture
def make(template, tmp_path):
    """Writes an incident into a directory, under another slug where one is given; returns its folder."""

    def written(directory, slug=SLUG, package=""):
        folder = tmp_path / directory / (package or slug.replace("-", "_"))
        shutil.copytree(template, folder)
        for path in (
            folder / "__init__.py",
            folder / "incident.toml",
            folder / "probe.py",
            folder / "rules.toml",
        ):
            text = path.read_text().replace(SLUG, slug).replace(f"from {PACKAGE}", f"from {folder.name}")
            path.write_text(text)
        return folder

    return written


def call(*arguments, **environment):
    """The command in a process of its own: the registry of this one stays as it is."""
    command = [sys.executable, "-c", "from specmortem.cli import main; main()", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, env=os.environ | environment)


def refused(done, *told):
    """One line of error that says all of `told`."""
    assert done.returncode == 2 and not done.stdout, (done.stdout, done.stderr)
    assert len(done.stderr.splitlines()) == 1, done.stderr
    assert all(str(each) in done.stderr for each in told), done.stderr


@pytest.fixture
def commands(tree, tmp_path):
    """The arguments of each command that reaches incidents, by its name."""
    log = tmp_path / "log.txt"
    log.write_text("CUDA error: an illegal memory access was encountered\n")
    return {
        "incidents": ("incidents",),
        "probe": ("probe", f"{SLUG}-example"),
        "audit": ("audit", f"tree:{tree}", "--incident", SLUG),
        "triage": ("triage", log, "--format", "json"),
        "run": ("run", SLUG, "--device", "sim", "--out", tmp_path / "out"),
    }


SHORT = ["incidents", "probe", "audit", "triage"]
ALL = [*SHORT, "run"]


@pytest.mark.parametrize("name", SHORT)
def test_a_directory_of_the_environment_is_one_too(name, make, commands):
    directory = make("one").parent
    done = call(*commands[name], SPECMORTEM_INCIDENTS=str(directory))
    assert SLUG in done.stdout, done.stderr


def test_directories_of_option_and_environment_add_up(make):
    one, two, three = (make(slug, slug).parent for slug in ("a-one", "a-two", "a-three"))
    done = call("--incidents", one, "--incidents", two, "incidents", SPECMORTEM_INCIDENTS=str(three))
    assert all(slug in done.stdout for slug in ("a-one", "a-two", "a-three", "dflash-oob")), done.stderr


def test_a_directory_that_is_none_is_named(tmp_path):
    refused(
        call("--incidents", tmp_path / "nowhere", "incidents"), tmp_path / "nowhere", "is not a directory"
    )


@pytest.mark.parametrize("name", ALL)
def test_two_folders_of_one_slug_are_refused_by_every_command(name, make, commands):
    one, two = make("one"), make("two")
    refused(call("--incidents", one.parent, "--incidents", two.parent, *commands[name]), one, two)


@pytest.mark.parametrize("name", ALL)
def test_a_folder_does_not_take_the_slug_of_one_of_ours(name, make, commands):
    folder = make("one", "dflash-oob")
    refused(
        call("--incidents", folder.parent, *commands[name]), "two incidents are called 'dflash-oob'", folder
    )


def test_two_slugs_that_only_the_packages_state_are_refused(make, commands):
    one, two = make("one"), make("two", "my-other")
    text = (two / "__init__.py").read_text().replace('slug="my-other"', f'slug="{SLUG}"')
    (two / "__init__.py").write_text(text)
    done = call("--incidents", one.parent, "--incidents", two.parent, *commands["probe"])
    refused(done, f"two incidents are called '{SLUG}'", one, two)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("import no_such_module\n", "No module named 'no_such_module'"),
        ("def (\n", "SyntaxError"),
        ("raise RuntimeError('boom')\n", "RuntimeError: boom"),
        ("X = 1\n", "it is None"),
        ("INCIDENT = 1\n", "it is 1"),
    ],
    ids=["import", "syntax", "raises", "none", "type"],
)
def test_a_folder_that_cannot_be_imported_is_named(text, told, make, commands):
    folder = make("one")
    (folder / "__init__.py").write_text(text)
    refused(call("--incidents", folder.parent, *commands["probe"]), f"{folder} exports no INCIDENT", told)


@pytest.mark.parametrize("name", ["audit", "triage"])
def test_a_broken_folder_is_named_by_the_tools(name, make, commands):
    folder = make("one")
    (folder / "__init__.py").write_text("def (\n")
    refused(call("--incidents", folder.parent, *commands[name]), f"{folder} exports no INCIDENT")


def test_a_folder_with_the_name_of_another_package_is_named(make, commands):
    folder = make("one", "json")
    done = call("--incidents", folder.parent, *commands["probe"])
    refused(done, folder, "a package json is there already", "rename the folder")


def test_faulty_facts_are_named(make, commands):
    folder = make("one")
    (folder / "incident.toml").write_text("schema = 1\n")
    refused(call("--incidents", folder.parent, *commands["incidents"]), folder / "incident.toml")


@pytest.fixture
def announced(make):
    """The directory of a distribution that announces an incident by an entry point."""
    directory = make("site").parent
    info = directory / "my_count-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: my-count\nVersion: 1\n")
    (info / "entry_points.txt").write_text(f"[specmortem.incidents]\nmine = {PACKAGE}:INCIDENT\n")
    return directory


def path_with(directory):
    return os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH", ""), str(directory)]))


@pytest.mark.parametrize("name", SHORT)
def test_every_command_finds_what_another_distribution_announces(name, announced, commands):
    done = call(*commands[name], PYTHONPATH=path_with(announced))
    assert SLUG in done.stdout, done.stderr


@pytest.mark.notebook
def test_the_notebook_of_another_distribution_runs(announced, commands, tmp_path):
    done = call(*commands["run"], PYTHONPATH=path_with(announced))
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "out" / SLUG / "results.json").exists()


def test_one_incident_that_is_announced_and_named_is_one(announced, commands):
    done = call("--incidents", announced, *commands["probe"], PYTHONPATH=path_with(announced))
    assert done.returncode == 1 and "fault" in done.stdout, done.stderr


@pytest.mark.parametrize("name", ["incidents", "probe"])
def test_an_announced_package_that_is_gone_is_named(name, announced, commands):
    shutil.rmtree(announced / PACKAGE)
    done = call(*commands[name], PYTHONPATH=path_with(announced))
    refused(done, PACKAGE)


def test_the_index_lists_runs_of_incidents_that_are_not_named_any_more(make, monkeypatch, tmp_path):
    import nbformat

    notebook = nbformat.v4.new_notebook()
    notebook.metadata["specmortem"] = {"slug": SLUG, "status": "passed", "date": "2026-01-01", "reason": ""}
    folder = tmp_path / "out" / SLUG
    folder.mkdir(parents=True)
    (folder / "executed.ipynb").write_text(nbformat.writes(notebook))
    directory = make("one").parent
    without = batch.write_index(tmp_path / "out", facts.find_root()).read_text()
    monkeypatch.setenv("SPECMORTEM_INCIDENTS", str(directory))
    with_it = batch.write_index(tmp_path / "out", facts.find_root()).read_text()
    assert f"{SLUG}/postmortem.html" in without and "a planted example" not in without
    assert f"{SLUG}/postmortem.html" in with_it and "a planted example" in with_it
