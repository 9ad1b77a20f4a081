"""`specmortem load` on the command line, exit codes, Ctrl-C, and what is never shown."""

import hashlib
import json
import os
import shlex
import signal
import subprocess
import sys
import time

import pytest
from click.testing import CliRunner

from specmortem.cli import main
from specmortem.report.selfcontained import check_self_contained
from specmortem.tools.load import command
from specmortem.tools.load.command import SHAPE_NAMES, load
from specmortem.tools.load.outcome import Outcome
from specmortem.tools.load.prompts import Prompt, PromptFile
from specmortem.tools.load.result import Result, Status
from specmortem.tools.load.settings import SHAPES

from .servers import running, settings

SMALL = ["--concurrency", "4", "--rounds", "1", "--prompt-tokens", "64", "--max-tokens", "100"]
COMMAND = [sys.executable, "-c", "from specmortem.cli import main; main()"]
KEY = 'sk-hush"hush/key'


def invoke(url, out, *arguments, env=None):
    words = ["load", "--url", url, "--out", str(out), *SMALL, *arguments]
    return CliRunner().invoke(main, words, env=env)


@pytest.mark.parametrize(
    "default, expect, code", [("ok", True, 0), ("loop", True, 1), ("loop", False, 0), ("400", True, 2)]
)
def test_exit_codes(tmp_path, default, expect, code):
    with running(default=default) as server:
        done = invoke(server.url, tmp_path, *["--expect", "clean"] * expect)
    assert done.exit_code == code, done.output
    Result.load(tmp_path / "load.json")
    assert check_self_contained((tmp_path / "load.html").read_text()) == []


def test_an_unfinished_run_is_not_clean(tmp_path):
    with running(requests={"1": "hang"}) as server:
        done = invoke(server.url, tmp_path, "--expect", "clean", "--max-time", "2")
    assert done.exit_code == 1
    assert Result.load(tmp_path / "load.json").status is Status.TIME_LIMIT


@pytest.mark.parametrize(
    "arguments, said",
    [
        (["--concurrency", "four"], "--concurrency four: expected"),
        (["--concurrency", "0"], "--concurrency must be between"),
        (["--prompt-tokens", "9-5"], "--prompt-tokens 9-5"),
        (["--prompt-tokens", "1000000"], "--prompt-tokens: at most"),
        (["--check", "--warm-up", "0"], "--check needs a warm-up"),
        (["--min-tokens", "101"], "--min-tokens is more"),
        (["--api-key-env", "NO_SUCH_KEY"], "NO_SUCH_KEY: that environment variable is not set"),
    ],
)
def test_bad_input_is_one_line_and_two(tmp_path, arguments, said):
    done = invoke("http://127.0.0.1:9", tmp_path, *arguments)
    assert done.exit_code == 2
    assert said in done.output and done.output.count("\n") == 1
    assert not list(tmp_path.iterdir())


def test_a_folder_that_cannot_be_written_is_told_before_anything_is_sent(tmp_path):
    (tmp_path / "file").write_text("")
    with running() as server:
        done = invoke(server.url, tmp_path / "file/deeper")
        seen = server.seen()
    assert done.exit_code == 2
    assert "cannot write to --out" in done.output and done.output.count("\n") == 1
    assert seen["posts"] == [] and seen["health"] == 0


def test_the_command_lets_the_same_hosts_through():
    hosts = ("far.example", "other.example")
    shape = vars(SHAPES["short-ramp"])
    made = settings("http://far.example:8000", shape=shape, model="m", allow_host=hosts)
    words = shlex.split(made.command())[2:]
    again = command._settings(load.make_context("load", words).params)
    assert again == made


def test_no_server_is_one_line_and_two(tmp_path):
    done = invoke("http://127.0.0.1:9", tmp_path)
    assert done.exit_code == 2
    assert "nothing answers at http://127.0.0.1:9" in done.output


def test_json_on_standard_output_is_the_file(tmp_path):
    with running() as server:
        done = invoke(server.url, tmp_path, "--format", "json")
    assert json.loads(done.stdout) == json.loads((tmp_path / "load.json").read_text())


