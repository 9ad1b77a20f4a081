"""Bandwidth of the align copies against a device-to-device copy of the same bytes, and against a released kernel.

usage: python benchmarks/align_copy.py OUT.json [--released vllm==0.33.0] [--no-sweep]   (needs a GPU)

Exit code 1: a criterion fails (85 % of the copy for states of 1 MiB and more; no slower than the released kernel).
2: there is no GPU.
"""

import argparse
import itertools
import json
import statistics
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from specmortem import device as devices
from specmortem import upstream
from specmortem.device.cuda import missing
from specmortem.errors import SpecmortemError
from specmortem.incidents.pp_align_copy import kernels as align_copy
from specmortem.incidents.pp_align_copy.kernels import (
    AFTER,
    AlignCounters,
    AlignStates,
    RecurrentState,
    Tuning,
)
from specmortem.incidents.pp_align_copy.shift import ReleasedCopies
from specmortem.upstream.vllm_files import MAMBA
from specmortem.verdict import versions, write_atomically

SIZES_KIB = (64, 256, 1024, 2048, 4096, 8192)
KINDS = (("temporal", torch.float32), ("conv", torch.bfloat16))
OPS = ("postcopy", "precopy")
REQUESTS, LAYERS = 8, 48
WIDTH, BIAS, BLOCK_SIZE = 8, 1, 16
ROTATED_BYTES = 1 << 30  # read and written before a block is touched again; the L2 cache of an H200 has 50 MB
WARM_UP, ROUNDS, SWEEP_ROUNDS = 3, 25, 10
SLEEP_CYCLES = 2_000_000
LEAST_OF_COPY, LEAST_OF_RELEASED = 0.85, 0.98
LARGE_KIB = 1024
TUNINGS = [Tuning(*t) for t in itertools.product((8, 16, 32, 64), (1024, 2048, 4096), (4, 8))]
Launch = Callable[[int], object]


