"""What a program did: the records of `Device.trace`, and the observers that hear of it as it happens."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from specmortem.device.memory import Op, Region

if TYPE_CHECKING:
    from specmortem.device.objects import Event, Graph, HostBuffer, Stream

_PACKAGE = str(Path(__file__).parent)


@dataclass(frozen=True)
class TraceRecord:
    """One thing that happened; the position in `Device.trace` is its order.

    `by` is `host` for a host call and `queue` for the execution of queued work (simulator only). `step`
    numbers the host calls; for executed work it is the call that enqueued it. Times are set where there is a
    clock.
    """

    by: str
    what: str
    stream: str
    name: str
    step: int
    start_us: float | None = None
    end_us: float | None = None


class Observer:
    """Hears what a program does; override what you need. `site` is `file:line` of the program's call."""

    def enqueued(self, stream: Stream, op: Op, site: str) -> None:
        """A launch, copy or spin entered a stream; a replay tells each of its operations."""

    def replaying(self, stream: Stream, graph: Graph, site: str) -> None:
        """A replay begins; its operations are told next."""

    def executed(self, stream: Stream, op: Op) -> None:
        """The simulator is about to run queued work."""

    def host_accessed(self, buffer: HostBuffer, region: Region, write: bool, site: str) -> None:
        """The host is about to read or write these bytes; a pageable copy reads its source at the call."""

    def recorded(self, event: Event, stream: Stream, site: str) -> None:
        """The event now stands for everything enqueued in the stream so far."""

    def waited(self, stream: Stream, event: Event, site: str) -> None:
        """What enters the stream from now on runs after the event's latest record."""

    def synchronized(self, target: Stream | Event | None, site: str) -> None:
        """The host has waited for a stream, an event, or (None) the whole device."""

    def queried(self, event: Event, done: bool, site: str) -> None:
        """The host has asked an event; `done` orders the host after its latest record."""


def call_site() -> str:
    """`file:line` of the nearest caller outside this package."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_PACKAGE):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"
