"""One pose of the dataset, a pure function of (seed, number).

The camera's frame is x right, y down, z forward; pixels are corner-based (the centre of the first one is 0.5, 0.5).
"""

from typing import NamedTuple

import numpy as np

from peclr_dali.synthetic.field import ARM, BALL, BOX, CYLINDER, Solids, arm_rotation, build_hand, distance_to_skin
from peclr_dali.synthetic.poses import Floats, HandShape, draw_pose, draw_shape, rotation_x, rotation_y, rotation_z
from peclr_dali.synthetic.surface import Paint, draw_paint

SIDE_PX = 224


def project(points_m: Floats, intrinsics: Floats) -> Floats:
    """Image points (N, 2) in corner-based pixels of camera-frame points (N, 3)."""
    image = points_m @ intrinsics.T
    return np.asarray(image[:, :2] / image[:, 2:])


class Variety(NamedTuple):
    """What is drawn: the ranges of hands and cameras.

    Attributes:
        tilt: standard deviation and limit of the angle between the hand's long axis and the picture plane, radians.
        lean: standard deviation of the axis' direction in the picture, from upwards, radians.
        wanted_px: longer side of the box around the keypoints.
        nearest_m: least distance from the camera to the middle of the hand.
        sleeves, holding: shares of the hands.
    """

    tilt: tuple[float, float] = 0.5, 1.05
    lean: float = 0.9
    focal_px: tuple[float, float] = 400.0, 600.0
    wanted_px: tuple[float, float] = 92.0, 148.0
    nearest_m: float = 0.25
    sleeves: float = 0.4
    holding: float = 0.15


STUDIO = Variety()
VARIED = Variety((0.8, 1.4), 2.0, (160.0, 600.0), (56.0, 200.0), nearest_m=0.2, sleeves=0.6, holding=0.35)


def draw_camera(rng: np.random.Generator, joints_m: Floats, variety: Variety) -> tuple[Floats, Floats, Floats]:
    """A camera that sees the joints (21, 3) roughly centred; in the studio over about half of the picture.

    Returns its intrinsics (3, 3) in pixels, and the hand's rotation (3, 3) and wrist (3,) in metres in its frame.

    The hand turns freely about its long axis: it shows its back, its palm or an edge. In the studio, this axis leaves
    the picture plane by up to about 60 degrees, and in the picture it mostly points upwards.
    """
    turn = float(rng.uniform(-np.pi, np.pi))
    spread, limit = variety.tilt
    tilt = float(np.clip(rng.normal(0.0, spread), -limit, limit))
    lean = float(rng.normal(0.0, variety.lean))
    focal = float(rng.uniform(*variety.focal_px))
    focal_x = focal * float(rng.uniform(0.997, 1.003))
    wanted_px = float(rng.uniform(*variety.wanted_px))
    centre_px = SIDE_PX / 2 + np.clip(rng.normal(0.0, 6.0, 2), -16.0, 16.0)
    # In the middle: from the hand frame to a camera that sees the back of an upright hand.
    rotation = rotation_z(lean) @ rotation_x(tilt) @ np.diag([1.0, -1.0, -1.0]) @ rotation_y(turn)
    intrinsics = np.array([[focal_x, 0.0, SIDE_PX / 2], [0.0, focal, SIDE_PX / 2], [0.0, 0.0, 1.0]])
    turned = joints_m @ rotation.T
    translation = np.array([0.0, 0.0, 0.7])
    # Size and position depend on each other by perspective; a few rounds converge to a fraction of a pixel.
    for _ in range(6):
        image = project(turned + translation, intrinsics)
        low, high = image.min(axis=0), image.max(axis=0)
        middle_z = float(turned[:, 2].mean()) + translation[2]
        middle_z = max(middle_z * float((high - low).max()) / wanted_px, variety.nearest_m)
        translation[2] = middle_z - float(turned[:, 2].mean())
        translation[:2] += (centre_px - (low + high) / 2) * middle_z / focal
    return intrinsics, rotation, translation


