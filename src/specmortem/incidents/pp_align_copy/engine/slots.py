"""Request slots: the last one freed is the first one taken, and each reuse has a generation of its own."""

from __future__ import annotations

from collections.abc import Hashable
from typing import NamedTuple

from specmortem.errors import BadInputError


class Ticket(NamedTuple):
    """A slot as it was at one time: `generation` counts the requests that had left it before."""

    slot: int
    generation: int


class Slots:
    """Slots 0 … num_slots - 1; the highest is taken first, so a slot is no batch row from the first request on."""

    def __init__(self, num_slots: int) -> None:
        self._free = list(range(num_slots))
        self._generations = [0] * num_slots
        self._of: dict[Hashable, int] = {}

    def take(self, request: Hashable) -> int:
        """A slot for a request. Raises BadInputError when it has one already or none is free."""
        if request in self._of:
            raise BadInputError(f"request {request!r} already has slot {self._of[request]}; release it first")
        if not self._free:
            raise BadInputError(f"request {request!r}: all {len(self._generations)} slots are taken")
        self._of[request] = self._free.pop()
        return self._of[request]

    def release(self, request: Hashable) -> int:
        """Give a request's slot back; tickets for it expire."""
        slot = self.of(request)
        del self._of[request]
        self._free.append(slot)
        self._generations[slot] += 1
        return slot

    def of(self, request: Hashable) -> int:
        """The slot of a request. Raises BadInputError when it has none."""
        if request not in self._of:
            raise BadInputError(f"request {request!r} has no slot; take one first")
        return self._of[request]

    def holder(self, slot: int) -> Hashable | None:
        """The request in a slot, or None."""
        return next((request for request, taken in self._of.items() if taken == slot), None)

    def ticket(self, request: Hashable) -> Ticket:
        """What to remember of a request's slot while its output is under way."""
        slot = self.of(request)
        return Ticket(slot, self._generations[slot])

    def valid(self, ticket: Ticket) -> bool:
        """Whether the slot still has the request that it had then."""
        return self._generations[ticket.slot] == ticket.generation
