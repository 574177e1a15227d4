"""Sphere tracing of the distance field into surface samples, which are lit later.

Pixels are corner-based: pixel (row, column) covers [column, column + 1] x [row, row + 1], so its centre is at
(column + 0.5, row + 0.5) and the ray through image point (u, v) has direction K^-1 (u, v, 1). A keypoint projected with
K therefore lands on the rendered joint without any half-pixel shift.

A pixel inside a surface has one sample, through its centre. Pixels at outer and inner outlines have four, against
aliasing.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.ndimage import generate_binary_structure, maximum_filter, minimum_filter

from peclr_dali.synthetic.field import Solids, hand_distance, prop_distance, scene_distance, sleeve_distance
from peclr_dali.synthetic.poses import Floats, Pixels, kernel
from peclr_dali.synthetic.surface import CLOTH, OBJECT, SKIN, Paint, Vector, cloth_at, skin_at, thing_at

_TILE_PX = 4
HIT_M = 0.0003
"""Distance to the surface, in metres, at which a ray stops: about a quarter of a pixel."""


class Rendering(NamedTuple):
    """Surface samples of one pose, before light.

    Attributes:
        pixels: (M,) int64, row * width + column of the pixel that each sample belongs to.
        samples: (M, 13) float32: weight (share of the pixel), point in metres and unit normal in the camera frame,
            linear RGB, gloss, openness (1: nothing near, 0: deep in a crease), thinness (1: light shines through).
        depth_m: (H, W) float32, z of the surface at each pixel's centre; 0 for the background.
    """

    pixels: NDArray[np.int64]
    samples: Pixels
    depth_m: Pixels


def render(solids: Solids, paint: Paint, bulk: float, intrinsics: Floats, side_px: int) -> Rendering:
    """Trace a square picture of `side_px` pixels through `intrinsics` (3, 3)."""
    lens = intrinsics[[0, 1, 0, 1], [0, 1, 2, 2]]  # focal lengths and principal point
    far = float(max((solids.parts[:, 2] + np.maximum(solids.parts[:, 5], 0.0)).max(), solids.prop[3])) + 0.1
    starts = _approach(solids, lens, side_px, far)
    distance = _trace_centres(solids, lens, side_px, far, starts)
    cross = generate_binary_structure(2, 1)  # a pixel and its four neighbours
    near, away = (extreme(distance, footprint=cross) for extreme in (minimum_filter, maximum_filter))
    # A step in depth of more than 4 mm, or between surface and background.
    outline = np.asarray(np.maximum(distance - near, away - distance) > 0.004)
    capacity = int((distance > 0).sum()) + 4 * int(outline.sum())
    depth_m = np.zeros((side_px, side_px), np.float32)
    rendering = Rendering(np.empty(capacity, np.int64), np.empty((capacity, 13), np.float32), depth_m)
    # Of the hits through the centres of a pixel and its neighbours, the nearest: nothing stands much nearer.
    nearest = minimum_filter(np.where(distance > 0, distance, 1e3), size=3, mode="nearest")
    used = _collect(solids, lens, far, starts, distance, nearest, outline, paint, bulk, rendering)
    return rendering._replace(pixels=rendering.pixels[:used], samples=rendering.samples[:used])


@kernel
def _ray(lens: Floats, x_px: float, y_px: float) -> tuple[float, float, float, float]:
    """Unit vector from the camera through an image point, and the length of the ray up to a depth of 1."""
    dx = (x_px - lens[2]) / lens[0]
    dy = (y_px - lens[3]) / lens[1]
    norm = np.sqrt(dx * dx + dy * dy + 1.0)
    return dx / norm, dy / norm, 1.0 / norm, norm


@kernel
def _march(dx: float, dy: float, dz: float, start: float, far: float, solids: Solids) -> float:
    """Distance along a unit ray from the camera to the surface, metres; -1 for a miss."""
    t = start
    for _ in range(72):
        gap = scene_distance(dx * t, dy * t, dz * t, solids)
        if gap < HIT_M:
            return t
        t += 0.95 * gap
        if t > far:
            return -1.0
    # A ray that grazes the surface for this long is on its outline.
    return t if gap < 0.001 else -1.0


@kernel
def _approach(solids: Solids, lens: Floats, side_px: int, far: float) -> Floats:
    """Distance that all rays of a tile can travel safely, metres per tile; -1: the tile is empty."""
    tiles = (side_px + _TILE_PX - 1) // _TILE_PX
    starts = np.empty((tiles, tiles))
    spread = 0.75 * _TILE_PX / min(lens[0], lens[1])
    for row in range(tiles):
        for column in range(tiles):
            dx, dy, dz, norm = _ray(lens, (column + 0.5) * _TILE_PX, (row + 0.5) * _TILE_PX)
            t = 0.08
            found = -1.0
            while t < far * norm:
                gap = scene_distance(dx * t, dy * t, dz * t, solids)
                if gap < spread * t + 0.001:
                    found = t
                    break
                t += 0.95 * (gap - spread * t) + 0.0005
            starts[row, column] = max(found - 0.003, 0.0) if found > 0 else -1.0
    return starts


@kernel
def _trace_centres(solids: Solids, lens: Floats, side_px: int, far: float, starts: Floats) -> Floats:
    """Distance along the ray through each pixel's centre, (H, W) metres; -1 for a miss."""
    distance = np.full((side_px, side_px), -1.0)
    for row in range(side_px):
        for column in range(side_px):
            start = starts[row // _TILE_PX, column // _TILE_PX]
            if start >= 0.0:
                dx, dy, dz, norm = _ray(lens, column + 0.5, row + 0.5)
                distance[row, column] = _march(dx, dy, dz, start, far * norm, solids)
    return distance


@kernel
def _nearest_surface(x: float, y: float, z: float, solids: Solids) -> tuple[int, float]:
    """The nearest material, SKIN, CLOTH or OBJECT, and its signed distance, metres."""
    hand = hand_distance(x, y, z, solids)
    covered = sleeve_distance(x, y, z, solids.sleeve)
    held = prop_distance(x, y, z, solids.prop)
    if hand <= min(covered, held):
        return SKIN, hand
    return (CLOTH, covered) if covered <= held else (OBJECT, held)


@kernel
def _distance_to(material: int, x: float, y: float, z: float, solids: Solids) -> float:
    if material == SKIN:
        return hand_distance(x, y, z, solids)
    if material == CLOTH:
        return sleeve_distance(x, y, z, solids.sleeve)
    return prop_distance(x, y, z, solids.prop)


@kernel
def _describe(
    material: int, here: float, point: Vector, solids: Solids, paint: Paint, bulk: float, colour: Floats, sample: Pixels
) -> None:
    """Fill all but the weight of a sample at a surface point."""
    x, y, z = point
    # Forward differences share the value at the point; their step is wider than the hit tolerance, or its noise shows.
    h = 0.0005
    nx = _distance_to(material, x + h, y, z, solids) - here
    ny = _distance_to(material, x, y + h, z, solids) - here
    nz = _distance_to(material, x, y, z + h, solids) - here
    norm = np.sqrt(nx * nx + ny * ny + nz * nz) + 1e-12
    nx, ny, nz = nx / norm, ny / norm, nz / norm

    closed = 0.0
    reach, weight = 0.0035, 0.55
    for _ in range(3):
        gap = scene_distance(x + nx * reach, y + ny * reach, z + nz * reach, solids)
        closed += weight * (1.0 - min(max(gap / reach, 0.0), 1.0))
        reach, weight = reach * 2.9, weight * 0.8
    thin = 0.0
    if material == SKIN:
        inside = 0.008
        gap = hand_distance(x - nx * inside, y - ny * inside, z - nz * inside, solids)
        thin = min(max(1.0 + gap / inside, 0.0), 1.0)
        skin_at(point, (nx, ny, nz), solids, paint.skin, bulk, colour)
    elif material == CLOTH:
        cloth_at(x, y, z, solids.sleeve, paint.cloth, colour)
    else:
        thing_at(x, y, z, solids.prop, paint.thing, colour)
    sample[1], sample[2], sample[3] = x, y, z
    sample[4], sample[5], sample[6] = nx, ny, nz
    sample[7], sample[8], sample[9], sample[10] = colour[0], colour[1], colour[2], colour[3]
    sample[11] = max(1.0 - closed, 0.0)
    sample[12] = thin


@kernel
def _collect(
    solids: Solids,
    lens: Floats,
    far: float,
    starts: Floats,
    distance: Floats,
    nearest: Floats,
    outline: NDArray[np.bool_],
    paint: Paint,
    bulk: float,
    rendering: Rendering,
) -> int:
    """Describe the hits, with four rays in outline pixels; returns how many samples there are."""
    side = distance.shape[0]
    colour = np.zeros(4)
    used = 0
    for row in range(side):
        for column in range(side):
            if distance[row, column] <= 0.0 and not outline[row, column]:
                continue
            start = starts[row // _TILE_PX, column // _TILE_PX]
            if start < 0.0:
                continue
            for ray in range(-1, 4 if outline[row, column] else 0):
                # Ray -1 goes through the centre; the others form a rotated square and share the pixel.
                along = (0.5, 0.375, 0.875, 0.625, 0.125)[ray + 1]
                across = (0.5, 0.125, 0.375, 0.875, 0.625)[ray + 1]
                dx, dy, dz, norm = _ray(lens, column + along, row + across)
                t = distance[row, column]
                if ray >= 0:
                    t = _march(dx, dy, dz, max(start, nearest[row, column] - 0.006), far * norm, solids)
                if t <= 0.0:
                    continue
                x, y, z = dx * t, dy * t, dz * t
                material, here = _nearest_surface(x, y, z, solids)
                if ray < 0:
                    rendering.depth_m[row, column] = z
                if ray >= 0 or not outline[row, column]:  # at outlines, the centre's colour is not used
                    _describe(material, here, (x, y, z), solids, paint, bulk, colour, rendering.samples[used])
                    rendering.samples[used, 0] = 0.25 if ray >= 0 else 1.0
                    rendering.pixels[used] = row * side + column
                    used += 1
    return used
