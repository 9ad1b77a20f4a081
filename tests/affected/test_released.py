"""Verdicts on record: which table counts, and what is refused."""

from pathlib import Path

import pytest
from affected import home

from specmortem.affected.released import AUDIT, ON_GPU, KnownVerdict, released
from specmortem.errors import BadInputError, UnavailableError
from specmortem.facts import find_root

BOOK = [
    ("0.23.0", "first", "fault"),
    ("0.24.0", "first", "clean"),
    ("0.23.0", "second", "not-judged"),
    ("0.24.0", "second", "not-present"),
]


def refused(root: Path) -> str:
    with pytest.raises(BadInputError) as error:
        released(root)
    assert "\n" not in str(error.value)
    return str(error.value)


def rewritten(root: Path, old: str, new: str, name: Path = AUDIT) -> Path:
    path = root.parent / name
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))
    return root


def test_a_verdict_is_that_of_the_table_with_its_date(tmp_path):
    book = released(home.small(tmp_path, *BOOK))
    assert book.of("first", "0.23.0") == KnownVerdict("fault", f"{AUDIT} of {home.DAY}")
    assert book.of("second", "0.24.0").status == "not-present"
    assert (book.releases, book.date) == (["0.23.0", "0.24.0"], home.DAY)


def test_what_is_not_on_record_is_not_judged(tmp_path):
    book = released(home.small(tmp_path, *BOOK))
    for cause, release in (("first", "0.25.1"), ("third", "0.23.0"), ("first", ""), ("first", "0.23")):
        assert book.of(cause, release) == KnownVerdict("not-judged", "no probe ran on it")


def test_releases_are_in_the_order_of_versions(tmp_path):
    rows = [(release, "first", "clean") for release in ("0.24.0", "0.100.0", "0.9.2")]
    assert released(home.small(tmp_path, *rows)).releases == ["0.9.2", "0.24.0", "0.100.0"]


@pytest.mark.parametrize("status", ["fault", "clean", "not-present", "not-judged"])
def test_a_gpu_fills_what_the_cpu_could_not_judge(tmp_path, status):
    book = released(home.small(tmp_path, *BOOK, gpu=(("0.23.0", "second", status),)))
    assert book.of("second", "0.23.0") == KnownVerdict(status, f"{ON_GPU} of {home.DAY}")


def test_a_gpu_fills_what_the_cpu_has_no_row_of(tmp_path):
    book = released(home.small(tmp_path, *BOOK, gpu=(("0.25.1", "third", "fault"),)))
    assert (book.of("third", "0.25.1").status, book.releases[-1]) == ("fault", "0.25.1")


@pytest.mark.parametrize(
    ("cause", "status"), [("first", "fault"), ("first", "not-judged"), ("second", "clean")]
)
def test_a_gpu_replaces_no_verdict_of_the_cpu(tmp_path, cause, status):
    release = {"first": "0.23.0", "second": "0.24.0"}[cause]
    book = released(home.small(tmp_path, *BOOK, gpu=((release, cause, status),)))
    assert book.of(cause, release).source.startswith(f"{AUDIT} ")


@pytest.mark.parametrize(
    ("release", "cause", "status", "cpu"),
    [
        ("0.24.0", "first", "fault", "clean"),
        ("0.23.0", "first", "clean", "fault"),
        ("0.24.0", "second", "fault", "not-present"),
    ],
)
def test_a_gpu_that_contradicts_the_cpu_is_refused(tmp_path, release, cause, status, cpu):
    told = refused(home.small(tmp_path, *BOOK, gpu=((release, cause, status),)))
    assert told == (
        f"{ON_GPU} of {home.DAY} says {status} of {cause} on vllm=={release}, {AUDIT} of {home.DAY} says {cpu}; "
        f"judge it again: specmortem audit vllm=={release} --cause {cause}"
    )


@pytest.mark.parametrize(
    ("old", "new", "told"),
    [
        (",fault", ",broken", "'broken' is no status; known: fault, clean, not-present, not-judged"),
        (",fault", "", "None is no status"),
        ("0.24.0,first", "newest,first", "newest"),
        (f"{home.DAY},0.24.0,first", "yesterday,0.24.0,first", "'yesterday'"),
        ("date,version,cause,status", "date,version,name,status", "it has no cause"),
        ("date,version,cause,status", "date;version;cause;status", "it has no cause, date, status, version"),
        ("0.24.0,first", "0.23.0,first", "first on 0.23.0 stands twice, and not alike"),
    ],
)
@pytest.mark.parametrize("name", [AUDIT, ON_GPU], ids=str)
def test_a_damaged_table_is_refused_with_the_way_out(tmp_path, old, new, told, name):
    root = rewritten(home.small(tmp_path, *BOOK, gpu=tuple(BOOK)), old, new, name)
    message = refused(root)
    assert told in message
    assert message.startswith(f"{tmp_path / name} is no table of an audit: ")
    assert message.endswith("; write it with audit --csv")


@pytest.mark.parametrize("data", [b"", b"date,version,cause,status\n", b"\xff\xfe\x00", b"\x00\x00\n\x00"])
def test_a_table_without_rows_or_of_bytes_is_refused(tmp_path, data):
    root = home.small(tmp_path, *BOOK)
    (tmp_path / AUDIT).write_bytes(data)
    assert "is no table of an audit: " in refused(root)


@pytest.mark.parametrize("name", [AUDIT, ON_GPU], ids=str)
def test_a_table_that_is_not_there_is_named(tmp_path, name):
    root = home.small(tmp_path, *BOOK)
    (tmp_path / name).unlink()
    with pytest.raises(UnavailableError, match=f"cannot read .*{name}: No such file"):
        released(root)


@pytest.mark.parametrize(
    ("release", "cause", "outcome", "known"),
    [
        ("0.23.0", "first", "clean", "fault"),
        ("0.24.0", "first", "fault", "clean"),
        ("0.24.0", "second", "fault", "not-present"),
    ],
)
def test_a_run_that_contradicts_the_audit_is_refused(tmp_path, release, cause, outcome, known):
    root = home.small(tmp_path, *BOOK)
    home.run(root, ("0.23.0", "first", "fault"), (release, cause, outcome))
    assert refused(root) == (
        f"investigations/toy/runs/sim/results.json says {outcome} of {cause} on vllm=={release}, "
        f"{AUDIT} of {home.DAY} says {known}; "
        f"judge it again: specmortem audit vllm=={release} --cause {cause}"
    )


def test_a_run_that_agrees_or_judged_nothing_stands(tmp_path):
    root = home.small(tmp_path, *BOOK)
    home.run(root, *BOOK[:2], ("0.24.0", "first", "not-judged"), ("0.23.0", "second", "fault"))
    assert released(root).of("second", "0.23.0").status == "not-judged"


def test_a_run_that_is_damaged_is_named(tmp_path):
    root = home.small(tmp_path, *BOOK)
    home.run(root, *BOOK[:2]).write_text("{")
    assert "runs/sim/results.json" in refused(root)


def test_the_tables_of_the_repository_are_read():
    book = released(find_root())
    assert len(book.releases) == 17
    assert book.of("recovered-token-out-of-vocab", "0.23.0").source.startswith(str(ON_GPU))
    assert len(book.incidents) == 4
