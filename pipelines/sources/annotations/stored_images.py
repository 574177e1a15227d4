"""Finds the images of annotations that exist on disk."""

from __future__ import annotations

import hashlib
import os
import time
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Final

import numpy as np

from peclr_dali.parsing import file_name
from peclr_dali.pipelines.sources.annotations.cache import Tables, remembered_for

ENDINGS: Final = (".png", ".jpg", ".jpeg")

_SETTLED_NS: Final = 2_000_000_000
"""Age of a folder's last change from which on a further one would have another time. File systems count in steps of up
to two seconds."""


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


def remembered_images(root: Path, stems: Sequence[str]) -> list[str | None]:
    """`stored_images`, from the cache if the folders of the images have not changed.

    A folder's own times change when a file is added, removed or renamed. So folders are looked at, of which there are
    few, and not listed.
    """
    folders = sorted({stem.rpartition("/")[0] for stem in stems})
    changed = [_changed(root / folder) for folder in folders]
    if any(abs(time.time_ns() - at_ns) < _SETTLED_NS for _, *times_ns in changed for at_ns in times_ns):
        return stored_images(root, stems)
    names = hashlib.blake2b("\0".join(stems).encode(errors="surrogateescape"), digest_size=16).hexdigest()

    def read() -> Tables:
        found = stored_images(root, stems)
        numbers = [
            0 if path is None else 1 + ENDINGS.index(path[len(stem) :]) for stem, path in zip(stems, found, strict=True)
        ]
        return {"ending": np.array(numbers, np.uint8)}

    tables = remembered_for("stored-images-1", (names, str(root.resolve()), changed), read)
    numbers = tables["ending"].tolist()
    return [stem + ENDINGS[number - 1] if number else None for stem, number in zip(stems, numbers, strict=True)]


def _changed(folder: Path) -> tuple[int, int, int]:
    """A folder's number on its file system, and the times of its last change in ns; zeros if it cannot be looked at.

    Programs that copy set the time of modification back, but not the other one.
    """
    try:
        found = folder.stat()
    except OSError:
        return 0, 0, 0
    return found.st_ino, found.st_mtime_ns, found.st_ctime_ns
