"""One pose of the dataset: everything about it is a pure function of (seed, pose)."""

from dataclasses import dataclass, replace

import numpy as np

from pipelines.synthetic.camera import SIDE_PX, View, draw_view
from pipelines.synthetic.field import Solids, arm_rotation, build_hand
from pipelines.synthetic.jit import Floats
from pipelines.synthetic.poses import draw_pose
from pipelines.synthetic.props import draw_prop, draw_sleeve
from pipelines.synthetic.render import Rendering, render
from pipelines.synthetic.skeleton import HandShape, draw_shape
from pipelines.synthetic.surface import Paint, draw_paint

_HOLDING = 0.15
_STEEPEST_ARM = 0.8


@dataclass(frozen=True)
class Hand:
    """A drawn hand before its camera.

    Attributes:
        shape: its bones.
        angles_rad: (5, 4) joint angles.
        view: the camera.
        xyz_m: (21, 3) keypoints in the camera frame.
        solids: what is rendered.
        paint: colours.
    """

    shape: HandShape
    angles_rad: Floats
    view: View
    xyz_m: Floats
    solids: Solids
    paint: Paint

    @property
    def scale_m(self) -> float:
        """Length of the middle finger's first phalanx, between keypoints 9 and 10."""
        return float(np.linalg.norm(self.xyz_m[10] - self.xyz_m[9]))


def draw_hand(rng: np.random.Generator) -> Hand:
    """Draw person, pose, camera, clothing and held object."""
    shape = draw_shape(rng)
    holding = bool(rng.random() < _HOLDING)
    angles, skeleton = draw_pose(rng, shape, grasp=holding)
    view = draw_view(rng, skeleton.joints_m)
    wrist = _draw_wrist(rng, view.rotation)
    parts, frames, bounds = build_hand(shape, skeleton, view.rotation, view.translation_m, wrist)
    sleeve = draw_sleeve(rng, parts)
    solids = Solids(parts, frames, bounds, sleeve, np.zeros(16))
    if holding:
        solids = replace(solids, prop=draw_prop(rng, solids, view.rotation, view.translation_m))
    return Hand(
        shape=shape,
        angles_rad=angles,
        view=view,
        xyz_m=skeleton.joints_m @ view.rotation.T + view.translation_m,
        solids=solids,
        paint=draw_paint(rng),
    )


def _draw_wrist(rng: np.random.Generator, rotation: Floats) -> tuple[float, float]:
    """Flexion and sideways bend of the wrist, radians.

    Where the forearm would point at the camera or away from it, the wrist bends the other way: the picture would
    otherwise show little but an elbow, or the end of the modelled arm.
    """
    flexion = float(np.clip(rng.normal(0.05, 0.25), -0.8, 0.8))
    deviation = float(np.clip(rng.normal(0.0, 0.12), -0.35, 0.3))

    def steepness(bend: float) -> float:
        return abs(float((rotation @ arm_rotation((bend, deviation)))[2, 1]))

    if steepness(flexion) > _STEEPEST_ARM:
        flexion = min((flexion, -flexion), key=steepness)
    return flexion, deviation


def render_hand(hand: Hand) -> Rendering:
    """Surface samples of the hand at the dataset's size."""
    return render(hand.solids, hand.paint, hand.shape.bulk, hand.view.intrinsics, SIDE_PX)
