"""The commands `audit` and `campaign`: forms, exit codes, errors of one line."""

import json

import pytest
from click.testing import CliRunner
from tools.audit.conftest import CAUSE

from specmortem.cli import main
from specmortem.report.html import check_self_contained
from specmortem.statements import launch
from specmortem.tools.audit import matrix, subjects
from specmortem.tools.audit.matrix import Audit


def invoke(*arguments, **options):
    return CliRunner().invoke(main, list(arguments), **options)


@pytest.fixture
def rows(monkeypatch, cache):
    """Rows that the audit is made to give, and what it was asked."""
    from tools.audit.test_render import row

    asked = {}

    def audit(chosen, causes, **options):
        asked.update(options, subjects=chosen, causes=causes)
        return Audit(tuple(asked["rows"]), 1, 0, 0, "sim", options["config"])

    monkeypatch.setattr(matrix, "audit", audit)
    asked["row"], asked["rows"] = row, [row()]
    return asked


@pytest.mark.parametrize(
    ("kinds", "code"),
    [
        ([("clean", {}), ("not-present", {})], 0),
        ([("clean", {}), ("not-judged", {})], 3),
        ([("clean", {}), ("not-judged", {"unavailable": True})], 2),
        ([("fault", {}), ("not-judged", {"unavailable": True})], 1),
        ([("fault", {"reach": "no"}), ("clean", {})], 0),
        ([("fault", {"reach": "unknown"})], 3),
        ([("fault", {"reach": "yes"})], 1),
    ],
)
def test_exit_codes(rows, kinds, code):
    rows["rows"] = [rows["row"](status, **fields) for status, fields in kinds]
    assert invoke("audit", "vllm==0.1.0").exit_code == code


def test_options_reach_the_audit(rows):
    invoke("audit", "vllm==0.1.0", "tree:x", "--incident", "pp-align-copy", "--no-cache", "--timeout", "5")
    assert rows["subjects"] == ["vllm==0.1.0", "tree:x"]
    assert (rows["keep"], rows["timeout_s"], rows["device"]) == (False, 5, "sim")
    assert "batch-row-index" in rows["causes"] and CAUSE not in rows["causes"]


def test_all_releases_are_those_of_the_index(rows, monkeypatch):
    monkeypatch.setattr(subjects, "all_releases", lambda: ["vllm==0.19.0", "vllm==0.20.0"])
    invoke("audit", "--all-releases")
    assert rows["subjects"] == ["vllm==0.19.0", "vllm==0.20.0"]


def test_without_a_subject_the_installed_vllm_is_audited_or_the_ways_are_named(rows, monkeypatch):
    monkeypatch.setattr(subjects, "is_installed", lambda: True)
    assert invoke("audit").exit_code == 1 and rows["subjects"] == ["installed"]
    monkeypatch.setattr(subjects, "is_installed", lambda: False)
    result = invoke("audit")
    assert result.exit_code == 2 and "name a subject: vllm==X, tree:DIR" in result.stderr
    invoke("audit", "--python", "/usr/bin/python3")
    assert rows["subjects"] == ["installed"]


def test_a_configuration_comes_from_a_file_or_standard_input(rows, tmp_path):
    invoke("audit", "vllm==0.1.0", "--config", "-", input="vllm serve Qwen/Qwen3.5-9B -pp 3")
    assert rows["config"].pipeline == 3
    (tmp_path / "f").write_text("pp=2")
    invoke("audit", "vllm==0.1.0", "--config", str(tmp_path / "f"))
    assert rows["config"].pipeline == 2
    result = invoke("audit", "vllm==0.1.0", "--config", "-", input="nothing")
    assert result.exit_code == 2 and result.stderr.count("\n") == 1


def test_forms_and_files(rows, tmp_path):
    out = ("--out", str(tmp_path), "--csv", str(tmp_path / "t.csv"))
    result = invoke("audit", "vllm==0.1.0", "--format", "html", *out)
    assert result.stdout == f"{tmp_path}/audit.html\n"
    assert check_self_contained((tmp_path / "audit.html").read_text(encoding="utf-8")) == []
    assert (tmp_path / "t.csv").read_text().startswith("date,subject,")
    assert json.loads(invoke("audit", "vllm==0.1.0", "--format", "json").stdout)["rows"]
    assert invoke("audit", "vllm==0.1.0", "--format", "markdown").stdout.startswith("# Audit of ")


