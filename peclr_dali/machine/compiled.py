"""Compiles functions with Numba, and chooses the folder in which it keeps them.

By default Numba writes beside the source or into the user's cache. In a container that runs as another user, both may
be read-only.
"""

from __future__ import annotations

import hashlib
import logging
import os
import stat
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

from peclr_dali.machine.user_cache import user_cache

F = TypeVar("F", bound=Callable[..., Any])

log = logging.getLogger(__name__)

_ROOT = Path(__file__).parents[1]
_VARIABLE = "NUMBA_CACHE_DIR"


def choose_cache_folder() -> None:
    """Have Numba use a temporary folder of this user, if it can write nowhere else.

    A relative XDG_CACHE_HOME is removed: Numba, matplotlib and others would make folders in the current one.

    This changes the environment. Commands call it before Numba is imported.
    """
    if not os.path.isabs(os.environ.get("XDG_CACHE_HOME") or "/"):  # noqa: PTH117
        ignored = os.environ.pop("XDG_CACHE_HOME")
        log.warning("XDG_CACHE_HOME = %r is not an absolute path: ignored, %s is used", ignored, user_cache())
    chosen = os.environ.get(_VARIABLE)
    folders = [Path(chosen)] if chosen else [Path(__file__).parent / "__pycache__", user_cache() / "numba"]
    if any(_can_be_written(folder) for folder in folders):
        return
    try:
        os.environ[_VARIABLE] = str(_temporary_folder())
    except OSError:  # no folder can be written: every process compiles for itself
        os.environ.pop(_VARIABLE, None)


def cached(njit: Callable[..., Any], **options: Any) -> Callable[[F], F]:
    """Decorator that compiles a function by `numba.njit`, which gets the options.

    The result is kept on disk, if there is a writable folder. Numba drops it when the function's own file changes, but
    functions and constants of other files are compiled into it too. So the name in the cache ends with a fingerprint of
    all files of the function's package.
    """

    def compiled(function: F) -> F:
        function.__qualname__ += _fingerprint(Path(function.__code__.co_filename))
        try:
            result: F = njit(cache=True, **options)(function)
        except RuntimeError as error:
            if "no locator available" not in str(error):
                raise
            result = njit(**options)(function)
        return result

    return compiled


def _fingerprint(file: Path) -> str:
    """A fingerprint of the files in the project's top folder that holds this one; none for files elsewhere."""
    return _of_folder(_ROOT / file.relative_to(_ROOT).parts[0]) if file.is_relative_to(_ROOT) else ""


@cache
def _of_folder(folder: Path) -> str:
    files = (path.read_bytes() for path in sorted(folder.rglob("*.py")))
    return f"_{hashlib.sha256(b''.join(files)).hexdigest()[:12]}"


def _can_be_written(folder: Path) -> bool:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return True
    except OSError:
        return False


def _temporary_folder() -> Path:
    """A folder that all processes of this user share and no other user can write, since its files are executed."""
    folder = Path(tempfile.gettempdir()) / f"peclr-dali-numba-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or stat.S_IMODE(found.st_mode) != 0o700:
        return Path(tempfile.mkdtemp(prefix="peclr-dali-numba-"))
    return folder
