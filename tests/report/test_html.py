"""Rendering executed notebooks: what is on the page, and that the page stands alone."""

import nbformat
import pytest
from nbformat import v4
from report import toy_repository as toy

from specmortem import facts as fact_files
from specmortem.errors import BadInputError, UnavailableError
from specmortem.report import html
from specmortem.report.html import RunRecord, check_self_contained
from specmortem.verdict import DeviceInfo, Evidence, Results, Row

RUN = RunRecord("toy", "passed", "2026-01-02 03:04 UTC")
SVG = (
    '<?xml version="1.0"?>\n<!DOCTYPE svg PUBLIC "-//W3C//DTD SVG 1.1//EN" "http://www.w3.org/svg11.dtd">\n'
    '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 9 9"><title>Row 1 &amp; its owner</title>'
    '<metadata>who made it</metadata><defs><clipPath id="c"/></defs><g clip-path="url(#c)"/>'
    '<use href="#c"/></svg>'
)


@pytest.fixture
def facts(tmp_path):
    return fact_files.load("toy", toy.repository(tmp_path))


def results():
    rows = (
        Row("past-end", "before", "before", "fault", 4, 4, 7, Evidence(witness="<row>")),
        Row("past-end", "after", "after", "clean", 4, 0, 7),
        Row("past-end", "release", "vllm==0.22.1", "fault", 1, 1),
        Row("gpu-only", "before", "before", "not-judged", 0, 0, None, Evidence(reason="no <GPU>")),
    )
    return Results("toy", DeviceInfo("cuda", "H<200>", "570.1"), rows, {"python": "3.x", "torch": "2.x"})


def display(data, **metadata):
    return v4.new_output("display_data", data=data, metadata=metadata)


def with_output(*outputs, source="f(x)", tags=()):
    cell = v4.new_code_cell(source, outputs=list(outputs), metadata={"tags": list(tags)})
    return v4.new_notebook(cells=[cell])


def body_of(notebook):
    text = html.page(notebook, None, None, RUN)
    return text[text.index("<article>") :]


def page(facts, run=RUN, found=None):
    return html.page(toy.notebook(), facts, found, run)


def test_the_summary_box_comes_first_and_is_computed(facts):
    text = page(facts, found=results())
    box = text[text.index('class="summary"') : text.index("<nav")]
    for said in (
        "toy: &lt;bang&gt; &amp; gone",
        "one word &amp; more",
        "two requests at once",
        "says &lt;everyone&gt;",
        "not on a release",
        "4 of 4",
    ):
        assert said in box
    assert "vllm 0.22.1" in box
    assert "CUDA device: H&lt;200&gt;, driver 570.1." in box
    assert "torch 2.x" in box
    assert "Seeds: 7." in box
    assert "Run on 2026-01-02 03:04 UTC." in box


def test_outcomes_are_written_as_words_beside_their_marks(facts):
    text = page(facts, found=results())
    for mark, word in (("✗", "fault"), ("✓", "clean"), ("–", "not judged"), ("·", "not run")):
        assert f'<span aria-hidden="true">{mark}</span>&nbsp;{word}' in text


def test_facts_are_escaped(facts):
    text = page(facts, found=results())
    assert "Toy &lt;incident&gt;" in text
    assert "no &lt;GPU&gt;" in text
    assert "<incident>" not in text and "<GPU>" not in text


def test_the_page_stands_alone(facts):
    text = page(facts, found=results())
    assert check_self_contained(text) == []
    assert "<script" not in text


def test_the_title_of_the_notebook_is_not_repeated(facts):
    assert "Toy notebook" not in page(facts)


def test_without_an_incident_the_notebook_gives_the_title():
    assert "<h1>Toy notebook</h1>" in html.page(toy.notebook(), None, None, RUN)


def test_the_contents_link_to_the_sections(facts):
    text = page(facts)
    assert '<a href="#What-goes-wrong">What goes wrong</a>' in text
    assert '<h2 id="What-goes-wrong">' in text


def test_a_run_without_results_says_so(facts):
    text = page(facts, RunRecord("toy", "could-not-run", "today", "the <kernel> died"))
    assert "This run did not finish." in text
    assert "the &lt;kernel&gt; died" in text
    assert "This run left no results." in text


def test_code_is_folded():
    assert '<details class="code"><summary>Code <small>1 line</small>' in body_of(with_output())


def test_code_tagged_show_code_is_open():
    assert '<details class="code" open' in body_of(with_output(tags=["show-code"]))


def test_injected_parameters_become_a_table_without_paths():
    body = body_of(with_output(source="seed = 3\nresults_path = 'r.json'", tags=["injected-parameters"]))
    assert '<th scope="row">seed</th><td><code>3</code></td>' in body
    assert "r.json" not in body
    assert "<details" not in body


