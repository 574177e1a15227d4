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
from collections import defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO, Final

import numpy as np

from peclr_dali.errors import UserError
from peclr_dali.parsing import parse_json, regular
from peclr_dali.pipelines.config import DataConfig
from peclr_dali.pipelines.files.check import check_image
from peclr_dali.pipelines.files.image_file import BadImage
from peclr_dali.pipelines.samples.index import Index
from peclr_dali.pipelines.sources.shards.index_file import (
    FORMAT,
    INDEX_FILE,
    LEFT_OUT_FILE,
    PACK_FILE,
    PLACES,
    IndexFile,
    Shard,
    index_tables,
    read_index_file,
    write_index_file,
    write_tables,
)
from peclr_dali.pipelines.sources.shards.load import load_shards
from peclr_dali.pipelines.sources.shards.shard_store import BLOCK_BYTES
from peclr_dali.writing import whole_file, write_text

_PARTS_FOLDER: Final = "parts"

Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class Packed:
    """Result of `pack`.

    Attributes:
        bytes: size of all shards.
        left_out: number of images that cannot be used, listed in `left_out.jsonl`.
        already_there: whether an earlier call had packed everything.
    """

    samples: int
    shards: int
    bytes: int
    left_out: int
    already_there: bool


def pack(
    index: Index,
    out: Path,
    *,
    per_shard: int,
    workers: int,
    progress: Progress = lambda done, total: None,
    chosen: dict[str, Any] | None = None,
) -> Packed:
    """Write the samples of an index as shards, in its order.

    A shard is written under a temporary name, synced, read back from the disk, compared by SHA-256 and then renamed. So
    an interruption leaves only complete shards, and the same call continues after them. Files that cannot be used are
    left out.

    Args:
        index: index of one source, its boxes without margin.
        out: a folder that is empty, missing, or from an earlier call with the same arguments.
        workers: number of shards written at the same time.
        progress: called with (samples done, samples in all).
        chosen: the index's `choices`, which a run on the shards may repeat.

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
            _Packer(index, out, per_shard, chosen or {}).run(workers, progress)
    content = read_index_file(out)
    size = sum(shard.bytes for shard in content.shards)
    return Packed(content.samples, len(content.shards), size, content.left_out, already_there)


class _Packer:
    """Writes the shards and the index of a folder; the arguments are those of `pack`."""

    def __init__(self, index: Index, out: Path, per_shard: int, chosen: dict[str, Any]) -> None:
        self._chosen = chosen
        self._index, self._out, self._per_shard = index, out, per_shard
        self._tables = index_tables(index)
        self._shards = range(-(-len(index) // per_shard))
        self._done = 0  # samples written in this and earlier calls
        self._stop, self._lock = threading.Event(), threading.Lock()

    def run(self, workers: int, progress: Progress) -> None:
        """Write the shards in threads, and then the index. The first error ends all threads and is raised here."""
        (self._out / _PARTS_FOLDER).mkdir(exist_ok=True)
        with ThreadPoolExecutor(workers) as pool:
            try:
                running = {pool.submit(self._write_shard, number) for number in self._shards}
                while running:
                    finished, running = wait(running, timeout=0.2, return_when=FIRST_EXCEPTION)
                    for one in finished:
                        one.result()
                    progress(self._done, len(self._index))
            except BaseException:
                self._stop.set()
                pool.shutdown(cancel_futures=True)
                raise
        self._write_index()

    def _shard_file(self, number: int) -> Path:
        return self._out / f"shard-{number:06d}.tar"

    def _part_file(self, number: int) -> Path:
        """The rows of the index that belong to a shard; written after it."""
        return self._out / _PARTS_FOLDER / f"{number:06d}.npz"

    def _is_written(self, number: int) -> bool:
        """Whether an earlier call finished a shard, and the shard has not changed."""
        try:
            with regular(self._part_file(number)).open("rb") as file, np.load(file) as part:
                packed: str = parse_json(part["notes"].tobytes())["sha256"]
            return _sha256_on_disk(self._shard_file(number)) == packed
        except (OSError, ValueError, KeyError, TypeError, EOFError, zipfile.BadZipFile):
            return False

    def _write_shard(self, number: int) -> None:
        """Write one shard and, last, its part of the index."""
        rows = range(number * self._per_shard, min((number + 1) * self._per_shard, len(self._index)))
        if self._is_written(number):
            self._count(len(rows))
            return
        target, left_out = self._shard_file(number), list[dict[str, str]]()
        unfinished = target.with_suffix(".part")
        unfinished.unlink(missing_ok=True)
        with unfinished.open("xb") as file:
            shard = _ShardWriter(file)
            for row in rows:
                if self._stop.is_set():
                    return
                try:
                    data, labels = self._index.read(row), {name: table[row] for name, table in self._tables.items()}
                    check_image(data)
                except (OSError, BadImage) as error:
                    left_out.append({"path": str(self._index.path(row)), "reason": str(error)})
                else:
                    shard.add(row, data, self._index.paths[row], labels)
                self._count(1)
            shard.finish()
        sha256 = shard.hash.hexdigest()
        if _sha256_on_disk(unfinished) != sha256:
            raise UserError(
                f"{unfinished}: reads back differently from what was written. Check the disk, then pack again."
            )
        unfinished.replace(target)
        notes = json.dumps({"sha256": sha256, "bytes": shard.bytes, "left_out": left_out}).encode()
        columns = {name: np.array(column, dtype=PLACES.get(name)) for name, column in shard.columns.items()}
        with whole_file(self._part_file(number)) as part:
            np.savez(part, notes=np.frombuffer(notes, np.uint8), allow_pickle=False, **columns)

    def _count(self, samples: int) -> None:
        with self._lock:
            self._done += samples

    def _write_index(self) -> None:
        """Join the parts of the index. The index file is written last; it makes the shards usable."""
        columns, shards, left_out = defaultdict[str, list[Any]](list), list[Shard](), list[dict[str, str]]()
        for number in self._shards:
            with np.load(self._part_file(number)) as part:
                notes = json.loads(part["notes"].tobytes())
                for name in set(part.files) - {"notes"}:
                    columns[name].append(part[name])
                samples = len(part["offset"]) if "offset" in part else 0
            left_out += notes["left_out"]
            shards.append(Shard(self._shard_file(number).name, samples, notes["bytes"], notes["sha256"]))
        if not columns:
            first = f"{left_out[0]['path']}: {left_out[0]['reason']}"
            raise UserError(
                f"{self._index.root}: none of its {len(self._index)} images can be used; the first is {first}. Mend or "
                "replace the files, or name another folder."
            )
        tables = {name: np.concatenate(column) for name, column in columns.items()}
        checksums = write_tables(self._out, tables)
        write_text(self._out / "SHA256SUMS", "".join(f"{shard.sha256}  {shard.file}\n" for shard in shards))
        if left_out:
            write_text(self._out / LEFT_OUT_FILE, "".join(json.dumps(row) + "\n" for row in left_out))
        content = IndexFile(
            self._index.name, sorted(tables), shards, checksums,
            left_out=len(left_out), skeleton=self._index.skeleton.name, chosen=self._chosen,
        )  # fmt: skip
        write_index_file(self._out, content)
        shutil.rmtree(self._out / _PARTS_FOLDER)


class _ShardWriter:
    """Writes a tar file as WebDataset has them. Equal samples give equal bytes: no times and no owners.

    Attributes:
        hash: SHA-256 of the `bytes` written so far.
        columns: a value for each sample, by the names of the tables in the shards' index.
    """

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.hash, self.bytes = hashlib.sha256(), 0
        self.columns = defaultdict[str, list[Any]](list)

    def add(self, row: int, data: bytes, path: str, labels: dict[str, Any]) -> None:
        """Append an image that passed `check_image`, and its path and labels for other readers of the shards."""
        ending = {b"\xff": "jpg", b"\x89": "png", b"R": "webp"}[data[:1]]
        place: dict[str, Any] = {"offset": self.bytes + BLOCK_BYTES, "size": len(data), "crc32": zlib.crc32(data)}
        for name, value in (place | labels).items():
            self.columns[name].append(value)
        described = {name.removeprefix("target."): _without_nan(value.tolist()) for name, value in labels.items()}
        self._add_member(f"{row:09d}.{ending}", data)
        self._add_member(f"{row:09d}.json", json.dumps({"path": path, **described}).encode())

    def finish(self) -> None:
        """Write tar's end marker, and sync the file."""
        self._write(bytes(2 * BLOCK_BYTES))
        self._file.flush()
        os.fsync(self._file.fileno())

    def _add_member(self, name: str, data: bytes) -> None:
        header = tarfile.TarInfo(name)
        header.size, header.mode = len(data), 0o644
        self._write(header.tobuf(tarfile.USTAR_FORMAT) + data + bytes(-len(data) % BLOCK_BYTES))

    def _write(self, data: bytes) -> None:
        self._file.write(data)
        self.hash.update(data)
        self.bytes += len(data)