def test_the_command_in_the_result_makes_the_same_run(tmp_path):
    with running() as server:
        invoke(server.url, tmp_path / "a", "--stream", "--check", "--seed", "7")
        first = json.loads((tmp_path / "a/load.json").read_text())
        words = first["command"].split()[1:]
        assert CliRunner().invoke(main, [*words, "--out", str(tmp_path / "b")]).exit_code == 0
        bodies = server.seen()["bodies"]
    second = json.loads((tmp_path / "b/load.json").read_text())
    assert second["settings"] == {**first["settings"], "model": "toy"}

    def prompts(some):
        return sorted(body["messages"][0]["content"] for body in some)

    assert prompts(bodies[:5]) == prompts(bodies[5:])


def test_the_key_is_sent_and_never_kept(tmp_path):
    with running(requests={"2": "echo_key"}) as server:
        done = invoke(server.url, tmp_path, "--api-key-env", "TOY_KEY", env={"TOY_KEY": KEY})
        assert server.seen()["headers"][0]["authorization"] == f"Bearer {KEY}"
    kept = done.output + "".join(path.read_text() for path in tmp_path.iterdir())
    assert "Bearer [API key]" in kept
    assert "hush" not in kept


@pytest.mark.parametrize(
    "behaviour, outcome",
    [
        ("line_with_key", Outcome.GARBAGE),
        ("loop_with_key", Outcome.LOOP),
        ("long_loop_of_key", Outcome.LOOP),
        ("half_a_key", Outcome.CUT),
    ],
)
def test_no_part_of_the_key_is_kept_where_text_is_cut(tmp_path, behaviour, outcome):
    with running(requests={"2": behaviour}) as server:
        done = invoke(server.url, tmp_path, "--stream", "--api-key-env", "TOY_KEY", env={"TOY_KEY": KEY})
    assert Result.load(tmp_path / "load.json").counts == {Outcome.OK: 4, outcome: 1}
    kept = done.output + "".join(path.read_text() for path in tmp_path.iterdir())
    assert "[API key]" in kept
    assert "hush" not in kept and "sk-h" not in kept


def test_a_model_named_after_the_key_is_asked_for_and_never_kept(tmp_path):
    with running(model="model {key}") as server:
        done = invoke(server.url, tmp_path, "--api-key-env", "TOY_KEY", env={"TOY_KEY": KEY})
        assert {body["model"] for body in server.seen()["bodies"]} == {f"model {KEY}"}
    kept = done.output + "".join(path.read_text() for path in tmp_path.iterdir())
    assert Result.load(tmp_path / "load.json").model == "model [API key]"
    assert "--model 'model [API key]'" in kept
    assert "hush" not in kept


def test_the_environment_sends_nothing_elsewhere(tmp_path, monkeypatch):
    with running() as other, running() as server:
        for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
            monkeypatch.setenv(name, other.url)
        for name in ("NO_PROXY", "no_proxy"):
            monkeypatch.delenv(name, raising=False)
        assert invoke(server.url, tmp_path, "--expect", "clean").exit_code == 0
        monkeypatch.undo()
        assert other.seen()["posts"] == other.seen()["other"] == []


def test_escapes_of_the_server_reach_neither_terminal_nor_page(tmp_path):
    cues = {"1": "escapes", "3": "escapes_in_text"}
    with running(requests=cues, model="\x1b[2Jmodel<script>") as server:
        done = invoke(server.url, tmp_path)
    page = (tmp_path / "load.html").read_text()
    for text in (done.output, page, (tmp_path / "load.json").read_text()):
        assert not set(text) & set("\x1b\x07\u202e\x9b")
    assert "\\x1b[31mred" in done.output
    assert "<script" not in page and "<img" not in page
    assert check_self_contained(page) == []


