"""Makes the bytes of a photograph from a lit rendering and a scene: composition, lens, sensor, JPEG."""

import cv2
import numpy as np
from numpy.typing import NDArray

from peclr_dali.synthetic.hand import SIDE_PX
from peclr_dali.synthetic.light import shade
from peclr_dali.synthetic.poses import Floats, Pixels
from peclr_dali.synthetic.render import Rendering
from peclr_dali.synthetic.scenes import SCENE_PX, Scene
from peclr_dali.synthetic.surface import to_linear

_LEVELS = 4096
_LINEAR = to_linear(np.arange(256) / 255.0).astype(np.float32)
_linear = np.arange(_LEVELS) / (_LEVELS - 1)
_DISPLAY = np.asarray(
    255 * np.where(_linear <= 0.0031308, 12.92 * _linear, 1.055 * _linear ** (1 / 2.4) - 0.055), np.float32
)


def take_photo(rng: np.random.Generator, rendering: Rendering, intrinsics: Floats, scene: Scene) -> bytes:
    """A JPEG of the hand, rendered through `intrinsics` (3, 3), in a scene.

    Crop of the scene, occluder, blur, noise and JPEG quality are random.
    """
    front = shade(rendering, scene.light, intrinsics)
    zoom = float(rng.uniform(0.7, 1.1))
    left, top = rng.uniform(0, max(SCENE_PX - SIDE_PX / zoom, 0.0), 2)
    matrix = np.array([[zoom, 0.0, -left * zoom], [0.0, zoom, -top * zoom]])
    crop = cv2.warpAffine(scene.picture, matrix, (SIDE_PX, SIDE_PX), borderMode=cv2.BORDER_REFLECT_101)
    picture: Pixels = np.asarray(_LINEAR[crop])
    if rng.random() < 0.06:
        front = _pass_in_front(rng, front)
    if rng.random() < 0.15:
        front = np.asarray(cv2.filter2D(front, -1, _motion_kernel(rng)), dtype=np.float32)
    if scene.wall > 0:
        picture *= (1.0 - scene.wall * _cast_shadow(front[..., 3], scene.light.direction))[..., None]
    picture *= 1.0 - front[..., 3:]
    picture += front[..., :3]
    picture *= np.float32(2.0 ** rng.normal(0.0, 0.2))
    return _develop(rng, np.asarray(cv2.GaussianBlur(picture, (5, 5), float(rng.uniform(0.35, 0.85))), np.float32))


def _cast_shadow(coverage: Pixels, to_light: Floats) -> Pixels:
    """Soft shadow of the hand on the background, 0 to 1."""
    small = cv2.resize(coverage, (SIDE_PX // 4, SIDE_PX // 4), interpolation=cv2.INTER_AREA)
    offset_px = -5.0 * to_light[:2] / max(-float(to_light[2]), 0.35)
    matrix = np.array([[1.0, 0.0, offset_px[0]], [0.0, 1.0, offset_px[1]]])
    small = cv2.GaussianBlur(cv2.warpAffine(small, matrix, small.shape[::-1]), (0, 0), 2.0)
    return np.asarray(cv2.resize(small, (SIDE_PX, SIDE_PX), interpolation=cv2.INTER_LINEAR))


def _pass_in_front(rng: np.random.Generator, front: Pixels) -> Pixels:
    """Draw a blurred rod or blob close to the lens, which hides a part of the hand."""
    mask = np.zeros((SIDE_PX, SIDE_PX), np.float32)
    x, y = rng.normal(SIDE_PX / 2, 38.0, 2)
    angle = float(rng.uniform(0, np.pi))
    if rng.random() < 0.6:
        reach = np.array([np.cos(angle), np.sin(angle)]) * SIDE_PX * 1.5
        start, end = ((np.array([x, y]) + sign * reach).astype(int).tolist() for sign in (-1, 1))
        cv2.line(mask, start, end, [1.0], int(rng.integers(8, 24)), cv2.LINE_AA)
    else:
        axes = rng.uniform(14, 36, 2).astype(int).tolist()
        cv2.ellipse(mask, [int(x), int(y)], axes, float(np.rad2deg(angle)), 0, 360, [1.0], -1, cv2.LINE_AA)
    mask = np.asarray(cv2.GaussianBlur(mask, (0, 0), float(rng.uniform(0.8, 2.5))), dtype=np.float32)
    colour = to_linear(rng.uniform(0.05, 0.9, 3)).astype(np.float32)
    # Round things are darker towards their edges, and below.
    depth = cv2.GaussianBlur(mask, (0, 0), 7.0)
    relief = depth - np.roll(depth, 6, axis=0) * np.float32(0.6)
    lit = (np.float32(0.25) + np.float32(1.1) * np.clip(relief, 0.0, 0.7))[..., None]
    hidden = front * (1 - mask[..., None])
    hidden[..., :3] += mask[..., None] * colour * lit
    hidden[..., 3] += mask
    return hidden


def _motion_kernel(rng: np.random.Generator) -> Pixels:
    """A straight streak of 2 to 8 pixels, centred: the keypoints stay in its middle."""
    length, angle = float(rng.uniform(2, 8)), float(rng.uniform(0, np.pi))
    reach = np.array([np.cos(angle), np.sin(angle)]) * (length / 2)
    streak = np.zeros((11, 11), np.float32)
    start, end = (np.round((5.0 + sign * reach) * 16).astype(int).tolist() for sign in (-1, 1))
    cv2.line(streak, start, end, [1.0], 1, cv2.LINE_AA, 4)
    streak += streak[::-1, ::-1]
    return np.asarray(streak / streak.sum())


def _develop(rng: np.random.Generator, linear: Pixels) -> bytes:
    """Develop: compress highlights, add shot and read noise, apply the display curve, encode as JPEG."""
    shot, read = float(rng.uniform(0.001, 0.014)), float(rng.uniform(0.0005, 0.004))
    linear = np.clip(linear, 0.0, 4.0)
    noise = rng.standard_normal(linear.shape, dtype=np.float32)
    linear = linear + noise * np.sqrt(np.float32(shot * shot) * linear + np.float32(read * read))
    # A soft shoulder above 0.7 instead of clipped skin.
    over = np.maximum(linear - np.float32(0.7), 0.0)
    linear = np.minimum(linear, np.float32(0.7)) + np.float32(0.3) * over / (over + np.float32(0.3))
    level = (np.clip(linear, 0.0, 1.0) * np.float32(_LEVELS - 1)).astype(np.uint16)
    picture: NDArray[np.uint8] = np.round(_DISPLAY[level]).astype(np.uint8)
    written, data = cv2.imencode(".jpg", picture[..., ::-1], [cv2.IMWRITE_JPEG_QUALITY, int(rng.integers(70, 97))])
    assert written
    return data.tobytes()
