from specmortem.incidents.dflash_oob import figures
from specmortem.report.figures import FAULT

CASE = {
    "positions": [10, 11, 40, 41],
    "query_start_loc": [0, 2, 4],
    "rejected": [2, 0],
    "query_slot_mapping": [0, 1, 2, 3, 4],
    "reports": [{"tensor": "target_positions", "op": "load", "index": -1, "program": [0, 0, 0], "line": 7}],
}


def texts(figure):
    return [t.get_text() for ax in figure.axes for t in ax.texts]


def test_the_wrong_read_is_marked_with_its_line():
    assert "request 0 reads [-1], line 7" in texts(figures.anchors({"a case": CASE}, "title"))


def test_a_case_without_reports_has_no_mark():
    assert not any("reads" in t for t in texts(figures.anchors({"a case": CASE | {"reports": []}}, "title")))


def test_padded_batches_mark_the_reported_number():
    figure = figures.padded_batches({3: 79, 15: 0}, 15, "title")
    figure.canvas.draw()
    labels = figure.axes[0].get_xticklabels()
    assert [label.get_color() for label in labels].count(FAULT) == 1
