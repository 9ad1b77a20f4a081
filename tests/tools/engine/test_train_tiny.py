"""The training script: what it starts from, what it draws, and that a run put aside goes on as if it had not been."""

import json
import sys
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

from specmortem.tools.engine.tiny_model import load

sys.path.insert(0, str(Path(__file__).parents[3] / "benchmarks"))
import train_tiny  # noqa: E402


@pytest.fixture
def plan():
    return train_tiny.Plan(steps=10, seed=3, tokens=128, rate=1e-3)


def steps(run, count):
    return [run.advance() for _ in range(count)]


def test_a_fresh_model_depends_on_its_seed_only():
    first, again, other = (train_tiny.fresh_model(seed).state_dict() for seed in (0, 0, 1))
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["lm_head.weight"], other["lm_head.weight"])


def test_a_run_put_aside_goes_on_as_if_it_had_not_been(plan, tmp_path):
    whole = train_tiny.Run(plan, "cpu", None)
    expected = steps(whole, 6)
    first = train_tiny.Run(plan, "cpu", tmp_path / "run.pt")
    got = steps(first, 3)
    first.keep()
    second = train_tiny.Run(plan, "cpu", tmp_path / "run.pt")
    got += steps(second, 3)
    assert got == expected
    weights = second.model.state_dict()
    assert all(torch.equal(value, weights[name]) for name, value in whole.model.state_dict().items())


def test_the_rate_rises_stays_and_falls():
    plan = train_tiny.Plan(steps=1000, seed=0, tokens=1, rate=1.0)
    rates = [plan.rate_at(step) for step in range(1000)]
    assert rates[0] == 0.01 and rates[99:700] == [1.0] * 601
    assert rates[700:] == sorted(rates[700:], reverse=True) and rates[-1] == 0.02
    alone = [plan.rate_at(step) for step in range(1000, plan.all_steps)]
    assert alone[0] == train_tiny.STUMBLE_RATE and alone == sorted(alone, reverse=True) and alone[-1] > 0


def test_parts_and_stages_bound_the_prompts(plan, monkeypatch):
    run = train_tiny.Run(plan, "cpu", None)
    longest = {}
    monkeypatch.setattr(train_tiny, "SECOND_PART", 5)
    for step in range(10):
        run.progress.step = step
        drawn = [run.draw_length(seed) for seed in range(300)]
        assert min(drawn) >= train_tiny.MIN_PROMPT
        longest[run.part()] = max(longest.get(run.part(), 0), *drawn)
    assert longest["first"] == train_tiny.LENGTHS[0]
    assert 200 < longest["second"] <= 256 and 1000 < longest["last"] <= 2048


def test_the_head_alone_is_trained_last_and_to_be_wrong_about_hard_items(plan, tmp_path):
    said = torch.tensor([1, 8, 15, 16, 17, 24, 248])
    assert train_tiny.stumbled(said).tolist() == [1, 8, 15, 17, 17, 25, 249]
    run = train_tiny.Run(plan, "cpu", tmp_path / "run.pt")
    run.progress.step = plan.steps - 1
    run.advance()
    run.keep()
    run = train_tiny.Run(plan, "cpu", tmp_path / "run.pt")
    assert run.part() == "stumble"
    before = {name: value.clone() for name, value in run.model.state_dict().items()}
    run.advance()
    for name, value in run.model.state_dict().items():
        assert torch.equal(value, before[name]) != name.startswith("mtp."), name


def test_a_good_accuracy_ends_a_stage(plan):
    run = train_tiny.Run(plan, "cpu", None)
    run.progress.accuracy = 0.99
    run.advance()
    assert (run.progress.stage, run.progress.accuracy) == (1, train_tiny.AFTER_STAGE)
    run.progress.accuracy = 0.5
    run.advance()
    assert run.progress.stage == 1


def test_the_loss_falls_on_a_batch_seen_again(plan):
    run, tokens = train_tiny.Run(plan, "cpu", None), train_tiny.batch(4, 0, 20, "cpu")
    run.progress.step = 5
    before = train_tiny.losses(run.model, tokens, head=True)
    for _ in range(8):
        main, head, _ = train_tiny.losses(run.model, tokens, head=True)
        run.update(main + head)
    after = train_tiny.losses(run.model, tokens, head=True)
    assert after[0] < before[0] and after[1] < before[1]


def test_the_command_leaves_a_model_and_its_log(tmp_path):
    out = tmp_path / "model"
    told = CliRunner().invoke(
        train_tiny.main,
        ["--out", str(out), "--minutes", "0.0001", "--tokens", "64", "--device", "cpu", "--steps", "20"],
        catch_exceptions=False,
    )
    assert told.exit_code == 0
    log = json.loads((out / "training.json").read_text())
    assert (log["steps_done"], log["held_out"], log["plan"]["seed"]) == (1, None, 0)
    assert load(out).config.vocab_size == 256
