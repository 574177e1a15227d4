"""Configuration of the random augmentations.

This file imports neither torch nor DALI nor Numba, so that a mistake in a configuration is reported at once.
"""

from __future__ import annotations

from typing import Annotated, Literal, TypeAlias, TypeVar

from pydantic import AfterValidator, ConfigDict, Field, field_validator
from pydantic.dataclasses import dataclass

from bounds import Factor, Fraction, Number, PositiveFraction

N = TypeVar("N", int, float)


def _ordered(value: tuple[N, N]) -> tuple[N, N]:
    if value[0] > value[1]:
        raise ValueError(f"a range goes from low to high, found {list(value)}")
    return value


Range: TypeAlias = Annotated[tuple[Number, Number], AfterValidator(_ordered)]
Probability: TypeAlias = Fraction

MIN_BLUR_SIGMA_PX, MAX_BLUR_SIGMA_PX = 0.1, 20.0
"""Smallest sigma of a blur; such a blur is invisible, with a weight of 2e-22 for the neighbours."""

LINEAR_HUE_DEG = 30.0
"""Reference hue (skin) of the linear jitter: a linear map cannot scale a hue, so it rotates all hues as it would
this."""


@dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class GeometryConfig:
    """Random affine map of a view (paper, supplement, "Self-supervised pre-training").

    Attributes:
        side_px: side of the square output.
        rotation_deg: range of the angle; positive turns x towards y, clockwise on the screen.
        translation_frac: largest shift along each axis, as a fraction of the output's side (the paper's 15 of 128).
        scale: range of the scale.
        scale_is: whether scale 2 shows the hand twice as large ("magnification") or twice the margin ("margin").
        crop_probability: probability that a view shows only a random square of the canonical view (the paper's study).
            The crop is part of the affine map, so the loss undoes it.
        crop_side_frac: range of the square's side, as a fraction of the canonical view's side. The square lies inside.
        fill: pixels outside the source image: a grey value in [0, 255], or "edge" to repeat the border.
        antialias: if a view is smaller than its source, sample a halved source (mip map). False: always the source.
    """

    side_px: Annotated[int, Field(ge=8, le=4096)] = 128
    rotation_deg: Range = (-45.0, 45.0)
    translation_frac: Fraction = 15 / 128
    scale: Annotated[tuple[Factor, Factor], AfterValidator(_ordered)] = (0.6, 2.0)
    scale_is: Literal["magnification", "margin"] = "magnification"
    crop_probability: Probability = 0.0
    crop_side_frac: Annotated[tuple[PositiveFraction, PositiveFraction], AfterValidator(_ordered)] = (0.5, 1.0)
    fill: Annotated[int, Field(ge=0, le=255)] | Literal["edge"] = 0
    antialias: bool = True


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
        shared_factor: one draw scales both hue and saturation (the paper has one s); False: one draw for each.
    """

    jitter: Literal["hsv", "linear", "none"] = "hsv"
    hue: Range = (0.01, 1.0)
    saturation: Range = (0.01, 1.0)
    value_scale: Range = (0.5, 1.0)
    value_shift: Range = (5.0, 20.0)
    shared_factor: bool = False

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
        """Whether any of them is switched on."""
        return any(value for name, value in vars(self).items() if name.endswith("_probability"))

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


@dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class Augmentation:
    """The three tables geometry, colour and appearance of a configuration."""

    geometry: GeometryConfig = GeometryConfig()
    colour: ColourConfig = ColourConfig()
    appearance: AppearanceConfig = AppearanceConfig()
