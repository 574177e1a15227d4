"""A folder of whole files, of bounded size, that all processes of a machine share.

These rules hold, even if a process is killed at any moment:

1. A file is written as NAME.part, and gets its name after it was synced and its checksum compared. Nobody reads a part.
2. Who writes NAME.part has the lock NAME.lock, which ends with the process. A part without a lock was left by a kill.
3. Under the lock of the folder, a part gets its full size, after room was made for it. So all files together, parts
   included, never take more than the bound.
4. The least recently used file is removed first. A process that has it open can still read it.
"""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Final

from filelock import FileLock, Timeout

from peclr_dali.errors import UserError

FOLDER_ENDING: Final = ".shards"
"""Folders with this ending belong to the cache; nothing else beside them is counted or removed."""


class NoRoom(Exception):  # noqa: N818  a state of the disk
    """The file does not fit: the disk is full, or too many other files were used lately."""


class WrongBytes(Exception):  # noqa: N818  as errno's names
    """The file does not have its checksum."""


class Cache:
    """The files below `folder` whose names begin with a folder `*.shards`; `limit` bytes at most."""

    def __init__(self, folder: Path, limit: int) -> None:
        self.folder, self.limit = folder, limit

    def use(self, name: str) -> bool:
        """Whether a file is there. It counts as used now."""
        now = time.time_ns()
        try:
            os.utime(self.folder / name, ns=(now, now))
        except OSError as error:
            return isinstance(error, PermissionError)  # a file of another user
        return True

    def add(self, name: str, size: int, pieces: Iterable[bytes], sha256: str | None, before: float) -> bool:
        """Write a file, unless it is there. Returns False if another process writes it now.

        Args:
            pieces: of its `size` bytes. They raise no `OSError`.
            sha256: its checksum; None compares nothing.
            before: only files that were last used before this time (nanoseconds) are removed for it.

        Raises:
            NoRoom: these are not enough.
            WrongBytes: the checksum is another one.
            UserError: the folder cannot be written to.
        """
        path, part, found = self.folder / name, self.folder / f"{name}.part", hashlib.sha256()
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with self._lock(name).acquire(blocking=False):
                if self.use(name):
                    return True
                try:
                    with part.open("wb") as file:
                        with self._lock():
                            self._make_room(size, before)
                            os.posix_fallocate(file.fileno(), 0, size)
                        for piece in pieces:
                            file.write(piece)
                            found.update(piece)
                        file.flush()
                        os.fsync(file.fileno())
                    if sha256 not in (None, found.hexdigest()):
                        raise WrongBytes
                    with self._lock():
                        part.rename(path)
                    return True
                finally:
                    with self._lock():
                        part.unlink(missing_ok=True)
        except Timeout:
            return False
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                raise NoRoom("the disk is full") from error
            what = f"data.cache = {self.folder}: {error.strerror or error}"
            raise UserError(f"{what}. Name a folder on a local disk that can be written to.") from error

    def _make_room(self, size: int, before: float) -> None:
        """Remove as few files as possible, the least recently used first; or none, and raise `NoRoom`."""
        found = {}
        for path in self.folder.glob(f"*{FOLDER_ENDING}/**/*"):
            with suppress(FileNotFoundError):  # removed meanwhile
                if path.suffix != ".lock" and path.is_file():
                    found[path] = path.stat()
        taken, free = sum(on_disk(status.st_size) for status in found.values()), shutil.disk_usage(self.folder).free
        excess, chosen = on_disk(size) + max(taken - self.limit, -free), []
        why = "the disk is full" if -free > taken - self.limit else "the bound data.cache_gb is reached"
        for path, status in sorted(found.items(), key=lambda file: file[1].st_mtime_ns):
            if excess > 0 and status.st_mtime_ns < before and not self._is_written(path):
                chosen.append(path)
                excess -= on_disk(status.st_size)
        if excess > 0:
            raise NoRoom(why)
        for path in chosen:
            path.unlink(missing_ok=True)

    def _is_written(self, path: Path) -> bool:
        """Whether a file is a part that a process writes."""
        with suppress(Timeout):
            if path.suffix == ".part":
                self._lock(str(path.with_suffix(""))).acquire(blocking=False).lock.release()
            return False
        return True

    def _lock(self, name: str = "") -> FileLock:
        """The lock of a file, or else of the folder."""
        return FileLock(self.folder / f"{name}.lock", fallback_to_soft=False)


def on_disk(size: int) -> int:
    """A file's size in whole blocks of 4096 bytes."""
    return -(-size // 4096) * 4096
