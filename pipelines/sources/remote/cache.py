"""A folder of whole files, of bounded size, that all processes of a machine share.

These rules always hold, even if a process is killed at any moment:

1. Only whole files are read. A file is written as NAME.part; after its checksum was compared it is synced and renamed
   to NAME. Nobody reads a part.
2. All files together, parts included, never take more than the bound. Before its first byte is written, a part has its
   full size, and room was made for it.
3. A file in use stays. Its users have a shared lock on it; removing it needs the exclusive lock.
4. A part has one writer, who has the exclusive lock on it. A part without a lock was left by a process that was killed:
   it is removed, or written anew from its beginning.
5. Names are made, renamed and removed only under the lock of the folder. No process holds this lock while it waits for
   the network.

The locks are the kernel's (flock). They end with the process that has them, so a kill leaves none behind.
"""

from __future__ import annotations

import errno
import fcntl
import math
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from errors import UserError

FOLDER_ENDING: Final = ".shards"
"""Folders with this ending belong to the cache; nothing else beside them is counted or removed."""

PART: Final = ".part"
_BLOCK_BYTES: Final = 4096
_FULL: Final = (errno.ENOSPC, errno.EDQUOT)
_DISK_IS_FULL: Final = "the disk is full"

NextUse = Callable[[str], float]
"""Steps until the file of this name is used; infinite if that is not known."""


class Descriptor:
    """An open file. It is closed, and its locks end, when its last user has dropped it."""

    def __init__(self, number: int) -> None:
        self.number, self._process = number, os.getpid()

    @classmethod
    def of(cls, path: Path, flags: int = os.O_RDONLY) -> Descriptor:
        """Open a file."""
        return cls(os.open(path, flags | os.O_CLOEXEC, 0o666))

    def __del__(self) -> None:
        if os.getpid() == self._process:  # a process that was forked has the file open too, which keeps the locks
            with suppress(OSError):
                fcntl.flock(self.number, fcntl.LOCK_UN)
        os.close(self.number)


class NoRoom(Exception):  # noqa: N818  a state of the disk
    """The file does not fit: all other files in the cache are in use or needed sooner, or the disk is full."""


@dataclass(frozen=True)
class UnfinishedFile:
    """A file of the cache that this process is writing."""

    name: str
    descriptor: Descriptor


