"""Sphere tracing of the field into surface samples, which any scene can then light.

Pixels are corner-based: pixel (row, column) covers [column, column + 1] x [row, row + 1], so its centre is at
(column + 0.5, row + 0.5) and the ray through image point (u, v) has direction K^-1 (u, v, 1). A keypoint projected with
K therefore lands on the rendered joint without any half-pixel shift.

A pixel in the interior of a surface has one sample, through its centre. Pixels at outlines, outer and inner ones, have
four: that is where aliasing would show.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from synthetic.field import Solids, hand_distance, prop_distance, scene_distance, sleeve_distance
from synthetic.jit import Floats, Pixels, kernel
from synthetic.surface import Paint, cloth_at, skin_at, thing_at

SAMPLE_COLUMNS = 13
"""Of Rendering.samples: weight; point (3); normal (3); colour (3); gloss; openness; thinness."""

_TILE_PX = 4
_NEAR_M = 0.08
HIT_M = 0.0003
"""Where rays stop: what is rendered is the field's level set at this distance, a quarter of a pixel outside of it."""
_OUTLINE_M = 0.004


class Rendering(NamedTuple):
    """Surface samples of one pose, before light.

    Attributes:
        pixels: (M,) int64, row * width + column of the pixel that each sample belongs to.
        samples: (M, 13) float32: weight (share of the pixel), point in metres and unit normal in the camera frame,
            linear RGB, gloss, openness (1: nothing near, 0: deep in a crease), thinness (1: light shines through).
        depth_m: (H, W) float32, z of the surface at each pixel's centre; 0 where the background is seen.
        material: (H, W) uint8 at each pixel's centre: NOTHING, SKIN, CLOTH or OBJECT.
    """

    pixels: NDArray[np.int64]
    samples: Pixels
    depth_m: Pixels
    material: NDArray[np.uint8]


def render(solids: Solids, paint: Paint, bulk: float, intrinsics: Floats, side_px: int) -> Rendering:
    """Trace a square picture of `side_px` pixels through `intrinsics` (3, 3)."""
    lens = np.array([intrinsics[0, 0], intrinsics[1, 1], intrinsics[0, 2], intrinsics[1, 2]])
    ends_z = solids.parts[:, 2] + np.maximum(solids.parts[:, 5], 0.0)
    far = float(max(ends_z.max(), solids.prop[3])) + 0.1
    starts = _approach(solids, lens, side_px, far)
    distance = _trace_centres(solids, lens, side_px, far, starts)
    outline = _outlines(distance)
    capacity = int((distance > 0).sum()) + 4 * int(outline.sum())
    pixels = np.empty(capacity, np.int64)
    samples = np.empty((capacity, SAMPLE_COLUMNS), np.float32)
    depth = np.zeros((side_px, side_px), np.float32)
    material = np.zeros((side_px, side_px), np.uint8)
    used = _collect(
        solids, lens, far, starts, distance, outline, paint, bulk,
        pixels, samples, depth, material,
    )  # fmt: skip
    return Rendering(pixels[:used], samples[:used], depth, material)


