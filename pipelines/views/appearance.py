"""The further augmentations of finished views: keys, draws and arithmetic (paper, Fig. 5 and 6).

The keys belong to the configuration, so this file imports neither torch nor Numba.
render/apply_appearance.py applies the augmentations: on a CPU to view after view, by OpenCV or in loops over pixels
that Numba compiles; on a GPU torch computes with tensors of many views. Both use the same tables. A view has the same
bits in any batch: nothing is summed over views. Greys and noise are whole-number arithmetic, the same on every device.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import IntEnum
from statistics import NormalDist
from typing import TYPE_CHECKING, Annotated, Any, Final, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
from annotated_types import Interval
from pydantic import AfterValidator, Field
from pydantic.dataclasses import dataclass

from peclr_dali.bounds import STRICT, Fraction, Number
from peclr_dali.pipelines.arrays import DoubleArray, FloatArray, IntArray

if TYPE_CHECKING:
    from torch import Tensor

Views = npt.NDArray[np.uint8]
Int32Array = npt.NDArray[np.int32]
Arrays = tuple[npt.NDArray[Any], ...]

MIN_BLUR_SIGMA_PX, MAX_BLUR_SIGMA_PX = 0.1, 20.0
"""Smallest and largest sigma of a blur. The smallest blur is invisible: the neighbours have a weight of 2e-22."""

QUANTILE_BITS: Final = 12
"""The noise has 2 ** 12 = 4096 quantiles, up to 3.7 standard deviations."""

F, I32 = np.float32, np.int32


def _ordered(value: tuple[float, float]) -> tuple[float, float]:
    if value[0] > value[1]:
        raise ValueError(f"a range goes from low to high, found {list(value)}")
    return value


Ordered = AfterValidator(_ordered)
Range: TypeAlias = Annotated[tuple[Number, Number], Ordered]
FractionRange: TypeAlias = Annotated[tuple[Fraction, Fraction], Ordered]
BlurSigma: TypeAlias = Annotated[float, Interval(ge=MIN_BLUR_SIGMA_PX, le=MAX_BLUR_SIGMA_PX)]


@dataclass(frozen=True, config=STRICT)
class AppearanceConfig:
    """Further augmentations of a view's pixels, off by default. The paper studied and rejected them (Fig. 5 and 6).

    Each takes an 8-bit view and gives an 8-bit view. They follow the warp and the colour jitter, in the order of the
    attributes, which is the authors'. Each is applied independently with its own probability (the authors': 0.5).

    Attributes:
        sobel_probability: probability of replacing a view by the length of the 3 x 3 Sobel gradient of its grey
            picture.
        cut_out_probability: probability of filling a square with one grey.
        cut_out_side_frac: range of the square's side, as a fraction of the view's side. The square lies inside.
        blur_probability: probability of a Gaussian blur.
        blur_sigma_px: range of the Gaussian's standard deviation, in pixels of the view. It is cut off at three sigma.
        noise_probability: probability of Gaussian noise, independent for each pixel and channel.
        noise_std: standard deviation of the noise, in units of 8-bit pixels.
        colour_drop_probability: probability of turning a view grey.
    """

    sobel_probability: Fraction = 0.0
    cut_out_probability: Fraction = 0.0
    cut_out_side_frac: FractionRange = (0.0, 0.16)
    blur_probability: Fraction = 0.0
    blur_sigma_px: Annotated[tuple[BlurSigma, BlurSigma], Ordered] = (0.1, 2.0)
    noise_probability: Fraction = 0.0
    noise_std: Annotated[float, Field(ge=0, le=255)] = 25.0
    colour_drop_probability: Fraction = 0.0

    @property
    def active(self) -> bool:
        """Whether any of them is switched on."""
        return any(value for name, value in vars(self).items() if name.endswith("_probability"))


class Column(IntEnum):
    """Columns of the table of draws, besides those of `draws.Draw`.

    A column named like an augmentation is 1 if it is applied, else 0.
    """

    COLOUR_DROP = 8
    SOBEL = 9
    CUT_OUT = 10
    CUT_OUT_SIDE_PX = 11  # whole pixels of the view, so that every renderer cuts out the same pixels
    CUT_OUT_LEFT_PX = 12
    CUT_OUT_TOP_PX = 13
    CUT_OUT_GREY = 14
    BLUR = 15
    BLUR_SIGMA_PX = 16
    NOISE = 17
    NOISE_KEY_HIGH = 18  # 16 bits each: float32 holds them exactly
    NOISE_KEY_LOW = 19


def draw_appearance(appearance: AppearanceConfig, side_px: int, uniform: DoubleArray, table: DoubleArray) -> None:
    """Fill the columns of `Column` from the uniform numbers in [0, 1) of the same columns."""
    for column in CHANGES:
        table[:, column] = uniform[:, column] < getattr(appearance, f"{column.name.lower()}_probability")
    low, high = appearance.cut_out_side_frac
    side = np.rint(side_px * (low + (high - low) * uniform[:, Column.CUT_OUT_SIDE_PX]))
    table[:, Column.CUT_OUT_SIDE_PX] = side
    for corner in (Column.CUT_OUT_LEFT_PX, Column.CUT_OUT_TOP_PX):
        table[:, corner] = np.floor((side_px - side + 1) * uniform[:, corner])
    low, high = appearance.blur_sigma_px
    table[:, Column.BLUR_SIGMA_PX] = low + (high - low) * uniform[:, Column.BLUR_SIGMA_PX]
    table[:, Column.CUT_OUT_GREY] = np.floor(256 * uniform[:, Column.CUT_OUT_GREY])
    for half in (Column.NOISE_KEY_HIGH, Column.NOISE_KEY_LOW):
        table[:, half] = np.floor(2**16 * uniform[:, half])


def _grey(red: Any, green: Any, blue: Any) -> Any:
    """Grey in thousandths of a level: a whole number, exact in float32. Weights of ITU-R BT.601, as in OpenCV."""
    return red * F(299) + green * F(587) + blue * F(114)


def _drop_colour(views: Views, rows: IntArray) -> None:
    for n in rows:
        pixels = views[n].reshape(-1, 3)
        for at in range(len(pixels)):
            level = np.uint8(_grey(F(pixels[at, 0]), F(pixels[at, 1]), F(pixels[at, 2])) / F(1000) + F(0.5))
            pixels[at, 0], pixels[at, 1], pixels[at, 2] = level, level, level


def _drop_colour_of_tensors(views: Tensor) -> Tensor:
    grey: Tensor = _grey(*views.unbind(3)) / 1000
    return grey[..., None]


def _sobel(views: Views, rows: IntArray) -> None:
    import cv2

    for n in rows:
        grey = cv2.transform(views[n].astype(F), np.array([[299, 587, 114]], F))
        across, down = (cv2.Sobel(grey, cv2.CV_32F, dx, 1 - dx) for dx in (1, 0))
        # cv2.magnitude would give other bits at other places in memory.
        length = np.sqrt(across * across + down * down) / F(1000) + F(0.5)
        views[n] = cv2.merge([np.minimum(length, F(255)).astype(np.uint8)] * 3)  # broadcasting is slower


def _sobel_of_tensors(views: Tensor) -> Tensor:
    from torch.nn.functional import pad

    side = views.shape[1]
    grey = pad(_grey(*views.unbind(3)), (1, 1, 1, 1), mode="reflect")
    (a, b, c), (d, _, f), (g, h, i) = ([grey[:, y : y + side, x : x + side] for x in range(3)] for y in range(3))
    across, down = c - a + i - g + (f - d) * 2, g - a + i - c + (h - b) * 2
    squared: Tensor = across * across + down * down
    return squared.sqrt_().div_(1000)[..., None]


def _hole_tables(draws: FloatArray, _: int) -> Arrays:
    columns = [Column.CUT_OUT_LEFT_PX, Column.CUT_OUT_TOP_PX, Column.CUT_OUT_SIDE_PX, Column.CUT_OUT_GREY]
    return (draws[:, columns].astype(np.int32),)


def _cut_out(views: Views, rows: IntArray, holes: Int32Array) -> None:
    for m in range(len(rows)):
        left, top, side, grey = holes[m, 0], holes[m, 1], holes[m, 2], holes[m, 3]
        views[rows[m], top : top + side, left : left + side] = grey


def _cut_out_of_tensors(views: Tensor, holes: Tensor) -> Tensor:
    import torch

    left, top, side, grey = holes[:, :, None, None, None].unbind(1)
    at = torch.arange(views.shape[1], device=views.device)
    x, y = at[:, None] - left, at[:, None, None] - top
    return torch.where((x >= 0) & (x < side) & (y >= 0) & (y < side), grey, views)


def _blur_tables(draws: FloatArray, side_px: int) -> Arrays:
    """Tables of the blur: Gaussians that end at ceil(3 sigma), and the order of pixels in a row mirrored at both ends.

    Returns:
        (N, 2 R + 1) weights, R being the largest reach; and (S + 2 R,) the number of the pixel at each place of a
        mirrored row.
    """
    sigma_px = draws[:, [Column.BLUR_SIGMA_PX]].astype(np.float64)
    reach_px = np.ceil(3 * sigma_px)
    longest_px = int(reach_px.max())
    taps_px = np.arange(-longest_px, longest_px + 1)
    weights = np.exp(-((taps_px / sigma_px) ** 2) / 2) * (np.abs(taps_px) <= reach_px)
    weights /= weights.sum(axis=1, keepdims=True)
    mirrored = np.abs(np.arange(-longest_px, side_px + longest_px)) % (2 * side_px - 2)
    return weights.astype(np.float32), np.minimum(mirrored, 2 * side_px - 2 - mirrored)


def _blur(views: Views, rows: IntArray, weights: FloatArray, _: IntArray) -> None:
    import cv2

    for n, padded in zip(rows, weights, strict=True):
        taps = padded[padded > 0]  # a narrower blur has zeros at both ends
        blurred = cv2.sepFilter2D(views[n], cv2.CV_32F, taps, taps, borderType=cv2.BORDER_REFLECT_101)
        views[n] = (blurred + F(0.5)).astype(np.uint8)


def _blur_of_tensors(views: Tensor, weights: Tensor, mirrored: Tensor) -> Tensor:
    blurred = views.float()
    for axis in (2, 1):
        wide = blurred.index_select(axis, mirrored)
        blurred = blurred.new_zeros(blurred.shape)
        for tap in range(weights.shape[1]):
            blurred.addcmul_(wide.narrow(axis, tap, views.shape[1]), weights[:, tap, None, None, None])
    return blurred


def _noise_tables(draws: FloatArray, _: int) -> Arrays:
    """Table of the noise: (n,) keys of the views."""
    halves = draws[:, [Column.NOISE_KEY_HIGH, Column.NOISE_KEY_LOW]].astype(np.uint32)
    return ((halves[:, 0] << 16 | halves[:, 1]).view(np.int32),)


def _noise_constants(appearance: AppearanceConfig, side_px: int) -> Arrays:
    """(S, S, 3) hashes of the pixels, and the levels. Without hashes, neighbouring keys would give shifted copies."""
    hashes = _mix(np.arange(3 * side_px**2, dtype=np.int32)).reshape(side_px, side_px, 3)
    return hashes, noise_levels(appearance.noise_std)


def _mix(number: Any) -> Any:
    """Wellons' "lowbias32", a bijection of 32-bit numbers with little bias between bits of argument and result.

    Torch has no unsigned arithmetic. The lower 32 bits of signed numbers are the same: products wrap as C's do.
    """
    number = (number ^ number >> 16 & 0xFFFF) * 0x7FEB352D
    number = (number ^ number >> 15 & 0x1FFFF) * (0x846CA68B - 2**32)
    return number ^ number >> 16 & 0xFFFF


def noise_levels(std: float) -> npt.NDArray[np.int16]:
    """The (2 ** QUANTILE_BITS,) quantiles of a normal distribution, in whole 8-bit levels."""
    count = 2**QUANTILE_BITS
    standard = NormalDist()
    return np.array([round(std * standard.inv_cdf((number + 0.5) / count)) for number in range(count)], np.int16)


def _quantile(pixel_hash: Any, key: Any) -> Any:
    """Number of the quantile for a pixel and channel in the view with this key."""
    return _mix(pixel_hash ^ key) >> 32 - QUANTILE_BITS & 2**QUANTILE_BITS - 1


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
    return levels.index_select(0, quantiles.view(-1)).view(views.shape).add_(views).clamp_(0, 255)


class Change(NamedTuple):
    """The arithmetic of an augmentation.

    Attributes:
        on_cpu: changes some of N views in place, on a CPU. Arguments: (N, S, S, 3) uint8 views, (n,) rows to change,
            tables, constants.
        of_tensors: returns n changed views, on any device. Arguments: (n, S, S, 3) uint8 views, tables, constants. The
            result may have one channel for all three, and floating numbers of at least 0, which are rounded and clipped
            afterwards.
        compiled_with: functions that `on_cpu` calls, if Numba has to compile it and them; none if it calls OpenCV.
        tables: makes the arrays that depend on the draws. Arguments: (n, COLUMNS) draws, S.
        constants: makes the arrays that depend on `AppearanceConfig` and S only. They are kept on the device.
    """

    on_cpu: Callable[..., None]
    of_tensors: Callable[..., Tensor]
    compiled_with: tuple[Callable[..., Any], ...] = ()
    tables: Callable[..., Arrays] = lambda *_: ()
    constants: Callable[..., Arrays] = lambda *_: ()


CHANGES: Final[dict[Column, Change]] = {
    Column.SOBEL: Change(_sobel, _sobel_of_tensors),
    Column.CUT_OUT: Change(_cut_out, _cut_out_of_tensors, tables=_hole_tables),
    Column.BLUR: Change(_blur, _blur_of_tensors, tables=_blur_tables),
    Column.NOISE: Change(_add_noise, _add_noise_to_tensors, (_mix, _quantile), _noise_tables, _noise_constants),
    Column.COLOUR_DROP: Change(_drop_colour, _drop_colour_of_tensors, (_grey,)),
}
"""The augmentations, in the order in which they are applied. An augmentation's keys begin with its column's name."""