def draw_sleeve(rng: np.random.Generator, parts: Floats, share: float) -> Floats:
    """A sleeve around the forearm (see Solids.sleeve), or none."""
    worn, cuff_m, slack_m = rng.random() < share, float(rng.uniform(0.015, 0.12)), float(rng.uniform(0.003, 0.010))
    if not worn:
        return np.zeros(8)
    start = parts[ARM : ARM + 2, 0:3].mean(axis=0)
    axis = parts[ARM : ARM + 2, 3:6].mean(axis=0)
    axis /= np.linalg.norm(axis)
    # The radius: half the distance of the two bones plus their flesh, where the cuff ends.
    return np.array([*(start + cuff_m * axis), *axis, float(parts[ARM, 6] + 0.016 + slack_m + 0.02 * cuff_m), 1.0])


def draw_prop(rng: np.random.Generator, bare: Solids, rotation: Floats, wrist_m: Floats) -> Floats:
    """A ball, cylinder or box in a bare hand (see Solids.prop), or none if the fingers leave no room."""
    kind = int(rng.choice([BALL, CYLINDER, BOX]))
    tilt = rotation_z(float(rng.normal(0.25, 0.12))) @ rotation_y(float(rng.normal(0.0, 0.1)))
    axes = rotation @ tilt @ rotation_x(float(rng.uniform(0, np.pi)))
    reach = float(rng.uniform(0.07, 0.12)), float(rng.uniform(0.07, 0.12))
    square = float(rng.uniform(0.5, 0.86))

    def room(depth_m: float, y_m: float) -> tuple[float, Floats]:
        centre = rotation @ np.array([0.003, y_m, -depth_m]) + wrist_m
        stations = (0.0,) if kind == BALL else (-0.030, -0.015, 0.0, 0.015, 0.030)
        return min(distance_to_skin(bare, centre + station * axes[:, 0]) for station in stations), centre

    # The largest object that touches palm and fingers: climb out of the palm until the room stops growing.
    places = [room(depth, y) for y in (0.062, 0.074, 0.086, 0.098) for depth in np.arange(0.018, 0.066, 0.004)]
    radius, centre = max(places, key=lambda place: place[0])
    if radius < 0.010:
        return np.zeros(16)
    radius = min(radius, 0.045)
    half = {
        BALL: (radius, radius, radius),
        CYLINDER: (reach[0], radius, radius),
        BOX: (reach[1], radius * square, radius * float(np.sqrt(1 - square**2))),  # the diagonal is what fits
    }
    return np.array([kind, *centre, *half[kind], *axes.T.reshape(9)])


class Hand(NamedTuple):
    """A drawn hand before its camera.

    Attributes:
        intrinsics: (3, 3) K of the camera, pixels.
        xyz_m: (21, 3) keypoints in the camera's frame.
    """

    shape: HandShape
    intrinsics: Floats
    xyz_m: Floats
    solids: Solids
    paint: Paint


def draw_hand(rng: np.random.Generator, variety: Variety = STUDIO) -> Hand:
    """Draw person, pose, camera, clothing and held object."""
    shape = draw_shape(rng)
    holding = bool(rng.random() < variety.holding)
    skeleton = draw_pose(rng, shape, grasp=holding)
    intrinsics, rotation, wrist_m = draw_camera(rng, skeleton.joints_m, variety)
    solids = build_hand(shape, skeleton, rotation, wrist_m, _draw_wrist(rng, rotation))
    solids = solids._replace(sleeve=draw_sleeve(rng, solids.parts, variety.sleeves))
    if holding:
        solids = solids._replace(prop=draw_prop(rng, solids, rotation, wrist_m))
    return Hand(shape, intrinsics, skeleton.joints_m @ rotation.T + wrist_m, solids, draw_paint(rng))


def _draw_wrist(rng: np.random.Generator, rotation: Floats) -> tuple[float, float]:
    """Flexion and sideways bend of the wrist, radians.

    Where the forearm would point at the camera or away from it, the wrist bends the other way: the picture would
    otherwise show little but an elbow, or the end of the modelled arm.
    """
    flexion = float(np.clip(rng.normal(0.05, 0.25), -0.8, 0.8))
    deviation = float(np.clip(rng.normal(0.0, 0.12), -0.35, 0.3))

    def steepness(bend: float) -> float:
        return abs(float((rotation @ arm_rotation(bend, deviation))[2, 1]))

    if steepness(flexion) > 0.8:
        flexion = min((flexion, -flexion), key=steepness)
    return flexion, deviation
