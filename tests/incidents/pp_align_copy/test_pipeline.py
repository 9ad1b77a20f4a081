import pytest
import torch

from specmortem import device
from specmortem.errors import BadInputError, UnavailableError
from specmortem.incidents.pp_align_copy import arms as pp_align
from specmortem.incidents.pp_align_copy.engine.pipeline import RandomAcceptance
from specmortem.incidents.pp_align_copy.engine.ranks import run_ranks
from specmortem.incidents.pp_align_copy.engine.recurrent_model import (
    SpeakingPipeline,
    blocked_argmax,
    expected_text,
)
from specmortem.incidents.pp_align_copy.engine.scheduler import EngineConfig, Request, Scheduler
from specmortem.incidents.pp_align_copy.engine.tag_model import TagPipeline
from specmortem.incidents.pp_align_copy.engine.worker import Worker
from specmortem.isolation import ArmResult


@pytest.mark.parametrize("pp_size", [1, 2, 4])
def test_a_decode_runs_again_pp_size_steps_later_and_prefill_chunks_on_consecutive_steps(pp_size):
    config = EngineConfig(pp_size=pp_size, num_speculative_tokens=1, max_num_batched_tokens=8)
    scheduler = Scheduler(config, [Request(1, (0,) * 20, 6)])
    ran = []
    while not scheduler.done:
        batch = scheduler.schedule()
        sampled = [[0] if row.samples else [] for row in batch.rows]
        scheduler.record(batch, lambda sampled=sampled: sampled)
        ran += [(batch.step, row.decode) for row in batch.rows]
    assert [step for step, decode in ran if not decode] == [0, 1, 2]
    assert [step for step, decode in ran if decode] == [2 + pp_size * n for n in range(1, 6)]


def run(config, requests, subject="after", seed=0):
    dev = device.open("sim", schedule="immediate")
    return TagPipeline(dev, config, requests, subject, RandomAcceptance(seed)).run()


@pytest.mark.parametrize("pp_size", [1, 2, 3, 5])
def test_a_rank_takes_in_a_step_pp_size_steps_later_and_the_last_one_at_once(pp_size, monkeypatch):
    dev, config = device.open("sim", schedule="immediate"), EngineConfig(pp_size=pp_size)
    one = TagPipeline(dev, config, [Request(1, (0,) * 20, 6)], "after", RandomAcceptance(0))
    step_of, seen = {}, []
    sample, consume = one._sampled, Worker._consume

    def sampled(batch, hidden):
        where = sample(batch, hidden)
        step_of[where] = batch.step
        return where

    def consumed(self, step, entry):
        seen.append((step, step_of[entry.sampled]))
        consume(self, step, entry)

    monkeypatch.setattr(one, "_sampled", sampled)
    monkeypatch.setattr(Worker, "_consume", consumed)
    one.run()
    late = pp_size if pp_size > 1 else 0
    assert seen == [(step, step - late) for step in range(late, one.steps)]


def test_a_pool_that_is_too_small_preempts_and_every_request_still_gets_its_tokens():
    config = EngineConfig(pp_size=2, block_size=4, max_model_len=20, num_blocks=10)
    done = run(config, [Request(n, (0,) * 8, 10) for n in range(1, 5)])
    assert done.scheduler.preemptions > 0 and done.model.wrong == []
    texts = done.scheduler.finished
    assert {name: len(text) for name, text in texts.items()} == dict.fromkeys(range(1, 5), 10)


def test_an_aborted_request_gives_no_output_and_no_later_copy():
    done = run(EngineConfig(), [Request(1, (0,) * 5, 20, aborts=7), Request(2, (0,) * 5, 20, 2)])
    assert list(done.scheduler.finished) == [2]
    assert all(copied.step <= 7 for copied in done.copied if copied.request == 1)


@pytest.mark.parametrize(
    "bad",
    [{"pp_size": 0}, {"max_num_batched_tokens": 2}, {"num_blocks": 4}],
)
def test_sizes_that_no_engine_can_have_are_refused(bad):
    with pytest.raises(BadInputError):
        EngineConfig(**bad)


def test_a_request_longer_than_the_engine_is_refused():
    with pytest.raises(BadInputError, match="request 1"):
        Scheduler(EngineConfig(max_model_len=8), [Request(1, (0,) * 5, 4)])


def test_a_run_that_does_not_end_says_so():
    pipeline = TagPipeline(
        device.open("sim"), EngineConfig(), pp_align.STAGGERED, "after", RandomAcceptance(0)
    )
    with pytest.raises(BadInputError, match="max_steps"):
        pipeline.run(max_steps=3)


@pytest.mark.parametrize("width", [1024, 8192])
def test_a_row_of_nan_samples_the_last_index_of_the_first_block(width):
    logits = torch.randn(3, 2 * width, generator=torch.Generator().manual_seed(0))
    logits[1] = float("nan")
    found = blocked_argmax(logits, width)
    assert found[1] == width - 1
    assert found[[0, 2]].tolist() == logits[[0, 2]].argmax(dim=1).tolist()


def test_equal_maxima_give_the_first_as_argmax_does():
    logits = torch.zeros(1, 16)
    logits[0, [3, 5, 12]] = 1
    assert blocked_argmax(logits, 8).tolist() == [3]


@pytest.mark.parametrize("width", [0, 3, 32])
def test_a_width_that_does_not_divide_the_vocabulary_is_refused(width):
    with pytest.raises(BadInputError):
        blocked_argmax(torch.zeros(1, 16), width)


def test_the_model_says_different_things_to_different_prompts():
    speaking = SpeakingPipeline(device.open("sim"), EngineConfig(), pp_align.STAGGERED, "after")
    assert len({tuple(text) for text in speaking.texts.values()}) == len(pp_align.STAGGERED)
    first = pp_align.STAGGERED[0]
    assert expected_text(speaking.models, first.prompt, first.max_tokens) == speaking.texts[1]


@pytest.mark.parametrize("world_size", [2, 3])
def test_real_ranks_copy_wrongly_before_and_not_after(world_size):
    before, after = (pp_align.ranks(subject, world_size) for subject in ("before", "after"))
    assert all(wrong > 0 for wrong in before["wrong_copies"][:-1]) and before["wrong_copies"][-1] == 0
    assert before["texts_wrong"] and before["agree"]
    assert after["effect"] == "clean" and after["wrong_copies"] == [0] * world_size
    assert len(after["devices"]) == world_size and after["backend"] == "gloo"


def test_real_ranks_say_what_the_pipeline_in_one_process_says():
    seen, cell = pp_align.ranks("before", 2), pp_align.control("before", "eager", pp_size=2)
    assert sum(seen["wrong_copies"]) == cell["wrong_copies"] and seen["effect"] == cell["effect"]


def test_a_rank_that_fails_is_named(monkeypatch):
    monkeypatch.setattr(
        "specmortem.incidents.pp_align_copy.engine.ranks.run_arms",
        lambda arms, **k: [ArmResult(arms[0], "timeout", message="killed")],
    )
    with pytest.raises(UnavailableError, match="rank 0 of 1 ended with timeout"):
        run_ranks(1, "after", EngineConfig(), pp_align.STAGGERED)
