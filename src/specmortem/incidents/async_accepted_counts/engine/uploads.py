"""A step's inputs on their way to the device: pinned buffers, device tensors, and the event after which to write again.

The event is recorded after the uploads of a step and ahead of its forward, and waited for before the next step's host
work (vLLM: `synchronize_input_prep`, vllm/v1/worker/gpu_model_runner.py:4044 in 0.23.0). So the host runs at most one
step ahead. It says nothing about what the device does after it: the counts of that step come later.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from specmortem.device import Device, HostBuffer, Stream
from specmortem.errors import BadInputError


class Uploads:
    """Named int32 inputs, each a pinned buffer and a device tensor of one shape."""

    def __init__(self, device: Device, stream: Stream, shapes: Mapping[str, Sequence[int]]) -> None:
        self.device, self.stream = device, stream
        self._host: dict[str, HostBuffer] = {
            name: device.host_buffer(shape, torch.int32, name=f"{name} (host)")
            for name, shape in shapes.items()
        }
        self._device = {name: device.zeros(shape, torch.int32, name=name) for name, shape in shapes.items()}
        self._uploaded = device.event("prepare_inputs_event")

    def __getitem__(self, name: str) -> torch.Tensor:
        return self._device[name]

    def wait(self) -> None:
        """Block until the uploads of the step before have read their buffers."""
        self._uploaded.synchronize()

    def put(self, name: str, values: Any) -> torch.Tensor:
        """Rows 0 … len(values) - 1 of an input, enqueued; gives them as a device tensor.

        Raises BadInputError when there are more rows than the input has.
        """
        host, rows = self._host[name], len(values)
        if rows > len(host):
            raise BadInputError(f"input {name!r} has {len(host)} rows, not {rows}")
        if rows:
            host[:rows] = values
            self.device.copy_async(self._device[name][:rows], host.rows(0, rows), self.stream, name=name)
        return self._device[name][:rows]

    def seal(self) -> None:
        """All inputs of this step are enqueued."""
        self._uploaded.record(self.stream)
