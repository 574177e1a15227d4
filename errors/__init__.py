"""Errors that end a command with one line and exit code 2. Nothing is imported here: every command imports it."""

from __future__ import annotations


class UserError(Exception):
    """Bad input: the command line prints the message as one line and exits with code 2.

    The message says what was found, where, what was expected and what to do about it.
    """


class ToldByAnother(UserError):  # noqa: N818  the error is the other rank's
    """Another rank reports the error. This one ends silently with the same exit code."""


class RanksLost(UserError):  # noqa: N818  what has happened, not a defect
    """Other ranks or the rendezvous cannot be reached. The input is not the cause, and a restart may help."""
