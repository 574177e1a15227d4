"""Estimates poses without boxes in the authors' two passes, and writes the file for FreiHAND's leaderboard."""

from __future__ import annotations

import json
import zipfile
from pathlib import Path

import cv2
import numpy as np
import numpy.typing as npt
import torch

from peclr_dali.errors import UserError
from peclr_dali.models.pose import PoseNetwork, view_intrinsics
from peclr_dali.pipelines.batch import to_device
from peclr_dali.pipelines.samples.index import Index
from peclr_dali.skeleton import HAND
from peclr_dali.train.config.finetuning import FinetuneConfig
from peclr_dali.train.distributed.world import World
from peclr_dali.train.pose.inference import Floats, Poses, Progress, inference, with_wrist
from peclr_dali.train.pose.labels import PoseLabels
from peclr_dali.train.runs.pictures import Image
from peclr_dali.writing import whole_file, write_text

FIRST_BOX_FRAC = 0.33
"""Side of the first pass's box, which is in the middle of the image, over the image's longer side."""
BOX_IN_VIEW = 0.7
"""Side of a box over the side of the view around it."""
SUBMISSION = ("pred.json", "pred.zip")
"""The files that `save_submission` writes."""


def estimate_in_two_passes(
    network: PoseNetwork,
    index: Index,
    intrinsics: npt.NDArray[np.float32],
    config: FinetuneConfig,
    world: World,
    *,
    keep_images: int = 0,
    progress: Progress | None = None,
) -> Poses:
    """Estimate poses without boxes as the authors' test code: crop the middle, predict, crop the prediction, predict.

    The first box is `FIRST_BOX_FRAC` of the image; the second is the rectangle around the predicted 2D keypoints, in
    whole pixels of the first view. The box's longer side is `BOX_IN_VIEW` of the view's side; the view is black outside
    the image. Both views are mirrored where `Index.mirror` says so, as in training.

    The authors' code counts pixels from the first pixel's centre. For the authors' networks
    (`pose.first_keypoint = "palm"`), this function does the same. For ours, it counts from the corner, as in training.

    Arguments and result as in `estimate_poses`; files that cannot be read have -1 in `samples`, and if all have, it is
    a `UserError`.
    """
    count, batch, side_px = len(index), config.validation.batch, config.geometry.side_px
    samples, mirror = np.full(count, -1), index.mirrored
    keypoints_px, joints = (np.full((count, len(HAND), columns), np.nan) for columns in (2, 3))
    matrices = np.zeros((count, 2, 3))
    kept: list[Image] = []
    origin_px = 0.0 if config.pose.first_keypoint == "palm" else 0.5
    network = network.float().to(world.device).eval()

    def predict(images: list[Image], crops: Floats, k: Floats) -> tuple[Floats, Floats, Image]:
        views = np.stack([_view(image, crop, side_px, origin_px) for image, crop in zip(images, crops, strict=True)])
        in_view = view_intrinsics(torch.from_numpy(k), torch.from_numpy(crops)).float().numpy()
        with inference(world.device):
            pixels = to_device(views, world.device).permute(0, 3, 1, 2)
            output = network(pixels, to_device(in_view, world.device))
        return output.keypoints_px.double().cpu().numpy(), output.joints.double().cpu().numpy(), views

    for start in range(0, count, batch):
        stop = min(start + batch, count)
        read = {row: image for row in range(start, stop) if (image := _read(index, row)) is not None}
        if read:
            rows, images = list(read), list(read.values())
            k = intrinsics[rows].astype(np.float64)
            sizes = np.array([image.shape[1::-1] for image in images], np.float64)  # (n, 2): width, height
            crops = crops_around(sizes / 2, FIRST_BOX_FRAC * sizes.max(axis=1), side_px, mirror[rows])
            first = np.nan_to_num(predict(images, crops, k)[0])
            # (n, 2, 2), in the first view
            edges: Floats = np.trunc(np.stack([first.min(axis=1), first.max(axis=1)], axis=1))
            low, high = _to_source(edges, crops).transpose(1, 0, 2)
            longer_px = np.abs(high - low).max(axis=1)  # of a mirrored view, low is on the right
            crops = crops_around((low + high) / 2, np.maximum(longer_px, 1.0), side_px, mirror[rows])
            second, joints[rows], views = predict(images, crops, k)
            samples[rows], keypoints_px[rows], matrices[rows] = rows, _to_source(second, crops), crops
            kept.extend(views[: max(0, keep_images - len(kept))])
        if progress is not None:
            progress(stop, count)
    if (samples < 0).all():
        raise UserError(f"{index.root} ({index.name}): none of {count} images can be read; expected JPEG or PNG files")
    return Poses(
        samples,
        with_wrist(keypoints_px, joints, intrinsics, config.pose),
        joints,
        samples[samples >= 0][: len(kept)],
        np.stack(kept) if kept else np.empty((0, side_px, side_px, 3), np.uint8),
        matrices,
    )


