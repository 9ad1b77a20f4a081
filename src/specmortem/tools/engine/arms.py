"""The arms of an incident on whole engines, read from `investigations/<slug>/engine.toml` and checked.

The file has a `base` (release, engine arguments, environment variables, workload, patch) and arms that `set` dotted
keys of it or go `without` some. Two arms that are compared must differ in exactly one of them; an arm's `reference`,
the same engine without speculation, must differ in `engine.speculative_config` only.
"""

from __future__ import annotations

import copy
import importlib
import json
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import reduce
from operator import getitem
from pathlib import Path
from typing import Any

from specmortem import facts
from specmortem.errors import BadInputError, UnavailableError
from specmortem.tools.engine.workload import RandomTokens, RecallPrompts, Source, Workload

FILE_NAME = "engine.toml"
SPECULATION = "engine.speculative_config"
NO_DRAFT_MODEL = ("ngram", "ngram_gpu", "suffix")
LEAST_RUNS = 5
OLDEST, NEWEST = "0.20.0", "0.26.0"
PATCHES = ("build-event",)  # of child.py, which is run by path and cannot be asked
# Run in this process and thread, from a directory alone, without kernels that would be compiled first, and with the
# configurations that Triton's autotuner has timed once: it keeps them beside its kernels (Triton 3.6.0, knobs.py:375).
ALWAYS_ENGINE: Mapping[str, Any] = {"skip_tokenizer_init": True, "seed": 0}
ALWAYS_ENV: Mapping[str, str] = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    "TRITON_CACHE_AUTOTUNING": "1",
}
Kinds = type | tuple[type, ...]
WORDS: Mapping[Kinds, str] = {
    str: "text",
    dict: "a table",
    list: "a list",
    int: "a whole number",
    (int, float): "a number",
}
TOP_KINDS: Mapping[str, Kinds] = {
    "incident": str,
    "question": str,
    "notes": list,
    "runs": int,
    "seed": int,
    "start_timeout_s": (int, float),
    "run_timeout_s": (int, float),
    "model": dict,
    "base": dict,
    "workloads": dict,
    "arms": list,
    "pairs": list,
}
MODEL_KINDS: Mapping[str, Kinds] = {"path": str, "config": dict, "tasks": str, "vocab": int}
BASE_KINDS: Mapping[str, Kinds] = {"vllm": str, "engine": dict, "env": dict, "workload": str, "patch": str}
ARM_KINDS: Mapping[str, Kinds] = {"name": str, "set": dict, "without": list, "reference": str, "says": str}
GIVEN = ("runs", "seed", "start_timeout_s", "run_timeout_s")
PAIR_KINDS: Mapping[str, Kinds] = {"left": str, "right": str, "question": str}


@dataclass(frozen=True)
class ServedModel:
    """A model directory relative to the checkout, or a `config.json` to be filled with random weights.

    `tasks` names the function that makes prompts with known answers, "package.module:function"; without it prompts
    are random tokens below `vocab`, and only faults are judged.
    """

    path: str = ""
    config: Mapping[str, Any] | None = None
    tasks: str = ""
    vocab: int = 256

    def __post_init__(self) -> None:
        """Raises BadInputError unless there is exactly one of a path and a config."""
        if bool(self.path) == bool(self.config):
            raise BadInputError("[model]: give either path, a directory, or config, a table")

    def folder(self, root: Path, scratch: Path) -> Path:
        """Where the model lies; one with random weights is written to `scratch` first.

        Raises UnavailableError when the directory does not hold a model.
        """
        if self.config is None:
            place = root / self.path
            if not (place / "config.json").is_file():
                raise UnavailableError(
                    f"no model in {self.path}: it has no config.json; train it, or check out data/"
                )
            return place
        scratch.mkdir(parents=True, exist_ok=True)
        (scratch / "config.json").write_text(json.dumps(dict(self.config)), encoding="utf-8")
        return scratch

    def source(self) -> Source:
        """Where prompts come from. Raises BadInputError when the function cannot be had."""
        if not self.tasks:
            return RandomTokens(int((self.config or {}).get("vocab_size", self.vocab)))
        module, _, name = self.tasks.partition(":")
        try:
            return RecallPrompts(getattr(importlib.import_module(module), name))
        except (ImportError, AttributeError) as error:
            raise BadInputError(f"[model] tasks = {self.tasks!r}: {error}") from error


@dataclass(frozen=True)
class EngineArm:
    """One engine: a release, its arguments and environment, and what is sent to it.

    `patch` names a change of the release that its process makes before the engine starts; empty for none.
    """

    name: str
    vllm: str
    engine: Mapping[str, Any]
    env: Mapping[str, str]
    workload: Workload
    reference: str = ""
    says: str = ""
    patch: str = ""

    def config(self) -> dict[str, Any]:
        """All of it, in JSON form; without `patch` where there is none, as in results that are older than it."""
        return {
            "vllm": self.vllm,
            "engine": dict(self.engine),
            "env": dict(self.env),
            "workload": self.workload.as_dict(),
            **({"patch": self.patch} if self.patch else {}),
        }


