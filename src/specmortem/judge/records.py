"""What a judgement asked of a tree, and whether another tree gives the same answers.

A probe asks for files, for the presence of files and for definitions with all that they need. `Recorded` notes each
answer. A verdict holds for every tree that gives the same ones: `same_files` compares what was read, byte for byte;
`same_code` compares the definitions, so that releases which moved lines share a verdict. Files that a probe read as
a whole must be equal in both.
"""

from __future__ import annotations

import ast
import hashlib
import platform
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

import specmortem
from specmortem.errors import SpecmortemError
from specmortem.incident import Incident
from specmortem.upstream import bodies, closure
from specmortem.upstream.errors import LiftError, NotPresentError, NotStoredError
from specmortem.upstream.tree import Tree
from specmortem.verdict import Verdict, versions

IMPORTS = re.compile(
    r"^\s*(?:from\s+(specmortem[\w.]*)\s+import\s+(?:\(([^)]*)\)|([\w ,]+))|import\s+(specmortem[\w.]*))",
    re.MULTILINE,
)


@dataclass(frozen=True)
class Question:
    """What a probe asks for: whether a tree `has` a file, all of a `file`, or a look-up of a definition.

    A look-up is a `closure` or a `body`, with the names that the caller provided.
    """

    kind: str
    path: str
    name: str = ""
    provided: tuple[str, ...] = ()

    @property
    def is_look_up(self) -> bool:
        """Whether it is about a definition."""
        return self.kind in ("closure", "body")


@dataclass
class Record:
    """What was asked, and the answers: digests of files and definitions, presence of files.

    `answers` are to what a probe asked for itself; `files` and `present` are all that they rest on.
    """

    files: dict[str, str] = field(default_factory=dict)
    present: dict[str, bool] = field(default_factory=dict)
    answers: dict[Question, str] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        """JSON form."""
        answers = [[q.kind, q.path, q.name, list(q.provided), a] for q, a in self.answers.items()]
        return {**vars(self), "answers": answers}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Record:
        """Inverse of `as_dict`."""
        answers = {Question(k, p, n, tuple(given)): a for k, p, n, given, a in data["answers"]}
        return cls(**{**data, "answers": answers})

    def same_files(self, digests: Digests) -> bool:
        """Whether a tree has and lacks the same files, with the same bytes; a file that is not here differs."""
        if any(digests.has(path) is not there for path, there in self.present.items()):
            return False
        return all(digests.of(path) == digest for path, digest in self.files.items())

    def same_code(self, other: Record) -> bool | None:
        """Whether the other answered all questions of this one in the same way; None where some were not asked."""
        if any(other.answers.get(question, answer) != answer for question, answer in self.answers.items()):
            return False
        return True if self.answers.keys() <= other.answers.keys() else None

    def add(self, other: Record) -> None:
        """Take in all that the other holds."""
        for name, part in vars(self).items():
            part |= getattr(other, name)

    def key(self) -> str:
        """One digest of all questions and answers."""
        return _text_digest(sorted(f"{question} {answer}" for question, answer in self.answers.items()))


class Digests:
    """Presence and digests of a tree's files, each looked up once."""

    def __init__(self, tree: Tree) -> None:
        """Of what lies on this machine: nothing is fetched for it where `tree` is a stored one."""
        self._tree = tree
        self._known: dict[str, str] = {}

    def has(self, path: str) -> bool:
        """Whether the tree has the file."""
        return self._tree.has(path)

    def of(self, path: str) -> str:
        """The digest of a file; empty where it is not to be had."""
        if path not in self._known:
            try:
                self._known[path] = digest_of(self._tree, path)
            except (SpecmortemError, OSError):
                self._known[path] = ""
        return self._known[path]


class Recorded(Tree):
    """A tree that notes what is asked of it. `wanted` are files that were asked for and not to be had here."""

    def __init__(self, tree: Tree, memo: dict[Question, Record] | None = None) -> None:
        """Everything is passed on to `tree`; `memo` holds look-ups that were made already."""
        super().__init__(tree.subject, tree.version, tree.root)
        self.tree, self.record = tree, Record()
        self.memo = {} if memo is None else memo
        self.wanted: list[str] = []
        self._depth = 0

    @property
    def bytes_moved(self) -> int:
        """Those of the tree behind."""
        return self.tree.bytes_moved

    def has(self, path: str) -> bool:
        """Passed on, and noted."""
        there = self.tree.has(path)
        self.record.present[path] = there
        self._note(Question("has", path), str(there))
        return there

    def fetch(self, paths: Iterable[str]) -> dict[str, Path]:
        """Passed on, and noted with the digests of the files."""
        wanted = list(paths)
        try:
            found = self.tree.fetch(wanted)
        except NotStoredError as error:
            self.wanted.append(error.path)
            raise
        for path, place in found.items():
            digest = _digest(place)
            self.record.files[path] = digest
            self.record.present[path] = True
            self._note(Question("file", path), digest)
        return found

    def _note(self, question: Question, answer: str) -> None:
        """An answer to the probe itself; one in the course of a look-up belongs to that."""
        if not self._depth:
            self.record.answers[question] = answer

    @contextmanager
    def asked(
        self, kind: str, path: str, name: str, provided: Collection[str] = ()
    ) -> Iterator[Callable[[Any], None]]:
        """Note the answer, or the error; what is read meanwhile belongs to the look-up.

        Of a closure, the body of what was asked for is an answer of its own, which another tree gives sooner.
        """
        question = Question(kind, path, name, tuple(sorted(provided)))

        def report(found: Any) -> None:
            if isinstance(found, closure.Closure):
                self.record.answers[Question("body", path, name)] = _answer(found.target.node)
            self.record.answers[question] = _answer(found)

        self._depth += 1
        try:
            yield report
        except SpecmortemError as error:
            if not self.wanted:
                self.record.answers[question] = _failed(error)
            raise
        finally:
            self._depth -= 1

    def ask(self, record: Record) -> None:
        """Ask this tree what another one was asked, until an answer is not the same.

        Raises UnavailableError when a file cannot be had.
        """
        for question in sorted(
            record.answers, key=lambda question: question.is_look_up
        ):  # what is cheap first
            if question.is_look_up:
                if question not in self.memo:
                    self.memo[question] = look_up(self.tree, question)
                self.record.add(self.memo[question])
            elif self.has(question.path) and question.kind == "file":
                self.fetch([question.path])
            if self.record.answers.setdefault(question, "") != record.answers[question]:
                return


