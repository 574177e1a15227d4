"""Bounds, over all draws, how much views of a geometry magnify."""

from __future__ import annotations

from typing import Final

from peclr_dali.pipelines.views.augmentation import GeometryConfig

_ROUNDED: Final = 1 + 1e-6
"""Largest factor by which a view exceeds its ranges, since draws and boxes are float32."""


def least_magnification_px(geometry: GeometryConfig) -> float:
    """The smallest magnification over all draws, in pixels of a view per side of the box with its margin."""
    least, _ = magnification_range(geometry)
    if geometry.crop_probability == 1:
        least /= geometry.crop_side_frac[1]
    return geometry.side_px * least / _ROUNDED


def magnification_range(geometry: GeometryConfig) -> tuple[float, float]:
    """The smallest and the largest magnification, 1 for the canonical view, whichever way `geometry.scale` is given."""
    least, most = geometry.scale
    return (1 / most, 1 / least) if geometry.scale_is == "margin" else (least, most)
