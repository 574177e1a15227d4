"""2.5D pose: keypoints in the view and relative depths, and their back-projection to 3D.

Scale-normalised means divided by the length of the reference bone. So depths here have no unit; multiplied
by that length in metres, they are in metres. (X, Y) are coordinates on the plane at depth 1, K^-1 [x, y, 1].

Frames. A view shows the source through an affine map A of its pixels (`source_to_view_px`), so its intrinsics are
K' = A K, and K'^-1 [x', y', 1] = K^-1 [x, y, 1] for any A. Depths are measured along the optical axis of the source's
camera and do not change with A. So (X, Y), the root's depth and the joints are exact for every invertible A, and are in
the source camera's frame, as the labels are. One thing is not exact: a rotated view is a picture by a rolled camera
only for square pixels and a rotation about the principal point. Rotated about the box's centre, or scaled, the view has
a perspective that no such camera gives. The network does not know K', so it has to average over this.
"""

from typing import NamedTuple

import torch
from torch import Tensor, nn

from peclr_dali.models.config import PoseConfig
from peclr_dali.models.encoders import Encoder
from peclr_dali.models.network import Normalize
from peclr_dali.skeleton import HAND

ROOT_DEPTH_RANGE = (4.0, 50.0)
"""Range of scale-normalised root depths in the authors' code: 12 cm to 1.5 m for a bone of 3 cm."""
_FLOOR = 1e-8  # smallest a and smallest discriminant in the authors' code


class PoseOutput(NamedTuple):
    """Poses of N views.

    Attributes:
        keypoints_px: (N, K, 2), in pixels of the view, corner-based.
        relative_depth: (N, K), depth minus the root's, scale-normalised; 0 at the root.
        root_depth: (N,), scale-normalised, refined if the network refines.
        root_depth_unrefined: (N,), from the closed form, clamped to `ROOT_DEPTH_RANGE`; without gradient.
        joints: (N, K, 3), in the source camera's frame, scale-normalised.
    """

    keypoints_px: Tensor
    relative_depth: Tensor
    root_depth: Tensor
    root_depth_unrefined: Tensor
    joints: Tensor


def view_intrinsics(intrinsics: Tensor, source_to_view_px: Tensor) -> Tensor:
    """K' = A K: the intrinsics of a view.

    Args:
        intrinsics: (N, 3, 3) K of the source in pixels, corner-based, last row (0, 0, 1).
        source_to_view_px: (N, 2, 3) A, as `peclr_dali.pipelines.batch.View` holds it.

    Returns:
        (N, 3, 3), in the dtype of `intrinsics`. It has off-diagonal terms if A rotates.
    """
    return torch.cat([source_to_view_px.to(intrinsics.dtype) @ intrinsics, intrinsics[:, 2:]], dim=1)


def normalize_keypoints(keypoints_px: Tensor, intrinsics: Tensor) -> Tensor:
    """(X, Y) of pixels: K^-1 [x, y, 1] without its last entry, which is 1.

    Args:
        keypoints_px: (N, J, 2).
        intrinsics: (N, 3, 3), or (1, 3, 3) for all, of the picture that contains the pixels; any invertible matrix with
            the last row (0, 0, 1).

    Returns:
        (N, J, 2).
    """
    # The inverse of the 2 x 2 part, written out: exact enough, fast, and supported by ONNX.
    (fx, skew), (sheer, fy) = ((intrinsics[:, None, row, 0], intrinsics[:, None, row, 1]) for row in (0, 1))  # (N, 1)
    x, y = (keypoints_px - intrinsics[:, None, :2, 2]).unbind(dim=2)  # (N, J)
    determinant = fx * fy - skew * sheer
    return torch.stack([(fy * x - skew * y) / determinant, (fx * y - sheer * x) / determinant], dim=2)


def project(joints: Tensor, intrinsics: Tensor) -> Tensor:
    """Project points (N, J, 3) in the camera's frame, in any unit, to pixels (N, J, 2) by intrinsics (N, 3, 3)."""
    homogeneous = joints @ intrinsics.mT
    return homogeneous[..., :2] / homogeneous[..., 2:]


def solve_root_depth(
    normalized: Tensor, relative_depth: Tensor, bone: tuple[int, int], *, least_discriminant: float = 0.0
) -> Tensor:
    """Depth of the root, from the length 1 of the reference bone (Iqbal et al. 2018, eq. 6 and 7).

    The bone's ends lie on two known rays, at depths z_root + d, 1 apart: a quadratic equation in z_root. Iqbal takes
    the larger solution. If the bone lies almost along its viewing ray, the smaller one is right, but a 2.5D pose does
    not show this.

    Args:
        normalized: (N, K, 2), (X, Y) of the keypoints.
        relative_depth: (N, K), scale-normalised.
        bone: the two keypoints that are 1 apart.
        least_discriminant: smaller ones are raised to it. The authors' 1e-8 changes exact solutions if the bone is
            short in the picture.

    Returns:
        (N,), scale-normalised, finite for any finite input: the distance of the two rays is taken as at least 1e-4
        (the authors' constant), since equal rays have no solution.
    """
    n, m = bone
    (xn, yn), (xm, ym) = normalized[:, n].unbind(1), normalized[:, m].unbind(1)  # (N,) each
    zn, zm = relative_depth[:, n], relative_depth[:, m]
    dot = xn * xm + yn * ym
    a = (xn - xm) ** 2 + (yn - ym) ** 2
    b = 2 * (zn * (xn**2 + yn**2 - dot) + zm * (xm**2 + ym**2 - dot))
    c = (xn * zn - xm * zm) ** 2 + (yn * zn - ym * zm) ** 2 + (zn - zm) ** 2 - 1
    return (-b + (b**2 - 4 * a * c).clamp(min=least_discriminant).sqrt()) / (2 * a.clamp(min=_FLOOR))


