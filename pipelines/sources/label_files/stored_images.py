"""Finds the images of a list of names that are there, whatever their endings."""

import os
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

from peclr_dali.errors import UserError
from peclr_dali.parsing import file_name

ENDINGS = (".png", ".jpg", ".jpeg")


def image_name(name: str) -> str:
    """Return a path below a folder with one of `ENDINGS`. Others are a ValueError."""
    parts = file_name(name).split("/")  # by hand: PurePosixPath took a tenth of all time
    if not parts[0] or ".." in parts or os.path.splitext(parts[-1])[1] not in ENDINGS:  # noqa: PTH122
        raise ValueError(f"{name[:80]!r} is no name like VIDEO/FRAME.png or VIDEO/FRAME.jpg, relative to data.root")
    return name


def stored_images(root: Path, stems: Sequence[str]) -> list[str | None]:
    """For each path without its ending: the path of the image that exists, or None.

    One folder's listing is in memory at a time.

    Raises:
        UserError: none exists.
    """
    rows_of = defaultdict[str, list[tuple[int, str]]](list)
    for row, stem in enumerate(stems):
        rows_of[stem.rpartition("/")[0]].append((row, stem))
    stored: list[str | None] = [None] * len(stems)
    for folder, rows in rows_of.items():
        try:
            within = f"{folder}/" if folder else ""
            listing = {within + name for name in os.listdir(root / folder)}  # noqa: PTH208  half the cost of iterdir
        except OSError:
            continue
        for row, stem in rows:
            stored[row] = next((stem + ending for ending in ENDINGS if stem + ending in listing), None)
    if not any(stored):
        raise UserError(
            f"{root}: none of {len(stems)} images exists; the first would be {stems[0]}.png (or .jpg). Unpack or fetch "
            "them again, or check data.root."
        )
    return stored
