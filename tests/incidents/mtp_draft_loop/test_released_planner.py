"""Layout arithmetic against a released FlashInfer planner."""

import random

import numpy as np
from incidents.mtp_draft_loop.released_planner import FIELDS, build, run

from specmortem.incidents.mtp_draft_loop.kernels import Geometry, Planner


def random_plan(rng):
    kv_heads = rng.choice((1, 2, 4, 8))
    geometry = Geometry(
        rng.choice((16, 46, 82, 132, 170)),
        kv_heads * rng.choice((1, 2, 4, 6, 7, 8, 16, 24, 64)),
        kv_heads,
        rng.choice((64, 128, 256)),
        rng.choice((1, 16, 32, 64, 128)),
        rng.random() < 0.3,
    )
    longest = rng.choice((100, 3000, 12_000, 60_000))
    return Planner(geometry).plan(
        [rng.randint(1, longest) for _ in range(rng.choice((1, 2, 3, 4, 8, 33, 64)))]
    )


def test_offsets_and_bytes_equal_the_released_planners(tmp_path):
    rng = random.Random(0)
    plans = [random_plan(rng) for _ in range(1000)]
    program, lean = build(tmp_path)
    released = run(program, plans)
    assert len(released) == len(plans) and any(plan.split for plan in plans)
    for plan, (info, block) in zip(plans, released, strict=True):
        assert (info[0], info[1], info[3], bool(info[14])) == (
            plan.num_padded,
            plan.num_reqs,
            plan.geometry.cta_tile_q,
            plan.split,
        )
        names = set(plan.offsets) - ({"block_valid_mask"} if lean and not plan.geometry.constant else set())
        assert {name: info[FIELDS[name]] for name in names} == {name: plan.offsets[name] for name in names}
        end = max(plan.offsets[name] + plan.arrays[name].nbytes for name in names)
        np.testing.assert_array_equal(block, plan.image[:end])
        if not lean:
            assert info[10:12] == [0, plan.s_offset if plan.split else 0]
