"""The further augmentations of finished views: keys, draws, and tables made of the draws (paper, Fig. 5 and 6).

The keys belong to the configuration, so this file imports neither torch nor Numba. render/appearance_cpu.py and
render/appearance_tensors.py apply the augmentations, with the same tables. A view has the same bits in any batch:
nothing is summed over views. Greys and noise are whole-number arithmetic, the same on every device.
"""

from functools import cache
from statistics import NormalDist
from typing import Annotated, Any, TypeAlias

import numpy as np
from annotated_types import Interval
from pydantic import AfterValidator, Field
from pydantic.dataclasses import dataclass

from peclr_dali.bounds import STRICT, Fraction, Number
from peclr_dali.pipelines.arrays import AnyArray, DoubleArray, FloatArray, Int32Array
from peclr_dali.pipelines.views.columns import Draw

MIN_BLUR_SIGMA_PX, MAX_BLUR_SIGMA_PX = 0.1, 20.0
"""Smallest and largest sigma of a blur. The smallest blur is invisible: the neighbours have a weight of 2e-22."""

QUANTILE_BITS = 12
"""The noise has 2 ** 12 = 4096 quantiles, up to 3.7 standard deviations."""


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


ORDER = (Draw.SOBEL, Draw.CUT_OUT, Draw.BLUR, Draw.NOISE, Draw.COLOUR_DROP)
"""The augmentations, in the order in which they are applied. An augmentation's keys begin with its column's name."""


def draw_appearance(appearance: AppearanceConfig, side_px: int, uniform: DoubleArray, table: DoubleArray) -> None:
    """Fill the augmentations' columns of `Draw` from the uniform numbers in [0, 1) of the same columns."""
    for column in ORDER:
        table[:, column] = uniform[:, column] < getattr(appearance, f"{column.name.lower()}_probability")
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


def grey(red: Any, green: Any, blue: Any) -> Any:
    """Grey in thousandths of a level: a whole number, exact in float32. Weights of ITU-R BT.601, as in OpenCV."""
    return red * np.float32(299) + green * np.float32(587) + blue * np.float32(114)


def holes(draws: FloatArray) -> Int32Array:
    """The squares to cut out (N, 4): left, top, side and grey."""
    columns = [Draw.CUT_OUT_LEFT_PX, Draw.CUT_OUT_TOP_PX, Draw.CUT_OUT_SIDE_PX, Draw.CUT_OUT_GREY]
    return draws[:, columns].astype(np.int32)


def blur_weights(draws: FloatArray) -> FloatArray:
    """Weights (N, 2 R + 1) of Gaussians that end at ceil(3 sigma), R being the largest reach; 0 beyond it."""
    sigma_px = draws[:, [Draw.BLUR_SIGMA_PX]].astype(np.float64)
    reach_px = np.ceil(3 * sigma_px)
    taps_px = np.arange(-reach_px.max(), reach_px.max() + 1)
    weights = np.exp(-((taps_px / sigma_px) ** 2) / 2) * (np.abs(taps_px) <= reach_px)
    weights /= weights.sum(axis=1, keepdims=True)
    return weights.astype(np.float32)


def noise_keys(draws: FloatArray) -> Int32Array:
    """The key (N,) of each view's noise."""
    halves = draws[:, [Draw.NOISE_KEY_HIGH, Draw.NOISE_KEY_LOW]].astype(np.uint32)
    return (halves[:, 0] << 16 | halves[:, 1]).view(np.int32)


@cache
def pixel_hashes(side_px: int) -> Int32Array:
    """Hashes (S, S, 3) of the numbers of pixels. Without them, neighbouring keys would give shifted copies."""
    return np.asarray(mix(np.arange(3 * side_px**2, dtype=np.int32)).reshape(side_px, side_px, 3))


@cache
def noise_levels(std: float) -> AnyArray:
    """The (2 ** QUANTILE_BITS,) quantiles of a normal distribution, in whole 8-bit levels."""
    count = 2**QUANTILE_BITS
    standard = NormalDist()
    return np.array([round(std * standard.inv_cdf((number + 0.5) / count)) for number in range(count)], np.int16)


def quantile(pixel_hash: Any, key: Any) -> Any:
    """Number of the quantile for a pixel and channel in the view with this key."""
    return mix(pixel_hash ^ key) >> 32 - QUANTILE_BITS & 2**QUANTILE_BITS - 1


def mix(number: Any) -> Any:
    """Wellons' "lowbias32", a bijection of 32-bit numbers with little bias between bits of argument and result.

    Torch has no unsigned arithmetic. The lower 32 bits of signed numbers are the same: products wrap as C's do.
    """
    number = (number ^ number >> 16 & 0xFFFF) * 0x7FEB352D
    number = (number ^ number >> 15 & 0x1FFFF) * (0x846CA68B - 2**32)
    return number ^ number >> 16 & 0xFFFF
