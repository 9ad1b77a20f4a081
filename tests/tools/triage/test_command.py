"""`specmortem triage` on the command line."""

import json

import pytest
from click.testing import CliRunner

from specmortem.cli import main

from . import logs


def invoke(*arguments, text=None):
    return CliRunner().invoke(main, ["triage", *arguments], input=text)


@pytest.mark.parametrize(
    "text, code",
    [(logs.DFLASH, 0), (logs.NO_DRAFTER, 1), ("nothing to see\n", 3)],
    ids=["incident", "none", "insufficient"],
)
def test_exit_codes(tmp_path, text, code):
    (path := tmp_path / "log").write_text(text)
    result = invoke(str(path))
    assert result.exit_code == code, result.output


def test_a_missing_file_is_one_line_and_two(tmp_path):
    result = invoke(str(tmp_path / "none"))
    assert result.exit_code == 2
    assert result.output.startswith("specmortem: error: cannot read")


@pytest.mark.parametrize(
    "form, start", [("json", "{"), ("markdown", "### Triage"), ("html", "<!doctype html>")]
)
def test_forms(tmp_path, form, start):
    (path := tmp_path / "log").write_text(logs.MTP)
    result = invoke(str(path), "--format", form)
    assert result.output.startswith(start)
    if form == "json":
        assert json.loads(result.output)["answer"] == "mtp-draft-loop"


def test_standard_input():
    assert "dflash-oob" in invoke("-", text=logs.DFLASH).output


@pytest.mark.parametrize(
    ("slug", "answer"),
    [
        ("dflash-oob", "dflash-oob"),
        ("mtp-draft-loop", "mtp-draft-loop"),
        ("pp-align-copy", "pp-align-copy"),
        # Its log tells of no wrong answer, and nothing else is logged.
        ("async-accepted-counts", "insufficient"),
    ],
)
def test_the_logs_of_the_notebooks(slug, answer):
    from specmortem import facts

    log = facts.find_root().parent / "data" / f"{slug}-log.txt"
    assert json.loads(invoke(str(log), "--format", "json").output)["answer"] == answer


def test_a_client_s_view_beside_the_log_that_tells_nothing():
    from specmortem import facts

    data = facts.find_root().parent / "data"
    log, client = (str(data / f"async-accepted-counts-{name}.txt") for name in ("log", "client"))
    alone = json.loads(invoke(log, "--format", "json").output)
    assert any("what users got" in text for text in alone["collect"])
    for files in ((log, client), (client, log)):
        both = json.loads(invoke(*files, "--format", "json").output)
        assert (both["answer"], both["cause"]) == ("async-accepted-counts", "stale-count-none")
        assert both["collect"] == []
