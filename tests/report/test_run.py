"""Running notebooks through the command line: outputs, exit codes, and what is left behind."""

import asyncio
import contextlib
import errno
import gc
import os
import resource
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import nbformat
import papermill.engines
import papermill.execute
import pytest
from click.testing import CliRunner
from jupyter_client.manager import AsyncKernelManager
from jupyter_core.utils import ensure_event_loop
from papermill.clientwrap import PapermillNotebookClient
from papermill.engines import NotebookExecutionManager
from report import toy_repository as toy

from specmortem.cli import main
from specmortem.report import workers
from specmortem.report.html import check_self_contained
from specmortem.report.kernel import _Interruption, execute
from specmortem.verdict import Results

pytestmark = pytest.mark.notebook
COMMAND = [sys.executable, "-c", "from specmortem.cli import main; main(prog_name='specmortem')"]


def run(home, *arguments):
    result = CliRunner().invoke(main, ["run", "--out", str(home / "out"), *arguments])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result


@pytest.fixture
def repository(tmp_path, monkeypatch):
    monkeypatch.setenv("SPECMORTEM_HOME", str(tmp_path))

    def write(*code, slug="toy"):
        toy.repository(tmp_path, *code, slug=slug)
        return tmp_path

    return write


def left(home, slug="toy"):
    return sorted(path.name for path in (home / "out" / slug).iterdir())


def page(home, slug="toy"):
    return (home / "out" / slug / "postmortem.html").read_text()


def alive(pid):
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


def test_a_good_notebook_leaves_three_files_and_an_index(repository):
    home = repository(toy.write_cell())
    result = run(home, "toy")
    assert result.exit_code == 0, result.output
    assert left(home) == ["executed.ipynb", "postmortem.html", "results.json"]
    assert sorted(p.name for p in (home / "out").iterdir()) == ["index.html", "toy"]
    index = (home / "out" / "index.html").read_text()
    assert '<a href="toy/postmortem.html">Toy &lt;incident&gt;</a>' in index
    assert "common launches reach no incident as they are" in index
    assert "3\N{NO-BREAK SPACE}fault" not in index  # rows counted up read as severity
    assert check_self_contained(index) == [] and check_self_contained(page(home)) == []


def test_parameters_and_options_reach_the_notebook(repository):
    home = repository(toy.write_cell(), "print('got', device, quick, seed, scale, sizes)")
    options = ("--device", "sim", "--quick", "-p", "seed=9", "-p", "scale=2", "-p", "sizes=[3]")
    assert run(home, "toy", *options).exit_code == 0
    assert "got sim True 9 2.0 [3]" in page(home)
    assert Results.load(home / "out" / "toy" / "results.json").rows[0].seed == 9


def test_the_notebook_runs_in_this_interpreter_beside_the_notebooks_folder(repository):
    home = repository(toy.write_cell(), "import os, sys; print(sys.executable, os.listdir('.'))")
    assert run(home, "toy").exit_code == 0
    assert sys.executable in page(home)
    assert "notebooks" in page(home)


def test_no_path_of_the_machine_stays_in_the_outputs(repository):
    home = repository(toy.write_cell(), "print(results_path)")
    run(home, "toy")
    for name in left(home):
        assert str(home) not in (home / "out" / "toy" / name).read_text()


def test_a_failed_assertion_exits_with_1_and_shows_it(repository):
    home = repository(toy.write_cell(), "assert 1 == 2, 'one is <two>'")
    assert run(home, "toy").exit_code == 1
    assert left(home) == ["executed.ipynb", "postmortem.html", "results.json"]
    assert "This run failed." in page(home)
    assert "AssertionError: one is &lt;two&gt; (cell 5)" in page(home)


