"""compute-sanitizer memcheck over the arms of `mtp-draft-loop`: which line faults before, and that no fix does.

usage: python benchmarks/memcheck_mtp.py OUT.json   (needs a GPU and compute-sanitizer on PATH)

Before is the state that the lost race leaves, made on purpose: the offsets of one plan, the bytes of the next. The
race itself cannot be had here, since without the caching allocator each freed tensor waits for the GPU. The layout is
one that faults, in all arms.
"""

import sys

from memcheck import Checked, main

from specmortem.incidents.mtp_draft_loop.controls import FIXED

MODULE = "specmortem.incidents.mtp_draft_loop.arms"
SETTINGS = "'cuda', steps=5, forward_us=100.0"
ARMS = [
    Checked("overtaken plan", "before", MODULE, "overtaken('cuda')"),
    Checked("overtaken plan", "after", MODULE, "overtaken('cuda', later=0)"),
    *(
        Checked(f"loop, {arm}", "after", MODULE, f"steps('{arm}', {SETTINGS})")
        for arm in (*FIXED, "stream-sync")
    ),
]

if __name__ == "__main__":
    sys.exit(main(ARMS, parallel=4))
