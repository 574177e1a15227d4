"""Gaussian noise of a view's pixels, bit by bit the same on every backend and device.

The noise of a pixel is a function of seed, epoch, position, view and pixel: the view's draws hold a 32-bit key, a hash
of the pixel's number and the key picks one of the quantiles of a normal distribution, rounded to whole levels. All of
it is integer arithmetic, in Numba on the fast path and in DALI's own in the graph.
"""

from __future__ import annotations

import functools
from statistics import NormalDist
from typing import Any

import numpy as np
import numpy.typing as npt

QUANTILE_BITS = 12
"""4096 quantiles: they end at 3.7 standard deviations, and 25 levels of deviation are rounded coarser than that."""

SHIFTS, FACTORS = (16, 15, 16), (0x7FEB352D, 0x846CA68B)
"""Of the hash: Wellons' "lowbias32", found by a search for little bias between bits of argument and result."""

_U32 = np.uint32


def mix(number: Any) -> Any:
    """The hash, a bijection of 32-bit numbers: of a uint32, or of an array of them.

    Numba compiles this very function for the fast path.
    """
    number = _U32(number ^ (number >> _U32(SHIFTS[0])))
    number = _U32(number * _U32(FACTORS[0]))
    number = _U32(number ^ (number >> _U32(SHIFTS[1])))
    number = _U32(number * _U32(FACTORS[1]))
    return _U32(number ^ (number >> _U32(SHIFTS[2])))


@functools.cache
def pixel_hashes(side_px: int) -> npt.NDArray[np.uint32]:
    """Hash of each pixel's number in a view: (S, S, 3). What a view's key is mixed with before the second hash.

    Without this first hash, views whose keys are near each other would have the same noise, shifted.
    """
    hashes: npt.NDArray[np.uint32] = mix(np.arange(3 * side_px**2, dtype=np.uint32))
    return hashes.reshape(side_px, side_px, 3)


@functools.cache
def noise_levels(std: float) -> npt.NDArray[np.int16]:
    """The (2 ** QUANTILE_BITS,) quantiles, in whole 8-bit levels."""
    count = 2**QUANTILE_BITS
    standard = NormalDist()
    return np.array([round(std * standard.inv_cdf((number + 0.5) / count)) for number in range(count)], np.int16)
