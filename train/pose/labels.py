"""Labels of the samples of an index, the targets in a view's frame, and a network's errors on them."""

import dataclasses
import logging
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from peclr_dali.errors import UserError
from peclr_dali.models.config import PoseConfig
from peclr_dali.models.pose import project, view_intrinsics
from peclr_dali.pipelines.arrays import BoolArray, DoubleArray, FloatArray, IntArray
from peclr_dali.pipelines.batch import View, to_device
from peclr_dali.pipelines.samples.index import Index
from peclr_dali.skeleton import HAND
from peclr_dali.train.pose.inference import Poses
from peclr_dali.train.pose.metrics import in_one_place, pixel_errors, pose_tables

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class PoseTargets:
    """Labels of N views. Unknown values are NaN.

    Attributes:
        intrinsics: (N, 3, 3), K' = A K of each view, A being the view's `source_to_view_px`.
        keypoints_px: (N, K, 2), in pixels of the view, corner-based.
        relative_depth: (N, K), depth minus the root's over the reference bone's length; 0 at the root.
        root_depth: (N,), the root's depth over the reference bone's length.
    """

    intrinsics: Tensor
    keypoints_px: Tensor
    relative_depth: Tensor
    root_depth: Tensor

    def __getitem__(self, rows: slice) -> "PoseTargets":
        return PoseTargets(**{name: values[rows] for name, values in vars(self).items()})


@dataclass(frozen=True)
class PoseLabels:
    """Labels of N samples. Unknown values are NaN.

    Attributes:
        joints: (N, K, 3) in the camera's frame: in metres, or without a known camera in pixels up to scale and shift.
        in_metres: whether `joints` are in metres.
        scale_m: (N,) length of the reference bone, NaN where unknown.
        keypoints_px: (N, K, 2) in the source's pixels, NaN where unknown.
        intrinsics: (N, 3, 3); of an unknown camera, an assumed one.
        has_camera: (N,) whether the intrinsics are known.
    """

    joints: FloatArray
    in_metres: bool
    scale_m: FloatArray
    keypoints_px: FloatArray
    intrinsics: FloatArray
    has_camera: BoolArray

    @classmethod
    def of(cls, index: Index) -> "PoseLabels":
        """The labels of an index, not copied; missing ones are NaN."""
        count, targets = len(index), index.targets
        unknown = np.broadcast_to(np.float32(np.nan), (count, len(HAND), 3))
        joints, in_metres = targets.get("xyz_m", targets.get("xyz_px", unknown)), "xyz_m" in targets
        scale_m = targets.get("scale_m", unknown[:, 0, 0])
        if in_metres and "scale_m" not in targets:  # the dataset has no scales, so they are measured on the joints
            start, end = HAND.reference_bone
            scale_m = np.linalg.norm(joints[:, start] - joints[:, end], axis=1)
        intrinsics = targets.get("K", unknown[:, :3])
        has_camera = np.asarray(np.isfinite(intrinsics).all(axis=(1, 2)))
        if not has_camera.all():
            # Centred on the box. The size of whole images is unknown here.
            box_px = np.where(index.box_px[:, 2:] > 0, index.box_px, np.array([112, 112, 224], np.float32))
            # A focal length as FreiHAND's.
            intrinsics = np.where(has_camera[:, None, None], intrinsics, cameras_of(5 * box_px[:, 2], box_px[:, :2]))
        return cls(
            joints,
            in_metres,
            np.where(scale_m > 0, scale_m, np.float32(np.nan)),
            unknown[..., :2] if index.keypoints_px is None else index.keypoints_px,
            intrinsics,
            has_camera,
        )

    @property
    def labelled(self) -> bool:
        """Whether there are any labels."""
        return not (np.isnan(self.joints).all() and np.isnan(self.keypoints_px).all())

    def __getitem__(self, rows: IntArray) -> "PoseLabels":
        tables: dict[str, Any] = {
            name: values[rows] for name, values in vars(self).items() if isinstance(values, np.ndarray)
        }
        return dataclasses.replace(self, **tables)

    def of_view(self, view: View, samples: Tensor, pose: PoseConfig, dtype: torch.dtype = torch.float32) -> PoseTargets:
        """Targets in a view's frame, on the view's device; the host does not wait for their copy.

        Depths and the camera's frame are those of the source. A view changes the pixels of a keypoint and the
        intrinsics, not its position in 3D (see `peclr_dali.models.pose`).

        Args:
            view: a view of N samples.
            samples: (N,) rows of the samples in these labels, on the CPU.
            pose: configuration with the root keypoint, and with the meaning of keypoint 0 (wrist or palm).
            dtype: type of the result.
        """
        rows = samples.numpy()

        def tensor(values: FloatArray) -> Tensor:
            return to_device(values, view.image.device).to(dtype)

        affine = view.source_to_view_px.to(dtype)  # (N, 2, 3)
        intrinsics = view_intrinsics(tensor(self.intrinsics[rows]), affine)
        keypoints_px = tensor(self.keypoints_px[rows]) @ affine[:, :, :2].mT + affine[:, None, :, 2]
        joints = tensor(self.joints[rows]) / tensor(self.scale_m[rows])[:, None, None]
        if pose.first_keypoint == "palm":
            palm = (joints[:, :1] + joints[:, HAND.reference_bone[0]][:, None]) / 2
            joints = torch.cat([palm, joints[:, 1:]], dim=1)
            keypoints_px = torch.cat([project(palm, intrinsics), keypoints_px[:, 1:]], dim=1)
        root_depth = joints[:, HAND.keypoints.index(pose.root), 2]
        return PoseTargets(intrinsics, keypoints_px, joints[..., 2] - root_depth[:, None], root_depth)


