"""The further augmentations as nodes of the DALI graph: the same arithmetic on a CPU and on a GPU.

`pipelines.draws.AppearanceConfig` says what they are and in which order they come (paper, Fig. 5 and 6). DALI's own
random operators have no part in them: they draw by device and batch, these by position.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import nvidia.dali.math as dali_math
import nvidia.dali.types as types
from nvidia.dali import fn

from pipelines.draws import GREY, MIN_BLUR_SIGMA_PX, AppearanceConfig, Draw
from pipelines.noise import FACTORS, QUANTILE_BITS, SHIFTS, noise_levels, pixel_hashes

Node = Any  # DALI's DataNode carries no types


def change_appearance(view: Node, appearance: AppearanceConfig, draws: Node, side_px: int) -> Node:
    """Augment (S, S, 3) uint8 pixels by the view's `draws`: the same shape and type."""
    view = fn.reshape(view, layout="HWC")  # arithmetic loses it, and filters ask for it
    if appearance.sobel_probability > 0:
        view = _where(draws[Draw.SOBEL], _sobel(view), view)
    if appearance.cut_out_probability > 0:
        view = _cut_out(view, draws)
    if appearance.blur_probability > 0:
        sigma_px = dali_math.max(draws[Draw.BLUR] * draws[Draw.BLUR_SIGMA_PX], MIN_BLUR_SIGMA_PX)  # which blurs nothing
        view = _to_8_bits(fn.gaussian_blur(view, sigma=sigma_px, dtype=types.FLOAT))
    if appearance.noise_probability > 0:
        view = _to_8_bits(view + draws[Draw.NOISE] * _noise(draws, appearance.noise_std, side_px, view.device))
    if appearance.colour_drop_probability > 0:
        view = _where(draws[Draw.COLOUR_DROP], _grey(view), view)
    return view


def _to_8_bits(view: Node) -> Node:
    return fn.cast(view, dtype=types.UINT8)  # rounds and clips


def _where(applied: Node, changed: Node, view: Node) -> Node:
    """`changed` (S, S, 1) in all channels where `applied` is 1, `view` (S, S, 3) where it is 0."""
    return fn.reshape(_to_8_bits(applied * changed + (1 - applied) * view), layout="HWC")


def _grey(view: Node) -> Node:
    """(S, S, 1) float, not rounded."""
    weights = types.Constant(np.array(GREY, np.float32), device=view.device)
    return fn.reductions.sum(view * weights, axes=[2], keep_dims=True)


def _sobel(view: Node) -> Node:
    """Length of the grey's gradient: (S, S, 1) float, not clipped."""
    grey = fn.reshape(_grey(view), layout="HWC")
    across = np.array([[-1, 0, 1], [-2, 0, 2], [-1, 0, 1]], np.float32)
    x, y = (
        fn.filter(grey, types.Constant(kernel, device=view.device), border="reflect_101")
        for kernel in (across, across.T)
    )
    return dali_math.sqrt(x * x + y * y)


def _cut_out(view: Node, draws: Node) -> Node:
    side_px = draws[Draw.CUT_OUT] * draws[Draw.CUT_OUT_SIDE_PX]
    return fn.erase(
        view,
        axis_names="HW",
        anchor=fn.stack(draws[Draw.CUT_OUT_TOP_PX], draws[Draw.CUT_OUT_LEFT_PX]),
        shape=fn.stack(side_px, side_px),
        fill_value=draws[Draw.CUT_OUT_GREY],
    )


def _noise(draws: Node, std: float, side_px: int, device: str) -> Node:
    """Levels of noise (S, S, 3) float, the very numbers of `pipelines.noise`."""
    key_high, key_low = (fn.cast(draws[half], dtype=types.UINT32) for half in (Draw.NOISE_KEY_HIGH, Draw.NOISE_KEY_LOW))
    hashes = types.Constant(pixel_hashes(side_px), dtype=types.UINT32, device=device)
    picked = _mix(hashes ^ (key_high * _u32(2**16) + key_low)) // _u32(2 ** (32 - QUANTILE_BITS))
    levels = noise_levels(std).tolist()
    return fn.lookup_table(
        fn.cast(picked, dtype=types.UINT16), keys=list(range(len(levels))), values=levels, dtype=types.FLOAT
    )


def _mix(number: Node) -> Node:
    """`pipelines.noise.mix`; DALI has no shifts, and its unsigned products wrap as C's do."""
    for shift, factor in zip(SHIFTS, FACTORS, strict=False):
        number = (number ^ (number // _u32(2**shift))) * _u32(factor)
    return number ^ (number // _u32(2 ** SHIFTS[-1]))


def _u32(number: int) -> Any:
    """A constant that keeps the arithmetic in 32 bits."""
    return types.Constant(number, dtype=types.UINT32)
