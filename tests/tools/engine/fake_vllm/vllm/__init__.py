"""A stand-in for a vLLM installation: the surface that `specmortem.tools.engine.child` uses, and misbehaviour on cue.

FAKE_VLLM holds JSON: `version`, `fault` (what happens), `at` (before which engine step, counted over the process),
`every` (which requests misbehave), `log` (a file that gets a line an arrival, abort and step), `warm` (what happens
while requests are sent that come before the first run), `drafter` (`calls` its model for each draft of a step, has
`none`, a `bare` one without a model, or a `compiled` one).
"""

import json
import os

CUE = json.loads(os.environ.get("FAKE_VLLM", "{}"))
__version__ = CUE.get("version", "0.23.0")
if CUE.get("fault") == "import":
    raise ImportError("libcudart.so.13: cannot open shared object file")
if CUE.get("fault") == "hang-import":
    import time

    time.sleep(3600)
