"""compute-sanitizer memcheck over the arms of `dflash-oob`: which line faults before, and that none does after.

usage: python benchmarks/memcheck_dflash.py OUT.json   (needs a GPU and compute-sanitizer on PATH)
"""

import sys

from memcheck import Checked, main

MODULE = "specmortem.incidents.dflash_oob.arms"
ARMS = [
    Checked("lookup", "before", MODULE, "control('gdn-lookup', 'graphs', 'cuda')"),
    Checked("lookup", "after", MODULE, "lookup_replays('after', 200)"),
    Checked("input kernel", "before", MODULE, "control('input-kernel', 'graphs', 'cuda')"),
    Checked("input kernel", "after", MODULE, "graph_replays('after', 200)"),
    Checked("random states", "after", MODULE, "random_states('after', 4, device='cuda')"),
]

if __name__ == "__main__":
    sys.exit(main(ARMS))
