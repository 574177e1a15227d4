"""Parses what users bring. Whatever a file holds, one kind of exception says that it is wrong."""

from __future__ import annotations

import errno
import json
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from errors import UserError


def regular(file: Path) -> Path:
    """The path itself, for a file to read; OSError for a pipe or a device, which might never end, or no file."""
    mode = file.stat().st_mode
    if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):  # reading a folder raises by itself
        raise OSError(errno.EINVAL, "is a pipe or a device, not a file", str(file))
    return file


def parse_json(text: str | bytes, *, unique_keys: bool = False) -> Any:
    """The value of a JSON document; of a key that stands twice in an object the last one counts, or it is wrong.

    Raises:
        ValueError: it is no JSON, is not UTF-8, is nested too deeply, or holds a number of too many digits or, with
            `unique_keys`, a key twice.
    """
    try:
        return json.loads(text, object_pairs_hook=_unique if unique_keys else None)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise ValueError(f"the key {key!r} stands twice")
        found[key] = value
    return found


def as_numbers(value: Any) -> npt.NDArray[np.float64] | None:
    """Nested lists of numbers as an array; None if they are anything else, ragged, or beyond what a float holds."""
    try:
        return np.array(value, dtype=np.float64)
    except (TypeError, ValueError, OverflowError, RecursionError):
        return None


@contextmanager
def paths_in_one_line(path: Path) -> Iterator[None]:
    """Turn an error of the file system into a `UserError` that names the file, or `path` if the system names none."""
    try:
        yield
    except OSError as error:
        where = path if error.filename is None else error.filename
        raise UserError(f"{where}: {error.strerror or error}. Check the path, and who may read it.") from error
