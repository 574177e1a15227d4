"""Configuration of the random augmentations.

This file imports neither torch nor DALI nor Numba, so that a mistake in a configuration is reported at once.
"""

from dataclasses import replace
from typing import Annotated, Literal

from pydantic import Field, field_validator
from pydantic.dataclasses import dataclass

from peclr_dali.bounds import STRICT, Factor, Fraction, NotNegative, PositiveFraction
from peclr_dali.pipelines.views.appearance import AppearanceConfig as AppearanceConfig
from peclr_dali.pipelines.views.appearance import FractionRange, Ordered, Range


@dataclass(frozen=True, config=STRICT)
class GeometryConfig:
    """Random affine map of a view (paper, supplement, "Self-supervised pre-training").

    Attributes:
        side_px: side of the square output.
        rotation_deg: range of the angle; positive turns x towards y, clockwise on the screen.
        translation_frac: largest shift along each axis, as a fraction of the output's side (the paper's 15 of 128).
        scale: range of the scale.
        scale_is: whether scale 2 shows the hand twice as large ("magnification") or twice the margin ("margin").
        crop_probability: probability that a view shows only a random square of the canonical view (the paper's study).
            The crop is part of the affine map, so it is undone too.
        crop_side_frac: range of the square's side, as a fraction of the canonical view's side. The square lies inside.
        flip_probability: probability that a view is flipped left for right, after the crop and before the rotation. The
            flip is part of the affine map, so it is undone too. Keypoints keep their names.
        fill: pixels outside the source image: a grey value in [0, 255], or "edge" to repeat the border.
        antialias: if a view is smaller than its source, sample a halved source (mip map). False: always the source.
    """

    side_px: Annotated[int, Field(ge=8, le=4096)] = 128
    rotation_deg: Range = (-45.0, 45.0)
    translation_frac: Fraction = 15 / 128
    scale: Annotated[tuple[Factor, Factor], Ordered] = (0.6, 2.0)
    scale_is: Literal["magnification", "margin"] = "magnification"
    crop_probability: Fraction = 0.0
    crop_side_frac: Annotated[tuple[PositiveFraction, PositiveFraction], Ordered] = (0.5, 1.0)
    flip_probability: Fraction = 0.0
    fill: Annotated[int, Field(ge=0, le=255)] | Literal["edge"] = 0
    antialias: bool = True

    @field_validator("fill", mode="before")
    @classmethod
    def _grey_or_edge(cls, value: object) -> object:
        if value != "edge" and not (type(value) is int and 0 <= value <= 255):  # one line for both
            raise ValueError('input should be a grey value in [0, 255], or "edge"')
        return value


def without_augmentation(geometry: GeometryConfig) -> GeometryConfig:
    """The geometry of the canonical view: its size and fill, no map."""
    return replace(
        geometry,
        rotation_deg=(0.0, 0.0),
        translation_frac=0.0,
        scale=(1.0, 1.0),
        crop_probability=0.0,
        crop_side_frac=(1.0, 1.0),
        flip_probability=0.0,
    )


@dataclass(frozen=True, config=STRICT)
class ColourConfig:
    """Colour jitter of a view (paper, supplement): hue, saturation and value of HSV.

    Attributes:
        jitter: "hsv" scales hue and saturation and maps value to a x + b; "none" leaves the colours alone.
        hue: range of the factor of the hue, within [0, 1].
        saturation: range of the factor of the saturation, within [0, 1].
        value_scale: range of a.
        value_shift: range of b, in units of 8-bit pixels.
        shared_factor: one draw scales both hue and saturation (the paper has one s); False: one draw for each.
    """

    jitter: Literal["hsv", "none"] = "hsv"
    hue: FractionRange = (0.01, 1.0)
    saturation: FractionRange = (0.01, 1.0)
    value_scale: Annotated[tuple[NotNegative, NotNegative], Ordered] = (0.5, 1.0)
    value_shift: Annotated[tuple[NotNegative, NotNegative], Ordered] = (5.0, 20.0)
    shared_factor: bool = False


@dataclass(frozen=True, config=STRICT)
class Augmentation:
    """The augmentations of a view: the three tables geometry, colour and appearance of a configuration."""

    geometry: GeometryConfig = GeometryConfig()
    colour: ColourConfig = ColourConfig()
    appearance: AppearanceConfig = AppearanceConfig()