def back_project(normalized: Tensor, depth: Tensor) -> Tensor:
    """K^-1 [x, y, 1] times depth: (N, J, 2) and (N, J) -> (N, J, 3), in the unit of `depth`."""
    return torch.cat([normalized * depth[..., None], depth[..., None]], dim=2)


class RootRefinement(nn.Module):
    """Correction of the root's depth (Spurr et al. 2020, "Weakly supervised 3D hand pose estimation").

    Sizes, order of the inputs and parameter names are the authors': K depths, 2 K (X, Y) and the depth itself.
    """

    def __init__(self) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for inputs in (3 * len(HAND) + 1, 128):
            layers += [nn.Linear(inputs, 128), nn.BatchNorm1d(128), nn.LeakyReLU()]
        self.zroot_ref = nn.Sequential(*layers, nn.Linear(128, 1))

    def forward(self, normalized: Tensor, relative_depth: Tensor, root_depth: Tensor) -> Tensor:
        """(N, K, 2), (N, K), (N,) -> (N,), the correction; the X of mirrored views is negated."""
        features = torch.cat([relative_depth, normalized.flatten(1), root_depth[:, None]], dim=1)  # (N, 3 K + 1)
        correction: Tensor = self.zroot_ref(features)
        return correction.squeeze(1)


class PoseNetwork(nn.Module):
    """Pixels and intrinsics in, poses out.

    The head gives x and y in units of the view's side with the origin at the centre, so that it starts near the middle
    at any size. The authors' head gives pixels: the same function with other weights.
    """

    def __init__(self, encoder: Encoder, config: PoseConfig) -> None:
        super().__init__()
        self.config = config
        self.normalize = Normalize()
        self.encoder = encoder
        inputs, hidden, outputs = encoder.feature_dim, config.hidden, 3 * len(HAND)  # x, y, depth of each keypoint
        if config.head == "linear":
            self.head: nn.Module = nn.Linear(inputs, outputs)
        else:
            self.head = nn.Sequential(nn.Linear(inputs, hidden), nn.ReLU(inplace=True), nn.Linear(hidden, outputs))
        self.refinement = RootRefinement() if config.refine else None
        self._root = HAND.keypoints.index(config.root)

    def forward(self, image: Tensor, intrinsics: Tensor) -> PoseOutput:
        """Poses of N views.

        Args:
            image: (N, 3, S, S) uint8.
            intrinsics: (N, 3, 3) of the views (`view_intrinsics`), or (1, 3, 3) for all.

        Returns:
            Float32, or the parameters' type if that is wider: geometry is not computed in 16 bits. Under autocast the
            head's own results are, which rounds a keypoint by up to 1/1000 of the view's side. Keypoint 0 of
            `keypoints_px` and `relative_depth` is `config.first_keypoint`; that of `joints` is the wrist.
        """
        return self.from_features(self.features(image), intrinsics, side_px=image.shape[-1])

    def features(self, image: Tensor) -> Tensor:
        """What the head reads: (N, 3, S, S) uint8 -> (N, D)."""
        features: Tensor = self.encoder(self.normalize(image))
        return features

    def from_features(self, features: Tensor, intrinsics: Tensor, *, side_px: int) -> PoseOutput:
        """Poses from `features` (N, D) for views of `side_px`; used with frozen encoders."""
        raw = self.head(features)  # x and y in units of the side from the centre, and depth, of each keypoint
        raw = raw.to(torch.promote_types(raw.dtype, torch.float32)).unflatten(1, (len(HAND), 3))
        with torch.autocast(raw.device.type, enabled=False):
            intrinsics = intrinsics.to(raw.dtype)
            keypoints_px = (raw[..., :2] + 0.5) * side_px  # (N, K, 2)
            is_root = torch.arange(len(HAND), device=raw.device) == self._root
            relative_depth = raw[..., 2].masked_fill(is_root, 0)  # (N, K)
            normalized = normalize_keypoints(keypoints_px, intrinsics)  # (N, K, 2)
            # Without gradient, as in the authors' code: for a bone along the viewing ray it has no bound.
            solved = solve_root_depth(
                normalized, relative_depth, HAND.reference_bone, least_discriminant=_FLOOR
            ).detach()
            root_depth = unrefined = solved.clamp(*ROOT_DEPTH_RANGE)
            if self.refinement is not None:
                # The refinement sees what the encoder sees: the mirrored hand, if the view is mirrored (det K' < 0).
                determinant = intrinsics[:, 0, 0] * intrinsics[:, 1, 1] - intrinsics[:, 0, 1] * intrinsics[:, 1, 0]
                seen_x = torch.where(determinant[:, None] < 0, -normalized[..., 0], normalized[..., 0])  # (N, K)
                seen = torch.stack([seen_x, normalized[..., 1]], dim=2)  # (N, K, 2)
                root_depth = unrefined + self.refinement(seen, relative_depth, unrefined)
            joints = back_project(normalized, relative_depth + root_depth[:, None])
            if self.config.first_keypoint == "palm":  # halfway between the wrist and middle_mcp, where the bone begins
                wrist = 2 * joints[:, :1] - joints[:, HAND.reference_bone[0]][:, None]  # as in the authors' test code
                joints = torch.cat([wrist, joints[:, 1:]], dim=1)
            return PoseOutput(keypoints_px, relative_depth, root_depth, unrefined, joints)
