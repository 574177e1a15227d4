"""Finds the images of annotations that exist on disk."""

from __future__ import annotations

import os
import time
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path, PurePosixPath
from typing import Final

import numpy as np

from peclr_dali.parsing import file_name
from peclr_dali.pipelines.sources.annotations.cache import Tables, remembered_for, stamps_of

ENDINGS: Final = (".png", ".jpg", ".jpeg")

_SETTLED_NS: Final = 2_000_000_000
"""Age of a folder's time of modification from which on a further change would give another time. File systems count in
steps of up to two seconds."""


def image_name(name: str) -> str:
    """Return a path below a folder with one of `ENDINGS`. Others are a ValueError."""
    path = PurePosixPath(file_name(name))
    if path.is_absolute() or ".." in path.parts or path.suffix not in ENDINGS:
        raise ValueError(f"{name[:80]!r} is no name like VIDEO/FRAME.png or VIDEO/FRAME.jpg, relative to data.root")
    return name


def stored_images(root: Path, stems: Iterable[str]) -> list[str | None]:
    """For each path without its ending: the path of the image that exists, or None.

    One folder's listing is in memory at a time.
    """
    rows_of = defaultdict[str, list[int]](list)
    names = list[str]()
    for row, stem in enumerate(stems):
        folder, _, name = stem.rpartition("/")
        rows_of[folder].append(row)
        names.append(name)
    stored: list[str | None] = [None] * len(names)
    for folder, rows in rows_of.items():
        try:
            listing = frozenset(os.listdir(root / folder))  # noqa: PTH208  half the cost of iterdir
        except OSError:
            continue
        within = folder and folder + "/"
        for row in rows:
            stem = names[row]
            for ending in ENDINGS:
                if (name := stem + ending) in listing:
                    stored[row] = within + name
                    break
    return stored


def remembered_images(file: Path, root: Path, stems: Sequence[str]) -> list[str | None]:
    """`stored_images` of the images of a file of annotations, from the cache if their folders have not changed.

    A folder's own time of modification changes when a file is added, removed or renamed. So folders are looked at, of
    which there are few, and not listed.
    """
    folders = sorted({stem.rpartition("/")[0] for stem in stems})
    changed = [_changed(root / folder) for folder in folders]
    if max((at for at, _ in changed), default=0) > time.time_ns() - _SETTLED_NS:
        return stored_images(root, stems)

    def read() -> Tables:
        found = stored_images(root, stems)
        numbers = [
            0 if path is None else 1 + ENDINGS.index(path[len(stem) :]) for stem, path in zip(stems, found, strict=True)
        ]
        return {"ending": np.array(numbers, np.uint8)}

    tables = remembered_for("stored-images-1", (stamps_of(file), str(root.resolve()), changed), read)
    numbers = tables["ending"].tolist()
    return [stem + ENDINGS[number - 1] if number else None for stem, number in zip(stems, numbers, strict=True)]


def _changed(folder: Path) -> tuple[int, int]:
    """Time of a folder's last change in ns, and its number on its file system; zeros if it cannot be looked at."""
    try:
        found = folder.stat()
    except OSError:
        return 0, 0
    return found.st_mtime_ns, found.st_ino
