import random
import re
from dataclasses import replace
from pathlib import Path

import mutate
import pytest
import strategies
import torch
from hypothesis import HealthCheck, given, settings

from specmortem.detect import bounds
from specmortem.errors import BadInputError
from specmortem.incidents.dflash_oob import arms as dflash_oob
from specmortem.incidents.dflash_oob import draft_attention, fix
from specmortem.incidents.dflash_oob import kernels as dflash_inputs
from specmortem.incidents.dflash_oob.kernels import DFlashInputs
from specmortem.incidents.dflash_oob.probe import batch, batch_watch

pytestmark = pytest.mark.usefixtures("interpreted")

GOOD = [[10, 11, 12, 13], [40, 41, 42, 43]]
NO_COLUMN = {"live & (position >= 0) & (column < allocated)": "live & (position >= 0)"}
NO_POSITION = {"live & (position >= 0) & (column < allocated)": "live & (column < allocated)"}
NO_NULL = {
    "tl.where(block != 0, block * block_size + position % block_size, -1)": (
        "block * block_size + position % block_size"
    )
}
NEGATIVE = [[-9, -8, -7, -6], GOOD[1]]
# guard: (lines of fix.py and what stands there instead, batch on which it matters)
MUTANTS = {
    "anchor": (
        {"mask=has_anchor, other=-1)": "mask=has_anchor | True, other=-1)"},
        batch(GOOD, rejected=[4, 0]),
    ),
    "rejected": ({"is_valid = at < valid_end": "is_valid = at < end"}, batch(GOOD, rejected=[2, 0])),
    "context column": (NO_COLUMN, batch(GOOD, num_blocks=[2, 16])),
    "context position": (NO_POSITION, batch(NEGATIVE)),
    "query column": (NO_COLUMN, batch(GOOD, num_blocks=[4, 11])),
    "query position": (NO_POSITION, batch(NEGATIVE)),
    "query anchor": (
        {
            "tl.where(has_anchor, anchor + 1 + offset, 0)": "anchor + 1 + offset",
            "(offset < Q) & has_anchor & ": "(offset < Q) & ",
        },
        batch(GOOD, rejected=[4, 0]),
    ),
    "length": (
        {" & (position < max_model_len)  # guard 5": ""},
        replace(batch([[57, 58, 59, 60], GOOD[1]]), max_model_len=62),
    ),
    "tail": ({"in_tail = row < num_padded": "in_tail = row < 0"}, batch(GOOD)),
    "context null": (NO_NULL, batch([[8, 9, 10, 11], [0]], rows=[[1, 2, 0, 4], [5]])),
    "query null": (NO_NULL, batch([[8, 9, 10, 11], [0]], rows=[[1, 2, 3, 0], [5]])),
}


def detect(states):
    """Reports of the input kernel and of the cache writes after it, in buffers that hold stale slots."""
    padded, q = states.num_reqs * states.num_query_per_req + 4, states.num_query_per_req
    n, k = states.target_positions.shape[0], states.num_speculative_tokens
    out = DFlashInputs.empty(n, states.num_reqs, k, padded, poison=4)
    kv = torch.zeros(4 * 64, draft_attention.HEAD_DIM)
    starts = states.query_start_loc.tolist()
    context = [r for r in range(states.num_reqs) for _ in range(starts[r + 1] - starts[r])]
    with batch_watch(states) as watch:
        dflash_inputs.launch("after", states, out)
        ids = torch.zeros(n, dtype=torch.int32)
        ends = valid_positions(states)
        watch.blocks(
            kv, slot_owners(states, [0] * states.num_reqs, ends), of=bounds.mapped(context), name="kv"
        )
        draft_attention.write(kv, out.context_slot_mapping, ids, out.context_positions)
        owners = slot_owners(
            states, [end or states.max_model_len for end in ends], [states.max_model_len] * len(ends)
        )
        watch.blocks(kv, owners, of=bounds.program(0, divided_by=q), name="kv")
        draft_attention.write(kv, out.query_slot_mapping, out.input_ids, out.query_positions)
    return watch.reports


