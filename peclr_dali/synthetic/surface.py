"""Colour and gloss of the surface at a point: skin of palm and back, creases, knuckles, nails, cloth, object."""

import math
from typing import NamedTuple

import numpy as np

from peclr_dali.synthetic.field import Solids, part_distance
from peclr_dali.synthetic.poses import Floats, kernel

SKIN, CLOTH, OBJECT = range(3)

Vector = tuple[float, float, float]

# From the lightest to the darkest human skin, sRGB of the back of the hand.
_SKIN_SRGB = np.divide(
    [[240, 204, 184], [228, 184, 158], [206, 158, 128], [178, 126, 94], [138, 92, 64], [98, 62, 44], [66, 42, 32]], 255
)


class Paint(NamedTuple):
    """Colours of one hand, its sleeve and its object, in linear RGB.

    Attributes:
        skin: (12,) back of the hand, palm, nail (3 each); strength of mottling, of creases, of gloss.
        cloth: (4,) colour, and stripes per metre (0: plain).
        thing: (8,) two colours, bands per metre (0: plain), and gloss.
    """

    skin: Floats
    cloth: Floats
    thing: Floats


def to_linear(srgb: Floats) -> Floats:
    """Linear light from display values, both 0 to 1."""
    return np.asarray(np.where(srgb <= 0.04045, srgb / 12.92, ((srgb + 0.055) / 1.055) ** 2.4))


def draw_paint(rng: np.random.Generator) -> Paint:
    """Skin tone over the whole human range, evenly; sleeve and object in any colour."""
    place = float(rng.uniform(0, len(_SKIN_SRGB) - 1.001))
    lower = int(place)
    srgb = _SKIN_SRGB[lower] + (place - lower) * (_SKIN_SRGB[lower + 1] - _SKIN_SRGB[lower])
    back = to_linear(np.clip(srgb + rng.normal(0, 0.012, 3), 0.03, 1.0))
    darkness = place / (len(_SKIN_SRGB) - 1)
    palm = back + (0.25 + 0.30 * darkness) * (to_linear(np.array([0.86, 0.63, 0.55]) - 0.10 * darkness) - back)
    nail = back + (0.40 - 0.10 * darkness) * (to_linear(np.array([0.93, 0.74, 0.70])) - back)
    skin = np.concatenate([back, palm, nail, [rng.uniform(0.03, 0.10), rng.uniform(0.5, 1.0), rng.uniform(0.5, 1.6)]])
    cloth = np.array([*to_linear(rng.uniform(0.05, 0.95, 3)), rng.choice([0.0, 0.0, 120.0, 220.0])])
    thing = np.array([*to_linear(rng.uniform(0.05, 0.95, 6)), rng.choice([0.0, 30.0, 70.0]), rng.uniform(0.1, 2.0)])
    return Paint(skin, cloth, thing)


@kernel
def _lattice(i: int, j: int, k: int) -> float:
    """A fixed pseudo-random value in [-1, 1] at an integer point."""
    h = (i * 374761393 + j * 668265263 + k * 2147483647) & 0xFFFFFFFF
    h = ((h ^ (h >> 13)) * 1274126177) & 0xFFFFFFFF
    return ((h ^ (h >> 16)) & 0xFFFF) / 32767.5 - 1.0


@kernel
def _mottling(x: float, y: float, z: float) -> float:
    """Smooth noise in [-1, 1] with features of unit size."""
    i, j, k = math.floor(x), math.floor(y), math.floor(z)
    u, v, w = x - i, y - j, z - k
    u, v, w = u * u * (3 - 2 * u), v * v * (3 - 2 * v), w * w * (3 - 2 * w)
    low = (_lattice(i, j, k) * (1 - u) + _lattice(i + 1, j, k) * u) * (1 - v)
    low += (_lattice(i, j + 1, k) * (1 - u) + _lattice(i + 1, j + 1, k) * u) * v
    high = (_lattice(i, j, k + 1) * (1 - u) + _lattice(i + 1, j, k + 1) * u) * (1 - v)
    high += (_lattice(i, j + 1, k + 1) * (1 - u) + _lattice(i + 1, j + 1, k + 1) * u) * v
    return low * (1 - w) + high * w


