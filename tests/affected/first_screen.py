"""The first screen of a page as a reader meets it, held against data/exposure.csv; written apart from what makes it."""

import csv
import re
import shlex
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from html.parser import HTMLParser
from pathlib import Path

from specmortem.affected.matrix import Configuration

RELEASE = re.compile(r"(?<![\w.])\d+\.\d+\.\d+(?![\w.]*\d)")
FLAG = re.compile(r"(?<![\w-])--[a-z][\w.-]+|\bVLLM_[A-Z_0-9]+")
SAFEST = re.compile(
    r"One safe place\. At vLLM (\S+), (\d+) of (\d+) common launches reach no incident as they are(.*)\."
)
BLOCKS = {"p", "pre", "h2", "dt", "dd", "li", "th", "td"}


class Screen(HTMLParser):
    """(element, text) of each block of the section that is labelled Summary; `rows` are those of its table."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.fields: list[tuple[str, str]] = []
        self.rows: list[list[str]] = []
        self.inside, self.open = False, []
        self.feed(page)

    def handle_starttag(self, tag, attrs):
        self.inside |= tag == "section" and ("aria-label", "Summary") in attrs
        if self.inside and tag == "tr":
            self.rows.append([])
        if self.inside and tag in BLOCKS:
            self.open.append((tag, []))

    def handle_endtag(self, tag):
        self.inside &= tag != "section"
        if self.open and self.open[-1][0] == tag:
            text = " ".join("".join(self.open.pop()[1]).split())
            if tag in ("th", "td"):
                self.rows[-1].append(text)
            else:
                self.fields.append((tag, text))

    def handle_data(self, data):
        if self.open:
            self.open[-1][1].append(data)


class Cells:
    """data/exposure.csv: the answer by configuration, incident and release."""

    def __init__(self, table: Path | str) -> None:
        text = table.read_text() if isinstance(table, Path) else table
        self.answers = defaultdict(dict)
        for row in csv.DictReader(text.splitlines()):
            self.answers[row["configuration"], row["incident"]][row["release"]] = row["answer"]
        self.releases = list(next(iter(self.answers.values())))
        self.incidents = sorted({incident for _, incident in self.answers})
        self.names = sorted({name for name, _ in self.answers})

    def having(self, name: str, incident: str, answer: str) -> set[str]:
        """Releases with this answer."""
        return {release for release, found in self.answers[name, incident].items() if found == answer}

    def hit(self, name: str, release: str) -> list[str]:
        """Incidents that are not ruled out there."""
        return [one for one in self.incidents if self.answers[name, one].get(release) != "not-affected"]

    def told(self, text: str) -> set[str]:
        """The releases of `0.19.1 to 0.23.0, 0.28.0`."""
        found = set()
        for part in filter(None, text.strip(" ✗–\xa0").split(", ")):
            ends = [self.releases.index(end) for end in part.split(" to ")]
            found |= set(self.releases[ends[0] : ends[-1] + 1])
        return found


def contradictions(page: str, slug: str, cells: Cells, launches: Sequence[Configuration]) -> list[str]:
    """What the first screen of an incident says of a release or a flag that the table does not."""
    screen = Screen(page)
    known = {each.shown: each for each in launches}
    found = list(_rows(screen.rows[1:], slug, cells, known))
    for tag, text in screen.fields:
        found += _field(tag, text, slug, cells, launches)
    return found


def _rows(
    rows: Sequence[Sequence[str]], slug: str, cells: Cells, known: dict[str, Configuration]
) -> Iterator[str]:
    count = 0
    for shown, affected, unknown, safe in rows:
        launch, _, alike = shown.partition(" and ") if shown.endswith(" alike") else (shown, "", "")
        if launch not in known:
            launch, _, alike = shown.rpartition(" and ")
        count += 1 + int(alike.removesuffix(" alike") or 0)
        one = known[launch]
        for text, answer in ((affected, "affected"), (unknown, "unknown")):
            if cells.told(text) != cells.having(one.name, slug, answer):
                yield f"{launch}: {answer}: {text}"
        release, *flags = safe.split(" ", 1)
        if not flags and (hit := cells.hit(one.name, release)):
            yield f"{launch}: safe at {release}: reaches {', '.join(hit)}"
    reached = [name for name in cells.names if cells.having(name, slug, "affected")]
    if count != len(reached):
        yield f"{count} launches of {len(reached)} that are affected"


def _field(tag: str, text: str, slug: str, cells: Cells, launches: Sequence[Configuration]) -> Iterator[str]:
    if tag == "pre" and text.startswith("specmortem check"):
        yield from _example(text, slug, cells, launches)
    elif text.startswith("One safe place."):
        yield from _safest(text, cells)
    else:
        for sentence in re.split(r"(?<=[.!?;])\s+", text):
            yield from _sentence(sentence, slug, cells)


def _example(text: str, slug: str, cells: Cells, launches: Sequence[Configuration]) -> Iterator[str]:
    words = shlex.split(text)
    release, launch = (words[words.index(flag) + 1] for flag in ("--vllm", "--launch"))
    names = [each.name for each in launches if each.launch == launch]
    if not names or release not in cells.having(names[0], slug, "affected"):
        yield f"example: {release}: {launch}"


def _safest(text: str, cells: Cells) -> Iterator[str]:
    release, safe, launches, rest = SAFEST.fullmatch(text).groups()
    hit = Counter(" and ".join(found) for name in cells.names if (found := cells.hit(name, release)))
    told = {incidents: int(count) for count, incidents in re.findall(r"(\d+) (?:may )?reach ([\w -]+)", rest)}
    if (int(launches), int(safe)) != (len(cells.names), len(cells.names) - hit.total()) or told != dict(hit):
        yield text


def _sentence(text: str, slug: str, cells: Cells) -> Iterator[str]:
    """Prose names no release and no flag; what was shown names the release that it was shown on."""
    affected = {release for name in cells.names for release in cells.having(name, slug, "affected")}
    for release in RELEASE.findall(text):
        if not text.startswith("Shown ") or release not in affected:
            yield f"{release}: {text}"
    for flag in FLAG.findall(text):
        yield f"{flag}: {text}"
