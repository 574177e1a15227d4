"""Stick figures with COCO's 17 keypoints in COCO's JSON format, drawn in a moment."""

from __future__ import annotations

import json
from pathlib import Path

import cv2
import numpy as np
import numpy.typing as npt

from peclr_dali.skeleton import BODY
from peclr_dali.train.runs.pictures import draw_skeleton

SIDE_PX = 64
_STANDING = {
    "nose": (0, -24), "left_eye": (2, -26), "right_eye": (-2, -26), "left_ear": (4, -25), "right_ear": (-4, -25),
    "left_shoulder": (7, -16), "right_shoulder": (-7, -16), "left_elbow": (11, -7), "right_elbow": (-11, -7),
    "left_wrist": (13, 2), "right_wrist": (-13, 2), "left_hip": (5, 2), "right_hip": (-5, 2), "left_knee": (6, 13),
    "right_knee": (-6, 13), "left_ankle": (6, 24), "right_ankle": (-6, 24),
}  # fmt: skip
"""Pixels from the middle: a person who faces the camera, so their left is to the right."""


def random_people_px(rng: np.random.Generator, count: int) -> npt.NDArray[np.float64]:
    """Figures (count, 17, 2) in whole pixels, each a little different."""
    standing = np.array([_STANDING[name] for name in BODY.keypoints], np.float64)
    scale, shift = rng.uniform(0.7, 1.0, (count, 1, 1)), rng.uniform(-4, 4, (count, 1, 2))
    return np.rint(standing * scale + rng.normal(0, 1, (count, 17, 2)) + shift + SIDE_PX / 2)


def write_people(root: Path, count: int, seed: int = 0) -> None:
    """A folder of pictures with annotations.json; one keypoint of each person is not labelled."""
    rng = np.random.default_rng(seed)
    (root / "images").mkdir(parents=True)
    images, annotations = [], []
    for number, keypoints_px in enumerate(random_people_px(rng, count)):
        picture = np.full((SIDE_PX, SIDE_PX, 3), 60, np.uint8)
        draw_skeleton(picture, keypoints_px + 0.5, BODY)
        name = f"images/{number:04}.jpg"
        assert cv2.imwrite(str(root / name), picture[..., ::-1])
        labels = np.column_stack([keypoints_px, np.full(17, 2)])
        labels[rng.integers(17)] = 0
        low, high = keypoints_px.min(axis=0), keypoints_px.max(axis=0)
        images.append({"id": 100 + number, "file_name": name, "width": SIDE_PX, "height": SIDE_PX})
        annotations.append({
            "id": number, "image_id": 100 + number, "category_id": 1, "iscrowd": 0, "num_keypoints": 16,
            "keypoints": labels.flatten().tolist(), "bbox": [*low, *(high - low + 1)],
        })  # fmt: skip
    categories = [{"id": 1, "name": "person", "keypoints": list(BODY.keypoints)}]
    content = {"images": images, "annotations": annotations, "categories": categories}
    (root / "annotations.json").write_text(json.dumps(content))
