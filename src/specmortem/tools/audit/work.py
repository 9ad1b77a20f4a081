"""Who does the work of an audit or a campaign: this machine, or a Dask cluster through its interface of futures."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import as_completed
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from specmortem.errors import BadInputError, SpecmortemError, UnavailableError
from specmortem.judge.subjects import open_subject
from specmortem.judge.work import Judged, Local, OnEnd, Survey, Surveyed, Task, Workers, judge_all, survey
from specmortem.upstream.tree import Tree
from specmortem.verdict import Verdict


def judge_elsewhere(task: Task) -> Judged:
    """One judgement on the machine of a cluster: the subject is found anew there."""
    try:
        tree, place = open_subject(task.place.subject, python=task.python, cache=task.cache)
    except SpecmortemError as error:
        return Judged(Verdict.not_judged(str(error), unavailable=True))
    done = judge_all([replace(task, place=place)], {place.subject: tree})[0]
    return replace(done, bytes_moved=tree.bytes_moved)


class Cluster:
    """A Dask cluster. Work of a worker that dies is given to another one; each piece counts once, by its place.

    Workers find releases on the index, and folders, archives and interpreters at the same path as here: those need a
    file system that is shared.
    """

    def __init__(self, client: Any) -> None:
        """`client` is a `distributed.Client`."""
        self._executor = client.get_executor(pure=False, retries=3)

    def surveys(self, jobs: Sequence[Survey], on_end: OnEnd) -> list[Surveyed]:
        """One task a subject."""
        return self.map(survey, jobs, on_end)

    def judgements(self, tasks: Sequence[Task], trees: Mapping[str, Tree], on_end: OnEnd) -> list[Judged]:
        """One task a judgement; `trees` are those of this machine and are not used."""
        return self.map(judge_elsewhere, tasks, on_end)

    def map(self, function: Callable[[Any], Any], inputs: Sequence[Any], on_end: OnEnd) -> list[Any]:
        """Results in the order of the inputs."""
        places = {self._executor.submit(function, given): place for place, given in enumerate(inputs)}
        results: dict[int, Any] = {}
        for future in as_completed(places):
            results[places[future]] = future.result()
            on_end()
        return [results[place] for place in range(len(inputs))]


@contextmanager
def workers(executor: str = "local", scheduler: str = "") -> Iterator[Workers]:
    """Who does the work: `local`, or `dask` with the address of a scheduler.

    Raises BadInputError for anything else, UnavailableError when the scheduler cannot be reached or Dask is missing.
    """
    if executor == "local":
        yield Local()
        return
    if executor != "dask":
        raise BadInputError(f"unknown executor {executor!r}; give local or dask")
    if not scheduler:
        raise BadInputError("--executor dask needs --scheduler ADDRESS, such as tcp://host:8786")
    try:
        from distributed import Client
    except ImportError as error:
        raise UnavailableError("Dask is not installed; install specmortem[dask]") from error
    try:
        client = Client(scheduler, timeout=20)  # type: ignore[no-untyped-call]
    except (OSError, TimeoutError, ValueError) as error:
        raise UnavailableError(f"no Dask scheduler answers at {scheduler}: {error}") from error
    with client:
        yield Cluster(client)
