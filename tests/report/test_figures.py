from html import unescape

import pytest

from specmortem.errors import BadInputError
from specmortem.report import figures, tables
from specmortem.verdict import DeviceInfo, Evidence, Results, Row


def test_a_shown_figure_carries_its_alternative_text_and_no_date(monkeypatch):
    shown = []
    monkeypatch.setattr(figures, "display", lambda svg, metadata: shown.append((svg.data, metadata)))
    figures.show(figures.figure(1, 2.0, "title")[0], "what it shows")
    ((svg, metadata),) = shown
    assert metadata["image/svg+xml"]["alt"] == "what it shows"
    assert "<title>what it shows</title>" in svg and "dc:date" not in svg


def test_long_words_of_a_table_break_at_their_joints_and_say_the_same():
    command = """--speculative-config={"method":"qwen3_next_mtp","num_speculative_tokens":2}"""
    shown = tables.shown([{"a": command, "b": "2026-07-14", "c": "batch-row-index and_short/words"}]).data
    assert '{<wbr>"method":<wbr>"qwen3_<wbr>next' in shown and shown.count("<wbr>") > 5
    assert unescape(shown.replace("<wbr>", "")).count(command) == 1
    assert "and_short/words" in shown and "2026\N{NON-BREAKING HYPHEN}07" in shown


def test_tables_escape_and_mark_and_keep_long_text():
    long = "<b>" + "x" * 200
    html = tables.shown([{"outcome": "fault", "text": long}]).data
    assert "✗ fault" in html and "x" * 200 in html and "<b>" not in html


def test_release_matrix_fills_what_was_not_run():
    rows = (
        Row("a", "released", "vllm==1.0", "fault", 1, 1, None, Evidence()),
        Row("b", "released", "vllm==2.0", "clean", 1, 0, None, Evidence()),
    )
    matrix = tables.release_matrix([Results("x", DeviceInfo("sim", "s"), rows, {"python": "3"})])
    assert matrix.loc["a", "vllm==2.0"] == "not run" and matrix.loc["b", "vllm==2.0"] == "clean"
    assert len(tables.release_matrix([])) == 0


def test_rows_of_a_committed_run_are_those_of_its_file(tmp_path):
    rows = (Row("a", "released", "vllm==1.0", "fault", 1, 1, None, Evidence()),)
    Results("x", DeviceInfo("cuda", "c"), rows).save(tmp_path / "x" / "runs" / "cuda" / "results.json")
    assert tables.committed_rows("x", root=tmp_path) == rows
    assert tables.committed_rows("x", "cuda-2", tmp_path) == tables.committed_rows("y", root=tmp_path) == ()


def test_the_memory_checker_is_shown_where_it_was_run(tmp_path):
    assert "not yet run on a GPU" in tables.memcheck_table("x", tmp_path).data
    path = tmp_path / "x" / "runs" / "cuda" / "memcheck.json"
    path.parent.mkdir(parents=True)
    path.write_text('[{"arm": "before", "errors": 7}]')
    assert "<td>before</td>" in tables.memcheck_table("x", tmp_path).data
    path.write_text("[")
    with pytest.raises(BadInputError, match=r"memcheck\.json"):
        tables.memcheck_table("x", tmp_path)


def test_latest_results_prefer_this_run(tmp_path):
    root, out = tmp_path / "investigations", tmp_path / "out"
    committed = root / "x" / "runs" / "cuda" / "results.json"
    committed.parent.mkdir(parents=True)
    committed.write_text("{}")
    assert tables.latest_results("x", out, root) == committed
    fresh = out / "x" / "results.json"
    fresh.parent.mkdir(parents=True)
    fresh.write_text("{}")
    assert tables.latest_results("x", out, root) == fresh
    assert tables.latest_results("y", out, root) is None


@pytest.mark.parametrize("context", [0, 2])
def test_source_diff_shows_the_changed_lines_only(context):
    from specmortem.kernels import gated_delta_state as gd

    diff = tables.source_diff(gd.gated_delta_before, gd.gated_delta_after, context)
    assert "+    in_row = (accepted >= 1) & (accepted <= C)  # guard: accepted count" in diff
    assert diff.startswith("@@") and "def " not in diff
