"""Images in folders: any folder of images of hands, and what of a list of names is there."""

import logging
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import numpy as np

from peclr_dali.errors import UserError
from peclr_dali.pipelines.config import DataConfig
from peclr_dali.pipelines.samples.index import WHOLE_IMAGE, Index
from peclr_dali.pipelines.samples.subsets import OWN_HELD_OUT, hash_of_name, rows_of_split
from peclr_dali.pipelines.sources.boxes import with_boxes

ENDINGS = (".png", ".jpg", ".jpeg")
"""Of the images of published datasets."""

IMAGE_ENDINGS = (".jpg", ".jpeg", ".jpe", ".jfif", ".png", ".webp")
BROKEN_LINK = "broken links"
NO_FILE = "no regular file, such as a pipe"
ARCHIVES = (".tar", ".zip", ".gz", ".tgz", ".bz2", ".xz", ".zst")  # images in them are not seen
NOT_READ = (
    ".heic", ".heif", ".avif", ".tif", ".tiff", ".bmp", ".gif", ".jp2", ".jxl", ".psd", ".exr", ".ppm", ".dng", ".cr2",
    ".cr3", ".nef", ".arw", ".mp4", ".mov", ".avi", ".mkv", ".webm",
)  # fmt: skip
"""Endings of images that the data path cannot decode, and of videos."""

# Files and folders, in small letters, that systems put among images: thumbnails and what was deleted.
_OF_THE_SYSTEM = ["@eadir", "#recycle", "@recycle", "$recycle.bin", "__macosx", "thumbs.db"]

log = logging.getLogger(__name__)


def load_folder(config: DataConfig) -> Index:
    """List all JPEG (also .jfif and .jpe), PNG and WebP files under a folder, sorted by name.

    Hidden files and folders are left out, and those of the system such as @eaDir. Links to folders are followed; each
    real folder is read once. Broken links and images of other formats are left out and counted in one warning.

    Paths of the index, and names in a file of boxes (see `read_boxes`), are relative to `data.root`. Images
    without a box are used whole. If the file says which hand a box shows, each of its hands is a sample, left ones are
    mirrored, and images without a hand are left out.

    Raises:
        UserError: the folder has no images, or the boxes do not fit it.
        OSError: a folder is missing or unreadable.
    """
    root = Path(config.root)
    images, others = files_under(root, IMAGE_ENDINGS)
    unusable = {kind: count for kind, count in others.items() if kind in (*NOT_READ, *ARCHIVES, BROKEN_LINK, NO_FILE)}
    links = f", mend or remove broken links ('find {root} -xtype l' lists them)" if BROKEN_LINK in others else ""
    remedy = f"convert other images to JPEG or PNG, unpack archives{links}"
    if not images:
        raise UserError(
            f"{root}: no {', '.join(IMAGE_ENDINGS)} files in it or below it; found "
            f"{counts_in_words(others) or 'nothing'}. Check the path, {remedy}."
        )
    if unusable:
        log.warning("%s: %d images are used; left out: %s; %s", root, len(images), counts_in_words(unusable), remedy)
    paths = sorted(images)
    index = Index(
        name="/".join(root.absolute().parts[-2:]),
        root=root,
        paths=paths,
        box_px=np.tile(np.array(WHOLE_IMAGE, np.float32), (len(paths), 1)),
        group=np.array([hash_of_name(path) for path in paths]),  # so that a new image does not move the others
    )
    if config.box != "center":
        index = with_boxes(index, Path(config.box))
    return index.select(rows_of_split(index.groups, config.split, least=OWN_HELD_OUT))


def counts_in_words(files: Mapping[str, int]) -> str:
    """Numbers of files by kind, the most frequent kinds first."""
    return ", ".join(f"{count} {kind}" for kind, count in Counter(files).most_common(5))


def files_under(root: Path, endings: tuple[str, ...]) -> tuple[list[str], Counter[str]]:
    """The names of the files with some endings in a folder and below it, and the numbers of others by ending or kind.

    See `load_folder`. An unreadable folder is an OSError.
    """
    images, others = list[str](), Counter[str]()
    folders, links = [""], list[str]()  # linked folders come last, so that files get their shortest paths
    seen: set[tuple[int, int]] = set()
    while folders or links:
        inside = folders.pop() if folders else links.pop(0)
        status = os.stat(root / inside)  # noqa: PTH116 - beside scandir, which pathlib lacks
        if (status.st_dev, status.st_ino) in seen:
            continue
        seen.add((status.st_dev, status.st_ino))
        with os.scandir(root / inside) as entries:
            for entry in sorted(entries, key=lambda entry: entry.name):
                if entry.name.startswith(".") or entry.name.lower() in _OF_THE_SYSTEM:
                    others["hidden"] += 1
                elif entry.is_symlink() and not os.path.exists(entry.path):  # noqa: PTH110  never raises
                    others[BROKEN_LINK] += 1
                elif entry.is_dir():
                    (links if entry.is_symlink() else folders).append(f"{inside}{entry.name}/")
                elif not entry.is_file():
                    others[NO_FILE] += 1
                elif entry.name.lower().endswith(endings):
                    images.append(inside + entry.name)
                else:
                    others[os.path.splitext(entry.name)[1].lower() or "without an ending"] += 1  # noqa: PTH122
    return images, others


def stored_images(root: Path, stems: Sequence[str]) -> list[str | None]:
    """For each path without its ending: the path of the image that exists, or None.

    Raises:
        UserError: none exists.
    """
    listed = set[str]()
    for folder in {stem.rpartition("/")[0] for stem in stems}:
        with suppress(OSError):
            # Half the cost of iterdir.
            listed.update(os.path.join(folder, name) for name in os.listdir(root / folder))  # noqa: PTH118, PTH208
    stored = [next((stem + ending for ending in ENDINGS if stem + ending in listed), None) for stem in stems]
    if not any(stored):
        raise UserError(
            f"{root}: none of {len(stems)} images exists"
            f"{''.join(f'; the first would be {stem}.png (or .jpg)' for stem in stems[:1])}. Unpack or fetch them "
            "again, or check data.root."
        )
    return stored
