"""`specmortem check`: whatever says how a vLLM is launched -> affected, not affected or unknown, and what to do.

`inputs` reads files, `understand` makes launches of them, `report` judges these, `render` and `formats` tell it.
"""
