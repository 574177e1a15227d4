"""Projects points from a camera's frame to pixels, and checks their unit."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt

from peclr_dali.errors import UserError

_FARTHEST_M: Final = 20.0
"""Largest distance of a hand in metres; a larger one means a wrong unit."""

_LONGEST_M: Final = 1.0
"""Largest length of a bone in metres."""


def project_px(intrinsics: npt.NDArray[np.float64], xyz_m: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Project points (N, K, 3) to pixels (N, K, 2) by (N, 3, 3) or (3, 3). Points behind the camera give NaN."""
    homogeneous = xyz_m @ np.swapaxes(intrinsics, -1, -2)
    depth = np.where(homogeneous[..., 2:] > 0, homogeneous[..., 2:], np.nan)
    pixels: npt.NDArray[np.float64] = homogeneous[..., :2] / depth
    return pixels


def require_metres(file: Path, values: npt.NDArray[np.float64]) -> None:
    """Raise a `UserError` if points (N, K, 3), or lengths of bones (N,), are too large for metres."""
    lengths = values if values.ndim == 1 else np.abs(values[..., 2])
    median, most = float(np.median(lengths)), _LONGEST_M if values.ndim == 1 else _FARTHEST_M
    if median > most:
        what = "bones are longer" if values.ndim == 1 else "keypoints are farther"
        raise UserError(
            f"{file}: half of the {what} than {median:g} m; expected metres. Are they millimetres? Then divide by 1000."
        )
