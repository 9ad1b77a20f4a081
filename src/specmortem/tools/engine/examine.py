"""What an environment lacks for whole engines."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from packaging.version import InvalidVersion, Version

from specmortem import facts
from specmortem.doctor import Check
from specmortem.tools.engine.arms import ALWAYS_ENV, NEWEST, OLDEST
from specmortem.tools.engine.process import Environment

PROBE_S = 180.0
MODEL = Path("data") / "tiny-recall"
# Prints one JSON line last; what vLLM logs comes before it.
PROBE = """
import importlib, json, os, platform, sys
from importlib import metadata
found = {"python": platform.python_version()}
for name in ("vllm", "torch", "triton"):
    try:
        found[name] = str(getattr(importlib.import_module(name), "__version__", "unknown"))
    except BaseException as error:
        found[name + "_error"] = f"{type(error).__name__}: {error}"[:300]
try:
    found["flashinfer"] = metadata.version("flashinfer-python")
except metadata.PackageNotFoundError:
    pass
torch = sys.modules.get("torch")
try:
    found["gpu"] = torch.cuda.get_device_name(0) if torch is not None and torch.cuda.is_available() else ""
except BaseException as error:
    found["gpu_error"] = f"{type(error).__name__}: {error}"[:300]
sys.stdout.flush()
print("\\n" + json.dumps(found), flush=True)
os._exit(0)
"""
Found = Mapping[str, Any]


def examine_engine(place: str | None) -> list[Check]:
    """All checks of the environment at `place` (this interpreter's by default) and of the committed model.

    Raises BadInputError for a place that is none.
    """
    environment = Environment.parse(place) if place is not None else Environment.here()
    return examine(environment, facts.find_root().parent / MODEL)


def examine(environment: Environment, model: Path) -> list[Check]:
    """All checks of an environment and of a model's directory, in the order in which a reader wants them."""
    found = probe(environment)
    checks: tuple[Callable[[Found], Check], ...] = (_python, _gpu, _vllm, _flashinfer)
    return [*(check(found) for check in checks), _model(model)]


def probe(environment: Environment) -> Found:
    """What the environment's interpreter says of itself; `error` when it says nothing."""
    try:
        ended = subprocess.run(
            [environment.python, "-P", "-c", PROBE],
            env=environment.variables(ALWAYS_ENV),
            capture_output=True,
            text=True,
            errors="replace",
            timeout=PROBE_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return {"error": str(error)}
    last = (ended.stdout.strip().splitlines() or [""])[-1]
    try:
        found: Found = json.loads(last)
    except ValueError:
        tail = (ended.stderr.strip().splitlines() or ["nothing"])[-1]
        return {"error": f"it left with code {ended.returncode} and said: {tail}"}
    return found


def _python(found: Found) -> Check:
    if "error" in found:
        return Check("engine python", "missing", f"the interpreter cannot be asked: {found['error']}", True)
    if Version(found["python"]) < Version("3.11"):
        return Check(
            "engine python", "missing", f"{found['python']}; engines are started with 3.11 or newer", True
        )
    return Check("engine python", "ok", str(found["python"]), True)


def _gpu(found: Found) -> Check:
    if name := found.get("gpu"):
        return Check("engine GPU", "ok", f"{name}, torch {found.get('torch', 'unknown')}", True)
    why = found.get("torch_error") or found.get("gpu_error") or "torch finds no usable GPU"
    return Check("engine GPU", "missing", f"{why}; engines do not start without one", True)


def _vllm(found: Found) -> Check:
    if "vllm" not in found:
        why = found.get("vllm_error", "not asked")
        return Check("engine vllm", "missing", f"cannot be imported ({why}); give another --python", True)
    version = str(found["vllm"])
    try:
        release = Version(version.split("+")[0])
    except InvalidVersion:
        return Check("engine vllm", "limited", f"{version}: not a release, so no arm fits it", True)
    if Version(OLDEST) <= release <= Version(NEWEST):
        return Check("engine vllm", "ok", f"{version}, within {OLDEST} to {NEWEST}", True)
    return Check("engine vllm", "missing", f"{version} is outside {OLDEST} to {NEWEST}", True)


def _flashinfer(found: Found) -> Check:
    if version := found.get("flashinfer"):
        return Check("engine flashinfer", "ok", f"{version}: arms that force FlashInfer attention can run")
    return Check(
        "engine flashinfer", "missing", "not installed: arms that force FlashInfer attention cannot start"
    )


def _model(folder: Path) -> Check:
    lacking = [name for name in ("config.json", "model.safetensors") if not (folder / name).is_file()]
    if lacking:
        told = f"{folder} has no {' and no '.join(lacking)}: only arms with random weights can run"
        return Check("engine model", "missing", told)
    return Check("engine model", "ok", f"{folder}: answers can be checked token by token")
