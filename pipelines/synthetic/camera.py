"""The camera: frame x right, y down, z forward; pixels corner-based (the centre of the first pixel is 0.5, 0.5)."""

from dataclasses import dataclass

import numpy as np

from pipelines.synthetic.jit import Floats
from pipelines.synthetic.skeleton import rotation_x, rotation_y, rotation_z

SIDE_PX = 224
_BOX_PX = (92.0, 148.0)
_FOCAL_PX = (400.0, 600.0)
_NEAREST_M = 0.25
# From the hand frame to a camera that sees the back of an upright hand.
_FACING = np.diag([1.0, -1.0, -1.0])


@dataclass(frozen=True)
class View:
    """Where the hand is for the camera.

    Attributes:
        intrinsics: (3, 3) K, pixels.
        rotation: (3, 3) hand frame to camera frame.
        translation_m: (3,) the wrist in the camera frame.
    """

    intrinsics: Floats
    rotation: Floats
    translation_m: Floats


def project(points_m: Floats, intrinsics: Floats) -> Floats:
    """Image points (N, 2) in corner-based pixels of camera-frame points (N, 3)."""
    image = points_m @ intrinsics.T
    return np.asarray(image[:, :2] / image[:, 2:])


def draw_view(rng: np.random.Generator, joints_m: Floats) -> View:
    """A camera that sees the joints (21, 3) roughly centred, over about half of the picture.

    The hand turns freely about its long axis (back, palm, both edges); that axis points out of the picture plane by up
    to about 60 degrees and mostly, not always, upwards in the picture.
    """
    turn = float(rng.uniform(-np.pi, np.pi))
    tilt = float(np.clip(rng.normal(0.0, 0.5), -1.05, 1.05))
    lean = float(rng.normal(0.0, 0.9))
    rotation = rotation_z(lean) @ rotation_x(tilt) @ _FACING @ rotation_y(turn)
    focal = float(rng.uniform(*_FOCAL_PX))
    intrinsics = np.array(
        [
            [focal * float(rng.uniform(0.997, 1.003)), 0.0, SIDE_PX / 2],
            [0.0, focal, SIDE_PX / 2],
            [0.0, 0.0, 1.0],
        ]
    )
    wanted_px = float(rng.uniform(*_BOX_PX))
    centre_px = SIDE_PX / 2 + np.clip(rng.normal(0.0, 6.0, 2), -16.0, 16.0)
    turned = joints_m @ rotation.T
    translation = np.array([0.0, 0.0, 0.7])
    # Perspective makes size and place depend on each other: a few rounds settle both to a fraction of a pixel.
    for _ in range(6):
        image = project(turned + translation, intrinsics)
        low, high = image.min(axis=0), image.max(axis=0)
        middle_z = float(turned[:, 2].mean()) + translation[2]
        middle_z = max(middle_z * float((high - low).max()) / wanted_px, _NEAREST_M)
        translation[2] = middle_z - float(turned[:, 2].mean())
        translation[:2] += (centre_px - (low + high) / 2) * middle_z / focal
    return View(intrinsics, rotation, translation)
