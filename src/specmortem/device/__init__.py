"""One interface, two devices: programs about streams and host buffers run simulated or on CUDA unchanged.

    dev = device.open("sim", schedule="lazy")
    buffer = dev.host_buffer([4], torch.int32, name="counts")
    counts = dev.zeros([4], torch.int32)
    dev.copy_async(counts, buffer)   # queued
    buffer[0] = 7                    # the copy may read this 7
    dev.synchronize()

`interface` states the rules, `schedules` and `explore` say when simulated work runs.
"""

from __future__ import annotations

from specmortem.device.cuda import CudaDevice
from specmortem.device.cuda import missing as _cuda_missing
from specmortem.device.explore import Chosen, Interleaving, Interleavings, PromptCopies, enumerate_schedules
from specmortem.device.interface import CaptureError, Device
from specmortem.device.memory import Op, Region
from specmortem.device.objects import Event, Graph, HostBuffer, Stream
from specmortem.device.schedules import Immediate, Lazy, Random, Schedule, ScheduleError, Timed, named
from specmortem.device.sim import SimDevice
from specmortem.device.trace import Observer, TraceRecord
from specmortem.errors import BadInputError

__all__ = [
    "CaptureError",
    "Chosen",
    "CudaDevice",
    "Device",
    "Event",
    "Graph",
    "HostBuffer",
    "Immediate",
    "Interleaving",
    "Interleavings",
    "Lazy",
    "Observer",
    "Op",
    "PromptCopies",
    "Random",
    "Region",
    "Schedule",
    "ScheduleError",
    "SimDevice",
    "Stream",
    "Timed",
    "TraceRecord",
    "enumerate_schedules",
    "open",
]


def open(kind: str = "auto", *, schedule: str | Schedule = "lazy", seed: int = 0) -> Device:
    """Open `sim`, `cuda`, or `auto` (CUDA where there is one).

    `schedule` and `seed` say when simulated work runs; CUDA schedules itself and ignores them. Raises
    BadInputError for an unknown kind or schedule, UnavailableError when `cuda` is asked for and there is
    none.
    """
    if kind not in ("sim", "cuda", "auto"):
        raise BadInputError(f"device {kind!r} is not one of sim, cuda, auto")
    chosen = named(schedule, seed)
    if kind == "cuda" or (kind == "auto" and not _cuda_missing()):
        return CudaDevice()
    return SimDevice(chosen)
