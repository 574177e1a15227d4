"""Any folder of images with one hand each: the case of most users."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np

from errors import UserError
from pipelines.index import WHOLE_IMAGE, Index
from pipelines.sources.boxes import read_boxes

_ENDINGS = (".jpg", ".jpeg", ".png", ".webp")


def load_folder(root: Path, *, boxes: Path | None = None) -> Index:
    """All JPEG, PNG and WebP files under a folder, in the order of their names.

    Hidden files and folders are left out. Links to folders are followed, each real folder being read once.

    Args:
        root: the folder; paths of the index, and names in `boxes`, are relative to it.
        boxes: CSV or JSON of hand boxes, see `read_boxes`; without it, and for files without a box, the whole image.

    Raises:
        UserError: the folder is missing, unreadable or has no images, or `boxes` does not fit it.
    """
    if not root.is_dir():
        found = "is a file" if root.exists() else "does not exist"
        raise UserError(f"{root}: {found}; expected a folder of {', '.join(_ENDINGS)} files. Check the path.")
    paths = sorted(_images_under(root))
    if not paths:
        raise UserError(f"{root}: no {', '.join(_ENDINGS)} files in it or below it. Check the path, or add images.")
    whole = np.tile(np.array(WHOLE_IMAGE, np.float32), (len(paths), 1))
    box_px = whole if boxes is None else read_boxes(boxes, paths)
    return Index(name=root.name or str(root), root=root, paths=paths, box_px=box_px)


def _images_under(root: Path) -> list[str]:
    paths: list[str] = []
    folders, links = [""], list[str]()  # linked folders come last, so that files keep the shortest names
    seen: set[tuple[int, int]] = set()
    while folders or links:
        inside = folders.pop() if folders else links.pop(0)
        try:
            status = os.stat(root / inside)  # noqa: PTH116 - beside scandir, which pathlib lacks
            if (status.st_dev, status.st_ino) in seen:
                continue
            seen.add((status.st_dev, status.st_ino))
            with os.scandir(root / inside) as entries:
                for entry in sorted(entries, key=lambda entry: entry.name):
                    if entry.name.startswith("."):
                        continue
                    if entry.name.lower().endswith(_ENDINGS) and entry.is_file():
                        paths.append(inside + entry.name)
                    elif entry.is_dir():
                        (links if entry.is_symlink() else folders).append(f"{inside}{entry.name}/")
        except OSError as error:
            raise UserError(
                f"{root / inside}: cannot be listed ({error.strerror}). Make it readable, or move it elsewhere."
            ) from error
    return paths
