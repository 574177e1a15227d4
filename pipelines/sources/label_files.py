"""Reads the label files of a dataset, with errors in one line; keeps tables that take long; projects by a camera."""

from __future__ import annotations

import codecs
import csv
import hashlib
import io
import logging
import os
import unicodedata
import zipfile
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import zip_longest
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
from pydantic_core import from_json

from peclr_dali.errors import UserError, in_one_line
from peclr_dali.parsing import as_numbers, file_name, regular
from peclr_dali.writing import whole_file

_FARTHEST_M: Final = 20.0
"""Largest distance of a hand in metres; a larger one means a wrong unit."""

_LONGEST_M: Final = 1.0
"""Largest length of a bone in metres."""

LEAST_FOCAL_PX: Final = 10.0
"""Smallest focal length of a camera."""


def project_px(intrinsics: npt.NDArray[np.float64], xyz_m: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Project points (N, K, 3) to pixels (N, K, 2) by (N, 3, 3) or (3, 3). Points behind the camera give NaN."""
    homogeneous = xyz_m @ np.swapaxes(intrinsics, -1, -2)
    depth = np.where(homogeneous[..., 2:] > 0, homogeneous[..., 2:], np.nan)
    pixels: npt.NDArray[np.float64] = homogeneous[..., :2] / depth
    return pixels


def require_metres(file: Path, values: npt.NDArray[np.float64]) -> None:
    """Raise a `UserError` if depths of points (N, K, 3), or lengths of bones (N,), cannot be metres."""
    lengths = values if values.ndim == 1 else np.abs(values[..., 2])
    if np.isnan(lengths).all():  # none is known
        return
    found, most = float(np.nanmax(lengths)), _LONGEST_M if values.ndim == 1 else _FARTHEST_M
    if found > most:
        what = "bone is" if values.ndim == 1 else "keypoint is at"
        raise UserError(
            f"{file}: a {what} {found:g} m; expected at most {most:g} m. Are these millimetres? Then divide by 1000."
        )
    usual, least = float(np.nanmedian(lengths)), most / 500  # 2 mm of a bone, 4 cm of a depth
    if usual < least:
        few = f"half of the {'bones' if values.ndim == 1 else 'depths'} are below {usual:.2g} m"
        raise UserError(f"{file}: {few}; expected metres, above {least:g} m. Mend the unit.")


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
        reason = f"it has no {error}" if isinstance(error, KeyError) else reason
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
            if array is None:
                raise ValueError("lists of different lengths, or values that are no numbers")
            finite = "" if np.isfinite(array).all() else ", not all finite"
            raise ValueError(f"an array of shape {array.shape}{finite}")
        return array


def csv_rows(file: Path, columns: Sequence[str]) -> Iterator[tuple[str, dict[str, str]]]:
    """The place of each row of a CSV file, for messages, and its cells by the names in the header, "" if missing.

    Raises:
        UserError: the header lacks one of some `columns`.
    """
    text = file.read_bytes().decode("utf-8-sig", errors="surrogateescape")  # names need not be in UTF-8
    lines = csv.reader(io.StringIO(text, newline=""), strict=True)
    header = [cell.strip().lower() for cell in next(lines, [])]
    if twice := [name for name in header if name and header.count(name) > 1]:
        raise UserError(f"{file}: line 1 has the column {twice[0]!r} twice; expected each once. Remove one.")
    if not {*header} >= {*columns}:
        raise UserError(
            f"{file}: line 1 is {','.join(header)[:80]!r}; expected a header with the columns {','.join(columns)}, "
            "separated by commas. Write it, and the rows below it."
        )
    for cells in filter(None, lines):
        if any(cells[len(header) :]):
            found = f"{file}, line {lines.line_num}: {len(cells)} cells"
            raise UserError(f"{found}; expected {len(header)}, as in line 1. Are these decimal commas? Mend the row.")
        yield f"{file}, line {lines.line_num}", dict(zip_longest(header, cells[: len(header)], fillvalue=""))


def coco_annotations(file: Path, content: Any) -> Iterator[tuple[str, dict[str, Any], dict[str, Any]]]:
    """The place of each annotation in COCO's JSON format, for messages, the annotation, and the entry of its image.

    Raises:
        UserError: an annotation is of an image that the file does not list.
    """
    image_of = {image["id"]: image for image in content["images"]}
    if len(image_of) < len(content["images"]):
        raise UserError(f"{file}: several images have the same id; expected each once. Give them ids of their own.")
    for number, one in enumerate(content["annotations"]):
        place = f"{file}, annotation {number}"
        if one["image_id"] not in image_of:
            raise UserError(
                f"{place}: none of the {len(image_of)} images has the id {str(one['image_id'])[:80]!r}. Use images and "
                "annotations of one file, or remove this one."
            )
        yield place, one, image_of[one["image_id"]]


def require_widths(file: Path, box: npt.NDArray[np.float64], sizes_px: npt.NDArray[Any]) -> None:
    """Raise a `UserError` if most boxes x, y, width, height (N, 4) are rather the corners x0, y0, x1, y1.

    Then they end outside of their images, of widths and heights (N, 2), and could be corners. Sizes of 0 or NaN are
    unknown.
    """
    known = (sizes_px > 0).all(axis=1)
    outside = (box[:, :2] + box[:, 2:] > sizes_px).any(axis=1)
    corners = ((box[:, 2:] > box[:, :2]) & (box[:, 2:] <= sizes_px)).all(axis=1)
    if 2 * (outside & corners & known).sum() > max(1, known.sum()):
        raise UserError(
            f"{file}: most boxes end outside of their images; expected bbox as x, y, width, height. Are these the "
            "corners x0, y0, x1, y1? Then subtract x0, y0."
        )


def plain_name(name: str) -> str:
    """A file's name in the form in which names are compared: Unicode's NFC, and without "./" before it."""
    return unicodedata.normalize("NFC", name.removeprefix("./"))


Tables = dict[str, npt.NDArray[Any]]

log = logging.getLogger(__name__)


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
    entry = _user_cache() / "peclr-dali" / f"{name}-{key}.npz"
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


ENDINGS: Final = (".png", ".jpg", ".jpeg")


def image_name(name: str) -> str:
    """Return a path below a folder with one of `ENDINGS`. Others are a ValueError."""
    parts = file_name(name).split("/")  # by hand: PurePosixPath took a tenth of all time
    if not parts[0] or ".." in parts or os.path.splitext(parts[-1])[1] not in ENDINGS:  # noqa: PTH122
        raise ValueError(f"{name[:80]!r} is no name like VIDEO/FRAME.png or VIDEO/FRAME.jpg, relative to data.root")
    return name


def stored_images(root: Path, stems: Iterable[str]) -> list[str | None]:
    """For each path without its ending: the path of the image that exists, or None.

    One folder's listing is in memory at a time.
    """
    rows_of = defaultdict[str, list[tuple[int, str]]](list)
    for row, stem in enumerate(stems):
        rows_of[stem.rpartition("/")[0]].append((row, stem))
    stored: list[str | None] = [None] * sum(map(len, rows_of.values()))
    for folder, rows in rows_of.items():
        try:
            within = f"{folder}/" if folder else ""
            listing = {within + name for name in os.listdir(root / folder)}  # noqa: PTH208  half the cost of iterdir
        except OSError:
            continue
        for row, stem in rows:
            stored[row] = next((stem + ending for ending in ENDINGS if stem + ending in listing), None)
    return stored


def _user_cache() -> Path:
    """The folder for files that can be made again: $XDG_CACHE_HOME, or ~/.cache."""
    # A relative one is ignored, as the XDG specification says. Path.home raises for a user without a name.
    chosen = os.environ.get("XDG_CACHE_HOME", "")
    return Path(chosen if os.path.isabs(chosen) else os.path.expanduser("~/.cache"))  # noqa: PTH111, PTH117