def look_up(tree: Tree, question: Question) -> Record:
    """The record of one look-up.

    Raises UnavailableError when a file cannot be had.
    """
    alone = Recorded(tree)
    with suppress(NotPresentError, LiftError):
        if question.kind == "closure":
            closure.plan(alone, question.path, question.name, question.provided)
        else:
            with alone.asked(question.kind, question.path, question.name) as report:
                report(closure.find(alone, question.path, question.name)[1].node)
    alone.record.answers.setdefault(question, "error")
    return alone.record


def digest_of(tree: Tree, path: str) -> str:
    """SHA-256 of a file of the tree."""
    return _digest(tree.fetch([path])[path])


def _digest(place: Path) -> str:
    return hashlib.sha256(place.read_bytes()).hexdigest()


def _failed(error: SpecmortemError) -> str:
    return "absent" if isinstance(error, NotPresentError) else f"error {type(error).__name__}"


def _answer(found: Any) -> str:
    """Digest of a definition or of a closure: all code with decorators and annotations, and what names stand for."""
    if isinstance(found, ast.AST):
        return _text_digest([_exact(found)])
    parts = [f"{each.owner}.{each.name} {_exact(each.node)}" for each in found.definitions]
    binds = [step for step in found.steps if isinstance(step, closure.Bind)]
    return _text_digest(sorted({*parts, *(f"{step.name} is {_stands_for(step.target)}" for step in binds)}))


def _stands_for(target: closure.Target) -> str:
    match target:
        case closure.Defined():
            return f"the definition {target.owner}.{target.name}"
        case closure.Given():
            return f"given {target.name}"
        case closure.Missing():
            return "missing"
    return f"the import {target.module} {target.attribute}"


@lru_cache(maxsize=20_000)
def _exact(node: ast.AST) -> str:
    """A definition without positions, comments and docstrings; nothing else is left out."""
    bare = bodies.copied(node)
    for each in ast.walk(bare):
        if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) and ast.get_docstring(
            each
        ):
            each.body = each.body[1:]
    return _text_digest([ast.dump(bare)])


def _text_digest(parts: Iterable[str]) -> str:
    return hashlib.sha256("\n".join(parts).encode("utf-8", "surrogatepass")).hexdigest()


def judge_version(incident: Incident, device: str) -> str:
    """16 hex digits of all that a verdict rests on beside the tree: the probes' version, their code with all that it
    imports of this package, the interpreter, the libraries and the kind of device.
    """
    code = [_digest(path) for path in sorted(_imported_by(f"{incident.package}.probe"))]
    numbers = [f"{probe.cause} {probe.version}" for probe in incident.probes]
    used = [f"{name}={version}" for name, version in versions(("torch", "triton", "numpy")).items()]
    return _text_digest([*code, *numbers, *used, device, platform.machine()])[:16]


def _imported_by(module: str) -> set[Path]:
    """Files of this package that a module is made of, itself and the judging process among them."""
    root = Path(specmortem.__file__).parents[1]
    found: set[Path] = set()
    waiting = [module, "specmortem.judge.cell", "specmortem._forkserver"]
    while waiting:
        place = root / waiting.pop().replace(".", "/")
        for path in (place.with_suffix(".py"), place / "__init__.py"):
            if path not in found and path.is_file():
                found.add(path)
                for package, listed, names, plain in IMPORTS.findall(path.read_text(encoding="utf-8")):
                    parts = [name.strip().partition(" ")[0] for name in (listed or names).split(",")]
                    waiting += [
                        plain or package,
                        *(f"{package}.{name}" for name in parts if package and name),
                    ]
    return found


@dataclass(frozen=True)
class Known:
    """A verdict in the cache: of which cause, judged on which subject, and for which trees it holds."""

    cause: str
    subject: str
    verdict: Verdict
    record: Record

    def as_dict(self) -> dict[str, Any]:
        """JSON form."""
        return {**vars(self), "verdict": self.verdict.as_dict(), "record": self.record.as_dict()}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Known:
        """Inverse of `as_dict`."""
        found = {"verdict": Verdict.from_dict(data["verdict"]), "record": Record.from_dict(data["record"])}
        return cls(**{**data, **found})

    def verdict_on(self, subject: str) -> Verdict:
        """The verdict, with the name of `subject` where it names the one that was judged as the reason."""
        evidence, detail = self.verdict.evidence, dict(self.verdict.evidence.detail)
        if absent := detail.get("absent"):
            detail["absent"] = str(absent).replace(self.subject, subject)
        told = evidence.reason.replace(self.subject, subject)
        return self.verdict.replace(evidence=evidence.replace(reason=told, detail=detail))