@kernel
def _ramp(low: float, high: float, value: float) -> float:
    """0 below `low`, 1 above `high`, smooth between."""
    t = min(max((value - low) / (high - low), 0.0), 1.0)
    return t * t * (3 - 2 * t)


@kernel
def _line(distance: float, width: float) -> float:
    return math.exp(-distance * distance / (width * width))


@kernel
def _stroke(x: float, y: float, ax: float, ay: float, bx: float, by: float) -> float:
    """Distance in the plane from a point to a segment."""
    ux, uy = bx - ax, by - ay
    t = min(max(((x - ax) * ux + (y - ay) * uy) / (ux * ux + uy * uy), 0.0), 1.0)
    return math.sqrt((x - ax - t * ux) ** 2 + (y - ay - t * uy) ** 2)


@kernel
def _palm_lines(x: float, y: float) -> float:
    """Darkness in [0, 1] of the three great creases at a point of the palm; units of a medium hand's metres."""
    heart = min(_stroke(x, y, 0.038, 0.060, 0.014, 0.063), _stroke(x, y, 0.014, 0.063, -0.012, 0.078))
    head = min(_stroke(x, y, -0.032, 0.066, -0.004, 0.055), _stroke(x, y, -0.004, 0.055, 0.026, 0.038))
    life = min(_stroke(x, y, -0.032, 0.065, -0.010, 0.048), _stroke(x, y, -0.010, 0.048, -0.001, 0.030))
    life = min(life, _stroke(x, y, -0.001, 0.030, -0.003, 0.008))
    return _line(min(heart, min(head, life)), 0.0011)


