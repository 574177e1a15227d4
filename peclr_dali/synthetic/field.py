"""The hand as a signed-distance field: tapered capsules along the bones, smoothly joined where flesh is continuous.

A digit is joined to the palm only at its first segment, and digits are not joined to each other. So there is a dark
line between two fingers side by side, or between a fingertip and the palm, as in reality.
"""

import math
from typing import NamedTuple

import numpy as np

from peclr_dali.synthetic.poses import DIGITS, Floats, HandShape, PosedHand, kernel, rotation_x, rotation_z

ARM = 10
DIGIT = 12
PARTS = DIGIT + 3 * DIGITS
"""Order of the parts: 4 metacarpals, 2 muscles, 4 webs; 2 of the forearm; then 3 per digit, thumb first."""

NO_PROP, BALL, CYLINDER, BOX = range(4)
_FAR_M = 10.0


class Solids(NamedTuple):
    """Shapes of hand, sleeve and held object in the camera frame, metres.

    Attributes:
        parts: (27, 10) per part: start, vector to its end, radius at the start, how much the radius grows to the end,
            width of the blend into the palm, inverse square of the length (1/m^2).
        frames: (27, 9) per part: side, along and dorsal axis.
        bounds: (6, 10) a box around the palm (centre and half sizes along the axes of frames[0]), then a capsule around
            each digit in the form of `parts`.
        sleeve: (8,) cuff centre, unit axis towards the elbow, radius, 1 if worn else 0.
        prop: (16,) kind, centre, half sizes, axes as a row-major rotation.
    """

    parts: Floats
    frames: Floats
    bounds: Floats
    sleeve: Floats
    prop: Floats


def arm_rotation(flexion: float, deviation: float) -> Floats:
    """Orientation (3, 3) of the forearm in the hand frame, from flexion and sideways bend, radians.

    The forearm runs along its -y axis.
    """
    return rotation_z(deviation) @ rotation_x(flexion)


def build_hand(
    shape: HandShape, skeleton: PosedHand, rotation: Floats, translation_m: Floats, wrist_rad: tuple[float, float]
) -> Solids:
    """A bare hand in the camera frame.

    The hand frame is rotated by `rotation` (3, 3) into the camera frame, where the wrist is at `translation_m` (3,).
    `wrist_rad` are its flexion and sideways bend.
    """
    parts = np.zeros((PARTS, 9))
    axes = np.tile(np.eye(3), (PARTS, 1, 1))
    joints, frames, bulk = skeleton.joints_m, skeleton.frames, shape.bulk

    def put(part: int, start: Floats, end: Floats, start_m: float, end_m: float, blend_m: float) -> None:
        parts[part] = *start, *end, start_m, end_m, blend_m

    def at(x: float, y: float, z: float) -> Floats:
        return np.array([x, y, z]) * bulk

    for finger, wrist_x in enumerate((-0.0125, -0.0045, 0.0055, 0.0130)):
        knuckle = joints[5 + 4 * finger] + np.array([0.0, -0.001, -0.0015])
        put(finger, at(wrist_x, 0.008, 0.0), knuckle, 0.0155 * bulk, shape.radii_m[1 + finger, 0] * 1.03, 0.012)
    thumb_root, thumb_bone = joints[1], joints[2] - joints[1]
    # Ball of the thumb: the muscle lies on the palmar side of its metacarpal and runs to the middle of the palm.
    muscle_end = thumb_root + 0.66 * thumb_bone + 0.0045 * bulk * -frames[0, 0][:, 2]
    put(4, at(-0.008, 0.022, -0.0115), muscle_end, 0.0150 * bulk, 0.0125 * bulk, 0.012)
    put(5, at(0.0165, 0.015, -0.008), joints[17] + at(0.0015, -0.016, -0.006), 0.0150 * bulk, 0.0118 * bulk, 0.012)
    # The fold of skin between thumb and index finger.
    fold_end = joints[5] * np.array([1.0, 0.70, 1.0]) + at(0.003, 0.0, -0.003)
    put(6, thumb_root + 0.62 * thumb_bone, fold_end, 0.0080 * bulk, 0.0085 * bulk, 0.020)
    for web in range(3):
        left, right = (
            joints[5 + 4 * finger]
            + frames[1 + finger, 0] @ np.array([0.0, 0.30 * shape.segments_m[1 + finger, 0], 0.0])
            for finger in (web, web + 1)
        )
        lower = at(0.0, 0.0, -0.0020)
        # Only the middle of the span: a web thins out towards the fingers that it joins.
        start, end = left * 0.7 + right * 0.3 + lower, left * 0.3 + right * 0.7 + lower
        put(7 + web, start, end, 0.0062 * bulk, 0.0062 * bulk, 0.010)

    arm = arm_rotation(*wrist_rad)
    for bone, side in enumerate((-1.0, 1.0)):
        start, end = at(side * 0.0105, -0.004, -0.001), np.array([side * 0.021 * bulk, -0.36, -0.002])
        put(ARM + bone, arm @ start, arm @ end, 0.0182 * bulk, 0.0310 * bulk, 0.016)
    axes[ARM : ARM + 2] = arm

    for digit in range(DIGITS):
        radii = shape.radii_m[digit]
        for segment in range(3):
            part = DIGIT + 3 * digit + segment
            start, end = joints[1 + 4 * digit + segment].copy(), joints[2 + 4 * digit + segment].copy()
            end_m = float(radii[segment + 1])
            frame = frames[digit, segment]
            if segment == 2:
                # The keypoint is the fingertip: the last ball ends just beyond it, a little to the side of the pad.
                end -= frame[:, 1] * (end_m - 0.0015) + frame[:, 2] * 0.0008
            blend = 0.012 if digit == 0 else 0.008
            # Shafts are slimmer than joints; the joint of the next segment restores the knuckle.
            put(part, start, end, float(radii[segment]) * (1.0 if segment == 0 else 0.985), end_m * 0.97, blend)
            axes[part] = frame

    parts[:, 0:3] = parts[:, 0:3] @ rotation.T + translation_m
    parts[:, 3:6] = parts[:, 3:6] @ rotation.T + translation_m
    bounds = np.concatenate([_palm_box(parts, rotation), _prepared(_digit_bounds(parts))])
    # Axes become rows: side, along, dorsal.
    rows = np.ascontiguousarray((rotation @ axes).transpose(0, 2, 1)).reshape(PARTS, 9)
    return Solids(_prepared(parts), rows, bounds, sleeve=np.zeros(8), prop=np.zeros(16))


