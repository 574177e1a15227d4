"""Packed data: WebDataset tar shards, and an index with the position of each sample.

A folder of shards holds

    shard-000000.tar ...   a sample's image as it was, 000000012.jpg, then 000000012.json: its path, box and labels
    index.json             what there is, each shard's size, the tables' checksums; written last
    index/*.npy            where the images are, their sizes and checksums, boxes and labels: a row per sample
    SHA256SUMS             of the shards, for `sha256sum -c`

The tables are memory-mapped, and read once completely to compare their checksums. The shards are not mapped but read at
an offset: a failed read is then an error of one sample, while a failed page would end the process.
"""

from __future__ import annotations

import logging
import os
import re
import threading
import zlib
from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from errors import UserError
from parsing import parse_json, regular
from pipelines.config import DataConfig
from pipelines.files.image_file import MAX_FILE_BYTES
from pipelines.samples.index import Blocks, Index, NamesOnDemand
from pipelines.sources.boxes import refuse_boxes
from pipelines.sources.subsets import rows_of_split
from skeleton import SKELETONS

log = logging.getLogger(__name__)

FORMAT: Final = 1
INDEX_FILE: Final = "index.json"
INDEX_FOLDER: Final = "index"
BLOCK_BYTES: Final = 512
"""Block size of tar: a header has one block, and contents fill whole blocks."""

OPEN_SHARDS: Final = 128
"""Largest number of open shards; a process may have 1024 open files by default."""

_PLACES: Final = {"offset": np.dtype(np.uint64), "size": np.dtype(np.uint32), "crc32": np.dtype(np.uint32)}
_TABLES: Final = {
    "box_px": np.dtype(np.float32),
    "keypoints_px": np.dtype(np.float32),
    "mirror": np.dtype(np.bool_),
    "group": np.dtype(np.int64),
}
_TARGET: Final = "target."
_TARGET_NAME: Final = re.compile(r"target\.\w+")
_READ_BYTES: Final = 1 << 20

Table = npt.NDArray[Any]


def load_shards(config: DataConfig, *, verify: bool = False) -> Index:
    """Read the index that `pack` wrote, in the order of the packed source.

    Args:
        config: names the folder and the split; `data.shuffle_shards` shuffles within so many shards at a time, the
            shards in random order; unset, over all.
        verify: compare the checksum of each sample when it is read.

    Returns:
        The index. Its labels are memory-mapped.

    Raises:
        UserError: the folder has no shards, a shard is missing or cut, the index does not fit, or a key is set that has
            no meaning for shards.
    """
    refuse_boxes(config, "shards hold the boxes that they were packed with")
    for key in ("part", "versions"):
        chosen = getattr(config, key)
        if chosen != getattr(DataConfig, key):
            raise UserError(f"data.{key} = {chosen!r}: it was chosen when the shards were packed. Leave it out.")
    root, window = Path(config.root), config.shuffle_shards
    content = _read_index_file(root)
    shards: list[dict[str, Any]] = content["shards"]
    _check_shards(root, shards)
    count = sum(shard["samples"] for shard in shards)
    sums: dict[str, int] = content.get("crc32", {})
    if not sums:
        log.warning(
            "%s: the index was written by an earlier version, without checksums: damage cannot be detected", root
        )
    tables = {name: _read_table(root, name, count, sums.get(name)) for name in content["tables"]}
    first = [0, *accumulate(shard["samples"] for shard in shards)]
    store = ShardStore([root / shard["file"] for shard in shards], first, tables, window, verify=verify)
    index = Index(
        name=content["name"],
        root=root,
        paths=NamesOnDemand(count, store.name),
        box_px=np.array(tables["box_px"]),
        keypoints_px=tables.get("keypoints_px"),
        mirror=tables.get("mirror"),
        group=tables.get("group"),
        targets={name.removeprefix(_TARGET): table for name, table in tables.items() if name.startswith(_TARGET)},
        store=store.read,
        blocks=None if window is None else Blocks(np.array(first, np.int64), window),
        skeleton=SKELETONS[content.get("skeleton", "hand")],
    )
    if config.split == "all":
        return index
    if index.group is None:
        raise UserError(
            f"data.split = {config.split!r}: the shards of {root} do not say which of their images belong together, so "
            'they cannot be split. Use "all", or pack the splits apart.'
        )
    return index.select(rows_of_split(np.asarray(index.group), config.split))


class ShardStore:
    """Reads samples from shards, each in constant time. Any thread may call it.

    Args:
        first: (len(shards) + 1,) first row of each shard, and the end of the last.
        tables: "offset", "size" and "crc32", each (N,): start of a sample's image in its shard, length in bytes,
            checksum.
        window: number of shards to read at a time, or None. If set, the system reads an opened shard ahead as a whole,
            which is faster than seeking on slow storage.
    """

    def __init__(
        self,
        shards: Sequence[Path],
        first: Sequence[int],
        tables: dict[str, Table],
        window: int | None,
        *,
        verify: bool,
    ) -> None:
        self._shards, self._first, self._window, self._verify = shards, first, window, verify
        self._offset, self._size, self._crc32 = tables["offset"], tables["size"], tables["crc32"]
        self._open: dict[int, _Descriptor] = {}
        self._lock = threading.Lock()

    def read(self, sample: int) -> bytes:
        """The bytes of one image.

        Raises:
            OSError: the shard cannot be read, is cut, or has other bytes than were packed.
        """
        data = self._bytes(sample, int(self._offset[sample]), int(self._size[sample]))
        if self._verify and zlib.crc32(data) != self._crc32[sample]:
            raise OSError("not the bytes that were packed (wrong checksum)")
        return data

    def name(self, sample: int) -> str:
        """Shard and member name of a sample, read from the tar, for messages."""
        shard = self._shards[self._shard(sample)].name
        try:
            header = self._bytes(sample, int(self._offset[sample]) - BLOCK_BYTES, BLOCK_BYTES)
        except OSError:
            header = b""
        if header[257:262] != b"ustar":  # damaged
            return f"{shard}/row {sample}"
        member = header[:100].rstrip(b"\0").decode(errors="replace")
        return f"{shard}/{member}"

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


