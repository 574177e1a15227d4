"""The one composition of a view's matrices, as nodes of the DALI graph.

Both backends take their matrices from here, on the CPU also when the pixels are on a GPU: what warps the pixels, what
carries the keypoints and what the loss undoes is one draw.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import nvidia.dali.math as dali_math
import nvidia.dali.types as types
from nvidia.dali import fn

from pipelines.draws import Draw
from pipelines.reference import HALVE_BELOW, HALVINGS

Node = Any  # DALI's DataNode carries no types


@dataclass(frozen=True)
class ViewMatrices:
    """Matrices of one view, per sample, as nodes.

    Attributes:
        augmentation: (2, 3) u -> A u + v in units of the output side, origin at the centre.
        source_to_view_px: (2, 3) source pixels -> view pixels, corner-based.
        minified_size_px: (2,) height and width of the source after it was halved as often as the view needs.
        minified_to_view_px: (2, 3) pixels of that smaller source -> view pixels: what the warp uses.
    """

    augmentation: Node
    source_to_view_px: Node
    minified_size_px: Node
    minified_to_view_px: Node


def compose(box_px: Node, size_px: Node, draws: Node, *, side_px: int, antialias: bool) -> ViewMatrices:
    """Matrices of one view.

    Args:
        box_px: (3,) centre x, centre y and side of the canonical box in the source; side 0 means the whole image.
        size_px: (2,) height and width of the source as decoded.
        draws: (len(Draw),) the view's row of the table of draws.
        side_px: side of the output.
        antialias: whether strongly minified views sample a halved source; otherwise the minified source is the source.
    """
    height, width = size_px[0], size_px[1]
    whole = fn.cast(box_px[2] <= 0, dtype=types.FLOAT)
    box_side = box_px[2] + whole * dali_math.max(height, width)
    # A NaN cannot arise here: all terms are finite, and one of the two weights is zero.
    center_x = (1 - whole) * box_px[0] + whole * width / 2
    center_y = (1 - whole) * box_px[1] + whole * height / 2

    magnification = draws[Draw.MAGNIFICATION]
    augmentation = fn.transforms.scale(scale=fn.stack(magnification, magnification))
    augmentation = fn.transforms.rotation(augmentation, angle=draws[Draw.ANGLE_DEG])
    augmentation = fn.transforms.translation(
        augmentation, offset=fn.stack(draws[Draw.SHIFT_X_FRAC], draws[Draw.SHIFT_Y_FRAC])
    )

    canonical = fn.transforms.translation(offset=fn.stack(-center_x, -center_y))
    canonical = fn.transforms.scale(canonical, scale=fn.stack(1 / box_side, 1 / box_side))
    source_to_view = fn.transforms.combine(canonical, augmentation)
    source_to_view = fn.transforms.scale(source_to_view, scale=[side_px, side_px])
    source_to_view = fn.transforms.translation(source_to_view, offset=[side_px / 2, side_px / 2])
    if not antialias:
        return ViewMatrices(augmentation, source_to_view, size_px, source_to_view)

    shrink = magnification * side_px / box_side
    halved_height, halved_width = height, width
    for level in range(HALVINGS):
        halve = fn.cast(shrink < HALVE_BELOW * 0.5**level, dtype=types.FLOAT)
        halved_height = (1 - halve) * halved_height + halve * dali_math.ceil(halved_height / 2)
        halved_width = (1 - halve) * halved_width + halve * dali_math.ceil(halved_width / 2)
    enlarge = fn.transforms.scale(scale=fn.stack(width / halved_width, height / halved_height))
    return ViewMatrices(
        augmentation,
        source_to_view,
        fn.stack(halved_height, halved_width),
        fn.transforms.combine(enlarge, source_to_view),
    )
