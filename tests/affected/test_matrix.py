"""data/exposure.csv: what is computed, against a reader of the audit that shares nothing with it."""

import csv
from collections import defaultdict

import pytest
from affected import home

from specmortem.affected import matrix
from specmortem.affected.answers import answer, on_release
from specmortem.affected.matrix import Stretch
from specmortem.affected.released import AUDIT, ON_GPU, KnownVerdict
from specmortem.exposure import Resolved
from specmortem.incident import all_incidents, all_slugs, rules

TEXT = (home.ROOT / matrix.FILE).read_text(encoding="utf-8")
AGAIN = "from specmortem.affected import matrix as m; open(m.FILE, 'w').write(m.as_csv()) writes it again"
ROWS = list(csv.DictReader(TEXT.splitlines()))


def audited():
    """(cause, release) -> status: the GPU's where the CPU has none."""
    found = {}
    for name in (AUDIT, ON_GPU):
        for row in csv.DictReader((home.ROOT / name).read_text(encoding="utf-8").splitlines()):
            key = row["cause"], row["version"]
            if found.get(key, "not-judged") == "not-judged":
                found[key] = row["status"]
    return found


AUDITED = audited()
INCIDENT_OF = {cause: slug for slug, one in all_incidents().items() for cause in one.exposure}


def test_the_table_is_what_is_computed():
    assert matrix.as_csv() == TEXT, AGAIN


def test_every_launch_has_a_cell_for_each_release_and_incident():
    keys = [(row["configuration"], row["release"], row["incident"]) for row in ROWS]
    releases = {release for _, release in AUDITED}
    assert len(keys) == len(set(keys)) == len(matrix.configurations()) * len(releases) * len(all_slugs())
    dates = [line.split(",")[0] for line in (home.ROOT / AUDIT).read_text(encoding="utf-8").splitlines()[1:]]
    assert {row["date"] for row in ROWS} == {max(dates)}


def status(cause, release, launch):
    """The verdict by the audit alone; a chain is put together here again."""
    rule = rules()[cause]
    if not rule.links:
        return AUDITED.get((cause, release), "not-judged")
    worst = [max((link(each, release, launch) for each in group), default=2) for group in rule.links]
    return {0: "clean", 1: "not-judged", 2: "fault"}[min(worst)]


def link(cause, release, launch):
    """0 cannot take part, 2 does, 1 not known."""
    reach, verdict = rules()[cause].of(launch).reachable, status(cause, release, launch)
    if reach == "no" or verdict in ("clean", "not-present"):
        return 0
    return 2 if (reach, verdict) == ("yes", "fault") else 1


@pytest.mark.parametrize("name", [each.name for each in matrix.configurations()])
def test_cells_agree_with_the_audit(name):
    config = next(each.config for each in matrix.configurations() if each.name == name)
    for row in (row for row in ROWS if row["configuration"] == name):
        launch = Resolved(on_release(config, row["release"]))
        found = defaultdict(list)
        for cause, rule in rules().items():
            if INCIDENT_OF[cause] == row["incident"] and rule.effect in ("crash", "text", "drafts"):
                verdict, reach = status(cause, row["release"], launch), rule.of(launch).reachable
                clean = verdict in ("clean", "not-present") or reach == "no"
                hit = (verdict, reach) == ("fault", "yes")
                found["not-affected" if clean else "affected" if hit else "unknown"].append(cause)
        worst = next(each for each in ("affected", "unknown", "not-affected") if found[each])
        told = sorted(found[worst]) if worst != "not-affected" else []
        assert (row["answer"], sorted(row["causes"].split())) == (worst, told), row


@pytest.mark.parametrize("release", ["0.19.0", "0.25.0", "0.34.0", "1.0.0"])
@pytest.mark.parametrize("name", ["hybrid-mtp", "hybrid-dflash", "dense-plain"])
def test_what_no_probe_covers_is_unknown(release, name):
    config = next(each.config for each in matrix.configurations() if each.name == name)
    found = answer(on_release(config, release))
    for one in found.incidents:
        expected = ["not-affected" if each.reach.reachable == "no" else "unknown" for each in one.causes]
        assert [each.answer for each in one.causes if not each.rule.links] == [
            told for each, told in zip(one.causes, expected, strict=True) if not each.rule.links
        ]
        assert one.answer in ("unknown", "not-affected")
    assert (found.answer == "unknown") == name.startswith("hybrid")


@pytest.mark.parametrize("row", ROWS[::41], ids=lambda row: " ".join(list(row.values())[1:4]))
def test_without_a_verdict_no_cell_that_may_be_reached_is_clean(row):
    config = next(each.config for each in matrix.configurations() if each.name == row["configuration"])
    found = answer(on_release(config, row["release"]), lambda cause: KnownVerdict("not-judged", "taken away"))
    [one] = [each for each in found.incidents if each.incident == row["incident"]]
    open_ = [each for each in one.causes if each.reach.reachable != "no" and not each.rule.links]
    assert one.answer == "unknown" if open_ else one.answer in ("unknown", "not-affected")
    assert row["answer"] != "affected" or one.answer == "unknown"


@pytest.mark.parametrize("slug", all_slugs())
def test_stretches_cover_every_release_once(slug):
    lines = matrix.lines(slug)
    assert lines
    for line in lines:
        covered = [release for each in line.stretches for release in each.releases]
        assert covered == [cell.release for cell in line.cells]
        assert line.affected
        assert all(a.answer != b.answer for a, b in zip(line.stretches, line.stretches[1:], strict=False))


@pytest.mark.parametrize("slug", all_slugs())
def test_affected_releases_are_those_of_some_launch(slug):
    told = {release for each in matrix.affected_releases(slug) for release in each.releases}
    assert told == {row["release"] for row in ROWS if (row["incident"], row["answer"]) == (slug, "affected")}


def test_a_stretch_in_words():
    assert Stretch("affected", ("0.1.0",)).text == "0.1.0"
    assert Stretch("affected", ("0.1.0", "0.2.0", "0.3.0")).text == "0.1.0 to 0.3.0"


def test_each_launch_is_read_whole():
    """What is not read of a launch would leave its cells to defaults."""
    for each in matrix.configurations():
        assert each.config.complete, each.name
        assert each.config.unknown == ()
        assert each.config.gpu, each.name
        assert each.config.prose == frozenset()
