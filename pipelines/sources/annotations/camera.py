"""From a camera's frame to pixels."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt


def project_px(intrinsics: npt.NDArray[np.float64], xyz_m: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Pixels (N, K, 2) of points (N, K, 3), given (N, 3, 3) or (3, 3); NaN behind the camera and where one is NaN."""
    homogeneous = xyz_m @ np.swapaxes(intrinsics, -1, -2)
    depth = np.where(homogeneous[..., 2:] > 0, homogeneous[..., 2:], np.nan)
    pixels: npt.NDArray[np.float64] = homogeneous[..., :2] / depth
    return pixels
