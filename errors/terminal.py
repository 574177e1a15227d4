"""How a line is printed that may hold names of files."""

from __future__ import annotations

import logging


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
