"""Reads files of a dataset: with errors in one line, and from the user's cache what takes long to read."""

import codecs
import csv
import hashlib
import io
import logging
import os
import unicodedata
import zipfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import zip_longest
from pathlib import Path
from typing import Any

import numpy as np
from pydantic_core import from_json

from peclr_dali.errors import UserError, in_one_line
from peclr_dali.parsing import as_numbers, regular
from peclr_dali.pipelines.arrays import AnyArray, DoubleArray
from peclr_dali.writing import whole_file

Tables = dict[str, AnyArray]

log = logging.getLogger(__name__)


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
    if isinstance(error, (TypeError, AttributeError)):  # Python's words say nothing of the file
        return "cannot be read (a list, object, text, number or null is in the place of another)"
    return f"cannot be read ({in_one_line(error) if isinstance(error, ValueError) else repr(error)[:200]})"


def read_json_array(file: Path, shape: tuple[int, ...]) -> DoubleArray:
    """Read a JSON list of N equal arrays of finite numbers: (N, *shape). A number may also be a list of one.

    Raises:
        UserError: the file is missing, unreadable or holds anything else.
    """
    numbers = f"{' x '.join(map(str, shape))} finite numbers" if shape else "one finite number"
    with dataset_file(file, f"a JSON list with {numbers} for each pose or frame") as path:
        content = path.read_bytes().removeprefix(codecs.BOM_UTF8)
        array = as_numbers(from_json(content))  # faster than the json module
        if array is None or any(word in content for word in (b'"', b"true", b"false")):  # NumPy makes numbers of them
            raise ValueError("lists of different lengths, or values that are no numbers")
        if array.shape[1:] == (1,) and not shape:
            array = array[:, 0]
        if not array.ndim or array.shape[1:] != shape or not np.isfinite(array).all():
            raise ValueError(f"an array of shape {array.shape}{'' if np.isfinite(array).all() else ', not all finite'}")
        return array


def csv_rows(
    file: Path, columns: Sequence[str], optional: Sequence[Sequence[str]] = ()
) -> Iterator[tuple[str, dict[str, str]]]:
    """The place of each row of a CSV file, for messages, and its cells by the names in the header, "" if missing.

    Args:
        columns: names that the header must have.
        optional: groups of names; the header has all names of a group or none.

    Raises:
        UserError: the header lacks one of these columns or has it twice, a row is longer than the header, or the file
            ends within one.
        ValueError: it has a NUL, as text in UTF-16.
    """
    text = file.read_bytes().decode("utf-8-sig", errors="surrogateescape")  # names need not be in UTF-8
    if "\0" in text:
        raise ValueError("not text in UTF-8, or has a NUL; save it as CSV in UTF-8")
    opened = io.StringIO(text, newline="")
    lines = csv.reader(opened, strict=True)
    header = [cell.strip().lower() for cell in next(lines, [])]
    needed = [*columns]
    for group in optional:
        if not {*group}.isdisjoint(header):
            needed += group
    for name in needed:
        if header.count(name) != 1:
            raise UserError(
                f"{file}: line 1 is {','.join(header)[:80]!r}, with {header.count(name) or 'no'} columns {name!r}; "
                f"expected a header with each of the columns {','.join(needed)[:160]} once, separated by commas. Write "
                "it, and the rows below it."
            )
    for cells in filter(None, lines):
        cut = len(cells) < len(header) and opened.tell() == len(text) and not text.endswith(("\n", "\r"))
        if cut or any(cells[len(header) :]):
            raise UserError(
                f"{file}, line {lines.line_num}: {len(cells)} cells; expected {len(header)}, as in line 1. "
                f"{'Is the file cut? Copy it again' if cut else 'Are these decimal commas? Mend the row'}."
            )
        yield f"{file}, line {lines.line_num}", dict(zip_longest(header, cells[: len(header)], fillvalue=""))


def plain_name(name: str) -> str:
    """A file's name in the form in which names are compared: Unicode's NFC, and without "./" before it."""
    return unicodedata.normalize("NFC", name.removeprefix("./"))


class Entries:
    """A list of entries with ids, such as a file's images.

    Raises:
        UserError: several entries have the same id.
    """

    def __init__(self, ids: Sequence[Any], file: Path, kind: str) -> None:
        self._row_of = {plain_id(number): row for row, number in enumerate(ids)}
        self._kind = kind
        if len(self._row_of) < len(ids):
            raise UserError(f"{file}: several {kind} have the same id; expected each once. Give them ids of their own.")

    def row(self, number: Any, place: str) -> int:
        """The row of the entry with an id, which was read at `place` of the file; a `UserError` if there is none."""
        if plain_id(number) not in self._row_of:
            raise UserError(
                f"{place}: none of the {len(self._row_of)} {self._kind} has the id {str(number)[:80]!r}. Use entries "
                "of one file, or remove this one."
            )
        return self._row_of[plain_id(number)]


def plain_id(number: Any) -> str:
    """An id as text: 8, 8.0 and "8" are the same."""
    return str(number).removesuffix(".0")


def remembered(name: str, files: Sequence[Path], read: Callable[[], Tables]) -> Tables:
    """The result of `read` for some files, or for all files in some folders, from the cache if no file has changed.

    The cache is `peclr-dali/` in $XDG_CACHE_HOME, or in ~/.cache. A file counts as unchanged while its path, size and
    time of modification are the same. If the cache cannot be written, the next run reads again.

    Args:
        name: name of the cache entry. It contains the version of the reader, so that a new version makes a new entry.
        read: makes the tables; none of them holds Python objects.

    Raises:
        UserError: a file or folder is missing or unreadable.
    """
    key = hashlib.blake2b(repr((name, list(map(_stamps, files)))).encode(), digest_size=12).hexdigest()
    # A relative one is ignored, as the XDG specification says. Path.home raises for a user without a name.
    chosen = os.environ.get("XDG_CACHE_HOME", "")
    cache = Path(chosen if os.path.isabs(chosen) else os.path.expanduser("~/.cache"))  # noqa: PTH111, PTH117
    entry = cache / "peclr-dali" / f"{name}-{key}.npz"
    try:
        with entry.open("rb") as file, np.load(file, allow_pickle=False) as stored:
            return dict(stored)
    except (FileNotFoundError, NotADirectoryError):
        pass
    except (OSError, ValueError, EOFError, zipfile.BadZipFile):
        log.warning("%s: unreadable or damaged; it is made again", entry)
    tables = read()
    try:
        entry.parent.mkdir(parents=True, exist_ok=True)
        with whole_file(entry, durable=False) as new:
            np.savez(new, **tables)  # type: ignore[arg-type]  # the stub takes the first name for a flag
    except OSError as error:
        log.info("%s: not written (%s); the next run makes it again", entry, error.strerror)
    return tables


def _stamps(path: Path) -> list[tuple[str, int, int]]:
    """Path, size and time of modification of a file; of a folder, those of its files too, which may change in place."""
    with dataset_file(path, "the dataset's annotations", "Check data.root, or unpack the dataset again."):
        files = [path, *sorted(path.iterdir())] if path.is_dir() else [path]
        stats = ((str(file.resolve() if file is path else file), file.stat()) for file in files)
        return [(name, one.st_size, one.st_mtime_ns) for name, one in stats]
