"""Shifts inside a block and the column past the row, on the simulator; a GPU is where the arms of a shift differ."""

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from specmortem import upstream
from specmortem.errors import BadInputError, UnavailableError
from specmortem.incidents.pp_align_copy import kernels as align_copy
from specmortem.incidents.pp_align_copy import probe
from specmortem.incidents.pp_align_copy import shift as align_shift

pytestmark = pytest.mark.usefixtures("interpreted")
SMALL = [["bfloat16", 5, 5], ["float32", 8, 6]]


def shifted(arm, count=8, **change):
    return align_shift.shifts(arm, count, requests=2, layers=2, **{"shapes": SMALL, **change})


def windows(shape=("bfloat16", 6, 6), requests=3, layers=2):
    generator = torch.Generator().manual_seed(0)
    made = align_shift._Windows(align_shift.WindowShape(*shape), requests, layers, "cpu", generator)
    made.fill()
    return made


@pytest.mark.parametrize("arm", ["before", "after"])
def test_every_arm_is_right_in_the_interpreter_and_says_what_it_did(arm):
    found = shifted(arm)
    assert (found["shifts"], found["faults"], found["wrong_bytes"], found["witness"]) == (8, 0, 0, "")
    assert [(row["token_bytes"], row["largest_shift"], row["shifts"]) for row in found["shapes"]] == [
        (10, 2, 4),
        (32, 3, 4),
    ]


def test_every_default_shape_is_right():
    found = align_shift.shifts("after", 1, requests=1, layers=1)
    assert found["faults"] == 0 and found["shifts"] == len(align_shift.SHAPES)
    assert any(row["token_bytes"] % 16 for row in found["shapes"])


def test_launches_repeat_with_new_inputs_until_there_are_enough(monkeypatch):
    seen = []
    real = align_copy.postcopy

    def noting(states, counters, *rest):
        seen.append(states.states[0].tensor.clone())
        real(states, counters, *rest)

    monkeypatch.setattr(align_copy, "postcopy", noting)
    found = shifted("after", 9, shapes=SMALL[:1])
    assert found["shifts"] == 12 and len(seen) == 3 and not torch.equal(seen[0], seen[1])


def test_a_copy_that_does_nothing_faults_every_time(monkeypatch):
    monkeypatch.setattr(align_copy, "postcopy", lambda *_: None)
    found = shifted("after")
    assert found["faults"] == found["shifts"] == 8 and found["rate"] == 1
    assert "wrong bytes, the first in token 0" in found["witness"]


def test_a_shift_in_the_wrong_order_is_found(monkeypatch):
    """From the last token to the first, as an early warp's stores would do it."""

    def backwards(states, counters, mapping, *_):
        for state in states.states:
            for slot in mapping.tolist():
                bias = int(counters.num_accepted[slot]) - 1
                window = state.tensor[int(states.tables[0][slot, 0])]
                for token in reversed(range(state.conv_width - bias)):
                    window[token] = window[token + bias].clone()

    monkeypatch.setattr(align_copy, "postcopy", backwards)
    assert shifted("after", shapes=[["float32", 4, 5]])["faults"] == 8


def test_a_byte_in_a_block_of_nobody_is_found():
    made = windows()
    expected = made.expected()
    align_shift._copier("after", made, None)()
    assert made.compare(expected) == (0, 0, "")
    made.pool.view(torch.uint8)[1, 0, 2, 3] ^= 1
    wrong = made.compare(expected)
    assert (wrong.windows, wrong.wrong_bytes) == (1, 1)
    assert "block 0 of layer 1, shift by 0: 1 wrong bytes, the first in token 2" in wrong.first


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.sampled_from(["bfloat16", "float16", "float32"]),
    st.integers(1, 20),
    st.integers(4, 12),
    st.integers(1, 4),
    st.integers(1, 3),
)
def test_what_is_expected_is_what_the_reference_does(dtype, inner, width, requests, layers):
    made = windows((dtype, inner, width), requests, layers)
    expected = made.expected()
    align_copy.reference_postcopy(made.states, made.counters, made.mapping, align_shift.BLOCK_SIZE)
    assert made.compare(expected) == (0, 0, "")


def test_a_launch_fits_its_bytes():
    large = align_shift.WindowShape("float32", 1 << 20, 8)
    assert align_shift._fitting(large, 256, 16) == 1
    assert align_shift._fitting(align_shift.WindowShape("bfloat16", 8, 5), 256, 16) == 256


@pytest.mark.parametrize(
    "shape", [["int8", 4, 5], ["bfloat16", 0, 5], ["bfloat16", 4, 3], ["bfloat16", 4, 64]]
)
def test_bad_shapes_are_refused(shape):
    with pytest.raises(BadInputError, match="shape .*width"):
        shifted("after", shapes=[shape])


def test_no_shifts_are_refused():
    with pytest.raises(BadInputError, match="0 shifts"):
        shifted("after", 0)


def test_the_column_past_the_row_leaves_memory_before_and_nothing_happens_after():
    before, after = (align_shift.illegal_column(arm) for arm in ("before", "after"))
    assert before["effect"] == "illegal-address" and "nothing that was passed" in before["why"]
    assert "block_table[8399] is outside block_table[0, 123) of slot 0" in before["first"]
    assert (after["effect"], after["why"], after["first"]) == ("clean", "", "")


def test_the_id_after_the_row_is_wild_and_no_address_wraps():
    word = align_shift.illegal_column("after")["word"]
    assert 1 << 45 < word * align_shift.PAGE_BYTES < 1 << 47


def test_after_copies_the_state_that_it_should():
    rig, untouched = align_shift._column_rig("cpu"), align_shift._column_rig("cpu")
    worker = probe.subject_of("seed-column-divisor", "after", "sim").on(rig)
    align_shift._start(rig, worker)
    probe.step(rig, worker, 0)
    assert any("block 2 of slot 0" in text for text in probe.differences(rig, untouched))
    for state in rig.states:
        assert torch.equal(state.tensor[1], state.tensor[2])


@pytest.mark.network
def test_released_kernels_through_their_own_launchers():
    for version, effect in (("0.31.0", "illegal-address"), ("0.33.0", "clean")):
        try:
            upstream.resolve(f"vllm=={version}").fetch([probe.MAMBA, probe.HYBRID])
        except UnavailableError as error:
            pytest.skip(str(error))
        assert shifted(f"vllm=={version}")["faults"] == 0
        assert align_shift.illegal_column(f"vllm=={version}")["effect"] == effect
