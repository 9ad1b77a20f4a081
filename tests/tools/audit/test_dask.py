"""A real Dask cluster of separate worker processes, one of which is killed in the middle."""

import json
import os
import signal
import subprocess
import sys
import time

import distributed
import pytest
from tools.audit.conftest import CAUSE

from specmortem.errors import BadInputError, UnavailableError
from specmortem.tools.audit import campaign
from specmortem.tools.audit.matrix import audit
from specmortem.tools.audit.work import workers

ENVIRONMENT = {
    "DASK_DISTRIBUTED__SCHEDULER__ALLOWED_FAILURES": "10",
    "DASK_DISTRIBUTED__COMM__TIMEOUTS__CONNECT": "20s",
}


class LocalCluster:
    """A scheduler and workers, each a process of its own, without a nanny that would start them again."""

    def __init__(self, folder, count):
        self.file = folder / "scheduler.json"
        self.folder = folder
        self.processes = [
            self._start("dask_scheduler", "--no-dashboard", "--port", "0", "--host", "127.0.0.1")
        ]
        self._wait(self.file.exists)
        self.address = json.loads(self.file.read_text())["address"]
        self.workers = [
            self._start(
                "dask_worker", "--no-nanny", "--no-dashboard", "--nthreads", "1", "--host", "127.0.0.1"
            )
            for _ in range(count)
        ]

    def _start(self, module, *arguments):
        command = [
            sys.executable,
            "-m",
            f"{distributed.__name__}.cli.{module}",
            "--scheduler-file",
            str(self.file),
            *arguments,
        ]
        log = (self.folder / f"{module}-{time.monotonic_ns()}.log").open("wb")
        with log:
            return subprocess.Popen(
                command, env=os.environ | ENVIRONMENT, stdout=log, stderr=log, cwd=self.folder
            )

    def _wait(self, holds):
        deadline = time.monotonic() + 120
        while not holds():
            assert time.monotonic() < deadline, "the cluster does not start"
            time.sleep(0.05)

    def kill_one(self):
        self.workers[0].send_signal(signal.SIGKILL)
        self.workers[0].wait()

    def close(self):
        for process in (*self.workers, *self.processes):
            process.kill()
            process.wait()


@pytest.fixture
def cluster(tmp_path):
    (tmp_path / "dask").mkdir()
    opened = LocalCluster(tmp_path / "dask", 3)
    yield opened
    opened.close()


@pytest.mark.filterwarnings("ignore::ResourceWarning")
def test_a_killed_worker_loses_no_seed_and_counts_none_twice(cluster):
    seeds, ended = 12, []

    def on_end():
        ended.append(time.monotonic())
        if len(ended) == 3:
            cluster.kill_one()

    here = campaign.run("batch-row-index", seeds)
    with workers("dask", cluster.address) as who:
        there = campaign.run("batch-row-index", seeds, workers=who, on_end=on_end)
    assert cluster.workers[0].returncode == -signal.SIGKILL
    assert len(ended) == seeds
    assert [outcome.seed for outcome in there.outcomes] == list(range(seeds))
    assert there.lost == ()
    assert there == here
    assert there.runs == seeds


@pytest.mark.filterwarnings("ignore::ResourceWarning")
def test_an_audit_on_a_cluster_gives_the_rows_of_one_here(cluster, cache, make_hostile):
    subjects = [make_hostile(f"raise RuntimeError('tree {n}')", f"tree{n}") for n in range(4)]

    def tick(what, done, total):
        if what == "bodies judged" and done == 1:
            cluster.kill_one()

    here = audit(subjects, [CAUSE], keep=False)
    with workers("dask", cluster.address) as who:
        there = audit(subjects, [CAUSE], workers=who, keep=False, tick=tick)
    assert there.rows == here.rows
    assert [f"tree {n}" in row.witness for n, row in enumerate(there.rows)] == [True] * 4
    assert there.judged == here.judged == 4


def test_a_scheduler_that_is_not_there_is_one_error():
    with pytest.raises(BadInputError, match="--scheduler ADDRESS"), workers("dask"):
        pass
    with pytest.raises(BadInputError, match="unknown executor"), workers("slurm"):
        pass


@pytest.mark.filterwarnings("ignore::ResourceWarning")
def test_an_address_where_nobody_listens(monkeypatch):
    import dask

    with (
        dask.config.set({"distributed.comm.timeouts.connect": "1s"}),
        pytest.raises(UnavailableError, match="no Dask scheduler answers"),
        workers("dask", "tcp://127.0.0.1:9"),
    ):
        pass
