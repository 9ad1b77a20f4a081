"""What can go wrong between a release and a live function."""

from __future__ import annotations

from specmortem.errors import SpecmortemError, UnavailableError


class MissingFileError(UnavailableError):
    """A file that this tree does not have."""


class NotStoredError(UnavailableError):
    """A file that the subject has and that has not been brought here yet; `path` names it."""

    def __init__(self, subject: str, path: str) -> None:
        """Only what is missing."""
        super().__init__(f"{subject}: {path} is not in the cache; run the audit again")
        self.path = path


class NotPresentError(SpecmortemError):
    """A function, class or constant that this tree does not define: an answer, not a failure."""


class LiftError(SpecmortemError):
    """Code that cannot run outside vLLM, or that touched something which was not lifted with it."""
