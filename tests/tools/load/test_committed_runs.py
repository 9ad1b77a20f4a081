"""The committed runs against a real server of vLLM 0.24.0: what their README says of them."""

from hashlib import sha256
from pathlib import Path

import pytest

from specmortem.report.selfcontained import check_self_contained
from specmortem.tools.engine.tasks import as_prompts, tasks
from specmortem.tools.load import render
from specmortem.tools.load.outcome import Outcome
from specmortem.tools.load.result import Result, Status

ROOT = Path(__file__).parents[3]
DEPTH = 3  # drafts a step of those runs
FOLDER = ROOT / "investigations" / "async-accepted-counts" / "runs" / "serve"
RUNS = ("rounds", "ramp", "killed")
TASKS = tasks(48, 7, (48, 160), 40)


def committed(name):
    return Result.load(FOLDER / name / "load.json")


@pytest.mark.parametrize("name", RUNS)
def test_the_command_of_the_readme_makes_the_prompts_that_were_sent(name):
    given = committed(name).settings["prompts"]
    assert given["sha256"] == sha256(as_prompts(TASKS).encode()).hexdigest()


@pytest.mark.parametrize("name", RUNS)
def test_the_page_is_of_its_file(name):
    result, html = committed(name), (FOLDER / name / "load.html").read_text()
    assert check_self_contained(html) == []
    assert render.headline(result) in html and result.started in html


def test_the_two_whole_runs_are_clean():
    assert {name: (committed(name).clean, committed(name).counts) for name in RUNS[:2]} == {
        "rounds": (True, {Outcome.OK: 241}),
        "ramp": (True, {Outcome.OK: 145}),
    }


def test_every_request_of_the_killed_server_is_counted_once():
    result = committed("killed")
    assert result.status is Status.SERVER_DEAD and not result.clean
    assert result.counts == {Outcome.OK: 1 + 3 * 48 + 32, Outcome.SERVER_ERROR: 16}
    assert [finding.kind for finding in result.findings] == ["server-error", "server-dead"]
    failed = result.findings[0].requests
    assert failed == tuple(f"4-{number:03d}" for number in range(32, 48))


def test_the_server_accepted_what_the_model_accepts_by_itself():
    """Over whole rounds of one task each, and over one task 145 times, drafts and accepted drafts are the same."""
    pytest.importorskip("safetensors")
    from specmortem.tools.engine.tiny_model import load, speculate

    model = load(ROOT / "data" / "tiny-recall")
    alone = [speculate(model, task.prompt, len(task.answer), DEPTH) for task in TASKS]
    assert [tuple(one.tokens) for one in alone] == [task.answer for task in TASKS]
    for name, said in {"rounds": 5 * alone + alone[:1], "ramp": 145 * alone[:1]}.items():
        told = (sum(DEPTH * len(one.counts) for one in said), sum(sum(one.counts) for one in said))
        overall = committed(name).acceptance.overall
        assert (overall.draft_tokens, overall.accepted_tokens) == told