@pytest.mark.parametrize("stream", ["--stream", "--no-stream"])
def test_prompts_of_token_ids(tmp_path, stream):
    rows = [{"prompt": [i, i + 1, i + 2], "expected": [i + 2, i + 1, i] * 20} for i in range(20, 23)]
    (file := tmp_path / "prompts.jsonl").write_text("\n".join(map(json.dumps, rows)))
    arguments = ["--prompts", str(file), "--api", "completions", "--check", "--shape", "two-streams", stream]
    with running(requests={"3": "wrong"}) as server:
        done = invoke(server.url, tmp_path, *arguments, "--requests", "6")
        bodies = server.seen()["bodies"]
    found = Result.load(tmp_path / "load.json")
    assert found.counts == {Outcome.OK: 6, Outcome.WRONG: 1}, done.output
    assert "token 0 of the answer is 9, expected 2" in found.findings[0].said
    assert sorted(b["prompt"] for b in bodies) == sorted(rows[i % 3]["prompt"] for i in range(7))
    assert all(b["return_token_ids"] for b in bodies)
    assert found.settings["prompts"] == {
        "name": "prompts.jsonl",
        "sha256": hashlib.sha256(file.read_bytes()).hexdigest(),
        "count": 3,
    }
    assert "--prompts prompts.jsonl" in found.command
    page = (tmp_path / "load.html").read_text()
    assert "3 prompts of a file" in page
    assert str(tmp_path) not in page + (tmp_path / "load.json").read_text()


@pytest.mark.parametrize(
    "given, told",
    [
        ("prompts.jsonl", "prompts.jsonl"),
        ("../a/p.jsonl", "../a/p.jsonl"),
        ("/home/someone/p.jsonl", "p.jsonl"),
    ],
)
def test_the_command_names_a_file_without_the_folders_of_this_machine(given, told):
    prompts = PromptFile(given, "0" * 64, (Prompt("a"),))
    words = shlex.split(settings("http://127.0.0.1:1", prompts=prompts).command())
    assert words[words.index("--prompts") + 1] == told


@pytest.mark.parametrize(
    "line, said",
    [
        ("", "holds no prompt"),
        ("{", "line 1: expected"),
        ('{"prompt": 3}', "line 1: expected"),
        ('{"prompt": "a"}\n\n{"prompt": [1, -2]}', "line 2: expected"),
        ('{"prompt": ""}', "line 1: expected"),
        ('{"prompt": [1]}', "need --api completions"),
        ('{"prompt": "a"}', "--check needs `expected`"),
    ],
)
def test_prompt_files_that_are_refused(tmp_path, line, said):
    (file := tmp_path / "prompts.jsonl").write_text(line)
    done = invoke("http://127.0.0.1:9", tmp_path / "out", "--prompts", str(file), "--check")
    assert (done.exit_code, said in done.output) == (2, True), done.output


@pytest.mark.parametrize("which", [signal.SIGINT, signal.SIGTERM])
def test_interruption_leaves_a_valid_partial_result(tmp_path, which):
    cues = {"requests": {"3": "hang", "4": "hang"}}
    arguments = ["--concurrency", "2", "--requests", "20", "--expect", "clean", "--out", str(tmp_path)]
    with running(**cues) as server:
        words = [*COMMAND, "load", "--url", server.url, *SMALL, *arguments]
        with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as client:
            wait_for(lambda: len(server.seen()["posts"]) == 5, client)
            client.send_signal(which)
            out, err = client.communicate(timeout=120)
    assert client.returncode == 130, err
    found = Result.load(tmp_path / "load.json")
    assert found.status is Status.INTERRUPTED and found.said == which.name
    assert found.counts == {Outcome.OK: 3, Outcome.INTERRUPTED: 2}
    assert found.findings == ()
    assert "interrupted" in out
    assert "</html>" in (tmp_path / "load.html").read_text()


def wait_for(condition, process):
    while not condition():
        assert process.poll() is None, process.stderr.read()
        time.sleep(0.05)


def test_a_killed_client_leaves_the_rounds_that_ended(tmp_path):
    arguments = ["--concurrency", "2,1", "--rounds", "2", "--pause", "0", "--out", str(tmp_path)]
    with running(requests={"3": "hang"}) as server:
        words = [*COMMAND, "load", "--url", server.url, *SMALL, *arguments]
        with subprocess.Popen(words, stderr=subprocess.PIPE, text=True) as client:
            wait_for(lambda: len(server.seen()["posts"]) == 4, client)
            os.kill(client.pid, signal.SIGKILL)
    found = Result.load(tmp_path / "load.json")
    assert (found.status, found.counts) == (Status.RUNNING, {Outcome.OK: 3})


def test_the_command_offers_the_shapes_and_their_limits():
    assert tuple(SHAPES) == SHAPE_NAMES
    names = {option for param in load.params for option in param.opts}
    assert {"--max-requests", "--max-time", "--max-bytes"} <= names
