"""Keeps tables that take long to read in the user's cache."""

import hashlib
import logging
import os
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from peclr_dali.pipelines.arrays import AnyArray
from peclr_dali.pipelines.sources.label_files.dataset_file import dataset_file
from peclr_dali.writing import whole_file

Tables = dict[str, AnyArray]

log = logging.getLogger(__name__)


def remembered(name: str, files: Sequence[Path], read: Callable[[], Tables]) -> Tables:
    """The result of `read` for some files, or for all files in some folders, from the cache if no file has changed.

    The cache is `peclr-dali/` in $XDG_CACHE_HOME, or in ~/.cache. A file counts as unchanged while its path, size and
    time of modification are the same. If the cache cannot be written, the next run reads again.

    Args:
        name: name of the cache entry. It contains the version of the reader, so that a new version makes a new entry.
        read: makes the tables; none of them holds Python objects.

    Raises:
        UserError: a file or folder is missing or unreadable.
    """
    key = hashlib.blake2b(repr((name, list(map(_stamps, files)))).encode(), digest_size=12).hexdigest()
    # A relative one is ignored, as the XDG specification says. Path.home raises for a user without a name.
    chosen = os.environ.get("XDG_CACHE_HOME", "")
    cache = Path(chosen if os.path.isabs(chosen) else os.path.expanduser("~/.cache"))  # noqa: PTH111, PTH117
    entry = cache / "peclr-dali" / f"{name}-{key}.npz"
    try:
        with entry.open("rb") as file, np.load(file, allow_pickle=False) as stored:
            return dict(stored)
    except (FileNotFoundError, NotADirectoryError):
        pass
    except (OSError, ValueError, EOFError, zipfile.BadZipFile):
        log.warning("%s: unreadable or damaged; it is made again", entry)
    tables = read()
    try:
        entry.parent.mkdir(parents=True, exist_ok=True)
        with whole_file(entry, durable=False) as new:
            np.savez(new, **tables)  # type: ignore[arg-type]  # the stub takes the first name for a flag
    except OSError as error:
        log.info("%s: not written (%s); the next run makes it again", entry, error.strerror)
    return tables


def _stamps(path: Path) -> list[tuple[str, int, int]]:
    """Path, size and time of modification of a file; of a folder, those of its files too, which may change in place."""
    with dataset_file(path, "the dataset's annotations", "Check data.root, or unpack the dataset again."):
        files = [path, *sorted(path.iterdir())] if path.is_dir() else [path]
        stats = ((str(file.resolve() if file is path else file), file.stat()) for file in files)
        return [(name, one.st_size, one.st_mtime_ns) for name, one in stats]