def crops_around(centre_px: Floats, side_px: Floats, view_side_px: int, mirror: npt.NDArray[np.bool_]) -> Floats:
    """Maps from source to view with a box in the middle, whose side is `BOX_IN_VIEW` of the view's.

    Args:
        centre_px: (N, 2) centres of the boxes, in the source.
        side_px: (N,) sides of the boxes, in the source.
        view_side_px: side of the views.
        mirror: (N,) the views to mirror, left for right.

    Returns:
        (N, 2, 3).
    """
    scale = BOX_IN_VIEW * view_side_px / side_px
    crops = np.zeros((len(scale), 2, 3))
    crops[:, 0, 0], crops[:, 1, 1] = np.where(mirror, -scale, scale), scale
    crops[:, :, 2] = view_side_px / 2 - crops[:, [0, 1], [0, 1]] * centre_px
    return crops


def _to_source(points_px: Floats, crops: Floats) -> Floats:
    """Transform points (N, J, 2) from the views to the source."""
    solved = np.linalg.solve(crops[:, :, :2], (points_px - crops[:, None, :, 2]).transpose(0, 2, 1))
    return np.asarray(solved.transpose(0, 2, 1), np.float64)


def _view(image: Image, crop: Floats, side_px: int, origin_px: float) -> Image:
    """The crop of an image. `origin_px`: the crop's coordinate for the centre of the first pixel (OpenCV: 0)."""
    matrix = crop.copy()
    matrix[:, 2] += crop[:, :2].sum(axis=1) * origin_px - origin_px
    view = cv2.warpAffine(image, matrix, (side_px, side_px), flags=cv2.INTER_LINEAR, borderMode=cv2.BORDER_CONSTANT)
    return np.asarray(view, np.uint8)


def _read(index: Index, row: int) -> Image | None:
    try:
        decoded = cv2.imdecode(np.frombuffer(index.read(row), np.uint8), cv2.IMREAD_COLOR)
    except (OSError, cv2.error):
        return None
    return None if decoded is None else np.ascontiguousarray(decoded[..., ::-1])


def save_submission(folder: Path, poses: Poses, labels: PoseLabels) -> tuple[Path, Path]:
    """Write pred.json for FreiHAND's evaluation, with joints in metres, and pred.zip for the leaderboard.

    A missing hand, camera or scale is a `UserError`, since the leaderboard needs every image.
    """
    joints_m = poses.joints * labels.scale_m[:, None, None].astype(np.float64)
    is_its_own = poses.samples == np.arange(len(joints_m))  # not a substitute's
    missing = np.flatnonzero(~(np.isfinite(joints_m).all(axis=(1, 2)) & labels.has_camera & is_its_own))
    if len(missing):
        raise UserError(
            f"no hand for {len(missing)} of {len(joints_m)} images, the first is image {missing[0]}: its file, its "
            "camera matrix or its scale is missing. The leaderboard needs every image"
        )
    vertices = [[0.0, 0.0, 0.0]] * 778  # vertices of MANO; only the mesh's metrics use them
    content = [joints_m.tolist(), [vertices] * len(joints_m)]
    as_json, as_zip = (folder / name for name in SUBMISSION)
    write_text(as_json, json.dumps(content))
    with whole_file(as_zip) as file, zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.write(as_json, "pred.json")
    return as_json, as_zip
