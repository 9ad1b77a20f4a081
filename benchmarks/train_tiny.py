"""Train the tiny model of data/tiny-recall: recall tasks for the main model, drafts of the same for its head.

    python benchmarks/train_tiny.py --steps 6000 --seed 0 --device cpu --out data/tiny-recall --state run.pt

First prompts get longer as the main model gets better; then short and long ones come in equal shares and the head
counts for more; then the prompts are longer still and the learning rate falls. By then every draft is right, and a
speculating engine would never see one refused; so at last the head alone is taught to be wrong about every eighth
item, which makes the accepted counts differ between requests and steps. A run that stops at --minutes
leaves its state in --state, and the next call with the same arguments goes on from there. --out gets the checkpoint
as a released engine loads it, and training.json: the plan, versions, loss and accuracy along the way, and, once all
steps are done, what the checkpoint does on held-out tasks (those of negative seeds, which training never draws).
"""

import json
import math
import platform
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path

import click
import torch
from torch import Tensor
from torch.nn import functional

from specmortem.tools.engine import recall
from specmortem.tools.engine.tasks import FIRST_ITEM, MIN_PROMPT, tasks
from specmortem.tools.engine.tiny_model import LINEAR, Attention, GatedDelta, TinyModel, load, save
from specmortem.verdict import write_atomically

LENGTHS = (24, 40, 64, 100, 150, 200)  # longest prompt of each stage
SECOND_PART = 2300  # steps in
LAST_PART = 0.7  # of the steps
LONGEST = {"second": 256, "last": 2048, "stumble": 2048}
STUMBLE_STEPS, STUMBLE_RATE = 400, 1e-3  # after the others, for the head alone
HARD = 8  # the head is wrong about items that this divides
STAGE_UP = 0.9  # accuracy, averaged over recent steps, that ends a stage
AFTER_STAGE = 0.7  # where that average starts again
ANSWER = 40
DEPTH = 3
HEAD_FROM = 0.5  # accuracy from which the head is trained
HEAD_WEIGHT = {"first": 0.5, "second": 2.0, "last": 2.0, "stumble": 1.0}
LOG_EVERY = 20
LEAST_DECAY, MOST_DECAY = 1e-4, 0.3  # of a fresh model's state, per token


def fresh_model(seed: int) -> TinyModel:
    """Random weights that make recall easy to find: none of them knows the tasks.

    Output rows point along the embeddings. Attention heads look for tokens like their own and put back what they
    read. The value heads of a delta layer hold the token, the last one, the one before it, and so on.
    """
    torch.manual_seed(seed)
    model = TinyModel()
    with torch.no_grad():
        model.model.embed_tokens.weight.mul_(0.3)
        model.lm_head.weight.copy_(model.model.embed_tokens.weight / 3)
        for layer in model.model.layers:
            if layer.kind == LINEAR:
                hold_last_tokens(layer.linear_attn)
            else:
                copy_what_matches(layer.self_attn)
        copy_what_matches(model.mtp.layers[0].self_attn)
    return model


def copy_what_matches(layer: Attention) -> None:
    """Queries like keys, and an output that undoes the values."""
    for head in range(layer.heads):
        rows = slice(head * layer.size, (head + 1) * layer.size)
        query = slice(2 * head * layer.size, (2 * head + 1) * layer.size)
        layer.q_proj.weight[query] = layer.k_proj.weight[rows]
        basis = torch.linalg.qr(torch.randn(layer.v_proj.in_features, layer.size)).Q.T
        layer.v_proj.weight[rows] = basis
        layer.o_proj.weight[:, rows] = basis.T


def hold_last_tokens(layer: GatedDelta) -> None:
    """Queries like keys, decays from slow to fast, and each value head's convolution on another of the last tokens."""
    rates = torch.logspace(math.log10(LEAST_DECAY), math.log10(MOST_DECAY), layer.heads)
    layer.dt_bias.copy_(rates.expm1().log())
    keys = layer.key_heads * layer.key_size
    grouped = layer.in_proj_qkvz.weight.unflatten(0, (layer.key_heads, -1))
    grouped[:, layer.key_size : 2 * layer.key_size] = grouped[:, : layer.key_size]
    layer.conv1d.weight[keys : 2 * keys] = layer.conv1d.weight[:keys]
    values = layer.conv1d.weight[2 * keys :].unflatten(0, (layer.heads, layer.size))
    values.mul_(0.1)
    for head in range(layer.heads):
        values[head, :, 0, layer.kernel - 1 - head % layer.kernel] += 1