class NodeCache:
    """The files below `folder` whose names begin with a folder `*.shards`; `limit` bytes at most."""

    def __init__(self, folder: Path, limit: int) -> None:
        self.folder, self.limit = folder, limit

    def path(self, name: str) -> Path:
        """The path of a file of this name."""
        return self.folder / name

    def open(self, name: str) -> Descriptor | None:
        """A whole file, which stays as long as the descriptor is open; None if it is not in the cache."""
        try:
            found = Descriptor.of(self.path(name))
        except FileNotFoundError:
            return None
        fcntl.flock(found.number, fcntl.LOCK_SH)  # who removes a file has its lock for a moment only
        if os.fstat(found.number).st_nlink == 0:  # it was removed meanwhile
            return None
        with suppress(OSError):  # a file of another user
            os.utime(found.number)
        return found

    def start(self, name: str, size: int, next_use: NextUse) -> UnfinishedFile | None:
        """Begin to write a file of `size` bytes; None if another process writes it now, or it is there.

        Files whose next use is later than that of this one are removed as far as necessary, the latest first.

        Raises:
            NoRoom: that is not enough.
            UserError: the folder cannot be written to.
        """
        path = self.path(name + PART)
        with self._locked():
            path.parent.mkdir(parents=True, exist_ok=True)
            descriptor = Descriptor.of(path, os.O_RDWR | os.O_CREAT)
            if not _lock_at_once(descriptor):
                return None
            try:
                if self.path(name).exists():
                    path.unlink()
                    return None
                os.ftruncate(descriptor.number, 0)
                self._make_room(name, size, next_use, descriptor)
            except BaseException:
                path.unlink(missing_ok=True)
                raise
            return UnfinishedFile(name, descriptor)

    def write(self, part: UnfinishedFile, data: bytes, offset: int) -> None:
        """Write a piece of a part. Errors as in `start`."""
        with self._one_line_of_disk_errors():
            left = memoryview(data)
            while left:
                written = os.pwrite(part.descriptor.number, left, offset)
                left, offset = left[written:], offset + written

    def finish(self, part: UnfinishedFile) -> Descriptor:
        """Rename a part whose checksum was compared, and return it as `open` does. Errors as in `start`."""
        with self._one_line_of_disk_errors():
            os.fsync(part.descriptor.number)
        with self._locked():
            self.path(part.name + PART).rename(self.path(part.name))
            fcntl.flock(part.descriptor.number, fcntl.LOCK_SH)
        return part.descriptor

    def abandon(self, part: UnfinishedFile) -> None:
        """Remove a part."""
        with self._locked():
            self.path(part.name + PART).unlink(missing_ok=True)
            os.ftruncate(part.descriptor.number, 0)

    def trim(self) -> None:
        """Remove unused files, the oldest first, until the rest fits the bound, which may have been lowered."""
        with self._locked(), suppress(NoRoom):
            taken = sum(bytes_on_disk(status.st_size) for _, status in self._files())
            self._remove(taken - self.limit, "", lambda name: math.inf, "all files are in use")

    def _make_room(self, name: str, size: int, next_use: NextUse, part: Descriptor) -> None:
        """Give an empty part its full size, within the bound and on the disk."""
        taken = sum(bytes_on_disk(status.st_size) for _, status in self._files())
        self._remove(taken + bytes_on_disk(size) - self.limit, name, next_use, "the bound data.cache_gb is reached")
        try:
            os.posix_fallocate(part.number, 0, size)
        except OSError as error:
            if error.errno not in _FULL:
                raise
            os.ftruncate(part.number, 0)
            self._remove(bytes_on_disk(size), name, next_use, _DISK_IS_FULL)
            os.posix_fallocate(part.number, 0, size)

    def _remove(self, excess: int, name: str, next_use: NextUse, why: str) -> None:
        """Remove files of at least `excess` bytes in all, those with the latest next use first; or none if that fails.

        Raises:
            NoRoom: too few bytes can be removed; the message is `why`.
        """
        if excess <= 0:
            return
        needed = next_use(name)

        def order(entry: tuple[str, os.stat_result]) -> tuple[bool, float, float]:
            one, status = entry
            return not one.endswith(PART), -next_use(one), status.st_mtime

        chosen: list[tuple[str, Descriptor]] = []
        candidate: Descriptor | None = None
        for one, status in sorted(self._files(), key=order):
            used = next_use(one)
            if not one.endswith(PART) and math.isfinite(used) and used <= needed:
                continue
            with suppress(OSError):
                candidate = Descriptor.of(self.path(one), os.O_RDWR)
                if _lock_at_once(candidate):
                    chosen.append((one, candidate))
                    excess -= bytes_on_disk(status.st_size)
            if excess <= 0:
                break
        else:
            chosen, candidate = [], None  # ends their locks, also if somebody keeps the error and so this frame
            raise NoRoom(why)
        for one, descriptor in chosen:
            self.path(one).unlink()
            os.ftruncate(descriptor.number, 0)  # a process that has opened it, and waits for its lock, keeps no bytes

    def _files(self) -> Iterator[tuple[str, os.stat_result]]:
        for top in self.folder.glob(f"*{FOLDER_ENDING}"):
            for folder, _, names in os.walk(top):
                for name in names:
                    path = Path(folder, name)
                    yield str(path.relative_to(self.folder)), path.stat()

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Hold the lock of the folder."""
        with self._one_line_of_disk_errors():
            self.folder.mkdir(parents=True, exist_ok=True)
            lock = Descriptor.of(self.folder / "lock", os.O_RDWR | os.O_CREAT)
            fcntl.flock(lock.number, fcntl.LOCK_EX)
            try:
                yield
            finally:  # at once: the traceback of an error that somebody keeps holds the file open
                fcntl.flock(lock.number, fcntl.LOCK_UN)

    @contextmanager
    def _one_line_of_disk_errors(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            if error.errno in _FULL:
                raise NoRoom(_DISK_IS_FULL) from error
            raise UserError(
                f"data.cache = {self.folder}: {error.strerror or error}. Name a folder on a local disk that can be "
                "written to."
            ) from error


def _lock_at_once(descriptor: Descriptor) -> bool:
    try:
        fcntl.flock(descriptor.number, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def bytes_on_disk(size: int) -> int:
    """A file's size in whole blocks."""
    return -(-size // _BLOCK_BYTES) * _BLOCK_BYTES