@pytest.mark.parametrize(
    ("outcomes", "said"),
    [
        ({"before": "clean"}, "before is clean, expected a fault"),
        ({"after": "fault"}, "after, arm after, faults"),
    ],
)
def test_results_that_contradict_the_postmortem_exit_with_1(repository, outcomes, said):
    home = repository(toy.write_cell(**outcomes))
    assert run(home, "toy").exit_code == 1
    assert said in page(home)


def test_an_exception_exits_with_2_and_leaves_no_results(repository):
    home = repository(toy.write_cell(), "1/0")
    assert run(home, "toy").exit_code == 2
    assert left(home) == ["executed.ipynb", "postmortem.html"]
    assert "ZeroDivisionError: division by zero (cell 5)" in page(home)
    cells = nbformat.read(home / "out" / "toy" / "executed.ipynb", as_version=4).cells
    assert any(output.output_type == "error" for cell in cells for output in cell.get("outputs", []))


def test_a_killed_kernel_exits_with_2_and_leaves_no_results(repository):
    home = repository(toy.write_cell(), "import os; os._exit(9)")
    assert run(home, "toy").exit_code == 2
    assert left(home) == ["executed.ipynb", "postmortem.html"]
    assert "the kernel died" in page(home)


def test_the_time_limit_counts_for_the_whole_notebook_and_kills_the_kernel_with_its_children(repository):
    home = repository(
        "import os, subprocess, time, pathlib\n"
        "child = subprocess.Popen(['sleep', '60'])\n"
        "pathlib.Path('pids').write_text(f'{os.getpid()} {child.pid}'); time.sleep(2)",
        "time.sleep(60)",
    )
    start = time.monotonic()
    assert run(home, "toy", "--timeout", "5").exit_code == 2
    assert time.monotonic() - start < 20
    assert "not finished after the time limit of 5 s" in page(home)
    assert not any(map(alive, (home / "pids").read_text().split()))


def test_a_notebook_without_results_could_not_run(repository):
    home = repository("print(1)")
    assert run(home, "toy").exit_code == 2
    assert "the notebook of toy wrote no results.json to its results_path" in page(home)


def test_results_of_another_incident_are_refused(repository):
    home = repository(toy.write_cell("other"))
    assert run(home, "toy").exit_code == 2
    assert left(home) == ["executed.ipynb", "postmortem.html"]


def test_one_failure_does_not_stop_the_others(repository):
    repository("1/0", slug="a")
    home = repository(toy.write_cell())
    assert run(home, "a", "toy").exit_code == 2
    assert "results.json" in left(home)


def test_notebooks_run_side_by_side_and_one_that_dies_does_not_take_the_other(repository):
    meet = (
        "import os, pathlib, signal, time\n"
        "pathlib.Path(f'met-{mine}').touch()\n"
        "while not pathlib.Path(f'met-{other}').exists(): time.sleep(0.05)"
    )
    parent = "os.kill(os.getppid(), signal.SIGKILL)\ntime.sleep(60)"
    repository("mine, other = 'a', 'toy'", meet, parent, slug="a")
    cores = "print('cores', os.environ['SPECMORTEM_PARALLEL'])"
    home = repository("mine, other = 'toy', 'a'", meet, toy.write_cell(), cores)
    result = run(home, "a", "toy", "--device", "sim", "--jobs", "2", "--timeout", "200")
    assert result.exit_code == 2, result.output
    assert "a: could-not-run" in result.stderr and "died by SIGKILL" in result.stderr
    assert "toy: running 01-toy.ipynb" in result.stderr and "toy: passed in" in result.stderr
    assert f"cores {max(1, (os.cpu_count() or 1) // 2)}" in page(home)
    assert sorted(path.name for path in (home / "out").iterdir()) == ["index.html", "toy"]