def _prepared(capsules: Floats) -> Floats:
    """Convert (start, end, two radii, blend) to rows for `part_distance`."""
    start, end, radii, blend = np.split(capsules, [3, 6, 8], axis=1)
    inverse_square = 1.0 / np.square(end - start).sum(axis=1, keepdims=True)
    return np.hstack([start, end - start, radii[:, :1], np.diff(radii, axis=1), blend, inverse_square])


def _digit_bounds(parts: Floats) -> Floats:
    """Capsules around the digits, (5, 9), including the flesh that smooth joining adds."""
    bounds = np.zeros((DIGITS, 9))
    for digit in range(DIGITS):
        begin, stop = DIGIT + 3 * digit, DIGIT + 3 * digit + 3
        start, end = parts[begin, 0:3], parts[stop - 1, 3:6]
        points = np.concatenate([parts[begin:stop, 0:3], parts[begin:stop, 3:6]])
        radii = np.concatenate([parts[begin:stop, 6], parts[begin:stop, 7]])
        axis = end - start
        along = np.clip((points - start) @ axis / (axis @ axis), 0.0, 1.0)
        radius = float((np.linalg.norm(points - start - along[:, None] * axis, axis=1) + radii).max()) + 0.004
        bounds[digit] = *start, *end, radius, radius, 0.0
    return bounds


def _palm_box(parts: Floats, rotation: Floats) -> Floats:
    """First row of Solids.bounds, (1, 10)."""
    palm = parts[:ARM]
    ends = np.concatenate([palm[:, 0:3], palm[:, 3:6]]) @ rotation
    radii = np.concatenate([palm[:, 6], palm[:, 7]])[:, None] + 0.004
    low, high = (ends - radii).min(axis=0), (ends + radii).max(axis=0)
    return np.array([[*(rotation @ (low + high) / 2), *((high - low) / 2), 0.0, 0.0, 0.0, 0.0]])


@kernel
def part_distance(x: float, y: float, z: float, parts: Floats, row: int) -> float:
    """Signed distance of a point to one tapered capsule, a row of Solids.parts, metres."""
    px, py, pz = x - parts[row, 0], y - parts[row, 1], z - parts[row, 2]
    bx, by, bz = parts[row, 3], parts[row, 4], parts[row, 5]
    along = min(max((px * bx + py * by + pz * bz) * parts[row, 9], 0.0), 1.0)
    px, py, pz = px - along * bx, py - along * by, pz - along * bz
    return float(math.sqrt(px * px + py * py + pz * pz) - parts[row, 6] - along * parts[row, 7])


@kernel
def _join(a: float, b: float, width: float) -> float:
    """Smooth minimum: fillets the edge between two surfaces over `width` metres."""
    h = max(width - abs(a - b), 0.0)
    return min(a, b) - h * h * 0.25 / width


@kernel
def _palm_box_distance(x: float, y: float, z: float, frames: Floats, bounds: Floats) -> float:
    px, py, pz = x - bounds[0, 0], y - bounds[0, 1], z - bounds[0, 2]
    u = max(abs(px * frames[0, 0] + py * frames[0, 1] + pz * frames[0, 2]) - bounds[0, 3], 0.0)
    v = max(abs(px * frames[0, 3] + py * frames[0, 4] + pz * frames[0, 5]) - bounds[0, 4], 0.0)
    w = max(abs(px * frames[0, 6] + py * frames[0, 7] + pz * frames[0, 8]) - bounds[0, 5], 0.0)
    return math.sqrt(u * u + v * v + w * w)


