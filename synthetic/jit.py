"""The one door to Numba, which ships no types: `kernel` keeps the signature that the function was written with."""

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import ParamSpec, TypeVar, cast

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

    The cache matters: every worker process imports this package, and compiling takes seconds. Numba drops a cached
    kernel when the kernel's own file changes, but not when a kernel that it calls does, in another file. So the name
    that it caches under carries a fingerprint of the whole package.
    """
    function.__qualname__ = f"{function.__qualname__}_{_VERSION}"
    compiled = cached(numba.njit, nogil=True, fastmath=True, error_model="numpy")(function)
    return cast(Callable[P, R], compiled)