def test_ctrl_c_ends_notebooks_side_by_side_and_leaves_those_that_are_done(repository):
    press = "import os, pathlib, signal\npathlib.Path('pid').write_text(str(os.getpid()))"
    wait = "import time\nwhile not pathlib.Path('out/toy/results.json').exists(): time.sleep(0.05)"
    top = "caller = int(pathlib.Path(f'/proc/{os.getppid()}/stat').read_text().rpartition(')')[2].split()[1])"
    repository(press, wait, f"{top}\nos.kill(caller, signal.SIGINT)\ntime.sleep(60)", slug="a")
    home = repository(toy.write_cell())
    python, option, code = COMMAND
    done = subprocess.run(
        [python, option, f"{CATCH}\n{code}", "run", "a", "toy", "--jobs", "2", "--out", home / "out"],
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        timeout=240,
    )
    assert done.returncode == 130
    assert done.stderr.splitlines()[-1] == "specmortem: interrupted"
    assert sorted(path.name for path in (home / "out").iterdir()) == ["index.html", "toy"]
    assert not alive((home / "pid").read_text())


def test_sections_are_told_as_the_run_comes_to_them(repository):
    home = repository(toy.write_cell())
    path = home / "notebooks" / "01-toy.ipynb"
    notebook = nbformat.read(path, as_version=4)
    notebook.cells.append(nbformat.v4.new_markdown_cell("## What broke\n\nNothing."))
    nbformat.write(notebook, path)
    assert "toy: What broke\ntoy: passed" in run(home, "toy").stderr


@pytest.mark.parametrize(
    ("notebooks", "asked", "device", "free", "expected"),
    [
        (4, None, "sim", 64 << 30, (3, "")),
        (4, None, "sim", 3 << 30, (2, "3.0 GiB of memory are available")),
        (4, None, "sim", 1 << 20, (1, "0.0 GiB of memory are available")),
        (4, None, "sim", None, (3, "")),
        (4, 4, "sim", 1 << 20, (4, "")),
        (4, None, "cuda", 64 << 30, (1, "they share a GPU")),
        (1, None, "auto", 1 << 20, (1, "")),
    ],
)
def test_cores_memory_and_the_gpu_bound_how_many_run_at_a_time(
    monkeypatch, notebooks, asked, device, free, expected
):
    monkeypatch.setattr(os, "cpu_count", lambda: 3)
    monkeypatch.setattr(workers, "available_bytes", lambda: free)
    assert workers.count(notebooks, asked, device) == expected


def test_all_runs_every_incident_and_then_the_overview(repository):
    home = repository(toy.write_cell())
    overview = toy.notebook("print(sorted(os.listdir(os.path.join(results_dir, 'toy'))))", title="# Overview")
    overview.cells[1].source = "import os\ndevice = 'auto'\nresults_dir = '.'"
    nbformat.write(overview, home / "notebooks" / "00-overview.ipynb")
    result = run(home, "--all", "-p", "seed=1")
    assert result.exit_code == 0, result.output
    assert left(home, "overview") == ["executed.ipynb", "postmortem.html"]
    assert "results.json" in page(home, "overview")


def test_a_missing_notebook_is_named_and_replaces_what_an_earlier_run_left(repository):
    home = repository(toy.write_cell())
    run(home, "toy")
    (home / "notebooks" / "01-toy.ipynb").unlink()
    assert run(home, "toy").exit_code == 2
    assert left(home) == ["executed.ipynb", "postmortem.html"]
    assert "the notebook 01-toy.ipynb is missing" in page(home)


def test_an_output_that_fetches_something_leaves_a_page_that_says_so(repository):
    home = repository(
        toy.write_cell(), "from IPython.display import HTML\nHTML('<img src=\"http://host/a.png\">')"
    )
    assert run(home, "toy").exit_code == 2
    assert "would not stand alone" in page(home)
    assert check_self_contained(page(home)) == []


def test_an_unknown_slug_lists_the_known_ones(repository):
    result = run(repository(toy.write_cell()), "tooy")
    assert result.exit_code == 2
    assert result.stderr == "specmortem: error: no incident 'tooy'; known: toy\n"


