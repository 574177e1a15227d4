"""Colour jitter as nodes of the DALI graph: the same arithmetic on a CPU and on a GPU.

DALI's own `fn.hsv` works linearly in YIQ and cannot scale a hue, so HSV is written out here in DALI's arithmetic,
which runs on either device (paper, supplement, "Self-supervised pre-training").
"""

from __future__ import annotations

from typing import Any

import nvidia.dali.math as dali_math
from nvidia.dali import fn

from peclr_dali.pipelines.views.augmentation import ColourConfig
from peclr_dali.pipelines.views.draws import Draw

Node = Any  # DALI's DataNode carries no types

_TINY = 1e-6


def jitter(image: Node, colour: ColourConfig, draws: Node) -> Node:
    """Jitter (S, S, 3) float pixels in [0, 255] by the view's `draws`: the same shape, not yet rounded or clipped."""
    if colour.jitter == "hsv":
        return _hsv(image, draws[Draw.HUE], draws[Draw.SATURATION], draws[Draw.VALUE_SCALE], draws[Draw.VALUE_SHIFT])
    return image


def _hsv(image: Node, hue: Node, saturation: Node, value_scale: Node, value_shift: Node) -> Node:
    """Scale hue and saturation, map value to a x + b, without branches.

    With value V, chroma C and hue h in sixths of a turn, channel n of the result is
    V' - V' S' clip(min(k, 4 - k), 0, 1), k = (n + h') mod 6, for n = 5, 3, 1.
    """
    red, green, blue = (image[:, :, channel] for channel in range(3))
    value = dali_math.max(red, dali_math.max(green, blue))
    chroma = value - dali_math.min(red, dali_math.min(green, blue))
    per_chroma = 1 / dali_math.max(chroma, _TINY)

    is_red = red >= value
    is_green = (green >= value) & (red < value)
    is_blue = (red < value) & (green < value)
    from_red = (green - blue) * per_chroma
    sixths = (
        is_red * (from_red + 6.0 * (from_red < 0))
        + is_green * ((blue - red) * per_chroma + 2.0)
        + is_blue * ((red - green) * per_chroma + 4.0)
    ) * hue

    new_value = dali_math.min(value * value_scale + value_shift, 255.0)
    new_chroma = new_value * saturation * chroma / dali_math.max(value, _TINY)

    def channel(offset: float) -> Node:
        k = sixths + offset
        k = k - 6.0 * (k >= 6)
        return new_value - new_chroma * dali_math.clamp(dali_math.min(k, 4.0 - k), 0.0, 1.0)

    return fn.stack(channel(5.0), channel(3.0), channel(1.0), axis=2)
