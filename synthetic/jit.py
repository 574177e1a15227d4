"""Compiles with Numba. Numba has no type annotations; `kernel` keeps the function's own signature."""

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import ParamSpec, TypeVar

import numba
import numpy as np
from numpy.typing import NDArray

from machine.compiled import cached

P = ParamSpec("P")
R = TypeVar("R")

Floats = NDArray[np.float64]
"""Array of doubles; shapes and units stand in each docstring."""

Pixels = NDArray[np.float32]
"""Array of single-precision values per pixel or per sample."""

_SOURCES = b"".join(path.read_bytes() for path in sorted(Path(__file__).parent.glob("*.py")))
_VERSION = hashlib.sha256(_SOURCES).hexdigest()[:12]
"""Changes whenever any file of this package does."""


def kernel(function: Callable[P, R]) -> Callable[P, R]:
    """Compile `function` to machine code on its first call and keep the result on disk.

    Compiling takes seconds, and every worker process needs the kernels, so they are cached. Numba drops a cached kernel
    when the kernel's own file changes. It does not look at the files of other kernels that this one calls. So the name
    in the cache contains a fingerprint of the whole package.
    """
    function.__qualname__ = f"{function.__qualname__}_{_VERSION}"
    return cached(numba.njit, nogil=True, fastmath=True, error_model="numpy")(function)
