"""What every peer draws: the paper's ranges, and shuffled batches without end."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import numpy as np

VIEW_PX: Final = 128
ROTATION_DEG: Final = (-45.0, 45.0)
SHIFT_FRAC: Final = (-15 / 128, 15 / 128)
SCALE: Final = (0.6, 2.0)
HUE: Final = (0.01, 1.0)
SATURATION: Final = (0.01, 1.0)
VALUE: Final = (0.5, 1.0)
VALUE_SHIFT: Final = (5 / 255, 20 / 255)

_RANGES: Final = np.array([ROTATION_DEG, SHIFT_FRAC, SHIFT_FRAC, SCALE, HUE, SATURATION, VALUE, VALUE_SHIFT])


@dataclass(frozen=True)
class Draw:
    """One view's augmentation; hue, saturation and value are factors, value_shift is added, in fractions of 1."""

    rotation_deg: float
    x_frac: float
    y_frac: float
    scale: float
    hue: float
    saturation: float
    value: float
    value_shift: float


def draw(count: int, rng: np.random.Generator) -> list[Draw]:
    """`count` independent draws, from one call of the generator."""
    rows = _RANGES[:, 0] + rng.random((count, len(_RANGES))) * (_RANGES[:, 1] - _RANGES[:, 0])
    return [Draw(*row) for row in rows.tolist()]


def endless_batches(samples: int, batch: int) -> Iterator[list[int]]:
    """Whole batches of shuffled epochs, one after the other; a batch may span epochs."""
    rng = np.random.default_rng()
    order: list[int] = []
    while True:
        while len(order) < batch:
            order += rng.permutation(samples).tolist()
        yield order[:batch]
        del order[:batch]
