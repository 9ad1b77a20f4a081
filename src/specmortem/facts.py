"""The facts of one incident, read from `investigations/<slug>/incident.toml` and checked.

Nothing is accepted that a page could not stand behind: a claim has a grade and a source, a reference has a
target, a key that the format does not know is an error.
"""

from __future__ import annotations

import os
import tomllib
import types
from collections.abc import Iterable, Mapping
from dataclasses import MISSING, dataclass, field, fields, is_dataclass
from datetime import date
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

from packaging.specifiers import InvalidSpecifier, SpecifierSet
from packaging.version import Version

from specmortem.errors import BadInputError, UnavailableError

SCHEMA_VERSION = 1
FILE_NAME = "incident.toml"
HOME_VARIABLE = "SPECMORTEM_HOME"
FOLDERS_VARIABLE = "SPECMORTEM_INCIDENTS"
Grade = Literal["demonstrated", "reproduced", "reported", "open"]
HypothesisVerdict = Literal["supported", "refuted", "open"]
Needs = Literal["cpu", "gpu"]
Lines = tuple[str, ...]
T = TypeVar("T")

GRADE_MEANING: Mapping[Grade, str] = types.MappingProxyType(
    {
        "demonstrated": "shown on the real released code",
        "reproduced": "shown on this package's own before and after code, not on a release",
        "reported": "public reports say so; not shown here",
        "open": "not established",
    }
)


@dataclass(frozen=True)
class Impact:
    """Who was hit, and what to do about it tonight."""

    who: Lines
    symptom: Lines
    exposed: Lines
    tonight: Lines
    not_exposed: Lines = ()


@dataclass(frozen=True)
class TimelineEvent:
    """One dated line of the timeline."""

    date: str
    what: str
    source: str


@dataclass(frozen=True)
class Hypothesis:
    """A proposed cause; `causes` name the result rows that decide it."""

    id: str
    statement: str
    verdict: HypothesisVerdict
    because: str
    causes: Lines = ()


@dataclass(frozen=True)
class Claim:
    """A sentence that the postmortem stands behind, with how well it is backed."""

    id: str
    text: str
    grade: Grade
    source: str
    cause: str = ""


@dataclass(frozen=True)
class Fix:
    """The release that carries the fix, and who says so; either may be unknown."""

    release: str = ""
    source: str = ""


@dataclass(frozen=True)
class Cause:
    """One mechanism; `affected` is a version specifier of vLLM, empty where unknown."""

    id: str
    title: str
    mechanism: str
    needs: Needs
    reached_by: str
    fixed: Fix | None = None
    affected: str = ""
    workarounds: Lines = ()

    def affects(self, release: str) -> bool | None:
        """Whether the file says that this vLLM release has the cause; None where it does not say."""
        if not self.affected:
            return None
        return SpecifierSet(self.affected).contains(Version(release), prereleases=True)


@dataclass(frozen=True)
class Workaround:
    """Something an operator can do, what it costs and who verified it."""

    id: str
    action: str
    cost: str
    verified_by: str
    grade: Grade
    source: str


@dataclass(frozen=True)
class OpenQuestion:
    """What is not known, and what would settle it."""

    question: str
    settles: str


@dataclass(frozen=True)
class Facts:
    """The whole of an `incident.toml`; `grade` is the grade of its main claim."""

    schema: int
    slug: str
    title: str
    summary: str
    grade: Grade
    status: str
    notebook: str
    impact: Impact
    environment: Mapping[str, str] = field(default_factory=dict)
    timeline: tuple[TimelineEvent, ...] = ()
    hypotheses: tuple[Hypothesis, ...] = ()
    claims: tuple[Claim, ...] = ()
    causes: tuple[Cause, ...] = ()
    workarounds: tuple[Workaround, ...] = ()
    open_questions: tuple[OpenQuestion, ...] = ()

    def cause(self, id: str) -> Cause:
        """The cause of that id. Raises BadInputError naming the known ones."""
        for cause in self.causes:
            if cause.id == id:
                return cause
        known = ", ".join(c.id for c in self.causes)
        raise BadInputError(f"incident {self.slug} has no cause {id!r}; it has: {known}")


