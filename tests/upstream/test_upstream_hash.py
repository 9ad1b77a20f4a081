"""Hashes: equal for equal code, different for different code."""

from __future__ import annotations

import ast

import pytest

from specmortem import upstream
from specmortem.upstream.bodies import hash_node

BASE = """
def slot(block_id, offset, size=16):
    if offset >= size:
        raise ValueError(f"{offset!r} of {size:>3}")
    slots = [block_id * size + o for o in range(offset)]
    return slots[-1] if slots else None
"""

SAME = {
    "docstring": BASE.replace("size=16):\n", 'size=16):\n    """Says something."""\n'),
    "comment": BASE.replace("if offset", "# why\n    if offset"),
    "layout": BASE.replace("block_id * size + o for", "(block_id * size)\n        + o for"),
    "annotations": BASE.replace(
        "(block_id, offset, size=16)", "(block_id: int, offset: 'T', size: int = 16) -> int"
    ),
    "variable annotation": BASE.replace("slots = ", "slots: list[int] = "),
    "decorator": BASE.replace("def slot", "@triton.jit\ndef slot"),
    "place": "import os\n\n\n\n" + BASE,
}
DIFFERENT = {
    "operator": BASE.replace(">=", ">"),
    "constant": BASE.replace("size=16", "size=32"),
    "type of a constant": BASE.replace("slots[-1]", "slots[-1.0]"),
    "name": BASE.replace("def slot", "def slots_of"),
    "parameter": BASE.replace("offset", "place"),
    "format": BASE.replace(":>3", ":>4"),
    "order": BASE.replace("block_id * size + o", "o + block_id * size"),
    "keyword only": BASE.replace("offset, size", "offset, *, size"),
}


def hashed(text: str) -> str:
    return hash_node(
        next(node for node in ast.parse(text).body if isinstance(node, ast.FunctionDef | ast.ClassDef))
    )


@pytest.mark.parametrize("text", SAME.values(), ids=SAME)
def test_what_does_not_run_does_not_count(text):
    assert text != BASE
    assert hashed(text) == hashed(BASE)


@pytest.mark.parametrize("text", DIFFERENT.values(), ids=DIFFERENT)
def test_what_runs_counts(text):
    assert text != BASE
    assert hashed(text) != hashed(BASE)


def test_the_hash_is_the_same_on_every_python():
    assert hashed(BASE) == "a9f618599911"


def test_a_field_of_a_class_counts_and_its_type_does_not():
    assert hashed("class C:\n    a: int\n") == hashed("class C:\n    a: str\n")
    assert hashed("class C:\n    a: int\n") != hashed("class C:\n    b: int\n")


def test_hashing_executes_nothing(make_tree):
    tree = make_tree(
        {"vllm/a.py": "raise SystemExit\n\ndef f():\n    return g()\n\ndef g():\n    return 1\n"}
    )
    assert len(upstream.body_hash(tree, "vllm/a.py", "f")) == 12
    assert len(upstream.closure_hash(tree, "vllm/a.py", "f")) == 12


def test_equal_code_in_another_file_has_equal_hashes(make_tree):
    body = "def f(x):\n    return g(x)\n\ndef g(x):\n    return x + K\n\nK = 1\n"
    tree = make_tree({"vllm/a.py": body, "vllm/b/c.py": "import os\n\n" + body})
    assert upstream.body_hash(tree, "vllm/a.py", "f") == upstream.body_hash(tree, "vllm/b/c.py", "f")
    assert upstream.closure_hash(tree, "vllm/a.py", "f") == upstream.closure_hash(tree, "vllm/b/c.py", "f")


@pytest.mark.parametrize("changed", ["return x - K", "K = 2"])
def test_a_changed_dependency_changes_the_closure_hash_only(make_tree, changed):
    body = "def f(x):\n    return g(x)\n\ndef g(x):\n    return x + K\n\nK = 1\n"
    other = body.replace("return x + K" if "return" in changed else "K = 1", changed)
    tree = make_tree({"vllm/a.py": body, "vllm/b.py": other})
    assert upstream.body_hash(tree, "vllm/a.py", "f") == upstream.body_hash(tree, "vllm/b.py", "f")
    assert upstream.closure_hash(tree, "vllm/a.py", "f") != upstream.closure_hash(tree, "vllm/b.py", "f")


def test_a_definition_is_read_and_nothing_runs(make_tree):
    tree = make_tree({"vllm/a.py": "raise SystemExit\n\nclass C:\n    def f(self):\n        return 1\n"})
    assert ast.unparse(upstream.definition(tree, "vllm/a.py", "C.f")) == "def f(self):\n    return 1"
    with pytest.raises(upstream.NotPresentError, match="does not define C.g"):
        upstream.definition(tree, "vllm/a.py", "C.g")


def test_a_method_has_a_hash_of_its_own(make_tree):
    tree = make_tree(
        {"vllm/a.py": "class C:\n    def f(self):\n        return 1\n\ndef f(self):\n    return 1\n"}
    )
    assert upstream.body_hash(tree, "vllm/a.py", "C.f") == upstream.body_hash(tree, "vllm/a.py", "f")
