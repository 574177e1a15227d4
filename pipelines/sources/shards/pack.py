"""Packs many small files of a source into few large shards, which are faster to read from any storage."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
import threading
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Final, Protocol

import numpy as np
import numpy.typing as npt

from errors import UserError
from parsing import parse_json
from pipelines.config import DataConfig
from pipelines.samples.index import Index
from pipelines.sources.shards.index_file import FORMAT, INDEX_FILE, PACK_FILE, index_tables, write_tables
from pipelines.sources.shards.load import load_shards
from pipelines.sources.shards.tar import HashingFile, TarContents, Written
from pipelines.sources.shards.threads import in_threads
from skeleton import HAND
from writing import whole_file, write_text

_PARTS_FOLDER: Final = "parts"
_COLUMN: Final = "table."
"""Start of the names of a part's tables."""

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


class Contents(Protocol):
    """What shards hold, and how it is written.

    Attributes:
        ending: ending of the names of shards.
        job: settings besides the samples; a call with other settings does not continue an earlier one.
        notes: entries of index.json.
    """

    ending: str
    job: dict[str, Any]
    notes: dict[str, Any]

    def prepare(self, parts: Path, workers: int) -> None:
        """Do what is needed before the first shard. `parts` is a folder that lasts until all shards are written."""

    def write(self, rows: range, shard: HashingFile, stop: Callable[[], bool]) -> Written:
        """Write some rows of the index as one shard. Call `stop` before each row; if it is true, return early."""


