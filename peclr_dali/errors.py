"""Errors that end a command with one line and exit code 2. Every command imports this file."""

import re


class UserError(Exception):
    """Bad input: the command line prints the message as one line and exits with code 2.

    The message says what was found, where, what was expected and what to do about it.
    """

    exit_code = 2


class MachineError(UserError):
    """A failure of the machine in a run: also one line, with exit code 1."""

    exit_code = 1


class AnotherRankFailed(UserError):  # noqa: N818  the error is the other rank's
    """Another rank has failed, and this one ends with it."""


def printable(text: str) -> str:
    """The text as one line, with unprintable characters such as ESC and newlines escaped.

    File names may contain any character except "/" and NUL. What an address may hold of secrets is left out: a
    password before "@", a signature after "?", ";" or "#".
    """
    text = re.sub(r"(://[^\s?;#'\"]*[?;#])[^\s'\")]+", r"\1***", re.sub(r":/+([^\s/]*:\S*|[^\s/]*)@", "://***@", text))
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def in_one_line(error: object, limit: int = 200) -> str:
    """The text of an error in one line of at most `limit` characters, or its type if it has no text."""
    return " ".join(str(error).split())[:limit] or type(error).__name__


def as_size(count: float) -> str:
    """Bytes with a binary unit, such as "1.5 GiB"."""
    power = min(max(int(count), 1).bit_length() - 1, 49) // 10
    return f"{count / 1024**power:.{1 if power else 0}f} {('bytes', 'KiB', 'MiB', 'GiB', 'TiB')[power]}"
