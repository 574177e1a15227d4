"""Reads annotations in COCO's JSON format.

Lin et al., "Microsoft COCO: Common Objects in Context", 2014; the format is that of cocodataset.org, "Data format".
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from peclr_dali.errors import UserError
from peclr_dali.parsing import as_numbers, file_name
from peclr_dali.pipelines.arrays import AnyArray, DoubleArray


class Entries:
    """A list of entries with ids, such as a file's images.

    Raises:
        UserError: several entries have the same id.
    """

    def __init__(self, ids: Sequence[Any], file: Path, kind: str) -> None:
        self._row_of = {_plain_id(number): row for row, number in enumerate(ids)}
        self._kind = kind
        if len(self._row_of) < len(ids):
            raise UserError(f"{file}: several {kind} have the same id; expected each once. Give them ids of their own.")

    def row(self, number: Any, place: str) -> int:
        """The row of the entry with an id, which was read at `place` of the file; a `UserError` if there is none."""
        if _plain_id(number) not in self._row_of:
            raise UserError(
                f"{place}: none of the {len(self._row_of)} {self._kind} has the id {str(number)[:80]!r}. Use entries "
                "of one file, or remove this one."
            )
        return self._row_of[_plain_id(number)]


def _plain_id(number: Any) -> str:
    """An id as text: 8, 8.0 and "8" are the same."""
    return str(number).removesuffix(".0")


def coco_annotations(file: Path, content: Any) -> Iterator[tuple[str, dict[str, Any], str, DoubleArray]]:
    """The annotations of a file but those of crowds, in its order.

    Yields:
        Where it is, for messages; the annotation itself; the image's file name; and (2,) width and height of the image
        as the file says, NaN for what it does not.

    Raises:
        UserError: an annotation is of an image that the file does not list, or several images have the same id.
        Exception: the content has another form.
    """
    images = content["images"]
    listed = Entries([image["id"] for image in images], file, "images")
    for number, entry in enumerate(content["annotations"]):
        place = f"{file}, annotation {number}"
        row = listed.row(entry["image_id"], place)
        said = [images[row].get("width"), images[row].get("height")]
        size_px = as_numbers(said)  # NaN for None
        if size_px is None:
            raise ValueError(f"width and height of an image are {str(said)[:80]}")
        if not int(entry.get("iscrowd") or 0):
            yield (place, entry, file_name(images[row]["file_name"]), size_px)


def refuse_corners(file: Path, bbox: DoubleArray, size_px: AnyArray) -> None:
    """Raise a `UserError` if most boxes x, y, width, height (N, 4) are rather the corners x0, y0, x1, y1.

    Then they end outside of their images, of widths and heights (N, 2), and could be corners. Sizes of 0 or NaN are
    unknown.
    """
    known = (size_px > 0).all(axis=1)
    outside = (bbox[:, :2] + bbox[:, 2:] > size_px).any(axis=1)
    corners = ((bbox[:, 2:] > bbox[:, :2]) & (bbox[:, 2:] <= size_px)).all(axis=1)
    if 2 * (outside & corners & known).sum() > max(1, known.sum()):
        raise UserError(
            f"{file}: most boxes end outside of their images; expected bbox as x, y, width, height in pixels of the "
            "image as displayed. Are these the corners x0, y0, x1, y1? Then subtract x0, y0. Or were they made before "
            "EXIF turned the images? Then turn them."
        )
