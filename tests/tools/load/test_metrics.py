"""Counters of /metrics: read as released servers write them, and collapse by its rule."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specmortem import upstream
from specmortem.errors import UnavailableError
from specmortem.tools.load.metrics import LINE, Acceptance, Counters, Window, collapse, parse

SCRAPE = """\
# HELP vllm:spec_decode_num_drafts_total Number of spec decoding drafts.
# TYPE vllm:spec_decode_num_drafts_total counter
vllm:spec_decode_num_drafts_total{engine="0",model_name="m"} 10.0
vllm:spec_decode_num_drafts_total{engine="1",model_name="m"} 5.0
vllm:spec_decode_num_drafts_created{engine="0",model_name="m"} 1.76e+09
vllm:spec_decode_num_draft_tokens_total{engine="0",model_name="m"} 30.0
vllm:spec_decode_num_accepted_tokens_total{engine="0",model_name="m"} 1.2e+01 1700000000
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="m",position="0"} 8.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="x,position=\\"9\\"",position="1"} 4.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="1",model_name="m",position="1"} 1.0
"""


def test_a_scrape():
    found = parse(SCRAPE, 3.0)
    assert found == Counters(3.0, 15.0, 30.0, 12.0, {0: 8.0, 1: 5.0})


@pytest.mark.parametrize(
    "text", ["", "python_info 1.0\n", "vllm:spec_decode_num_drafts_total{} NaN", "<html>"]
)
def test_no_counters(text):
    assert parse(text, 0.0) is None


@given(st.text() | st.builds("vllm:spec_decode_num_drafts_total{{{}}} {}\n".format, st.text(), st.text()))
def test_any_text_is_taken(text):
    parse(text, 0.0)


@pytest.mark.network
@pytest.mark.parametrize("version", ["0.23.0", "0.24.0", "0.27.1", "0.30.0", "0.33.0"])
def test_released_servers_declare_these_names(version):
    path = "vllm/v1/spec_decode/metrics.py"
    try:
        source = upstream.resolve(f"vllm=={version}").fetch([path])[path].read_text()
    except UnavailableError as error:
        pytest.skip(str(error))
    declared = set(re.findall(r'"(vllm:spec_decode_num_\w+)"', source))
    read = {name for name in declared if LINE.match(f"{name}_total 1.0")}
    assert declared == read and len(read) == 4
    assert '"position"' in source


def scrapes(*rates, drafts=100, tokens=3):
    """Counters after windows with these rates."""
    total, found = 0, [Counters(0.0)]
    for number, rate in enumerate(rates, 1):
        total += rate * drafts * tokens
        found.append(Counters(float(number), number * drafts, number * drafts * tokens, total))
    return found


def judged(*counters):
    acceptance = Acceptance()
    for each in counters:
        acceptance.add(each)
    return collapse(acceptance.windows, acceptance.overall)


@pytest.mark.parametrize(
    "rates, collapsed",
    [
        ([0.5, 0.5, 0.5, 0.26, 0.26], True),
        ([0.5, 0.5, 0.5, 0.31, 0.31], False),
        ([0.5, 0.5, 0.5, 0.1], False),
        ([0.5, 0.5, 0.5, 0.1, 0.5, 0.1, 0.5], False),
        ([0.5, 0.5, 0.1, 0.1], False),
        ([0.8, 0.6, 0.7, 0.5, 0.6, 0.5, 0.6], False),
        ([0.5, 0.5, 0.5, 0.5, 0.5, 0.0, 0.0, 0.5, 0.5], True),
        ([0.0, 0.0, 0.0, 0.0], True),
        ([0.0, 0.0, 0.0], False),
        ([0.02, 0.02, 0.02, 0.02, 0.02], False),
    ],
)
def test_collapse(rates, collapsed):
    assert bool(judged(*scrapes(*rates))) is collapsed


def test_windows_wait_until_they_hold_enough_drafts():
    acceptance = Acceptance()
    for each in scrapes(*[0.5] * 9, drafts=30):
        acceptance.add(each)
    assert [window.drafts for window in acceptance.windows] == [120, 120]
    assert acceptance.overall.drafts == 270


def test_a_restart_begins_anew():
    acceptance = Acceptance()
    for each in [*scrapes(0.5, 0.5, 0.5), *scrapes(0.5, 0.5)]:
        acceptance.add(each)
    assert len(acceptance.restarts) == 1
    assert [window.rate for window in acceptance.windows] == [0.5] * 5
    assert acceptance.overall.drafts == 500


def test_shares_by_position_and_length():
    acceptance = Acceptance()
    acceptance.add(Counters(0.0, 10, 30, 15, {0: 8.0, 1: 5.0, 2: 2.0}))
    acceptance.add(Counters(1.0, 110, 330, 165, {0: 88.0, 1: 55.0, 2: 22.0}))
    (window,) = acceptance.windows
    assert window.per_position == pytest.approx((0.8, 0.5, 0.2))
    assert (window.rate, window.length) == (0.5, 2.5)
    assert Window.from_dict(window.as_dict()) == window
