"""Threads and sets of files are split where they tell of different incidents, and only there."""

from specmortem.tools.triage import triage, triage_text

from . import logs

THREAD = f"""\
[first-user]
{logs.NO_DRAFTER}
[second-user]
I see the same error on 0.22.1 with 2x RTX 5090:
{logs.MTP}
[third-user]
Any news on this?
"""


def answers(report):
    return [part["answer"] for part in report.parts]


def test_comments_about_another_incident_are_judged_apart():
    report = triage_text(THREAD)
    assert answers(report) == ["none", "mtp-draft-loop"]
    assert report.as_dict()["parts"][0]["answer"] == "mtp-draft-loop"


def test_comments_on_the_same_incident_stay_together():
    text = f"[first-user]\n{logs.MTP}\n[second-user]\nWith n=3 it does not crash here.\n"
    assert answers(triage_text(text)) == ["mtp-draft-loop"]


def test_a_log_and_the_kernel_log_are_one_case(tmp_path):
    (tmp_path / "server.log").write_text(logs.DFLASH)
    (tmp_path / "dmesg").write_text("[Wed Mar  4 10:00:09 2026] NVRM: Xid (PCI:0000:0a:00): 31, VIRT_READ\n")
    report = triage([str(tmp_path / "server.log"), str(tmp_path / "dmesg")])
    assert answers(report) == ["dflash-oob"]
    assert report.parts[0]["facts"]["xid"][0]["file"] == "dmesg"


def test_two_reports_are_two_cases(tmp_path):
    (tmp_path / "a").write_text(f"Engine/version: vLLM 0.22.1\nHardware: 4x H800\n{logs.DFLASH}")
    (tmp_path / "b").write_text(
        "Engine/version: SGLang, 2025\nHardware: 8x H20\nMTP: CUDA error: illegal memory access\n"
    )
    assert answers(triage([str(tmp_path / "a"), str(tmp_path / "b")])) == ["dflash-oob", "none"]
