"""The further augmentations: finished views in, finished views out, on any device.

`pipelines.views.augmentation.AppearanceConfig` says what they are and in which order they come (paper, Fig. 5 and 6).
On a CPU, Numba compiles the loops over a view's pixels; on a GPU, torch computes with tensors of many views. The
arithmetic of a pixel is written once for both, and so are the tables that it needs. A view has the same bits in any
batch: nothing is summed over views. Greys and noise are whole-number arithmetic, the same on every device.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from statistics import NormalDist
from typing import Any, Final, TypeVar

import numba
import numpy as np
import numpy.typing as npt
import torch
from numba.extending import register_jitable
from torch import Tensor
from torch.nn import functional

from machine.compiled import cached
from pipelines.arrays import FloatArray, IntArray
from pipelines.views.augmentation import AppearanceConfig
from pipelines.views.draws import Draw

Views = npt.NDArray[np.uint8]
Int32Array = npt.NDArray[np.int32]
Tables = tuple[Tensor, ...]
Function = TypeVar("Function", bound=Callable[..., object])

QUANTILE_BITS: Final = 12
"""4096 quantiles: they end at 3.7 standard deviations, and 25 levels of deviation are rounded coarser than that."""

_AT_ONCE: Final = 64
"""Views that are changed together."""

_IN_LOOPS = frozenset({"cpu"})
"""Devices whose views are changed in loops. Tests empty it, and hold the arithmetic of a GPU to the oracle."""

F, I32 = np.float32, np.int32
_pixelwise: Callable[[Function], Function] = register_jitable  # for numbers in loops, or for tensors
_loops: Callable[[Function], Function] = cached(numba.njit, nogil=True, fastmath={"contract"}, error_model="numpy")


def change_appearance(
    views: Tensor, draws: FloatArray, appearance: AppearanceConfig, share: slice = slice(None)
) -> None:
    """Augment those of N views, in place, that the draws name.

    Args:
        views: (N, S, S, 3) uint8, contiguous.
        draws: (N, len(Draw)) table of draws.
        appearance: which augmentations.
        share: which of the views to look at.
    """
    if not appearance.active:
        return
    looked_at = np.arange(len(views))[share]
    for column, (tables_of, change, change_tensors) in _CHANGES.items():
        drawn = looked_at[draws[looked_at, column] > 0]
        for start in range(0, len(drawn), _AT_ONCE):
            rows = drawn[start : start + _AT_ONCE]
            tables = tables_of(draws[rows], views.shape[1], appearance.noise_std, views.device)
            if views.device.type in _IN_LOOPS:
                change(views.numpy(), rows, *(table.numpy() for table in tables))
            else:
                at = torch.from_numpy(rows).to(views.device)
                views[at] = change_tensors(views[at], *tables)


def _to_8_bits(values: Tensor) -> Tensor:
    """Rounds numbers of at least 0, in place, and clips them."""
    return values.add_(0.5).clamp_(max=255).to(torch.uint8)


@_pixelwise
def _grey(red: Any, green: Any, blue: Any) -> Any:
    """In thousandths of a level: whole numbers, which float32 holds. Weights of ITU-R BT.601, as OpenCV's."""
    return red * F(299) + green * F(587) + blue * F(114)


@_loops
def _drop_colour(views: Views, rows: IntArray) -> None:
    for n in rows:
        pixels = views[n].reshape(-1, 3)
        for at in range(len(pixels)):
            level = np.uint8(_grey(F(pixels[at, 0]), F(pixels[at, 1]), F(pixels[at, 2])) / F(1000) + F(0.5))
            pixels[at, 0], pixels[at, 1], pixels[at, 2] = level, level, level


def _drop_colour_of_tensors(views: Tensor) -> Tensor:
    return _to_8_bits(_grey(*views.unbind(3)) / 1000)[..., None]


@_pixelwise
def _squared_slope(a: Any, b: Any, c: Any, d: Any, f: Any, g: Any, h: Any, i: Any) -> Any:
    """Of greys a b c above a pixel, d and f beside it and g h i below: squared length of the 3 x 3 Sobel gradient."""
    across, down = c - a + i - g + (f - d) * F(2), g - a + i - c + (h - b) * F(2)
    return across * across + down * down


