"""What a batch's samples are labelled with, in the frame of their view."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from errors import UserError
from models.config import PoseConfig
from models.hand import KEYPOINTS, REFERENCE_BONE
from models.pose import project, view_intrinsics
from pipelines.batch import View
from pipelines.samples.index import Index


@dataclass(frozen=True)
class PoseTargets:
    """Labels of N views. NaN stands for a keypoint that is not known.

    Attributes:
        intrinsics: (N, 3, 3), K' = A K of each view, A being the view's `source_to_view_px`.
        keypoints_px: (N, 21, 2), in pixels of the view, corner-based.
        relative_depth: (N, 21), depth minus the root's over the reference bone's length; 0 at the root.
        root_depth: (N,), the root's depth over the reference bone's length.
    """

    intrinsics: Tensor
    keypoints_px: Tensor
    relative_depth: Tensor
    root_depth: Tensor

    def __getitem__(self, rows: slice) -> PoseTargets:
        return PoseTargets(
            self.intrinsics[rows], self.keypoints_px[rows], self.relative_depth[rows], self.root_depth[rows]
        )


class PoseLabels:
    """The labels of all samples of an index, and how a view carries them.

    Depths, and the camera's frame, are those of the source: a view changes where a keypoint is seen and through which
    intrinsics, not where it is (see `models.pose`).

    Args:
        index: with keypoints and the targets "K" and "xyz_m". The reference bone's length is "scale_m", or measured on
            the joints where the dataset has none.
        pose: which keypoint is the root, and whether keypoint 0 is the wrist or the palm.

    Attributes:
        joints_m: (samples, 21, 3) float32, metres, in the camera's frame, always with the wrist.
        scale_m: (samples,) float32, length of the reference bone.

    Raises:
        UserError: the index lacks labels.
    """

    def __init__(self, index: Index, pose: PoseConfig) -> None:
        missing = [name for name in ("K", "xyz_m") if name not in index.targets]
        if index.keypoints_px is None or missing:
            raise UserError(
                f"{index.root} ({index.name}) has no {' and no '.join(missing or ['keypoints'])}: a pose is learnt "
                f"from camera matrices and 3D keypoints, so use a labelled source, or pre-train on this one"
            )
        self.joints_m = index.targets["xyz_m"]
        self.scale_m = index.targets["scale_m"] if "scale_m" in index.targets else bone_length_m(self.joints_m)
        self._intrinsics, self._keypoints_px = index.targets["K"], index.keypoints_px
        self._root = KEYPOINTS.index(pose.root)
        self._palm = pose.first_keypoint == "palm"
        if not (self.scale_m > 0).any():
            raise UserError(
                f"{index.root} ({index.name}): no hand has the length of its reference bone "
                f"({' to '.join(KEYPOINTS[end] for end in REFERENCE_BONE)}), which depths are divided by: add labels"
            )

    def of_view(self, view: View, samples: Tensor, dtype: torch.dtype = torch.float32) -> PoseTargets:
        """Labels in a view's frame, on the view's device.

        Args:
            view: of N samples.
            samples: (N,) their rows in the index, on the CPU.
            dtype: of the result.
        """
        rows = samples.numpy()

        def tensor(values: npt.NDArray[np.float32]) -> Tensor:
            return torch.from_numpy(values[rows]).to(view.image.device, dtype, non_blocking=True)

        affine = view.source_to_view_px.to(dtype)  # (N, 2, 3)
        intrinsics = view_intrinsics(tensor(self._intrinsics), affine)
        keypoints_px = tensor(self._keypoints_px) @ affine[:, :, :2].mT + affine[:, None, :, 2]
        joints = tensor(self.joints_m) / tensor(self.scale_m)[:, None, None]
        if self._palm:
            palm = (joints[:, :1] + joints[:, KEYPOINTS.index("middle_mcp")][:, None]) / 2
            joints = torch.cat([palm, joints[:, 1:]], dim=1)
            keypoints_px = torch.cat([project(palm, intrinsics), keypoints_px[:, 1:]], dim=1)
        root_depth = joints[:, self._root, 2]
        return PoseTargets(intrinsics, keypoints_px, joints[..., 2] - root_depth[:, None], root_depth)


def bone_length_m(joints_m: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """Length of the reference bone of hands (N, 21, 3): (N,)."""
    start, end = REFERENCE_BONE
    length: npt.NDArray[np.float32] = np.linalg.norm(joints_m[:, start] - joints_m[:, end], axis=1)
    return length
