"""The further augmentations: finished views in, finished views out, on any device.

`pipelines.views.augmentation.AppearanceConfig` says what they are and in which order they come (paper, Fig. 5 and 6).
A view has the same bits in any batch: nothing is summed over views. The noise is whole-number arithmetic, and has the
same bits on every device.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from statistics import NormalDist
from typing import Final

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from pipelines.arrays import FloatArray
from pipelines.views.augmentation import GREY, AppearanceConfig
from pipelines.views.draws import Draw

QUANTILE_BITS: Final = 12
"""4096 quantiles: they end at 3.7 standard deviations, and 25 levels of deviation are rounded coarser than that."""

_AT_ONCE: Final = {"cpu": 1, "cuda": 64}
"""Views that are changed together: on a CPU one, which stays in its caches."""


def change_appearance(views: Tensor, draws: FloatArray, appearance: AppearanceConfig) -> None:
    """Augment those of N views, in place, that the draws name.

    Args:
        views: (N, S, S, 3) uint8.
        draws: (N, len(Draw)) table of draws.
        appearance: which augmentations.
    """
    if not appearance.active:
        return
    at_once = _AT_ONCE[views.device.type]
    for column, change in _CHANGES.items():
        drawn = np.flatnonzero(draws[:, column])
        for start in range(0, len(drawn), at_once):
            rows = drawn[start : start + at_once]
            # One view is changed where it lies; of several, a copy is.
            at = slice(rows[0], rows[0] + 1) if at_once == 1 else torch.from_numpy(rows).to(views.device)
            views[at] = change(views[at], draws[rows], appearance)


def _grey(views: Tensor) -> Tensor:
    """(N, S, S) float, not rounded."""
    red, green, blue = views.unbind(3)
    return (red * GREY[0]).add_(green, alpha=GREY[1]).add_(blue, alpha=GREY[2])


def _to_8_bits(values: Tensor) -> Tensor:
    """Rounds numbers of at least 0, in place, and clips them."""
    return values.add_(0.5).clamp_(max=255).to(torch.uint8)


def _sobel(views: Tensor, _: FloatArray, __: AppearanceConfig) -> Tensor:
    """Length of the grey's 3 x 3 Sobel gradient, mirrored at the border."""
    grey = F.pad(_grey(views), (1, 1, 1, 1), mode="reflect")
    across, down = grey[:, :, 2:] - grey[:, :, :-2], grey[:, 2:] - grey[:, :-2]
    x = (across[:, :-2] + across[:, 2:]).add_(across[:, 1:-1], alpha=2)
    y = (down[:, :, :-2] + down[:, :, 2:]).add_(down[:, :, 1:-1], alpha=2)
    return _to_8_bits(x.square_().add_(y.square_()).sqrt_())[..., None]


def _cut_out(views: Tensor, draws: FloatArray, _: AppearanceConfig) -> Tensor:
    columns = [Draw.CUT_OUT_LEFT_PX, Draw.CUT_OUT_TOP_PX, Draw.CUT_OUT_SIDE_PX, Draw.CUT_OUT_GREY]
    for view, (left, top, side, grey) in zip(views, draws[:, columns].astype(int).tolist(), strict=True):
        view[top : top + side, left : left + side] = grey
    return views


def _blur(views: Tensor, draws: FloatArray, _: AppearanceConfig) -> Tensor:
    """A Gaussian that ends at ceil(3 sigma), first along the rows, then down the columns."""
    sigma_px = draws[:, [Draw.BLUR_SIGMA_PX]].astype(np.float64)
    reach_px = np.ceil(3 * sigma_px)
    longest_px = int(reach_px.max())
    taps_px = np.arange(-longest_px, longest_px + 1)
    weights = np.exp(-((taps_px / sigma_px) ** 2) / 2) * (np.abs(taps_px) <= reach_px)
    weights /= weights.sum(axis=1, keepdims=True)
    weight = torch.from_numpy(weights.T.astype(np.float32)).to(views.device)[:, :, None, None, None]

    side_px = views.shape[1]
    mirrored = np.abs(np.arange(-longest_px, side_px + longest_px)) % (2 * side_px - 2)
    beyond = torch.from_numpy(np.minimum(mirrored, 2 * side_px - 2 - mirrored)).to(views.device)
    blurred = views.float()
    for axis in (2, 1):
        wide = blurred.index_select(axis, beyond)
        blurred = torch.zeros_like(blurred)
        for tap in range(len(taps_px)):
            blurred.addcmul_(wide.narrow(axis, tap, side_px), weight[tap])
    return _to_8_bits(blurred)


def _add_noise(views: Tensor, draws: FloatArray, appearance: AppearanceConfig) -> Tensor:
    """Of each pixel and channel, the level that a hash of its number and the view's key picks."""
    halves = draws[:, [Draw.NOISE_KEY_HIGH, Draw.NOISE_KEY_LOW]].astype(np.uint32)
    key = (halves[:, 0] << 16 | halves[:, 1]).view(np.int32)
    number = _mix(
        _pixel_hashes(views.shape[1], views.device) ^ torch.from_numpy(key).to(views.device)[:, None, None, None]
    )
    quantile = _shifted_right(number, 32 - QUANTILE_BITS)
    levels = torch.from_numpy(noise_levels(appearance.noise_std)).to(views.device)
    return levels.index_select(0, quantile.view(-1)).view(views.shape).add_(views).clamp_(0, 255).to(torch.uint8)


@functools.cache
def _pixel_hashes(side_px: int, device: torch.device) -> Tensor:
    """(S, S, 3). Without them, views whose keys are near each other would have the same noise, shifted."""
    return _mix(torch.arange(3 * side_px**2, dtype=torch.int32, device=device)).view(side_px, side_px, 3)


@functools.cache
def noise_levels(std: float) -> np.ndarray[tuple[int], np.dtype[np.int16]]:
    """The (2 ** QUANTILE_BITS,) quantiles of a normal distribution, in whole 8-bit levels."""
    count = 2**QUANTILE_BITS
    standard = NormalDist()
    return np.array([round(std * standard.inv_cdf((number + 0.5) / count)) for number in range(count)], np.int16)


def _mix(number: Tensor) -> Tensor:
    """Wellons' "lowbias32", a bijection of 32-bit numbers with little bias between bits of argument and result.

    Torch has no unsigned arithmetic: int32 holds the same bits, and its products wrap as C's do.
    """
    number = (number ^ _shifted_right(number, 16)).mul_(0x7FEB352D)
    number.bitwise_xor_(_shifted_right(number, 15)).mul_(0x846CA68B - 2**32)
    return number.bitwise_xor_(_shifted_right(number, 16))


def _shifted_right(number: Tensor, bits: int) -> Tensor:
    """As if unsigned."""
    return (number >> bits).bitwise_and_(2 ** (32 - bits) - 1)


def _drop_colour(views: Tensor, _: FloatArray, __: AppearanceConfig) -> Tensor:
    return _to_8_bits(_grey(views))[..., None]


_CHANGES: Final[dict[Draw, Callable[[Tensor, FloatArray, AppearanceConfig], Tensor]]] = {
    Draw.SOBEL: _sobel,
    Draw.CUT_OUT: _cut_out,
    Draw.BLUR: _blur,
    Draw.NOISE: _add_noise,
    Draw.COLOUR_DROP: _drop_colour,
}
"""In the order of their composition."""
