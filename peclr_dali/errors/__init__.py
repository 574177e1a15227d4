"""Errors that end a command with one line and exit code 2. Nothing is imported here: every command imports it."""

from __future__ import annotations


class UserError(Exception):
    """Bad input: the command line prints the message as one line and exits with code 2.

    The message says what was found, where, what was expected and what to do about it.
    """


class AnotherRankFailed(Exception):  # noqa: N818  the error is the other rank's
    """Another rank reports its error. This one ends with exit code 2, without a message."""
