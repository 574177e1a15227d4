"""Reads the files of a dataset, with errors in one line."""

from __future__ import annotations

import codecs
import csv
import io
import unicodedata
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import zip_longest
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from pydantic_core import from_json

from peclr_dali.errors import UserError
from peclr_dali.errors.terminal import in_one_line
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
    except OSError as error:
        raise UserError(f"{file}: {error.strerror or error}; expected {expected}. {remedy}") from error
    except Exception as error:  # damaged content may raise anything
        reason = in_one_line(error) if isinstance(error, ValueError) else repr(error)[:200]
        raise UserError(f"{file}: cannot be read ({reason}); expected {expected}. {remedy}") from error


def read_json_array(file: Path, shape: tuple[int, ...]) -> npt.NDArray[np.float64]:
    """Read a JSON list of N equal arrays of finite numbers: (N, *shape). A number may also be a list of one.

    Raises:
        UserError: the file is missing, unreadable or holds anything else.
    """
    numbers = f"{' x '.join(map(str, shape))} finite numbers" if shape else "one finite number"
    with dataset_file(file, f"a JSON list with {numbers} for each pose or frame") as path:
        array = as_numbers(from_json(path.read_bytes().removeprefix(codecs.BOM_UTF8)))  # faster than the json module
        if array is not None and array.shape[1:] == (1,) and not shape:
            array = array[:, 0]
        if array is None or not array.ndim or array.shape[1:] != shape or not np.isfinite(array).all():
            raise ValueError("other values")
        return array


def csv_rows(file: Path, text: str, columns: Sequence[str]) -> Iterator[tuple[str, dict[str, str]]]:
    """The place of each row of a CSV file, for messages, and its cells by the names in the header, "" if missing.

    Raises:
        UserError: the header lacks one of some `columns`.
    """
    lines = csv.reader(io.StringIO(text, newline=""))
    header = [cell.strip() for cell in next(lines, [])]
    if not {*header} >= {*columns}:
        raise UserError(
            f"{file}: line 1 is {','.join(header)[:80]!r}; expected a header with the columns {','.join(columns)}, "
            "separated by commas. Write it, and the rows below it."
        )
    for cells in filter(None, lines):
        yield f"{file}, line {lines.line_num}", dict(zip_longest(header, cells[: len(header)], fillvalue=""))


def coco_annotations(file: Path, content: Any) -> Iterator[tuple[str, dict[str, Any], dict[str, Any]]]:
    """The place of each annotation in COCO's JSON format, for messages, the annotation, and the entry of its image.

    Raises:
        UserError: an annotation is of an image that the file does not list.
    """
    image_of = {image["id"]: image for image in content["images"]}
    for number, one in enumerate(content["annotations"]):
        place = f"{file}, annotation {number}"
        if one["image_id"] not in image_of:
            raise UserError(
                f"{place}: none of the {len(image_of)} images has the id {str(one['image_id'])[:80]!r}. Use images and "
                "annotations of one file, or remove this one."
            )
        yield place, one, image_of[one["image_id"]]


def plain_name(name: str) -> str:
    """A file's name in the form in which names are compared: Unicode's NFC, and without "./" before it."""
    return unicodedata.normalize("NFC", name.removeprefix("./"))
