"""The light of a scene, and what it makes of a rendered hand."""

from typing import NamedTuple

import numpy as np

from peclr_dali.synthetic.poses import Floats, Pixels, kernel
from peclr_dali.synthetic.render import Rendering


class Light(NamedTuple):
    """Light of a scene; linear RGB, camera frame.

    Attributes:
        direction: (3,) unit vector towards the main light.
        colour: (3,) of the main light.
        above: (3,) light that arrives from above.
        below: (3,) light that arrives from below.
        softness: 0 for a bare bulb, 1 for an overcast sky.
    """

    direction: Floats
    colour: Floats
    above: Floats
    below: Floats
    softness: float


def shade(rendering: Rendering, light: Light, intrinsics: Floats) -> Pixels:
    """Light the rendering. Returns (H, W, 4): linear RGB multiplied by the coverage, then the coverage."""
    picture = np.zeros((*rendering.depth_m.shape, 4), np.float32)
    _accumulate(rendering, intrinsics[[0, 1, 0, 1], [0, 1, 2, 2]], light, picture.reshape(-1, 4))
    return picture


@kernel
def _in_light(x: float, y: float, z: float, depth_m: Pixels, lens: Floats, light: Light) -> float:
    """Share of the main light that reaches a point, 0 to 1; only visible surfaces cast shadows.

    Each visible surface point is assumed to be as thick as a few fingers.
    """
    height, width = depth_m.shape
    to_light = light.direction
    reach = 0.006
    lit = 1.0
    for _ in range(10):
        px, py, pz = x + to_light[0] * reach, y + to_light[1] * reach, z + to_light[2] * reach
        if pz <= 0.02:
            break
        column, row = int(lens[0] * px / pz + lens[2]), int(lens[1] * py / pz + lens[3])
        if column < 0 or row < 0 or column >= width or row >= height:
            break
        front = depth_m[row, column]
        if front > 0.0 and front < pz - 0.003 and front > pz - 0.045:
            # Far blockers throw soft shadows.
            lit = min(lit, 0.15 + min(light.softness * (0.35 + reach * 8.0), 0.8))
        reach *= 1.34
    return lit


@kernel
def _accumulate(rendering: Rendering, lens: Floats, light: Light, picture: Pixels) -> None:
    lx, ly, lz = light.direction
    colour, above, below, softness = light.colour, light.above, light.below, light.softness
    for index in range(rendering.samples.shape[0]):
        sample = rendering.samples[index]
        x, y, z = sample[1], sample[2], sample[3]
        nx, ny, nz = sample[4], sample[5], sample[6]
        gloss, openness, thinness = sample[10], sample[11], sample[12]
        facing = nx * lx + ny * ly + nz * lz
        lit = 0.0
        if facing > -0.3:
            lit = _in_light(x + 0.0015 * nx, y + 0.0015 * ny, z + 0.0015 * nz, rendering.depth_m, lens, light)
        norm = np.sqrt(x * x + y * y + z * z)
        vx, vy, vz = -x / norm, -y / norm, -z / norm
        hx, hy, hz = lx + vx, ly + vy, lz + vz
        highlight = max((nx * hx + ny * hy + nz * hz) / (np.sqrt(hx * hx + hy * hy + hz * hz) + 1e-6), 0.0)
        highlight = highlight * highlight
        highlight = highlight * highlight
        broad = highlight * highlight * highlight
        tight = broad * broad * broad
        edge = 1.0 - max(nx * vx + ny * vy + nz * vz, 0.0)
        fresnel = edge * edge * edge
        shine = gloss * lit * (0.05 * broad + 0.10 * tight) * (1.0 + 2.0 * fresnel) * (facing > 0.0)
        upward = 0.5 - 0.5 * ny
        weight = sample[0]
        pixel = picture[rendering.pixels[index]]
        for channel in range(3):
            # Light travels under the skin, red the farthest: it bends around the terminator and fills creases.
            wrap = (0.30, 0.14, 0.09)[channel] + 0.25 * softness
            bleed = (0.75, 1.0, 1.12)[channel]
            direct = max((facing + wrap) / (1.0 + wrap), 0.0)
            shadow = lit if channel > 0 else lit + 0.06 * (1.0 - lit)
            ambient = (below[channel] + upward * (above[channel] - below[channel])) * openness**bleed
            glow = thinness * (0.10, 0.025, 0.015)[channel] * max(-facing, 0.0)
            received = colour[channel] * (direct * shadow * (0.35 + 0.65 * openness) + glow) + ambient
            value = sample[7 + channel] * received + colour[channel] * shine + 0.12 * fresnel * ambient * gloss
            pixel[channel] += weight * value
        pixel[3] += weight
