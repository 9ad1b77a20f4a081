"""Releases: what is fetched, what is cached, and what is refused."""

from __future__ import annotations

import json
import os
import stat
import struct
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from specmortem import upstream
from specmortem.errors import BadInputError, UnavailableError
from specmortem.upstream import index as index_module

MEMBERS = {
    "vllm/a.py": "A = 1\n",
    "vllm/b/__init__.py": "B = 2\n",
    "vllm-1.0.0.dist-info/METADATA": "Name: vllm\n",
}
WHEEL = "vllm-1.0.0-cp38-abi3-manylinux_2_28_x86_64.whl"


@pytest.fixture
def release(local_index, tmp_path):
    """Puts 1.0.0 on the index; each call resolves it anew, with the cache in `tmp_path`."""
    assert local_index.add("1.0.0", MEMBERS) == WHEEL
    return lambda: upstream.resolve("vllm==1.0.0", tmp_path)


def cached_files(cache: Path) -> set[str]:
    return {
        str(path.relative_to(cache)) for path in cache.rglob("*") if path.is_file() and path.name != ".lock"
    }


def test_only_the_wanted_members_are_fetched(release, tmp_path):
    tree = release()
    files = tree.fetch(["vllm/a.py"])
    assert files == {"vllm/a.py": tmp_path / "vllm-1.0.0" / "vllm" / "a.py"}
    assert files["vllm/a.py"].read_text() == "A = 1\n"
    assert cached_files(tmp_path) == {"vllm-1.0.0/manifest.json", "vllm-1.0.0/vllm/a.py"}
    assert (tree.subject, tree.version, tree.root) == ("vllm==1.0.0", "1.0.0", tmp_path / "vllm-1.0.0")


def test_a_release_is_stored_once_it_was_resolved(local_index, release, tmp_path):
    assert not upstream.is_stored("vllm==1.0.0", tmp_path)
    assert local_index.requests == []
    release()
    assert upstream.is_stored("vllm==1.0.0", tmp_path)
    assert not upstream.is_stored("vllm==1.0.1", tmp_path)
    (tmp_path / "vllm-1.0.0" / "manifest.json").write_text("{")
    assert not upstream.is_stored("vllm==1.0.0", tmp_path)
    with pytest.raises(BadInputError, match="is not a subject"):
        upstream.is_stored("installed", tmp_path)


def test_versions_are_those_the_index_has_a_wheel_of(local_index):
    for version in ("1.0.0", "1.1.0rc1"):
        local_index.add(version, MEMBERS)
    assert {str(version) for version in index_module.versions()} == {"1.0.0", "1.1.0rc1"}


def test_every_request_to_the_wheel_asks_for_a_range(local_index, release):
    release().fetch(["vllm/a.py", "vllm/b/__init__.py"])
    assert all(wanted.startswith("bytes=") for _, _, wanted in local_index.wheel_requests())


def test_bytes_moved_is_what_the_ranges_held(local_index, tmp_path):
    noise = os.urandom(300_000).hex()
    name = local_index.add("1.0.0", {**MEMBERS, "vllm/noise.bin": noise})
    tree = upstream.resolve("vllm==1.0.0", tmp_path)
    tree.fetch(["vllm/a.py"])
    assert 0 < tree.bytes_moved < 70_000 < len(local_index.wheels[name])


def test_a_cached_release_needs_no_network(local_index, release, monkeypatch):
    release().fetch(["vllm/a.py"])
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    asked = len(local_index.requests)
    tree = release()
    assert tree.fetch(["vllm/a.py"])["vllm/a.py"].read_text() == "A = 1\n"
    assert tree.first(["vllm/none.py", "vllm/b/__init__.py"]) == "vllm/b/__init__.py"
    assert not tree.has("vllm/none.py")
    assert (tree.bytes_moved, len(local_index.requests)) == (0, asked)


def test_more_members_of_a_known_release_need_no_index_page(local_index, release):
    release().fetch(["vllm/a.py"])
    local_index.status["/simple/vllm/"] = 404
    index_module._page.cache_clear()
    assert release().fetch(["vllm/b/__init__.py"])


def test_a_changed_cached_file_is_fetched_again(release):
    place = release().fetch(["vllm/a.py"])["vllm/a.py"]
    place.write_text("A = 2\n")
    assert release().fetch(["vllm/a.py"])["vllm/a.py"].read_text() == "A = 1\n"