def find_root(start: Path | None = None) -> Path:
    """The investigations folder: of $SPECMORTEM_HOME, else upwards from `start`, else of this checkout or wheel.

    Raises UnavailableError when there is none.
    """
    if home := os.environ.get(HOME_VARIABLE):
        if _holds_incidents(folder := Path(home).expanduser().resolve() / "investigations"):
            return folder
        raise UnavailableError(
            f"{HOME_VARIABLE}={home} holds no investigations/*/{FILE_NAME}; point it at a checkout"
        )
    here = (start or Path.cwd()).resolve()
    own = Path(__file__).resolve()
    for parent in (here, *here.parents, own.parents[2], own.with_name("bundled")):
        if _holds_incidents(folder := parent / "investigations"):
            return folder
    raise UnavailableError(
        f"no investigations/*/{FILE_NAME} from {here} upwards; run inside a checkout of specmortem, "
        f"or set {HOME_VARIABLE} to one"
    )


def folders() -> list[Path]:
    """Directories of $SPECMORTEM_INCIDENTS, separated like PATH, that hold incidents of others, a folder each.

    Raises BadInputError for one that is not a directory.
    """
    found = []
    for text in filter(None, os.environ.get(FOLDERS_VARIABLE, "").split(os.pathsep)):
        folder = Path(text).expanduser().resolve()
        if not folder.is_dir():
            raise BadInputError(f"{FOLDERS_VARIABLE}: {text} is not a directory")
        found.append(folder)
    return found


def homes(root: Path | None = None) -> dict[str, Path]:
    """The folder of each incident by slug, sorted: those under `root`, the investigations folder, and those of others.

    A folder of others is a Python package, so its name has underscores where the slug has hyphens.
    """
    found = {path.parent.name: path.parent for path in (root or find_root()).glob(f"*/{FILE_NAME}")}
    for folder in folders():
        found |= {path.parent.name.replace("_", "-"): path.parent for path in folder.glob(f"*/{FILE_NAME}")}
    return dict(sorted(found.items()))


def all_slugs(root: Path | None = None) -> list[str]:
    """Slugs of all incidents, sorted; `root` is the investigations folder."""
    return list(homes(root))


def notebook(facts: Facts, root: Path | None = None) -> Path:
    """The notebook of an incident: in its own folder where it brings one, else in notebooks/."""
    own = homes(root)[facts.slug] / facts.notebook
    return own if own.exists() else (root or find_root()).parent / "notebooks" / facts.notebook


def load(slug: str, root: Path | None = None) -> Facts:
    """Read and check one incident; `root` is the investigations folder.

    Raises BadInputError for an unknown slug (listing the known ones), or for the first thing wrong in the
    file (naming file, table and entry).
    """
    if slug not in (known := homes(root)):
        raise BadInputError(f"no incident {slug!r}; known: {', '.join(known) or 'none'}")
    path = known[slug] / FILE_NAME
    try:
        data = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UnavailableError(f"cannot read {path}: {error.strerror or error}") from error
    except ValueError as error:
        raise BadInputError(f"{path} is not TOML: {error}") from error
    incident = _build(Facts, data, f"{path}: top level")
    _check(incident, slug, str(path))
    return incident


def _holds_incidents(folder: Path) -> bool:
    return next(folder.glob(f"*/{FILE_NAME}"), None) is not None


def _build(kind: type[T], table: Any, where: str) -> T:
    """A dataclass from the TOML table at `where`, refusing unknown, missing and ill-typed keys."""
    if not isinstance(table, dict):
        raise BadInputError(f"{where}: expected a table, got {table!r}")
    hints = get_type_hints(kind)
    if unknown := sorted(set(table) - set(hints)):
        raise BadInputError(f"{where}: unknown key {unknown[0]!r}; known: {', '.join(hints)}")
    for f in fields(kind):  # type: ignore[arg-type]
        if f.name not in table and f.default is MISSING and f.default_factory is MISSING:
            raise BadInputError(f"{where}: {f.name} is missing")
    return kind(**{name: _convert(hints[name], value, where, name) for name, value in table.items()})


