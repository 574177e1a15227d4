"""The bones of a right hand: rest shape, joint limits, and forward kinematics.

Hand frame: origin at the wrist, x towards the little finger, y towards the fingertips, z out of the back of the hand.
Seen from the back with the fingers up, the thumb of this (right) hand is on the left. Lengths in metres, angles in
radians. Digits are numbered thumb, index, middle, ring, little; each has three segments, the thumb's first being its
metacarpal.
"""

from dataclasses import dataclass
from functools import partial

import numpy as np

from peclr_dali.skeleton import HAND
from peclr_dali.synthetic.jit import Floats

DIGITS = 5
SEGMENTS = 3

# A medium adult hand, a row per digit: centre of the first joint (thumb: carpometacarpal), lengths of the three
# segments, half the thickness at the first, second and third joint and at the tip.
_MEDIUM_M = np.array(
    [
        [-0.0215, 0.0195, -0.0105, 0.0440, 0.0320, 0.0265, 0.0135, 0.0112, 0.0100, 0.0082],
        [-0.0245, 0.0875, -0.0010, 0.0425, 0.0255, 0.0225, 0.0108, 0.0096, 0.0081, 0.0066],
        [-0.0020, 0.0900, 0.0020, 0.0460, 0.0290, 0.0235, 0.0110, 0.0098, 0.0083, 0.0067],
        [0.0175, 0.0845, 0.0000, 0.0425, 0.0275, 0.0235, 0.0105, 0.0092, 0.0078, 0.0063],
        [0.0345, 0.0755, -0.0050, 0.0335, 0.0195, 0.0210, 0.0093, 0.0080, 0.0069, 0.0056],
    ]
)
_ROOTS_M, _SEGMENTS_M, _RADII_M = np.split(_MEDIUM_M, [3, 6], axis=1)

LIMITS_RAD = np.deg2rad(
    [
        # spread, first, second, third joint: lowest and highest
        [[-12, 42], [-22, 38], [-8, 58], [-18, 78]],
        [[-14, 20], [-14, 88], [0, 108], [-4, 72]],
        [[-12, 12], [-12, 90], [0, 108], [-4, 72]],
        [[-12, 16], [-12, 90], [0, 110], [-4, 72]],
        [[-14, 26], [-16, 90], [0, 106], [-4, 74]],
    ]
)
"""Anatomical range of every joint, (5, 4, 2). Spread is positive away from the middle finger; for the thumb it is
palmar abduction (out of the plane of the palm)."""


def _rotation(axis: int, angle_rad: float) -> Floats:
    """Rotation (3, 3) about axis 0, 1 or 2. A positive angle turns y towards z, z towards x, or x towards y."""
    matrix = np.eye(3)
    turned = [(axis + 1) % 3, (axis + 2) % 3]
    c, s = np.cos(angle_rad), np.sin(angle_rad)
    matrix[np.ix_(turned, turned)] = [[c, -s], [s, c]]
    return matrix


rotation_x, rotation_y, rotation_z = (partial(_rotation, axis) for axis in range(3))


def _frame(along: tuple[float, float, float], dorsal: tuple[float, float, float]) -> Floats:
    """Rotation with columns (side, along, dorsal), `dorsal` made orthogonal to `along`."""
    y = np.asarray(along, dtype=np.float64)
    y /= np.linalg.norm(y)
    z = np.asarray(dorsal, dtype=np.float64)
    z -= y * float(z @ y)
    z /= np.linalg.norm(z)
    return np.stack([np.cross(y, z), y, z], axis=1)


# Fingers fan out a little when extended and converge on the ball of the thumb when flexed: hence the roll about y.
_REST_FRAMES = np.stack(
    [
        _frame((-0.66, 0.68, -0.40), (-0.86, -0.18, 0.42)),
        rotation_z(np.deg2rad(3.5)) @ rotation_y(np.deg2rad(-7.0)),
        rotation_z(np.deg2rad(0.5)),
        rotation_z(np.deg2rad(-3.5)) @ rotation_y(np.deg2rad(6.0)),
        rotation_z(np.deg2rad(-8.0)) @ rotation_y(np.deg2rad(13.0)),
    ]
)
_SPREAD_SIGN = np.array([1.0, 1.0, 1.0, -1.0, -1.0])
# Turning in at the saddle joint, radians of roll per radian of abduction: it makes the pad of the thumb face the pads.
_THUMB_PRONATION = 0.75


@dataclass(frozen=True)
class HandShape:
    """One person's hand.

    Attributes:
        roots_m: (5, 3) first joint of each digit in the hand frame.
        segments_m: (5, 3) bone lengths, from the palm outward.
        radii_m: (5, 4) half thickness at the three joints and the tip.
        bulk: thickness of palm and forearm relative to the medium hand.
    """

    roots_m: Floats
    segments_m: Floats
    radii_m: Floats
    bulk: float


@dataclass(frozen=True)
class PosedHand:
    """A posed hand.

    Attributes:
        joints_m: (21, 3) keypoints in the hand frame: the wrist, then each digit from the palm outward.
        frames: (5, 3, 3, 3) orientation of each segment; columns are side, along the bone, dorsal.
    """

    joints_m: Floats
    frames: Floats


def draw_shape(rng: np.random.Generator) -> HandShape:
    """A random adult hand: its size, its ratio of length to breadth, and the length of each bone vary."""
    size = float(np.clip(rng.normal(1.0, 0.065), 0.84, 1.16))
    fingers = float(np.clip(rng.normal(1.0, 0.035), 0.92, 1.08))
    breadth = float(np.clip(rng.normal(1.0, 0.04), 0.9, 1.1))
    girth = float(np.clip(rng.normal(1.0, 0.07), 0.86, 1.18))
    bones = np.clip(rng.normal(1.0, 0.025, (DIGITS, SEGMENTS)), 0.94, 1.06)
    digits = np.clip(rng.normal(1.0, 0.02, (DIGITS, 1)), 0.95, 1.05)
    return HandShape(
        roots_m=_ROOTS_M * size * np.array([breadth, 1.0, girth]),
        segments_m=_SEGMENTS_M * size * fingers * bones * digits,
        radii_m=_RADII_M * size * girth,
        bulk=size * girth,
    )


def pose_hand(shape: HandShape, angles_rad: Floats) -> PosedHand:
    """Forward kinematics of joint angles (5, 4): spread at a digit's first joint, then flexion of its three joints."""
    joints = np.zeros((len(HAND), 3))
    frames = np.empty((DIGITS, SEGMENTS, 3, 3))
    for digit in range(DIGITS):
        spread, *flexion = (float(angle) for angle in angles_rad[digit])
        frame = _REST_FRAMES[digit] @ rotation_z(_SPREAD_SIGN[digit] * spread)
        point = shape.roots_m[digit]
        joints[1 + 4 * digit] = point
        for segment in range(SEGMENTS):
            frame = frame @ rotation_x(-flexion[segment])
            if digit == 0 and segment == 0:
                frame = frame @ rotation_y(_THUMB_PRONATION * spread)
            frames[digit, segment] = frame
            point = point + shape.segments_m[digit, segment] * frame[:, 1]
            joints[2 + 4 * digit + segment] = point
    return PosedHand(joints, frames)