@_loops
def _sobel(views: Views, rows: IntArray) -> None:
    side = views.shape[1]
    grey = np.empty((side + 2, side + 2), F)  # mirrored at the border
    for n in rows:
        view = views[n]
        for y in range(side):
            for x in range(side):
                grey[y + 1, x + 1] = _grey(F(view[y, x, 0]), F(view[y, x, 1]), F(view[y, x, 2]))
            grey[y + 1, 0], grey[y + 1, side + 1] = grey[y + 1, 2], grey[y + 1, side - 1]
        grey[0], grey[side + 1] = grey[2], grey[side - 1]
        for y in range(side):
            p, q, r = grey[y], grey[y + 1], grey[y + 2]
            for x in range(side):
                squared = _squared_slope(p[x], p[x + 1], p[x + 2], q[x], q[x + 2], r[x], r[x + 1], r[x + 2])
                level = np.uint8(min(np.sqrt(squared) / F(1000) + F(0.5), F(255)))
                view[y, x, 0], view[y, x, 1], view[y, x, 2] = level, level, level


def _sobel_of_tensors(views: Tensor) -> Tensor:
    side = views.shape[1]
    grey = functional.pad(_grey(*views.unbind(3)), (1, 1, 1, 1), mode="reflect")
    around = [(y, x) for y in range(3) for x in range(3) if (y, x) != (1, 1)]
    squared = _squared_slope(*(grey[:, y : y + side, x : x + side] for y, x in around))
    return _to_8_bits(squared.sqrt_().div_(1000))[..., None]


def _hole_tables(draws: FloatArray, _: int, __: float, device: torch.device) -> Tables:
    columns = [Draw.CUT_OUT_LEFT_PX, Draw.CUT_OUT_TOP_PX, Draw.CUT_OUT_SIDE_PX, Draw.CUT_OUT_GREY]
    return (torch.from_numpy(draws[:, columns].astype(np.int32)).to(device),)


@_loops
def _cut_out(views: Views, rows: IntArray, holes: Int32Array) -> None:
    for m in range(len(rows)):
        left, top, side, grey = holes[m, 0], holes[m, 1], holes[m, 2], holes[m, 3]
        views[rows[m], top : top + side, left : left + side] = grey


def _cut_out_of_tensors(views: Tensor, holes: Tensor) -> Tensor:
    left, top, side, grey = holes[:, :, None, None, None].unbind(1)
    at = torch.arange(views.shape[1], device=views.device)
    x, y = at[:, None] - left, at[:, None, None] - top
    return torch.where((x >= 0) & (x < side) & (y >= 0) & (y < side), grey, views).to(torch.uint8)


def _blur_tables(draws: FloatArray, side_px: int, _: float, device: torch.device) -> Tables:
    """Gaussians that end at ceil(3 sigma), and rows that are mirrored at both ends.

    Returns:
        (N, 2 R + 1) weights, R being the farthest end; and (S + 2 R,) which pixel stands where in a row.
    """
    sigma_px = draws[:, [Draw.BLUR_SIGMA_PX]].astype(np.float64)
    reach_px = np.ceil(3 * sigma_px)
    longest_px = int(reach_px.max())
    taps_px = np.arange(-longest_px, longest_px + 1)
    weights = np.exp(-((taps_px / sigma_px) ** 2) / 2) * (np.abs(taps_px) <= reach_px)
    weights /= weights.sum(axis=1, keepdims=True)
    mirrored = np.abs(np.arange(-longest_px, side_px + longest_px)) % (2 * side_px - 2)
    mirrored = np.minimum(mirrored, 2 * side_px - 2 - mirrored)
    return torch.from_numpy(weights.astype(np.float32)).to(device), torch.from_numpy(mirrored).to(device)


@_loops
def _blur(views: Views, rows: IntArray, weights: FloatArray, mirrored: IntArray) -> None:
    """First along the rows, then down the columns."""
    side, long, reach = views.shape[1], len(mirrored), weights.shape[1] // 2
    wide, blurred, total = np.empty(3 * long, F), np.empty((long, 3 * side), F), np.empty(3 * side, F)
    for m in range(len(rows)):
        view = views[rows[m]]
        for y in range(long):
            row = view[mirrored[y]]
            wide[3 * reach : 3 * (reach + side)] = row.reshape(-1)
            for x in range(reach):
                for channel in range(3):
                    wide[3 * x + channel] = row[mirrored[x], channel]
                    wide[3 * (reach + side + x) + channel] = row[mirrored[reach + side + x], channel]
            _weigh(wide, 3, weights[m], blurred[y])
        for y in range(side):
            _weigh(blurred[y:].reshape(-1), 3 * side, weights[m], total)
            row = view[y].reshape(-1)
            for x in range(3 * side):
                row[x] = np.uint8(min(total[x] + F(0.5), F(255)))


