"""One judgement in its own process: a probe on the code of one subject, inside a box.

`specmortem.isolation` starts the process and types its end; everything in here runs in that process.
"""

from __future__ import annotations

import gc
import importlib
from typing import Any

from specmortem import upstream
from specmortem.incident import all_incidents, of_cause
from specmortem.judge import box
from specmortem.judge.records import Record, Recorded
from specmortem.judge.subjects import Place
from specmortem.verdict import Verdict

all_incidents()  # looked up once by the supervisor, for all judgements that are its forks


def judge(cause: str, place: dict[str, str], device: str, cpu_seconds: float) -> dict[str, Any]:
    """Verdict and record of a cause on a subject; `wanted` names files that must be brought here first.

    The code of this package runs as it is; that of a tree inside the box.
    """
    gc.freeze()  # what was imported is garbage to nobody: collections need not walk it again and again
    run = importlib.import_module(f"{of_cause(cause).package}.probe").judge
    subject = Place(**place)  # type: ignore[arg-type]
    if subject.kind == "own":
        found = run(cause, subject.subject, device)
        return {"verdict": found, "record": Record().as_dict(), "wanted": [], "box": ""}
    tree = Recorded(subject.open())
    upstream.give(subject.subject, tree)
    watch, changed = box.CodeWatch(), box.CodeWatch.changed
    held = box.enter(cpu_seconds, strict=device == "sim")
    error = ""
    try:
        found = run(cause, subject.subject, device)
    except Exception as raised:
        if not tree.wanted:
            error = f"{type(raised).__name__}: {raised}"
        found = None
    if touched := changed(watch):
        found, error = None, f"the code of the tree replaced {touched[0]}; its verdict does not count"
    if found is None:
        found = Verdict.not_judged(error or "files are missing").as_dict()
    return {"verdict": found, "record": tree.record.as_dict(), "wanted": tree.wanted, "box": held}
