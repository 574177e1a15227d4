"""Applies the augmentations of `views.appearance` with tensors of many views, on a GPU."""

from functools import cache

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from peclr_dali.pipelines.arrays import FloatArray
from peclr_dali.pipelines.batch import to_device
from peclr_dali.pipelines.views.appearance import (
    ORDER,
    AppearanceConfig,
    blur_weights,
    grey,
    holes,
    noise_keys,
    noise_levels,
    pixel_hashes,
    quantile,
)
from peclr_dali.pipelines.views.columns import Draw

_AT_ONCE = 64  # views that are changed together, which bounds the memory


def change_tensors(views: Tensor, draws: FloatArray, appearance: AppearanceConfig) -> None:
    """Apply to N views, in place, the augmentations that their draws switch on.

    Args:
        views: (N, S, S, 3) uint8, contiguous.
        draws: (N, COLUMNS) table of draws.
        appearance: configuration of the augmentations.
    """
    if not appearance.active:
        return
    for column in ORDER:
        drawn = np.flatnonzero(draws[:, column] > 0)
        for start in range(0, len(drawn), _AT_ONCE):
            rows = drawn[start : start + _AT_ONCE]
            at = to_device(rows, views.device)
            changed = _changed(column, views[at], draws[rows], appearance)
            if changed.is_floating_point():
                changed = changed.add_(0.5).clamp_(max=255)
            views[at] = changed.to(torch.uint8)


def _changed(column: Draw, views: Tensor, draws: FloatArray, appearance: AppearanceConfig) -> Tensor:
    """Views (n, S, S, 3) uint8, whose draws are (n, COLUMNS), after one augmentation.

    The result may have one channel for all three, and floating numbers of at least 0, not yet rounded or clipped.
    """
    device, side_px = views.device, views.shape[1]
    match column:
        case Draw.SOBEL:
            return _sobel(views)
        case Draw.CUT_OUT:
            return _cut_out(views, to_device(holes(draws), device))
        case Draw.BLUR:
            return _blur(views, to_device(blur_weights(draws), device))
        case Draw.NOISE:
            hashes, levels = _noise_constants(side_px, appearance.noise_std, device)
            quantiles = quantile(hashes, to_device(noise_keys(draws), device)[:, None, None, None])
            return levels.index_select(0, quantiles.view(-1)).view(views.shape).add_(views).clamp_(0, 255)
        case Draw.COLOUR_DROP:
            greys: Tensor = grey(*views.unbind(3)) / 1000
            return greys[..., None]
        case _:
            raise NotImplementedError(column.name)


def _sobel(views: Tensor) -> Tensor:
    side = views.shape[1]
    greys = pad(grey(*views.unbind(3)), (1, 1, 1, 1), mode="reflect")
    (a, b, c), (d, _, f), (g, h, i) = ([greys[:, y : y + side, x : x + side] for x in range(3)] for y in range(3))
    across, down = c - a + i - g + (f - d) * 2, g - a + i - c + (h - b) * 2
    squared: Tensor = across * across + down * down
    return squared.sqrt_().div_(1000)[..., None]


def _cut_out(views: Tensor, squares: Tensor) -> Tensor:
    left, top, side, level = squares[:, :, None, None, None].unbind(1)
    at = torch.arange(views.shape[1], device=views.device)
    x, y = at[:, None] - left, at[:, None, None] - top
    return torch.where((x >= 0) & (x < side) & (y >= 0) & (y < side), level, views)


def _blur(views: Tensor, weights: Tensor) -> Tensor:
    side_px, reach_px = views.shape[1], weights.shape[1] // 2
    place = torch.arange(-reach_px, side_px + reach_px, device=views.device).abs() % (2 * side_px - 2)
    mirrored = torch.minimum(place, 2 * side_px - 2 - place)  # the pixel at each place of a row mirrored at both ends
    blurred = views.float()
    for axis in (2, 1):
        wide = blurred.index_select(axis, mirrored)
        blurred = blurred.new_zeros(blurred.shape)
        for tap in range(weights.shape[1]):
            blurred.addcmul_(wide.narrow(axis, tap, side_px), weights[:, tap, None, None, None])
    return blurred


@cache
def _noise_constants(side_px: int, std: float, device: torch.device) -> tuple[Tensor, Tensor]:
    """The hashes of the pixels and the levels of the noise, on the device."""
    constants = to_device(pixel_hashes(side_px), device), to_device(noise_levels(std), device)
    if device.type == "cuda":  # waits once for the copies, since the streams of other loaders use them too
        torch.cuda.current_stream(device).synchronize()
    return constants
