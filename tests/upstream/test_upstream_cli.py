"""Subjects that cannot be had, through the command line: one error, exit code 2, nothing left in the cache."""

import pytest
from click.testing import CliRunner

from specmortem.cli import main
from specmortem.upstream.vllm_files import V2_SPECULATOR


def probe(subject):
    return CliRunner().invoke(main, ["probe", "v2-null-block", "--subject", subject, "--device", "sim"])


def error_of(result):
    assert (result.exit_code, result.stdout) == (2, ""), result.output
    assert result.stderr.startswith("specmortem: error: ") and result.stderr.count("\n") == 1
    return result.stderr


@pytest.fixture
def cache(monkeypatch, tmp_path):
    monkeypatch.setenv("SPECMORTEM_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_an_unreachable_index(monkeypatch, cache):
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    assert "127.0.0.1:9" in error_of(probe("vllm==0.24.0"))


def test_a_release_that_the_index_does_not_have(local_index, cache):
    local_index.add("1.0.0", {"vllm/a.py": "A = 1\n"})
    assert "9.9.9" in error_of(probe("vllm==9.9.9"))


def test_a_corrupt_wheel_leaves_nothing_in_the_cache(local_index, cache):
    wheel = local_index.add("1.0.0", {V2_SPECULATOR: "A = 1\n"})
    local_index.wheels[wheel] = local_index.wheels[wheel][:-40]
    assert wheel in error_of(probe("vllm==1.0.0"))
    assert not [path for path in cache.rglob("*") if path.suffix == ".py"]


def test_a_tree_without_the_file(tmp_path):
    (tmp_path / "vllm").mkdir()
    assert f"has no {V2_SPECULATOR}; give the folder that holds vllm/" in error_of(probe(f"tree:{tmp_path}"))


def test_a_tree_that_is_not_there(tmp_path):
    assert str(tmp_path / "gone") in error_of(probe(f"tree:{tmp_path / 'gone'}"))


def test_a_malformed_subject():
    assert "vllm=0.24" in error_of(probe("vllm=0.24"))
