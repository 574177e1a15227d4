"""Makes large frames, like those of a video, with one small hand and its box, for benchmarks of large images."""

from __future__ import annotations

import csv
import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import cv2
import numpy as np
import numpy.typing as npt

from peclr_dali.errors import UserError
from peclr_dali.pipelines.config import DataConfig
from peclr_dali.pipelines.sources import load_index

FRAME_PX: Final = (720, 1280)
BOX_PX: Final = 250
HAND_FRAC: Final = 0.6
"""Side of the hand's box over the side of a picture that shows one hand."""


def large_frames(data: Sequence[DataConfig]) -> DataConfig:
    """Make frames from the images of a dataset, unless they are there already. Packed data is a `UserError`."""
    index = load_index(data)
    if index.store is not None:
        raise UserError("--large makes frames from single image files: use a source that is not packed")
    name = hashlib.sha256(f"{index.name} {index.root.absolute()} {len(index)}".encode()).hexdigest()[:12]
    folder = Path(".data/bench-frames") / name
    if not folder.exists():
        unfinished = folder.with_suffix(".part")
        make_frames([index.path(sample) for sample in range(len(index))], unfinished, 512)
        unfinished.rename(folder)
    margin = data[0].box_margin
    return DataConfig(source="folder", root=str(folder), box=str(folder / "boxes.csv"), box_margin=margin)


def make_frames(pictures: Sequence[Path], out: Path, count: int) -> None:
    """Write JPEG frames of 1280 x 720 pixels and boxes.csv to `out`, as the source "folder" reads them.

    The background is a mosaic of enlarged pictures of hands. One more picture lies on it, enlarged so that the box of
    its hand is 250 pixels wide.
    """
    out.mkdir(parents=True, exist_ok=True)
    rng, (height, width) = np.random.default_rng(0), FRAME_PX
    tile, side = height // 2, round(BOX_PX / HAND_FRAC)
    margin = (side - BOX_PX) // 2
    with (out / "boxes.csv").open("w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(["file", "x0", "y0", "x1", "y1"])
        for number in range(count):
            mosaic = [np.hstack([_picture(pictures, rng, tile) for _ in range(-(-width // tile))]) for _ in range(2)]
            frame = np.vstack(mosaic)[:, :width].copy()
            top, left = int(rng.integers(height - side)), int(rng.integers(width - side))
            frame[top : top + side, left : left + side] = _picture(pictures, rng, side)
            name, x0, y0 = f"{number:05}.jpg", left + margin, top + margin
            cv2.imwrite(str(out / name), frame, [cv2.IMWRITE_JPEG_QUALITY, 90])
            rows.writerow([name, x0, y0, x0 + BOX_PX, y0 + BOX_PX])


def _picture(pictures: Sequence[Path], rng: np.random.Generator, side_px: int) -> npt.NDArray[np.uint8]:
    picture = np.asarray(cv2.imread(str(pictures[int(rng.integers(len(pictures)))])), np.uint8)
    return np.asarray(cv2.resize(picture, (side_px, side_px), interpolation=cv2.INTER_CUBIC), np.uint8)
