"""Scenes: a background picture larger than the photograph, and its light. A pure function of (seed, scene).

All poses share a few scenes, as in a recording studio. If every photograph had its own scene, contrastive training
would distinguish photographs by their backgrounds and learn nothing about hands.
"""

from collections.abc import Callable
from dataclasses import dataclass

import cv2
import numpy as np
from numpy.typing import NDArray

from peclr_dali.synthetic.light import Light
from peclr_dali.synthetic.poses import Floats, Pixels
from peclr_dali.synthetic.surface import to_linear

SCENE_PX = 352
_SHIFT = 4


@dataclass(frozen=True)
class Scene:
    """A background and its light.

    Attributes:
        picture: (352, 352, 3) uint8, sRGB.
        light: light on the hand.
        wall: 0 where the background is far away, 1 where it is near enough to catch the hand's shadow.
    """

    picture: NDArray[np.uint8]
    light: Light
    wall: float


def draw_scene(rng: np.random.Generator) -> Scene:
    """Paint a background of a random kind and light it."""
    kinds: list[Callable[[np.random.Generator], Pixels]] = [_room, _shelves, _outdoors, _desk, _wall, _fabric]
    kind = int(rng.integers(len(kinds)))
    canvas = kinds[kind](rng)
    near = kind in (3, 4, 5)
    canvas = _blurred(canvas, float(rng.uniform(0.4, 1.4) if near else rng.uniform(0.8, 3.5)))
    azimuth, height = float(rng.uniform(-np.pi, np.pi)), float(rng.uniform(0.1, 1.2))
    # Light comes from the camera's side of the hand, from above more often than from below.
    direction = np.array([np.cos(azimuth) * np.cos(height), np.sin(azimuth) * np.cos(height), -np.sin(height)])
    if direction[1] > 0 and rng.random() < 0.75:
        direction[1] *= -1
    warmth = float(rng.normal(0.0, 0.13))
    tint = np.array([1.0 + warmth, 1.0, 1.0 - warmth])
    softness = float(rng.uniform(0.05, 0.95))
    ambience = to_linear(canvas.reshape(-1, 3).astype(np.float64).mean(axis=0))
    ambience = 0.5 * ambience / max(float(ambience.mean()), 0.02) + 0.5 * tint
    level = float(rng.uniform(0.65, 1.25))
    key = level * tint * (1.15 - 0.45 * softness)
    fill = level * ambience * (0.20 + 0.30 * softness)
    lighting = Light(direction, key, fill * 1.25, fill * 0.65, softness)
    # Tinted by the light, and darker away from its direction.
    falloff, brightness = float(rng.uniform(0.05, 0.4)), float(rng.uniform(0.75, 1.05))
    across = np.linspace(-1, 1, SCENE_PX, dtype=np.float32)
    ramp = direction[0] * across[None, :] + direction[1] * across[:, None]
    graded = canvas * (brightness * (1.0 + falloff * ramp))[..., None] * np.sqrt(tint)
    picture = np.clip(graded * 255, 0, 255).astype(np.uint8)
    return Scene(picture, lighting, float(rng.uniform(0.35, 0.8)) if near else 0.0)


def _colour(rng: np.random.Generator, low: float = 0.08, high: float = 0.92, saturation: float = 0.5) -> Floats:
    """A colour, (3,) sRGB 0 to 1, more often dull than bright."""
    grey = float(rng.uniform(low, high))
    return np.clip(grey + saturation * float(rng.beta(1.2, 2.5)) * rng.uniform(-1, 1, 3), 0.02, 0.98)


def _flat(colour: Floats) -> Pixels:
    return np.broadcast_to(colour.astype(np.float32), (SCENE_PX, SCENE_PX, 3)).copy()


def _noise(rng: np.random.Generator, cells: tuple[int, int], octaves: int = 3) -> Pixels:
    """Smooth noise (H, W) of about unit range; `cells` are its coarsest features per picture, down and across."""
    total = np.zeros((SCENE_PX, SCENE_PX), np.float32)
    for octave in range(octaves):
        size = min(cells[1] << octave, SCENE_PX), min(cells[0] << octave, SCENE_PX)
        grid = rng.uniform(-1, 1, (size[1], size[0])).astype(np.float32)
        total += cv2.resize(grid, (SCENE_PX, SCENE_PX), interpolation=cv2.INTER_CUBIC) * np.float32(0.55**octave)
    return total


def _blurred(picture: Pixels, sigma_px: float) -> Pixels:
    return np.asarray(cv2.GaussianBlur(picture, (0, 0), sigma_px), dtype=np.float32)


def _fixed(points: Floats) -> NDArray[np.int32]:
    """Points in OpenCV's fixed-point form, for drawing at fractions of a pixel."""
    return np.asarray(np.round(points * (1 << _SHIFT)), dtype=np.int32)