def pack(
    index: Index,
    out: Path,
    *,
    per_shard: int,
    workers: int,
    progress: Progress = lambda done, total: None,
    contents: Contents | None = None,
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
        contents: what to write of each sample; None: its file's own bytes, in tar files.

    Raises:
        UserError: `out` holds something else or cannot be written to, or a shard reads back differently.
    """
    contents = contents or TarContents(index)
    job = {"format": FORMAT, "name": index.name, "samples": len(index), "per_shard": per_shard, "of": _identity(index)}
    job |= contents.job
    with _one_line_of_disk_errors(out):
        already_there = _claim(out, job)
        if already_there:
            try:
                load_shards(DataConfig("shards", str(out)))
            except UserError as error:
                again = f"To pack again, remove {out / INDEX_FILE}: all shards are written anew."
                raise UserError(f"{error} {again}") from error
        else:
            writer = _Writer(index, out, per_shard, contents)
            (out / _PARTS_FOLDER).mkdir(exist_ok=True)
            contents.prepare(out / _PARTS_FOLDER, workers)
            _write_all(writer, workers, progress)
            _write_index(writer)
    content = json.loads((out / INDEX_FILE).read_bytes())
    sizes = [(shard["samples"], shard["bytes"]) for shard in content["shards"]]
    samples, size = (sum(column) for column in zip(*sizes, strict=True))
    return Packed(samples, len(sizes), size, content["left_out"], already_there)


class _Writer:
    """Writes single shards."""

    def __init__(self, index: Index, out: Path, per_shard: int, contents: Contents) -> None:
        self.index, self.out, self.per_shard, self.contents = index, out, per_shard, contents
        self.shards = -(-len(index) // per_shard)
        self.done = 0  # samples written in this and earlier calls
        self.stop = threading.Event()
        self._lock = threading.Lock()

    def name(self, number: int) -> str:
        return f"shard-{number:06d}.{self.contents.ending}"

    def part(self, number: int) -> Path:
        return self.out / _PARTS_FOLDER / f"{number:06d}.npz"

    def rows(self, number: int) -> range:
        return range(number * self.per_shard, min((number + 1) * self.per_shard, len(self.index)))

    def is_written(self, number: int) -> bool:
        """Whether an earlier call finished a shard (its part is written last), and the shard has not changed."""
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
        with beside.open("wb") as file:
            shard = HashingFile(file)
            written = self.contents.write(rows, shard, self._stopped)
            if self.stop.is_set():
                return
            file.flush()
            os.fsync(file.fileno())
        if _sha256_on_disk(beside) != shard.hash.hexdigest():
            raise UserError(f"{beside}: reads back differently from what was written. Check the disk, then pack again.")
        beside.replace(target)
        notes = json.dumps({"sha256": shard.hash.hexdigest(), "left_out": written.left_out}).encode()
        with whole_file(self.part(number)) as part:
            np.savez(
                part,
                row=np.array(written.rows, np.int64),
                bytes=np.int64(shard.written),
                notes=np.frombuffer(notes, np.uint8),
                allow_pickle=False,
                **{_COLUMN + name: table for name, table in written.tables.items()},
            )

    def _stopped(self) -> bool:
        """Whether to stop; a sample is counted as done with each call."""
        self._count(1)
        return self.stop.is_set()

    def _count(self, samples: int) -> None:
        with self._lock:
            self.done += samples


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
    try:
        found = parse_json(file.read_bytes()) if file.exists() else None
        if found is None:
            if out.exists() and (not out.is_dir() or any(out.iterdir())):
                raise UserError(f"{out}: exists and holds no shards of this source. Name a new or an empty folder.")
            out.mkdir(parents=True, exist_ok=True)
            write_text(file, json.dumps(job) + "\n")
    except ValueError as error:
        raise UserError(f"{file}: damaged ({error}). Remove the folder and pack again.") from error
    except OSError as error:
        raise UserError(f"{out}: cannot be used ({error.strerror}). Name a folder that can be written to.") from error
    if found is not None and not isinstance(found, dict):
        raise UserError(f"{file}: not what 'pack' wrote there. Remove the folder and pack again.")
    if found is not None and found != job:
        key = next(key for key in job | found if found.get(key) != job.get(key))
        what = _differences({key: found.get(key)}, {key: job.get(key)})
        if key == "of":
            what = "other files, boxes or labels"
        elif key not in job:
            what = f"{key}, and this call packs files"
        elif key not in found:
            what = f"files, and this call packs {key}"
        raise UserError(f"{out}: holds shards of {what}. Name another folder, or remove this one.")
    return (out / INDEX_FILE).exists()


def _differences(found: dict[str, Any], job: dict[str, Any], table: str = "") -> str:
    """The keys that differ, with both values."""
    parts = []
    for key in job | found:
        one, other = found.get(key), job.get(key)
        if isinstance(one, dict) and isinstance(other, dict):
            parts.append(_differences(one, other, f"{key}."))
        elif one != other:
            parts.append(f"{table}{key} {one!r}, not {other!r}")
    return "; ".join(part for part in parts if part)


def _write_all(writer: _Writer, workers: int, progress: Progress) -> None:
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
    columns: dict[str, list[npt.NDArray[Any]]] = {}
    shards, left_out, row_parts = [], [], []
    for number in range(writer.shards):
        with np.load(writer.part(number)) as part:
            row_parts.append(part["row"])
            for name in part.files:
                if name.startswith(_COLUMN):
                    columns.setdefault(name.removeprefix(_COLUMN), []).append(part[name])
            notes = json.loads(part["notes"].tobytes())
            left_out += notes["left_out"]
            shards.append({
                "file": writer.name(number), "samples": len(part["row"]), "bytes": int(part["bytes"]),
                "sha256": notes["sha256"],
            })  # fmt: skip
    joined = {name: np.concatenate(column) for name, column in columns.items()}
    rows = np.concatenate(row_parts)
    if not len(rows):
        raise UserError(f"{writer.index.root}: none of its {len(writer.index)} images can be used ({left_out[0]}).")
    tables = {**joined, **{name: table[rows] for name, table in index_tables(writer.index).items()}}
    checksums = write_tables(out, tables)
    write_text(out / "SHA256SUMS", "".join(f"{shard['sha256']}  {shard['file']}\n" for shard in shards))
    if left_out:
        write_text(out / "left_out.jsonl", "".join(json.dumps(row) + "\n" for row in left_out))
    content = {"format": FORMAT, "name": writer.index.name, "tables": sorted(tables), "shards": shards}
    content |= writer.contents.notes
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
