"""Trees small enough to write down: one file with the V1 input kernel's name, and code that runs as it is lifted."""

from __future__ import annotations

import pytest

from specmortem.upstream.vllm_files import UTILS, V1

CAUSE = "v1-rejected-equals-context"


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """An empty cache of this test's own."""
    folder = tmp_path / "cache"
    monkeypatch.setenv("SPECMORTEM_CACHE", str(folder))
    return folder


@pytest.fixture
def make_tree(tmp_path):
    """Writes files below a folder; gives the subject."""

    def make(files, folder="checkout"):
        for name, text in files.items():
            place = tmp_path / folder / name
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_text(text, encoding="utf-8")
        return f"tree:{tmp_path / folder}"

    return make


@pytest.fixture
def make_hostile(make_tree):
    """A tree whose kernel needs a value that the given statements compute when it is lifted."""

    def make(body, folder="hostile"):
        lines = "\n".join(f"    {line}" for line in body.splitlines())
        text = f"def evil():\n{lines}\n    return 1\n\n\ndef {V1}(x=evil()):\n    pass\n"
        return make_tree({UTILS: text}, folder)

    return make
