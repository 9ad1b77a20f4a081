"""Am I affected? One answer for a launch: verdicts of probes, joined with the rules of what a configuration reaches.

Everything that a page, an index, the README or a command says of releases and flags is computed here. It stands above
the incidents' registry and the reader of launches, and below pages and tools.
"""
