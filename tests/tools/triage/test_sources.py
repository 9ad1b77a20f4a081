"""Any encoding, any archive, and nothing that is read is trusted."""

import gzip
import io
import sys
from types import SimpleNamespace

import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from specmortem.errors import BadInputError, UnavailableError
from specmortem.statements import sources
from specmortem.tools.triage import triage, triage_text
from specmortem.tools.triage.render import as_html, as_markdown, as_text

from . import logs


@pytest.mark.parametrize(
    "packed",
    [
        logs.DFLASH.encode(),
        gzip.compress(logs.DFLASH.encode()),
        zstandard.ZstdCompressor().compress(logs.DFLASH.encode()),
        b"\xef\xbb\xbf" + logs.DFLASH.encode(),
        logs.DFLASH.encode("utf-16"),
        logs.DFLASH.encode("utf-16-le"),
        logs.DFLASH.replace("\n", "\r\n").encode("latin-1"),
    ],
    ids=["plain", "gzip", "zstd", "bom", "utf-16", "utf-16 without a mark", "crlf"],
)
def test_the_same_log_in_any_form(tmp_path, packed):
    (path := tmp_path / "log").write_bytes(packed)
    assert triage([str(path)]).answer == "dflash-oob"


def test_standard_input(monkeypatch):
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(logs.DFLASH.encode())))
    report = triage(["-"])
    assert report.answer == "dflash-oob"
    assert report.parts[0]["where"] == "stdin:1"


def test_missing_file_and_folder(tmp_path):
    with pytest.raises(UnavailableError, match="cannot read"):
        triage([str(tmp_path / "none")])
    with pytest.raises(BadInputError, match="is a folder"):
        triage([str(tmp_path)])


@pytest.mark.parametrize("pack", [gzip.compress, zstandard.ZstdCompressor().compress], ids=["gzip", "zstd"])
def test_a_damaged_archive_is_named(tmp_path, pack):
    data = bytearray(pack(logs.DFLASH.encode() * 50))
    data[len(data) // 2] ^= 0xFF
    data[-12:] = b"\xff" * 12
    (path := tmp_path / "log").write_bytes(bytes(data))
    with pytest.raises(BadInputError, match="damaged"):
        list(sources.chunks(str(path)))


def test_an_archive_without_end_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(sources, "LARGEST", 1 << 20)
    (path := tmp_path / "log.gz").write_bytes(gzip.compress(b"a" * (3 << 20)))
    with pytest.raises(BadInputError, match="cut out the part"):
        list(sources.chunks(str(path)))


def test_chunks_end_with_lines_and_lose_nothing(tmp_path):
    data = b"".join(b"line %d\n" % n for n in range(300_000)) + b"no end"
    (path := tmp_path / "log").write_bytes(data)
    found = list(sources.chunks(str(path)))
    assert b"".join(found) == data
    assert all(chunk.endswith(b"\n") for chunk in found[:-1])


WORDS = st.sampled_from(
    [
        *logs.DFLASH.split(), *logs.MTP.split(), *logs.PIPELINE.split(), *logs.COUNTS.split(), *logs.RESUME.split(),
        "\n", "\r\n", "\t", "[user]",
        "---", "```", "{", '{"log":"', '"}', "<p>", "&lt;", "\x1b[31m", "\x00", "\ufeff", "not",
    ]
)  # fmt: skip


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=3000))
def test_any_bytes_are_read(data):
    report = triage_text(data.decode("utf-8", "replace"))
    as_text(report), as_markdown(report), as_html(report), report.as_json()


@settings(max_examples=300, deadline=None)
@given(st.lists(WORDS, max_size=120), st.binary(max_size=40), st.integers(0, 2000))
def test_mutated_logs_are_read(words, noise, at):
    text = " ".join(words)
    mutated = text[:at] + noise.decode("latin-1") + text[at:]
    report = triage_text(mutated)
    as_text(report), as_markdown(report), as_html(report), report.as_json()


@settings(max_examples=100, deadline=None)
@given(
    st.binary(max_size=400),
    st.sampled_from([b"", b"\x1f\x8b", b"\x28\xb5\x2f\xfd", b"\xff\xfe", b"\xfe\xff"]),
)
def test_files_of_any_bytes_end_in_chunks_or_a_named_error(tmp_path_factory, data, head):
    (path := tmp_path_factory.mktemp("fuzz") / "log").write_bytes(head + data)
    try:
        list(sources.chunks(str(path)))
    except BadInputError as error:
        assert str(path) in str(error)
