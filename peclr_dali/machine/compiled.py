"""Compiles functions with Numba, and chooses the folders in which Numba, Triton and torch keep what they compile.

By default Numba writes beside the source or into the user's cache, and Triton into the home. In a container that runs
as another user, all may be read-only, and the user may have no name.
"""

from __future__ import annotations

import getpass
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
    """Have Numba and Triton use temporary folders of this user, if they can write nowhere else.

    If the system has no name for this user, `USER` becomes the number. Torch's compiler puts the name into the path of
    its folder, when it is imported, also where `TORCHINDUCTOR_CACHE_DIR` is set, and fails without one.

    A relative XDG_CACHE_HOME is removed: Numba, matplotlib and others would make folders in the current one.

    This changes the environment. Commands call it before Numba, Triton and torch are imported.
    """
    try:
        getpass.getuser()
    except (KeyError, OSError):  # OSError since Python 3.13
        os.environ["USER"] = str(os.getuid())
    if not os.path.isabs(os.environ.get("XDG_CACHE_HOME") or "/"):  # noqa: PTH117
        ignored = os.environ.pop("XDG_CACHE_HOME")
        log.warning("XDG_CACHE_HOME = %r is not an absolute path: ignored, %s is used", ignored, user_cache())
    chosen = os.environ.get(_VARIABLE)
    folders = [Path(chosen)] if chosen else [Path(__file__).parent / "__pycache__", user_cache() / "numba"]
    if not any(_can_be_written(folder) for folder in folders):
        _use_temporary_folder(_VARIABLE, "numba")
    home = os.environ.get("TRITON_HOME") or os.path.expanduser("~")  # noqa: PTH111  Path.home raises without a name
    if "TRITON_CACHE_DIR" not in os.environ and not os.access(home, os.W_OK):
        _use_temporary_folder("TRITON_CACHE_DIR", "triton")


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


def _use_temporary_folder(variable: str, name: str) -> None:
    try:
        os.environ[variable] = str(_temporary_folder(f"peclr-dali-{name}-"))
    except OSError:  # no folder can be written: every process compiles for itself
        os.environ.pop(variable, None)


def _temporary_folder(prefix: str) -> Path:
    """A folder that all processes of this user share and no other user can write, since its files are executed."""
    folder = Path(tempfile.gettempdir()) / f"{prefix}{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or stat.S_IMODE(found.st_mode) != 0o700:
        return Path(tempfile.mkdtemp(prefix=prefix))
    return folder
