"""The study of incident `dflash-oob`: which arms run, in processes of their own, and the result rows they give."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import pandas as pd

from specmortem import study
from specmortem.incidents.dflash_oob import arms
from specmortem.incidents.dflash_oob.proposer import capture_sizes, padded_size
from specmortem.isolation import Arm, run_arms
from specmortem.verdict import DeviceKind, Row

MODULE = "specmortem.incidents.dflash_oob.arms"
CAUSE_OF = {
    "input-kernel": "v1-rejected-equals-context",
    "stale-graph-tail": "stale-graph-tail",
    "stale-graph-tail-k3": "stale-graph-tail",
    "buffer-1024-capture-512": "capture-below-buffer",
    "stale-block-id": "stale-block-id",
    "gdn-lookup": "gdn-unbounded-accepted",
    "count-to-lookup-chain": "count-to-lookup-chain",
}
RELEASES = ("0.20.1", "0.22.1", "0.24.0", "0.28.0", "0.33.0")


def control_rows(device: DeviceKind, seed: int, transitions: int) -> list[Row]:
    """Every cell of the table candidates x controls."""
    timed = [cell for cell in arms.cells() if cell[0] == "count-to-lookup-chain"]
    others = [cell for cell in arms.cells() if cell not in timed]
    rows = []
    for cells, side_by_side in ((others, 8), (timed, 1)):
        asked = [_control(candidate, control, device, seed, transitions) for candidate, control in cells]
        for end, (candidate, control) in zip(run_arms(asked, cuda_parallel=side_by_side), cells, strict=True):
            rows.append(study.row(end, CAUSE_OF[candidate], _arm_name(candidate, control), "before", seed))
    return rows


def _control(candidate: str, control: str, device: DeviceKind, seed: int, transitions: int) -> Arm:
    kwargs = {
        "candidate": candidate,
        "control": control,
        "device": device,
        "seed": seed,
        "transitions": transitions,
    }
    env = {"CUDA_LAUNCH_BLOCKING": "1"} if device == "cuda" and control == "launch-blocking" else {}
    return Arm(f"{MODULE}:control", kwargs, f"{candidate}, {control}", 180, device, env)


def _arm_name(candidate: str, control: str) -> str:
    return f"k3/{control}" if candidate.endswith("-k3") else control


def link_rows(device: DeviceKind, seed: int, transitions: int) -> list[Row]:
    """The chain whole, with each link mended alone, and with all of them."""
    kwargs = {"device": device, "seed": seed, "transitions": transitions}
    asked = [
        Arm(f"{MODULE}:chain", {"link": link, **kwargs}, f"chain, {link}", 180, device) for link in arms.LINKS
    ]
    return [
        study.row(
            end,
            "count-to-lookup-chain",
            link if link in ("before", "after") else "one-link-mended",
            link,
            seed,
        )
        for end, link in zip(run_arms(asked), arms.LINKS, strict=True)
    ]


def random_rows(
    device: DeviceKind, seed: int, launches: int, requests: int = 64, k: int = 15, parts: int = 4
) -> list[Row]:
    """Random request states, `requests` to a launch: a quarter of the launches before, all of them after.

    Each part has a seed of its own.
    """
    rows = []
    for arm, share in (("before", 4), ("after", 1)):
        each = -(-launches // (parts * share))
        kwargs = {"arm": arm, "launches": each, "requests": requests, "k": k, "device": device}
        asked = [
            Arm(f"{MODULE}:random_states", {**kwargs, "seed": seed + part}, f"random, {arm}", 300, device)
            for part in range(parts)
        ]
        ended = run_arms(asked, cuda_parallel=parts)
        rows.append(study.total(ended, "v1-rejected-equals-context", "random-states", arm, seed, "states"))
    return rows


def schedule_rows() -> list[Row]:
    """Every distinguishable schedule of the small case, on the simulator whatever the device is."""
    asked = [
        Arm(f"{MODULE}:schedules", {"arm": arm}, f"schedules, {arm}", 180) for arm in ("before", "after")
    ]
    ended = run_arms(asked)
    return [
        study.total(
            [end], "v1-rejected-equals-context", "schedules", str(end.arm.kwargs["arm"]), None, "schedules"
        )
        for end in ended
    ]


def replay_rows(device: DeviceKind, seed: int, replays: int) -> list[Row]:
    """Graph replays over random states of the `after` proposer, and over random counts of the `after` lookup."""
    kwargs = {"arm": "after", "replays": replays, "seed": seed, "device": device}
    asked = [
        Arm(f"{MODULE}:graph_replays", kwargs, "graph replays", 600, device),
        Arm(f"{MODULE}:lookup_replays", kwargs, "lookup replays", 600, device),
    ]
    proposer, lookup = run_arms(asked, cuda_parallel=2)
    return [
        study.total([proposer], "v1-rejected-equals-context", "graph-replays", "after", seed, "replays"),
        study.total([lookup], "gdn-unbounded-accepted", "graph-replays", "after", seed, "replays"),
    ]


def control_table(rows: Sequence[Row]) -> pd.DataFrame:
    """Candidates x controls, each cell the effect; the last columns compare with the report."""
    table: dict[str, dict[str, str]] = {}
    for row in rows:
        candidate, control = _candidate(row)
        table.setdefault(candidate, {})[control] = str(row.evidence.detail.get("effect", row.outcome))
    frame = pd.DataFrame.from_dict(table, orient="index")[list(arms.CONTROLS)]
    frame["verdict"] = ["consistent" if arms.consistent(cells) else "refuted" for cells in table.values()]
    frame.loc["reported"] = [*arms.REPORTED.values(), ""]
    return frame.rename_axis("candidate cause")


def _candidate(row: Row) -> tuple[str, str]:
    """The candidate and control that a control row came from."""
    name, _, control = row.arm.rpartition("/")
    suffix = f"-{name}" if name else ""
    candidate = next(c for c, cause in CAUSE_OF.items() if cause == row.cause and c.endswith(suffix))
    return candidate, control


def crash_table(data: Mapping[str, Any]) -> pd.DataFrame:
    """What the scheduler dumps of the two crashes allow: one line a hypothesis, computed from their numbers."""
    config, crashes = data["configuration"], data["crashes"]
    k, limit = config["num_speculative_tokens"], data["smallest_hybrid_block"]["tokens"]
    sizes = capture_sizes(config["max_num_seqs"], k)
    rows_of = config["max_num_seqs"] * (k + 1)

    def line(question: str, answers: Iterable[tuple[bool, str]]) -> dict[str, str]:
        names = [crash["name"] for crash in crashes]
        told = {
            f"crash {n}": f"{'yes' if yes else 'no'}: {why}"
            for n, (yes, why) in zip(names, answers, strict=True)
        }
        return {"could it be": question} | told

    tokens = [c["total_num_scheduled_tokens"] for c in crashes]
    last = [max(c["num_computed_tokens"]) + k + 1 for c in crashes]
    padded = [padded_size(t, sizes) for t in tokens]
    return pd.DataFrame(
        [
            line(
                "a padded graph's tail",
                ((p != t, f"{t} tokens, graph of {p}") for t, p in zip(tokens, padded, strict=True)),
            ),
            line(
                "a batch larger than every graph",
                ((t > sizes[-1], f"{t} of at most {sizes[-1]}") for t in tokens),
            ),
            line(
                "a batch larger than the buffers", ((t > rows_of, f"{t} of {rows_of} rows") for t in tokens)
            ),
            line(
                "a position past the model length",
                ((p > config["max_model_len"], f"{p} of {config['max_model_len']}") for p in last),
            ),
            line(
                "a drafted token in a second block",
                ((p > limit, f"position {p}, block of {limit} (estimate)") for p in last),
            ),
        ]
    ).set_index("could it be")
