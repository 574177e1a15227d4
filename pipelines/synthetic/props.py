"""What hands wear and hold: sleeves, and objects fitted to the room that the fingers leave."""

import numpy as np

from pipelines.synthetic.field import ARM, BALL, BOX, CYLINDER, Solids, distance_to_skin
from pipelines.synthetic.jit import Floats
from pipelines.synthetic.skeleton import rotation_x, rotation_y, rotation_z

_SMALLEST_M = 0.010
_LARGEST_M = 0.045
_SLEEVES = 0.4


def draw_sleeve(rng: np.random.Generator, parts: Floats) -> Floats:
    """A sleeve around the forearm (see Solids.sleeve), or none."""
    sleeve = np.zeros(8)
    worn, cuff_m, slack_m = rng.random() < _SLEEVES, float(rng.uniform(0.015, 0.12)), float(rng.uniform(0.003, 0.010))
    if worn:
        start = parts[ARM : ARM + 2, 0:3].mean(axis=0)
        axis = parts[ARM : ARM + 2, 3:6].mean(axis=0)
        axis /= np.linalg.norm(axis)
        # Half the distance of the two bones plus their flesh, where the cuff ends.
        radius = float(parts[ARM, 6] + 0.016 + slack_m + 0.02 * cuff_m)
        sleeve[:] = *(start + cuff_m * axis), *axis, radius, 1.0
    return sleeve


def draw_prop(rng: np.random.Generator, bare: Solids, rotation: Floats, wrist_m: Floats) -> Floats:
    """A ball, cylinder or box in the hand (see Solids.prop), or none where the fingers leave no room.

    Args:
        rng: source of the draw.
        bare: the hand without an object.
        rotation: (3, 3) hand frame to camera frame.
        wrist_m: (3,) the wrist in the camera frame.
    """
    prop = np.zeros(16)
    kind = int(rng.choice([BALL, CYLINDER, BOX]))
    tilt = rotation_z(float(rng.normal(0.25, 0.12))) @ rotation_y(float(rng.normal(0.0, 0.1)))
    axes = rotation @ tilt @ rotation_x(float(rng.uniform(0, np.pi)))
    reach = float(rng.uniform(0.07, 0.12)), float(rng.uniform(0.07, 0.12))
    square = float(rng.uniform(0.5, 0.86))

    def room(depth_m: float, y_m: float) -> tuple[float, Floats]:
        centre = rotation @ np.array([0.003, y_m, -depth_m]) + wrist_m
        stations = (0.0,) if kind == BALL else (-0.030, -0.015, 0.0, 0.015, 0.030)
        points = [centre + station * axes[:, 0] for station in stations]
        return min(distance_to_skin(bare, point) for point in points), centre

    # The largest object that touches palm and fingers: climb out of the palm until the room stops growing.
    places = [room(depth, y) for y in (0.062, 0.074, 0.086, 0.098) for depth in np.arange(0.018, 0.066, 0.004)]
    radius, centre = max(places, key=lambda place: place[0])
    if radius < _SMALLEST_M:
        return prop
    radius = min(radius, _LARGEST_M)
    if kind == BALL:
        half = (radius, radius, radius)
    elif kind == CYLINDER:
        half = (reach[0], radius, radius)
    else:
        # The cross-section's diagonal is what fits.
        half = (reach[1], radius * square, radius * float(np.sqrt(1 - square**2)))
    prop[:] = kind, *centre, *half, *axes.T.reshape(9)
    return prop