def batch(rows: int, seed: int, length: int, device: str) -> Tensor:
    """Prompts with their answers [rows, length + ANSWER]."""
    drawn = tasks(rows, seed, (length, length), ANSWER)
    return torch.tensor([task.prompt + task.answer for task in drawn], device=device)


def stumbled(tokens: Tensor) -> Tensor:
    """What the head is to say for tokens: the next one in place of every hard item."""
    return tokens + ((tokens >= FIRST_ITEM) & (tokens % HARD == 0)).long()


def losses(
    model: TinyModel, tokens: Tensor, head: bool, stumble: bool = False
) -> tuple[Tensor, Tensor, float]:
    """Loss of the answers, loss of the drafts (0 without `head`), and the share of answer tokens that are right."""
    with torch.set_grad_enabled(not stumble):
        hidden, _ = model(tokens[:, :-1])
    said, wanted = model.logits(hidden[:, -ANSWER:]), tokens[:, -ANSWER:]
    loss = functional.cross_entropy(said.flatten(0, 1), wanted.flatten())
    right = float((said.argmax(-1) == wanted).float().mean())
    if not head:
        return loss, torch.zeros(()), right
    first = (
        tokens.shape[1] - ANSWER - DEPTH
    )  # the last place whose drafts all lie ahead of the second answer token
    drafts = model.unrolled_drafts(tokens[:, :-1], hidden[:, :-1], DEPTH, first - 1)
    drafted = [model.logits(out[:, 1 - ANSWER :]).flatten(0, 1) for out in drafts]
    target = (stumbled(wanted) if stumble else wanted)[:, 1:].flatten()
    parts = [functional.cross_entropy(said, target) for said in drafted]
    return loss, torch.stack(parts).mean(), right


@dataclass
class Progress:
    """How far a run is; kept with the weights."""

    step: int = 0
    stage: int = 0
    accuracy: float = 0.0
    seconds: float = 0.0
    curve: list[dict[str, float]] = field(default_factory=list)


@dataclass(frozen=True)
class Plan:
    """What a run is asked for; `rate` is the learning rate at its peak, `tokens` those of one step."""

    steps: int
    seed: int
    tokens: int
    rate: float

    @property
    def all_steps(self) -> int:
        """Steps of the model and of the head alone."""
        return self.steps + STUMBLE_STEPS

    def rate_at(self, step: int) -> float:
        """100 steps up, flat, and down over the last part; down once more for the head alone."""
        if step >= self.steps:
            return STUMBLE_RATE * (self.all_steps - step) / STUMBLE_STEPS
        return self.rate * min(
            1.0, (step + 1) / 100, max(0.02, (self.steps - step) / ((1 - LAST_PART) * self.steps))
        )


