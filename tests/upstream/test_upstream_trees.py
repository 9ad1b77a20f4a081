"""Subjects, and trees that are folders."""

from __future__ import annotations

from importlib import metadata
from importlib.machinery import ModuleSpec

import pytest

from specmortem import upstream
from specmortem.errors import BadInputError, UnavailableError
from specmortem.upstream import tree as tree_module


@pytest.mark.parametrize(
    "subject",
    [
        "",
        "vllm",
        "vllm==",
        "vllm==0.22.*",
        "vllm>=0.22.1",
        "torch==2.0",
        "0.22.1",
        "tree:",
        "vllm==1.0/../..",
    ],
)
def test_a_malformed_subject_is_bad_input(subject, tmp_path):
    with pytest.raises(BadInputError, match=r"is not a subject: write vllm==X\.Y\.Z, tree:DIR"):
        upstream.resolve(subject, tmp_path)


def test_a_folder_gives_its_own_files(make_tree, tmp_path):
    tree = make_tree({"vllm/a.py": "A = 1\n"})
    assert tree.fetch(["vllm/a.py"]) == {"vllm/a.py": tmp_path / "checkout" / "vllm" / "a.py"}
    assert (tree.version, tree.bytes_moved) == ("", 0)
    assert tree.first(["vllm/none.py", "vllm/a.py"]) == "vllm/a.py"


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("vllm/_version.py", "__version__ = version = '0.31.0'\n"),
        ("vllm/_version.py", "__version__: str\n__version__ = version = '0.31.0'\n"),
        ("vllm-0.31.0.dist-info/METADATA", ""),
    ],
)
def test_the_version_is_what_the_build_left(make_tree, name, text):
    assert make_tree({"vllm/a.py": "", name: text}).version == "0.31.0"


def test_a_folder_without_vllm_is_unavailable(tmp_path):
    with pytest.raises(UnavailableError, match="holds no folder vllm; give the folder that holds vllm/"):
        upstream.resolve(f"tree:{tmp_path}")


def test_the_package_folder_itself_points_to_its_parent(make_tree, tmp_path):
    make_tree({"vllm/__init__.py": ""})
    with pytest.raises(UnavailableError, match=f"give its parent, tree:{tmp_path / 'checkout'}$"):
        upstream.resolve(f"tree:{tmp_path / 'checkout' / 'vllm'}")


def test_a_missing_file_is_named(make_tree):
    tree = make_tree({"vllm/a.py": ""})
    with pytest.raises(upstream.MissingFileError, match=r"tree:.* has no file vllm/b\.py"):
        tree.fetch(["vllm/b.py"])


def test_a_link_out_of_the_folder_is_refused(make_tree, tmp_path):
    tree = make_tree({"vllm/a.py": ""})
    (tmp_path / "secret.py").write_text("S = 1\n")
    (tmp_path / "checkout" / "vllm" / "link.py").symlink_to(tmp_path / "secret.py")
    with pytest.raises(UnavailableError, match=r"vllm/link\.py is a link that leads out"):
        tree.fetch(["vllm/link.py"])


def test_a_link_within_the_folder_is_followed(make_tree, tmp_path):
    tree = make_tree({"vllm/a.py": "A = 1\n"})
    (tmp_path / "checkout" / "vllm" / "link.py").symlink_to("a.py")
    assert tree.fetch(["vllm/link.py"])["vllm/link.py"].read_text() == "A = 1\n"


def test_a_link_that_goes_round_is_a_missing_file(make_tree, tmp_path):
    tree = make_tree({"vllm/a.py": ""})
    (tmp_path / "checkout" / "vllm" / "loop.py").symlink_to("loop.py")
    with pytest.raises(upstream.MissingFileError):
        tree.fetch(["vllm/loop.py"])


def test_an_oversize_file_is_refused(make_tree):
    tree = make_tree({"vllm/big.py": "#" * ((4 << 20) + 1)})
    with pytest.raises(UnavailableError, match="larger than"):
        tree.fetch(["vllm/big.py"])


def test_installed_without_vllm_is_unavailable(monkeypatch):
    monkeypatch.setattr(
        metadata, "version", lambda name: metadata.distribution("no-such-distribution").version
    )
    with pytest.raises(UnavailableError, match="this environment has no vllm"):
        upstream.resolve("installed")


def test_installed_is_found_without_an_import(make_tree, tmp_path, monkeypatch):
    make_tree({"vllm/__init__.py": "raise AssertionError('imported')\n"}, "site")
    spec = ModuleSpec("vllm", None, is_package=True)
    spec.submodule_search_locations = [str(tmp_path / "site" / "vllm")]
    monkeypatch.setattr(metadata, "version", lambda name: "0.30.0")
    monkeypatch.setattr(tree_module, "find_spec", lambda name: spec)
    tree = upstream.resolve("installed")
    assert (tree.subject, tree.version, tree.root) == ("installed", "0.30.0", tmp_path / "site")
    assert tree.has("vllm/__init__.py")