def valid_positions(states):
    """Per request, the positions below this one are valid context."""
    ends = (states.query_start_loc[1:] - states.num_rejected).tolist()
    starts = states.query_start_loc.tolist()
    return [
        int(states.target_positions[e - 1]) + 1 if e > s else 0 for s, e in zip(starts, ends, strict=False)
    ]


def slot_owners(states, starts, ends):
    """Owner of every cache slot: the request that has a position from its start to its end in that block."""
    owner = [-1] * (4 * 64)
    for r, (start, end) in enumerate(zip(starts, ends, strict=True)):
        for position in range(max(start, 0), min(end, 4 * int(states.num_blocks[r]))):
            block = int(states.block_table[r, position // 4])
            if block != 0:
                owner[block * 4 + position % 4] = r
    return owner


def run(batch_, arm="after", padded=None):
    padded = padded or batch_.num_reqs * batch_.num_query_per_req + 8
    k, n = batch_.num_speculative_tokens, batch_.target_positions.shape[0]
    out = DFlashInputs.empty(n, batch_.num_reqs, k, padded)
    with batch_watch(batch_) as watch:
        dflash_inputs.launch(arm, batch_, out)
    return out, watch.reports


def equal(a, b):
    return all(torch.equal(x, y) for x, y in zip(vars(a).values(), vars(b).values(), strict=True))


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(strategies.dflash_batches())
def test_after_equals_the_reference_and_stays_in_bounds(states):
    out, reports = run(states)
    assert reports == []
    assert equal(out, dflash_inputs.reference(states, out.input_ids.shape[0]))


def test_before_equals_the_reference_on_good_states_but_for_the_tail():
    states = batch(GOOD)
    out, reports = run(states, arm="before", padded=8)
    assert reports == [] and equal(out, dflash_inputs.reference(states, 8))


def test_before_faults_on_random_states_and_after_does_not():
    before = dflash_oob.random_states("before", launches=2, requests=32, seed=3)
    after = dflash_oob.random_states("after", launches=2, requests=32, seed=3)
    assert before["faults"] > 8 and before["witness"]
    assert after == {"states": 64, "faults": 0, "witness": "", "seed": 3}


@pytest.mark.parametrize("guard", MUTANTS)
def test_detector_fires_when_a_guard_is_taken_out(guard, tmp_path, monkeypatch):
    changes, states = MUTANTS[guard]
    assert detect(states) == []
    module = mutate.mutant(fix, changes, tmp_path)
    for name in ("context_after", "queries_after", "padding_after"):
        monkeypatch.setattr(dflash_inputs, name, getattr(module, name))
    assert detect(states) != []


def test_before_and_after_differ_in_the_six_guards_alone():
    assert len(Path(fix.__file__).read_text().splitlines()) < 80
    assert sorted(re.findall(r"# guard (\d)", Path(fix.__file__).read_text())) == list("123456")
    for name in ("slots", "context", "queries"):
        before, after = getattr(fix, f"{name}_before"), getattr(fix, f"{name}_after")
        assert before.fn.__code__.co_argcount == after.fn.__code__.co_argcount


def test_launch_spans_several_program_blocks():
    states = dflash_oob.random_batch(random.Random(1), 2, 3)
    long = replace(
        states,
        target_positions=torch.arange(600) % 100,
        query_start_loc=torch.tensor([0, 300, 600], dtype=torch.int32),
    )
    out, reports = run(long)
    assert reports == [] and equal(out, dflash_inputs.reference(long, out.input_ids.shape[0]))


@pytest.mark.parametrize(
    "change",
    [
        {"num_rejected": torch.zeros(3, dtype=torch.int32)},
        {"query_start_loc": torch.zeros(2, dtype=torch.int32)},
        {"block_table": torch.zeros(1, 16, dtype=torch.int32)},
    ],
)
def test_shapes_that_do_not_fit_are_refused(change):
    states = replace(batch([[1], [2]]), **change)
    with pytest.raises(BadInputError):
        dflash_inputs.launch("after", states, DFlashInputs.empty(2, 2, 3, 8))


def test_query_buffers_too_small_are_refused():
    with pytest.raises(BadInputError, match="cannot hold 2 requests"):
        dflash_inputs.launch("after", batch([[1], [2]]), DFlashInputs.empty(2, 2, 3, 7))
