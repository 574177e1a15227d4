"""The further augmentations on the CPU's fast path, in place, one view after the other; compiled by Numba at first use.

Float32, in rows that the compiler can vectorise.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from pipelines.draws import GREY, Draw
from pipelines.kernels import compiled
from pipelines.noise import QUANTILE_BITS, mix

Views = npt.NDArray[np.uint8]
View = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]

F, U32 = np.float32, np.uint32

RED, GREEN, BLUE = (F(weight) for weight in GREY)

# Numba takes plain whole numbers from the module.
_SOBEL, _BLUR, _NOISE, _COLOUR_DROP = int(Draw.SOBEL), int(Draw.BLUR), int(Draw.NOISE), int(Draw.COLOUR_DROP)
_BLUR_SIGMA_PX, _KEY_HIGH, _KEY_LOW = int(Draw.BLUR_SIGMA_PX), int(Draw.NOISE_KEY_HIGH), int(Draw.NOISE_KEY_LOW)
_CUT_OUT, _CUT_PX, _LEFT_PX = int(Draw.CUT_OUT), int(Draw.CUT_OUT_SIDE_PX), int(Draw.CUT_OUT_LEFT_PX)
_TOP_PX, _GREY = int(Draw.CUT_OUT_TOP_PX), int(Draw.CUT_OUT_GREY)
_TO_QUANTILE = U32(32 - QUANTILE_BITS)

_mix = compiled(mix)


@compiled
def _mirrored(at: int, count: int) -> int:
    """The index inside that an index outside mirrors at the border's pixel, which is not repeated."""
    at = abs(at) % (2 * count - 2)
    return min(at, 2 * count - 2 - at)


@compiled
def _sobel(view: View, grey: Floats) -> None:
    """Length of the grey's Sobel gradient; `grey` is (S + 2, S + 2), for what a mirrored view's grey is."""
    side = len(view)
    for y in range(side):
        for x in range(side):
            grey[y + 1, x + 1] = RED * F(view[y, x, 0]) + GREEN * F(view[y, x, 1]) + BLUE * F(view[y, x, 2])
        grey[y + 1, 0], grey[y + 1, side + 1] = grey[y + 1, 2], grey[y + 1, side - 1]
    grey[0], grey[side + 1] = grey[2], grey[side - 1]
    for y in range(side):
        above, here, below = grey[y], grey[y + 1], grey[y + 2]
        for x in range(side):
            across = above[x + 2] - above[x] + F(2) * (here[x + 2] - here[x]) + below[x + 2] - below[x]
            down = below[x] - above[x] + F(2) * (below[x + 1] - above[x + 1]) + below[x + 2] - above[x + 2]
            length = np.uint8(min(np.sqrt(across * across + down * down), F(255)) + F(0.5))
            view[y, x, 0] = length
            view[y, x, 1] = length
            view[y, x, 2] = length


@compiled
def _blur(view: View, sigma_px: float, rows: Floats, wide: Floats, total: Floats) -> None:
    """Blur by a Gaussian, first along the rows, then down the columns.

    Args:
        view: (S, S, 3).
        sigma_px: its standard deviation.
        rows: (S, 3 S), for the view blurred along its rows.
        wide: (3 S + 6 R,), for a mirrored row; R is the longest reach, ceil(3 sigma).
        total: (3 S,), for the sum of a row.
    """
    side = len(view)
    radius = math.ceil(3 * sigma_px)
    taps = np.empty(2 * radius + 1, F)
    for tap in range(2 * radius + 1):
        taps[tap] = math.exp(-(((tap - radius) / sigma_px) ** 2) / 2)
    taps /= taps.sum()
    for y in range(side):
        for x in range(radius):
            left, right = _mirrored(x - radius, side), _mirrored(side + x, side)
            for channel in range(3):
                wide[3 * x + channel] = F(view[y, left, channel])
                wide[3 * (radius + side + x) + channel] = F(view[y, right, channel])
        row = view[y].reshape(-1)
        for x in range(3 * side):
            wide[3 * radius + x] = F(row[x])
        total[:] = F(0)
        for tap in range(2 * radius + 1):
            weight, shifted = taps[tap], wide[3 * tap : 3 * (tap + side)]
            for x in range(3 * side):
                total[x] += weight * shifted[x]
        rows[y] = total
    for y in range(side):
        total[:] = F(0.5)  # rounds
        for tap in range(2 * radius + 1):
            weight, shifted = taps[tap], rows[_mirrored(y + tap - radius, side)]
            for x in range(3 * side):
                total[x] += weight * shifted[x]
        row = view[y].reshape(-1)
        for x in range(3 * side):
            row[x] = np.uint8(min(total[x], F(255)))


@compiled
def _add_noise(view: View, key: int, hashes: npt.NDArray[np.uint32], levels: npt.NDArray[np.int16]) -> None:
    """Add to each pixel and channel the level that its hash picks."""
    pixels, pixel_hashes = view.reshape(-1), hashes.reshape(-1)
    for at in range(len(pixels)):
        level = levels[_mix(U32(pixel_hashes[at] ^ U32(key))) >> _TO_QUANTILE]
        pixels[at] = np.uint8(min(max(np.int32(pixels[at]) + np.int32(level), np.int32(0)), np.int32(255)))


@compiled
def _drop_colour(view: View) -> None:
    """Replace each pixel by its grey."""
    side = len(view)
    for y in range(side):
        for x in range(side):
            grey = RED * F(view[y, x, 0]) + GREEN * F(view[y, x, 1]) + BLUE * F(view[y, x, 2])
            rounded = np.uint8(grey + F(0.5))
            view[y, x, 0] = rounded
            view[y, x, 1] = rounded
            view[y, x, 2] = rounded


@compiled
def change_views(
    views: Views,
    draws: Floats,
    hashes: npt.NDArray[np.uint32],
    levels: npt.NDArray[np.int16],
    reach_px: int,
    first: int,
    step: int,
) -> None:
    """Augment views `first`, `first + step`, ... of N, in place.

    Args:
        views: (N, S, S, 3) uint8.
        draws: (N, len(Draw)) table of draws.
        hashes: (S, S, 3), `pipelines.noise.pixel_hashes`.
        levels: `pipelines.noise.noise_levels`.
        reach_px: of the widest blur, ceil(3 sigma).
        first: see above.
        step: see above.
    """
    side = views.shape[1]
    grey = np.empty((side + 2, side + 2), F)
    rows, wide, total = np.empty((side, 3 * side), F), np.empty(3 * side + 6 * reach_px, F), np.empty(3 * side, F)
    for n in range(first, len(views), step):
        view, draw = views[n], draws[n]
        if draw[_SOBEL] > 0:
            _sobel(view, grey)
        if draw[_CUT_OUT] > 0:
            left, top, cut = int(draw[_LEFT_PX]), int(draw[_TOP_PX]), int(draw[_CUT_PX])
            view[top : top + cut, left : left + cut] = np.uint8(draw[_GREY])
        if draw[_BLUR] > 0:
            _blur(view, draw[_BLUR_SIGMA_PX], rows, wide, total)
        if draw[_NOISE] > 0:
            _add_noise(view, int(draw[_KEY_HIGH]) << 16 | int(draw[_KEY_LOW]), hashes, levels)
        if draw[_COLOUR_DROP] > 0:
            _drop_colour(view)
