"""What all peers share: the paper's random numbers, the map from source to view, and endless shuffled batches."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

BoxArray = npt.NDArray[np.float32]

VIEW_PX: Final = 128
ROTATION_DEG: Final = (-45.0, 45.0)
SHIFT_FRAC: Final = (-15 / 128, 15 / 128)
SCALE: Final = (0.6, 2.0)
HUE: Final = (0.01, 1.0)
SATURATION: Final = (0.01, 1.0)
VALUE: Final = (0.5, 1.0)
VALUE_SHIFT: Final = (5 / 255, 20 / 255)

RANGES: Final = np.array([ROTATION_DEG, SHIFT_FRAC, SHIFT_FRAC, SCALE, HUE, SATURATION, VALUE, VALUE_SHIFT])


@dataclass(frozen=True)
class PeerDraw:
    """One view's augmentation; hue, saturation and value are factors, value_shift is added, in fractions of 1."""

    rotation_deg: float
    x_frac: float
    y_frac: float
    scale: float
    hue: float
    saturation: float
    value: float
    value_shift: float


def draw(count: int, rng: np.random.Generator) -> list[PeerDraw]:
    """`count` independent draws, from one call of the generator."""
    rows = RANGES[:, 0] + rng.random((count, len(RANGES))) * (RANGES[:, 1] - RANGES[:, 0])
    return [PeerDraw(*row) for row in rows.tolist()]


def endless_batches(samples: int, batch: int) -> Iterator[list[int]]:
    """Whole batches of shuffled epochs, one after the other; a batch may span epochs."""
    rng = np.random.default_rng()
    order: list[int] = []
    while True:
        while len(order) < batch:
            order += rng.permutation(samples).tolist()
        yield order[:batch]
        del order[:batch]


def whole_image_px(width_px: int, height_px: int) -> tuple[float, float, float]:
    """The square around a whole image: centre x, centre y, side."""
    return width_px / 2, height_px / 2, float(max(width_px, height_px))


def source_to_view_px(box_px: Sequence[float], one: PeerDraw) -> npt.NDArray[np.float64]:
    """(2, 3) from source to view for cv2.warpAffine, whose frame has its origin in the first pixel's centre."""
    x_px, y_px, side_px = box_px
    magnification = one.scale * VIEW_PX / side_px
    cosine = magnification * math.cos(math.radians(one.rotation_deg))
    sine = magnification * math.sin(math.radians(one.rotation_deg))
    x_px, y_px = x_px - 0.5, y_px - 0.5
    center_px = VIEW_PX / 2 - 0.5
    return np.array(
        [
            [cosine, -sine, center_px + one.x_frac * VIEW_PX - cosine * x_px + sine * y_px],
            [sine, cosine, center_px + one.y_frac * VIEW_PX - sine * x_px - cosine * y_px],
        ]
    )
