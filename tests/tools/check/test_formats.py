"""A check for programs: what JSON, SARIF, workflow commands and the page hold, and what they escape."""

import json
import re

import pytest
from click.testing import CliRunner

from specmortem.cli import main
from specmortem.incident import all_incidents
from specmortem.report.selfcontained import check_self_contained
from tests.tools.check.test_launches import HYBRID, LAUNCHES, MTP3

AFFECTED = f"# vLLM 0.28.0, H100\n{HYBRID} {MTP3}"
CLEAR = f"# vLLM 0.33.0, H100\n{HYBRID} {MTP3}"
UNKNOWN = "vllm serve /models/mine --port 1"
ANSWERS = {"affected", "not-affected", "unknown"}


def check(form, *launches, path=None):
    words = [word for launch in launches for word in ("--launch", launch)]
    return CliRunner().invoke(main, ["check", "--format", form, *words, *([str(path)] if path else [])])


@pytest.mark.parametrize("form", ["text", "json", "github", "sarif", "html"])
@pytest.mark.parametrize(("launch", "code"), [(CLEAR, 0), (AFFECTED, 1), (UNKNOWN, 3)])
def test_exit_codes_are_the_same_in_every_form(form, launch, code):
    assert check(form, launch).exit_code == code


def test_the_worst_launch_decides_the_exit_code():
    assert [check("text", *some).exit_code for some in ((CLEAR, UNKNOWN), (UNKNOWN, AFFECTED), ("",))] == [
        3,
        1,
        2,
    ]


@pytest.mark.parametrize("launch", [CLEAR, AFFECTED, UNKNOWN])
def test_json_has_the_shape_that_was_promised(launch):
    data = json.loads(check("json", launch).stdout)
    for name, each in data["understood"].items():
        assert isinstance(name, str) and set(each) == {"value", "source"}
        assert each["value"] not in (None, "") and isinstance(each["source"], str)
    assert [each["incident"] for each in data["answers"]] == list(all_incidents())
    for each in data["answers"]:
        assert each["answer"] in ANSWERS
        assert all(cause in all_incidents()[each["incident"]].exposure for cause in each["causes"])
        assert all(isinstance(command, str) and "\n" not in command for command in each["commands"])
        assert bool(each["causes"]) == (each["answer"] != "not-affected")
    target = data["safe_target"]
    assert target is None or isinstance(target["release"], str)
    assert target is None or all(isinstance(flag, str) for flag in target["flags"])
    assert data["exit_code"] == {"not-affected": 0, "affected": 1, "unknown": 3}[data["answer"]]


def test_json_says_where_each_value_is_from():
    understood = json.loads(check("json", AFFECTED).stdout)["understood"]
    assert understood["drafts"] == {"value": 3, "source": "--speculative-config: num_speculative_tokens"}
    assert understood["async_scheduling"] == {"value": True, "source": "default of 0.28.0"}
    assert understood["version"]["value"] == "0.28.0"


def test_the_safe_target_is_safe():
    """What JSON names is checked again as a launch of its own."""
    target = json.loads(check("json", AFFECTED).stdout)["safe_target"]
    again = check("json", f"# vLLM {target['release']}, H100\n{HYBRID} {MTP3} {' '.join(target['flags'])}")
    assert (again.exit_code, json.loads(again.stdout)["answer"]) == (0, "not-affected")


def test_unknown_says_what_to_add():
    data = json.loads(check("json", UNKNOWN).stdout)
    assert data["missing"] and all(isinstance(each, str) and each for each in data["missing"])


