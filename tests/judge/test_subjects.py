"""Where subjects come from: archives within limits, installations of other environments, what is not to be had."""

import io
import os
import stat
import sys
import tarfile
import venv
import zipfile

import pytest

from specmortem.errors import BadInputError, UnavailableError
from specmortem.judge import subjects
from specmortem.judge.subjects import Place, open_subject
from specmortem.upstream.errors import MissingFileError, NotStoredError
from specmortem.upstream.tree import StoredTree

FILES = {"vllm/a.py": "x = 1\n", "vllm/b/c.py": "y = 2\n", "README.md": "no"}


def wheel(folder, files, name="vllm-0.99.0-cp38-abi3-manylinux1_x86_64.whl", write=None):
    path = folder / name
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for member, text in files.items():
            archive.writestr(member, text)
        if write:
            write(archive)
    return path


def sdist(folder, files, links=()):
    path = folder / "vllm-0.99.0.tar.gz"
    with tarfile.open(path, "w:gz") as archive:
        for member, text in files.items():
            info = tarfile.TarInfo(f"vllm-0.99.0/{member}")
            info.size = len(text)
            archive.addfile(info, io.BytesIO(text.encode()))
        for name, target in links:
            info = tarfile.TarInfo(name)
            info.type, info.linkname = tarfile.SYMTYPE, target
            archive.addfile(info)
    return path


@pytest.mark.parametrize("kind", ["wheel", "sdist"])
def test_an_archive_is_a_tree(kind, cache, tmp_path):
    path = (wheel if kind == "wheel" else sdist)(tmp_path, FILES)
    tree, place = open_subject(f"{kind}:{path}")
    assert (place.version, place.kind) == ("0.99.0", "stored")
    assert tree.has("vllm/b/c.py") and not tree.has("README.md")
    assert tree.fetch(["vllm/b/c.py"])["vllm/b/c.py"].read_text() == "y = 2\n"
    again = place.open()
    assert again.fetch(["vllm/b/c.py"]) and again.has("vllm/a.py")
    with pytest.raises(NotStoredError, match=r"vllm/a\.py is not in the cache"):
        again.fetch(["vllm/a.py"])
    with pytest.raises(MissingFileError):
        tree.fetch(["vllm/z.py"])


def raises(path, message):
    kind = "wheel" if path.suffix == ".whl" else "sdist"
    with pytest.raises(UnavailableError, match=message):
        open_subject(f"{kind}:{path}")


def test_members_that_lead_out_are_refused(cache, tmp_path):
    raises(wheel(tmp_path, {"../vllm/a.py": "x"}), "unsafe name")
    raises(wheel(tmp_path, {"/vllm/a.py": "x"}), "unsafe name")
    raises(sdist(tmp_path, {"../../vllm/a.py": "x"}), "unsafe name")
    assert not list(tmp_path.rglob("a.py"))


def test_links_are_refused(cache, tmp_path):
    def link(archive):
        info = zipfile.ZipInfo("vllm/link.py")
        info.external_attr = (stat.S_IFLNK | 0o777) << 16
        archive.writestr(info, "/etc/passwd")

    raises(wheel(tmp_path, FILES, write=link), "link or another special file")
    raises(sdist(tmp_path, FILES, [("vllm-0.99.0/vllm/link.py", "/etc/passwd")]), "link or another special")


def test_limits_of_size_ratio_count_and_copies(cache, tmp_path, monkeypatch):
    raises(wheel(tmp_path, {"vllm/a.py": "#" * (5 << 20)}), "more than the")
    raises(wheel(tmp_path, {"vllm/a.py": "#" * (1 << 20)}), "packed more than 200 to 1")

    def twice(archive):
        with pytest.warns(UserWarning):
            archive.writestr("vllm/a.py", "other")

    raises(wheel(tmp_path, FILES, write=twice), "more than once")
    monkeypatch.setattr(subjects, "MAX_MEMBERS", 2)
    raises(wheel(tmp_path, FILES), "more than 2 members")
    monkeypatch.setattr(subjects, "MAX_MEMBERS", 100)
    monkeypatch.setattr(subjects, "MAX_TOTAL_BYTES", 3)
    raises(sdist(tmp_path, FILES), "unpacks to more than 3 bytes")


def test_what_is_no_archive_or_holds_no_vllm(cache, tmp_path):
    (tmp_path / "vllm-1.whl").write_bytes(b"not a zip")
    raises(tmp_path / "vllm-1.whl", "cannot be used")
    raises(wheel(tmp_path, {"other/a.py": "x"}), "holds no Python file of vllm/")
    raises(tmp_path / "gone.whl", "cannot read")
    with pytest.raises(BadInputError, match="wheel:FILE"):
        open_subject("wheel:")


def test_an_installation_of_another_environment_is_found_and_not_imported(tmp_path, cache):
    venv.create(tmp_path / "env", with_pip=False)
    python = tmp_path / "env" / "bin" / "python"
    site = next((tmp_path / "env" / "lib").glob("python*")) / "site-packages"
    (site / "vllm").mkdir()
    (site / "vllm" / "__init__.py").write_text("raise SystemExit('imported')")
    (site / "vllm-0.98.0.dist-info").mkdir()
    (site / "vllm-0.98.0.dist-info" / "METADATA").write_text("Name: vllm\nVersion: 0.98.0\n")
    tree, place = open_subject("installed", python=str(python))
    assert (tree.version, place.root, place.subject) == ("0.98.0", str(site), "installed")
    assert place.open().has("vllm/__init__.py")
    assert "vllm" not in sys.modules


def test_an_environment_without_vllm_and_an_interpreter_that_is_none(tmp_path, cache):
    venv.create(tmp_path / "env", with_pip=False)
    with pytest.raises(UnavailableError, match="has no vllm"):
        open_subject("installed", python=str(tmp_path / "env" / "bin" / "python"))
    with pytest.raises(UnavailableError, match="cannot be asked"):
        open_subject("installed", python=os.devnull)


def test_a_stored_file_that_was_changed_is_not_used(cache, tmp_path):
    tree, place = open_subject(f"wheel:{wheel(tmp_path, FILES)}")
    tree.fetch(["vllm/a.py"])["vllm/a.py"].write_text("x = 2\n")
    with pytest.raises(NotStoredError):
        StoredTree(place.subject, place.version, tree.root).fetch(["vllm/a.py"])
    assert tree.fetch(["vllm/a.py"])["vllm/a.py"].read_text() == "x = 1\n"


def test_a_place_knows_its_folder(tmp_path):
    (tmp_path / "vllm").mkdir()
    assert Place("tree:x", "", str(tmp_path), "folder").open().root == tmp_path