def labels_to_learn(index: Index) -> PoseLabels:
    """The labels of an index, checked for training a pose network.

    Without 3D keypoints, a warning says that only 2D keypoints are learnt.

    Raises:
        UserError: keypoints or camera matrices are missing.
    """
    missing = [name for name in ("K", "xyz_m") if name not in index.targets]
    keypoints_px = [] if index.keypoints_px is None else np.split(index.keypoints_px, np.cumsum(index.counts)[:-1])
    if not keypoints_px or missing == ["K"] or any(np.isnan(points_px).all() for points_px in keypoints_px):
        add = "add K to the targets of its Index, or leave xyz_m out to learn 2D keypoints alone"
        remedy = add if missing == ["K"] else "use a labelled source, or pre-train on this one"
        raise UserError(
            f"{index.root} ({index.name}) has no {' and no '.join(missing or ['keypoints'])}: a pose is learnt "
            f"from camera matrices and 3D keypoints, so {remedy}"
        )
    labels = PoseLabels.of(index)
    if not labels.in_metres:
        log.warning("%s (%s) has no 3D keypoints: only 2D keypoints are learnt, no depths", index.root, index.name)
    return labels


def cameras_of(focal_px: np.ndarray, centre_px: np.ndarray) -> FloatArray:
    """Camera matrices (N, 3, 3) of focal lengths (N,) and principal points (N, 2), in pixels."""
    cameras = np.tile(np.eye(3, dtype=np.float32), (len(focal_px), 1, 1))
    cameras[:, [0, 1], [0, 1]] = focal_px[:, None]
    cameras[:, :2, 2] = centre_px
    return cameras


@dataclass(frozen=True)
class Errors:
    """Errors of N predictions.

    Attributes:
        tables: (N, K) for each of the `METRICS` that could be measured; NaN where a keypoint is not measured.
        measured: number of samples that are measured.
        left_out: number of samples that are not measured, by reason.
    """

    tables: dict[str, DoubleArray]
    measured: int
    left_out: dict[str, int]

    @property
    def reasons(self) -> str:
        """The reasons why samples are not measured, with counts; empty if all are measured."""
        return ", ".join(f"{count} {reason}" for reason, count in self.left_out.items() if count)


def errors_of(
    poses: Poses, labels: PoseLabels, *, unreadable: BoolArray | None = None, proper_rotation: bool = False
) -> Errors:
    """Compute the errors of predictions for N images, given their labels, row by row; arguments as `pose_tables`.

    A sample is left out and counted if its file cannot be read, it has no label, its label is a single point, or the
    prediction is not finite. Errors without alignment are NaN if camera or scale are unknown.

    Args:
        unreadable: (N,) images that could not be read; none by default.
    """
    true, true_px = labels.joints.astype(np.float64), labels.keypoints_px.astype(np.float64)
    # Alignment does not need the scale.
    unit = np.where(np.isnan(labels.scale_m), 1.0, labels.scale_m.astype(np.float64))
    joints, keypoints_px = poses.joints * unit[:, None, None], poses.keypoints_px
    known, known_px = (np.asarray(np.isfinite(points).all(axis=2)) for points in (true, true_px))  # (N, K) each
    reasons = {
        "unreadable": np.zeros(len(joints), bool) if unreadable is None else unreadable,
        "without labels": ~(known | known_px).any(axis=1),
        "label is one point": in_one_place(true, known),
        "prediction is not finite": ~np.isfinite(joints).all(axis=(1, 2)) | ~np.isfinite(keypoints_px).all(axis=(1, 2)),
    }
    usable, left_out = np.ones(len(joints), bool), {}
    for reason, applies in reasons.items():  # each sample counts only for its first reason
        left_out[reason] = int((applies & usable).sum())
        usable &= ~applies
    tables = pose_tables(joints, true, valid=known & usable[:, None], proper_rotation=proper_rotation)
    if labels.in_metres:
        for name in ("epe_cm", "auc"):
            tables[name][~(labels.has_camera & ~np.isnan(labels.scale_m))] = np.nan
    else:
        tables = {"pa_epe_px": tables["pa_epe_cm"] / 100}
    tables["epe_px"] = pixel_errors(keypoints_px, true_px, valid=known_px & usable[:, None])
    return Errors(
        {name: table for name, table in tables.items() if not np.isnan(table).all()}, int(usable.sum()), left_out
    )
