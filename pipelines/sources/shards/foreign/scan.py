"""Indexes tar files of images that other programs wrote. Their headers are read once; nothing is packed again."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import threading
import zipfile
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any, Final

import numpy as np

from errors import UserError
from parsing import parse_json, paths_in_one_line, regular
from pipelines.sources.shards.foreign.headers import HeaderScan, Places
from pipelines.sources.shards.index_file import (
    FOLDER,
    FORMAT,
    INDEX_FILE,
    INDEX_FOLDER,
    INDEX_PARTS,
    PACK_FILE,
    how_again,
    read_index_file,
    read_table,
    shards_in_words,
    write_tables,
)
from pipelines.sources.shards.threads import in_threads
from writing import whole_file, write_text

_LEFT_OUT: Final = "left_out.jsonl"
_COLUMNS: Final = {"offset": np.uint64, "size": np.uint32, "lead": np.uint32}

_COMPRESSED: Final = {
    b"\x1f\x8b": ("gzip", "gunzip -k"),
    b"\x28\xb5\x2f\xfd": ("zstd", "zstd -d"),
    b"BZh": ("bzip2", "bunzip2 -k"),
    b"\xfd7zXZ\0": ("xz", "unxz -k"),
}
"""First bytes of compressed files, and the program that unpacks them."""

Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class Indexed:
    """Result of `index_shards`."""

    folder: Path
    """Folder of the shards."""

    samples: int
    shards: int
    without_images: int
    """Number of shards that hold no image; the index does not name them."""

    scanned: int
    """Number of shards that this call read; the others were known from an earlier one."""

    skipped: dict[str, int]
    """Number of members that are no samples, by kind."""

    left_out: list[tuple[str, str]]
    """Shards whose end may be missing, with the reason; also in `left_out.jsonl`."""


@dataclass(frozen=True)
class _Shard:
    """What a scan found in one shard. `identity` is its size in bytes and time of change in nanoseconds."""

    identity: tuple[int, int]
    places: Places
    skipped: dict[str, int]
    ended_early: str | None

    @property
    def notes(self) -> dict[str, Any]:
        """All fields but the places, for JSON."""
        size, changed_ns = self.identity
        return {"bytes": size, "changed_ns": changed_ns, "skipped": self.skipped, "ended_early": self.ended_early}

    @staticmethod
    def of_notes(notes: dict[str, Any], places: Places) -> _Shard:
        """The inverse of `notes`. Wrong notes raise a `KeyError`, `TypeError` or `ValueError`."""
        skipped = {str(kind): int(count) for kind, count in dict(notes["skipped"]).items()}
        return _Shard((int(notes["bytes"]), int(notes["changed_ns"])), places, skipped, notes["ended_early"])


def index_shards(
    shards: Sequence[Path], out: Path, *, workers: int, progress: Progress = lambda done, total: None
) -> Indexed:
    """Write an index of the images in tar files, in their order, for `load_shards`.

    Members with the ending of an image are samples, except hidden ones. Only headers are read. The shards stay where
    they are; the index names their folder. What a call has read of a shard is kept, so the same call continues after an
    interruption, and a later one reads only new and changed shards.

    Args:
        shards: absolute paths.
        out: a folder that is empty, missing, or from an earlier call.
        workers: number of shards read at the same time.
        progress: called with (bytes passed, bytes of all shards).

    Raises:
        UserError: `out` holds something else or cannot be written to, a shard cannot be read, is compressed, no tar
            file or written by `pack`, or there is no image.
    """
    _refuse_packed(shards)
    with paths_in_one_line(out):
        scans = _Scans(shards, out, _claim(out))
    scans.run(workers, progress)
    return _write_index(shards, [scans.found[shard] for shard in shards], out, len(scans.missing))


class _Scans:
    """Reads those shards that are not known yet."""

    def __init__(self, shards: Sequence[Path], out: Path, known: dict[Path, _Shard]) -> None:
        self.found: dict[Path, _Shard] = {}
        self._identity: dict[Path, tuple[int, int]] = {}
        for shard in shards:
            status = regular(shard).stat()
            self._identity[shard] = status.st_size, status.st_mtime_ns
            earlier = known.get(shard) or _read_part(_part(out, shard))
            if earlier is not None and earlier.identity == self._identity[shard]:
                self.found[shard] = earlier
        self.missing = [shard for shard in self._identity if shard not in self.found]
        self._out, self._stop, self._lock = out, threading.Event(), threading.Lock()
        self._passed_bytes = 0

    def run(self, workers: int, progress: Progress) -> None:
        """Scan them all."""
        total = sum(self._identity[shard][0] for shard in self.missing)
        in_threads(
            self._scan,
            self.missing,
            workers=workers,
            stop=self._stop,
            progress=lambda: progress(self._passed_bytes, total),
        )

    def _scan(self, shard: Path) -> None:
        with paths_in_one_line(shard), shard.open("rb", buffering=0) as file:
            status = os.fstat(file.fileno())
            _refuse_compressed(shard, file.read(8))
            scan, parts, at = HeaderScan(file.fileno(), status.st_size), [], 0
            while not (scan.is_finished or self._stop.is_set()):
                parts.append(scan.next_images())
                self._count(scan.at - at)
                at = scan.at
            if self._stop.is_set():
                return
            if not scan.is_tar:
                raise UserError(f"{shard}: not a tar file: it begins with no header. Leave it out of the shards.")
            self._count(status.st_size - at)
            identity = status.st_size, status.st_mtime_ns
            found = _Shard(identity, np.concatenate(parts), scan.skipped, scan.ended_early)
        with whole_file(_part(self._out, shard), durable=False) as part:
            notes = np.frombuffer(json.dumps({**found.notes, "path": str(shard)}).encode(), np.uint8)
            np.savez(part, places=found.places, notes=notes)
        self.found[shard] = found

    def _count(self, passed: int) -> None:
        with self._lock:
            self._passed_bytes += passed


def _refuse_compressed(shard: Path, start: bytes) -> None:
    for magic, (kind, unpack) in _COMPRESSED.items():
        if start.startswith(magic):
            raise UserError(
                f"{shard}: compressed ({kind}), so that no image can be read without all before it. Unpack it "
                f"once ('{unpack} FILE'), then index the .tar file."
            )


def _refuse_packed(shards: Sequence[Path]) -> None:
    """Refuse shards that have an index already. Another one would be without their boxes and labels."""
    for folder in dict.fromkeys(shard.parent for shard in shards):
        if (folder / PACK_FILE).exists():
            raise UserError(
                f"{folder}: holds shards that 'python cli.py pack' wrote; its index has their boxes and labels, which "
                f"a new index would not have. Use it as it is: data.source=shards, data.root={folder}"
            )


def _part(out: Path, shard: Path) -> Path:
    return out / INDEX_PARTS / f"{hashlib.sha256(os.fsencode(shard)).hexdigest()[:32]}.npz"


def _read_part(file: Path) -> _Shard | None:
    """What an interrupted call found in a shard; None if it left nothing for this shard."""
    try:
        with np.load(file) as part:
            return _Shard.of_notes(json.loads(part["notes"].tobytes()), part["places"])
    except (OSError, ValueError, KeyError, TypeError, EOFError, zipfile.BadZipFile):
        return None


def _claim(out: Path) -> dict[Path, _Shard]:
    """Prepare the folder. Returns the shards that an earlier call indexed."""
    is_index = _is_foreign_index(out)
    if (
        out.exists()
        and not is_index
        and (not out.is_dir() or {file.name for file in out.iterdir()} - {INDEX_PARTS, INDEX_FOLDER})
    ):
        raise UserError(f"{out}: exists and holds no index of other programs' shards. Name a new or an empty folder.")
    (out / INDEX_FOLDER).mkdir(parents=True, exist_ok=True)
    (out / INDEX_PARTS).mkdir(exist_ok=True)
    return _read_known(out) if is_index else {}


def _is_foreign_index(out: Path) -> bool:
    try:
        return FOLDER in parse_json((out / INDEX_FILE).read_bytes())
    except (OSError, ValueError, TypeError):
        return False


def _read_known(out: Path) -> dict[Path, _Shard]:
    """The shards of a finished index; none if it is damaged."""
    try:
        content = read_index_file(out)
        shards, folder = content["shards"], Path(os.path.abspath(out / content[FOLDER]))  # noqa: PTH100
        first = [0, *accumulate(shard["samples"] for shard in shards)]
        columns = [read_table(out, name, first[-1], content["crc32"][name], how_again(content)) for name in _COLUMNS]
        places = np.stack([np.asarray(column).astype(np.int64) for column in columns], axis=1)
        return {
            folder / shard["file"]: _Shard.of_notes(shard, places[start:stop])
            for shard, (start, stop) in zip(shards, pairwise(first), strict=True)
        }
    except (UserError, KeyError, TypeError, ValueError):
        return {}


def _write_index(paths: Sequence[Path], found: Sequence[_Shard], out: Path, scanned: int) -> Indexed:
    """Join what was found in the shards. The index file is written last; it makes the index usable."""
    places = np.concatenate([shard.places for shard in found])
    skipped: Counter[str] = sum((Counter(shard.skipped) for shard in found), Counter())
    left_out = [(str(path), shard.ended_early) for path, shard in zip(paths, found, strict=True) if shard.ended_early]
    if not len(places):
        told = ", ".join(f"{count} {kind}" for kind, count in skipped.items()) or "nothing"
        why = f" {left_out[0][0]}: {left_out[0][1]}." if left_out else ""
        raise UserError(
            f"{paths[0]}: no .jpg, .jpeg, .png or .webp members in {shards_in_words(len(paths))}; found {told}.{why} "
            "Check the shards."
        )
    folder = Path(os.path.commonpath([path.parent for path in paths]))
    kept = [(path, shard) for path, shard in zip(paths, found, strict=True) if len(shard.places)]
    tables = {name: places[:, number].astype(kind) for number, (name, kind) in enumerate(_COLUMNS.items())}
    checksums = write_tables(out, tables)
    (out / _LEFT_OUT).unlink(missing_ok=True)
    if left_out:
        write_text(out / _LEFT_OUT, "".join(json.dumps({"path": path, "reason": why}) + "\n" for path, why in left_out))
    content = {
        "format": FORMAT,
        "name": folder.name or str(folder),
        FOLDER: str(folder),
        "tables": sorted(tables),
        "crc32": checksums,
        "shards": [
            {"file": str(path.relative_to(folder)), "samples": len(shard.places), **shard.notes} for path, shard in kept
        ],
    }
    write_text(out / INDEX_FILE, json.dumps(content, indent=1) + "\n")
    shutil.rmtree(out / INDEX_PARTS, ignore_errors=True)
    return Indexed(folder, len(places), len(kept), len(paths) - len(kept), scanned, dict(skipped), left_out)
