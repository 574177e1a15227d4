"""Reads samples out of shards, at an offset."""

from __future__ import annotations

import io
import logging
import os
import tarfile
import threading
import zlib
from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from peclr_dali.errors import UserError
from peclr_dali.pipelines.arrays import IntArray
from peclr_dali.pipelines.config import DataConfig
from peclr_dali.pipelines.files.image_file import MAX_FILE_BYTES
from peclr_dali.pipelines.samples.store import Prefetch, Steps, Store
from peclr_dali.pipelines.sources.shards.index_file import (
    IndexFile,
    read_index_file,
    read_table,
    shards_in_words,
    table_name,
)

log = logging.getLogger(__name__)

BLOCK_BYTES: Final = 512
"""Block size of tar: a header has one block, and contents fill whole blocks."""

OPEN_SHARDS: Final = 128
"""Largest number of open shards; a process may have 1024 open files by default."""

Table = npt.NDArray[Any]


class Descriptor:
    """An open file. It is closed when its last user has dropped it."""

    def __init__(self, path: Path) -> None:
        self.number = os.open(path, os.O_RDONLY | os.O_CLOEXEC)

    def __del__(self) -> None:
        if hasattr(self, "number"):
            os.close(self.number)


class Shards(ABC):
    """Reads from numbered shards; any thread may.

    Attributes:
        content: of their index file.
        folder: of the shards.
        is_remote: see `Store`.
    """

    content: IndexFile
    folder: Path
    is_remote = False

    @abstractmethod
    def table(self, name: str) -> Table:
        """Read a table of the index. Damage is a `UserError`."""

    @abstractmethod
    def read(self, shard: int, offset: int, size: int, crc32: int | None) -> bytes:
        """The `size` bytes at `offset` of a shard.

        Args:
            crc32: the checksum that they must have; None compares nothing.

        Raises:
            OSError: the shard cannot be read, is cut, or has other bytes.
        """

    def prefetch(self, steps: Steps) -> Prefetch:
        """Prepare for the shards (N,) of the rows of each step, see `Store.prefetch`."""
        return Prefetch()


class LocalShards(Shards):
    """Shards in a folder. With `data.shuffle_shards`, the system reads a shard ahead as a whole when it is opened.

    Raises:
        UserError: there are none, or one is missing or of another size than in the index.
    """

    def __init__(self, config: DataConfig) -> None:
        self._root, self._reads_ahead = Path(config.root), config.shuffle_shards is not None
        self.content = read_index_file(self._root)
        self.folder = self._root / (self.content.folder or "")
        self._require_shards()
        self._open: dict[int, Descriptor] = {}
        self._lock = threading.Lock()

    def _require_shards(self) -> None:
        """Compare the sizes of all shards, and the times of change of those of other programs."""
        shards, changed = self.content.shards, list[Path]()
        for shard in shards:
            path = self.folder / shard.file
            try:
                status = path.stat()
            except OSError as error:
                raise UserError(
                    f"{path}: {error.strerror}; the index names {shards_in_words(len(shards))}. Copy this one again, "
                    f"or {self.content.remedy}."
                ) from error
            if status.st_size != shard.bytes:
                raise UserError(
                    f"{path}: {status.st_size} bytes, expected {shard.bytes}: cut or changed. Copy it again, or "
                    f"{self.content.remedy}."
                )
            if shard.changed_ns not in (None, status.st_mtime_ns):
                changed.append(path)
        if changed:
            log.warning(
                "%d of %s have another time of change than in the index, such as %s. Copying causes this. If they were "
                "written anew, run 'python cli.py index' again",
                len(changed), shards_in_words(len(shards)), changed[0],
            )  # fmt: skip

    def table(self, name: str) -> Table:
        """See `Shards`. The table is memory-mapped."""
        return read_table(self._root / table_name(name), name, self.content)

    def read(self, shard: int, offset: int, size: int, crc32: int | None) -> bytes:
        """See `Shards`."""
        file = self._open.get(shard) or self._opened(shard)
        return read_at(file, offset, size, crc32, self.content.shards[shard].file)

    def _opened(self, shard: int) -> Descriptor:
        with self._lock:
            if shard not in self._open:
                descriptor = Descriptor(self.folder / self.content.shards[shard].file)
                if self._reads_ahead:
                    os.posix_fadvise(descriptor.number, 0, 0, os.POSIX_FADV_WILLNEED)
                if len(self._open) >= OPEN_SHARDS:  # a reader that still uses the oldest keeps it open
                    del self._open[next(iter(self._open))]
                self._open[shard] = descriptor
            return self._open[shard]


