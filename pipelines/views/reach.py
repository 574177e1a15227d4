"""Bounds, over all draws, the part of an image that views of a geometry can show."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

from peclr_dali.pipelines.views.augmentation import GeometryConfig

_ROUNDED: Final = 1 + 1e-6
"""Largest factor by which a view exceeds its ranges, since draws and boxes are float32."""

SMALLEST_SIDE: Final = 0.5
"""Smallest side of the views that stored parts of images serve, as a share of the side that they were packed for."""


@dataclass(frozen=True)
class Reach:
    """Bounds over all draws, relative to the box with its margin.

    Attributes:
        side: side of the square around the box's centre that contains all views, in sides of the box.
        least_px: smallest magnification, in pixels of a view per side of the box.
        most_px: largest magnification.
    """

    side: float
    least_px: float
    most_px: float


def reach_of(geometry: GeometryConfig) -> Reach:
    """The reach of all views that `peclr_dali.pipelines.views.draws.draw_view` can draw."""
    least, most = magnification_range(geometry)
    side = (1 + 2 * geometry.translation_frac) * _widening(*geometry.rotation_deg) / least
    sides = [side]
    if geometry.crop_probability > 0:
        smallest, largest = geometry.crop_side_frac
        # A crop of side c lies inside the canonical view, so its centre is up to (1 - c) / 2 away.
        crops = [1 - crop + crop * side for crop in geometry.crop_side_frac]
        certain = geometry.crop_probability == 1
        sides = crops if certain else [side, *crops]
        least, most = least / largest if certain else least, most / smallest
    return Reach(_ROUNDED * max(sides), geometry.side_px * least / _ROUNDED, geometry.side_px * most * _ROUNDED)


def magnification_range(geometry: GeometryConfig) -> tuple[float, float]:
    """The smallest and the largest magnification, 1 for the canonical view, whichever way `geometry.scale` is given."""
    least, most = geometry.scale
    return (1 / most, 1 / least) if geometry.scale_is == "margin" else (least, most)


def _widening(low_deg: float, high_deg: float) -> float:
    """Largest side of the upright square around a unit square that is turned by an angle in the range."""
    if math.floor((high_deg - 45) / 90) >= math.ceil((low_deg - 45) / 90):  # on its corner
        return math.sqrt(2)
    turns = (math.radians(low_deg), math.radians(high_deg))
    return max(abs(math.cos(turn)) + abs(math.sin(turn)) for turn in turns)
