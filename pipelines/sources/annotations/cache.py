"""Caches tables that take long to read from a dataset's annotations."""

from __future__ import annotations

import hashlib
import logging
import os
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from machine.user_cache import user_cache
from writing import whole_file

Tables = dict[str, npt.NDArray[Any]]

log = logging.getLogger(__name__)


def remembered(name: str, files: Sequence[Path], read: Callable[[], Tables]) -> Tables:
    """The result of `read` for some files, or for all files in some folders, from the cache if no file has changed.

    The cache is `peclr-dali/` in $XDG_CACHE_HOME, or in ~/.cache. A file counts as unchanged while its path, size and
    time of modification are the same. If the cache cannot be written, the next run reads again.

    Args:
        name: name of the cache entry. It contains the version of the reader, so that a new version makes a new entry.
        read: makes the tables; none of them holds Python objects.
    """
    stamps = [(str(file.resolve()), *_stamp(file.stat()), _files_in(file)) for file in files]
    key = hashlib.blake2b(repr((name, stamps)).encode(), digest_size=12).hexdigest()
    entry = user_cache() / "peclr-dali" / f"{name}-{key}.npz"
    try:
        with entry.open("rb") as file, np.load(file, allow_pickle=False) as stored:
            return dict(stored)
    except (FileNotFoundError, NotADirectoryError):
        pass
    except (OSError, ValueError, EOFError, zipfile.BadZipFile) as error:  # a damaged entry is no entry
        reason = error.strerror if isinstance(error, OSError) else "damaged"  # NumPy's advice is to run what is in it
        log.warning("%s: the cache cannot be read (%s); reading the annotations again", entry, reason)
    tables = read()
    try:
        entry.parent.mkdir(parents=True, exist_ok=True)
        with whole_file(entry, durable=False) as new:
            np.savez(new, **tables)  # type: ignore[arg-type]  # the stub takes the first name for a flag
    except OSError as error:
        log.info("%s: not written (%s); the next run reads the annotations again", entry, error.strerror)
    return tables


def _stamp(status: os.stat_result) -> tuple[int, int]:
    """Size and time of modification."""
    return status.st_size, status.st_mtime_ns


def _files_in(folder: Path) -> str:
    """A hash of the names and stamps of a folder's files; empty if it is no folder.

    A folder's own time does not change when one of its files is written in place.
    """
    if not folder.is_dir():
        return ""
    with os.scandir(folder) as entries:
        stamps = sorted((entry.name, *_stamp(entry.stat())) for entry in entries if entry.is_file())
    return hashlib.blake2b(repr(stamps).encode(), digest_size=12).hexdigest()
