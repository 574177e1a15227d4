"""The bones of a right hand, their kinematics, and its poses: blends of gestures and grasps with random deviations.

Hand frame: origin at the wrist, x towards the little finger, y towards the fingertips, z out of the back of the hand.
Seen from the back with the fingers up, the thumb of this (right) hand is on the left. Lengths in metres, angles in
radians. Digits are numbered thumb, index, middle, ring, little; each has three segments, the thumb's first being its
metacarpal.
"""

from dataclasses import dataclass
from functools import partial

import numba
import numpy as np
from numpy.typing import NDArray

from peclr_dali.numba_cache import cached
from peclr_dali.skeleton import HAND

Floats = NDArray[np.float64]
"""Array of doubles; shapes and units stand in each docstring."""

Pixels = NDArray[np.float32]
"""Array of single-precision values per pixel or per sample."""

kernel = cached(numba.njit, nogil=True, fastmath=True, error_model="numpy")
"""Compiles a function to machine code on its first call. The result is kept on disk, for all worker processes."""

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
    y = np.array(along) / np.linalg.norm(along)
    z = np.array(dorsal) - y * float(y @ dorsal)
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
                frame = frame @ rotation_y(0.75 * spread)  # the saddle joint turns the thumb's pad to the others
            frames[digit, segment] = frame
            point = point + shape.segments_m[digit, segment] * frame[:, 1]
            joints[2 + 4 * digit + segment] = point
    return PosedHand(joints, frames)


_OPEN = (2, 4, 5, 3)
_LOOSE = (1, 22, 30, 16)
_CURLED = (0, 78, 98, 58)
_HALF = (1, 48, 55, 32)

# Degrees: spread, first, second, third joint; thumb, index, middle, ring, little.
_GESTURES_RAD = np.deg2rad(
    [
        [(8, -6, 2, 2), _OPEN, _OPEN, _OPEN, _OPEN],  # flat
        [(14, -18, -4, -6), (13, 0, 4, 2), (1, 0, 4, 2), (9, 0, 4, 2), (19, 0, 4, 2)],  # spread
        [(14, 4, 12, 12), (2, 18, 24, 12), (0, 24, 30, 16), (1, 28, 34, 18), (4, 30, 34, 18)],  # at rest
        [(14, 4, 12, 12), _LOOSE, _LOOSE, _LOOSE, (5, 24, 28, 16)],  # at rest, even
        [(26, 26, 34, 42), _CURLED, _CURLED, _CURLED, _CURLED],  # fist
        [(26, 26, 34, 40), (2, 4, 6, 4), _CURLED, _CURLED, _CURLED],  # pointing
        [(26, 26, 36, 44), (9, 2, 6, 4), (6, 2, 6, 4), _CURLED, _CURLED],  # victory
        [(-4, -20, -4, -14), _CURLED, _CURLED, _CURLED, _CURLED],  # thumb up
        [(34, 14, 16, 28), (2, 44, 48, 22), (3, 12, 14, 8), (4, 6, 10, 5), (10, 3, 8, 4)],  # ring of thumb and index
        [(34, 14, 16, 26), (0, 52, 42, 18), (0, 54, 46, 22), (0, 60, 55, 30), (2, 62, 55, 30)],  # pinch
        [(36, 16, 14, 18), (0, 48, 40, 24), (0, 50, 44, 26), (2, 60, 62, 36), (4, 64, 66, 40)],  # pen
        [(36, 2, 8, 12), (2, 34, 42, 24), (0, 38, 46, 26), (2, 40, 48, 26), (5, 42, 46, 26)],  # cylinder
        [(38, -4, 6, 14), (10, 24, 36, 24), (2, 26, 38, 26), (8, 28, 38, 26), (17, 28, 36, 24)],  # ball
        [(8, 2, 10, 8), (1, 8, 78, 48), (0, 8, 82, 50), (1, 8, 82, 50), (2, 10, 78, 46)],  # hook
        [(12, -14, 4, 4), (10, -8, 44, 34), (2, -8, 46, 34), (8, -8, 46, 34), (16, -8, 44, 34)],  # claw
        [(10, 0, 6, 4), (0, 68, 6, 4), (0, 70, 6, 4), (0, 70, 6, 4), (0, 68, 6, 4)],  # table top
        [(26, 22, 34, 40), (6, 0, 4, 2), _CURLED, _CURLED, (14, 0, 6, 4)],  # horns
        [(8, -20, -2, -6), _CURLED, _CURLED, _CURLED, (18, 0, 6, 4)],  # telephone
        [(28, 24, 28, 34), (8, 2, 6, 4), (1, 2, 6, 4), (7, 4, 8, 4), _CURLED],  # three
        [(34, 20, 24, 28), (8, 2, 6, 4), (1, 2, 6, 4), (6, 2, 6, 4), (14, 2, 8, 4)],  # four
        [(2, -20, -2, -4), (4, 4, 6, 4), _CURLED, _CURLED, _CURLED],  # pistol
        [(4, 12, 12, 18), (0, 48, 62, 30), (0, 56, 70, 36), (0, 60, 74, 38), (2, 62, 72, 38)],  # key
        [(20, 4, 16, 14), _HALF, _HALF, _HALF, _HALF],  # half closed
    ]
)
MAX_OVERLAP_M = 0.0025
"""Largest depth in metres by which touching segments may overlap, as flesh is soft."""
_TRIES = 24


