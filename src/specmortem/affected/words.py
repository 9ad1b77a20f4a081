"""The way out of a launch, and what an answer lacks, in the words that every command uses."""

from __future__ import annotations

from specmortem.affected.answers import Answers
from specmortem.affected.targets import Advice, Target

# What settles a condition that is not told, by how its text begins.
COMMAND = "the whole launch command with its variables, or the log of the start"
DRAFTER = "--speculative-config, or config.json of the model, which may bring a drafter"
ASKS = (
    ("the V", COMMAND),
    ("a hybrid", "the model's name, or its config.json"),
    ("speculative", DRAFTER),
    ("MTP", DRAFTER),
    ("DFlash", DRAFTER),
    ("mamba", "whether prefixes are cached: the command, or the log of the start"),
    ("a mamba", "whether prefixes are cached: the command, or the log of the start"),
    ("prefix", "whether prefixes are cached: the command, or the log of the start"),
    ("asynchronous", "whether scheduling is asynchronous: the command, or the log of the start"),
    ("FlashInfer", "the GPU, and attention_backend of --speculative-config"),
    ("decode kernels", "the GPU"),
    ("CUDA", "the graph mode"),
    ("full", "the graph mode"),
    ("a pipeline", "--pipeline-parallel-size"),
    ("two or more", "--max-num-seqs"),
    ("blocks", "--block-size"),
    ("needs", COMMAND),
)

# The changes that are tried include a launch without drafts, so that this is never the advice here.
NOTHING = "no release and no flags on record are safe for all that is told of it"


def way_out(advice: Advice) -> str:
    """Another release, or flags on this one."""
    stay, move = advice.stay, advice.move
    ways = [f"safe on vLLM {move.release}{_with(move)}"] if move else []
    ways += [f"here{_with(stay)} ({stay.cost})"] if stay and stay.changes else []
    return "; or ".join(ways) or NOTHING


def _with(target: Target) -> str:
    return f" with {' '.join(target.flags)}" if target.flags else " as launched"


def missing(answers: Answers, subject: str = "") -> list[str]:
    """What would settle what is unknown; `subject` is the vLLM that was judged where it is no release on record."""
    version = answers.config.version
    if not version and not subject:
        return ["--vllm, the release"]
    causes = [each for one in answers.named("unknown") for each in one.deciding]
    asks = [ask for each in causes for ask in _asks(each.reach.reason, each.reach.reachable)]
    unjudged = [each for each in causes if each.verdict.status == "not-judged" and not each.rule.links]
    if unjudged and not subject:
        asks.append(f"verdicts on this release: specmortem audit vllm=={version}")
    found = list(dict.fromkeys(filter(None, asks)))
    return [ask for ask in found if not any(ask != other and other.startswith(ask) for other in found)]


def _asks(reason: str, reachable: str) -> list[str]:
    """What would settle the conditions that a reason names."""
    parts = reason.removeprefix("not told: ").split("; ") if reachable == "unknown" else []
    return [next((ask for start, ask in ASKS if part.startswith(start)), "") for part in parts]
