"""Errors that end a command with one line and exit code 2. Nothing is imported here: every command imports it."""

from __future__ import annotations


class UserError(Exception):
    """Bad input: the command line prints the message as one line and exits with code 2.

    The message says what was found, where, what was expected and what to do about it.
    """


class ReportedByAnotherRank(UserError):  # noqa: N818  the error is the other rank's
    """Another rank reports the error. This one ends with the same exit code, without a line.

    Attributes:
        transient: whether the other rank's error is transient, see `peclr_dali.errors.refused.is_transient`.
    """

    def __init__(self, message: str, *, transient: bool = False) -> None:
        super().__init__(message)
        self.transient = transient


class Outage(UserError):  # noqa: N818  what has happened, not a defect
    """The network, the storage or another process is the cause, and not the input: a restart may help."""


class RanksLost(Outage):
    """Other ranks or the rendezvous cannot be reached."""
