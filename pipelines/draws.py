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

Range: TypeAlias = tuple[float, float]
FloatArray: TypeAlias = npt.NDArray[np.float32]
IntArray: TypeAlias = npt.NDArray[np.int64]
BoolArray: TypeAlias = npt.NDArray[np.bool_]

UNIFORMS_PER_VIEW = 32
"""Uniform numbers set aside for one view of one sample; a multiple of Philox's block of four."""

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


@dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class GeometryConfig:
    """Random affine map of a view (paper, supplement, "Self-supervised pre-training").

    Attributes:
        side_px: side of the square output.
        rotation_deg: range of the angle; positive turns x towards y, clockwise on the screen.
        translation_frac: largest shift along each axis, as a fraction of the output's side (the paper's 15 of 128).
        scale: range of the scale.
        scale_is: whether scale 2 shows the hand twice as large ("magnification") or twice the margin ("margin").
        fill: what lies outside the source image: a grey value in [0, 255], or "edge" to repeat the border.
        antialias: sample a halved source, like a mip map, where a view minifies; False always samples the source.
    """

    side_px: Annotated[int, Field(ge=8, le=4096)] = 128
    rotation_deg: Range = (-45.0, 45.0)
    translation_frac: Annotated[float, Field(ge=0, le=1)] = 15 / 128
    scale: Range = (0.6, 2.0)
    scale_is: Literal["magnification", "margin"] = "magnification"
    fill: Annotated[int, Field(ge=0, le=255)] | Literal["edge"] = 0
    antialias: bool = True

    @field_validator("rotation_deg", "scale")
    @classmethod
    def _ordered(cls, value: Range) -> Range:
        return _ordered_range(value)

    @field_validator("scale")
    @classmethod
    def _positive(cls, value: Range) -> Range:
        if value[0] <= 0:
            raise ValueError(f"the scale must be positive, found {value[0]}")
        return value


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


def _ordered_range(value: Range) -> Range:
    if value[0] > value[1]:
        raise ValueError(f"a range goes from low to high, found {list(value)}")
    return value


def philox(seed: int, stream: Stream, *, epoch: int = 0, view: int = 0) -> np.random.Philox:
    """The generator of one stream; equal arguments give equal numbers on every machine."""
    return np.random.Philox(key=[seed, (int(stream) << 48) | (view << 40) | epoch])


def _uniforms(seed: int, epoch: int, view: int, positions: IntArray) -> npt.NDArray[np.float64]:
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
    geometry: GeometryConfig, colour: ColourConfig, *, seed: int, epoch: int, view: int, positions: IntArray
) -> FloatArray:
    """The table of draws of one view.

    Args:
        geometry: ranges of the affine map.
        colour: ranges of the colour jitter.
        seed: the run's seed.
        epoch: epoch that the positions belong to.
        view: which view of the sample.
        positions: (N,) places in the epoch's global order.

    Returns:
        (N, len(Draw)) float32, columns as in `Draw`.
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
    low, high = np.array([ranges[column] for column in Draw]).T
    table: npt.NDArray[np.float64] = low + (high - low) * uniform[:, : len(Draw)]
    if geometry.scale_is == "margin":
        table[:, Draw.MAGNIFICATION] = 1 / table[:, Draw.MAGNIFICATION]
    return table.astype(np.float32)
