"""Everything that carriers put in front of a message comes off, and says who and when."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specmortem.tools.triage.prefixes import records

MESSAGE = "CUDA error: an illegal memory access was encountered"
CARRIERS = {
    "engine": "ERROR 03-04 10:00:00 [core.py:12] ",
    "old engine": "INFO 03-04 10:00:00 llm_engine.py:70] ",
    "tag": "(APIServer pid=1) ERROR 03-04 10:00:00 [core.py:12] ",
    "tag without pid": "(Worker_TP4) ERROR [multiproc_executor.py:863] ",
    "doubled tag": "(EngineCore_DP0 pid=4) (Worker_TP2 pid=5) ERROR 03-04 10:00:00 [core.py:12] ",
    "ray": "\x1b[36m(RayWorkerWrapper pid=21, ip=10.0.0.1)\x1b[0m ",
    "ray without escapes": "[36m(RayWorkerVllm pid=60)[0m ",
    "rank": "[rank1]:[E731 01:20:58.516120000 ProcessGroupNCCL.cpp:2119] ",
    "compose": "vllm-1  | ERROR 03-04 10:00:00 [core.py:12] ",
    "cri": "2026-03-04T05:00:16.157949381+08:00 stdout F [2026-03-04 05:00:16 TP0] ",
    "two zones": "2026-03-04T08:00:02.874664079-07:00 (VllmWorker TP0 pid=5) ERROR 03-04 15:00:02 [core.py:1] ",
    "journal": "Mar 04 07:13:41 node7 vllm[123]: ",
    "kernel": "[Wed Mar  4 15:40:20 2026] ",
    "quote": "> > (Worker_TP0 pid=2) ERROR 03-04 10:00:00 [core.py:12] ",
    "bullet": "  • ",
    "csv": '2026-03-04 10:00:00,ERROR,"',
}


def only(line):
    found = list(records(line))
    assert len(found) == 1
    return found[0]


@pytest.mark.parametrize("carrier", CARRIERS)
def test_a_prefix_comes_off(carrier):
    assert only(CARRIERS[carrier] + MESSAGE).text == MESSAGE


@pytest.mark.parametrize("key", ["log", "message", "msg"])
def test_a_line_of_json_is_unwrapped(key):
    line = json.dumps({key: f"ERROR 03-04 10:00:00 [core.py:12] {MESSAGE}\n", "stream": "stderr"})
    assert only(line).text == MESSAGE


def test_an_answer_in_a_line_of_json_keeps_what_is_not_talk():
    fields = {"status": 200, "completion_tokens": 1, "finish_reason": "stop"}
    for talk in ("It hangs: CUDA error", "MTP\nNaN", ["illegal memory access"]):
        found = only(json.dumps({**fields, "text": talk, "prompt": talk}))
        assert (found.text, found.logged) == (json.dumps(fields), False)
    assert "ductduct" in only(json.dumps({**fields, "content": "It was duct" + "duct" * 20})).text


def test_an_object_of_any_depth_is_a_line():
    for depth in (10, 900, 990, 1000, 5000):
        assert only('{"finish_reason": "stop", "x": ' + "[" * depth + "]" * depth + "}").text


def test_page_markup_and_entities_are_gone_but_launch_geometry_stays():
    assert only("<p>a &lt;b&gt; c</p>").text == "a <b> c"
    assert only("<td>kernel<<<(1,9,4),(128,1,1)>>></td>").text == "kernel<<<(1,9,4),(128,1,1)>>>"


def test_who_and_when_are_kept():
    found = only(CARRIERS["two zones"] + MESSAGE)
    assert (found.process, found.level) == ("VllmWorker TP0 pid=5", "ERROR")
    assert found.time == "2026-03-04T08:00:02.874664079-07:00"


def test_records_pasted_into_one_line_are_taken_apart():
    one = "(EngineCore_DP0 pid=2) ERROR 03-04 07:10:30 [core.py:710] EngineCore encountered a fatal error. "
    found = list(records(one * 3))
    assert len(found) == 3
    assert {record.text for record in found} == {"EngineCore encountered a fatal error."}


def test_prose_is_not_taken_for_a_log():
    assert not only("It crashes under load.").logged
    assert only(CARRIERS["engine"] + MESSAGE).logged


@given(st.text(st.characters(exclude_characters="\n"), max_size=400))
def test_any_line_gives_records_without_control_characters(line):
    for record in records(line):
        assert not any(ord(c) < 32 and c != "\t" or ord(c) in (0x1B, 0x202E) for c in record.text)
