"""Draws the nearest neighbours of a few images, by two encoders."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import cv2
import numpy as np

from peclr_dali.bench.classification.labels import Labels, Rows
from peclr_dali.train.probe.features import Floats, Pixels
from peclr_dali.train.report.neighbours import nearest_by_angle
from peclr_dali.train.runs.pictures import Image, save_sheet

SIDE_PX: Final = 64
COUNT: Final = 5
"""Neighbours by each encoder."""
QUERIES: Final = 12
"""Most classes that are shown."""
GAP_PX: Final = 16
_FRAME_PX: Final = 4
_RIGHT, _WRONG, _NEUTRAL = (44, 140, 60), (200, 60, 50), (120, 120, 120)


def save_neighbours(
    file: Path, views: Pixels, features: tuple[Floats, Floats], labels: Labels, fitted: Rows, tested: Rows
) -> None:
    """Draw for one tested image of each class its nearest among the fitted ones, by cosine of their features.

    A strip shows the image, then its neighbours by the first encoder, then by the second, the nearest first. The frame
    is green if the neighbour is of the same class, red if not.

    Args:
        views: (N, S, S, 3).
        features: (N, D) of each encoder.
        labels: of the N samples.
    """
    strips = []
    gap = np.full((SIDE_PX, GAP_PX, 3), 255, np.uint8)
    rng = np.random.default_rng(0)
    for label in np.unique(labels.label[tested])[:QUERIES]:
        query = rng.choice(tested[labels.label[tested] == label])
        parts = [_framed(views[query], _NEUTRAL)]
        for found in features:
            nearest = nearest_by_angle(found, query, fitted, COUNT)
            parts.append(gap)
            parts += [_framed(views[row], _RIGHT if labels.label[row] == label else _WRONG) for row in nearest]
        strips.append(np.concatenate(parts, axis=1))
    save_sheet(file, strips, columns=1)


def _framed(view: Pixels, colour: tuple[int, int, int]) -> Image:
    """A view with a frame, SIDE_PX wide in all."""
    inner = SIDE_PX - 2 * _FRAME_PX
    picture = np.full((SIDE_PX, SIDE_PX, 3), colour, np.uint8)
    picture[_FRAME_PX:-_FRAME_PX, _FRAME_PX:-_FRAME_PX] = cv2.resize(view, (inner, inner), interpolation=cv2.INTER_AREA)
    return picture