def _convert(hint: Any, value: Any, where: str, name: str) -> Any:
    """`value` as the field type `hint` asks for."""
    origin, args = get_origin(hint), get_args(hint)
    if hint is str:
        return _text(value, f"{where}: {name}")
    if hint is int:
        return value
    if origin is Literal:
        return _one_of(args, value, f"{where}: {name}")
    if hint == Lines:
        return tuple(_text(v, f"{where}: {name}") for v in (value if isinstance(value, list) else [value]))
    if origin is tuple:
        return _build_all(args[0], value, where, name)
    if origin is types.UnionType or is_dataclass(hint):
        return _build(args[0] if args else hint, value, _table(where, name))
    return _texts(value, _table(where, name))


def _build_all(kind: type[T], value: Any, where: str, name: str) -> tuple[T, ...]:
    """One dataclass for each entry of an array of tables."""
    if not isinstance(value, list):
        raise BadInputError(f"{where}: {name} must be an array of tables, [[{name}]]")
    return tuple(_build(kind, entry, _entry(where, name, n, entry)) for n, entry in enumerate(value, 1))


def _texts(value: Any, where: str) -> dict[str, str]:
    if not isinstance(value, dict):
        raise BadInputError(f"{where}: expected a table, got {value!r}")
    return {key: _text(text, f"{where}: {key}") for key, text in value.items()}


def _text(value: Any, where: str) -> str:
    if isinstance(value, date):
        return value.isoformat()
    if not isinstance(value, str) or not value.strip():
        raise BadInputError(f"{where} must be text that is not empty, got {value!r}")
    return value.strip()


def _one_of(allowed: Iterable[str], value: Any, where: str) -> str:
    if value not in allowed:
        raise BadInputError(f"{where} {value!r} is not one of {', '.join(allowed)}")
    return str(value)


def _table(where: str, name: str) -> str:
    """The place of a sub-table, as a reader of the file looks for it."""
    return f"{where.removesuffix(': top level')}: [{name}]"


def _entry(where: str, name: str, number: int, entry: Any) -> str:
    """The place of one entry of an array of tables."""
    id = entry.get("id") if isinstance(entry, dict) else None
    return f"{where.removesuffix(': top level')}: [[{name}]] {repr(id) if id else f'entry {number}'}"


def _check(incident: Facts, slug: str, file: str) -> None:
    """What types alone cannot say: schema, slug, ids, references and version specifiers."""
    if incident.schema != SCHEMA_VERSION:
        raise BadInputError(f"{file}: top level: schema {incident.schema!r} is not {SCHEMA_VERSION}")
    if incident.slug != slug:
        raise BadInputError(f"{file}: top level: slug {incident.slug!r} differs from its folder {slug!r}")
    for table in ("hypotheses", "claims", "causes", "workarounds"):
        _check_unique([entry.id for entry in getattr(incident, table)], f"{file}: [[{table}]]")
    causes, workarounds = ({e.id for e in t} for t in (incident.causes, incident.workarounds))
    for hypothesis in incident.hypotheses:
        _check_known(hypothesis.causes, causes, f"{file}: [[hypotheses]] {hypothesis.id!r}: causes")
    for claim in incident.claims:
        _check_known([claim.cause] if claim.cause else [], causes, f"{file}: [[claims]] {claim.id!r}: cause")
    for cause in incident.causes:
        _check_known(cause.workarounds, workarounds, f"{file}: [[causes]] {cause.id!r}: workarounds")
        _check_specifier(cause.affected, f"{file}: [[causes]] {cause.id!r}: affected")


def _check_unique(ids: list[str], where: str) -> None:
    for id in ids:
        if ids.count(id) > 1:
            raise BadInputError(f"{where} {id!r}: the id stands twice")


def _check_known(ids: Iterable[str], known: set[str], where: str) -> None:
    for id in ids:
        if id not in known:
            raise BadInputError(
                f"{where}: {id!r} is not defined; defined: {', '.join(sorted(known)) or 'none'}"
            )


def _check_specifier(text: str, where: str) -> None:
    try:
        SpecifierSet(text)
    except InvalidSpecifier as error:
        raise BadInputError(f"{where} {text!r} is not a version specifier such as '>=0.20.1'") from error
