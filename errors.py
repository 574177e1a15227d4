"""The exception that stands for the user's input rather than for a defect of ours, and how its message is printed."""

import logging


class UserError(Exception):
    """Bad input: the command line prints the message as one line and exits with code 2.

    The message says what was found, where, what was expected and what to do about it.
    """


class ToldByAnother(UserError):  # noqa: N818  the error is the other rank's
    """Another rank of the run met bad input and prints it: this one leaves with the same exit code, in silence."""


class RanksLost(UserError):  # noqa: N818  what has happened, not a defect
    """Other ranks, or the place where they meet, cannot be reached: the input is not to blame, a restart may help."""


def printable(text: str) -> str:
    """The text as one line without effect on a terminal: what does not print, such as ESC or a newline, is escaped.

    Names of files may hold anything but "/" and NUL.
    """
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


class OneLine(logging.Formatter):
    """Escapes what would change the terminal or begin another line, such as in names of files."""

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802  logging's own name
        """The message of a record, escaped."""
        return printable(super().formatMessage(record))