@pytest.mark.parametrize(
    ("pair", "said"),
    [
        ("sede=3", "toy has no parameter 'sede'; known: seed, scale, sizes"),
        ("seed=three", "parameter seed=three is not of the type int of its default 0"),
        ("seed=true", "parameter seed=true is not of the type int"),
        ("sizes=3", "parameter sizes=3 is not of the type list"),
        ("quick=true", "parameter quick is set by --device, --quick or --out"),
        ("seed", "-p seed: expected NAME=VALUE"),
    ],
)
def test_a_parameter_that_does_not_fit_is_refused_before_anything_runs(repository, pair, said):
    home = repository(toy.write_cell())
    result = run(home, "toy", "-p", pair)
    assert result.exit_code == 2
    assert said in result.stderr
    assert not (home / "out").exists()


def test_neither_slugs_nor_all_is_refused(repository):
    result = run(repository(toy.write_cell()))
    assert result.exit_code == 2
    assert "give slugs or --all, not neither; known: toy" in result.stderr


def test_a_folder_with_files_of_someone_else_is_not_replaced(repository):
    home = repository(toy.write_cell())
    (home / "out" / "toy").mkdir(parents=True)
    (home / "out" / "toy" / "incident.toml").write_text("mine")
    result = run(home, "toy")
    assert result.exit_code == 2
    assert "holds incident.toml, which no run wrote" in result.stderr
    assert left(home) == ["incident.toml"]


def test_an_output_folder_that_cannot_be_made_is_one_error(repository):
    home = repository(toy.write_cell())
    (home / "out").write_text("a file")
    result = run(home, "toy")
    assert result.exit_code == 2
    assert result.stderr.startswith("specmortem: error: cannot write to ")
    assert "give another folder with --out" in result.stderr


@pytest.mark.skipif(
    not Path("/sys/kernel").is_dir(), reason="needs /sys, which refuses new folders to anyone"
)
def test_an_output_folder_without_write_permission_is_one_error(repository):
    result = run(repository(toy.write_cell()), "toy", "--out", "/sys/kernel/specmortem")
    assert result.exit_code == 2 and result.stderr.startswith(
        "specmortem: error: cannot write to /sys/kernel"
    )
    assert "ermission denied" in result.stderr or "not permitted" in result.stderr


def test_a_disk_that_is_full_leaves_the_earlier_run_and_no_half_of_this_one(repository, monkeypatch):
    home = repository(toy.write_cell())
    run(home, "toy")
    before = {name: (home / "out" / "toy" / name).read_bytes() for name in left(home)}

    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(papermill.engines, "write_ipynb", full)
    result = run(home, "toy")
    assert result.exit_code == 2
    assert "No space left on device; nothing was written there" in " ".join(result.stdout.split())
    assert {name: (home / "out" / "toy" / name).read_bytes() for name in left(home)} == before
    assert sorted(p.name for p in (home / "out").iterdir()) == ["index.html", "toy"]


def test_a_file_size_limit_is_one_error_without_a_traceback(repository):
    home = repository(toy.write_cell(), "print('x' * 2_000_000)")
    limit = lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (1_000_000, 1_000_000))  # noqa: E731
    done = subprocess.run(
        [*COMMAND, "run", "toy", "--out", home / "out"], preexec_fn=limit, capture_output=True, text=True
    )
    assert done.returncode == 2
    assert "File too large" in done.stderr
    assert "Traceback" not in done.stderr
    assert [p.name for p in (home / "out").iterdir()] == ["index.html"]


PRESS = """import os, pathlib, signal
pathlib.Path('pid').write_text(str(os.getpid()))
os.kill(os.getppid(), signal.SIGINT)"""
SLEEP = "import time; time.sleep(60)"
CATCH = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)"