def within_limits(angles_rad: Floats) -> Floats:
    """Joint angles (5, 4) clipped to LIMITS_RAD; fingers cannot spread when bent at the knuckle."""
    angles = np.clip(angles_rad, LIMITS_RAD[..., 0], LIMITS_RAD[..., 1])
    spread, flexion = angles[1:, 0], angles[1:, 1]
    spread *= 1.0 - 0.85 * np.clip(flexion / np.deg2rad(80.0), 0.0, 1.0)
    return np.asarray(angles)


def draw_pose(rng: np.random.Generator, shape: HandShape, *, grasp: bool) -> PosedHand:
    """Bones without interpenetrating digits. With `grasp` the pose can hold an object."""
    pool = (11, 12, 22) if grasp else range(len(_GESTURES_RAD))  # cylinder, ball, half closed
    first, second = (_GESTURES_RAD[int(rng.choice(pool))] for _ in range(2))
    weight = float(rng.beta(0.55, 0.55))
    aim = weight * first + (1.0 - weight) * second
    least = np.inf
    for attempt in range(_TRIES):
        # Each attempt brings the hand nearer to rest: fingers may cross in a blend although in neither gesture.
        ease = 0.9 * max(0, attempt - 2) / (_TRIES - 3)
        skeleton = pose_hand(shape, within_limits((1.0 - ease) * (aim + _loosening(rng)) + ease * _GESTURES_RAD[2]))
        overlap = deepest_overlap(skeleton.joints_m, shape.radii_m)
        if overlap < least:
            least, best = overlap, skeleton
        if overlap <= MAX_OVERLAP_M:
            break
    return best


def _loosening(rng: np.random.Generator) -> Floats:
    """Deviation from a gesture, radians (5, 4): neighbouring fingers move together, the last two joints too."""
    curl = rng.normal(0.0, 7.0) + np.convolve(rng.normal(0.0, 9.0, DIGITS + 2), [0.35, 0.6, 0.35], mode="valid")
    delta = curl[:, None] * [0.0, 0.8, 1.0, 0.6] + rng.normal(0.0, 1.0, (DIGITS, 4)) * [2.5, 5.0, 5.0, 3.0]
    # The thumb's saddle joint has a quarter of a finger joint's range.
    delta[0, :2] = rng.normal(0.0, 5.0, 2)
    return np.deg2rad(delta)


# Pairs of segments that may meet, numbered digit by digit; behind the digits' 15 lie the four metacarpals of the palm.
# A finger's first segment lies in the webbing, the thumb's metacarpal in the palm: the first of a pair moves freely.
_FIRST, _SECOND = np.array(
    [
        (3 * digit + segment, second)
        for digit in range(DIGITS)
        for segment in (1, 2)
        for second in range(1, 3 * DIGITS + 4)
        if second >= 3 * digit + 3 or (second % 3 == 0 and second != 3 * digit)
    ]
).T


def deepest_overlap(joints_m: Floats, radii_m: Floats) -> float:
    """Largest depth in metres by which a digit's segment reaches into another digit or the palm; negative: a gap.

    Takes the keypoints (21, 3) in any rigid frame, and half the thickness (5, 4) at the joints.
    """
    wrist, points = joints_m[0], joints_m[1:].reshape(DIGITS, 4, 3)
    knuckles, palm_m = points[1:, 0], 1.1 * radii_m[1:, 0]
    # The palm: metacarpals from a quarter of the way to the knuckle.
    start = np.concatenate([points[:, :3].reshape(-1, 3), wrist + 0.3 * (knuckles - wrist)])
    bone = np.concatenate([points[:, 1:].reshape(-1, 3), knuckles]) - start
    start_m = np.concatenate([radii_m[:, :3].ravel(), palm_m])
    end_m = np.concatenate([radii_m[:, 1:].ravel(), palm_m])
    # Where along each segment (0 to 1) the pair is nearest.
    u, v, w = bone[_FIRST], bone[_SECOND], start[_FIRST] - start[_SECOND]
    a, b, c, d, e = ((x * y).sum(axis=1) for x, y in ((u, u), (u, v), (v, v), (u, w), (v, w)))
    crossing = a * c - b * b > 1e-12
    along = np.where(crossing, np.clip((b * e - c * d) / np.where(crossing, a * c - b * b, 1), 0, 1), 0.5)
    beside = np.clip((b * along + e) / c, 0, 1)
    along = np.clip((b * beside - d) / a, 0, 1)
    gap = np.linalg.norm(w + along[:, None] * u - beside[:, None] * v, axis=1)
    room = start_m[_FIRST] * (1 - along) + end_m[_FIRST] * along
    room += start_m[_SECOND] * (1 - beside) + end_m[_SECOND] * beside
    return float((room - gap).max())
