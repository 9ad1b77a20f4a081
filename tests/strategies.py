"""Hypothesis strategies for batches of request states."""

import random

from hypothesis import strategies as st

from specmortem.incidents.dflash_oob.arms import random_batch


@st.composite
def dflash_batches(draw, most_requests: int = 4):
    """A small batch with the bad states among them; shrinks towards few requests and small seeds."""
    requests = draw(st.integers(1, most_requests))
    k = draw(st.integers(1, 4))
    return random_batch(random.Random(draw(st.integers(0, 10_000))), requests, k)
