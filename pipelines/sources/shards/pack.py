"""Packs many small files of a source into few large shards, which are faster to read from any storage."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
import tarfile
import threading
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO, Final

import numpy as np
import numpy.typing as npt

from errors import UserError
from parsing import parse_json
from pipelines.config import DataConfig
from pipelines.files.check import check_image
from pipelines.files.image_file import BadImage
from pipelines.samples.index import Index
from pipelines.sources.shards.index_file import FORMAT, INDEX_FILE, index_tables, write_tables
from pipelines.sources.shards.load import load_shards
from pipelines.sources.shards.store import BLOCK_BYTES
from pipelines.sources.shards.threads import in_threads
from skeleton import HAND
from writing import whole_file, write_text

_PARTS_FOLDER: Final = "parts"

Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class Packed:
    """Result of `pack`."""

    samples: int
    shards: int
    bytes: int
    """Size of all shards."""

    left_out: int
    """Number of images that cannot be used, listed in `left_out.jsonl`."""

    already_there: bool
    """Whether an earlier call had packed everything."""


def pack(
    index: Index,
    out: Path,
    *,
    per_shard: int,
    workers: int,
    progress: Progress = lambda done, total: None,
) -> Packed:
    """Write the samples of an index as shards, in its order, with the files' own bytes.

    A shard is written under a temporary name, synced, read back from the disk, compared by SHA-256 and then renamed. So
    an interruption leaves only complete shards, and the same call continues after them. Files that cannot be read or
    that fail `check_image` are left out.

    Args:
        index: index of one source, its boxes without margin.
        out: a folder that is empty, missing, or from an earlier call with the same arguments.
        workers: number of shards written at the same time.
        progress: called with (samples done, samples in all).

    Raises:
        UserError: `out` holds something else or cannot be written to, or a shard reads back differently.
    """
    job = {"format": FORMAT, "name": index.name, "samples": len(index), "per_shard": per_shard, "of": _identity(index)}
    with _one_line_of_disk_errors(out):
        already_there = _claim(out, job)
        if already_there:
            try:
                load_shards(DataConfig("shards", str(out)))
            except UserError as error:
                again = f"To pack again, remove {out / INDEX_FILE}: all shards are written anew."
                raise UserError(f"{error} {again}") from error
        else:
            writer = _Writer(index, out, per_shard)
            _write_all(writer, workers, progress)
            _write_index(writer)
    content = json.loads((out / INDEX_FILE).read_bytes())
    sizes = [(shard["samples"], shard["bytes"]) for shard in content["shards"]]
    samples, size = (sum(column) for column in zip(*sizes, strict=True))
    return Packed(samples, len(sizes), size, content["left_out"], already_there)


class _Writer:
    """Writes single shards."""

    def __init__(self, index: Index, out: Path, per_shard: int) -> None:
        self.index, self.out, self.per_shard = index, out, per_shard
        self.shards = -(-len(index) // per_shard)
        self.done = 0  # samples written in this and earlier calls
        self.stop = threading.Event()
        self._tables = index_tables(index)
        self._lock = threading.Lock()

    def name(self, number: int) -> str:
        return f"shard-{number:06d}.tar"

    def part(self, number: int) -> Path:
        return self.out / _PARTS_FOLDER / f"{number:06d}.npz"

    def rows(self, number: int) -> range:
        return range(number * self.per_shard, min((number + 1) * self.per_shard, len(self.index)))

    def is_written(self, number: int) -> bool:
        """Whether an earlier call finished a shard, whose part is written last, and the shard has not changed."""
        try:
            with np.load(self.part(number)) as part:
                packed: str = json.loads(part["notes"].tobytes())["sha256"]
            return _sha256_on_disk(self.out / self.name(number)) == packed
        except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile):
            return False

    def write(self, number: int) -> None:
        """One shard and, last, its part of the index."""
        rows = self.rows(number)
        if self.is_written(number):
            self._count(len(rows))
            return
        target = self.out / self.name(number)
        beside = target.with_suffix(".part")
        kept, offsets, sizes, sums, left_out = [], [], [], [], []
        with beside.open("wb") as file:
            tar = _HashingFile(file)
            for row in rows:
                if self.stop.is_set():
                    return
                try:
                    data = self.index.read(row)
                    check_image(data)
                except (OSError, BadImage) as error:
                    left_out.append({"path": str(self.index.path(row)), "reason": str(error)})
                else:
                    kept.append(row)
                    offsets.append(tar.written + BLOCK_BYTES)
                    sizes.append(len(data))
                    sums.append(zlib.crc32(data))
                    _add_member(tar, f"{row:09d}.{_ending(data)}", data)
                    _add_member(tar, f"{row:09d}.json", self._description(row))
                self._count(1)
            tar.write(bytes(2 * BLOCK_BYTES))  # end marker of tar
            file.flush()
            os.fsync(file.fileno())
        if _sha256_on_disk(beside) != tar.hash.hexdigest():
            raise UserError(f"{beside}: reads back differently from what was written. Check the disk, then pack again.")
        beside.replace(target)
        notes = json.dumps({"sha256": tar.hash.hexdigest(), "left_out": left_out}).encode()
        with whole_file(self.part(number)) as part:
            np.savez(
                part,
                row=np.array(kept, np.int64),
                offset=np.array(offsets, np.uint64),
                size=np.array(sizes, np.uint32),
                crc32=np.array(sums, np.uint32),
                bytes=np.int64(tar.written),
                notes=np.frombuffer(notes, np.uint8),
            )

    def _description(self, row: int) -> bytes:
        """Labels of a sample for other readers of the shards: arrays as lists, NaN as null."""
        known = {name.removeprefix("target."): _plain(table[row].tolist()) for name, table in self._tables.items()}
        return json.dumps({"path": self.index.paths[row], **known}).encode()

    def _count(self, samples: int) -> None:
        with self._lock:
            self.done += samples


class _HashingFile:
    """A file that counts and hashes the bytes written to it."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.hash = hashlib.sha256()
        self.written = 0

    def write(self, data: bytes) -> None:
        self._file.write(data)
        self.hash.update(data)
        self.written += len(data)


