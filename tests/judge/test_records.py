"""What a verdict rests on, and for which trees it holds."""

from pathlib import Path

import pytest

import specmortem
from specmortem import incident, upstream
from specmortem.judge import records
from specmortem.judge.records import Digests, Known, Question, Record, Recorded, judge_version
from specmortem.judge.subjects import Place
from specmortem.judge.verdicts import Verdicts
from specmortem.verdict import Evidence, Verdict

MAIN = "from vllm.helper import help\n\n\ndef target(a):\n    return help(a) + LIMIT\n\n\nLIMIT = 3\n"
HELPER = "def help(a):\n    return a + 1\n\n\ndef other():\n    return 0\n"
PATH = "vllm/main.py"


def tree_of(make_tree, folder, main=MAIN, helper=HELPER):
    return upstream.resolve(make_tree({PATH: main, "vllm/helper.py": helper}, folder))


@pytest.fixture
def judged(make_tree):
    tree = Recorded(tree_of(make_tree, "judged"))
    tree.first(["vllm/old.py", PATH])
    upstream.lift(tree, PATH, "target")
    upstream.body_hash(tree, PATH, "target")
    return tree.record


def same_code(record, tree):
    other = Recorded(tree)
    other.ask(record)
    return record.same_code(other.record)


def test_a_record_holds_files_presence_and_answers(judged):
    assert set(judged.files) == {PATH, "vllm/helper.py"}
    looked_for = {q.path: answer for q, answer in judged.answers.items() if q.kind == "has"}
    assert looked_for == {"vllm/old.py": "False", PATH: "True"}
    assert {q.kind for q in judged.answers} == {"has", "closure", "body"}


@pytest.mark.parametrize(
    ("change", "files", "code"),
    [
        ({}, True, True),
        ({"main": "# moved\n\n" + MAIN}, False, True),
        ({"main": MAIN.replace("    return help", '    """Says."""\n    return help')}, False, True),
        ({"helper": HELPER.replace("return 0", "return 9")}, False, True),
        ({"helper": HELPER.replace("a + 1", "a + 2")}, False, False),
        ({"main": MAIN.replace("LIMIT = 3", "LIMIT = 4")}, False, False),
        ({"main": MAIN.replace("(a):", "(a: int):")}, False, False),
        ({"main": MAIN.replace("def target", "@staticmethod\ndef target")}, False, False),
        ({"main": MAIN.replace("def target(a)", "def renamed(a)")}, False, False),
        ({"main": MAIN.replace("from vllm.helper import help", "from torch import help")}, False, False),
    ],
)
def test_one_changed_line_decides(judged, make_tree, change, files, code):
    tree = tree_of(make_tree, "other", **change)
    assert judged.same_files(Digests(tree)) is files
    assert same_code(judged, tree) is code


def test_a_file_that_appears_where_a_probe_looked_first_decides(judged, make_tree):
    tree = upstream.resolve(make_tree({PATH: MAIN, "vllm/helper.py": HELPER, "vllm/old.py": ""}, "other"))
    assert not judged.same_files(Digests(tree))
    assert not same_code(judged, tree)


def test_a_file_that_a_probe_read_as_a_whole_must_be_equal(make_tree):
    tree = Recorded(tree_of(make_tree, "judged"))
    tree.fetch([PATH])
    upstream.lift(tree, PATH, "target")
    assert same_code(tree.record, tree_of(make_tree, "same"))
    assert not same_code(tree.record, tree_of(make_tree, "other", main="# moved\n" + MAIN))


def test_what_is_provided_belongs_to_the_question(make_tree):
    tree = Recorded(tree_of(make_tree, "judged"))
    upstream.lift(tree, PATH, "target", provide={"help": abs})
    assert [q.provided for q in tree.record.answers if q.kind == "closure"] == [("help",)]
    assert set(tree.record.files) == {PATH}


def test_a_tree_is_asked_until_it_answers_otherwise(judged, make_tree):
    other = Recorded(tree_of(make_tree, "other", main=MAIN.replace("+ LIMIT", "- LIMIT")))
    other.ask(judged)
    assert [q.kind for q in other.record.answers if q.is_look_up] == ["body"]
    assert set(other.record.files) == {PATH}
    assert judged.same_code(other.record) is False
    assert judged.same_code(Record()) is None


