"""One process at a time writes into a run's folder."""

from __future__ import annotations

import errno
import fcntl
import json
import logging
import os
import platform
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

from peclr_dali.errors import Outage, UserError
from peclr_dali.parsing import regular

log = logging.getLogger(__name__)

LOCK: Final = "lock"
"""Name of the locked file. It contains the host, process and start time of the holder."""


def require_free(folder: Path) -> None:
    """Check, before torch is imported, that no process holds a folder. `locked` takes the lock later.

    Raises:
        Outage: another process holds the folder; the message names it. Under torchrun this may be a rank of the last
            attempt on another host, which ends soon.
    """
    with suppress(OSError), regular(folder / LOCK).open("rb") as file:
        _lock(folder, file.fileno(), fcntl.LOCK_SH)


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold a folder for this process.

    The kernel releases the lock when the process ends, even if it is killed; a lock file that is left behind locks
    nothing. Between hosts it works if the shared file system supports locks, as NFS does.

    A missing folder is made, and removed again if it is still empty at the end.

    Raises:
        Outage: another process holds the folder, see `require_free`.
        UserError: the folder cannot be made.
    """
    made = [path for path in (folder, *folder.parents) if not path.exists()]
    holder = {"host": platform.node(), "pid": os.getpid(), "since": time.strftime("%F %T %Z")}
    descriptor, held = None, False
    try:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT, 0o666)
            _lock(folder, descriptor, fcntl.LOCK_EX)
            if os.fstat(descriptor).st_nlink == 0:  # its holder has just ended, and a third process may hold a new file
                raise _in_use(folder, "another process")
            held = True
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, json.dumps(holder).encode() + b"\n", 0)
        except OSError as error:
            # No lock is needed in a folder where nothing can be written; writing gives the error later.
            if made or error.errno not in (errno.EROFS, errno.EACCES, errno.EPERM):
                raise UserError(f"run.out = {folder} cannot be written to: {error.strerror}") from error
        yield
    finally:
        if descriptor is not None:
            if held:
                with suppress(OSError):
                    (folder / LOCK).unlink()  # before the release, or it could be the next holder's file
            os.close(descriptor)
        with suppress(OSError):
            for path in made:
                path.rmdir()


def _lock(folder: Path, descriptor: int, kind: int) -> None:
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        try:
            holder = json.loads(os.pread(descriptor, 1000, 0))
            name = f"process {holder['pid']} on {holder['host']} since {holder['since']}"
        except (ValueError, KeyError, TypeError):  # the holder has not written its name yet
            name = "another process"
        raise _in_use(folder, name) from None
    except OSError as error:
        if error.errno not in (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS):
            raise
        log.warning("the file system of %s has no locks: nothing keeps a second run from writing there", folder)


def _in_use(folder: Path, name: str) -> Outage:
    return Outage(
        f"run.out = {folder} is in use by {name}: wait until it has ended or stop it, or name another folder with "
        f"--set run.out=..."
    )