def test_no_subject_that_can_be_had_is_one_error(cache):
    result = invoke("audit", "tree:/nowhere", "--cause", CAUSE)
    assert result.exit_code == 2 and result.stdout == ""
    assert result.stderr.startswith("specmortem: error: tree:/nowhere")


@pytest.mark.parametrize("subject", ["vllm=0.1", "torch==2", "tree:", "wheel:", "vllm==x"])
def test_malformed_subjects_are_named(cache, subject):
    result = invoke("audit", subject, "--cause", CAUSE)
    assert result.exit_code == 2 and subject in result.stderr


def test_an_audit_of_a_tree_end_to_end(cache, make_hostile):
    subject = make_hostile("raise RuntimeError('by design')")
    result = invoke("audit", subject, "--cause", CAUSE, "--format", "json")
    assert result.exit_code == 3
    (row,) = json.loads(result.stdout)["rows"]
    assert (row["status"], row["subject"]) == ("not-judged", subject) and "by design" in row["witness"]


def test_what_a_configuration_reaches_depends_on_the_release_that_is_audited(cache, make_tree):
    config = launch.parse(
        'vllm serve Qwen/Qwen3.5-9B --speculative-config \'{"method": "mtp", "num_speculative_tokens": 4}\''
    )
    versions = ("0.22.1", "0.31.0")
    given = [make_tree({"vllm/_version.py": f"__version__ = '{v}'\n"}, v) for v in versions]
    done = matrix.audit(given, ["gdn-unbounded-accepted"], config=config)
    assert [row.version for row in done.rows] == list(versions)
    assert [row.reach for row in done.rows] == ["yes", "no"]
    assert "default of 0.31.0" in done.rows[1].reach_reason
    assert done.config == config


def test_campaign_counts_seeds_once_and_says_what_was_seen():
    result = invoke("campaign", "batch-row-index", "--seeds", "3", "--format", "json")
    data = json.loads(result.stdout)
    assert (result.exit_code, data["seeds"], data["runs"]) == (1, [0, 1, 2], 3)
    assert data["faults"] >= 1 and data["witness"].startswith("workload ")
    clean = invoke("campaign", "batch-row-index", "--seeds", "2", "--subject", "after", "--first", "5")
    assert clean.exit_code == 0
    assert "0 faults in 2 workloads, 2 seeds" in clean.stdout and "upper bound" in clean.stdout


def test_campaign_refuses_what_it_does_not_have():
    assert "no random campaign" in invoke("campaign", "v2-null-block", "--seeds", "1").stderr
    assert "give 1 to" in invoke("campaign", "batch-row-index", "--seeds", "0").stderr


def test_a_seed_that_gives_no_figure_is_told(monkeypatch):
    from specmortem.incident import Campaign, Incident

    broken = Campaign("specmortem.incidents.pp_align_copy.arms:no_such_function", "workloads", "subject")
    toy = Incident("toy", "toy", (), campaigns={"broken": broken})
    monkeypatch.setattr("specmortem.tools.audit.campaign.all_incidents", lambda: {"toy": toy})
    result = invoke("campaign", "broken", "--seeds", "1")
    assert result.exit_code == 3 and "seed 0 gave no figure" in result.stdout


def test_an_environment_without_vllm_is_one_error_and_not_one_a_cause():
    result = invoke("audit", "installed", "--no-cache")
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr == (
        "specmortem: error: installed: this environment has no vllm; install it, or name a release as vllm==X\n"
    )


@pytest.mark.parametrize(
    ("text", "told"), [("vllm serve a -pp 2\nvllm serve a -pp 3\n", True), ("pp=2", False)]
)
def test_a_text_of_several_launches_says_that_check_judges_all(rows, text, told):
    result = invoke("audit", "vllm==0.1.0", "--config", "-", input=text)
    assert rows["config"].pipeline == 2
    note = "2 launches are stated, the first is judged; specmortem check judges all of them"
    assert (note in result.stdout) is told
