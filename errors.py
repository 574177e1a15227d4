"""What ends in one line: bad input, and what the machine refuses; and how such a line is printed.

Nothing is imported here that a command does not need.
"""

from __future__ import annotations

import errno
import logging
import os
import re
import traceback
from pathlib import Path

_OF_THE_SHELL = re.compile(r"~|\$\w|.*\$\{")


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


_ROOT = Path(__file__).parent
_LACKS_MEMORY = re.compile(
    r"(can't|cannot|unable to|failed to) allocate|out of memory|insufficient memory|bad_?alloc|alloc_failed"
    r"|failed to map segment|can't start new thread",
    re.IGNORECASE,
)
_ASKED_FOR = re.compile(r"(?:tried|unable) to allocate ([\d.]+) (\w+)", re.IGNORECASE)
_TASKS = (
    (
        "train/contrastive_step.py",
        "a training step",
        'Lower train.micro_batch, on which batch norm depends, or set train.recompute = "always"',
    ),
    ("train/pose/step.py", "a training step", "Lower train.micro_batch"),
    ("train/pose/inference.py", "estimating poses", "Lower validation.batch"),
    ("pipelines/", "the loader", "Lower pipelines.batch, pipelines.ahead or pipelines.threads"),
)
"""Where files of ours begin, what they do, and what makes them need less memory."""


def of_machine(error: BaseException) -> str | None:
    """What the machine refused, be it memory or a file, in one line; None for any other error.

    Errors of NumPy, torch, OpenCV, DALI and of loading libraries are known by their words, so that nothing is imported.
    """
    if isinstance(error, OSError) and error.errno not in (None, errno.ENOMEM):
        if error.filename is None or error.strerror is None:
            return f"the system refused something: {error}. Check disk, memory and rights, then give the command again"
        return f"{os.fsdecode(error.filename)}: {error.strerror}. Check the path and its rights"
    may_lack = isinstance(error, (OSError, RuntimeError, ImportError)) or type(error).__module__ == "cv2"
    if isinstance(error, MemoryError) or (may_lack and _LACKS_MEMORY.search(str(error))):
        return _out_of_memory(error)
    if isinstance(error, OSError):
        return f"the system refused something: {error}. Check disk, memory and rights, then give the command again"
    return None


def _out_of_memory(error: BaseException) -> str:
    """Which task asked for how much, and what to change, from the innermost of our files in the traceback."""
    asked = _ASKED_FOR.search(str(error))
    amount = "more memory"
    if asked is not None:
        number, unit = asked.groups()
        amount = as_size(int(number)) if unit == "bytes" else f"{number} {unit}"
    task, remedy = "this command", "Take smaller batches or fewer processes"
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        file = frame.filename.removeprefix(f"{_ROOT}/")
        found = next((one for one in _TASKS if file.startswith(one[0])), None)
        if found is not None:
            _, task, remedy = found
            break
    return f"out of memory: {task} asked for {amount}, which the machine could not give. {remedy}"


def as_size(count: float) -> str:
    """Bytes with a binary unit, such as "1.5 GiB"."""
    power = min(max(int(count), 1).bit_length() - 1, 49) // 10
    return f"{count / 1024**power:.{1 if power else 0}f} {('bytes', 'KiB', 'MiB', 'GiB', 'TiB')[power]}"


def is_left_to_shell(path: str) -> bool:
    """Whether a path holds a ~ or $NAME that no shell has replaced, as in quotes, behind "=" or in a file.

    Taken as it is, it would make a folder named "~".
    """
    return _OF_THE_SHELL.match(path) is not None and not os.path.lexists(path)
