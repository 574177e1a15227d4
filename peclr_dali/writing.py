"""Writes files that are either complete or absent: to a temporary name, synced, then renamed."""

from __future__ import annotations

import errno
import glob
import io
import os
import stat
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO, cast

from peclr_dali.errors import UserError

_REMEDY = {
    errno.ENOSPC: "Make room, or name another place",
    errno.EDQUOT: "Make room, or name another place",
    errno.EROFS: "Name a place that can be written to",
    errno.EACCES: "Set the folder's rights, or name another",
    errno.EPERM: "Set the folder's rights, or name another",
    errno.ENOENT: "Make the folder first",
    errno.ENXIO: "It is a pipe that nobody reads: name another file",
}


class NotWritten(UserError, OSError):  # noqa: N818  the error is the disk's
    """A file cannot be written. The old file, if any, is unchanged, and no partial file is left.

    It is also an OSError, so that a run can distinguish it from wrong input and stop all its ranks first.
    """

    def __str__(self) -> str:
        remedy = _REMEDY.get(self.errno or 0, "Name another file")
        return f"{self.filename} cannot be written: {self.strerror}. {remedy}"


@contextmanager
def whole_file(path: Path, *, durable: bool = True) -> Iterator[BinaryIO]:
    """Open a temporary file for writing; it replaces `path` when the block ends without an error.

    A link stays: the file behind it is replaced and keeps its permissions. A path that is not a regular file, such as a
    terminal, is written directly; a pipe that nobody reads is an error.

    Args:
        path: path of the file. The temporary file is in the same folder, with a name that ends in ".part".
        durable: wait until the data is on the disk, so that it survives a power cut.

    Raises:
        NotWritten: the disk is full, or writing is not permitted.
    """
    target = Path(os.path.realpath(path))
    replaces = not target.exists() or target.is_file() or target.is_dir()  # a folder is refused later
    part = _beside(target) if replaces else target
    written: _Written | None = None
    in_block = False
    try:
        with part.open("xb") if replaces else open(part, "wb", opener=_without_waiting) as file:
            written, in_block = _Written(file), True
            yield cast(BinaryIO, written)
            in_block = False
            file.flush()
            if durable and replaces:
                os.fsync(file.fileno())
        if replaces:
            with suppress(FileNotFoundError):
                part.chmod(stat.S_IMODE(target.stat().st_mode))
            part.replace(target)
            if durable:
                _sync_folder(target.parent)
    except BaseException as error:
        if replaces:
            with suppress(OSError):
                part.unlink()
        refused = written.error if written is not None else None
        if (
            refused is None and isinstance(error, OSError) and not in_block
        ):  # the block may raise errors about other files
            refused = error
        if refused is None:
            raise
        raise NotWritten(refused.errno, refused.strerror or str(refused), str(path)) from error


def write_bytes(path: Path, data: bytes | memoryview, *, durable: bool = True) -> None:
    """Write a file, completely or not at all. Errors as in `whole_file`."""
    with whole_file(path, durable=durable) as file:
        file.write(data)


def write_text(path: Path, text: str) -> None:
    """Write text in UTF-8 as `write_bytes` does. File names in it that are not UTF-8 keep their bytes."""
    write_bytes(path, text.encode(errors="surrogateescape"))


def remove_leftovers(files: Iterable[Path]) -> None:
    """Remove the temporary files of killed processes that were writing these files, which no process may write now."""
    for file in files:
        for part in file.parent.glob(f"{glob.escape(file.name)}.*-*.part"):
            with suppress(OSError):
                part.unlink()


def refuse_inputs(out: Path, inputs: Iterable[Path]) -> None:
    """Raise a `UserError` if `out` is one of the files that a command reads, under this or another name."""
    if is_among(out, inputs):
        raise UserError(f"{out} is an input of this command and is not overwritten: name another file")


def refuse_existing(outputs: Iterable[Path]) -> None:
    """Raise a `UserError` if one of the files that a command will write exists already, or could not be written."""
    for file in outputs:
        try:
            if os.path.lexists(file):  # a link that leads nowhere too
                raise UserError(f"{file}: exists already, and nothing is overwritten. Name another file.")
            if not file.parent.is_dir():
                raise UserError(f"{file.parent}: no such folder. Make it first.")
            file.touch()
            file.unlink()
        except OSError as error:
            raise UserError(f"{file}: cannot be written ({error.strerror}). Name another file.") from error


def is_among(file: Path, others: Iterable[Path]) -> bool:
    """Whether a file is one of the others, under the same name or another; False if it does not exist."""
    try:
        here = file.stat()
    except OSError:
        return False
    for other in others:
        with suppress(OSError):
            if os.path.samestat(here, other.stat()):
                return True
    return False


def _without_waiting(path: str, flags: int) -> int:
    """Open a file for writing. A pipe that nobody reads is an OSError; else the opening would wait for a reader."""
    descriptor = os.open(path, flags | os.O_NONBLOCK)
    os.set_blocking(descriptor, True)
    return descriptor


def _beside(target: Path) -> Path:
    """A new name in the same folder, of at most 255 bytes."""
    name = os.fsencode(target.name)[:230]
    return target.with_name(f"{os.fsdecode(name)}.{os.getpid()}-{threading.get_ident() & 0xFFFFFF:x}.part")


class _Written(io.RawIOBase):
    """Keeps the original write error, since torch.save and others replace it by their own."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.error: OSError | None = None

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        try:
            return self._file.write(data)
        except OSError as error:
            self.error = error
            raise


def _sync_folder(folder: Path) -> None:
    """Sync a folder, so that a rename in it survives a power cut."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
