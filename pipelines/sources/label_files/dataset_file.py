"""Reads a file of a dataset, with errors in one line."""

from __future__ import annotations

import codecs
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import numpy.typing as npt
from pydantic_core import from_json

from peclr_dali.errors import UserError, in_one_line
from peclr_dali.parsing import as_numbers, regular


@contextmanager
def dataset_file(file: Path, expected: str, remedy: str = "Unpack the dataset again.") -> Iterator[Path]:
    """Yield the path of a regular file. An error in the block becomes a line with what was expected and what to do.

    Raises:
        UserError: the file is missing, unreadable or no regular file, or its content raised an error in the block.
    """
    try:
        yield regular(file)
    except (UserError, MemoryError):
        raise
    except Exception as error:  # damaged content may raise anything
        raise UserError(f"{file}: {_reason(error)}; expected {expected}. {remedy}") from error


def _reason(error: Exception) -> str:
    if isinstance(error, OSError):
        return error.strerror or str(error)
    if isinstance(error, KeyError):
        return f"cannot be read (it has no {error})"
    return f"cannot be read ({in_one_line(error) if isinstance(error, ValueError) else repr(error)[:200]})"


def read_json_array(file: Path, shape: tuple[int, ...]) -> npt.NDArray[np.float64]:
    """Read a JSON list of N equal arrays of finite numbers: (N, *shape). A number may also be a list of one.

    Raises:
        UserError: the file is missing, unreadable or holds anything else.
    """
    numbers = f"{' x '.join(map(str, shape))} finite numbers" if shape else "one finite number"
    with dataset_file(file, f"a JSON list with {numbers} for each pose or frame") as path:
        array = as_numbers(from_json(path.read_bytes().removeprefix(codecs.BOM_UTF8)))  # faster than the json module
        if array is None:
            raise ValueError("lists of different lengths, or values that are no numbers")
        if array.shape[1:] == (1,) and not shape:
            array = array[:, 0]
        if not array.ndim or array.shape[1:] != shape or not np.isfinite(array).all():
            finite = "" if np.isfinite(array).all() else ", not all finite"
            raise ValueError(f"an array of shape {array.shape}{finite}")
        return array