def read_at(file: Descriptor, offset: int, size: int, crc32: int | None, name: str) -> bytes:
    """Read exactly `size` bytes of an open file.

    Args:
        crc32: the checksum that they must have; None compares nothing.
        name: of the file, for messages.

    Raises:
        OSError: the file ends before, has other bytes, or cannot be read.
    """
    data = os.pread(file.number, size, offset)
    # A signal, or a file system that returns fewer bytes.
    while len(data) < size and (more := os.pread(file.number, size - len(data), offset + len(data))):
        data += more
    if len(data) < size:
        raise OSError(f"{name} ends before byte {offset + size}")
    if crc32 is not None and zlib.crc32(data) != crc32:
        raise OSError("not the bytes that were packed (wrong checksum)")
    return data


class ShardStore(Store):
    """Reads samples from shards, each in constant time. Any thread may call it.

    Args:
        first: (number of shards + 1,) first row of each shard, and the end of the last.
        tables: "offset" and "size", each (N,): start of a sample's image in its shard, length in bytes. "crc32" (N,),
            its checksum; without it nothing is compared. "lead" (N,), bytes of headers before the image; without it one
            block.
        verify: compare the checksum of each image.
    """

    def __init__(self, shards: Shards, first: Sequence[int], tables: dict[str, Table], *, verify: bool) -> None:
        self._shards, self._first, self.is_remote = shards, first, shards.is_remote
        self._offset, self._size, self._lead = tables["offset"], tables["size"], tables.get("lead")
        self._crc32 = tables.get("crc32") if verify else None

    def read(self, row: int) -> bytes:
        """The bytes of one image.

        Raises:
            OSError: the shard cannot be read, is cut, or has other bytes than were packed.
        """
        crc32 = None if self._crc32 is None else int(self._crc32[row])
        return self._bytes(row, int(self._offset[row]), int(self._size[row]), crc32)

    def prefetch(self, steps: Steps) -> Prefetch:
        """See `Store`."""
        first = np.array(self._first, np.int64)

        def shards_of(rows: IntArray) -> IntArray:
            return np.searchsorted(first, rows, side="right") - 1

        return self._shards.prefetch(lambda: map(shards_of, steps()))

    def name(self, row: int) -> str:
        """Shard and member name of a sample, read from the tar, for messages."""
        lead = BLOCK_BYTES if self._lead is None else int(self._lead[row])
        try:
            member = member_name(self._bytes(row, int(self._offset[row]) - lead, lead, None))
        except OSError:
            member = None
        return f"{self._shards.content.shards[self._shard(row)].file}/{member or f'row {row}'}"

    def _shard(self, row: int) -> int:
        return bisect_right(self._first, row) - 1

    def _bytes(self, row: int, offset: int, size: int, crc32: int | None) -> bytes:
        shard = self._shard(row)
        if not 0 <= offset < 2**63 or size > MAX_FILE_BYTES:
            name = self._shards.content.shards[shard].file
            raise OSError(f"the index has it at byte {offset} of {name}, {size} bytes long")
        return self._shards.read(shard, offset, size, crc32)


def member_name(headers: bytes) -> str | None:
    """The name of a tar file's member from its headers; None if they are damaged."""
    own, before = headers[-BLOCK_BYTES:], headers[:-BLOCK_BYTES]
    names_in_own = not before or (before[156:157] == b"x" and b" path=" not in before)  # as webdataset's writer makes
    try:
        if names_in_own:  # several times as fast
            return tarfile.TarInfo.frombuf(own, "utf-8", "surrogateescape").name
        with tarfile.open(fileobj=io.BytesIO(headers), mode="r:") as tar:
            member = tar.next()
    except (tarfile.TarError, ValueError, OSError):
        return None
    return None if member is None else member.name