def test_a_changed_cached_file_is_an_error_offline(release, monkeypatch):
    release().fetch(["vllm/a.py"])["vllm/a.py"].write_text("A = 2\n")
    monkeypatch.setenv("PIP_NO_INDEX", "true")
    with pytest.raises(UnavailableError, match=r"vllm==1\.0\.0: the cached vllm/a\.py was changed.*no-index"):
        release().fetch(["vllm/a.py"])


def test_a_broken_manifest_counts_as_an_empty_cache(release, tmp_path):
    release().fetch(["vllm/a.py"])
    (tmp_path / "vllm-1.0.0" / "manifest.json").write_text('{"files": 3')
    assert release().fetch(["vllm/a.py"])


def test_the_project_page_is_read_once_for_all_releases(local_index, tmp_path):
    for version in ("1.0.0", "1.0.1", "1.1.0"):
        local_index.add(version, MEMBERS)
    for version in ("1.0.0", "1.0.1", "1.1.0"):
        upstream.resolve(f"vllm=={version}", tmp_path)
    assert [path for _, path, _ in local_index.requests].count("/simple/vllm/") == 1


def test_the_highest_build_for_x86_64_linux_is_preferred(local_index, tmp_path):
    for version, platform in [
        ("1.0.0-1", "manylinux_2_28_x86_64"),
        ("1.0.0-10", "manylinux_2_28_x86_64"),
        ("1.0.0-2", "manylinux_2_28_x86_64"),
        ("1.0.0-99", "manylinux_2_28_aarch64"),
    ]:
        local_index.add(version, {"vllm/which.py": f"{version}"}, platform)
    tree = upstream.resolve("vllm==1.0.0", tmp_path)
    assert tree.fetch(["vllm/which.py"])["vllm/which.py"].read_text() == "1.0.0-10"


def test_any_wheel_is_better_than_none(local_index, tmp_path):
    local_index.add("1.0.0", MEMBERS, "macosx_11_0_arm64")
    assert upstream.resolve("vllm==1.0.0", tmp_path).has("vllm/a.py")


def test_credentials_of_the_index_reach_the_wheel_but_not_the_disk(
    local_index, release, tmp_path, monkeypatch
):
    local_index.password = "hunter2"
    monkeypatch.setenv("PIP_INDEX_URL", local_index.simple.replace("//", "//me:hunter2@"))
    release().fetch(["vllm/a.py"])
    assert "hunter2" not in (tmp_path / "vllm-1.0.0" / "manifest.json").read_text()
    release().fetch(["vllm/b/__init__.py"])


def test_errors_do_not_show_credentials(local_index, tmp_path, monkeypatch):
    monkeypatch.setenv("PIP_INDEX_URL", local_index.simple.replace("//", "//me:hunter2@"))
    local_index.status["/simple/vllm/"] = 403
    with pytest.raises(UnavailableError) as caught:
        upstream.resolve("vllm==1.0.0", tmp_path)
    assert "hunter2" not in str(caught.value)
    assert "403" in str(caught.value)


def test_the_index_of_pips_configuration_file_is_used(local_index, release, tmp_path, monkeypatch):
    (tmp_path / "pip.conf").write_text(f"[global]\nindex-url = {local_index.simple}/\n")
    monkeypatch.delenv("PIP_INDEX_URL")
    monkeypatch.setenv("PIP_CONFIG_FILE", str(tmp_path / "pip.conf"))
    assert release().has("vllm/a.py")


@pytest.mark.parametrize("value", ["1", "true", "YES"])
def test_no_index_means_unavailable(local_index, tmp_path, monkeypatch, value):
    monkeypatch.setenv("PIP_NO_INDEX", value)
    with pytest.raises(UnavailableError, match="no-index.*PIP_INDEX_URL"):
        upstream.resolve("vllm==1.0.0", tmp_path)
    assert not local_index.requests


@pytest.mark.parametrize("status", [404, 503])
def test_an_index_that_refuses_is_unavailable(local_index, tmp_path, status):
    local_index.status["/simple/vllm/"] = status
    with pytest.raises(UnavailableError, match=r"127\.0\.0\.1.*PIP_INDEX_URL"):
        upstream.resolve("vllm==1.0.0", tmp_path)
    assert len(local_index.requests) == (3 if status == 503 else 1)
    assert not cached_files(tmp_path)


