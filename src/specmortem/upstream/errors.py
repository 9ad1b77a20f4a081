"""What can go wrong between a release and a live function."""

from __future__ import annotations

from specmortem.errors import SpecmortemError, UnavailableError


class MissingFileError(UnavailableError):
    """A file that this tree does not have."""


class NotPresentError(SpecmortemError):
    """A function, class or constant that this tree does not define: an answer, not a failure."""


class LiftError(SpecmortemError):
    """Code that cannot run outside vLLM, or that touched something which was not lifted with it."""
