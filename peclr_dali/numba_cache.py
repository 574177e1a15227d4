"""Compiled functions, kept on disk."""

import hashlib
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

F = TypeVar("F", bound=Callable[..., Any])

_ROOT = Path(__file__).parents[1]


def cached(njit: Callable[..., Any], **options: Any) -> Callable[[F], F]:
    """Decorator that compiles a function by `numba.njit`, which gets the options.

    The result is kept on disk, if there is a writable folder. Numba drops it when the function's own file changes, but
    functions and constants of other files are compiled into it too. So the name in the cache ends with a fingerprint of
    all files of the function's package.
    """

    def compiled(function: F) -> F:
        file = Path(function.__code__.co_filename)
        if file.is_relative_to(_ROOT):
            function.__qualname__ += _fingerprint(_ROOT / file.relative_to(_ROOT).parts[0])
        try:
            result: F = njit(cache=True, **options)(function)
        except RuntimeError:  # no folder can be written: neither NUMBA_CACHE_DIR, the source's, nor the user's
            result = njit(**options)(function)
        return result

    return compiled


@cache
def _fingerprint(folder: Path) -> str:
    return f"_{hashlib.sha256(b''.join(path.read_bytes() for path in sorted(folder.rglob('*.py')))).hexdigest()[:12]}"
