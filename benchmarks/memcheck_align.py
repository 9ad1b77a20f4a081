"""compute-sanitizer memcheck over the arms of `pp-align-copy`: which line faults before, and that none does after.

usage: python benchmarks/memcheck_align.py OUT.json   (needs a GPU and compute-sanitizer on PATH)

Only the column past the row leaves memory; the other causes copy the wrong bytes between valid addresses.
"""

import sys

from memcheck import Checked, main

SHIFT = "specmortem.incidents.pp_align_copy.shift"
WORKLOADS = "specmortem.incidents.pp_align_copy.arms"
ARMS = [
    Checked("column past the row", "before", SHIFT, "illegal_column('before', 'cuda')"),
    Checked("column past the row", "after", SHIFT, "illegal_column('after', 'cuda')"),
    Checked("shifts inside a block", "after", SHIFT, "shifts('after', 2000, 'cuda', requests=8, layers=4)"),
    Checked(
        "random workloads",
        "after",
        WORKLOADS,
        "random_workloads('after', 4, device='cuda', copies='triton')",
    ),
]

if __name__ == "__main__":
    sys.exit(main(ARMS))
