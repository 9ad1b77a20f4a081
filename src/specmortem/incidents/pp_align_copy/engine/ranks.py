"""The same worker step as real ranks: one process a rank, over torch.distributed.

Hidden states go from rank to rank, and the last rank broadcasts what it sampled. Nothing here delays anything on
purpose: a rank posts the receive of a step's tokens, goes on to the next batch, and waits only when the scheduler needs
them, which with `world_size` batches under way is `world_size` steps later. Every rank runs the same deterministic
scheduler, so batches need not travel.
"""

from __future__ import annotations

import datetime
import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Self

import torch
import torch.distributed as dist

from specmortem import device as devices
from specmortem.device import Device
from specmortem.errors import BadInputError, UnavailableError
from specmortem.incidents.pp_align_copy.engine.recurrent_model import SpeakingPipeline
from specmortem.incidents.pp_align_copy.engine.scheduler import Batch, EngineConfig, Request, Sampled
from specmortem.incidents.pp_align_copy.engine.worker import Worker
from specmortem.isolation import Arm, run_arms
from specmortem.verdict import DeviceKind

TIMEOUT_S = 120


class Outputs:
    """Sampled tokens of one batch: known on the last rank, on the others once the broadcast has arrived."""

    def __init__(
        self, batch: Batch, tokens: list[list[int]] | None, width: int, where: str, group: Any
    ) -> None:
        self._rows = len(batch.rows)
        self._tokens = tokens if self._rows else []
        self._work: Any = None
        if self._rows and group is not None:
            padded = [[*row, *[-1] * (width - len(row))] for row in tokens or [[-1] * width] * self._rows]
            self._sent = torch.tensor(padded, device=where)
            last = dist.get_world_size() - 1
            self._work = dist.broadcast(self._sent, src=last, group=group, async_op=True)

    def tokens(self) -> list[list[int]]:
        """The tokens of each row; waits for them."""
        if self._tokens is None:
            self._work.wait()
            self._tokens = [[t for t in row if t >= 0] for row in self._sent.tolist()]
        return self._tokens

    def wait(self) -> None:
        """Until the broadcast has been sent or received."""
        if self._work is not None:
            self._work.wait()


class PipelineRank(SpeakingPipeline):
    """One rank of the pipeline; `group` is that of all ranks, None where there is one only."""

    def __init__(
        self,
        rank: int,
        subject: str,
        device: Device,
        config: EngineConfig,
        requests: Sequence[Request],
        group: Any,
    ) -> None:
        super().__init__(device, config, requests, subject, ranks=[rank])
        self.rank, self.last, self.group = rank, config.pp_size - 1, group
        self.where = device.torch_device
        self._started: list[Outputs] = []

    def run(self, max_steps: int = 100_000) -> Self:
        """Steps until no request is left; raises BadInputError when there are more than `max_steps`."""
        super().run(max_steps)
        for outputs in self._started:
            outputs.wait()
        return self

    def _sampled(self, batch: Batch, hidden: torch.Tensor | None) -> Sampled:
        sampled = self.sampler(batch, hidden) if self.rank == self.last else None
        width = 1 + self.config.num_speculative_tokens
        outputs = Outputs(batch, sampled, width, self.where, self.group)
        self._started.append(outputs)
        return outputs.tokens

    def _forward(self, worker: Worker, batch: Batch, hidden: torch.Tensor | None) -> torch.Tensor | None:
        hidden = worker.forward(batch, self._receive(batch) if self.rank > 0 else None)
        if self.rank < self.last and hidden is not None:
            dist.send(hidden.contiguous(), self.rank + 1)
        return hidden

    def _receive(self, batch: Batch) -> torch.Tensor:
        tokens = sum(row.num_tokens for row in batch.rows)
        hidden = torch.empty(tokens, self.models[0].dim, device=self.where)
        dist.recv(hidden, self.rank - 1)
        if hidden.is_cuda:
            torch.cuda.current_stream().synchronize()
        return hidden


def run_rank(
    rank: int,
    world_size: int,
    meeting: str,
    subject: str,
    config: Mapping[str, int],
    requests: Sequence[Sequence[Any]],
    device: Literal["sim", "cuda"] = "sim",
) -> dict[str, Any]:
    """One rank, in a process of its own. `meeting` is a file that all ranks can open; the group is left at the end."""
    if device == "cuda":
        torch.cuda.set_device(rank)
    dev = devices.open(device)
    settings = EngineConfig(**{**config, "pp_size": world_size})
    asked = [Request(req_id, tuple(prompt), *rest) for req_id, prompt, *rest in requests]
    group = _join(rank, world_size, meeting, device)
    try:
        one = PipelineRank(rank, subject, dev, settings, asked, group).run()
    finally:
        if group is not None:
            dist.destroy_process_group()
    wrong = one.wrong
    return {
        "rank": rank,
        "steps": one.steps,
        "copies": len(one.copied),
        "wrong": len(wrong),
        "first_wrong_step": wrong[0].step if wrong else None,
        "nan_rows": one.verifier.nan_rows,
        "outputs": {str(req_id): tokens for req_id, tokens in one.scheduler.finished.items()},
        "expected": {str(req_id): tokens for req_id, tokens in one.texts.items()},
        "device": dev.info.name,
        "backend": backend_version(device) if group is not None else "",
    }


def backend_version(device: str) -> str:
    """What ranks talk over, with NCCL's version."""
    if device != "cuda":
        return "gloo"
    nccl: Any = torch.cuda.nccl
    return f"NCCL {'.'.join(map(str, nccl.version()))}"


def _join(rank: int, world_size: int, meeting: str, device: str) -> Any:
    """A group for the sampled tokens, of all ranks; None where there is one rank only."""
    if world_size == 1:
        return None
    backend = "nccl" if device == "cuda" else "gloo"
    if device == "sim":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo0" if sys.platform == "darwin" else "lo")
    os.environ.setdefault("NCCL_NVLS_ENABLE", "0")  # two ranks gain nothing from NVLink multicast
    dist.init_process_group(
        backend,
        init_method=f"file://{meeting}",
        rank=rank,
        world_size=world_size,
        timeout=datetime.timedelta(seconds=TIMEOUT_S),
    )
    return dist.new_group()


def run_ranks(
    world_size: int,
    subject: str,
    config: EngineConfig,
    requests: Sequence[Request],
    device: DeviceKind = "sim",
    timeout_s: float = TIMEOUT_S + 30,
) -> list[dict[str, Any]]:
    """What each rank returned (see `run_rank`), in order; on CUDA every rank has a GPU of its own.

    Raises UnavailableError when a rank did not end well, with the message of the first one that did not.
    """
    if world_size < 1:
        raise BadInputError(f"world_size is {world_size}; give at least 1")
    with tempfile.TemporaryDirectory() as folder:
        shared = {
            "world_size": world_size,
            "meeting": str(Path(folder) / "meeting"),
            "subject": subject,
            "config": vars(config),
            "requests": [[*vars(request).values()] for request in requests],
            "device": device,
        }
        arms = [
            Arm(f"{__name__}:run_rank", {"rank": rank, **shared}, f"rank {rank}", timeout_s, device)
            for rank in range(world_size)
        ]
        ended = run_arms(arms, parallel=world_size, cuda_parallel=world_size)
    for end in ended:
        if end.kind != "value":
            raise UnavailableError(
                f"{end.arm.label} of {world_size} ended with {end.kind}: {end.message}; "
                "ranks need a network interface, and on CUDA one GPU each"
            )
    return [end.value for end in ended]
