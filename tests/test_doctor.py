"""What the examination of a machine says."""

import platform
import sys
from types import ModuleType, SimpleNamespace

import pytest

from specmortem import doctor
from specmortem.doctor import Check
from specmortem.errors import UnavailableError


@pytest.mark.parametrize(
    ("found", "word", "meaning"),
    [
        ("2.13.0+cpu", "ok", "2.13.0+cpu, accepted >=2.11"),
        ("2.10.1", "missing", "2.10.1 is outside >=2.11"),
        (None, "missing", "not installed; needs >=2.11"),
    ],
)
def test_versions_are_held_against_the_accepted_range(found, word, meaning):
    check = doctor._check("torch", lambda: doctor._version("torch", found))
    assert check == Check("torch", word, meaning, required=True)


def test_this_python_is_accepted():
    word, meaning = doctor.CHECKS["python"]()
    assert word == "ok" and platform.python_version() in meaning


def test_a_check_that_cannot_be_made_is_missing_with_the_reason():
    def refuse():
        raise UnavailableError("pip is configured with no-index")

    assert doctor._check("package index", refuse) == Check(
        "package index", "missing", "UnavailableError: pip is configured with no-index"
    )


def test_a_required_check_that_cannot_be_made_stays_required():
    def refuse():
        raise ImportError("no triton")

    assert doctor._check("interpreter hooks", refuse).required


def test_a_program_is_looked_for_on_path(tmp_path, monkeypatch):
    tool = tmp_path / "compute-sanitizer"
    monkeypatch.setenv("PATH", str(tmp_path))
    assert doctor.CHECKS["compute-sanitizer"]()[0] == "missing"
    tool.write_text("#!/bin/sh\n")
    tool.chmod(0o755)
    assert str(tool) in doctor.CHECKS["compute-sanitizer"]()[1]


def test_an_optional_package_that_is_absent_says_what_is_lost(monkeypatch):
    monkeypatch.setattr(doctor, "_installed", lambda name: None)
    assert doctor._check("vllm", doctor.CHECKS["vllm"]) == Check(
        "vllm", "missing", "not installed: the subject 'installed' is not judged"
    )


@pytest.mark.parametrize(
    ("cuda", "available", "word", "said"),
    [
        (None, False, "missing", "built without CUDA"),
        ("12.8", False, "missing", "no usable GPU or driver"),
        ("12.8", True, "ok", "H200, CUDA 12.8"),
    ],
)
def test_why_there_is_no_cuda_device(monkeypatch, cuda, available, word, said):
    torch = ModuleType("torch")
    torch.version = SimpleNamespace(cuda=cuda)
    torch.cuda = SimpleNamespace(is_available=lambda: available, get_device_name=lambda index: "H200")
    monkeypatch.setitem(sys.modules, "torch", torch)
    found, meaning = doctor._cuda()
    assert found == word
    assert said in meaning


def test_every_check_has_a_line_of_its_own_name(monkeypatch):
    monkeypatch.setattr(doctor, "_index", lambda: ("ok", "stand-in"))
    monkeypatch.setitem(doctor.CHECKS, "package index", doctor._index)
    assert [check.name for check in doctor.examine()] == list(doctor.CHECKS)
