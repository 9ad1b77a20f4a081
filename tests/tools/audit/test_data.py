"""The committed audit agrees with the incident files, and advises nothing that its own rows refute."""

import csv
import re

import pytest
from packaging.version import Version

from specmortem import facts, incident
from specmortem.tools.audit.matrix import facts_of

TABLE = facts.find_root().parent / "data" / "audit.csv"
ROWS = list(csv.DictReader(TABLE.read_text(encoding="utf-8").splitlines()))
DIFFER: list[tuple[str, str]] = []  # (version, cause) that were judged otherwise than the incident file says
SAID = {"fault": "affected", "clean": "not affected"}


def test_every_cause_is_judged_on_every_release():
    versions = {row["version"] for row in ROWS}
    pairs = {(row["version"], row["cause"]) for row in ROWS}
    assert len(versions) == 17
    assert len(pairs) == len(ROWS) == len(versions) * len(incident.causes())


def test_what_is_expected_and_fixed_is_what_the_incident_files_say():
    for row in ROWS:
        facts = facts_of(incident.probe_of(row["cause"]))
        said = facts.expected(row["version"]), facts.fixed
        assert (row["expected"], row["fixed"]) == said, (row["version"], row["cause"])


def test_what_was_judged_otherwise_than_expected_is_listed():
    judged = [row for row in ROWS if row["expected"] and row["status"] in SAID]
    assert judged
    found = [(row["version"], row["cause"]) for row in judged if SAID[row["status"]] != row["expected"]]
    assert found == DIFFER


def refuted(row):
    """Releases that the advice names and that are no newer than the one at fault."""
    advice = row["workarounds"] + (f"; vLLM {row['fixed']} or later" if row["fixed"] else "")
    named = re.findall(r"vLLM (\d[\w.]*) or later", advice)
    return [version for version in named if Version(version) <= Version(row["version"])]


def test_no_fault_is_answered_with_a_release_that_has_it():
    faults = [row for row in ROWS if row["status"] == "fault"]
    assert any("or later" in row["workarounds"] for row in faults)
    assert [(row["version"], row["cause"], refuted(row)) for row in faults if refuted(row)] == []


def test_only_faults_are_advised_on():
    assert all(row["status"] == "fault" for row in ROWS if row["workarounds"])


@pytest.mark.parametrize(
    ("version", "found"), [("0.31.0", ["0.24.0"]), ("0.24.0", ["0.24.0"]), ("0.23.0", [])]
)
def test_advice_that_names_an_old_release_is_seen(version, found):
    row = {"version": version, "fixed": "", "workarounds": "vLLM 0.24.0 or later; --enforce-eager"}
    assert refuted(row) == found
