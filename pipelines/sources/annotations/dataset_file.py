"""Reads the files of a dataset, with errors in one line."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from errors import UserError
from errors.terminal import in_one_line
from parsing import regular


@contextmanager
def dataset_file(file: Path, expected: str, remedy: str = "Unpack the dataset again.") -> Iterator[Path]:
    """Yield the path of a regular file. An error in the block becomes a line with what was expected and what to do.

    Raises:
        UserError: the file is missing, unreadable or no regular file, or its content raised an error in the block.
    """
    try:
        yield regular(file)
    except UserError:
        raise
    except OSError as error:
        raise UserError(f"{file}: {error.strerror or error}; expected {expected}. {remedy}") from error
    except Exception as error:  # damaged content may raise anything
        reason = in_one_line(error) if isinstance(error, ValueError) else repr(error)[:200]
        raise UserError(f"{file}: cannot be read ({reason}); expected {expected}. {remedy}") from error