@dataclass(frozen=True)
class Pair:
    """Two arms that are compared, and the one variable in which they differ."""

    left: str
    right: str
    variable: str
    question: str = ""


@dataclass(frozen=True)
class Experiment:
    """All arms of an incident. `runs` are those of an arm; run i has the same requests in all arms of a workload."""

    incident: str
    question: str
    model: ServedModel
    arms: tuple[EngineArm, ...]
    pairs: tuple[Pair, ...]
    runs: int = LEAST_RUNS
    seed: int = 0
    start_timeout_s: float = 300.0
    run_timeout_s: float = 60.0
    notes: tuple[str, ...] = ()

    def arm(self, name: str) -> EngineArm:
        """The arm of that name. Raises BadInputError for another one."""
        for arm in self.arms:
            if arm.name == name:
                return arm
        raise BadInputError(f"no arm {name!r}; known: {', '.join(arm.name for arm in self.arms)}")


def load(slug_or_file: str, root: Path | None = None) -> Experiment:
    """The arms of an incident, or of a TOML file; `root` is the investigations folder.

    Raises BadInputError that names the file and what is wrong, UnavailableError when it cannot be read.
    """
    given = Path(slug_or_file)
    path = given if given.suffix == ".toml" else (root or facts.find_root()) / slug_or_file / FILE_NAME
    try:
        data = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UnavailableError(
            f"cannot read {path}: {error.strerror or error}; incidents with engines: {', '.join(with_arms(root))}"
        ) from error
    except ValueError as error:
        raise BadInputError(f"{path} is not TOML: {error}") from error
    try:
        return parse(data)
    except BadInputError as error:
        raise BadInputError(f"{path}: {error}") from error


def with_arms(root: Path | None = None) -> list[str]:
    """Slugs of the incidents that have an `engine.toml`."""
    return sorted(path.parent.name for path in (root or facts.find_root()).glob(f"*/{FILE_NAME}"))


def parse(data: Mapping[str, Any]) -> Experiment:
    """An experiment from the tables of its file. Raises BadInputError for what does not fit."""
    _typed(data, TOP_KINDS, "")
    for name in ("incident", "question", "model", "base", "arms"):
        if not data.get(name):
            raise BadInputError(f"{name} is missing")
    workloads = {}
    for name, table in data.get("workloads", {}).items():
        workloads[name] = {**_table(table, f"[workloads.{name}]"), "name": name}
    _typed(data["base"], BASE_KINDS, "[base]: ")
    arms = tuple(_arm(data["base"], _table(table, "[[arms]]"), workloads) for table in data["arms"])
    names = [arm.name for arm in arms]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise BadInputError(f"arm {twice[0]!r} is there twice")
    _typed(data["model"], MODEL_KINDS, "[model]: ")
    given = {name: data[name] for name in GIVEN if name in data}
    notes = tuple(str(note) for note in data.get("notes", ()))
    model = ServedModel(**data["model"])
    found = Experiment(data["incident"], data["question"], model, arms, (), notes=notes, **given)
    _check(found)
    pairs = [_pair(found, _table(table, "[[pairs]]")) for table in data.get("pairs", [])]
    return replace(found, pairs=tuple(pairs))


def _table(value: Any, where: str) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise BadInputError(f"{where} holds {value!r}; give a table")
    return value


def _typed(table: Mapping[str, Any], kinds: Mapping[str, Kinds], where: str) -> None:
    """Raises BadInputError for a key that is not among `kinds`, or whose value is of another kind."""
    if unknown := sorted(set(table) - set(kinds)):
        raise BadInputError(f"{where}no key {unknown[0]!r}; known: {', '.join(sorted(kinds))}")
    for name, value in table.items():
        kind = kinds[name]
        if not isinstance(value, kind) or isinstance(value, bool):
            raise BadInputError(f"{where}{name} = {value!r}; give {WORDS[kind]}")


def _check(found: Experiment) -> None:
    if found.runs < LEAST_RUNS:
        raise BadInputError(f"runs = {found.runs}; an arm needs at least {LEAST_RUNS}")
    for name in ("start_timeout_s", "run_timeout_s"):
        if not 0 < (limit := getattr(found, name)) < float("inf"):
            raise BadInputError(f"{name} = {limit}; give a number of seconds above 0")
    for arm in found.arms:
        if not arm.reference:
            continue
        if arm.engine.get("speculative_config") is None:
            raise BadInputError(f"arm {arm.name}: it does not speculate, so it is its own reference")
        if arm.workload.temperature:
            raise BadInputError(
                f"arm {arm.name}: sampled answers cannot be compared; no reference goes with it"
            )
        if (variable := difference(arm, found.arm(arm.reference))) != SPECULATION:
            raise BadInputError(
                f"arm {arm.name}: its reference {arm.reference} differs in {variable}, not in {SPECULATION} alone"
            )