def test_ctrl_c_exits_with_130_one_line_and_nothing_left(repository):
    """However the tests were started: a shell lets a job in the background ignore SIGINT."""
    home = repository(f"{PRESS}\n{SLEEP}")
    python, option, code = COMMAND
    done = subprocess.run(
        [python, option, f"{CATCH}\n{code}", "run", "toy", "--out", home / "out"],
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        timeout=240,
    )
    assert done.returncode == 130
    assert done.stderr.splitlines() == [
        "toy: running 01-toy.ipynb",
        "toy: What goes wrong",
        "specmortem: interrupted",
    ]
    assert list((home / "out").iterdir()) == []
    assert not alive((home / "pid").read_text())


@pytest.fixture
def ctrl_c():
    """SIGINT as at a terminal, however the tests were started; gives the function that presses Ctrl-C."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield lambda: signal.raise_signal(signal.SIGINT)
    signal.signal(signal.SIGINT, before)


def kernels():
    """Live kernels of this process."""
    mine = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            if parent == os.getpid() and b"ipykernel_launcher" in (folder / "cmdline").read_bytes():
                mine.append(folder.name)
    return [pid for pid in mine if alive(pid)]


def run_kernel(home):
    execute(home / "notebooks" / "01-toy.ipynb", home / "executed.ipynb", {}, home)


@pytest.mark.parametrize(
    ("place", "name"),
    [
        (papermill.execute, "load_notebook_node"),
        (PapermillNotebookClient, "start_new_kernel"),
        (PapermillNotebookClient, "start_new_kernel_client"),
        (NotebookExecutionManager, "cell_start"),
        (NotebookExecutionManager, "cell_complete"),
        (PapermillNotebookClient, "set_widgets_metadata"),
    ],
)
def test_ctrl_c_counts_where_a_library_drops_the_exception(repository, monkeypatch, ctrl_c, place, name):
    home, original = repository("1 + 1"), getattr(place, name)
    pressed = []

    def press(*args, **kwargs):
        if not pressed:
            pressed.append(name)
            with contextlib.suppress(KeyboardInterrupt):
                ctrl_c()
        return original(*args, **kwargs)

    monkeypatch.setattr(place, name, press)
    with pytest.raises(KeyboardInterrupt):
        run_kernel(home)
    assert pressed and kernels() == []
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_ctrl_c_in_a_cell_leaves_no_kernel_and_no_task(repository, ctrl_c, caplog):
    home = repository(f"{PRESS}\n{SLEEP}")
    with pytest.raises(KeyboardInterrupt):
        run_kernel(home)
    assert not alive((home / "pid").read_text()) and kernels() == []
    assert asyncio.all_tasks(ensure_event_loop()) == set()
    gc.collect()
    assert [record.getMessage() for record in caplog.records if record.name == "asyncio"] == []


def test_a_sigint_that_is_ignored_stays_ignored(repository, ctrl_c):
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    home = repository(PRESS, "pathlib.Path('end').touch()")
    run_kernel(home)
    assert (home / "end").exists()
    assert signal.getsignal(signal.SIGINT) == signal.SIG_IGN


def test_a_second_ctrl_c_raises_at_once(ctrl_c):
    with pytest.raises(KeyboardInterrupt), _Interruption(AsyncKernelManager()):
        ctrl_c()
        with pytest.raises(KeyboardInterrupt):
            ctrl_c()


def test_outside_the_main_thread_no_handler_is_set(ctrl_c):
    with ThreadPoolExecutor(1) as pool:
        pool.submit(_Interruption(AsyncKernelManager()).__enter__).result()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_render_writes_the_same_page_again(repository):
    home = repository(toy.write_cell())
    run(home, "toy")
    before = page(home)
    result = CliRunner().invoke(main, ["render", str(home / "out" / "toy" / "executed.ipynb")])
    assert result.exit_code == 0
    assert page(home) == before


def test_incidents_lists_slug_grade_and_what_broke(repository):
    repository(toy.write_cell())
    output = " ".join(CliRunner().invoke(main, ["incidents"]).output.split())
    assert "toy reproduced none on record Toy <incident>" in output
