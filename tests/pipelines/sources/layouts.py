"""Writes tiny datasets in the exact layouts of the published ones."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import cv2
import numpy as np


def write_image(file: Path, width_px: int, height_px: int) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    assert cv2.imwrite(str(file), np.full((height_px, width_px, 3), 99, np.uint8))


def mano_mesh(seed: int) -> np.ndarray:
    """(778, 3) somewhere in a frame of 320 x 180."""
    rng = np.random.default_rng(seed)
    return np.asarray(rng.uniform(20, 60, 3) + rng.normal(0, 8, (778, 3)))


def youtube3d_entries() -> dict[str, list[dict[str, Any]]]:
    """Three frames of two videos; the second frame shows two hands."""
    names = ["Aa-1/video/frames/12.png", "Aa-1/video/frames/40.png", "b_2/video/frames/7.png"]
    images = [
        {"name": f"youtube/{name}", "width": 320, "height": 180, "id": 500 + 7 * row} for row, name in enumerate(names)
    ]
    hands = [(500, 0), (507, 0), (507, 1), (514, 1)]
    annotations = [
        {"vertices": mano_mesh(row).tolist(), "is_left": left, "image_id": image, "id": row}
        for row, (image, left) in enumerate(hands)
    ]
    return {"images": images, "annotations": annotations}


def write_youtube3d(root: Path, part: str, entries: dict[str, Any] | None = None) -> None:
    """Annotations and frames, which are PNG files as the dataset's own script writes them."""
    entries = youtube3d_entries() if entries is None else entries
    root.mkdir(parents=True, exist_ok=True)
    (root / f"youtube_{part}.json").write_text(json.dumps(entries))
    for image in entries["images"]:
        write_image(root / image["name"], image["width"], image["height"])
