"""Compiles with Numba."""

import numba
import numpy as np
from numpy.typing import NDArray

from peclr_dali.machine.compiled import cached

Floats = NDArray[np.float64]
"""Array of doubles; shapes and units stand in each docstring."""

Pixels = NDArray[np.float32]
"""Array of single-precision values per pixel or per sample."""

kernel = cached(numba.njit, nogil=True, fastmath=True, error_model="numpy")
"""Compiles a function to machine code on its first call. The result is kept on disk, for all worker processes."""
