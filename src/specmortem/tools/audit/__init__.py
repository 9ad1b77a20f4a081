"""Is this vLLM affected: every probe of every cause over many subjects, with what to do about it.

A room of its own, between `probes` and the command line: `probes` judges one pair, `audit` finds the trees (releases,
folders, installations, archives), knows which verdicts it has already, keeps foreign code in a box, and joins verdicts
with the incident files and with a configuration. `exposure` holds the rules of reachability for others, too.
"""
