"""The criteria on labelled reports, which are not part of this repository.

SPECMORTEM_TRIAGE_REPORTS names a folder with labels.tsv (file, label, also_acceptable) and reports/.
"""

import csv
import os
from pathlib import Path

import pytest

from specmortem.tools.triage import triage

HOME = os.environ.get("SPECMORTEM_TRIAGE_REPORTS", "")
pytestmark = pytest.mark.skipif(not HOME, reason="SPECMORTEM_TRIAGE_REPORTS is not set")


@pytest.fixture(scope="module")
def judged():
    with (Path(HOME) / "labels.tsv").open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file, delimiter="\t"))
    return [(row, triage([str(Path(HOME) / "reports" / row["file"])]).parts[0]) for row in rows]


def acceptable(row):
    return {row["label"], *(word.strip() for word in row["also_acceptable"].split(";"))}


def test_most_answers_are_right(judged):
    right = sum(data["answer"] in acceptable(row) for row, data in judged)
    assert right >= 0.85 * len(judged)


def test_few_incidents_are_seen_where_there_is_none(judged):
    wrong = [
        row["file"]
        for row, data in judged
        if row["label"] == "none" and data["answer"] not in ("none", "insufficient")
    ]
    assert len(wrong) <= 2


def test_no_wrong_answer_is_given_with_high_confidence(judged):
    assert [
        row["file"]
        for row, data in judged
        if data["confidence"] == "high" and data["answer"] not in acceptable(row)
    ] == []