def index_tables(index: Index) -> dict[str, Table]:
    """The tables of an index by file name, for `load_shards`."""
    known: dict[str, Table | None] = {name: getattr(index, name) for name in _TABLES}
    known |= {_TARGET + name: table for name, table in index.targets.items()}
    return {name: table for name, table in known.items() if table is not None}


def _read_index_file(root: Path) -> dict[str, Any]:
    file = root / INDEX_FILE
    try:
        content = parse_json(regular(file).read_bytes())
        if not isinstance(content, dict):
            raise ValueError("it holds no object")
        if content["format"] != FORMAT:
            raise UserError(f"{file}: format {content['format']!r}, expected {FORMAT}. Pack the data again.")
        _check_index_file(content)
    except FileNotFoundError:
        hint = "run the same 'python cli.py pack' again: it goes on where it stopped"
        if not (root / "pack.json").exists():
            hint = "give a folder that 'python cli.py pack' made"
        raise UserError(f"{root}: no {INDEX_FILE}, so it holds no finished shards; {hint}.") from None
    except OSError as error:
        raise UserError(f"{file}: {error.strerror}; expected the index of shards. Check data.root.") from error
    except KeyError as error:
        raise UserError(f"{file}: {error} is missing in this index of shards. Restore it, or pack again.") from error
    except (ValueError, TypeError) as error:
        raise UserError(f"{file}: not a readable index of shards ({error}). Restore it, or pack again.") from error
    return dict(content)


def _check_index_file(content: dict[str, Any]) -> None:
    """Check the values of an index file; a wrong one is a `ValueError`."""
    shards, tables = content["shards"], content["tables"]
    if not isinstance(content["name"], str) or not isinstance(shards, list) or not isinstance(tables, list):
        raise ValueError("name, shards or tables are of another kind")
    for shard in shards:
        name = shard["file"]
        if not isinstance(name, str) or name in ("", ".", "..") or "/" in name or "\0" in name:
            raise ValueError(f"the shard {str(name)[:80]!r} is no file of this folder")
        if any(type(shard[key]) is not int or shard[key] < 0 for key in ("samples", "bytes")):
            raise ValueError(f"samples and bytes of {name!r} are whole numbers")
    for name in tables:
        if not isinstance(name, str) or not (name in _PLACES or name in _TABLES or _TARGET_NAME.fullmatch(name)):
            raise ValueError(f"{str(name)[:80]!r} is no table of an index")
    if not shards or not {*_PLACES, "box_px"} <= {*tables}:
        raise ValueError("something is missing")
    if content.get("skeleton", "hand") not in SKELETONS:
        raise ValueError(f"skeleton is {str(content['skeleton'])[:80]!r}, expected one of {', '.join(SKELETONS)}")
    if not isinstance(content.get("crc32", {}), dict):
        raise ValueError("crc32 is of another kind")


def table_checksum(file: Path) -> int:
    """CRC-32 of a file."""
    checksum = 0
    with file.open("rb") as content:
        while block := content.read(_READ_BYTES):
            checksum = zlib.crc32(block, checksum)
    return checksum


def _check_shards(root: Path, shards: list[dict[str, Any]]) -> None:
    for shard in shards:
        path = root / shard["file"]
        try:
            found = path.stat().st_size
        except OSError as error:
            raise UserError(
                f"{path}: {error.strerror}; the index names {len(shards)} shards. Copy this one again, or pack again."
            ) from error
        if found != shard["bytes"]:
            raise UserError(
                f"{path}: {found} bytes, expected {shard['bytes']}: cut or changed. Copy it again, or pack again."
            )


def _read_table(root: Path, name: str, count: int, checksum: int | None) -> Table:
    file = root / INDEX_FOLDER / f"{name}.npy"
    try:
        found = None if checksum is None else table_checksum(file)
        table: Table = np.lib.format.open_memmap(file, mode="r")
    except (OSError, ValueError, EOFError, OverflowError) as error:
        raise UserError(
            f"{file}: not a readable table of the index ({error}). Copy it again, or pack again."
        ) from error
    dtype = _PLACES.get(name) or _TABLES.get(name, np.dtype(np.float32))
    if name == "keypoints_px" and table.ndim == 3:
        shape: tuple[int, ...] = (table.shape[1], 2)
    else:
        shape = {"box_px": (3,)}.get(name, table.shape[1:] if name.startswith(_TARGET) else ())
    if table.dtype != dtype or table.shape != (count, *shape):
        raise UserError(
            f"{file}: {table.dtype} {table.shape}, expected {dtype} with {count} rows: of other shards. "
            "Copy the whole folder again, or pack again."
        )
    if found != checksum:
        raise UserError(f"{file}: not the bytes that were packed (wrong checksum). Copy it again, or pack again.")
    return table
