"""Files that are whole or absent: written beside, synced and renamed. What a command leaves is written here."""

from __future__ import annotations

import errno
import io
import os
import stat
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO, cast

from errors import UserError

_REMEDY = {
    errno.ENOSPC: "Make room, or name another place",
    errno.EDQUOT: "Make room, or name another place",
    errno.EROFS: "Name a place that can be written to",
    errno.EACCES: "Set the folder's rights, or name another",
    errno.EPERM: "Set the folder's rights, or name another",
    errno.ENOENT: "Make the folder first",
}


class NotWritten(UserError, OSError):  # noqa: N818  the error is the disk's
    """A file cannot be written: nothing of the attempt stays, and what was there before is as it was.

    It is an OSError too, so that a run can tell it from wrong input, and all its ranks can stop first.
    """

    def __str__(self) -> str:
        remedy = _REMEDY.get(self.errno or 0, "Name another file")
        return f"{self.filename} cannot be written: {self.strerror}. {remedy}"


@contextmanager
def whole_file(path: Path, *, durable: bool = True) -> Iterator[BinaryIO]:
    """A file to write to, which takes its place under `path` when the block ends without an error.

    A link stays a link: the file that it names is replaced, and keeps its permissions. What is no regular file, such
    as a terminal, is written to as it is.

    Args:
        path: of the file. Beside it, a file of a name of its own, which ends in ".part", is there meanwhile.
        durable: wait until the disk has it, so that it outlasts a power cut.

    Raises:
        NotWritten: there is no room, or no right to write.
    """
    target = Path(os.path.realpath(path))
    replaces = not target.exists() or target.is_file() or target.is_dir()  # a folder is refused when it comes to that
    part = _beside(target) if replaces else target
    written: _Written | None = None
    in_block = False
    try:
        with part.open("xb" if replaces else "wb") as file:
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
        if refused is None and isinstance(error, OSError) and not in_block:  # the block may fail at other files
            refused = error
        if refused is None:
            raise
        raise NotWritten(refused.errno, refused.strerror or str(refused), str(path)) from error


def write_bytes(path: Path, data: bytes | memoryview, *, durable: bool = True) -> None:
    """Write a file, whole or not at all; errors as `whole_file`."""
    with whole_file(path, durable=durable) as file:
        file.write(data)


def write_text(path: Path, text: str) -> None:
    """Write a file in UTF-8 as `write_bytes` does; names of files that are not UTF-8 keep their bytes."""
    write_bytes(path, text.encode(errors="surrogateescape"))


def refuse_inputs(out: Path, inputs: Iterable[Path]) -> None:
    """Nothing is written over what a command reads, under this name or another: that is a `UserError`."""
    if is_among(out, inputs):
        raise UserError(f"{out} is what this command reads, and is not written over: name another file")


def is_among(file: Path, others: Iterable[Path]) -> bool:
    """Whether a file is one of the others, under the same name or another; one that does not exist never is."""
    try:
        here = file.stat()
    except OSError:
        return False
    for other in others:
        with suppress(OSError):
            if os.path.samestat(here, other.stat()):
                return True
    return False


def _beside(target: Path) -> Path:
    """A name that no file there has; names may have 255 bytes."""
    name = os.fsencode(target.name)[:230]
    return target.with_name(f"{os.fsdecode(name)}.{os.getpid()}-{threading.get_ident() & 0xFFFFFF:x}.part")


class _Written(io.RawIOBase):
    """Keeps the error of writing: torch.save and others put their own in its place."""

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
    """Make a rename durable."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