def _without_nan(value: Any) -> Any:
    """Nested lists of numbers with None for NaN, which JSON does not have."""
    if isinstance(value, list):
        return [_without_nan(one) for one in value]
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
    file = out / PACK_FILE
    if not file.exists():
        if os.path.lexists(out) and (not out.is_dir() or any(out.iterdir())):
            raise UserError(f"{out}: exists and holds no shards of this source. Name a new or an empty folder.")
        out.mkdir(parents=True, exist_ok=True)
        write_text(file, json.dumps(job) + "\n")
        return False
    try:
        found = dict(parse_json(regular(file).read_bytes()))
    except (OSError, ValueError, TypeError) as error:
        raise UserError(f"{file}: damaged ({error}). Remove the folder and pack again.") from error
    for key in job | found:
        if found.get(key) != job.get(key):
            differs = f"{key} {found.get(key)!r}, not {job.get(key)!r}"
            if key == "of":
                differs = "other files, boxes or labels"
            raise UserError(f"{out}: holds shards of {differs}. Name another folder, or remove this one.")
    return (out / INDEX_FILE).exists()


def _sha256_on_disk(path: Path) -> str:
    """Hash of a file on the disk; it is dropped from the page cache first."""
    with regular(path).open("rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextmanager
def _one_line_of_disk_errors(out: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        remedy = "Make room" if error.errno == errno.ENOSPC else "Make it writable"
        raise UserError(
            f"{error.filename or out}: cannot be written to ({error.strerror}). {remedy}, then pack again: it "
            "continues where it stopped."
        ) from error