def _fill(
    canvas: Pixels, x: float, y: float, width: float, height: float, colour: Floats, angle_rad: float = 0.0
) -> None:
    """Fill a rectangle around its centre."""
    c, s = np.cos(angle_rad), np.sin(angle_rad)
    corners = np.array([[-1, -1], [1, -1], [1, 1], [-1, 1]]) * np.array([width, height]) / 2
    placed = corners @ np.array([[c, s], [-s, c]]) + np.array([x, y])
    cv2.fillPoly(canvas, [_fixed(placed)], colour.tolist(), cv2.LINE_AA, _SHIFT)


def _wood(rng: np.random.Generator) -> Pixels:
    """Boards with grain."""
    grain = _noise(rng, (int(rng.integers(2, 5)), 40), 3)
    rings = np.sin(14.0 * _noise(rng, (2, 9), 2) + 9.0 * grain) * 0.5 + 0.5
    dark = _colour(rng, 0.2, 0.5, 0.1) * np.array([1.15, 0.9, 0.65])
    boards = (dark * (0.85 + 0.75 * rings[..., None] * 0.35 + 0.10 * grain[..., None])).astype(np.float32)
    width = int(rng.integers(40, 120))
    for left in range(0, SCENE_PX, width):
        boards[:, left : left + width] *= np.float32(rng.uniform(0.85, 1.15))
        boards[:, left : left + 1] *= np.float32(0.5)
    return np.ascontiguousarray(boards if rng.random() < 0.5 else boards.transpose(1, 0, 2))


def _clutter(
    rng: np.random.Generator, canvas: Pixels, things: int, size_px: tuple[float, float], top_px: float
) -> None:
    """Scatter boxes, discs, papers with print and cables, each with a soft shadow."""
    for _ in range(things):
        x, y = float(rng.uniform(0, SCENE_PX)), float(rng.uniform(top_px, SCENE_PX))
        width, height = rng.uniform(*size_px, 2)
        angle, colour = float(rng.uniform(0, np.pi)), _colour(rng, saturation=0.8)
        kind = int(rng.integers(4))
        stamp = np.zeros((SCENE_PX, SCENE_PX), np.float32)
        _fill(stamp, x + 4, y + 5, width, height, np.ones(1), angle)
        shade = _blurred(stamp, 4.0)
        if kind < 3:
            canvas *= (1.0 - 0.45 * shade)[..., None]
        if kind == 0:
            _fill(canvas, x, y, width, height, colour, angle)
            _fill(canvas, x, y, width * 0.8, height * 0.75, np.clip(colour * 1.15, 0, 1), angle)
        elif kind == 1:
            centre, radius = _fixed(np.array([x, y])), int(min(width, height) / 2 * (1 << _SHIFT))
            for share, gain in ((1.0, 0.8), (0.85, 1.0), (0.6, 0.7), (0.3, 1.1)):
                tone = np.clip(colour * gain, 0, 1).tolist()
                cv2.circle(canvas, (int(centre[0]), int(centre[1])), int(radius * share), tone, -1, cv2.LINE_AA, _SHIFT)
        elif kind == 2:
            paper = np.clip(_colour(rng, 0.75, 0.95, 0.1), 0, 1)
            _fill(canvas, x, y, width, height * 1.3, paper, angle)
            c, s = np.cos(angle), np.sin(angle)
            for line in np.arange(-0.5, 0.5, 0.09):
                # Rows of print of uneven length.
                along, down = float(rng.uniform(0.3, 0.8)) * width, line * height
                middle = np.array([x, y]) + down * np.array([-s, c])
                _fill(canvas, middle[0], middle[1], along, 1.6, paper * 0.45, angle)
        else:
            steps = np.cumsum(np.cumsum(rng.normal(0, 1, (40, 2)), axis=0) + rng.normal(0, 2, 2), axis=0)
            cable = _fixed(steps + np.array([x, y]))
            cv2.polylines(canvas, [cable], False, colour.tolist(), int(rng.integers(2, 6)), cv2.LINE_AA, _SHIFT)


def _room(rng: np.random.Generator) -> Pixels:
    """A wall with window, pictures or door above a floor or table top."""
    canvas = _flat(_colour(rng, 0.35, 0.92, 0.25))
    horizon = float(rng.uniform(0.5, 0.85)) * SCENE_PX
    canvas *= 1.0 + 0.04 * _noise(rng, (3, 3))[..., None]
    for _ in range(int(rng.integers(1, 5))):
        x, y = rng.uniform(0, SCENE_PX), rng.uniform(0, horizon)
        width, height = rng.uniform(30, 130, 2)
        frame = _colour(rng)
        _fill(canvas, x, y, width, height, frame)
        _fill(canvas, x, y, width - 9, height - 9, np.clip(_colour(rng, 0.3, 1.0, 0.7), 0, 1))
        if rng.random() < 0.5:
            _fill(canvas, x, y, 4, height, frame)
            _fill(canvas, x, y, width, 4, frame)
    floor = _wood(rng) if rng.random() < 0.6 else _flat(_colour(rng)) * (1 + 0.1 * _noise(rng, (20, 8)))[..., None]
    canvas[int(horizon) :] = floor[int(horizon) :]
    canvas[int(horizon) - 5 : int(horizon)] *= 0.7
    _clutter(rng, canvas, int(rng.integers(2, 8)), (25, 80), horizon - 40)
    return canvas


