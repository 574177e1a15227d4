"""Reads samples out of shards, at an offset."""

from __future__ import annotations

import io
import os
import tarfile
import threading
import zlib
from bisect import bisect_right
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from pipelines.arrays import IntArray
from pipelines.files.image_file import MAX_FILE_BYTES
from pipelines.samples.store import Follower, Steps, Store

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


class Shards:
    """Reads from numbered shards; any thread may.

    Attributes:
        names: of their files, for messages.
        is_remote: see `Store`.
    """

    names: Sequence[str]
    is_remote = False

    def read(self, shard: int, offset: int, size: int, crc32: int | None) -> bytes:
        """The `size` bytes at `offset` of a shard.

        Args:
            crc32: the checksum that they must have; None compares nothing.

        Raises:
            OSError: the shard cannot be read, is cut, or has other bytes.
        """
        raise NotImplementedError

    def follow(self, steps: Steps) -> Follower:
        """Prepare for the shards (N,) of the rows of each step, see `Store.follow`."""
        return Follower()


class LocalShards(Shards):
    """Shards in a folder.

    Args:
        window: number of shards to read at a time, or None. If set, the system reads an opened shard ahead as a whole,
            which is faster than seeking on slow storage.
    """

    def __init__(self, folder: Path, names: Sequence[str], window: int | None) -> None:
        self.names, paths = names, [folder / name for name in names]
        self._paths, self._window = paths, window
        self._open: dict[int, Descriptor] = {}
        self._lock = threading.Lock()

    def read(self, shard: int, offset: int, size: int, crc32: int | None) -> bytes:
        """See `Shards`."""
        return read_at(self._open.get(shard) or self._opened(shard), offset, size, crc32, self.names[shard])

    def _opened(self, shard: int) -> Descriptor:
        with self._lock:
            if shard not in self._open:
                descriptor = Descriptor(self._paths[shard])
                if self._window is not None:
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

    def follow(self, steps: Steps) -> Follower:
        """See `Store`."""
        first = np.array(self._first, np.int64)

        def shards_of(rows: IntArray) -> IntArray:
            return np.searchsorted(first, rows, side="right") - 1

        return self._shards.follow(lambda: map(shards_of, steps()))

    def name(self, row: int) -> str:
        """Shard and member name of a sample, read from the tar, for messages."""
        lead = BLOCK_BYTES if self._lead is None else int(self._lead[row])
        try:
            member = member_name(self._bytes(row, int(self._offset[row]) - lead, lead, None))
        except OSError:
            member = None
        return f"{self._shards.names[self._shard(row)]}/{member or f'row {row}'}"

    def _shard(self, row: int) -> int:
        return bisect_right(self._first, row) - 1

    def _bytes(self, row: int, offset: int, size: int, crc32: int | None) -> bytes:
        shard = self._shard(row)
        if not 0 <= offset < 2**63 or size > MAX_FILE_BYTES:
            raise OSError(f"the index has it at byte {offset} of {self._shards.names[shard]}, {size} bytes long")
        return self._shards.read(shard, offset, size, crc32)


def member_name(headers: bytes) -> str | None:
    """The name of a tar file's member from its headers; None if they are damaged."""
    own = headers[-BLOCK_BYTES:]
    if len(headers) == BLOCK_BYTES or (
        len(headers) == 3 * BLOCK_BYTES and headers[156:157] == b"x" and b" path=" not in headers[:-BLOCK_BYTES]
    ):  # ten times as fast as tarfile
        if own[257:262] not in (b"ustar", bytes(5)):
            return None
        parts = [field.split(b"\0")[0].decode(errors="surrogateescape") for field in (own[345:500], own[:100])]
        return "/".join(part for part in parts if part)
    try:
        with tarfile.open(fileobj=io.BytesIO(headers), mode="r:") as tar:
            member = tar.next()
    except (tarfile.TarError, ValueError, OSError):
        return None
    return None if member is None else member.name