class Run:
    """A training run that can be put aside."""

    def __init__(self, plan: Plan, device: str, state: Path | None) -> None:
        self.plan, self.device, self.state = plan, device, state
        self.model, self.progress = fresh_model(plan.seed).to(device), Progress()
        kept = torch.load(state, map_location=device) if state and state.exists() else None
        if kept:
            self.model.load_state_dict(kept["model"])
            self.progress = Progress(**kept["progress"])
        self.optimizer = self.fresh_optimizer()
        if kept and self.progress.step != plan.steps:
            self.optimizer.load_state_dict(kept["optimizer"])

    def fresh_optimizer(self) -> torch.optim.Optimizer:
        """Of all weights, or of the head's in the part that trains it alone."""
        trained = self.model.mtp if self.part() == "stumble" else self.model
        return torch.optim.AdamW(
            trained.parameters(), lr=self.plan.rate, betas=(0.9, 0.98), weight_decay=0.01
        )

    def keep(self) -> None:
        """Puts the run aside, where a file was named for it."""
        if self.state:
            parts = {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}
            torch.save(parts | {"progress": asdict(self.progress)}, self.state)

    def go(self, minutes: float) -> Iterator[dict[str, float]]:
        """Steps until all are done or the time is up; yields the lines of the log."""
        begin, before = time.monotonic(), self.progress.seconds
        while self.progress.step < self.plan.all_steps:
            line = self.advance()
            self.progress.seconds = before + time.monotonic() - begin
            if line["step"] % LOG_EVERY == 0 or line["step"] == self.plan.all_steps:
                line = {name: round(value, 4) for name, value in line.items()}
                self.progress.curve.append(line | {"seconds": round(self.progress.seconds)})
                yield self.progress.curve[-1]
            if minutes and time.monotonic() - begin > 60 * minutes:
                break

    def part(self) -> str:
        """The part of the run that the next step belongs to."""
        step = self.progress.step
        if step >= self.plan.steps:
            return "stumble"
        if step >= LAST_PART * self.plan.steps:
            return "last"
        return "first" if step < SECOND_PART else "second"

    def draw_length(self, seed: int) -> int:
        """A prompt length: in the first part each is equally likely, later each doubling."""
        draw, part = torch.Generator().manual_seed(seed), self.part()
        if part == "first":
            return int(torch.randint(MIN_PROMPT, LENGTHS[self.progress.stage] + 1, (), generator=draw))
        share = float(torch.rand((), generator=draw))
        return round(MIN_PROMPT * (LONGEST[part] / MIN_PROMPT) ** share)

    def advance(self) -> dict[str, float]:
        """One step, and what to log of it."""
        now, seed = self.progress, self.plan.seed * 10**6 + self.progress.step
        part, length = self.part(), self.draw_length(seed)
        if now.step == self.plan.steps:
            self.optimizer = self.fresh_optimizer()
        tokens = batch(max(1, self.plan.tokens // (length + ANSWER)), seed, length, self.device)
        with_head = now.stage > 0 or now.accuracy > HEAD_FROM or part == "stumble"
        loss, drafts, right = losses(self.model, tokens, with_head, part == "stumble")
        self.update(loss + HEAD_WEIGHT[part] * drafts)
        now.step += 1
        now.accuracy += 0.05 * (right - now.accuracy)
        logged = {
            "step": now.step,
            "prompt": length,
            "loss": loss.item(),
            "head_loss": drafts.item(),
        }
        logged["accuracy"] = now.accuracy
        if now.accuracy > STAGE_UP and now.stage < len(LENGTHS) - 1:
            now.stage, now.accuracy = now.stage + 1, AFTER_STAGE
        return logged

    def update(self, loss: Tensor) -> None:
        """One step of the optimizer."""
        self.model.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        for group in self.optimizer.param_groups:
            group["lr"] = self.plan.rate_at(self.progress.step)
        self.optimizer.step()


def log_of(run: Run, out: Path) -> dict[str, object]:
    """What training.json says."""
    done = run.progress.step == run.plan.all_steps
    cuda = run.device.startswith("cuda")
    return {
        "plan": asdict(run.plan) | {"stumble_steps": STUMBLE_STEPS},
        "script": "benchmarks/train_tiny.py",
        "versions": {"python": platform.python_version(), "torch": torch.__version__},
        "device": torch.cuda.get_device_name() if cuda else f"cpu, {torch.get_num_threads()} thread",
        "parameters": sum(value.numel() for value in run.model.parameters()),
        "steps_done": run.progress.step,
        "seconds": round(run.progress.seconds),
        "held_out": recall.measure(load(out).to(run.device)) if done else None,
        "curve": run.progress.curve,
    }


def text_of(log: dict[str, object]) -> str:
    """JSON with one field, and one line of the curve, a line."""
    *fields, curve = [f"{json.dumps(name)}: {json.dumps(value)}" for name, value in log.items()]
    return "{\n" + ",\n".join([*fields, curve.replace("}, {", "},\n{")]) + "\n}\n"


@click.command(help=__doc__)
@click.option("--steps", default=6000, show_default=True)
@click.option("--seed", default=0, show_default=True)
@click.option("--tokens", default=1536, show_default=True, help="tokens of one step")
@click.option("--rate", default=3e-3, show_default=True, help="peak learning rate")
@click.option("--device", default="cuda" if torch.cuda.is_available() else "cpu", show_default=True)
@click.option("--minutes", default=0.0, help="stop after so many minutes (0: at the last step only)")
@click.option("--out", type=click.Path(path_type=Path), required=True, help="directory of the model")
@click.option("--state", type=click.Path(path_type=Path), help="file that keeps an unfinished run")
def main(
    steps: int,
    seed: int,
    tokens: int,
    rate: float,
    device: str,
    minutes: float,
    out: Path,
    state: Path | None,
) -> None:
    torch.set_num_threads(1)
    run = Run(Plan(steps, seed, tokens, rate), device, state)
    for line in run.go(minutes):
        click.echo(json.dumps(line))
    run.keep()
    save(run.model, out)
    write_atomically(out / "training.json", text_of(log_of(run, out)))


if __name__ == "__main__":
    main()
