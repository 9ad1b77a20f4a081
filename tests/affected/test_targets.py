"""Ways out: safe over all incidents when they are followed, and no cheaper one is missed."""

import functools
import itertools
import re
from dataclasses import replace

import pytest
from affected import home
from affected.launches import RELEASES, configs
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from specmortem.affected import matrix
from specmortem.affected.answers import answer, of_release, on_release
from specmortem.affected.changes import CHANGES
from specmortem.affected.released import KnownVerdict, Released, released
from specmortem.affected.targets import MOST_CHANGES, advise
from specmortem.exposure import Config
from specmortem.statements.launch import parse

NAMED = [each.name for each in matrix.configurations()]
OF = {each.name: each for each in matrix.configurations()}
DROPPED = "no --speculative-config"
ADDED = re.compile(r"--speculative-config '\{…, (.*)\}'")


def followed(launch: str, flags: tuple[str, ...]) -> str:
    """The command as an operator changes it."""
    for flag in flags:
        if flag == DROPPED:
            launch = re.sub(r" --speculative-config '[^']*'", "", launch)
        elif added := ADDED.fullmatch(flag):
            launch = re.sub(
                r"(--speculative-config '[^']*)\}'", lambda m, key=added[1]: f"{m[1]}, {key}}}'", launch
            )
        else:
            launch = f"{launch} {flag}"
    return launch


def read(launch: str, release: str, gpu: int | None) -> Config:
    return replace(parse(launch), version=release, gpu=gpu)


def ways(advice):
    return [target for target in (advice.stay, advice.move) if target]


@functools.cache
def advised(name, release):
    """Of a configuration of the matrix."""
    return advise(on_release(OF[name].config, release))


@pytest.mark.parametrize("name", NAMED)
def test_every_advice_is_safe_when_the_command_is_read_again(name):
    """From each release, over all incidents; the changed command is judged as `check` would."""
    one = OF[name]
    for release in RELEASES:
        found = ways(advised(name, release))
        assert found, release
        for target in found:
            again = answer(read(followed(one.launch, target.flags), target.release, one.config.gpu))
            unsafe = {each.incident: each.answer for each in again.incidents if each.answer != "not-affected"}
            assert unsafe == {}, (release, target.release, target.flags)


@pytest.mark.parametrize("name", NAMED)
def test_one_may_stay_only_where_nothing_is_reached(name):
    for release in RELEASES:
        config = on_release(OF[name].config, release)
        advice = advised(name, release)
        as_is = advice.stay is not None and not advice.stay.changes
        assert as_is == answer(config).safe
        assert advice.move is None or advice.move.release != release
        assert advice.best == (advice.stay if as_is else advice.move or advice.stay)


def test_a_launch_that_is_not_safe_is_not_called_so_by_the_comparison():
    """0.28.0 as it is: the command above, without the flags of an advice, is at fault."""
    one = OF["hybrid-mtp"]
    assert answer(read(followed(one.launch, ()), "0.28.0", one.config.gpu)).answer == "affected"
    assert followed(one.launch, (DROPPED, "--enforce-eager")) == "vllm serve Qwen/Qwen3.5-27B --enforce-eager"


def sets(config):
    """All sets of changes that fit, in no order, with their weight and the answer; written apart from the search."""
    fitting = [change for change in CHANGES if change.fits(config)]
    for number in range(MOST_CHANGES + 1):
        for chosen in itertools.combinations(fitting, number):
            changed = config
            for change in chosen:
                changed = change.applied(changed)
            yield sum(change.weight for change in chosen), answer(changed).safe


def least(config):
    return min((weight for weight, safe in sets(config) if safe), default=None)


def weight(target):
    return None if target is None else sum(change.weight for change in target.changes)


SAMPLE = [
    ("hybrid-mtp", "0.28.0"),
    ("hybrid-mtp-block-size", "0.31.0"),
    ("hybrid-mtp-pipeline-v2-cached", "0.25.1"),
    ("hybrid-mtp-flashinfer-v1", "0.33.0"),
    ("dense-eagle-flashinfer", "0.20.2"),
    ("hybrid-dflash", "0.28.0"),
    ("dense-dflash", "0.33.0"),
    ("hybrid-mtp-fp8", "0.19.1"),
]


@pytest.mark.parametrize(("name", "release"), SAMPLE)
def test_no_cheaper_way_out_and_no_nearer_one_is_missed(name, release):
    config = on_release(OF[name].config, release)
    advice = advise(config)
    assert weight(advice.stay) == least(config)
    found = {other: least(on_release(config, other)) for other in RELEASES if other != release}
    cheapest = min(each for each in found.values() if each is not None)
    assert weight(advice.move) == cheapest
    here = RELEASES.index(release)
    equal = [RELEASES.index(other) for other, each in found.items() if each == cheapest]
    newer = [place for place in equal if place > here]
    assert advice.move.release == RELEASES[min(newer) if newer else max(equal)]


