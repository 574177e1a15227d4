"""Any folder of images of hands or bodies."""

from __future__ import annotations

import logging
import os
from collections import Counter
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np

from errors import UserError
from pipelines.config import DataConfig
from pipelines.samples.index import WHOLE_IMAGE, Index
from pipelines.sources.boxes import with_boxes

IMAGE_ENDINGS: Final = (".jpg", ".jpeg", ".png", ".webp")
_NOT_READ: Final = {
    ".heic": "HEIC", ".heif": "HEIC", ".avif": "AVIF", ".tif": "TIFF", ".tiff": "TIFF", ".bmp": "BMP", ".gif": "GIF",
    ".jp2": "JPEG 2000", ".jxl": "JPEG XL",
}  # fmt: skip
"""Endings of image formats that the data path cannot decode."""

_ENDINGS_TOLD: Final = 5

log = logging.getLogger(__name__)


def load_folder(config: DataConfig) -> Index:
    """List all JPEG, PNG and WebP files under a folder, sorted by name.

    Hidden files and folders are left out. Links to folders are followed; each real folder is read once. Broken links
    and images of other formats are left out and counted in one warning.

    Paths of the index, and names in a file of boxes (see `read_boxes`), are relative to `data.root`. Images
    without a box are used whole. If the file says which hand a box shows, each of its hands is a sample, left ones are
    mirrored, and images without a hand are left out.

    Raises:
        UserError: the folder is missing, unreadable or has no images, the boxes do not fit it, or a split is set.
    """
    if config.split != "all":
        raise UserError(
            f'data.split = {config.split!r}: a folder of images is not split. Use "all", and a folder for each split.'
        )
    root = Path(config.root)
    if not root.is_dir():
        is_there = "is a file" if root.exists() else "does not exist"
        raise UserError(f"{root}: {is_there}; expected a folder of {', '.join(IMAGE_ENDINGS)} files. Check the path.")
    found = _files_under(root)
    if not found.images:
        raise UserError(
            f"{root}: no {', '.join(IMAGE_ENDINGS)} files in it or below it; found {found.told()}. "
            f"{found.remedy() or 'Check the path, or add images.'}"
        )
    if found.remedy():
        left_out = found.told(images_alone=True)
        log.warning("%s: %d images are used, left out are %s. %s", root, len(found.images), left_out, found.remedy())
    paths = sorted(found.images)
    whole = np.tile(np.array(WHOLE_IMAGE, np.float32), (len(paths), 1))
    index = Index(name=root.name or str(root), root=root, paths=paths, box_px=whole)
    return index if config.box == "center" else with_boxes(index, Path(config.box))


class _Found(NamedTuple):
    """Content of a folder and its subfolders: names of images, endings of other files, broken links."""

    images: list[str]
    others: Counter[str]
    lost_links: list[str]

    def told(self, *, images_alone: bool = False) -> str:
        """Counts of unused files by ending; with `images_alone`, only of image formats and broken links."""
        others = [(-count, ending) for ending, count in self.others.items() if ending in _NOT_READ or not images_alone]
        parts = [f"{-count} {ending or 'without an ending'}" for count, ending in sorted(others)[:_ENDINGS_TOLD]]
        if len(others) > _ENDINGS_TOLD:
            parts.append(f"{-sum(count for count, _ in sorted(others)[_ENDINGS_TOLD:])} others")
        if self.lost_links:
            count = len(self.lost_links)
            links = "1 link that leads" if count == 1 else f"{count} links that lead"
            parts.append(f"{links} nowhere ({self.lost_links[0]}{' the first' if count > 1 else ''})")
        return ", ".join(parts) or "nothing"

    def remedy(self) -> str:
        """Advice about images that cannot be used."""
        kinds = sorted({_NOT_READ[ending] for ending in self.others if ending in _NOT_READ})
        parts = []
        if kinds:
            what = "is" if len(kinds) == 1 else "are"
            parts.append(f"{' and '.join(kinds)} {what} not read: convert them to JPEG or PNG.")
        if self.lost_links:
            parts.append(f"Mend or remove the link{'s' if len(self.lost_links) > 1 else ''}.")
        return " ".join(parts)


def _files_under(root: Path) -> _Found:
    found = _Found([], Counter(), [])
    folders, links = [""], list[str]()  # linked folders come last, so that files get their shortest paths
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
                        found.others["hidden"] += 1
                        continue
                    if entry.is_symlink() and not os.path.exists(entry.path):  # noqa: PTH110  never raises
                        found.lost_links.append(inside + entry.name)
                    elif entry.is_dir():
                        (links if entry.is_symlink() else folders).append(f"{inside}{entry.name}/")
                    elif not entry.is_file():
                        found.others["no regular file, such as a pipe"] += 1
                    elif entry.name.lower().endswith(IMAGE_ENDINGS):
                        found.images.append(inside + entry.name)
                    else:
                        found.others[os.path.splitext(entry.name)[1].lower()] += 1  # noqa: PTH122  a suffix of any name
        except OSError as error:
            raise UserError(
                f"{root / inside}: cannot be listed ({error.strerror}). Make it readable, or move it elsewhere."
            ) from error
    return found
