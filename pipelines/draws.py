"""Augmentation parameters as a pure function of (seed, epoch, position, view).

Not of rank, worker, world size or device, and not of how often the job was killed: NumPy's counter-based Philox is
advanced to the position, and every view consumes a fixed count of draws whatever is switched on. So a new augmentation
takes a free column and leaves the others as they are.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Annotated, Literal, TypeAlias

import numpy as np
import numpy.typing as npt
from pydantic import ConfigDict, Field, field_validator
from pydantic.dataclasses import dataclass

from bounds import Factor, Fraction, Number, PositiveFraction

Range: TypeAlias = tuple[Number, Number]
Probability: TypeAlias = Fraction
FloatArray: TypeAlias = npt.NDArray[np.float32]
IntArray: TypeAlias = npt.NDArray[np.int64]
BoolArray: TypeAlias = npt.NDArray[np.bool_]
Table: TypeAlias = npt.NDArray[np.float64]

UNIFORMS_PER_VIEW = 32
"""Uniform numbers set aside for one view of one sample; a multiple of Philox's block of four."""

MIN_BLUR_SIGMA_PX, MAX_BLUR_SIGMA_PX = 0.1, 20.0
"""At the least, nothing is seen of a blur: its neighbours weigh 2e-22."""

LINEAR_HUE_DEG = 30.0
"""A hue cannot be multiplied by a linear map; it is turned as far as this hue, a skin's, would be."""

GREY = (0.299, 0.587, 0.114)
"""Weights of red, green and blue in a grey (ITU-R BT.601, as OpenCV's)."""

_PHILOX_BLOCK = 4


class Stream(IntEnum):
    """What a random number is for; part of the generator's key, so that streams never meet."""

    ORDER = 0
    VIEW = 1
    SUBSTITUTE = 2


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
    COLOUR_DROP = 8  # 1 where the view gets it, else 0; so are SOBEL, CUT_OUT, BLUR, NOISE and CROP
    SOBEL = 9
    CUT_OUT = 10
    CUT_OUT_SIDE_PX = 11  # whole pixels of the view, so that every backend cuts out the same ones
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


@dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class GeometryConfig:
    """Random affine map of a view (paper, supplement, "Self-supervised pre-training").

    Attributes:
        side_px: side of the square output.
        rotation_deg: range of the angle; positive turns x towards y, clockwise on the screen.
        translation_frac: largest shift along each axis, as a fraction of the output's side (the paper's 15 of 128).
        scale: range of the scale.
        scale_is: whether scale 2 shows the hand twice as large ("magnification") or twice the margin ("margin").
        crop_probability: how often a view shows a random square of the canonical view only (the paper's study). It is
            part of the affine map, so the loss undoes it.
        crop_side_frac: range of that square's side, as a fraction of the canonical view's; it lies inside.
        fill: what lies outside the source image: a grey value in [0, 255], or "edge" to repeat the border.
        antialias: sample a halved source, like a mip map, where a view minifies; False always samples the source.
    """

    side_px: Annotated[int, Field(ge=8, le=4096)] = 128
    rotation_deg: Range = (-45.0, 45.0)
    translation_frac: Fraction = 15 / 128
    scale: tuple[Factor, Factor] = (0.6, 2.0)
    scale_is: Literal["magnification", "margin"] = "magnification"
    crop_probability: Probability = 0.0
    crop_side_frac: tuple[PositiveFraction, PositiveFraction] = (0.5, 1.0)
    fill: Annotated[int, Field(ge=0, le=255)] | Literal["edge"] = 0
    antialias: bool = True

    @field_validator("rotation_deg", "scale", "crop_side_frac")
    @classmethod
    def _ordered(cls, value: Range) -> Range:
        return _ordered_range(value)


@dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class ColourConfig:
    """Colour jitter of a view (paper, supplement): hue, saturation and value of HSV.

    Attributes:
        jitter: "hsv" scales hue and saturation and maps value to a x + b, exactly; "linear" is DALI's cheaper YIQ
            matrix, which adds to the hue instead; "none" leaves the colours alone.
        hue: range of the factor of the hue.
        saturation: range of the factor of the saturation.
        value_scale: range of a.
        value_shift: range of b, in units of 8-bit pixels.
        shared_factor: one draw scales both hue and saturation (the paper names one s); False draws each of its own.
    """

    jitter: Literal["hsv", "linear", "none"] = "hsv"
    hue: Range = (0.01, 1.0)
    saturation: Range = (0.01, 1.0)
    value_scale: Range = (0.5, 1.0)
    value_shift: Range = (5.0, 20.0)
    shared_factor: bool = False

    @field_validator("hue", "saturation", "value_scale", "value_shift")
    @classmethod
    def _ordered(cls, value: Range) -> Range:
        return _ordered_range(value)

    @field_validator("value_scale", "value_shift")
    @classmethod
    def _not_negative(cls, value: Range) -> Range:
        if value[0] < 0:
            raise ValueError(f"the value is scaled and shifted by numbers of at least 0, found {list(value)}")
        return value

    @field_validator("hue", "saturation")
    @classmethod
    def _shrinking(cls, value: Range) -> Range:
        if value[0] < 0 or value[1] > 1:
            raise ValueError(f"a factor of hue or saturation lies in [0, 1], found {list(value)}")
        return value


@dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class AppearanceConfig:
    """Further augmentations of a view's pixels, which the paper studied and left out (Fig. 5 and 6); all off.

    Each takes an 8-bit view and gives an 8-bit view. They follow the warp and the colour jitter, in the order of the
    attributes, which is the authors'. A view gets each with its own probability (theirs is 0.5), independently.

    Attributes:
        sobel_probability: how often a view becomes the length of its grey picture's Sobel gradient (3 x 3).
        cut_out_probability: how often a square becomes one grey.
        cut_out_side_frac: range of that square's side, as a fraction of the view's; it lies inside.
        blur_probability: how often a view is blurred by a Gaussian.
        blur_sigma_px: range of the Gaussian's standard deviation, in pixels of the view; cut off at three of them.
        noise_probability: how often each pixel and channel gets Gaussian noise of its own.
        noise_std: standard deviation of the noise, in units of 8-bit pixels.
        colour_drop_probability: how often a view becomes grey.
    """

    sobel_probability: Probability = 0.0
    cut_out_probability: Probability = 0.0
    cut_out_side_frac: Range = (0.0, 0.16)
    blur_probability: Probability = 0.0
    blur_sigma_px: Range = (0.1, 2.0)
    noise_probability: Probability = 0.0
    noise_std: Annotated[float, Field(ge=0, le=255)] = 25.0
    colour_drop_probability: Probability = 0.0

    @property
    def active(self) -> bool:
        """Whether any view gets any of them."""
        return any(self.probabilities.values())

    @property
    def probabilities(self) -> dict[Draw, float]:
        """Of each augmentation, in the order of their composition."""
        return {
            Draw.SOBEL: self.sobel_probability,
            Draw.CUT_OUT: self.cut_out_probability,
            Draw.BLUR: self.blur_probability,
            Draw.NOISE: self.noise_probability,
            Draw.COLOUR_DROP: self.colour_drop_probability,
        }

    @field_validator("cut_out_side_frac", "blur_sigma_px")
    @classmethod
    def _ordered(cls, value: Range) -> Range:
        return _ordered_range(value)

    @field_validator("cut_out_side_frac")
    @classmethod
    def _inside(cls, value: Range) -> Range:
        if value[0] < 0 or value[1] > 1:
            raise ValueError(f"the side of a cut-out lies in [0, 1], found {list(value)}")
        return value

    @field_validator("blur_sigma_px")
    @classmethod
    def _within_reach(cls, value: Range) -> Range:
        if value[0] < MIN_BLUR_SIGMA_PX or value[1] > MAX_BLUR_SIGMA_PX:
            raise ValueError(
                f"a blur has a standard deviation of {MIN_BLUR_SIGMA_PX} to {MAX_BLUR_SIGMA_PX} pixels, "
                f"found {list(value)}"
            )
        return value


NO_APPEARANCE = AppearanceConfig()
"""All off, as by default."""


def _ordered_range(value: Range) -> Range:
    if value[0] > value[1]:
        raise ValueError(f"a range goes from low to high, found {list(value)}")
    return value


def philox(seed: int, stream: Stream, *, epoch: int = 0, view: int = 0) -> np.random.Philox:
    """The generator of one stream; equal arguments give equal numbers on every machine."""
    return np.random.Philox(key=[seed, (int(stream) << 48) | (view << 40) | epoch])


def _uniforms(seed: int, epoch: int, view: int, positions: IntArray) -> Table:
    """Uniform numbers in [0, 1) at `positions` (N,): (N, UNIFORMS_PER_VIEW).

    One generator call per run of consecutive positions, of which a batch has one or a few.
    """
    out = np.empty((len(positions), UNIFORMS_PER_VIEW))
    starts = np.flatnonzero(np.diff(positions, prepend=-2) != 1)
    for start, stop in zip(starts, [*starts[1:], len(positions)], strict=True):
        bits = philox(seed, Stream.VIEW, epoch=epoch, view=view)
        bits.advance(int(positions[start]) * UNIFORMS_PER_VIEW // _PHILOX_BLOCK)
        np.random.Generator(bits).random(out=out[start:stop])
    return out


def draw_view(
    geometry: GeometryConfig,
    colour: ColourConfig,
    appearance: AppearanceConfig = NO_APPEARANCE,
    *,
    seed: int,
    epoch: int,
    view: int,
    positions: IntArray,
) -> FloatArray:
    """The table of draws of one view.

    Args:
        geometry: ranges of the affine map.
        colour: ranges of the colour jitter.
        appearance: the further augmentations.
        seed: the run's seed.
        epoch: epoch that the positions belong to.
        view: which view of the sample.
        positions: (N,) places in the epoch's global order.

    Returns:
        (N, len(Draw)) float32, columns as in `Draw`; those of an augmentation that is off are 0.
    """
    uniform = _uniforms(seed, epoch, view, positions)
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
    table = np.zeros((len(positions), len(Draw)))
    low, high = np.array(list(ranges.values())).T
    table[:, : len(ranges)] = low + (high - low) * uniform[:, : len(ranges)]
    if geometry.scale_is == "margin":
        table[:, Draw.MAGNIFICATION] = 1 / table[:, Draw.MAGNIFICATION]
    if geometry.crop_probability > 0:
        _draw_crop(geometry, uniform, table)
    if appearance.active:
        _draw_appearance(appearance, geometry.side_px, uniform, table)
    return table.astype(np.float32)


def _draw_crop(geometry: GeometryConfig, uniform: Table, table: Table) -> None:
    """Fill the columns of the crop."""
    low, high = geometry.crop_side_frac
    side = low + (high - low) * uniform[:, Draw.CROP_SIDE_FRAC]
    table[:, Draw.CROP] = uniform[:, Draw.CROP] < geometry.crop_probability
    table[:, Draw.CROP_SIDE_FRAC] = side
    for centre in (Draw.CROP_X_FRAC, Draw.CROP_Y_FRAC):
        table[:, centre] = (1 - side) * (uniform[:, centre] - 0.5)


def _draw_appearance(appearance: AppearanceConfig, side_px: int, uniform: Table, table: Table) -> None:
    """Fill the columns of the further augmentations."""
    for column, probability in appearance.probabilities.items():
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
