"""What the page says of a run, and how."""

import re

import pytest

from specmortem.report import figures
from specmortem.tools.load.metrics import Window
from specmortem.tools.load.outcome import Outcome, RequestRecord
from specmortem.tools.load.render import ROUND_COLUMNS, as_run, page, rounds
from specmortem.tools.load.result import AcceptedDrafts, Result, Status

from .servers import settings


def record(number, outcome=Outcome.OK, **more):
    some = {"status": 200, "max_tokens": 40, "completion_tokens": 40, "first_text_s": 0.25, **more}
    return RequestRecord(f"1-{number:03d}", 1, outcome, "", number / 10, 1.0, **some)


def result(*records, windows=(), **shape):
    return Result(
        status=Status.FINISHED,
        said="",
        command="specmortem load",
        started="2026-11-30T00:00:00+00:00",
        seconds=8.0,
        model="toy",
        settings=settings("http://127.0.0.1:8000", shape=shape).as_dict(),
        versions={},
        planned=len(records),
        requests=records,
        acceptance=AcceptedDrafts(windows=windows),
    )


def test_requests_of_a_finding_are_a_list_with_its_commas():
    html = page(result(record(0), *(record(n, Outcome.SERVER_ERROR) for n in range(1, 10))))
    cell = re.search(r"<td>9<br>(.*?)</td>", html, re.DOTALL)[1]
    told = re.sub(r"<[^>]*>", "", cell).split()
    assert told == [*(f"1-00{n}," for n in range(1, 6)), "1-006", "and", "3", "more"]
    for span in re.findall(r"<span[^>]*>[^<]*</span>", cell):
        assert re.fullmatch(r'<span style="white-space: nowrap">1-00\d,?</span>', span)


@pytest.mark.parametrize(
    "figures, said",
    [
        ((16,) * 30, "16 at once in each of 30 rounds, "),
        ((16, 32, 64), "16, 32, 64 at once, "),
        ((16, 16, 64), "16, 16, 64 at once, "),
        ((2,), "2 at once, "),
    ],
)
def test_rounds_that_are_alike_are_told_once(figures, said):
    assert as_run(result(record(0), concurrency=figures)).startswith(said)


def test_an_answer_that_is_not_streamed_has_no_first_text():
    streamed, whole = (
        dict(zip(ROUND_COLUMNS, rounds(result(record(0), stream=stream))[0], strict=True))
        for stream in (True, False)
    )
    assert streamed["first text, s"] == 0.25
    assert whole["first text, s"] is None
    assert streamed["request, s"] == whole["request, s"] == 1.0


def test_crosses_are_told_of_where_there_are_some():
    assert "line from its start to its end; 1 end with a cross" in page(result(record(0, Outcome.CUT)))
    assert "end with a cross" not in page(result(record(0)))


def test_acceptance_stands_over_the_time_of_the_whole_run(monkeypatch):
    drawn = []
    monkeypatch.setattr(figures, "svg", lambda made: drawn.append(made) or "<svg/>")
    window = Window(1.0, 3.0, 100, 300, 240, (0.9, 0.8, 0.7))
    page(result(record(0), windows=(window,)))
    assert drawn[1].axes[0].get_xlim() == (0, 8.0)
