"""Result types: what a probe or an arm says, and the file that holds it.

Nothing in here imports torch, so that readers of results need no accelerator stack.
"""

from __future__ import annotations

import json
import os
import platform
import tempfile
from collections.abc import Iterable, Mapping
from importlib import metadata
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

import msgspec
from msgspec import Meta

from specmortem.convert import Count, Text, Value
from specmortem.errors import BadInputError, UnavailableError

Outcome = Literal["fault", "clean", "not-judged"]
DeviceKind = Literal["sim", "cuda"]
Slug = Annotated[str, Meta(pattern=r"^[a-z0-9]+(-[a-z0-9]+)*$")]
Subject = Annotated[
    str,
    Meta(
        pattern=r"^(before|after|installed|(vllm|flashinfer)==[0-9][0-9a-zA-Z.+]*|tree:.+|[a-z][a-z0-9-]*)$"
    ),
]


class Evidence(Value, frozen=True, omit_defaults=True):
    """Why an outcome is what it is.

    `witness` is the input that shows it, `place` the kernel and source line, `reason` the one-line account that a
    table shows; `not-judged` must give a `reason`. `detail` holds anything else that JSON can hold.
    """

    witness: str = ""
    observed: str = ""
    expected: str = ""
    place: str = ""
    reason: str = ""
    detail: Mapping[str, Any] = {}


class Verdict(Value, frozen=True):
    """What a probe says about one subject on the inputs it tried."""

    outcome: Outcome
    evidence: Evidence = Evidence()

    def __post_init__(self) -> None:
        """Refuse a verdict outside the vocabulary, or one that does not say why it was not judged."""
        if self.outcome not in get_args(Outcome):
            raise BadInputError(f"outcome {self.outcome!r} is not one of {', '.join(get_args(Outcome))}")
        if self.outcome == "not-judged" and not self.evidence.reason:
            raise BadInputError(
                "a verdict 'not-judged' needs evidence.reason: say why it could not be judged"
            )

    @classmethod
    def not_judged(cls, reason: str, **detail: Any) -> Verdict:
        """A verdict that says only why there is none."""
        return cls("not-judged", Evidence(reason=reason, detail=detail))


class Row(Value, frozen=True):
    """One line of a result file: a cause, run on a subject in an arm.

    `subject` is the code under test (`before`, `after`, `vllm==X`, `flashinfer==X`, `installed`, `tree:DIR`), `arm`
    the configuration it ran under. `runs` counts launches or states, `faults` those of them that faulted.
    """

    cause: Text
    arm: Text
    subject: Subject
    outcome: Outcome
    runs: Count
    faults: Count
    seed: int | None = None
    evidence: Evidence = Evidence()

    def __post_init__(self) -> None:
        """Refuse rows that contradict themselves."""
        Verdict(self.outcome, self.evidence)
        if not 0 <= self.faults <= self.runs:
            raise BadInputError(
                f"row {self.cause}/{self.arm}/{self.subject}: {self.faults} faults in {self.runs} runs"
            )
        if (self.outcome == "not-judged") != (self.runs == 0):
            raise BadInputError(
                f"row {self.cause}/{self.arm}/{self.subject}: outcome {self.outcome} with {self.runs} runs"
            )
        if (self.outcome == "fault") != (self.faults > 0):
            raise BadInputError(
                f"row {self.cause}/{self.arm}/{self.subject}: outcome {self.outcome} with {self.faults} faults"
            )

    @classmethod
    def of(
        cls,
        verdict: Verdict,
        *,
        cause: str,
        arm: str,
        subject: str,
        runs: int = 1,
        faults: int | None = None,
        seed: int | None = None,
    ) -> Row:
        """A row from a verdict; without `faults` a faulting verdict counts one."""
        judged = verdict.outcome != "not-judged"
        count = faults if faults is not None else int(verdict.outcome == "fault")
        return cls(cause, arm, subject, verdict.outcome, runs if judged else 0, count, seed, verdict.evidence)


class DeviceInfo(Value, frozen=True):
    """The device that rows were measured on."""

    kind: DeviceKind
    name: Text
    driver: str = ""


class Results(Value, frozen=True, tag_field="schema", tag=1):
    """The content of a `results.json`."""

    incident: Slug
    device: DeviceInfo
    rows: tuple[Row, ...]
    versions: Mapping[str, str] = msgspec.field(default_factory=lambda: versions())

    def __post_init__(self) -> None:
        """Refuse results that do not say which Python they come from."""
        if "python" not in self.versions:
            raise BadInputError("versions: python is missing")

    def where(self, **equal: Any) -> tuple[Row, ...]:
        """Rows whose fields equal the given values, e.g. `where(subject="after", outcome="fault")`."""
        return tuple(r for r in self.rows if all(getattr(r, k) == v for k, v in equal.items()))

    def as_dict(self) -> dict[str, Any]:
        """JSON form, with the rows last."""
        made = super().as_dict()
        return made | {"rows": made.pop("rows")}

    def save(self, path: Path) -> Path:
        """Write the file whole or not at all.

        Raises UnavailableError when the folder or the disk refuses.
        """
        return write_atomically(path, json.dumps(self.as_dict(), indent=1, ensure_ascii=False) + "\n")

    @classmethod
    def load(cls, path: Path) -> Results:
        """Read and check a result file.

        Raises BadInputError naming the file when it is not one.
        """
        return cls.from_dict(read_json(path, "specmortem run"), str(path))


def read_json(path: Path, command: str) -> Any:
    """What a result file holds; `command` writes such files.

    Raises UnavailableError when it cannot be read, BadInputError when it is not JSON.
    """
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UnavailableError(f"cannot read {path}: {error.strerror or error}") from error
    except ValueError as error:
        raise BadInputError(f"{path} is not JSON ({error}); run `{command}` again to write it") from error


def versions(packages: Iterable[str] = ("specmortem", "torch", "triton", "numpy", "vllm")) -> dict[str, str]:
    """Versions of Python and of those packages that are installed."""
    found = {"python": platform.python_version()}
    for name in packages:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def write_atomically(path: Path, text: str) -> Path:
    """Write `text` to `path` through a temporary file beside it: the old content or the new, never half.

    Raises UnavailableError when the folder cannot be made or written, or the disk is full.
    """
    temporary = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        Path(temporary).chmod(0o644)
        Path(temporary).replace(path)
    except OSError as error:
        if temporary is not None:
            Path(temporary).unlink(missing_ok=True)
        raise UnavailableError(
            f"cannot write {path}: {error.strerror or error}; nothing was written there, give another folder with --out"
        ) from error
    return path
