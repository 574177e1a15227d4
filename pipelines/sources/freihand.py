"""FreiHAND: 32,560 training poses, each before four backgrounds, and 3,960 evaluation images, all with 3D joints.

Zimmermann et al., "FreiHAND: A Dataset for Markerless Capture of Hand Pose and Shape from Single RGB Images", 2019.
"""

import os
from pathlib import Path

import numpy as np

from peclr_dali.errors import UserError
from peclr_dali.pipelines.arrays import DoubleArray
from peclr_dali.pipelines.config import DataConfig, box_file
from peclr_dali.pipelines.files.check import image_sizes_px
from peclr_dali.pipelines.samples.index import WHOLE_IMAGE, Index, project_px, read_or_error, squares_around
from peclr_dali.pipelines.samples.subsets import refuse_key, rows_of_split
from peclr_dali.pipelines.sources.boxes import with_one_box_each
from peclr_dali.pipelines.sources.label_files.dataset_file import dataset_file, read_json_array
from peclr_dali.skeleton import HAND

HAS_PARTS = True

VERSIONS = ("gs", "hom", "sample", "auto")
"""The backgrounds in the order of the files: green screen, then three kinds of replacement."""

_POSES = 32_560  # number of training poses of the published dataset

# In the name of a file of labels -> the target of `Index`, and the shape of a pose's numbers.
_LABELS = {"K": ("K", (3, 3)), "xyz": ("xyz_m", (len(HAND), 3)), "scale": ("scale_m", ())}


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
    # Without labels, these may be the first quarter of all images, each of another pose.
    doubtful = not labels and count != backgrounds * _POSES and (count == _POSES or config.positive == "version")
    if count % backgrounds or doubtful:
        raise UserError(
            f"{root / part / 'rgb'}: {count} images; expected a multiple of {backgrounds}, one for each version of a "
            f"pose: all {backgrounds * _POSES} of FreiHAND's {_POSES} poses, or label files, which say how many poses "
            "there are. Unpack the dataset again."
        )
    poses = count // backgrounds
    chosen = rows_of_split(np.arange(poses), split)
    offsets = [VERSIONS.index(version) * poses for version in versions] if part == "training" else [0]
    images = np.concatenate([offset + chosen for offset in offsets])
    paths, keypoints_px = [_name(part, image) for image in images.tolist()], None
    if {"K", "xyz"} <= labels.keys():  # one row per pose, before they are repeated for the versions
        keypoints_px = project_px(labels["K"], labels["xyz"]).astype(np.float32)[images % poses]
    box_px = np.tile(np.array(WHOLE_IMAGE, np.float32), (len(paths), 1))
    if box == "center":
        first = root / _name(part, 0)
        height, width = image_sizes_px([read_or_error(str(first))])[0].tolist()
        if not height:
            raise UserError(
                f"{first}: not a readable image; box 'center' takes the size of all images from it. Replace it."
            )
        box_px[:] = [width / 2, height / 2, config.center_frac * min(width, height)]
    elif box == "joints":
        if keypoints_px is None:
            raise UserError(
                f"{root}: box 'joints' needs {part}_K.json and {part}_xyz.json, which are not both there. "
                "Add them, or use box 'center', which needs no labels."
            )
        box_px = squares_around(keypoints_px.min(axis=1), keypoints_px.max(axis=1))
    index = Index(
        name=f"freihand {part}",
        root=root,
        paths=paths,
        box_px=box_px,
        keypoints_px=keypoints_px,
        group=images % poses,
        targets={_LABELS[name][0]: rows.astype(np.float32)[images % poses] for name, rows in labels.items()},
        label_file=f"{root / part}_*.json" if labels else "",
        one_size=True,
    )
    boxes, names = box_file(config), [_name(part, image) for image in range(count)]
    return index if boxes is None else with_one_box_each(index, boxes, names, images)


def _name(part: str, image: int) -> str:
    return f"{part}/rgb/{image:08d}.jpg"


def _count_images(root: Path, part: str) -> int:
    folder = root / part / "rgb"
    remedy = f"Give the folder that holds '{part}', or make a stand-in with 'python cli.py make-data'."
    with dataset_file(folder, "FreiHAND's images there", remedy):
        names = {name for name in os.listdir(folder) if name.endswith(".jpg") and name[0] != "."}  # noqa: PTH208
    expected = {f"{image:08d}.jpg" for image in range(max(len(names), 1))}
    if missing := sorted(expected - names):
        others = f", and others such as {min(names - expected)!r} are there" if names else ""
        raise UserError(
            f"{folder}: {len(names)} .jpg files, but {missing[0]} is missing{others}. Expected numbers without a gap, "
            "from 00000000.jpg on, and nothing else. Unpack the dataset again, or move others away."
        )
    return len(names)


def _read_labels(root: Path, part: str, images: int, backgrounds: int) -> dict[str, DoubleArray]:
    """Read the label files that exist: K (poses, 3, 3), xyz (poses, 21, 3), scale (poses,)."""
    labels = {}
    for name, (_, shape) in _LABELS.items():
        file = root / f"{part}_{name}.json"
        if file.exists():
            labels[name] = read_json_array(file, shape)
            poses = len(labels[name])
            if poses * backgrounds != images:
                raise UserError(
                    f"{file}: labels for {poses} poses, but {root / part / 'rgb'} has {images} images; expected "
                    f"{backgrounds} for each pose, {poses * backgrounds} in all. Use labels and images of one set."
                )
    return labels