@kernel
def _march(
    dx: float,
    dy: float,
    dz: float,
    start: float,
    far: float,
    solids: Solids,
) -> float:
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
def _approach(
    solids: Solids,
    lens: Floats,
    side_px: int,
    far: float,
) -> Floats:
    """How far every ray of a tile can travel before anything is near, metres per tile; -1: the tile is empty."""
    tiles = (side_px + _TILE_PX - 1) // _TILE_PX
    starts = np.empty((tiles, tiles))
    for row in range(tiles):
        for column in range(tiles):
            dx = ((column + 0.5) * _TILE_PX - lens[2]) / lens[0]
            dy = ((row + 0.5) * _TILE_PX - lens[3]) / lens[1]
            norm = np.sqrt(dx * dx + dy * dy + 1.0)
            dx, dy, dz = dx / norm, dy / norm, 1.0 / norm
            spread = 0.75 * _TILE_PX / min(lens[0], lens[1])
            t = _NEAR_M
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
def _trace_centres(
    solids: Solids,
    lens: Floats,
    side_px: int,
    far: float,
    starts: Floats,
) -> Floats:
    """Distance along the ray through each pixel's centre, (H, W) metres; -1 where it meets nothing."""
    distance = np.full((side_px, side_px), -1.0)
    for row in range(side_px):
        for column in range(side_px):
            start = starts[row // _TILE_PX, column // _TILE_PX]
            if start >= 0.0:
                dx = (column + 0.5 - lens[2]) / lens[0]
                dy = (row + 0.5 - lens[3]) / lens[1]
                norm = np.sqrt(dx * dx + dy * dy + 1.0)
                distance[row, column] = _march(dx / norm, dy / norm, 1.0 / norm, start, far * norm, solids)
    return distance


@kernel
def _outlines(distance: Floats) -> NDArray[np.bool_]:
    """Pixels beside a step in depth, or between surface and background."""
    rows, columns = distance.shape
    outline = np.zeros((rows, columns), np.bool_)
    for row in range(rows):
        for column in range(columns):
            here = distance[row, column]
            if column + 1 < columns and abs(here - distance[row, column + 1]) > _OUTLINE_M:
                outline[row, column] = outline[row, column + 1] = True
            if row + 1 < rows and abs(here - distance[row + 1, column]) > _OUTLINE_M:
                outline[row, column] = outline[row + 1, column] = True
    return outline


@kernel
def _describe(
    x: float,
    y: float,
    z: float,
    solids: Solids,
    paint: Paint,
    bulk: float,
    colour: Floats,
    sample: Pixels,
) -> int:
    """Fill all but the weight of a sample at a surface point; returns the material."""
    hand = hand_distance(x, y, z, solids)
    covered = sleeve_distance(x, y, z, solids.sleeve)
    held = prop_distance(x, y, z, solids.prop)
    material = 1 if hand <= min(covered, held) else (2 if covered <= held else 3)
    # Forward differences share the value at the point; their step is wider than the hit tolerance, or its noise shows.
    nx, ny, nz, h = 0.0, 0.0, 0.0, 0.0005
    for axis in range(3):
        px, py, pz = x + h * (axis == 0), y + h * (axis == 1), z + h * (axis == 2)
        if material == 1:
            slope = hand_distance(px, py, pz, solids) - hand
        elif material == 2:
            slope = sleeve_distance(px, py, pz, solids.sleeve) - covered
        else:
            slope = prop_distance(px, py, pz, solids.prop) - held
        nx, ny, nz = nx + slope * (axis == 0), ny + slope * (axis == 1), nz + slope * (axis == 2)
    norm = np.sqrt(nx * nx + ny * ny + nz * nz) + 1e-12
    nx, ny, nz = nx / norm, ny / norm, nz / norm

    closed = 0.0
    reach, weight = 0.0035, 0.55
    for _ in range(3):
        gap = scene_distance(x + nx * reach, y + ny * reach, z + nz * reach, solids)
        closed += weight * (1.0 - min(max(gap / reach, 0.0), 1.0))
        reach, weight = reach * 2.9, weight * 0.8
    thin = 0.0
    if material == 1:
        inside = 0.008
        gap = hand_distance(x - nx * inside, y - ny * inside, z - nz * inside, solids)
        thin = min(max(1.0 + gap / inside, 0.0), 1.0)
        skin_at(x, y, z, nx, ny, nz, solids, paint.skin, bulk, colour)
    elif material == 2:
        cloth_at(x, y, z, solids.sleeve, paint.cloth, colour)
    else:
        thing_at(x, y, z, solids.prop, paint.thing, colour)
    sample[1], sample[2], sample[3] = x, y, z
    sample[4], sample[5], sample[6] = nx, ny, nz
    sample[7], sample[8], sample[9], sample[10] = colour[0], colour[1], colour[2], colour[3]
    sample[11] = max(1.0 - closed, 0.0)
    sample[12] = thin
    return material


@kernel
def _nearest_around(distance: Floats, row: int, column: int) -> float:
    """Shortest of the hits through a pixel's and its neighbours' centres: nothing stands much nearer."""
    near = 1e3
    for y in range(max(row - 1, 0), min(row + 2, distance.shape[0])):
        for x in range(max(column - 1, 0), min(column + 2, distance.shape[1])):
            if distance[y, x] > 0.0:
                near = min(near, distance[y, x])
    return near


@kernel
def _collect(
    solids: Solids,
    lens: Floats,
    far: float,
    starts: Floats,
    distance: Floats,
    outline: NDArray[np.bool_],
    paint: Paint,
    bulk: float,
    pixels: NDArray[np.int64],
    samples: Pixels,
    depth_m: Pixels,
    material: NDArray[np.uint8],
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
            near = _nearest_around(distance, row, column) if outline[row, column] else 0.0
            for ray in range(-1, 4):
                # Ray -1 goes through the centre; the others form a rotated square and share the pixel.
                along, across = 0.5, 0.5
                if ray == 0:
                    along, across = 0.375, 0.125
                elif ray == 1:
                    along, across = 0.875, 0.375
                elif ray == 2:
                    along, across = 0.625, 0.875
                elif ray == 3:
                    along, across = 0.125, 0.625
                if ray >= 0 and not outline[row, column]:
                    break
                dx = (column + along - lens[2]) / lens[0]
                dy = (row + across - lens[3]) / lens[1]
                norm = np.sqrt(dx * dx + dy * dy + 1.0)
                dx, dy, dz = dx / norm, dy / norm, 1.0 / norm
                t = distance[row, column]
                if ray >= 0:
                    t = _march(dx, dy, dz, max(start, near - 0.006), far * norm, solids)
                if t <= 0.0:
                    continue
                if ray < 0 and outline[row, column]:
                    # Its colour does not count, only what stands at the centre.
                    x, y, z = dx * t, dy * t, dz * t
                    hand = hand_distance(x, y, z, solids)
                    covered, held = sleeve_distance(x, y, z, solids.sleeve), prop_distance(x, y, z, solids.prop)
                    depth_m[row, column] = z
                    material[row, column] = 1 if hand <= min(covered, held) else (2 if covered <= held else 3)
                    continue
                sample = samples[used]
                kind = _describe(
                    dx * t, dy * t, dz * t, solids,
                    paint, bulk, colour, sample,
                )  # fmt: skip
                sample[0] = 0.25 if ray >= 0 else 1.0
                pixels[used] = row * side + column
                used += 1
                if ray < 0:
                    depth_m[row, column] = dz * t
                    material[row, column] = kind
    return used
