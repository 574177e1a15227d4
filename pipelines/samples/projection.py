"""Projects points by a camera."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt


def project_px(intrinsics: npt.NDArray[Any], xyz_m: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Project points (N, K, 3) to pixels (N, K, 2) by (N, 3, 3) or (3, 3). Points behind the camera give NaN."""
    homogeneous = xyz_m @ np.swapaxes(intrinsics, -1, -2)
    depth = np.where(homogeneous[..., 2:] > 0, homogeneous[..., 2:], np.nan)
    pixels: npt.NDArray[Any] = homogeneous[..., :2] / depth
    return pixels
