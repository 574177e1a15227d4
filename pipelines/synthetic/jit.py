"""The one door to Numba, which ships no types: `kernel` keeps the signature that the function was written with."""

from collections.abc import Callable
from typing import ParamSpec, TypeVar, cast

import numba
import numpy as np
from numpy.typing import NDArray

P = ParamSpec("P")
R = TypeVar("R")

Floats = NDArray[np.float64]
"""Array of doubles; shapes and units stand in each docstring."""

Pixels = NDArray[np.float32]
"""Array of single-precision values per pixel or per sample."""


def kernel(function: Callable[P, R]) -> Callable[P, R]:
    """Compile `function` to machine code on its first call and keep the result on disk.

    The cache matters: every worker process imports this package, and compiling takes seconds.
    """
    compiled = numba.njit(cache=True, nogil=True, fastmath=True, error_model="numpy")(function)
    return cast(Callable[P, R], compiled)
