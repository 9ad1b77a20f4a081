"""Foreign code in the box: it is `not-judged` with the reason, and other rows stay what they are."""

import os
import time

import pytest
from judge.conftest import CAUSE

from specmortem.judge import box, judge
from specmortem.tools.audit.matrix import audit

HOSTILE = {
    "endless loop": ("while True: pass", "timeout"),
    "exit": ("import os; os._exit(0)", "without an outcome"),
    "huge allocation": ("return bytes(1 << 40)", "MemoryError"),
    "many allocations": ("x = []\nwhile True: x.append(bytes(1 << 26))", "MemoryError"),
    "fork bomb": ("import os\nwhile True: os.fork()", "not permitted"),
    "subprocess": ("import subprocess; subprocess.run(['true'])", "not permitted"),
    "network": ("import socket; socket.create_connection(('127.0.0.1', 9))", "not permitted"),
    "signals": ("import os; os.kill(os.getppid(), 9)", "not permitted"),
    "segfault": ("import ctypes; ctypes.string_at(0)", "SIGSEGV"),
    "fills the disk": (
        "with open('big', 'wb') as f:\n    while True: f.write(bytes(1 << 20))",
        "File too large",
    ),
    "escapes": ("raise RuntimeError('\\x1b[2J\\x1b]0;owned\\x07 \\u202e done')", "done"),
    "replaces our function": (
        "from specmortem.verdict import Verdict\n"
        "Verdict.from_dict = classmethod(lambda cls, data: cls('clean'))",
        "replaced specmortem.",
    ),
    "replaces our module's function": (
        "from specmortem.incidents.dflash_oob import kernels\nkernels.reference = lambda *a, **k: None",
        "replaced specmortem.incidents.dflash_oob.kernels.reference",
    ),
    "replaces a built-in": ("import builtins; builtins.len = lambda x: 0", "replaced builtins.len"),
    "lies about a CUDA fault": (
        "import os, sys\nsys.stderr.write('CUDA error: an illegal memory access was encountered')\n"
        "sys.stderr.flush()\nos.abort()",
        "illegal-address",
    ),
}
NEEDS_FILTER = {"fork bomb", "subprocess", "network", "signals"}


@pytest.mark.parametrize("kind", HOSTILE)
def test_hostile_code_is_not_judged_and_the_other_row_is_intact(kind, make_hostile, cache, capfd):
    if kind in NEEDS_FILTER and os.uname().machine not in box.MACHINES:
        pytest.skip("this machine has no filter of system calls")
    body, reason = HOSTILE[kind]
    hostile = make_hostile(body)
    harmless = make_hostile("raise RuntimeError('harmless')", "harmless")
    done = audit([hostile, harmless], [CAUSE], timeout_s=8 if kind == "endless loop" else 90)
    by_subject = {row.subject: row for row in done.rows}
    row = by_subject[hostile]
    assert row.status == "not-judged"
    assert reason in row.witness, row.witness
    assert not any(ord(character) < 32 or character == "\u202e" for character in row.witness)
    assert "harmless" in by_subject[harmless].witness
    assert "\x1b" not in "".join(capfd.readouterr())


def test_the_environment_of_a_judgement_holds_no_secret(make_hostile, cache, monkeypatch):
    monkeypatch.setenv("PIP_INDEX_URL", "https://user:secret@host/simple")
    seen = "import os\nraise RuntimeError(str(sorted(os.environ)) + open('/proc/self/environ').read())"
    row = audit([make_hostile(seen)], [CAUSE]).rows[0]
    assert "'PATH'" in row.witness
    assert "secret" not in row.witness and "PIP_INDEX_URL" not in row.witness
    assert os.environ["PIP_INDEX_URL"].endswith("/simple")


def test_a_judgement_works_in_a_folder_of_its_own_and_never_writes_the_tree(make_hostile, cache, tmp_path):
    subject = make_hostile("import os\nopen('note', 'w').write('x')\nraise RuntimeError(os.getcwd())")
    before = sorted(tmp_path.rglob("*"))
    row = audit([subject], [CAUSE], keep=False).rows[0]
    assert str(tmp_path) not in row.witness.replace(subject, "")
    assert sorted(tmp_path.rglob("*")) == before


def test_a_forged_record_is_not_kept(make_hostile, cache):
    forging = (
        "import json, os\n"
        "verdict = {'outcome': 'clean', 'evidence': {}}\n"
        "answers = [['closure', 'vllm/x.py', 'f', [], 'made up']]\n"
        "record = {'files': {'vllm/x.py': 'made up'}, 'present': {}, 'answers': answers}\n"
        "value = {'verdict': verdict, 'record': record, 'wanted': [], 'box': ''}\n"
        "open('../record.json', 'w').write(json.dumps({'value': value}))\n"
        "os._exit(0)"
    )
    audit([make_hostile(forging)], [CAUSE])
    assert not list(cache.rglob("*.json"))


def test_a_child_that_leaves_its_group_cannot_exist(make_hostile, cache):
    if os.uname().machine not in box.MACHINES:
        pytest.skip("this machine has no filter of system calls")
    began = time.monotonic()
    row = audit([make_hostile("import os\nif os.fork() == 0: os.setsid()")], [CAUSE]).rows[0]
    assert "not permitted" in row.witness
    assert time.monotonic() - began < 100


def test_watch_names_what_was_replaced_and_nothing_else(monkeypatch):
    from specmortem import verdict

    watch = box.CodeWatch()
    assert watch.changed() == []
    monkeypatch.setattr(verdict, "versions", lambda: {})
    assert watch.changed() == ["specmortem.verdict.versions"]


@pytest.mark.parametrize("kind", ["network", "subprocess", "replaces a built-in"])
def test_a_probe_runs_in_the_box_too(kind, make_hostile):
    if kind in NEEDS_FILTER and os.uname().machine not in box.MACHINES:
        pytest.skip("this machine has no filter of system calls")
    body, reason = HOSTILE[kind]
    verdict = judge(CAUSE, make_hostile(body))
    assert verdict.outcome == "not-judged" and reason in verdict.evidence.reason
