"""A small repository with one incident and whatever notebook a test needs."""

import shutil
from pathlib import Path

import nbformat

DATA = Path(__file__).parents[2] / "data"

INCIDENT = """
schema = 1
slug = "{slug}"
title = "Toy <incident>"
summary = "A toy kernel read one word & more past its row."
grade = "reproduced"
status = "open"
notebook = "01-{slug}.ipynb"

[impact]
who = "everyone who plays"
symptom = "a crash"
log = "toy: <bang> & gone"
mechanism = "A toy kernel read one word & more past its row."
notes = ["two requests at once", "fixed in 0.24.0, says <everyone>"]

[[claims]]
id = "main"
text = "the row is read past its end"
grade = "reproduced"
source = "this page"

[[causes]]
id = "past-end"
title = "Read past the end"
mechanism = "no mask"
needs = "cpu"
reached_by = "two requests"
fixed = {{ release = "0.24.0", source = "toy#1" }}
affected = ">=0.20.1,<0.24"

[[causes]]
id = "gpu-only"
title = "Lost event"
mechanism = "no wait"
needs = "gpu"
reached_by = "two streams"
"""

PARAMETERS = """device = "auto"
quick = False
results_path = "results.json"
seed = 0
scale = 1.0
sizes = [1, 2]"""

WRITE = """
from pathlib import Path
from specmortem.verdict import DeviceInfo, Evidence, Results, Row
rows = (
    Row("past-end", "before", "before", "{before}", 4, {before_faults}, seed, Evidence(witness="row 1")),
    Row("past-end", "after", "after", "{after}", 4, {after_faults}, seed),
    Row("past-end", "release", "vllm==0.22.1", "fault", 1, 1, seed),
    Row("past-end", "release", "vllm==0.23.0", "fault", 1, 1, seed),
    Row("past-end", "release", "vllm==0.24.0", "clean", 1, 0, seed),
    Row("gpu-only", "before", "before", "not-judged", 0, 0, None, Evidence(reason="needs a GPU")),
)
Results("{slug}", DeviceInfo("sim", "simulated streams"), rows, {{"python": "3.x"}}).save(Path(results_path))
"""


def write_cell(slug: str = "toy", before: str = "fault", after: str = "clean") -> str:
    faults = {"fault": 4, "clean": 0}
    return WRITE.format(
        slug=slug, before=before, after=after, before_faults=faults[before], after_faults=faults[after]
    )


def notebook(*code: str, title: str = "# Toy notebook") -> nbformat.NotebookNode:
    v4 = nbformat.v4
    cells = [
        v4.new_markdown_cell(f"{title}\n\nWhat a tired reader needs."),
        v4.new_code_cell(PARAMETERS, metadata={"tags": ["parameters"]}),
        v4.new_markdown_cell("## What goes wrong\n\n| a | b |\n|---|---|\n| 1 | 2 |"),
        *(v4.new_code_cell(source) for source in code),
    ]
    return v4.new_notebook(cells=cells, metadata={"language_info": {"name": "python"}})


def repository(home: Path, *code: str, slug: str = "toy") -> Path:
    """Write the repository, with the verdicts on record; returns its investigations folder."""
    (home / "data").mkdir(exist_ok=True)
    for table in DATA.glob("audit*.csv"):
        shutil.copy(table, home / "data")
    root = home / "investigations"
    (root / slug).mkdir(parents=True)
    (root / slug / "incident.toml").write_text(INCIDENT.format(slug=slug))
    (home / "notebooks").mkdir(exist_ok=True)
    nbformat.write(notebook(*code), home / "notebooks" / f"01-{slug}.ipynb")
    return root