@kernel
def skin_at(point: Vector, normal: Vector, solids: Solids, skin: Floats, bulk: float, out: Floats) -> None:
    """Write to `out` (4,) the linear RGB and the gloss of the skin, given a point and its unit normal."""
    (x, y, z), (nx, ny, nz) = point, normal
    parts = solids.parts
    nearest = 0
    distance = part_distance(x, y, z, parts, 0)
    for part in range(1, parts.shape[0]):
        here = part_distance(x, y, z, parts, part)
        if here < distance:
            distance = here
            nearest = part
    part = parts[nearest]
    frame = solids.frames[nearest]
    px, py, pz = x - part[0], y - part[1], z - part[2]
    side = px * frame[0] + py * frame[1] + pz * frame[2]
    along = px * frame[3] + py * frame[4] + pz * frame[5]
    height = px * frame[6] + py * frame[7] + pz * frame[8]
    dorsal = nx * frame[6] + ny * frame[7] + nz * frame[8]
    length = 1.0 / math.sqrt(part[9])

    palmar = _ramp(0.15, -0.55, dorsal)
    if 10 <= nearest < 12:
        # The pale skin of the palm ends gradually along the forearm.
        palmar *= 1.0 - 0.75 * _ramp(-0.01, 0.07, along)
    flush = 0.0
    dark = 0.0
    nail = 0.0
    if nearest >= 12:
        segment = (nearest - 12) % 3
        outer = _ramp(0.3, 0.8, dorsal)
        if segment > 0 or nearest >= 15:
            # Flexion creases on the pad side, wrinkles and a flush on the knuckle.
            start, end = abs(along), abs(along - length)
            if segment > 0:
                dark += 0.55 * palmar * _line(start, 0.0011)
                flush += 0.5 * outer * _line(start, 0.006)
                dark += 0.30 * outer * (0.5 + 0.5 * math.cos(along * 4200.0)) * _line(start, 0.0040)
            if segment < 2:
                dark += 0.45 * palmar * _line(end - 0.0008, 0.0011)
                flush += 0.5 * outer * _line(end, 0.006)
                dark += 0.30 * outer * (0.5 + 0.5 * math.cos((along - length) * 4200.0)) * _line(end, 0.0040)
            if segment == 0:
                flush += 0.6 * outer * _line(start, 0.009)
        if segment == 2:
            flush += 0.35 * _ramp(0.5, 1.0, along / length)
            radius = part[6] + part[7]
            u = side / (0.80 * radius)
            v = (along - length - 0.05 * radius) / (1.05 * radius)
            outline = u * u * u * u + v * v * v * v
            if height > 0.0 and dorsal > 0.1:
                nail = _ramp(1.15, 0.80, outline)
                # The fold of skin around the nail, and its free edge.
                dark += 0.5 * _line(outline - 1.05, 0.25) * _ramp(0.1, 0.4, dorsal)
                if nail > 0.0 and v > 0.72:
                    flush -= 0.4 * nail
    elif nearest < 4:
        # Knuckles.
        flush += 0.5 * _ramp(0.3, 0.8, dorsal) * _line(along - length, 0.010)
    if nearest < 10:
        # All palm parts share the hand frame, whose origin is the wrist: part 0's start is known in it.
        hx = (x - parts[0, 0]) * frame[0] + (y - parts[0, 1]) * frame[1] + (z - parts[0, 2]) * frame[2]
        hy = (x - parts[0, 0]) * frame[3] + (y - parts[0, 1]) * frame[4] + (z - parts[0, 2]) * frame[5]
        dark += 0.6 * palmar * _palm_lines(hx / bulk - 0.0125, hy / bulk + 0.008)

    coarse = _mottling(x * 130.0, y * 130.0, z * 130.0)
    tone = 1.0 + skin[9] * (coarse + 0.6 * _mottling(x * 420.0, y * 420.0, z * 420.0))
    tone *= 1.0 - min(dark * skin[10], 0.75)
    flush = min(max(flush + 0.25 * coarse, -0.5), 1.0)
    for channel in range(3):
        colour = skin[channel] + palmar * (skin[3 + channel] - skin[channel])
        colour += nail * 0.8 * (skin[6 + channel] - colour)
        out[channel] = colour * tone * (1.0 + flush * (0.07 if channel == 0 else -0.10))
    out[3] = skin[11] * (0.35 + 0.9 * nail - 0.1 * palmar)


@kernel
def cloth_at(x: float, y: float, z: float, sleeve: Floats, cloth: Floats, out: Floats) -> None:
    """Write to `out` (4,) the linear RGB and the gloss of the sleeve at a point."""
    along = (x - sleeve[0]) * sleeve[3] + (y - sleeve[1]) * sleeve[4] + (z - sleeve[2]) * sleeve[5]
    tone = 1.0 + 0.12 * _mottling(x * 900.0, y * 900.0, z * 900.0) - 0.3 * _line(along - 0.012, 0.0012)
    if cloth[3] > 0.0:
        tone *= 0.72 + 0.28 * _ramp(-0.3, 0.3, math.sin(along * cloth[3]))
    for channel in range(3):
        out[channel] = cloth[channel] * tone
    out[3] = 0.05


@kernel
def thing_at(x: float, y: float, z: float, prop: Floats, thing: Floats, out: Floats) -> None:
    """Write to `out` (4,) the linear RGB and the gloss of the held object at a point."""
    along = (x - prop[1]) * prop[7] + (y - prop[2]) * prop[8] + (z - prop[3]) * prop[9]
    share = 0.0
    if thing[6] > 0.0:
        share = _ramp(-0.1, 0.1, math.sin(along * thing[6] * 6.283))
    tone = 1.0 + 0.06 * _mottling(x * 200.0, y * 200.0, z * 200.0)
    for channel in range(3):
        out[channel] = (thing[channel] + share * (thing[3 + channel] - thing[channel])) * tone
    out[3] = thing[7]
