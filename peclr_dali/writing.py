"""Writes files that are either complete or absent: to a temporary name, synced, then renamed."""

import errno
import os
import stat
import tempfile
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from peclr_dali.errors import UserError
from peclr_dali.parsing import parse_json, regular


@contextmanager
def whole_file(path: Path, *, durable: bool = True) -> Iterator[BinaryIO]:
    """Open a temporary file for writing; it replaces `path` when the block ends without an error.

    A link stays: the file behind it is replaced and keeps its permissions.

    Args:
        path: path of the file. The temporary file is in the same folder, with a name that ends in ".part".
        durable: wait until the data is on the disk, so that it survives a power cut.

    Raises:
        OSError: the disk is full, writing is not permitted, there is no such folder, or `path` is a folder, a device or
            a pipe. The old file, if any, is unchanged, and no partial file is left.
    """
    target = Path(os.path.realpath(path))
    # A new name in the same folder, of at most 255 bytes.
    name = os.fsdecode(os.fsencode(target.name)[:230])
    part = target.with_name(f"{name}.{os.getpid()}-{threading.get_ident() & 0xFFFFFF:x}.part")
    try:
        if target.exists() and not target.is_file():
            raise OSError(errno.EINVAL, "not a regular file")
        with part.open("xb") as file:
            yield file
            file.flush()
            if durable:
                os.fsync(file.fileno())
        with suppress(FileNotFoundError):
            part.chmod(stat.S_IMODE(target.stat().st_mode))
        part.replace(target)
        if durable:  # the rename too
            folder = os.open(target.parent, os.O_RDONLY)
            try:
                os.fsync(folder)
            finally:
                os.close(folder)
    except BaseException as error:
        part.unlink(missing_ok=True)
        if isinstance(error, OSError) and error.filename in (None, str(part)):
            error.filename = str(path)
        if "inline_container" in str(error):
            error = OSError(errno.ENOSPC, "torch could not write all of it", str(path))
        error.add_note(f"{path} was not written")
        raise error


def write_bytes(path: Path, data: bytes | memoryview, *, durable: bool = True) -> None:
    """Write a file, completely or not at all. Errors as in `whole_file`."""
    with whole_file(path, durable=durable) as file:
        file.write(data)


def write_text(path: Path, text: str) -> None:
    """Write text in UTF-8 as `write_bytes` does. File names in it that are not UTF-8 keep their bytes."""
    write_bytes(path, text.encode(errors="surrogateescape"))


def require_new(*files: Path, force: bool) -> None:
    """Require that the files which a command will write do not exist, unless `force`, but that their folders do.

    Raises:
        UserError: they do.
    """
    for file in files:
        if not force and os.path.lexists(file):  # a link that leads nowhere too
            raise UserError(f"{file}: exists already. Name another file, or replace it with --force")
        if not file.parent.is_dir():
            raise UserError(f"{file.parent}: no such folder. Make it first")
        tempfile.TemporaryFile(dir=file.parent).close()  # a folder that cannot be written to fails before the work


def require_ending(out: Path, *endings: str) -> None:
    """Refuse a file to write whose name has another ending."""
    if out.suffix not in endings:
        raise UserError(f"{out} ends in {out.suffix or 'nothing'}; expected {' or '.join(endings)}")


def require_own_results(folder: Path, names: Sequence[str], *, force: bool) -> None:
    """Require that a folder holds results of an earlier call of a command, unless `force`, or none of its files.

    Args:
        names: the files that the command writes; the first is JSON, which names a checkpoint.

    Raises:
        UserError: the folder holds one of the files, and it is somebody else's.
    """
    if force or not (there := [name for name in names if os.path.lexists(folder / name)]):
        return
    with suppress(OSError, ValueError):  # there is none, or it is not ours
        found = parse_json(regular(folder / names[0]).read_bytes())
        if isinstance(found, dict) and "checkpoint" in found and found.keys() & {"constants", "predictions"}:
            return
    raise UserError(
        f"{folder / there[0]}: exists, and {folder} holds no results of this command. Name another folder with "
        "--out, or replace them with --force"
    )
