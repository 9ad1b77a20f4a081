"""A verdict that is changed by hand changes page, index and README, or stops the build in one line."""

import json

import pytest
from affected import home

BUILD = """
import hashlib, importlib.util, json, sys
sys.path.insert(0, sys.argv[1])
from report import toy_repository as toy
from specmortem import facts
from specmortem.affected.matrix import as_csv
from specmortem.incident import all_slugs
from specmortem.report.html import RunRecord, index_page, page
from specmortem.report.summary import summarize

spec = importlib.util.spec_from_file_location("readme", sys.argv[2])
readme = importlib.util.module_from_spec(spec)
spec.loader.exec_module(readme)
runs = {slug: RunRecord(slug, "passed", "2026-12-01") for slug in all_slugs()}
made = {slug: page(toy.notebook(), facts.load(slug), None, run) for slug, run in runs.items()}
made["index"] = index_page((run, summarize(facts.load(slug), None)) for slug, run in runs.items())
made["readme"], made["exposure"] = readme.text(), as_csv()
print(json.dumps(made))
"""


def built(where):
    return home.call(where, BUILD, str(home.ROOT / "tests"), str(home.ROOT / "docs" / "readme.py"))


@pytest.fixture(scope="module")
def before():
    done = built(home.ROOT)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_a_copy_of_the_facts_builds_the_same(tmp_path, before):
    assert json.loads(built(home.copied(tmp_path)).stdout) == before


FLIPS = [
    # a release that was clean: the default launch of that release is affected, and no advice leads there
    ("0.24.0", "stale-count-none", "fault", "async-accepted-counts"),
    ("0.29.0", "overlapping-shift", "fault", "pp-align-copy"),
    ("0.33.0", "zeroer-staging-reuse", "fault", "mtp-draft-loop"),
    # a release that was at fault
    ("0.28.0", "stale-count-align", "clean", "async-accepted-counts"),
    ("0.22.1", "stale-block-id", "not-judged", "dflash-oob"),
]


@pytest.mark.parametrize(("release", "cause", "status", "slug"), FLIPS)
def test_a_verdict_that_is_flipped_everywhere_changes_page_index_and_readme(
    tmp_path, before, release, cause, status, slug
):
    where = home.copied(tmp_path)
    home.flip_table(where, release, cause, status)
    if status != "not-judged":
        assert home.flip_runs(where, release, cause, status)
    done = built(where)
    assert done.returncode == 0, done.stderr
    after = json.loads(done.stdout)
    changed = {name for name in before if before[name] != after[name]}
    assert {slug, "index", "exposure"} <= changed
    assert "readme" in changed or status == "not-judged"


@pytest.mark.parametrize(
    ("release", "cause", "status", "slug"), [each for each in FLIPS if each[2] != "not-judged"]
)
@pytest.mark.parametrize("where_flipped", ["run", "table"])
def test_a_verdict_that_is_flipped_in_one_place_stops_the_build(
    tmp_path, release, cause, status, slug, where_flipped
):
    where = home.copied(tmp_path)
    if where_flipped == "run":
        assert home.flip_runs(where, release, cause, status)
    else:
        home.flip_table(where, release, cause, status)
    done = home.call(where, "from specmortem.cli import main; main()", "incidents")
    assert done.returncode == 2
    [line] = done.stderr.splitlines()
    assert f"investigations/{slug}/runs/" in line
    assert line.endswith(f"judge it again: specmortem audit vllm=={release} --cause {cause}")
