"""Writes tar shards: the unchanged file of each sample, and its path, box and labels as JSON."""

from __future__ import annotations

import hashlib
import json
import tarfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
import numpy.typing as npt

from pipelines.files.check import check_image
from pipelines.files.image_file import BadImage
from pipelines.samples.index import Index
from pipelines.sources.shards.index_file import index_tables
from pipelines.sources.shards.shard_store import BLOCK_BYTES


class Written(NamedTuple):
    """What was written of a shard's rows."""

    rows: list[int]
    """Rows of the index that are in the shard."""

    tables: dict[str, npt.NDArray[Any]]
    """Tables of the shards' index, with a row for each of `rows`."""

    left_out: list[dict[str, str]]
    """"path" and "reason" of the others."""


class HashingFile:
    """A file that counts and hashes the bytes written to it."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.hash = hashlib.sha256()
        self.written = 0

    def write(self, data: bytes | memoryview) -> None:
        """Append bytes."""
        self._file.write(data)
        self.hash.update(data)
        self.written += len(data)


class TarContents:
    """Writes tar shards, as WebDataset has them. Files that cannot be read or fail `check_image` are left out."""

    ending = "tar"

    def __init__(self, index: Index) -> None:
        self.job: dict[str, Any] = {}
        self.notes: dict[str, Any] = {}
        self._index, self._tables = index, index_tables(index)

    def prepare(self, parts: Path, workers: int) -> None:
        """Do nothing."""

    def write(self, rows: range, shard: HashingFile, stop: Callable[[], bool]) -> Written:
        """Write the rows of a shard, see `pipelines.sources.shards.pack.Contents`."""
        kept, offsets, sizes, sums, left_out = [], [], [], [], []
        for row in rows:
            if stop():
                break
            try:
                data = self._index.read(row)
                check_image(data)
            except (OSError, BadImage) as error:
                left_out.append({"path": str(self._index.path(row)), "reason": str(error)})
            else:
                kept.append(row)
                offsets.append(shard.written + BLOCK_BYTES)
                sizes.append(len(data))
                sums.append(zlib.crc32(data))
                _add_member(shard, f"{row:09d}.{_ending(data)}", data)
                _add_member(shard, f"{row:09d}.json", self._description(row))
        shard.write(bytes(2 * BLOCK_BYTES))  # end marker of tar
        tables: dict[str, npt.NDArray[Any]] = {
            "offset": np.array(offsets, np.uint64),
            "size": np.array(sizes, np.uint32),
            "crc32": np.array(sums, np.uint32),
        }
        return Written(kept, tables, left_out)

    def _description(self, row: int) -> bytes:
        """Labels of a sample for other readers of the shards: arrays as lists, NaN as null."""
        known = {name.removeprefix("target."): _plain(table[row].tolist()) for name, table in self._tables.items()}
        return json.dumps({"path": self._index.paths[row], **known}).encode()


def _add_member(tar: HashingFile, name: str, data: bytes) -> None:
    header = tarfile.TarInfo(name)
    header.size, header.mode = len(data), 0o644  # no time and no owner, so that equal data gives equal shards
    tar.write(header.tobuf(tarfile.USTAR_FORMAT))
    tar.write(data)
    tar.write(bytes(-len(data) % BLOCK_BYTES))


def _ending(data: bytes) -> str:
    """Ending for the kind of an image that passed `check_image`."""
    return {b"\xff": "jpg", b"\x89": "png", b"R": "webp"}[data[:1]]


def _plain(value: Any) -> Any:
    if isinstance(value, list):
        return [_plain(one) for one in value]
    return None if value != value else value