def _add_member(tar: _HashingFile, name: str, data: bytes) -> None:
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


def _identity(index: Index) -> str:
    """A hash of the names, boxes and labels to be packed."""
    digest = hashlib.sha256()
    names = iter(index.paths)
    while block := list(islice(names, 10_000)):
        digest.update("\n".join(block).encode(errors="surrogateescape"))
    for name, table in sorted(index_tables(index).items()):
        digest.update(name.encode())
        digest.update(np.ascontiguousarray(table).view(np.uint8).data)
    return digest.hexdigest()


def _claim(out: Path, job: dict[str, Any]) -> bool:
    """Prepare the folder. Returns whether everything is packed already."""
    file = out / "pack.json"
    try:
        found = parse_json(file.read_bytes()) if file.exists() else None
        if found is None:
            if out.exists() and (not out.is_dir() or any(out.iterdir())):
                raise UserError(f"{out}: exists and holds no shards of this source. Name a new or an empty folder.")
            out.mkdir(parents=True, exist_ok=True)
            write_text(file, json.dumps(job) + "\n")
    except ValueError as error:
        raise UserError(f"{file}: torn ({error}). Remove the folder and pack again.") from error
    except OSError as error:
        raise UserError(f"{out}: cannot be used ({error.strerror}). Name a folder that can be written to.") from error
    if found is not None and not isinstance(found, dict):
        raise UserError(f"{file}: not what 'pack' wrote there. Remove the folder and pack again.")
    if found is not None and found != job:
        key = next(key for key in job if found.get(key) != job[key])
        what = "other files, boxes or labels" if key == "of" else f"{key} {found.get(key)!r}, not {job[key]!r}"
        raise UserError(f"{out}: holds shards of {what}. Name another folder, or remove this one.")
    return (out / INDEX_FILE).exists()


def _write_all(writer: _Writer, workers: int, progress: Progress) -> None:
    (writer.out / _PARTS_FOLDER).mkdir(exist_ok=True)
    in_threads(
        writer.write,
        range(writer.shards),
        workers=workers,
        stop=writer.stop,
        progress=lambda: progress(writer.done, len(writer.index)),
    )


def _write_index(writer: _Writer) -> None:
    """Join the parts of the index. The index file is written last; it makes the shards usable."""
    out = writer.out
    columns: dict[str, list[npt.NDArray[Any]]] = {name: [] for name in ("row", "offset", "size", "crc32")}
    shards, left_out = [], []
    for number in range(writer.shards):
        with np.load(writer.part(number)) as part:
            for name, column in columns.items():
                column.append(part[name])
            notes = json.loads(part["notes"].tobytes())
            left_out += notes["left_out"]
            shards.append({
                "file": writer.name(number), "samples": len(part["row"]), "bytes": int(part["bytes"]),
                "sha256": notes["sha256"],
            })  # fmt: skip
    joined = {name: np.concatenate(column) for name, column in columns.items()}
    rows = joined.pop("row")
    if not len(rows):
        raise UserError(f"{writer.index.root}: none of its {len(writer.index)} images can be used ({left_out[0]}).")
    tables = {**joined, **{name: table[rows] for name, table in index_tables(writer.index).items()}}
    checksums = write_tables(out, tables)
    write_text(out / "SHA256SUMS", "".join(f"{shard['sha256']}  {shard['file']}\n" for shard in shards))
    if left_out:
        write_text(out / "left_out.jsonl", "".join(json.dumps(row) + "\n" for row in left_out))
    content = {"format": FORMAT, "name": writer.index.name, "tables": sorted(tables), "shards": shards}
    content["crc32"] = checksums
    content["left_out"] = len(left_out)
    if writer.index.skeleton is not HAND:
        content["skeleton"] = writer.index.skeleton.name
    write_text(out / INDEX_FILE, json.dumps(content, indent=1) + "\n")
    shutil.rmtree(out / _PARTS_FOLDER)


def _sha256_on_disk(path: Path) -> str:
    """Hash of a file on the disk; it is dropped from the page cache first."""
    with path.open("rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextmanager
def _one_line_of_disk_errors(out: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        remedy = "Make room" if error.errno == errno.ENOSPC else "Make it writable"
        raise UserError(
            f"{out}: cannot be written to ({error.strerror}). {remedy}, then pack again: it continues where it stopped."
        ) from error
