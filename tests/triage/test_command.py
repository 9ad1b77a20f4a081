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


@pytest.mark.parametrize("slug", ["dflash-oob", "pp-align-copy"])
def test_the_logs_of_the_notebooks(slug):
    from specmortem import incident

    log = incident.find_root().parent / "data" / f"{slug}-log.txt"
    assert json.loads(invoke(str(log), "--format", "json").output)["answer"] == slug