@_loops
def _weigh(values: FloatArray, step: int, weights: FloatArray, total: FloatArray) -> None:
    """Sum up neighbours, which lie `step` apart, of as many values as the total has."""
    total[:] = F(0)
    for tap in range(len(weights)):
        weight, shifted = weights[tap], values[step * tap : step * tap + len(total)]
        if weight > 0:  # a narrower blur has zeros at both ends
            for x in range(len(total)):
                total[x] += weight * shifted[x]


def _blur_of_tensors(views: Tensor, weights: Tensor, mirrored: Tensor) -> Tensor:
    blurred = views.float()
    for axis in (2, 1):
        wide = blurred.index_select(axis, mirrored)
        blurred = torch.zeros_like(blurred)
        for tap in range(weights.shape[1]):
            blurred.addcmul_(wide.narrow(axis, tap, views.shape[1]), weights[:, tap, None, None, None])
    return _to_8_bits(blurred)


def _noise_tables(draws: FloatArray, side_px: int, std: float, device: torch.device) -> Tables:
    """(N,) keys of the views, (S, S, 3) hashes of the pixels, and the quantiles."""
    halves = draws[:, [Draw.NOISE_KEY_HIGH, Draw.NOISE_KEY_LOW]].astype(np.uint32)
    keys = (halves[:, 0] << 16 | halves[:, 1]).view(np.int32)
    return (
        torch.from_numpy(keys).to(device),
        _pixel_hashes(side_px, device),
        torch.from_numpy(noise_levels(std)).to(device),
    )


@_pixelwise
def _mix(number: Any) -> Any:
    """Wellons' "lowbias32", a bijection of 32-bit numbers with little bias between bits of argument and result.

    Torch has no unsigned arithmetic. The lower 32 bits of signed numbers are the same: products wrap as C's do.
    """
    number = (number ^ number >> 16 & 0xFFFF) * 0x7FEB352D
    number = (number ^ number >> 15 & 0x1FFFF) * (0x846CA68B - 2**32)
    return number ^ number >> 16 & 0xFFFF


@functools.cache
def _pixel_hashes(side_px: int, device: torch.device) -> Tensor:
    """(S, S, 3). Without them, views whose keys are near each other would have the same noise, shifted."""
    hashes: Tensor = _mix(torch.arange(3 * side_px**2, dtype=torch.int32, device=device))
    return hashes.view(side_px, side_px, 3)


@functools.cache
def noise_levels(std: float) -> np.ndarray[tuple[int], np.dtype[np.int16]]:
    """The (2 ** QUANTILE_BITS,) quantiles of a normal distribution, in whole 8-bit levels."""
    count = 2**QUANTILE_BITS
    standard = NormalDist()
    return np.array([round(std * standard.inv_cdf((number + 0.5) / count)) for number in range(count)], np.int16)


@_pixelwise
def _quantile(pixel_hash: Any, key: Any) -> Any:
    """Number of the quantile that a pixel and channel gets in the view of that key."""
    return _mix(pixel_hash ^ key) >> 32 - QUANTILE_BITS & 2**QUANTILE_BITS - 1


@_loops
def _add_noise(
    views: Views, rows: IntArray, keys: Int32Array, hashes: Int32Array, levels: npt.NDArray[np.int16]
) -> None:
    pixel_hashes = hashes.reshape(-1)
    for m in range(len(rows)):
        pixels = views[rows[m]].reshape(-1)
        for at in range(len(pixels)):
            level = I32(pixels[at]) + I32(levels[_quantile(pixel_hashes[at], keys[m])])
            pixels[at] = np.uint8(min(max(level, I32(0)), I32(255)))


def _add_noise_to_tensors(views: Tensor, keys: Tensor, hashes: Tensor, levels: Tensor) -> Tensor:
    quantiles = _quantile(hashes, keys[:, None, None, None])
    return levels.index_select(0, quantiles.view(-1)).view(views.shape).add_(views).clamp_(0, 255).to(torch.uint8)


_CHANGES: Final[dict[Draw, tuple[Callable[..., Tables], Callable[..., None], Callable[..., Tensor]]]] = {
    Draw.SOBEL: (lambda *_: (), _sobel, _sobel_of_tensors),
    Draw.CUT_OUT: (_hole_tables, _cut_out, _cut_out_of_tensors),
    Draw.BLUR: (_blur_tables, _blur, _blur_of_tensors),
    Draw.NOISE: (_noise_tables, _add_noise, _add_noise_to_tensors),
    Draw.COLOUR_DROP: (lambda *_: (), _drop_colour, _drop_colour_of_tensors),
}
"""In the order of their composition: tables of the drawn views, the change in loops, and that of tensors."""
