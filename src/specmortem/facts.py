"""The facts of one incident, read from `investigations/<slug>/incident.toml` and checked.

Nothing is accepted that a page could not stand behind: a claim has a grade and a source, a reference has a
target, a key that the format does not know is an error.
"""

from __future__ import annotations

import os
import re
import tomllib
import types
from collections.abc import Iterable, Iterator, Mapping
from datetime import date
from functools import cache
from importlib import metadata, util
from pathlib import Path
from typing import Any, Literal

from packaging.specifiers import InvalidSpecifier, SpecifierSet
from packaging.version import Version

from specmortem import convert
from specmortem.convert import Text, Value, build
from specmortem.errors import BadInputError, UnavailableError

FILE_NAME = "incident.toml"
HOME_VARIABLE = "SPECMORTEM_HOME"
FOLDERS_VARIABLE = "SPECMORTEM_INCIDENTS"
GROUP = "specmortem.incidents"  # of entry points, each an incident of another distribution
Grade = Literal["demonstrated", "reproduced", "reported", "open"]
# What a first screen may not say in words: a release, a flag, a variable.
ASSERTS = re.compile(r"(?<![\w.])\d+\.\d+\.\d+|(?<!\S)--[a-z][\w-]+|\bVLLM_[A-Z_]+")
HypothesisVerdict = Literal["supported", "refuted", "open"]
Needs = Literal["cpu", "gpu"]

GRADE_MEANING: Mapping[Grade, str] = types.MappingProxyType(
    {
        "demonstrated": "shown on the real released code",
        "reproduced": "shown on this package's own before and after code, not on a release",
        "reported": "public reports say so; not shown here",
        "open": "not established",
    }
)


class Lines(tuple[str, ...]):
    """Texts, given as a list or, where there is one, alone. Raises BadInputError for an empty one."""

    __slots__ = ()

    def __new__(cls, given: object = ()) -> Lines:
        """Take one text, or several."""
        texts: list[Any] = list(given) if isinstance(given, list | tuple) else [given]
        for text in texts:
            if not isinstance(text, str) or not text:
                raise BadInputError(f"must be text that is not empty, got {text!r}")
        return super().__new__(cls, texts)


class Impact(Value, frozen=True):
    """Who was hit and how it looks: `log` is a line to search for, `mechanism` two sentences, `notes` what explains.

    All but the notes stand on the first screen and name no release and no flag: those are computed.
    """

    who: Lines
    symptom: Lines
    log: Text
    mechanism: Text
    notes: Lines = Lines()


class TimelineEvent(Value, frozen=True):
    """One dated line of the timeline."""

    date: Text
    what: Text
    source: Text


class Hypothesis(Value, frozen=True):
    """A proposed cause; `causes` name the result rows that decide it."""

    id: Text
    statement: Text
    verdict: HypothesisVerdict
    because: Text
    causes: Lines = Lines()


class Claim(Value, frozen=True):
    """A sentence that the postmortem stands behind, with how well it is backed."""

    id: Text
    text: Text
    grade: Grade
    source: Text
    cause: Text = ""


class Fix(Value, frozen=True):
    """The release that carries the fix, and who says so; either may be unknown."""

    release: Text = ""
    source: Text = ""


class Cause(Value, frozen=True):
    """One mechanism; `affected` is a version specifier of vLLM, empty where unknown."""

    id: Text
    title: Text
    mechanism: Text
    needs: Needs
    reached_by: Text
    fixed: Fix | None = None
    affected: Text = ""
    workarounds: Lines = Lines()

    def affects(self, release: str) -> bool | None:
        """Whether the file says that this vLLM release has the cause; None where it does not say."""
        if not self.affected:
            return None
        return SpecifierSet(self.affected).contains(Version(release), prereleases=True)


class Workaround(Value, frozen=True):
    """Something an operator can do, what it costs and who verified it."""

    id: Text
    action: Text
    cost: Text
    verified_by: Text
    grade: Grade
    source: Text


class OpenQuestion(Value, frozen=True):
    """What is not known, and what would settle it."""

    question: Text
    settles: Text