def test_an_index_that_nobody_serves_is_unavailable(local_index, tmp_path, monkeypatch):
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:1/simple")
    with pytest.raises(UnavailableError, match=r"127\.0\.0\.1:1/simple did not deliver"):
        upstream.resolve("vllm==1.0.0", tmp_path)


def test_a_silent_server_is_given_up(local_index, release, monkeypatch):
    monkeypatch.setattr(index_module, "TIMEOUT_S", (1, 0.1))
    local_index.hang[f"/files/{WHEEL}"] = 0.5
    with pytest.raises(UnavailableError, match=WHEEL):
        release()


def test_an_absent_release_names_the_ones_there(local_index, tmp_path):
    local_index.add("1.0.0", MEMBERS)
    local_index.add("1.2.0", MEMBERS)
    with pytest.raises(UnavailableError, match=r"no wheel of vllm 9\.9 \(wheels there: 1\.0\.0 to 1\.2\.0\)"):
        upstream.resolve("vllm==9.9", tmp_path)


def test_a_server_without_ranges_from_the_end_is_enough(local_index, release):
    local_index.suffix_ranges = False
    assert release().fetch(["vllm/a.py"])


SPOILED = {
    "gone": (lambda index: index.status.update({f"/files/{WHEEL}": 404}), f"{WHEEL}.*404"),
    "refused": (lambda index: index.status.update({f"/files/{WHEEL}": 503}), f"{WHEEL}.*503"),
    "without ranges": (lambda index: setattr(index, "ranges", False), "does not support range requests"),
    "truncated": (
        lambda index: index.wheels.update({WHEEL: index.wheels[WHEEL][:-40]}),
        f"{WHEEL} cannot be read",
    ),
    "no archive": (
        lambda index: index.wheels.update({WHEEL: b"<html>please log in</html>"}),
        "not a zip file",
    ),
}


@pytest.mark.parametrize("how", SPOILED)
def test_a_wheel_that_cannot_be_read_in_parts_is_unavailable(how, local_index, release, tmp_path):
    spoil, message = SPOILED[how]
    spoil(local_index)
    with pytest.raises(UnavailableError, match=message):
        release()
    assert not cached_files(tmp_path)


def test_a_member_with_a_wrong_checksum_leaves_nothing_behind(local_index, tmp_path):
    def write(archive: zipfile.ZipFile) -> None:
        archive.writestr(zipfile.ZipInfo("vllm/a.py"), "A = 12345\n")
        archive.writestr("vllm/b.py", "B = 1\n")

    wheel = local_index.add_archive("1.0.0", write)
    local_index.wheels[wheel] = local_index.wheels[wheel].replace(b"12345", b"12346", 1)
    tree = upstream.resolve("vllm==1.0.0", tmp_path)
    with pytest.raises(UnavailableError, match=r"vllm/a\.py.*CRC"):
        tree.fetch(["vllm/b.py", "vllm/a.py"])
    assert cached_files(tmp_path) == {"vllm-1.0.0/manifest.json"}
    assert json.loads((tmp_path / "vllm-1.0.0" / "manifest.json").read_text())["files"] == {}


def test_a_directory_that_claims_to_be_huge_is_not_fetched(local_index, tmp_path):
    wheel = local_index.add("1.0.0", {**MEMBERS, "vllm/noise.bin": os.urandom(100_000).hex()})
    end = bytearray(local_index.wheels[wheel])
    place = end.rfind(b"PK\5\6")
    struct.pack_into("<II", end, place + 12, 1 << 30, 0)
    local_index.wheels[wheel] = bytes(end)
    with pytest.raises(UnavailableError, match=f"{wheel} cannot be read"):
        upstream.resolve("vllm==1.0.0", tmp_path)


@pytest.mark.parametrize(
    "name", ["../evil.py", "/etc/evil.py", "vllm/../../evil.py", "vllm\\evil.py", "C:/evil.py"]
)
def test_an_archive_with_an_unsafe_name_is_refused(local_index, tmp_path, name):
    local_index.add("1.0.0", {**MEMBERS, name: "EVIL = True\n"})
    with pytest.raises(UnavailableError, match="unsafe name"):
        upstream.resolve("vllm==1.0.0", tmp_path / "cache")
    assert not cached_files(tmp_path)