def test_sarif_has_what_2_1_0_needs(tmp_path):
    path = tmp_path / "serve 100%#1.log"
    path.write_text(AFFECTED)
    log = json.loads(check("sarif", path=path).stdout)
    assert log["version"] == "2.1.0" and log["$schema"].startswith("https://")
    (run,) = log["runs"]
    driver = run["tool"]["driver"]
    rules = [rule["id"] for rule in driver["rules"]]
    assert driver["name"] == "specmortem" and len(set(rules)) == len(rules)
    assert all(rule["shortDescription"]["text"] for rule in driver["rules"])
    assert run["results"]
    for result in run["results"]:
        assert result["ruleId"] in rules and result["level"] in ("none", "note", "warning", "error")
        assert result["message"]["text"]
        (place,) = result["locations"]
        uri = place["physicalLocation"]["artifactLocation"]["uri"]
        assert re.fullmatch(r"(?:[\w./~!$&'()*+,;=:@-]|%[0-9A-F]{2})+", uri), uri
        assert uri.endswith("serve%20100%25%231.log")
    assert {result["level"] for result in run["results"]} == {"error"}


def test_sarif_of_a_clear_launch_has_no_result():
    assert json.loads(check("sarif", CLEAR).stdout)["runs"][0]["results"] == []


COMMAND = re.compile(r"::(?:error|warning|notice)(?: [^:\r\n]*)?::[^\r\n]+")


def test_workflow_commands_escape_what_they_hold(tmp_path):
    """GitHub reads `%0A` in the text, and `%3A` and `%2C` in properties, as what they stand for; a bare one splits."""
    path = tmp_path / "a,b:c%d.log"
    path.write_text(AFFECTED)
    lines = check("github", path=path).stdout.splitlines()
    assert all(COMMAND.fullmatch(line) for line in lines)
    assert any(line.startswith("::error file=") and "a%2Cb%3Ac%25d.log" in line for line in lines)
    assert lines[-1].startswith("::notice::") and "affected" in lines[-1]
    for line in lines:
        assert not re.search(r"%(?!25|0A|0D|3A|2C)", line)


def test_a_launch_cannot_add_a_workflow_command(tmp_path):
    path = tmp_path / "x.log"
    path.write_text(f"{HYBRID}%0A::error::owned --port 1\nmodel=a\r::set-output name=x::y\nvLLM 0.28.0\n")
    result = check("github", path=path)
    assert all(COMMAND.fullmatch(line) for line in result.stdout.splitlines())
    assert "\n::error::owned" not in result.stdout and "::set-output" not in result.stdout


HOSTILE = [
    "vllm serve a/<script>alert(1)</script> --port 1",
    "vllm serve a/<img/src=http://x/y.png> --port 1",
    'vllm serve a/\'"><b> -sc.method "><iframe/src=//x>',
    "vllm serve {{7*7}}/{%raw%} --port 1",
    "vllm serve a/&lt;b&gt; --attention-backend javascript:alert(1)",
]


@pytest.mark.parametrize("text", [AFFECTED, *HOSTILE])
def test_the_page_stands_alone_whatever_the_names(tmp_path, text):
    path = tmp_path / "<img src=x onerror=alert(1)>.log"
    path.write_text(text)
    page = check("html", path=path).stdout
    assert page.lstrip().startswith("<!doctype html>") and "</html>" in page
    assert check_self_contained(page) == []
    assert not re.search(r"<(?:script|iframe|img|b)\b", page)
    assert "&lt;img src=x onerror=alert(1)&gt;.log" in page


def test_a_page_with_a_script_would_be_found_out():
    assert check_self_contained("<html><script>1</script><img src='http://x/y'></html>")


@pytest.mark.parametrize(("release", "launch", "gpu", "expected", "reason"), LAUNCHES[::9])
def test_every_form_agrees_on_the_answer(release, launch, gpu, expected, reason):
    text = f"# vLLM {release}, {gpu or 'no card'}\n{launch}"
    answer = json.loads(check("json", text).stdout)["answer"]
    assert json.loads(check("sarif", text).stdout)["runs"][0]["properties"]["answer"] == answer
    levels = {line.partition(" ")[0].strip(":") for line in check("github", text).stdout.splitlines()[:-1]}
    assert ("error" in levels, bool(levels)) == (answer == "affected", answer != "not-affected")
