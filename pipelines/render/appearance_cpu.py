"""Applies the augmentations of `views.appearance` on a CPU: by OpenCV, or in loops over pixels that Numba compiles."""

import cv2
import numba
import numpy as np
from numba.extending import register_jitable

from peclr_dali.numba_cache import cached
from peclr_dali.pipelines.arrays import AnyArray, FloatArray, Int32Array, IntArray, PixelArray
from peclr_dali.pipelines.views.appearance import (
    ORDER,
    AppearanceConfig,
    blur_weights,
    grey,
    holes,
    mix,
    noise_keys,
    noise_levels,
    pixel_hashes,
    quantile,
)
from peclr_dali.pipelines.views.columns import Draw

F, I32 = np.float32, np.int32

for _helper in (grey, mix, quantile):  # which the loops below call
    register_jitable(_helper)
compiled = cached(numba.njit, nogil=True, fastmath={"contract"}, error_model="numpy")


def change_views(views: PixelArray, rows: IntArray, draws: FloatArray, appearance: AppearanceConfig) -> None:
    """Apply to some of N views, in place, the augmentations that their draws switch on.

    Args:
        views: (N, S, S, 3).
        rows: (n,) the views to change.
        draws: (N, COLUMNS) table of draws.
        appearance: configuration of the augmentations.
    """
    if not appearance.active:
        return
    for column in ORDER:
        drawn = rows[draws[rows, column] > 0]
        if not len(drawn):
            continue
        match column:
            case Draw.SOBEL:
                _sobel(views, drawn)
            case Draw.CUT_OUT:
                for row, (left, top, side, level) in zip(drawn, holes(draws[drawn]), strict=True):
                    views[row, top : top + side, left : left + side] = level
            case Draw.BLUR:
                _blur(views, drawn, blur_weights(draws[drawn]))
            case Draw.NOISE:
                hashes, levels = pixel_hashes(views.shape[1]), noise_levels(appearance.noise_std)
                _add_noise(views, drawn, noise_keys(draws[drawn]), hashes, levels)
            case Draw.COLOUR_DROP:
                _drop_colour(views, drawn)
            case _:
                raise NotImplementedError(column.name)


def _sobel(views: PixelArray, rows: IntArray) -> None:
    for row in rows:
        greys = cv2.transform(views[row].astype(F), np.array([[299, 587, 114]], F))
        across, down = cv2.Sobel(greys, cv2.CV_32F, 1, 0), cv2.Sobel(greys, cv2.CV_32F, 0, 1)
        # cv2.magnitude would give other bits at other places in memory.
        length = np.sqrt(across * across + down * down) / F(1000) + F(0.5)
        views[row] = cv2.merge([np.minimum(length, F(255)).astype(np.uint8)] * 3)  # broadcasting is slower


def _blur(views: PixelArray, rows: IntArray, weights: FloatArray) -> None:
    for row, padded in zip(rows, weights, strict=True):
        taps = padded[padded > 0]  # a narrower blur has zeros at both ends
        blurred = cv2.sepFilter2D(views[row], cv2.CV_32F, taps, taps, borderType=cv2.BORDER_REFLECT_101)
        views[row] = (blurred + F(0.5)).astype(np.uint8)


@compiled
def _add_noise(views: PixelArray, rows: IntArray, keys: Int32Array, hashes: Int32Array, levels: AnyArray) -> None:
    pixel_hash = hashes.reshape(-1)
    for m in range(len(rows)):
        pixels = views[rows[m]].reshape(-1)
        for at in range(len(pixels)):
            level = I32(pixels[at]) + I32(levels[quantile(pixel_hash[at], keys[m])])
            pixels[at] = np.uint8(min(max(level, I32(0)), I32(255)))


@compiled
def _drop_colour(views: PixelArray, rows: IntArray) -> None:
    for row in rows:
        pixels = views[row].reshape(-1, 3)
        for at in range(len(pixels)):
            level = np.uint8(grey(F(pixels[at, 0]), F(pixels[at, 1]), F(pixels[at, 2])) / F(1000) + F(0.5))
            pixels[at, 0], pixels[at, 1], pixels[at, 2] = level, level, level
