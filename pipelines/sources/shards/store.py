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

import numpy.typing as npt

from pipelines.files.image_file import MAX_FILE_BYTES

BLOCK_BYTES: Final = 512
"""Block size of tar: a header has one block, and contents fill whole blocks."""

OPEN_SHARDS: Final = 128
"""Largest number of open shards; a process may have 1024 open files by default."""

Table = npt.NDArray[Any]


class ShardStore:
    """Reads samples from shards, each in constant time. Any thread may call it.

    Args:
        first: (len(shards) + 1,) first row of each shard, and the end of the last.
        names: of the shards, for messages.
        tables: "offset" and "size", each (N,): start of a sample's image in its shard, length in bytes. "crc32" (N,),
            its checksum; without it nothing is compared. "lead" (N,), bytes of headers before the image; without it one
            block.
        window: number of shards to read at a time, or None. If set, the system reads an opened shard ahead as a whole,
            which is faster than seeking on slow storage.
    """

    def __init__(
        self,
        shards: Sequence[Path],
        names: Sequence[str],
        first: Sequence[int],
        tables: dict[str, Table],
        window: int | None,
        *,
        verify: bool,
    ) -> None:
        self._shards, self._names, self._first, self._window = shards, names, first, window
        self._offset, self._size, self._lead = tables["offset"], tables["size"], tables.get("lead")
        self._crc32 = tables.get("crc32") if verify else None
        self._open: dict[int, _Descriptor] = {}
        self._lock = threading.Lock()

    def read(self, sample: int) -> bytes:
        """The bytes of one image.

        Raises:
            OSError: the shard cannot be read, is cut, or has other bytes than were packed.
        """
        data = self._bytes(sample, int(self._offset[sample]), int(self._size[sample]))
        if self._crc32 is not None and zlib.crc32(data) != self._crc32[sample]:
            raise OSError("not the bytes that were packed (wrong checksum)")
        return data

    def name(self, sample: int) -> str:
        """Shard and member name of a sample, read from the tar, for messages."""
        lead = BLOCK_BYTES if self._lead is None else int(self._lead[sample])
        try:
            member = member_name(self._bytes(sample, int(self._offset[sample]) - lead, lead))
        except OSError:
            member = None
        return f"{self._names[self._shard(sample)]}/{member or f'row {sample}'}"

    def _shard(self, sample: int) -> int:
        return bisect_right(self._first, sample) - 1

    def _bytes(self, sample: int, offset: int, size: int) -> bytes:
        shard = self._shard(sample)
        if offset >= 2**63 or size > MAX_FILE_BYTES:
            raise OSError(f"the index has it at byte {offset} of {self._shards[shard].name}, {size} bytes long")
        descriptor = self._open.get(shard) or self._opened(shard)
        data = os.pread(descriptor.number, size, offset)
        # A signal, or a file system that returns fewer bytes.
        while len(data) < size and (more := os.pread(descriptor.number, size - len(data), offset + len(data))):
            data += more
        if len(data) < size:
            raise OSError(f"{self._shards[shard].name} ends before byte {offset + size}")
        return data

    def _opened(self, shard: int) -> _Descriptor:
        with self._lock:
            if shard not in self._open:
                descriptor = _Descriptor(self._shards[shard])
                if self._window is not None:
                    os.posix_fadvise(descriptor.number, 0, 0, os.POSIX_FADV_WILLNEED)
                if len(self._open) >= OPEN_SHARDS:  # a reader that still uses the oldest keeps it open
                    del self._open[next(iter(self._open))]
                self._open[shard] = descriptor
            return self._open[shard]


class _Descriptor:
    """An open file. It is closed when its last user has finished."""

    def __init__(self, path: Path) -> None:
        self.number = os.open(path, os.O_RDONLY | os.O_CLOEXEC)

    def __del__(self) -> None:
        if hasattr(self, "number"):
            os.close(self.number)


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
