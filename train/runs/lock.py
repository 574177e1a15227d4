"""One process at a time writes into a run's folder."""

from __future__ import annotations

import errno
import fcntl
import json
import logging
import os
import platform
import time
from contextlib import suppress
from pathlib import Path
from typing import Final

from errors import UserError

log = logging.getLogger(__name__)

LOCK: Final = "lock"
"""Name of the locked file. It contains the host, process and start time of the holder."""


def require_free(folder: Path) -> None:
    """Check, before torch is imported, that no process holds a folder. `FolderLock` decides it later.

    Raises:
        UserError: another process holds the folder; the message names it.
    """
    with suppress(OSError), (folder / LOCK).open("rb") as file:
        try:
            fcntl.flock(file.fileno(), fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            raise _in_use(folder, file.fileno()) from None


class FolderLock:
    """Holds a folder for this process, within a `with` block.

    The kernel releases the lock when the process ends, even if it is killed; a lock file that is left behind locks
    nothing. Between hosts it works if the shared file system supports locks, as NFS does.

    A missing folder is made, and removed again if it is still empty at the end.

    Raises:
        UserError: another process holds the folder (the message names it), or the folder cannot be made.
    """

    def __init__(self, folder: Path) -> None:
        self._folder, self._file = folder, folder / LOCK
        self._made: list[Path] = []
        self._descriptor = -1

    def __enter__(self) -> FolderLock:
        self._made = [path for path in (self._folder, *self._folder.parents) if not path.exists()]
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            self._take()
        except OSError as error:
            self._release()
            if error.errno in (errno.EROFS, errno.EACCES, errno.EPERM) and self._folder.is_dir():
                return self  # no lock is needed where nothing can be written; writing gives the error later
            raise UserError(f"run.out = {self._folder} cannot be written to: {error.strerror}") from error
        return self

    def __exit__(self, *_: object) -> None:
        self._release()

    def _take(self) -> None:
        while self._descriptor < 0:
            descriptor = os.open(self._file, os.O_RDWR | os.O_CREAT, 0o666)
            try:
                self._lock(descriptor)
                if _is_still(self._file, descriptor):  # else the last holder has just removed the file: try again
                    self._descriptor = descriptor
            finally:
                if descriptor != self._descriptor:
                    os.close(descriptor)

        holder = {"host": platform.node(), "pid": os.getpid(), "since": time.strftime("%F %T %Z")}
        os.ftruncate(self._descriptor, 0)
        os.pwrite(self._descriptor, json.dumps(holder).encode() + b"\n", 0)

    def _lock(self, descriptor: int) -> None:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise _in_use(self._folder, descriptor) from None
        except OSError as error:
            if error.errno not in (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS):
                raise
            log.warning(
                "the file system of %s has no locks: nothing keeps a second run from writing there", self._folder
            )

    def _release(self) -> None:
        """Release the lock, and remove the folders that were made for it and are still empty."""
        if self._descriptor >= 0:
            with suppress(OSError):
                self._file.unlink()  # before the release, or it could be the next holder's file
            os.close(self._descriptor)
            self._descriptor = -1
        made, self._made = self._made, []
        with suppress(OSError):
            for path in made:
                path.rmdir()


def _in_use(folder: Path, descriptor: int) -> UserError:
    try:
        holder = json.loads(os.pread(descriptor, 1000, 0))
        name = f"process {holder['pid']} on {holder['host']} since {holder['since']}"
    except (ValueError, KeyError, TypeError):  # the holder has not written its name yet
        name = "another process"
    return UserError(
        f"run.out = {folder} is in use by {name}: wait until it has ended or stop it, or name another folder with "
        f"--set run.out=..."
    )


def _is_still(file: Path, descriptor: int) -> bool:
    try:
        return os.path.samestat(file.stat(), os.fstat(descriptor))
    except FileNotFoundError:
        return False