def _shelves(rng: np.random.Generator) -> Pixels:
    """Shelves of books and boxes."""
    canvas = _flat(_colour(rng, 0.05, 0.3, 0.2))
    board = _colour(rng, 0.3, 0.8, 0.3)
    y = float(rng.uniform(20, 70))
    while y < SCENE_PX + 80:
        tall = float(rng.uniform(55, 95))
        x = 0.0
        while x < SCENE_PX:
            width, height = float(rng.uniform(7, 26)), tall * float(rng.uniform(0.55, 0.92))
            if rng.random() < 0.85:
                spine = _colour(rng, 0.1, 0.8, 0.6)
                lean = float(rng.normal(0, 0.03))
                _fill(canvas, x + width / 2, y - height / 2, width - 1, height, spine, lean)
                title = np.clip(spine * 0.4 if spine.mean() > 0.5 else spine + 0.4, 0, 1)
                _fill(canvas, x + width / 2, y - height * 0.6, width * 0.45, height * 0.4, title, lean)
            x += width
        _fill(canvas, SCENE_PX / 2, y + 4, SCENE_PX, 8, board)
        canvas[int(min(y + 8, SCENE_PX - 1)) : int(min(y + 16, SCENE_PX))] *= 0.6
        y += tall + 12
    return canvas


def _outdoors(rng: np.random.Generator) -> Pixels:
    """Sky, leaves and ground."""
    down = np.linspace(0, 1, SCENE_PX, dtype=np.float32)[:, None, None]
    sky = np.array([0.55, 0.70, 0.90]) + rng.normal(0, 0.08, 3)
    canvas = (sky * (1 - down) + np.array([0.88, 0.90, 0.92]) * down).astype(np.float32)
    canvas = np.repeat(canvas, SCENE_PX, axis=1)
    canvas += 0.12 * np.clip(_noise(rng, (3, 2), 4), 0, 1)[..., None]
    tops = rng.uniform(0.1, 0.6) * SCENE_PX + 45 * _noise(rng, (1, 5), 4)[0]
    leaf = np.array([0.28, 0.38, 0.19]) * rng.uniform(0.5, 1.15) + rng.normal(0, 0.04, 3)
    leaves = _noise(rng, (14, 14), 4)
    foliage = leaf * (1.0 + 0.65 * leaves[..., None])
    below = (np.arange(SCENE_PX)[:, None] > tops[None, :] + 14 * leaves)[..., None]
    canvas = np.where(below, np.clip(foliage, 0.02, 1), canvas).astype(np.float32)
    ground = float(rng.uniform(0.65, 1.0)) * SCENE_PX
    soil = _colour(rng, 0.25, 0.6, 0.25) * (1.0 + 0.25 * _noise(rng, (24, 10), 4)[..., None])
    canvas[int(ground) :] = soil[int(ground) :]
    return np.clip(canvas, 0, 1)


def _desk(rng: np.random.Generator) -> Pixels:
    """A table top full of things, seen from above."""
    canvas = _wood(rng) if rng.random() < 0.5 else _flat(_colour(rng))
    _clutter(rng, canvas, int(rng.integers(9, 22)), (20, 110), 0.0)
    return canvas


def _wall(rng: np.random.Generator) -> Pixels:
    """Bricks, tiles or plaster."""
    base = _colour(rng, 0.2, 0.85, 0.35)
    canvas = _flat(np.clip(base * 0.7, 0, 1))
    if rng.random() < 0.7:
        width, height = float(rng.uniform(30, 90)), float(rng.uniform(16, 60))
        shift = 0.5 if rng.random() < 0.6 else 0.0
        for row in range(int(SCENE_PX / height) + 2):
            for column in range(-1, int(SCENE_PX / width) + 2):
                x, y = (column + shift * (row % 2)) * width, row * height
                _fill(canvas, x, y, width - 4, height - 4, np.clip(base * rng.uniform(0.8, 1.2), 0, 1))
    canvas *= 1.0 + 0.10 * _noise(rng, (5, 5), 6)[..., None]
    return np.clip(canvas, 0, 1)


def _fabric(rng: np.random.Generator) -> Pixels:
    """Plaid, stripes or dots on cloth with folds."""
    across = np.arange(SCENE_PX, dtype=np.float32)
    first, second, third = (_colour(rng, saturation=0.8) for _ in range(3))
    period = float(rng.uniform(14, 70))
    warp = 7.0 * _noise(rng, (2, 2), 2)
    columns = np.sin((across[None, :] + warp) * (2 * np.pi / period))
    rows = np.sin((across[:, None] + warp) * (2 * np.pi / period))
    style = int(rng.integers(3))
    share = [(columns > 0.3) * 0.6 + (rows > 0.3) * 0.4, columns > 0, columns * rows > 0.4][style]
    canvas = first + np.asarray(share, np.float32)[..., None] * (second - first)
    if style == 0:
        canvas = np.where((np.abs(columns) < 0.08)[..., None], third, canvas)
    return np.asarray(np.clip(canvas * (1.0 + 0.22 * _noise(rng, (3, 2), 2))[..., None], 0, 1), dtype=np.float32)
