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
"""Name of the file that is locked; it says which process holds it."""


class FolderLock:
    """Holds a folder for this process, within a `with` block.

    The kernel holds the lock and lets go of it however the process ends, so a file that a kill left behind locks
    nothing. On a shared file system it holds between hosts if the file system's locks do, as NFS's.

    The folder is made if it is not there. If nothing was put into it in the end, it is removed again.

    Raises:
        UserError: another process has it, which is named; or the folder cannot be made.
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
                return self  # who may not write here needs no lock, and is told when something is to be written
            raise UserError(f"run.out = {self._folder} cannot be written to: {error.strerror}") from error
        return self

    def __exit__(self, *_: object) -> None:
        self._release()

    def _take(self) -> None:
        while self._descriptor < 0:
            descriptor = os.open(self._file, os.O_RDWR | os.O_CREAT, 0o666)
            try:
                self._lock(descriptor)
                if _is_still(self._file, descriptor):  # else the one before has removed it meanwhile
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
            raise UserError(
                f"run.out = {self._folder} is in use by {_holder(descriptor)}: wait until it has ended or stop it, or "
                f"name another folder with --set run.out=..."
            ) from None
        except OSError as error:
            if error.errno not in (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS):
                raise
            log.warning(
                "the file system of %s has no locks: nothing keeps a second run from writing there", self._folder
            )

    def _release(self) -> None:
        """Let go, and remove the folders that were made for this, as far as they are empty."""
        if self._descriptor >= 0:
            with suppress(OSError):
                self._file.unlink()  # while it is held, so that nobody else's file is removed
            os.close(self._descriptor)
            self._descriptor = -1
        made, self._made = self._made, []
        with suppress(OSError):
            for path in made:
                path.rmdir()


def _holder(descriptor: int) -> str:
    try:
        said = json.loads(os.pread(descriptor, 1000, 0))
        return f"process {said['pid']} on {said['host']} since {said['since']}"
    except (ValueError, KeyError, TypeError):  # it is about to write it
        return "another process"


def _is_still(file: Path, descriptor: int) -> bool:
    try:
        return os.path.samestat(file.stat(), os.fstat(descriptor))
    except FileNotFoundError:
        return False
