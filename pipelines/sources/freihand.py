"""FreiHAND: 32,560 training poses, each before four backgrounds, and 3,960 evaluation images, all with 3D joints.

Zimmermann et al., "FreiHAND: A Dataset for Markerless Capture of Hand Pose and Shape from Single RGB Images", 2019.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt

from peclr_dali.errors import UserError
from peclr_dali.pipelines.config import DataConfig
from peclr_dali.pipelines.samples.box_check import image_sizes_px
from peclr_dali.pipelines.samples.index import Index, read_file
from peclr_dali.pipelines.samples.subsets import refuse_key, rows_of_split
from peclr_dali.pipelines.sources.boxes import boxes_of_images, squares_around
from peclr_dali.pipelines.sources.label_files import (
    LEAST_FOCAL_PX,
    dataset_file,
    project_px,
    read_json_array,
    require_metres,
)
from peclr_dali.skeleton import HAND

VERSIONS: Final = ("gs", "hom", "sample", "auto")
"""The backgrounds in the order of the files: green screen, then three kinds of replacement."""

_POSES: Final = 32_560
"""Number of training poses of the published dataset."""

_LABELS: Final = {"K": (3, 3), "xyz": (len(HAND), 3), "scale": ()}
_TARGETS: Final = {"K": "K", "xyz": "xyz_m", "scale": "scale_m"}


def load_freihand(config: DataConfig) -> Index:
    """Read FreiHAND, or a smaller set in its layout.

    Image v * N + i shows pose i before background v of N poses and four backgrounds; evaluation images have one each.
    Rows are ordered by version, then pose; a split keeps the versions of a pose together. Labels are read where their
    files exist; only `data.box = "joints"` needs them. A file of boxes calls an image "training/rgb/00000000.jpg".

    Keypoints are K times xyz, divided by depth, in the corner-based frame of `Index`. The dataset does not define
    whether its K counts pixels from the first pixel's corner or its centre. The corner is assumed; with the centre,
    keypoints would shift by half a pixel.

    Returns:
        The index; a pose is a group. Targets, as far as their files exist: K (N, 3, 3) in pixels, xyz_m (N, 21, 3) in
        metres in the camera's frame, and scale_m (N,) in metres, the length of the middle finger's first phalanx.

    Raises:
        UserError: a folder, image or needed label file is missing, or labels do not fit the images.
    """
    root, part, split, versions, box = Path(config.root), config.part, config.split, config.versions, config.box
    if part == "evaluation":
        refuse_key(config, "split", "FreiHAND's evaluation images are not split")
    if not versions or len(set(versions)) < len(versions):
        raise UserError(f"data.versions = {list(versions)!r}: expected some of {list(VERSIONS)!r}, each once.")
    count = _count_images(root, part)
    backgrounds = len(VERSIONS) if part == "training" else 1
    labels = _read_labels(root, part, count, backgrounds)
    if config.positive == "version" and not labels and count != backgrounds * _POSES:
        raise UserError(f"{root}: data.positive = 'version' needs label files, which say how many poses there are.")
    if count % backgrounds or (count == _POSES and not labels):
        raise UserError(
            f"{root / part / 'rgb'}: {count} images; expected a multiple of {backgrounds}, one for each version of a "
            f"pose, in all {backgrounds * _POSES} of FreiHAND's {_POSES} poses. Unpack the dataset again."
        )
    poses = count // backgrounds
    chosen = rows_of_split(np.arange(poses), split)
    offsets = [VERSIONS.index(version) * poses for version in versions] if part == "training" else [0]
    images = np.concatenate([offset + chosen for offset in offsets])
    if not len(images):
        raise UserError(f"{root}: no pose of {poses} is in split {split!r}. Use split 'all', or a larger set.")

    paths, keypoints_px = [_name(part, image) for image in images.tolist()], None
    first = root / paths[0]
    size_px = image_sizes_px(read_file, [str(first)])[0]  # height, width; 0 if it cannot be read
    if {"K", "xyz"} <= labels.keys():  # one row per pose, before they are repeated for the versions
        keypoints_px = project_px(labels["K"], labels["xyz"]).astype(np.float32)[images % poses]
    if box == "center":
        if not size_px.all():
            raise UserError(
                f"{first}: not a readable image; box 'center' takes the size of all images from it. Replace it."
            )
        center = [size_px[1] / 2, size_px[0] / 2, config.center_frac * min(size_px)]
        box_px = np.tile(np.array(center, np.float32), (len(paths), 1))
    elif box == "joints":
        if keypoints_px is None:
            raise UserError(
                f"{root}: box 'joints' needs {part}_K.json and {part}_xyz.json, which are not both there. "
                "Add them, or use box 'center', which needs no labels."
            )
        box_px = squares_around(keypoints_px.min(axis=1), keypoints_px.max(axis=1))
    else:
        box_px = boxes_of_images(Path(box), [_name(part, image) for image in range(count)])[images]
    return Index(
        name=f"freihand {part}",
        root=root,
        paths=paths,
        box_px=box_px,
        keypoints_px=keypoints_px,
        group=images % poses,
        targets={_TARGETS[name]: rows.astype(np.float32)[images % poses] for name, rows in labels.items()},
    )


def _name(part: str, image: int) -> str:
    return f"{part}/rgb/{image:08d}.jpg"


def _count_images(root: Path, part: str) -> int:
    folder = root / part / "rgb"
    remedy = f"Give the folder that holds '{part}', or make a stand-in with 'python cli.py make-data'."
    with dataset_file(folder, "FreiHAND's images there", remedy):
        names = {name for name in os.listdir(folder) if name.endswith(".jpg") and name[0] != "."}  # noqa: PTH208
    if others := sorted(name for name in names if not re.fullmatch(r"\d{8}\.jpg", name)):
        raise UserError(f"{folder}: {others[0]!r} is none of FreiHAND's images, 00000000.jpg and so on. Move it away.")
    for image in range(max(len(names), 1)):
        if f"{image:08d}.jpg" not in names:
            raise UserError(
                f"{folder}: {len(names)} .jpg files, but {image:08d}.jpg is missing; the last is "
                f"{max(names, default='none')}. Expected numbers without a gap. Unpack the dataset again."
            )
    return len(names)


def _read_labels(root: Path, part: str, images: int, backgrounds: int) -> dict[str, npt.NDArray[np.float64]]:
    """Read the label files that exist: K (poses, 3, 3), xyz (poses, 21, 3), scale (poses,)."""
    labels = {}
    for name, shape in _LABELS.items():
        file = root / f"{part}_{name}.json"
        if not file.exists():
            continue
        rows = read_json_array(file, shape)
        if len(rows) * backgrounds != images:
            raise UserError(
                f"{file}: labels for {len(rows)} poses, but {root / part / 'rgb'} has {images} images; expected "
                f"{backgrounds} for each pose, {len(rows) * backgrounds} in all. Use labels and images of one set."
            )
        _check_camera_frame(file, name, rows)
        labels[name] = rows
    if {"xyz", "scale"} <= labels.keys():
        start, end = HAND.reference_bone
        bones_m = np.linalg.norm(labels["xyz"][:, start] - labels["xyz"][:, end], axis=1)
        wrong = (labels["scale"] > 1.5 * bones_m) | (1.5 * labels["scale"] < bones_m)
        if wrong.any():
            found = f"{wrong.sum()} of {len(wrong)} are not the bones of {part}_xyz.json, first that of pose"
            raise UserError(f"{file}: {found} {wrong.argmax()}; expected labels of one set. Unpack the dataset again.")
    return labels


def _check_camera_frame(file: Path, name: str, rows: npt.NDArray[np.float64]) -> None:
    if name == "K":
        strange = (rows[:, 2] != [0, 0, 1]).any(axis=1) | (rows[:, [0, 1], [0, 1]] < LEAST_FOCAL_PX).any(axis=1)
        if strange.any():
            pose = int(strange.argmax())
            raise UserError(
                f"{file}: the camera matrix of pose {pose} is {rows[pose].tolist()}; expected focal lengths above "
                f"{LEAST_FOCAL_PX:g} px, and a last row of 0, 0, 1. Is it transposed?"
            )
    if name == "xyz" and (rows[..., 2] <= 0).any():
        raise UserError(
            f"{file}: a depth of {rows[..., 2].min():g}; expected depths above 0, in metres in the camera's frame. "
            "Mend the labels."
        )
    if name != "K":
        require_metres(file, rows)
