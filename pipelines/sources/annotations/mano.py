"""MANO's mesh and joints in the keypoints of `Index`.

Romero et al., "Embodied Hands: Modeling and Capturing Hands and Bodies Together", SIGGRAPH Asia 2017. The model's
licence forbids redistribution, so users have to provide the regressor.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt

from peclr_dali.errors import UserError
from peclr_dali.pipelines.sources.annotations.dataset_file import dataset_file
from peclr_dali.skeleton import hand_rows

VERTICES: Final = 778
JOINTS: Final = 16

TIP_VERTICES: Final = (744, 320, 443, 555, 672)
"""Vertices at the fingertips: thumb, index, middle, ring, little."""

MANO_TO_KEYPOINTS: Final = hand_rows("mano", "freihand")
"""Keypoint i of `Index` is row MANO_TO_KEYPOINTS[i] of MANO's 16 joints followed by the five tips."""


def read_regressor(file: Path) -> npt.NDArray[np.float64]:
    """Read the (16, 778) matrix that maps MANO's vertices to its joints.

    Args:
        file: .npy with the matrix, or .npz with it as "J_regressor" or as the only array.

    Raises:
        UserError: the file has no such matrix.
    """
    expected = f"a {JOINTS} x {VERTICES} matrix of numbers, MANO's joint regressor, as .npy or .npz"
    remedy = "Give the path of the right matrix, saved with numpy.save, as data.regressor."
    with dataset_file(file, expected, remedy) as path, path.open("rb") as content:
        try:
            stored = np.load(content, allow_pickle=False)
            if not isinstance(stored, np.ndarray):
                stored = stored["J_regressor" if len(stored.files) != 1 else stored.files[0]]
            matrix = np.asarray(stored)
        except Exception:  # NumPy's advice is to run the file as a pickle
            raise ValueError("not an array of numbers that NumPy wrote") from None
    if matrix.shape != (JOINTS, VERTICES) or matrix.dtype.kind not in "fiu" or not np.isfinite(matrix).all():
        found = f"{' x '.join(map(str, matrix.shape)) or 'a single'} {matrix.dtype}"
        raise UserError(f"{file}: found {found}; expected {expected}. {remedy}")
    return matrix.astype(np.float64)


def keypoint_regressor(joint_regressor: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """The (21, 778) matrix that maps MANO's vertices to the keypoints of `Index`, fingertips included."""
    tips = np.zeros((len(TIP_VERTICES), VERTICES))
    tips[np.arange(len(TIP_VERTICES)), TIP_VERTICES] = 1
    return np.concatenate([joint_regressor, tips])[MANO_TO_KEYPOINTS]
