"""One process at a time writes into a run's folder."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

from filelock import FileLock, Timeout

from peclr_dali.errors import UserError

LOCK: Final = "lock"
"""Name of the locked file. It contains the process, host and start time of the holder."""


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold a folder for this process.

    The kernel releases the lock when the process ends, even if it is killed; a lock file that is left behind locks
    nothing. Between hosts it works if the shared file system supports locks, as NFS does.

    A missing folder is made, and removed again if it is still empty at the end.

    Raises:
        UserError: another process holds the folder, or it cannot be made or written to.
    """
    made = [path for path in (folder, *folder.parents) if not path.exists()]
    file = folder / LOCK
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = FileLock(file, blocking=False)
        lock.acquire()
    except Timeout:
        raise UserError(
            f"run.out = {folder} is in use by {file.read_text().strip() or 'another process'}: wait until it has ended "
            "or stop it, or name another folder with --set run.out=..."
        ) from None
    except OSError as error:
        raise UserError(f"run.out = {folder} cannot be written to: {error.strerror}") from error
    with suppress(OSError):  # a full disk
        file.write_text(f"process {os.getpid()} on {platform.node()} since {time.strftime('%F %T %Z')}\n")
    try:
        yield
    finally:
        with suppress(OSError):
            file.unlink()  # before the release, or it could be the next holder's file
        lock.release()
        with suppress(OSError):
            for path in made:
                path.rmdir()
