"""Errors that a user can act on.

Every one names the input that is at fault and the way out; the command line prints it as one line and exits
with code 2.
"""


class SpecmortemError(Exception):
    """Base of all errors this package raises on purpose."""


class BadInputError(SpecmortemError, ValueError):
    """An argument, a file or a parameter that cannot be used as given."""


class UnavailableError(SpecmortemError):
    """Something outside this package (an index, an archive, a device, a disk) did not deliver."""