@kernel
def hand_distance(x: float, y: float, z: float, solids: Solids) -> float:
    """Signed distance of a point to the skin, metres; far away, a lower bound of it."""
    parts, frames, bounds = solids.parts, solids.frames, solids.bounds
    skip = 0.018
    arm = _join(part_distance(x, y, z, parts, 10), part_distance(x, y, z, parts, 11), 0.022)
    palm = _palm_box_distance(x, y, z, frames, bounds)
    if palm < skip:
        # Joined in pairs, with constant widths: in one long chain, each step would depend on the one before it.
        inner = _join(part_distance(x, y, z, parts, 0), part_distance(x, y, z, parts, 1), 0.012)
        outer = _join(part_distance(x, y, z, parts, 2), part_distance(x, y, z, parts, 3), 0.012)
        muscles = min(part_distance(x, y, z, parts, 4), part_distance(x, y, z, parts, 5))
        webs = min(
            part_distance(x, y, z, parts, 7),
            min(part_distance(x, y, z, parts, 8), part_distance(x, y, z, parts, 9)),
        )
        palm = _join(_join(inner, outer, 0.012), muscles, 0.012)
        palm = _join(_join(palm, part_distance(x, y, z, parts, 6), 0.020), webs, 0.010)
    palm = _join(palm, arm, 0.018)
    nearest = palm
    for digit in range(5):
        outside = part_distance(x, y, z, bounds, 1 + digit)
        if outside > min(skip, nearest + 0.004):
            nearest = min(nearest, max(outside, 0.004))
            continue
        nail = 14 + 3 * digit
        first = part_distance(x, y, z, parts, nail - 2)
        second = part_distance(x, y, z, parts, nail - 1)
        last = part_distance(x, y, z, parts, nail)
        # The back of the last segment is flat: the nail's bed.
        height = (x - parts[nail, 0]) * frames[nail, 6] + (y - parts[nail, 1]) * frames[nail, 7]
        height += (z - parts[nail, 2]) * frames[nail, 8]
        last = -_join(-last, -(height - 0.86 * (parts[nail, 6] + parts[nail, 7])), 0.003)
        chain = _join(_join(first, second, 0.005), last, 0.004)
        root = _join(palm, first, 0.012) if digit == 0 else _join(palm, first, 0.008)
        nearest = min(nearest, min(chain, root))
    return nearest


def distance_to_skin(solids: Solids, point_m: Floats) -> float:
    """Signed distance of a camera-frame point (3,) to the skin, metres; far away, a lower bound of it."""
    x, y, z = point_m.tolist()
    return hand_distance(x, y, z, solids)


@kernel
def sleeve_distance(x: float, y: float, z: float, sleeve: Floats) -> float:
    """Signed distance of a point to the sleeve, metres: a pleated tube from the cuff on."""
    if sleeve[7] == 0.0:
        return _FAR_M
    px, py, pz = x - sleeve[0], y - sleeve[1], z - sleeve[2]
    along = px * sleeve[3] + py * sleeve[4] + pz * sleeve[5]
    away = math.sqrt(max(px * px + py * py + pz * pz - along * along, 0.0)) - sleeve[6] - 0.08 * along
    gap = max(away, -along)
    if gap < 0.006:
        # Sines are slow, so they are computed only near the pleats.
        pleats = 0.0012 * math.sin(along * 190.0 + 9.0 * math.sin(px * 55.0 + py * 40.0))
        gap = max(away - pleats, -along)
    return float(gap * 0.8)


@kernel
def prop_distance(x: float, y: float, z: float, prop: Floats) -> float:
    """Signed distance of a point to the held object, metres."""
    kind = prop[0]
    if kind == 0.0:
        return _FAR_M
    px, py, pz = x - prop[1], y - prop[2], z - prop[3]
    if kind == 1.0:
        return float(math.sqrt(px * px + py * py + pz * pz) - prop[4])
    u = abs(px * prop[7] + py * prop[8] + pz * prop[9]) - prop[4]
    v = px * prop[10] + py * prop[11] + pz * prop[12]
    w = px * prop[13] + py * prop[14] + pz * prop[15]
    rim = 0.002
    if kind == 2.0:
        v = math.sqrt(v * v + w * w) - prop[5] + rim
        u += rim
        return float(min(max(u, v), 0.0) + math.sqrt(max(u, 0.0) ** 2 + max(v, 0.0) ** 2) - rim)
    u, v, w = u + rim, abs(v) - prop[5] + rim, abs(w) - prop[6] + rim
    corner = math.sqrt(max(u, 0.0) ** 2 + max(v, 0.0) ** 2 + max(w, 0.0) ** 2)
    return float(min(max(u, max(v, w)), 0.0) + corner - rim)


@kernel
def scene_distance(x: float, y: float, z: float, solids: Solids) -> float:
    """Signed distance of a point to hand, sleeve and held object, metres."""
    hand = hand_distance(x, y, z, solids)
    return min(hand, min(sleeve_distance(x, y, z, solids.sleeve), prop_distance(x, y, z, solids.prop)))
