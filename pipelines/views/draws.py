"""Augmentation parameters as a pure function of (seed, epoch, place in the epoch, view).

They do not depend on rank, worker, world size, device or interruptions: NumPy's counter-based Philox is advanced to the
place, and every view consumes a fixed number of draws. A new augmentation takes a free column and does not change the
others.
"""

from __future__ import annotations

from enum import IntEnum

import numpy as np

from pipelines.arrays import DoubleArray, FloatArray, IntArray
from pipelines.randomness import Stream, philox
from pipelines.views.augmentation import AppearanceConfig, Augmentation, GeometryConfig, Range

UNIFORMS_PER_VIEW = 32
"""Uniform numbers reserved for one view of one sample; a multiple of Philox's block of four."""

_PHILOX_BLOCK = 4


class Draw(IntEnum):
    """Columns of the table of draws."""

    ANGLE_DEG = 0
    SHIFT_X_FRAC = 1
    SHIFT_Y_FRAC = 2
    MAGNIFICATION = 3
    HUE = 4
    SATURATION = 5
    VALUE_SCALE = 6
    VALUE_SHIFT = 7
    COLOUR_DROP = 8  # 1 if applied, else 0; the same for SOBEL, CUT_OUT, BLUR, NOISE and CROP
    SOBEL = 9
    CUT_OUT = 10
    CUT_OUT_SIDE_PX = 11  # whole pixels of the view, so that every backend cuts out the same pixels
    CUT_OUT_LEFT_PX = 12
    CUT_OUT_TOP_PX = 13
    CUT_OUT_GREY = 14
    BLUR = 15
    BLUR_SIGMA_PX = 16
    NOISE = 17
    NOISE_KEY_HIGH = 18  # 16 bits each: float32 holds them exactly
    NOISE_KEY_LOW = 19
    CROP = 20
    CROP_SIDE_FRAC = 21
    CROP_X_FRAC = 22  # centre of the crop, from the centre of the canonical view, as a fraction of its side
    CROP_Y_FRAC = 23


def _uniforms(seed: int, epoch: int, view: int, places: IntArray) -> DoubleArray:
    """Uniform numbers in [0, 1) at `places` (N,): (N, UNIFORMS_PER_VIEW).

    The generator is called once for each run of consecutive places; a batch has one or a few runs.
    """
    out = np.empty((len(places), UNIFORMS_PER_VIEW))
    starts = np.flatnonzero(np.diff(places, prepend=-2) != 1)
    for start, stop in zip(starts, [*starts[1:], len(places)], strict=True):
        bits = philox(seed, Stream.VIEW, epoch=epoch, view=view)
        bits.advance(int(places[start]) * UNIFORMS_PER_VIEW // _PHILOX_BLOCK)
        np.random.Generator(bits).random(out=out[start:stop])
    return out


def draw_view(augmentation: Augmentation, *, seed: int, epoch: int, view: int, places: IntArray) -> FloatArray:
    """Draw the augmentations of one view at `places` (N,) of an epoch.

    Returns:
        (N, len(Draw)) float32 with the columns of `Draw`. Columns of an augmentation that is off are 0.
    """
    geometry, colour, appearance = augmentation.geometry, augmentation.colour, augmentation.appearance
    uniform = _uniforms(seed, epoch, view, places)
    shift = geometry.translation_frac
    ranges: dict[Draw, Range] = {
        Draw.ANGLE_DEG: geometry.rotation_deg,
        Draw.SHIFT_X_FRAC: (-shift, shift),
        Draw.SHIFT_Y_FRAC: (-shift, shift),
        Draw.MAGNIFICATION: geometry.scale,
        Draw.HUE: colour.hue,
        Draw.SATURATION: colour.saturation,
        Draw.VALUE_SCALE: colour.value_scale,
        Draw.VALUE_SHIFT: colour.value_shift,
    }
    if colour.shared_factor:
        uniform[:, Draw.SATURATION] = uniform[:, Draw.HUE]
    table = np.zeros((len(places), len(Draw)))
    low, high = np.array(list(ranges.values())).T
    table[:, : len(ranges)] = low + (high - low) * uniform[:, : len(ranges)]
    if geometry.scale_is == "margin":
        table[:, Draw.MAGNIFICATION] = 1 / table[:, Draw.MAGNIFICATION]
    if geometry.crop_probability > 0:
        _draw_crop(geometry, uniform, table)
    if appearance.active:
        _draw_appearance(appearance, geometry.side_px, uniform, table)
    return table.astype(np.float32)


def _draw_crop(geometry: GeometryConfig, uniform: DoubleArray, table: DoubleArray) -> None:
    """Fill the columns of the crop."""
    low, high = geometry.crop_side_frac
    side = low + (high - low) * uniform[:, Draw.CROP_SIDE_FRAC]
    table[:, Draw.CROP] = uniform[:, Draw.CROP] < geometry.crop_probability
    table[:, Draw.CROP_SIDE_FRAC] = side
    for centre in (Draw.CROP_X_FRAC, Draw.CROP_Y_FRAC):
        table[:, centre] = (1 - side) * (uniform[:, centre] - 0.5)


def _draw_appearance(appearance: AppearanceConfig, side_px: int, uniform: DoubleArray, table: DoubleArray) -> None:
    """Fill the columns of the further augmentations."""
    for column, probability in (
        (Draw.SOBEL, appearance.sobel_probability),
        (Draw.CUT_OUT, appearance.cut_out_probability),
        (Draw.BLUR, appearance.blur_probability),
        (Draw.NOISE, appearance.noise_probability),
        (Draw.COLOUR_DROP, appearance.colour_drop_probability),
    ):
        table[:, column] = uniform[:, column] < probability
    low, high = appearance.cut_out_side_frac
    side = np.rint(side_px * (low + (high - low) * uniform[:, Draw.CUT_OUT_SIDE_PX]))
    table[:, Draw.CUT_OUT_SIDE_PX] = side
    for corner in (Draw.CUT_OUT_LEFT_PX, Draw.CUT_OUT_TOP_PX):
        table[:, corner] = np.floor((side_px - side + 1) * uniform[:, corner])
    low, high = appearance.blur_sigma_px
    table[:, Draw.BLUR_SIGMA_PX] = low + (high - low) * uniform[:, Draw.BLUR_SIGMA_PX]
    table[:, Draw.CUT_OUT_GREY] = np.floor(256 * uniform[:, Draw.CUT_OUT_GREY])
    for half in (Draw.NOISE_KEY_HIGH, Draw.NOISE_KEY_LOW):
        table[:, half] = np.floor(2**16 * uniform[:, half])