@settings(max_examples=60, deadline=None)
@given(config=configs(), release=st.sampled_from(RELEASES))
def test_advice_for_any_launch_is_safe_and_its_flags_are_what_was_judged(config, release):
    config = replace(config, version=release)
    for target in ways(advise(config)):
        assert target.answers.safe
        assert target.answers.config.version == target.release
        assert len(target.flags) == len(set(target.flags)) == len(target.changes)
        assert answer(target.answers.config).safe
        assert target.cost.count(";") >= len(target.changes) - 1


@settings(max_examples=60, deadline=None)
@given(config=configs())
def test_a_change_leaves_the_rest_of_a_launch_as_it_is(config):
    for change in CHANGES:
        if change.fits(config):
            changed = change.applied(config)
            assert replace(
                changed, **{name: getattr(config, name) for name in [*change.fields, "sources", "prose"]}
            ) == (config)
            assert not change.fields.keys() & changed.prose


@settings(max_examples=60, deadline=None)
@given(config=configs())
def test_speculation_is_turned_off_only_where_the_model_brings_no_drafter(config):
    [off] = [change for change in CHANGES if change.flags(config) == (DROPPED,)]
    assume(off.fits(config))
    assert config.own_drafter is False or config.model in (
        "Qwen/Qwen3.5-27B",
        "nvidia/Nemotron-H-8B",
        "meta-llama/Llama-3.3-70B-Instruct",
    )


@pytest.mark.parametrize(("model", "offered"), [("Qwen/Qwen3.6-35B-A3B", True), ("org/finetune", False)])
def test_a_model_that_may_name_a_drafter_is_not_told_to_drop_the_flag(model, offered):
    found = parse(
        f"vllm serve {model} --speculative-config.method dflash --speculative-config.num_speculative_tokens 3"
    )
    assert any(change.flags(found) == (DROPPED,) and change.fits(found) for change in CHANGES) == offered


@pytest.mark.parametrize(
    ("release", "runner", "flag"),
    [
        ("0.20.2", "v1", "--attention-backend FLASH_ATTN"),
        ("0.21.0", "v1", '--speculative-config \'{…, "attention_backend": "FLASH_ATTN"}\''),
        ("0.29.0", "v2", "--attention-backend FLASH_ATTN"),
        ("0.30.0", "v2", '--speculative-config \'{…, "attention_backend": "FLASH_ATTN"}\''),
    ],
)
def test_the_backend_of_the_drafter_is_set_where_its_release_reads_it(release, runner, flag):
    config = Config(
        version=release, runner=runner, speculation="mtp", attention="FLASHINFER", complete=True, gpu=80
    )
    [change] = [each for each in CHANGES if "FLASH_ATTN" in each.flags(config)[0] and each.fits(config)]
    assert change.flags(config) == (flag,)


def book(**statuses):
    """A record of two releases, where each cause is clean but for those named."""
    known = released()
    causes = {cause for cause, _ in known.verdicts}
    rows = {
        (cause, release): KnownVerdict("clean", "a test")
        for cause in causes
        for release in ("1.0.0", "1.1.0")
    }
    rows |= {
        (name.replace("_", "-"), "1.0.0"): KnownVerdict(status, "a test") for name, status in statuses.items()
    }
    return Released(rows, home.DAY)


def test_releases_are_those_of_the_record_that_is_given():
    config = Config(
        version="1.0.0", model="Qwen/Qwen3.5-27B", runner="v1", speculation="mtp", cache_mode="align"
    )
    config = replace(config, async_scheduling=True, max_num_seqs=8, drafts=2, gpu=90, attention="FLASH_ATTN")
    given = book(stale_count_align="fault")
    assert answer(config, of_release("1.0.0", given)).answer == "affected"
    assert advise(config, given).move.release == "1.1.0"
    assert advise(replace(config, version="0.9.0"), book()).move.release == "1.0.0"


@pytest.mark.parametrize("release", ["", "main", "a-build"])
def test_a_launch_of_no_known_release_is_sent_to_the_newest(release):
    config = on_release(OF["hybrid-plain"].config, release)
    newest = max(r for r in range(len(RELEASES)) if answer(on_release(config, RELEASES[r])).safe)
    assert advise(config).move.release == RELEASES[newest]


def test_a_release_between_two_on_record_goes_to_the_next_newer_one():
    config = on_release(OF["dense-plain"].config, "0.22.9")
    assert advise(config).move.release == "0.23.0"
