"""Parses what users bring. Whatever a file holds, one kind of exception says that it is wrong."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from errors import UserError


def parse_json(text: str | bytes) -> Any:
    """The value of a JSON document.

    Raises:
        ValueError: it is none, is not UTF-8, is nested too deeply, or holds a number of too many digits.
    """
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def as_numbers(value: Any) -> npt.NDArray[np.float64] | None:
    """Nested lists of numbers as an array; None if they are anything else, ragged, or beyond what a float holds."""
    try:
        return np.array(value, dtype=np.float64)
    except (TypeError, ValueError, OverflowError, RecursionError):
        return None


@contextmanager
def paths_in_one_line(path: Path) -> Iterator[None]:
    """Turn an error of the file system, whichever call met it, into a `UserError` that names the file.

    Args:
        path: what to name where the system names nothing.
    """
    try:
        yield
    except OSError as error:
        where = path if error.filename is None else error.filename
        raise UserError(f"{where}: {error.strerror or error}. Check the path, and who may read it.") from error