def test_stand_ins_are_asked_by_their_rule_and_read_no_other_file(judged, make_tree):
    tree = Recorded(tree_of(make_tree, "judged"))
    given = upstream.StandIns()
    lifted = upstream.lift(tree, PATH, "target", provide=given)
    assert lifted.namespace["help"] is given["help"] and "help" not in given
    assert set(tree.record.files) == {PATH} and all(q.is_look_up for q in tree.record.answers)
    changed = tree_of(make_tree, "other", helper=HELPER.replace("a + 1", "a + 2"))
    assert same_code(tree.record, changed)
    assert not same_code(
        tree.record, tree_of(make_tree, "third", main=MAIN.replace("import help", "import other as help"))
    )


def test_stand_ins_lift_the_modules_and_names_that_they_are_told(make_tree):
    for options in ({"modules": ["vllm.helper"]}, {"names": ["help"]}, {"packages": ["flashinfer"]}):
        tree = Recorded(tree_of(make_tree, "judged"))
        lifted = upstream.lift(tree, PATH, "target", provide=upstream.StandIns(**options))
        assert lifted.function(4) == 8


def test_a_missing_definition_is_an_answer(make_tree):
    tree = Recorded(tree_of(make_tree, "judged"))
    with pytest.raises(upstream.NotPresentError):
        upstream.lift(tree, PATH, "gone")
    assert list(tree.record.answers.values()) == ["absent"]
    assert same_code(tree.record, tree_of(make_tree, "same"))
    assert not same_code(tree.record, tree_of(make_tree, "other", main=MAIN + "def gone(): pass\n"))


def test_records_survive_json(judged):
    assert Record.from_dict(judged.as_dict()) == judged


def known(record, subject="tree:x", outcome="clean"):
    return Known("v2-null-block", subject, Verdict(outcome, Evidence(observed="seen")), record)


def test_verdicts_of_a_folder_serve_that_folder_alone(cache, judged):
    mine, other = (Place(f"tree:{n}", "", f"/{n}", "folder") for n in "ab")
    release = Place("vllm==0.1.0", "0.1.0", "/c", "stored")
    Verdicts("sim").add(known(judged), mine)
    assert Verdicts("sim").of("v2-null-block", mine) == [known(judged)]
    assert Verdicts("sim").of("v2-null-block", other) == []
    assert Verdicts("sim").of("v2-null-block", release) == []
    Verdicts("sim").add(known(judged, "vllm==0.1.0"), release)
    assert len(Verdicts("sim").of("v2-null-block", other)) == 1
    assert Verdicts("cuda").of("v2-null-block", other) == []


def test_a_damaged_entry_counts_as_none(cache, judged):
    place = Place("vllm==0.1.0", "0.1.0", "/c", "stored")
    Verdicts("sim").add(known(judged), place)
    (entry,) = cache.rglob("*.json")
    entry.write_text(entry.read_text()[:50])
    assert Verdicts("sim").of("v2-null-block", place) == []


def test_without_a_cache_nothing_is_written(cache, judged):
    verdicts = Verdicts("sim", keep=False)
    place = Place("vllm==0.1.0", "0.1.0", "/c", "stored")
    verdicts.add(known(judged), place)
    assert verdicts.of("v2-null-block", place) and not list(cache.rglob("*.json"))


def made_of(slug):
    """Files of the package that the judgements of an incident are made of."""
    root = Path(specmortem.__file__).parent
    return {
        str(path.relative_to(root)) for path in records._imported_by(f"{incident.get(slug).package}.probe")
    }


def test_the_version_of_a_judgement_follows_the_code_it_is_made_of(monkeypatch):
    judging = {"judge/cell.py", "judge/box.py", "upstream/closure.py", "detect/bounds.py"}
    dflash, mtp = made_of("dflash-oob"), made_of("mtp-draft-loop")
    assert {"incidents/dflash_oob/probe.py", *judging} <= dflash
    assert not any(
        name.startswith(("incidents/pp_align_copy", "incidents/mtp_draft_loop")) for name in dflash
    )
    staged = {"probe.py", "host_lengths.py", "released.py"}
    assert {f"incidents/mtp_draft_loop/{name}" for name in staged} <= mtp
    assert {"device/interface.py", "device/sim.py"} <= mtp and "device/interface.py" not in dflash


def test_the_version_of_a_judgement_follows_device_incident_and_each_file(monkeypatch):
    dflash, pp = incident.get("dflash-oob"), incident.get("pp-align-copy")
    first = judge_version(dflash, "sim")
    assert first != judge_version(pp, "sim") and first != judge_version(dflash, "cuda")
    assert first == judge_version(dflash, "sim")
    real = records._digest
    monkeypatch.setattr(records, "_digest", lambda p: "x" if p.name == "bounds.py" else real(p))
    assert judge_version(dflash, "sim") != first


def test_questions_are_told_apart_by_what_is_provided():
    assert Question("closure", PATH, "f") != Question("closure", PATH, "f", ("g",))
