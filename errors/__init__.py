"""What ends in one line with exit code 2. Nothing is imported here, since every command imports it."""

from __future__ import annotations


class UserError(Exception):
    """Bad input: the command line prints the message as one line and exits with code 2.

    The message says what was found, where, what was expected and what to do about it.
    """


class ToldByAnother(UserError):  # noqa: N818  the error is the other rank's
    """Another rank of the run met bad input and prints it: this one leaves with the same exit code, in silence."""


class RanksLost(UserError):  # noqa: N818  what has happened, not a defect
    """Other ranks, or the place where they meet, cannot be reached: the input is not to blame, a restart may help."""