def test_stdout_is_shown_escaped_and_stderr_hidden():
    stream = [v4.new_output("stream", name=n, text=f"to <{n}>") for n in ("stdout", "stderr")]
    body = body_of(with_output(*stream))
    assert "to &lt;stdout&gt;" in body
    assert "stderr" not in body


def test_a_traceback_is_shown():
    error = v4.new_output("error", ename="E", evalue="v", traceback=["\x1b[31mE\x1b[0m: <v>"])
    assert '<span class="ansi-red-fg">E</span>: &lt;v&gt;' in body_of(with_output(error))


def test_every_table_can_scroll():
    body = body_of(
        with_output(display({"text/html": "<table><tr><td>1</td></tr></table>", "text/plain": "t"}))
    )
    assert '<div class="scroll" tabindex="0"><table>' in body


def test_an_svg_figure_is_inline_with_its_title_as_text_alternative():
    body = body_of(with_output(display({"image/svg+xml": SVG, "text/plain": "<Figure>"})))
    assert 'role="img"' in body and 'aria-label="Row 1 &amp; its owner"' in body
    assert "<svg" in body and "clippath" in body.lower()
    assert "DOCTYPE" not in body and "who made it" not in body and "&lt;Figure" not in body


def test_ids_of_two_figures_do_not_meet():
    first, second = html.inline_svg(SVG), html.inline_svg(SVG.replace("0 0 9 9", "0 0 8 8"))
    name = first.split('id="')[1].split('"')[0]
    assert f"url(#{name})" in first and f'href="#{name}"' in first
    assert name not in second


def test_a_given_text_alternative_wins():
    output = display({"image/svg+xml": SVG}, **{"image/svg+xml": {"alt": "lanes <1>"}})
    assert 'aria-label="lanes &lt;1&gt;"' in body_of(with_output(output))


def test_a_png_is_embedded():
    body = body_of(with_output(display({"image/png": "QUJD\n"})))
    assert '<img alt="figure" src="data:image/png;base64,QUJD"' in body


def test_an_output_with_script_is_refused():
    output = display({"text/html": "<script>1</script>"})
    with pytest.raises(BadInputError, match="would not stand alone: line .*<script>"):
        html.page(with_output(output), None, None, RUN)


def executed(folder, notebook=None):
    notebook = notebook or toy.notebook()
    notebook.metadata["specmortem"] = vars(RUN)
    nbformat.write(notebook, folder / "executed.ipynb")
    return folder / "executed.ipynb"


def test_render_uses_the_results_beside_the_notebook(tmp_path):
    root = toy.repository(tmp_path)
    results().save(tmp_path / "results.json")
    written = html.render(executed(tmp_path), root=root)
    assert written == tmp_path / "postmortem.html"
    assert "4 of 4" in written.read_text()


def test_a_page_says_that_its_notebook_is_newer(tmp_path):
    root, (here,) = toy.repository(tmp_path), (tmp_path / "notebooks").glob("*toy.ipynb")
    now = nbformat.read(here, 4)
    path = executed(tmp_path, nbformat.from_dict(now))
    assert "newer than this run" not in html.render(path, root=root).read_text()
    now.cells.append(v4.new_markdown_cell("More."))
    nbformat.write(now, here)
    said = "The notebook is newer than this run of it: "
    assert said + "1 cell added since." in html.render(path, root=root).read_text()
    for cell in now.cells[:2]:
        cell.source += "\n"
    nbformat.write(now, here)
    assert said + "1 cell added, 2 cells changed since." in html.render(path, root=root).read_text()


def test_a_run_of_more_cells_than_the_notebook_has_is_no_older():
    ran = toy.notebook()
    now = nbformat.from_dict(ran)
    ran.cells.insert(0, v4.new_code_cell("seed = 1", metadata={"tags": ["injected-parameters"]}))
    assert html.changes(ran, now) == ""


def test_render_writes_where_it_is_told(tmp_path):
    root = toy.repository(tmp_path)
    assert html.render(executed(tmp_path), tmp_path / "x.html", root).name == "x.html"
    assert not (tmp_path / "postmortem.html").exists()


def test_render_refuses_a_notebook_that_was_not_run(tmp_path):
    nbformat.write(toy.notebook(), tmp_path / "plain.ipynb")
    with pytest.raises(BadInputError, match="plain.ipynb was not written by `specmortem run`"):
        html.render(tmp_path / "plain.ipynb")


def test_render_refuses_what_is_no_notebook(tmp_path):
    (tmp_path / "x.ipynb").write_text("{")
    with pytest.raises(BadInputError, match="x.ipynb is not a notebook"):
        html.render(tmp_path / "x.ipynb")


def test_render_names_a_missing_file(tmp_path):
    with pytest.raises(UnavailableError, match="cannot read .*gone.ipynb: No such file"):
        html.render(tmp_path / "gone.ipynb")
