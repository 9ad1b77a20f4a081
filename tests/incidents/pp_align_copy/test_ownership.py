"""The engine against a plain model of ownership: each copy reads and writes only blocks of its own request."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from specmortem import device
from specmortem.incidents.pp_align_copy.engine.scheduler import EngineConfig, Request
from specmortem.incidents.pp_align_copy.engine.tag_model import TagPipeline

CONFIG = EngineConfig(
    pp_size=2,
    num_speculative_tokens=1,
    block_size=4,
    max_num_seqs=3,
    max_num_batched_tokens=8,
    num_blocks=24,
    max_model_len=24,
)


class Engine(RuleBasedStateMachine):
    subject = "after"

    def __init__(self):
        super().__init__()
        dev = device.open("sim", schedule="immediate")
        self.accept = True
        self.pipeline = TagPipeline(dev, CONFIG, [], self.subject, self.sample)
        self.worker = self.pipeline.workers[0]
        self.names, self.seen, self.owned = 0, 0, {}

    def sample(self, batch, hidden):
        def count(row):
            return 1 + (row.decode and self.accept)

        return [[0] * count(row) if row.samples else [] for row in batch.rows]

    @rule(prompt=st.integers(1, 9), outputs=st.integers(2, 12))
    def arrive(self, prompt, outputs):
        self.names += 1
        self.pipeline.scheduler.add(Request(self.names, (0,) * prompt, outputs))

    @rule(back=st.integers(0, 3))
    def abort(self, back):
        self.pipeline.scheduler.abort(self.names - back)

    @rule(steps=st.integers(1, 6), accept=st.booleans())
    def run(self, steps, accept):
        self.accept = accept
        for _ in range(steps):
            before = {name: set(blocks) for name, blocks in self.owned.items()}
            batch = self.pipeline.step()
            for name in batch.finished_req_ids:
                del self.owned[name]
            for name in batch.new_req_ids:
                self.owned[name] = set()
            for name, blocks in batch.blocks.items():
                self.owned[name] |= set(blocks)
            for copied in self.worker.copied[self.seen :]:
                own = (before if copied.when == "post" else self.owned)[copied.request]
                move = copied.move
                assert {move.src_block, move.dst_block} <= own, "a copy left its request's blocks"
                assert copied.damage is None
            self.seen = len(self.worker.copied)

    @invariant()
    def every_request_goes_on_from_its_own_state(self):
        assert self.pipeline.model.wrong == [] and self.worker.missed == 0


TestEngine = Engine.TestCase


def test_the_planted_bug_is_found_within_the_default_budget():
    class Planted(Engine):
        subject = "before"

    with pytest.raises(AssertionError, match="a copy left its request's blocks"):
        run_state_machine_as_test(Planted, settings=settings(database=None, print_blob=False))
