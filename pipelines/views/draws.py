"""Augmentation parameters as a pure function of (seed, epoch, place in the epoch, view).

They do not depend on rank, worker, world size, device or interruptions: NumPy's counter-based Philox is advanced to the
place, and every view consumes a fixed number of draws. A new augmentation takes a free column and does not change the
others.
"""

import numpy as np

from peclr_dali.pipelines.arrays import FloatArray, IntArray
from peclr_dali.pipelines.randomness import Stream, uniforms
from peclr_dali.pipelines.views.appearance import Range, draw_appearance
from peclr_dali.pipelines.views.augmentation import Augmentation
from peclr_dali.pipelines.views.columns import Draw

UNIFORMS_PER_VIEW = 32
"""Uniform numbers reserved for one view of one sample; a multiple of Philox's block of four."""

COLUMNS = len(Draw)
"""Width of the table of draws."""


def draw_view(augmentation: Augmentation, *, seed: int, epoch: int, view: int, places: IntArray) -> FloatArray:
    """Draw the augmentations of one view at `places` (N,) of an epoch.

    Returns:
        (N, COLUMNS) float32. Columns of an augmentation that is off are 0.
    """
    geometry, colour, appearance = augmentation.geometry, augmentation.colour, augmentation.appearance
    uniform = uniforms(seed, Stream.VIEW, epoch, places, UNIFORMS_PER_VIEW, view=view)
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
    table = np.zeros((len(places), COLUMNS))
    low, high = np.array(list(ranges.values())).T
    columns = list(ranges)
    table[:, columns] = low + (high - low) * uniform[:, columns]
    if geometry.scale_is == "margin":
        table[:, Draw.MAGNIFICATION] = 1 / table[:, Draw.MAGNIFICATION]
    table[:, Draw.FLIP] = uniform[:, Draw.FLIP] < geometry.flip_probability
    if geometry.crop_probability > 0:
        low, high = geometry.crop_side_frac
        side = low + (high - low) * uniform[:, Draw.CROP_SIDE_FRAC]
        table[:, Draw.CROP] = uniform[:, Draw.CROP] < geometry.crop_probability
        table[:, Draw.CROP_SIDE_FRAC] = side
        for centre in (Draw.CROP_X_FRAC, Draw.CROP_Y_FRAC):
            table[:, centre] = (1 - side) * (uniform[:, centre] - 0.5)
    if appearance.active:
        draw_appearance(appearance, geometry.side_px, uniform, table)
    return table.astype(np.float32)