def _pair(found: Experiment, table: Mapping[str, Any]) -> Pair:
    _typed(table, PAIR_KINDS, "[[pairs]]: ")
    left, right = found.arm(table.get("left", "")), found.arm(table.get("right", ""))
    return Pair(left.name, right.name, difference(left, right), table.get("question", ""))


def difference(left: EngineArm, right: EngineArm) -> str:
    """The one variable in which two arms differ. Raises BadInputError when they differ in none or in several."""
    found = differences(left, right)
    if len(found) != 1:
        told = ", ".join(found) or "nothing"
        raise BadInputError(
            f"arms {left.name} and {right.name} differ in {told}; compared arms differ in one variable"
        )
    return found[0]


def differences(left: EngineArm, right: EngineArm) -> list[str]:
    """Dotted names of all variables in which two arms differ."""
    skipped = {"workload.name", "workload.source"}
    return [name for name in _differing("", left.config(), right.config()) if name not in skipped]


def _differing(head: str, left: Mapping[str, Any], right: Mapping[str, Any]) -> list[str]:
    found: list[str] = []
    for name in sorted({*left, *right}):
        a, b = left.get(name), right.get(name)
        if isinstance(a, Mapping) and isinstance(b, Mapping):
            found += _differing(f"{head}{name}.", a, b)
        elif a != b:
            found.append(f"{head}{name}")
    return found


def _arm(base: Mapping[str, Any], table: Mapping[str, Any], workloads: Mapping[str, Any]) -> EngineArm:
    _typed(table, ARM_KINDS, f"arm {table.get('name', '')}: ")
    name = table.get("name", "")
    if not re.fullmatch(r"[a-z0-9][a-z0-9.-]*", name):
        raise BadInputError(f"arm {name!r}: a name is of lower-case letters, digits, dots and hyphens")
    made = copy.deepcopy(dict(base))
    chosen = table.get("set", {}).get("workload", made.get("workload", ""))
    if not isinstance(chosen, str) or chosen not in workloads:
        raise BadInputError(f"arm {name}: no workload {chosen!r}; known: {', '.join(workloads)}")
    made["workload"] = copy.deepcopy(workloads[chosen])
    for key, value in table.get("set", {}).items():
        if key != "workload":
            _put(made, key, value, name)
    for key in table.get("without", ()):
        _drop(made, str(key), name)
    return _built(name, made, table)


def _built(name: str, made: Mapping[str, Any], table: Mapping[str, Any]) -> EngineArm:
    _typed({**made, "workload": ""}, BASE_KINDS, f"arm {name}: ")
    if not re.fullmatch(r"\d+\.\d+\.\d+\w*", str(made.get("vllm", ""))):
        raise BadInputError(f"arm {name}: vllm = {made.get('vllm')!r}; give a release like {NEWEST}")
    env = {str(key): str(value) for key, value in made.get("env", {}).items()}
    workload = Workload.from_dict(made["workload"])
    engine = {**ALWAYS_ENGINE, **made.get("engine", {})}
    longest = engine.get("max_model_len")
    if longest is not None and not isinstance(longest, int):
        raise BadInputError(f"arm {name}: max_model_len = {longest!r}; give a whole number")
    if longest is not None and workload.longest > longest:
        raise BadInputError(
            f"arm {name}: requests of up to {workload.longest} tokens do not fit max_model_len = {longest}"
        )
    if workload.draft_delay_us[1] and (why := _no_draft_pass(engine)):
        raise BadInputError(f"arm {name}: workload.draft_delay_us {why}, or give [0, 0]")
    if (patch := made.get("patch", "")) not in ("", *PATCHES):
        raise BadInputError(f"arm {name}: no patch {patch!r}; known: {', '.join(PATCHES)}")
    reference, says = table.get("reference", ""), table.get("says", "")
    return EngineArm(name, made["vllm"], engine, {**ALWAYS_ENV, **env}, workload, reference, says, patch)


def _no_draft_pass(engine: Mapping[str, Any]) -> str:
    """Why no work can be put in front of draft passes, as far as arguments tell; empty where nothing is against it."""
    speculation = engine.get("speculative_config")
    if not isinstance(speculation, Mapping):
        return f"needs draft passes; set {SPECULATION}"
    if (method := speculation.get("method")) in NO_DRAFT_MODEL:
        return f"needs a model that drafts; method {method} has none: set another one"
    if engine.get("enforce_eager") is not True or speculation.get("enforce_eager") is False:
        return "needs draft passes that are Python calls; set engine.enforce_eager = true"
    return ""


def _put(made: dict[str, Any], key: str, value: Any, name: str) -> None:
    *path, last = key.split(".")
    at = made
    for part in path:
        at = at.setdefault(part, {})
        if not isinstance(at, dict):
            raise BadInputError(f"arm {name}: {key}: {part} is not a table")
    at[last] = value


def _drop(made: dict[str, Any], key: str, name: str) -> None:
    *path, last = key.split(".")
    try:
        del reduce(getitem, path, made)[last]
    except (KeyError, TypeError) as error:
        raise BadInputError(f"arm {name}: without {key}: the base has no such key") from error