def test_a_link_in_the_archive_is_refused(local_index, tmp_path):
    def write(archive: zipfile.ZipFile) -> None:
        link = zipfile.ZipInfo("vllm/link.py")
        link.external_attr = (stat.S_IFLNK | 0o777) << 16
        archive.writestr(link, "/etc/passwd")

    local_index.add_archive("1.0.0", write)
    with pytest.raises(UnavailableError, match=r"vllm/link\.py.*link or another special file"):
        upstream.resolve("vllm==1.0.0", tmp_path).fetch(["vllm/link.py"])
    assert cached_files(tmp_path) == {"vllm-1.0.0/manifest.json"}


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (os.urandom((2 << 20) + 1).hex(), "more than the 4194304"),
        ("#" * 2_000_000, "packed more than 200 to 1"),
    ],
    ids=["oversize", "bomb"],
)
def test_a_member_that_is_no_source_file_is_refused(local_index, tmp_path, content, reason):
    local_index.add("1.0.0", {"vllm/big.py": content})
    with pytest.raises(UnavailableError, match=rf"vllm/big\.py.*{reason}"):
        upstream.resolve("vllm==1.0.0", tmp_path).fetch(["vllm/big.py"])


@pytest.mark.filterwarnings("ignore:Duplicate name")
def test_a_member_that_is_there_twice_is_refused(local_index, tmp_path):
    def write(archive: zipfile.ZipFile) -> None:
        archive.writestr("vllm/a.py", "A = 1\n")
        archive.writestr("vllm/a.py", "A = 2\n")

    local_index.add_archive("1.0.0", write)
    with pytest.raises(UnavailableError, match="more than once"):
        upstream.resolve("vllm==1.0.0", tmp_path).fetch(["vllm/a.py"])


def test_a_file_that_the_release_lacks_is_named(release):
    with pytest.raises(upstream.MissingFileError, match=r"vllm==1\.0\.0 has no file vllm/none\.py"):
        release().fetch(["vllm/a.py", "vllm/none.py"])


@pytest.mark.parametrize(
    "path", ["", ".", "../a.py", "vllm/../a.py", "/vllm/a.py", "vllm\\a.py", "manifest.json"]
)
def test_a_path_that_leaves_the_tree_is_bad_input(release, path):
    with pytest.raises(BadInputError, match="not a path inside a tree"):
        release().fetch([path])


def test_a_link_in_the_cache_is_not_followed_out_of_it(local_index, tmp_path):
    local_index.add("1.0.0", MEMBERS)
    tree = upstream.resolve("vllm==1.0.0", tmp_path / "cache")
    (tmp_path / "elsewhere").mkdir()
    (tree.root / "vllm").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(UnavailableError, match="leads out of the cache"):
        tree.fetch(["vllm/a.py"])
    assert not list((tmp_path / "elsewhere").iterdir())


def test_a_cache_that_cannot_be_written_names_the_way_out(local_index, tmp_path):
    local_index.add("1.0.0", MEMBERS)
    (tmp_path / "file").write_text("")
    with pytest.raises(UnavailableError, match="SPECMORTEM_CACHE"):
        upstream.resolve("vllm==1.0.0", tmp_path / "file")


def test_the_cache_folder_follows_the_environment(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("SPECMORTEM_CACHE", raising=False)
    assert upstream.default_cache() == tmp_path / "specmortem"
    monkeypatch.setenv("SPECMORTEM_CACHE", str(tmp_path / "mine"))
    assert upstream.default_cache() == tmp_path / "mine"


def test_processes_that_share_a_cache_keep_each_others_files(local_index, tmp_path):
    names = [f"vllm/m{number}.py" for number in range(6)]
    local_index.add("1.0.0", {name: name for name in names})
    code = (
        "import sys; from pathlib import Path; from specmortem import upstream\n"
        "upstream.resolve('vllm==1.0.0', Path(sys.argv[1])).fetch(sys.argv[2:])"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    started = [
        subprocess.Popen([sys.executable, "-c", code, str(tmp_path), *names[n : n + 2]], env=environment)
        for n in (0, 2, 4)
    ]
    assert [process.wait(60) for process in started] == [0, 0, 0]
    manifest = json.loads((tmp_path / "vllm-1.0.0" / "manifest.json").read_text())
    assert sorted(manifest["files"]) == names
    assert not list(tmp_path.rglob(".new-*"))