class Facts(Value, frozen=True):
    """The whole of an `incident.toml`; `grade` is the grade of its main claim."""

    schema: Literal[1]
    slug: Text
    title: Text
    summary: Text
    grade: Grade
    status: Text
    notebook: Text
    impact: Impact
    environment: Mapping[str, Text] = {}
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
    Raises BadInputError for two folders of one slug.
    """
    found = {path.parent.name: path.parent for path in (root or find_root()).glob(f"*/{FILE_NAME}")}
    for home in _homes_of_others():
        slug = home.name.replace("_", "-")
        if found.setdefault(slug, home) != home:
            raise BadInputError(f"two incidents are called {slug!r}: {found[slug]} and {home}")
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
        data = _plain(tomllib.loads(path.read_text(encoding="utf-8")))
    except OSError as error:
        raise UnavailableError(f"cannot read {path}: {error.strerror or error}") from error
    except ValueError as error:
        raise BadInputError(f"{path} is not TOML: {error}") from error
    incident = build(Facts, data, lambda where: _place(str(path), data, where))
    _check(incident, slug, str(path))
    return incident


def _homes_of_others() -> list[Path]:
    return [*_announced(), *(path.parent for folder in folders() for path in folder.glob(f"*/{FILE_NAME}"))]


@cache
def _announced() -> tuple[Path, ...]:
    """The packages that other distributions announce, found without importing them."""
    found = []
    for point in metadata.entry_points(group=GROUP):
        try:
            spec = util.find_spec(point.module)
        except ImportError:
            spec = None
        if spec is None:
            raise BadInputError(f"entry point {point.name} of {GROUP}: there is no package {point.module}")
        places = map(Path, spec.submodule_search_locations or ())
        found += [place.resolve() for place in places if (place / FILE_NAME).is_file()]
    return tuple(found)


def _holds_incidents(folder: Path) -> bool:
    return next(folder.glob(f"*/{FILE_NAME}"), None) is not None


def _plain(value: Any) -> Any:
    """TOML with dates as text, and without the space around texts."""
    if isinstance(value, dict):
        return {name: _plain(each) for name, each in value.items()}
    if isinstance(value, list):
        return [_plain(each) for each in value]
    if isinstance(value, date):
        return value.isoformat()
    return value.strip() if isinstance(value, str) else value


def _place(file: str, data: Mapping[str, Any], path: convert.Path) -> str:
    """Where `path` is, as a reader of the file looks for it: table, entry, key."""
    parts: list[str] = [file]
    held: Any = data
    for n, part in enumerate(path):
        held = held[part] if isinstance(part, int) or part in held else None
        if isinstance(held, dict):
            parts.append(_entry(str(path[n - 1]), part, held) if isinstance(part, int) else f"[{part}]")
        elif not isinstance(held, list) or n == len(path) - 1:
            parts.append(str(part))
    if not any(part.startswith("[") for part in parts):
        parts.insert(1, "top level")
    return ": ".join(parts)


def _entry(name: str, number: int, entry: Mapping[str, Any]) -> str:
    """The place of one entry of an array of tables."""
    return f"[[{name}]] {repr(entry['id']) if entry.get('id') else f'entry {number + 1}'}"


def _check(incident: Facts, slug: str, file: str) -> None:
    """What types alone cannot say: slug, ids, references and version specifiers."""
    if incident.slug != slug:
        raise BadInputError(f"{file}: top level: slug {incident.slug!r} differs from its folder {slug!r}")
    for name, text in _first_screen(incident):
        if found := ASSERTS.search(text):
            raise BadInputError(
                f"{file}: {name}: {found[0]!r} says who is affected or what to do, which is computed; say it in notes"
            )
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


def _first_screen(incident: Facts) -> Iterator[tuple[str, str]]:
    """The sentences that a reader meets first, with their places."""
    impact = incident.impact
    yield from (("title", incident.title), ("summary", incident.summary))
    yield from (("[impact]: log", impact.log), ("[impact]: mechanism", impact.mechanism))
    for name in ("who", "symptom"):
        yield from ((f"[impact]: {name}", text) for text in getattr(impact, name))


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