@dataclass
class Case:
    """States of one kind and size in shuffled blocks: slot s copies one block to another in every layer.

    A launch copies for `requests` slots; launch r takes the slots after those of launch r - 1.
    """

    kind: str
    dtype: torch.dtype
    size: int
    device: str = "cuda"
    requests: int = REQUESTS
    layers: int = LAYERS
    rotated_bytes: int = ROTATED_BYTES

    def __post_init__(self) -> None:
        self.rotations = max(1, -(-self.rotated_bytes // (2 * self.requests * self.layers * self.size)))
        slots = self.requests * self.rotations
        self.pool = torch.empty(self.layers, 1 + 2 * slots, self.size, dtype=torch.uint8, device=self.device)
        ids = 1 + torch.randperm(2 * slots, generator=torch.Generator().manual_seed(0), dtype=torch.int32)
        self.src, self.dst = ids.to(self.device).split(slots)
        self.shift = BIAS * self.size // WIDTH if self.kind == "conv" else 0
        self.counters = AlignCounters.empty(slots, self.device)
        order = torch.arange(slots, dtype=torch.int32, device=self.device)
        self.mappings = order.split(self.requests)

    @property
    def state_bytes(self) -> int:
        """Bytes of one copy of one state."""
        return self.size - self.shift

    @property
    def launch_bytes(self) -> int:
        """Bytes that one launch copies; it reads and writes so many."""
        return self.requests * self.layers * self.state_bytes

    def states(self, op: str) -> AlignStates:
        """Tables [slots, 3] under which `op` copies from src to dst."""
        columns = (self.dst, self.src, self.src) if op == "postcopy" else (self.src, self.src, self.dst)
        parts = []
        for layer in self.pool:
            typed = layer.view(self.dtype)
            conv = self.kind == "conv"
            parts.append(
                RecurrentState(typed.unflatten(1, (WIDTH, -1)) if conv else typed, 0, WIDTH if conv else 0)
            )
        return AlignStates([torch.stack(columns, dim=1)], parts)

    def count(self, op: str) -> AlignCounters:
        """AlignCounters under which every slot copies, with BIAS accepted tokens before the boundary."""
        c = self.counters
        if op == "postcopy":
            values = {"state_idx": 1, "num_computed": BLOCK_SIZE + 1, "num_accepted": BIAS + 2}
        else:
            values = {"state_idx": 2, "src_col": 0, "src_off": BIAS}
        for name, value in values.items():
            getattr(c, name).fill_(value)
        return c

    def own(self, op: str, tuning: Tuning | None = None) -> Launch:
        """This package's kernel."""
        states, c = self.states(op), self.count(op)
        if op == "postcopy":
            return lambda r: align_copy.postcopy(states, c, self.mappings[r], BLOCK_SIZE, AFTER, tuning)
        return lambda r: align_copy.precopy(states, c, self.mappings[r], AFTER, tuning)

    def released(self, op: str, tree: upstream.Tree) -> Launch:
        """The kernel of a release, through its own launcher."""
        copies, c = ReleasedCopies(tree, self.states(op), len(self.src), BLOCK_SIZE), self.count(op)
        method = copies.postcopy if op == "postcopy" else copies.precopy
        return lambda r: method(c, self.mappings[r])

    def one_copy(self, r: int) -> None:
        """The same number of bytes in one contiguous copy."""
        flat, n = self.pool.view(-1), self.launch_bytes
        flat[(2 * r + 1) * n : (2 * r + 2) * n].copy_(flat[2 * r * n : (2 * r + 1) * n])

    def block_copies(self) -> Launch:
        """The same blocks, a copy each."""
        source, target = self.src.tolist(), self.dst.tolist()

        def launch(r: int) -> None:
            for slot in range(r * self.requests, (r + 1) * self.requests):
                for layer in self.pool:
                    layer[target[slot], : self.state_bytes].copy_(layer[source[slot], self.shift :])

        return launch

    def is_right(self, launch: Launch) -> bool:
        """Whether the launches copy what they should, from new bytes."""
        self.pool.random_(0, 256)
        for r in range(self.rotations):
            launch(r)
        src, dst = self.src.long(), self.dst.long()
        return all(
            torch.equal(layer[dst, : self.state_bytes], layer[src, self.shift :]) for layer in self.pool
        )


def microseconds(launch: Launch, rotations: int, rounds: int) -> float:
    """Median time of one launch: a graph of all rotations, timed by events with the queue kept full."""
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        launch(0)
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, stream=stream):
        for r in range(rotations):
            launch(r)
    times = []
    for number in range(WARM_UP + rounds):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(SLEEP_CYCLES)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        if number >= WARM_UP:
            times.append(1000 * start.elapsed_time(end) / rotations)
    return statistics.median(times)


def measured(case: Case, op: str, tree: upstream.Tree | None) -> dict[str, Any]:
    """One row: this package's kernel, the two ways to copy, and the released kernel where it can be had."""
    contestants = {"own": case.own(op), "one_copy": case.one_copy, "block_copies": case.block_copies()}
    if tree is not None:
        contestants["released"] = case.released(op, tree)
    for name in ("own", "released"):
        if name in contestants and not case.is_right(contestants[name]):
            raise SystemExit(f"{name} {op} of {case.kind} states of {case.size} bytes copied wrong bytes")
    times = {name: microseconds(launch, case.rotations, ROUNDS) for name, launch in contestants.items()}
    return row(op, case, times)


def row(op: str, case: Case, times: dict[str, float]) -> dict[str, Any]:
    """Figures of one case; GB/s counts what is read and what is written, the faster copy is the limit."""
    limit = min(times["one_copy"], times["block_copies"])
    rate = 2 * case.launch_bytes / 1000
    released = times.get("released")
    return {
        "op": op,
        "kind": case.kind,
        "dtype": str(case.dtype).removeprefix("torch."),
        "state_kib": case.size // 1024,
        "copied_mib": round(case.launch_bytes / 2**20, 2),
        "rotations": case.rotations,
        **{f"{name}_us": round(value, 2) for name, value in times.items()},
        "own_gb_per_s": round(rate / times["own"], 1),
        "copy_gb_per_s": round(rate / limit, 1),
        "released_gb_per_s": round(rate / released, 1) if released else None,
        "of_copy": round(limit / times["own"], 4),
        "of_released": round(released / times["own"], 4) if released else None,
    }


def failures(rows: list[dict[str, Any]]) -> list[str]:
    """Criteria that a row does not meet; two hundredths are left to the clock where two kernels are compared."""
    found = []
    for one in rows:
        name = f"{one['op']} of {one['kind']} states of {one['state_kib']} KiB"
        if one["state_kib"] >= LARGE_KIB and one["of_copy"] < LEAST_OF_COPY:
            found.append(f"{name}: {one['of_copy']:.1%} of the device-to-device copy")
        if one["of_released"] is not None and one["of_released"] < LEAST_OF_RELEASED:
            found.append(f"{name}: {one['of_released']:.2f} times as fast as the released kernel")
    return found


def swept(case: Case) -> Iterator[dict[str, Any]]:
    """`postcopy` under each tuning."""
    for tuning in TUNINGS:
        time = microseconds(case.own("postcopy", tuning), case.rotations, SWEEP_ROUNDS)
        figures = {"us": round(time, 2), "gb_per_s": round(2 * case.launch_bytes / 1000 / time, 1)}
        yield {"kind": case.kind, "state_kib": case.size // 1024, **vars(tuning), **figures}


def best(sweep: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The fastest tuning of each kind and size."""
    groups: dict[tuple[str, int], list[dict[str, Any]]] = {}
    for one in sweep:
        groups.setdefault((one["kind"], one["state_kib"]), []).append(one)
    return [min(group, key=lambda one: one["us"]) for group in groups.values()]


def environment() -> dict[str, Any]:
    """Device, driver and versions."""
    properties = torch.cuda.get_device_properties(0)
    info = {**devices.open("cuda").info.as_dict(), "l2_bytes": properties.L2_cache_size}
    return {"device": info, "versions": versions(), "requests": REQUESTS, "layers": LAYERS, "rounds": ROUNDS}


def main() -> int:
    """Measure, write and say which criteria fail."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--released", default="vllm==0.33.0", help="vllm==X or tree:DIR")
    parser.add_argument("--no-sweep", action="store_true")
    given = parser.parse_args()
    if reason := missing():
        print(f"no GPU to measure on: {reason}", file=sys.stderr)
        return 2
    result: dict[str, Any] = {**environment(), "released": given.released}
    try:
        tree = upstream.resolve(given.released)
        tree.fetch([MAMBA])
    except SpecmortemError as error:
        tree, result["released"] = None, f"not measured: {error}"
    rows, sweep = [], []
    for (kind, dtype), kib in itertools.product(KINDS, SIZES_KIB):
        case = Case(kind, dtype, kib << 10)
        rows += [measured(case, op, tree) for op in OPS]
        sweep += [] if given.no_sweep else list(swept(case))
        print(*rows[-len(OPS) :], sep="\n", flush=True)
    result |= {"rows": rows, "failures": failures(rows), "best": best(sweep), "sweep": sweep}
    write_atomically(given.out, json.dumps(result, indent=1) + "\n")
    print(*result["failures"], sep="\n")
    return int(bool(result["failures"]))


if __name__ == "__main__":
    sys.exit(main())
